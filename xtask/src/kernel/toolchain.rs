//! Finds a compiler for kernel code, with the source of its library.
//!
//! `core` and `alloc` are compiled here with the kernel's flags, so the source of the same version
//! is needed. Rustup's compiler has it if the component `rust-src` is installed. Otherwise,
//! Debian's packages are downloaded and unpacked in the target folder, without installing them.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::Kind;
use crate::context::{Context, find_program};
use crate::debian;
use crate::process::{Log, cargo};

/// The target: no operating system, no SSE, no red zone.
pub(crate) const TARGET: &str = "x86_64-unknown-none";

/// The flags that a kernel with Debian's configuration requires of all code. A module without the
/// mitigations would load, but would be open to attacks.
const FLAGS: &[&str] = &[
    "-Cno-redzone=y",
    "-Ccode-model=kernel",
    "-Crelocation-model=static",
    "-Cforce-unwind-tables=n",
    "-Cjump-tables=n",
    // The module loader does not support relocations through the global offset table.
    "-Zplt=yes",
    "-Zcf-protection=branch",
    "-Zfunction-return=thunk-extern",
    "-Zretpoline-external-thunk",
    "-Ctarget-feature=+harden-sls-ijmp,+harden-sls-ret",
];

/// Additional flags for the kernel's address sanitizer, as in the kernel's own build. The address
/// of the shadow memory is that of x86-64 (`CONFIG_KASAN_SHADOW_OFFSET`). Checks are inline.
/// Variables on the stack have no red zones, because these would enlarge the frames.
const CHECKED_FLAGS: &[&str] = &[
    "-Zsanitizer=kernel-address",
    "-Zsanitizer-recover=kernel-address",
    "-Cllvm-args=-asan-mapping-offset=0xdffffc0000000000",
    "-Cllvm-args=-asan-instrumentation-with-call-threshold=10000",
    "-Cllvm-args=-asan-kernel-mem-intrinsic-prefix=1",
    "-Cllvm-args=-asan-stack=0",
    "-Cllvm-args=-asan-globals=0",
];

/// The folder of the library's source below a compiler's system root.
const SOURCE: &str = "lib/rustlib/src/rust/library";
/// Debian's package with a recent compiler, and the package with its source.
const COMPILER_PACKAGE: &str = "rustc-web";
const SOURCE_PACKAGE: &str = "rust-web-src";

/// A compiler whose library has been compiled for kernel code.
pub(crate) struct Toolchain {
    rustc: PathBuf,
    /// The folder of the compiler's own libraries, unless the loader finds them itself.
    libraries: Option<PathBuf>,
    source: PathBuf,
    sysroot: PathBuf,
    flags: Vec<&'static str>,
}

impl Toolchain {
    /// Finds or downloads a compiler and compiles its library, unless an earlier call has done
    /// that. The inner error is the reason why this machine has no compiler.
    ///
    /// # Errors
    /// If the library does not compile.
    pub(crate) fn get(
        context: &Context,
        kind: Kind,
        log: &mut Log,
    ) -> Result<Result<Self, String>> {
        let dir = context.target.join("kernel");
        let found = match installed() {
            Some(found) => Ok(found),
            None => debian(context, &dir.join("toolchain"), log)?,
        };
        let (rustc, libraries, source) = match found {
            Ok(found) => found,
            Err(why) => return Ok(Err(why)),
        };
        let toolchain = Self {
            rustc,
            libraries,
            source,
            sysroot: dir.join(format!("sysroot{}", kind.suffix())),
            flags: match kind {
                Kind::Plain => FLAGS.to_vec(),
                Kind::Checked => [FLAGS, CHECKED_FLAGS].concat(),
            },
        };
        toolchain.compile_core(&context.root, log)?;
        Ok(Ok(toolchain))
    }

    /// Compiles `core` and `alloc`.
    fn compile_core(&self, root: &Path, log: &mut Log) -> Result<()> {
        let version = output(self.command().arg("-vV"))?;
        let stamp = self.sysroot.join("built-with");
        let remapped = self.remapped(root);
        let wanted = format!("{version}{} without paths", self.flags.join(" "));
        if std::fs::read_to_string(&stamp).is_ok_and(|text| text == wanted) {
            return Ok(());
        }
        log.say(format!(
            "compiling core and alloc with {}",
            version.lines().next().unwrap_or_default()
        ));
        if self.sysroot.exists() {
            std::fs::remove_dir_all(&self.sysroot)?;
        }
        let out = self.sysroot.join("lib/rustlib").join(TARGET).join("lib");
        std::fs::create_dir_all(&out)?;
        for (name, file) in [
            ("core", self.source.join("core/src/lib.rs")),
            (
                "compiler_builtins",
                root.join("kernel/rust/compiler_builtins.rs"),
            ),
            ("alloc", self.source.join("alloc/src/lib.rs")),
        ] {
            log.run(
                self.command()
                    .args(["--crate-name", name, "--crate-type", "rlib"])
                    .args(["--edition", "2024", "--target", TARGET])
                    .args(["-Cpanic=abort", "-Copt-level=2", "-Ccodegen-units=1"])
                    // Machine code is generated once, when everything is linked.
                    .arg("-Clinker-plugin-lto")
                    .args(["--cap-lints", "allow"])
                    .args(&self.flags)
                    .args(&remapped)
                    .arg("--sysroot")
                    .arg(&self.sysroot)
                    .arg("--out-dir")
                    .arg(&out)
                    .arg(file),
            )
            .with_context(|| format!("{name} does not compile"))?;
        }
        std::fs::write(stamp, wanted)?;
        Ok(())
    }

    /// Returns the options that keep this machine's paths out of the object, so that builds in two
    /// folders are identical.
    fn remapped(&self, root: &Path) -> [String; 2] {
        [
            format!("--remap-path-prefix={}=/iwarp", root.display()),
            format!("--remap-path-prefix={}=/rustc", self.source.display()),
        ]
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.rustc);
        self.environment(&mut command);
        command
    }

    fn environment(&self, command: &mut Command) {
        // The flags of mitigations are unstable. The kernel's own Rust code needs this as well.
        command.env("RUSTC_BOOTSTRAP", "1");
        if let Some(libraries) = &self.libraries {
            command.env("LD_LIBRARY_PATH", libraries);
        }
    }

    /// Returns a cargo command in `dir` that compiles kernel code with this compiler.
    pub(crate) fn cargo(&self, dir: &Path) -> Command {
        let mut command = cargo(dir);
        self.environment(&mut command);
        let mut flags = vec!["--sysroot".to_owned(), self.sysroot.display().to_string()];
        flags.extend(self.flags.iter().map(|&flag| flag.to_owned()));
        flags.extend(self.remapped(dir));
        // The octet 31 separates the flags, because a path may contain spaces.
        command
            .env("RUSTC", &self.rustc)
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
            .env_remove("RUSTC_WRAPPER")
            .env_remove("RUSTC_WORKSPACE_WRAPPER");
        command
    }
}

/// The compiler, the folder of its own libraries, and the source of Rust's library.
type Found = (PathBuf, Option<PathBuf>, PathBuf);

/// Returns the compiler that cargo uses, if the source of its library is installed.
fn installed() -> Option<Found> {
    let rustc: PathBuf = std::env::var_os("RUSTC")
        .unwrap_or_else(|| "rustc".into())
        .into();
    let sysroot = output(Command::new(&rustc).args(["--print", "sysroot"])).ok()?;
    let source = Path::new(sysroot.trim()).join(SOURCE);
    source
        .join("core/src/lib.rs")
        .is_file()
        .then_some((rustc, None, source))
}

/// Returns Debian's compiler below `dir`, which is downloaded if necessary. The inner error is the
/// reason why it is not available.
fn debian(context: &Context, dir: &Path, log: &mut Log) -> Result<Result<Found, String>> {
    let root = dir.join("usr");
    let found = (
        root.join("bin/rustc"),
        Some(root.join("lib/x86_64-linux-gnu")),
        root.join(SOURCE),
    );
    let fetched = dir.join("complete");
    if fetched.exists() {
        return Ok(Ok(found));
    }
    let advice = "or: rustup component add rust-src";
    if find_program("apt-get").is_none() || find_program("dpkg-deb").is_none() {
        return Ok(Err(format!(
            "no Rust compiler with its library's source: Debian's packages are needed, {advice}"
        )));
    }
    let packages = match packages(context, log)? {
        Some(packages) => packages,
        None => {
            return Ok(Err(format!(
                "apt offers no recent {COMPILER_PACKAGE}: add security updates to apt's sources, \
                 {advice}"
            )));
        }
    };
    log.say("fetching Debian's compiler and its library's source");
    std::fs::create_dir_all(dir)?;
    if let Err(error) = debian::fetch(dir, &packages, log) {
        // Without a network, the step is skipped.
        return Ok(Err(format!(
            "cannot download Debian's compiler ({error:#}), {advice}"
        )));
    }
    if !found.0.is_file() || !found.2.join("core/src/lib.rs").is_file() {
        bail!(
            "the packages {} do not contain the compiler and the library's source",
            packages.join(", ")
        );
    }
    prune(&root.join("src"))?;
    std::fs::write(&fetched, "")?;
    Ok(Ok(found))
}

/// Removes everything except the library from the unpacked source package.
fn prune(sources: &Path) -> Result<()> {
    for tree in std::fs::read_dir(sources)? {
        for entry in std::fs::read_dir(tree?.path())? {
            let entry = entry?;
            if entry.file_name() != "library" && entry.file_type()?.is_dir() {
                std::fs::remove_dir_all(entry.path())?;
            }
        }
    }
    Ok(())
}

/// Returns the packages of the compiler, each with its version, or `None` if apt offers no version
/// that is new enough.
fn packages(context: &Context, log: &mut Log) -> Result<Option<Vec<String>>> {
    let oldest = oldest_version(&context.root)?;
    let mut shown = show(COMPILER_PACKAGE, log).unwrap_or_default();
    if context.install && rustix::process::geteuid().is_root() && version(&shown) < Some(oldest) {
        log.run(Command::new("apt-get").args(["-q", "update"]))?;
        shown = show(COMPILER_PACKAGE, log).unwrap_or_default();
    }
    let Some((major, minor)) = version(&shown).filter(|&version| version >= oldest) else {
        return Ok(None);
    };
    let exact = debian::fields(&shown, "Version")
        .next()
        .context("no version")?;
    let library = format!("libstd-rust-web-{major}.{minor}");
    let llvm = dependency(&show(&library, log)?, "libllvm")
        .with_context(|| format!("{library} does not depend on libllvm"))?;
    Ok(Some(vec![
        format!("{COMPILER_PACKAGE}={exact}"),
        format!("{SOURCE_PACKAGE}={exact}"),
        format!("{library}={exact}"),
        llvm,
    ]))
}

/// Returns apt's description of the newest version of a package.
pub(super) fn show(package: &str, log: &mut Log) -> Result<String> {
    log.run_and_read(Command::new("apt-cache").args(["show", "--no-all-versions", package]))
}

/// Returns the name of the first dependency that starts with `start`.
pub(super) fn dependency(shown: &str, start: &str) -> Option<String> {
    debian::fields(shown, "Depends")
        .next()?
        .split(',')
        .filter_map(|word| word.split_whitespace().next())
        .find(|name| name.starts_with(start))
        .map(str::to_owned)
}

/// Returns major and minor number of the version in apt's description.
fn version(shown: &str) -> Option<(u32, u32)> {
    numbers(debian::fields(shown, "Version").next()?)
}

fn numbers(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Returns the oldest compiler that the workspace supports.
fn oldest_version(root: &Path) -> Result<(u32, u32)> {
    let text = crate::files::read(root, "Cargo.toml")?;
    text.lines()
        .find_map(|line| {
            numbers(
                line.strip_prefix("rust-version = \"")?
                    .trim_end_matches('"'),
            )
        })
        .context("Cargo.toml has no rust-version")
}

/// Runs rustc and returns its standard output.
fn output(command: &mut Command) -> Result<String> {
    let output = command.output().context("cannot start rustc")?;
    if !output.status.success() {
        bail!("rustc: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: &str = "Package: libstd-rust-web-1.96\nVersion: 1.96.0+dfsg1-1~deb12u2\n\
        Depends: libc6 (>= 2.34), libgcc-s1 (>= 4.2), libllvm22, libstdc++6 (>= 11)\n";

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(version(SHOWN), Some((1, 96)));
        assert!(numbers("1.100.0") > numbers("1.96.0"));
        assert!(version("Package: none\n") < Some((1, 0)));
    }

    #[test]
    fn dependencies_are_found_without_their_versions() {
        assert_eq!(dependency(SHOWN, "libgcc").as_deref(), Some("libgcc-s1"));
        assert_eq!(dependency(SHOWN, "libllvm").as_deref(), Some("libllvm22"));
        assert_eq!(dependency(SHOWN, "zlib"), None);
    }

    #[test]
    fn workspace_has_oldest_compiler() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        assert!(oldest_version(&root).unwrap() >= (1, 85));
    }
}
