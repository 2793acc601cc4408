//! A compiler for kernel code, with the source of its own library.
//!
//! `core` and `alloc` are compiled here with the kernel's flags, so the source has to be there, and
//! it has to be that of the very same version. Rustup's compiler has it when the component
//! `rust-src` is installed. Otherwise Debian's packages are fetched and unpacked in the target
//! folder; nothing is installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::Kind;
use crate::context::{Context, find_program};
use crate::debian;
use crate::process::{Log, cargo};

/// The target: no system below, no SSE, no red zone.
pub(crate) const TARGET: &str = "x86_64-unknown-none";

/// What a kernel with Debian's configuration wants of all code. Without the mitigations a module
/// loads, but attackers find a gap.
const FLAGS: &[&str] = &[
    "-Cno-redzone=y",
    "-Ccode-model=kernel",
    "-Crelocation-model=static",
    "-Cforce-unwind-tables=n",
    "-Cjump-tables=n",
    // The module loader knows no relocation by way of the global offset table.
    "-Zplt=yes",
    "-Zcf-protection=branch",
    "-Zfunction-return=thunk-extern",
    "-Zretpoline-external-thunk",
    "-Ctarget-feature=+harden-sls-ijmp,+harden-sls-ret",
];

/// In addition, if the kernel's address sanitizer shall check every access, as the kernel's own
/// build has it. The shadow's address is that of x86-64 (`CONFIG_KASAN_SHADOW_OFFSET`). Checks are
/// in line, and variables of the stack are not surrounded, because that would make frames larger.
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
/// Debian's compiler that follows new releases, and the package with its source.
const COMPILER_PACKAGE: &str = "rustc-web";
const SOURCE_PACKAGE: &str = "rust-web-src";

/// A compiler whose library has been compiled for kernel code.
pub(crate) struct Toolchain {
    rustc: PathBuf,
    /// Where the compiler's own libraries are, if the system does not find them.
    libraries: Option<PathBuf>,
    source: PathBuf,
    sysroot: PathBuf,
    flags: Vec<&'static str>,
}

impl Toolchain {
    /// Finds or fetches a compiler and compiles its library, unless that has been done. The inner
    /// error says why there is none.
    ///
    /// # Errors
    /// When the library does not compile.
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
        let wanted = format!("{version}{}", self.flags.join(" "));
        if std::fs::read_to_string(&stamp).is_ok_and(|text| text == wanted) {
            return Ok(());
        }
        log.say(format!(
            "compiling core and alloc by {}",
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

    fn command(&self) -> Command {
        let mut command = Command::new(&self.rustc);
        self.environment(&mut command);
        command
    }

    fn environment(&self, command: &mut Command) {
        // The flags of mitigations are unstable, as they are for the kernel's own Rust code.
        command.env("RUSTC_BOOTSTRAP", "1");
        if let Some(libraries) = &self.libraries {
            command.env("LD_LIBRARY_PATH", libraries);
        }
    }

    /// A cargo command in `dir` that compiles by this compiler for kernel code.
    pub(crate) fn cargo(&self, dir: &Path) -> Command {
        let mut command = cargo(dir);
        self.environment(&mut command);
        let mut flags = vec!["--sysroot".to_owned(), self.sysroot.display().to_string()];
        flags.extend(self.flags.iter().map(|&flag| flag.to_owned()));
        // Between flags stands the octet 31, because a path may have spaces.
        command
            .env("RUSTC", &self.rustc)
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
            .env_remove("RUSTC_WRAPPER")
            .env_remove("RUSTC_WORKSPACE_WRAPPER");
        command
    }
}

type Found = (PathBuf, Option<PathBuf>, PathBuf);

/// The compiler that cargo uses, if it has its library's source.
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

/// Debian's compiler below `dir`, fetched if it is not there. The inner error says why it cannot be
/// had.
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
            "no compiler with its library's source: needs Debian's packages, {advice}"
        )));
    }
    let packages = match packages(context, log)? {
        Some(packages) => packages,
        None => {
            return Ok(Err(format!(
                "apt knows no new {COMPILER_PACKAGE}: add security updates to its sources, {advice}"
            )));
        }
    };
    log.say("fetching Debian's compiler and its library's source");
    std::fs::create_dir_all(dir)?;
    if let Err(error) = debian::fetch(dir, &packages, log) {
        // Without a network there is nothing to check with.
        return Ok(Err(format!(
            "no compiler from Debian ({error:#}), {advice}"
        )));
    }
    if !found.0.is_file() || !found.2.join("core/src/lib.rs").is_file() {
        bail!(
            "the packages {} have no compiler or no library",
            packages.join(", ")
        );
    }
    prune(&root.join("src"))?;
    std::fs::write(&fetched, "")?;
    Ok(Ok(found))
}

/// The source package has the whole compiler; only the library is needed.
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

/// The packages of the compiler, each with its version. `None` if apt knows none that is new
/// enough.
fn packages(context: &Context, log: &mut Log) -> Result<Option<Vec<String>>> {
    let least = least_version(&context.root)?;
    let mut shown = show(COMPILER_PACKAGE, log).unwrap_or_default();
    if context.install && rustix::process::geteuid().is_root() && version(&shown) < Some(least) {
        log.run(Command::new("apt-get").args(["-q", "update"]))?;
        shown = show(COMPILER_PACKAGE, log).unwrap_or_default();
    }
    let Some((major, minor)) = version(&shown).filter(|&version| version >= least) else {
        return Ok(None);
    };
    let exact = debian::fields(&shown, "Version")
        .next()
        .context("no version")?;
    let library = format!("libstd-rust-web-{major}.{minor}");
    let llvm = dependency(&show(&library, log)?, "libllvm")
        .with_context(|| format!("{library} depends on no LLVM"))?;
    Ok(Some(vec![
        format!("{COMPILER_PACKAGE}={exact}"),
        format!("{SOURCE_PACKAGE}={exact}"),
        format!("{library}={exact}"),
        llvm,
    ]))
}

/// What apt says about the newest version of a package.
pub(super) fn show(package: &str, log: &mut Log) -> Result<String> {
    log.run_and_read(Command::new("apt-cache").args(["show", "--no-all-versions", package]))
}

/// The name of the first dependency that begins like this.
pub(super) fn dependency(shown: &str, start: &str) -> Option<String> {
    debian::fields(shown, "Depends")
        .next()?
        .split(',')
        .filter_map(|word| word.split_whitespace().next())
        .find(|name| name.starts_with(start))
        .map(str::to_owned)
}

/// Major and minor number of what apt has.
fn version(shown: &str) -> Option<(u32, u32)> {
    numbers(debian::fields(shown, "Version").next()?)
}

fn numbers(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The oldest compiler that the workspace supports.
fn least_version(root: &Path) -> Result<(u32, u32)> {
    let text = crate::files::read(root, "Cargo.toml")?;
    text.lines()
        .find_map(|line| {
            numbers(
                line.strip_prefix("rust-version = \"")?
                    .trim_end_matches('"'),
            )
        })
        .context("Cargo.toml names no rust-version")
}

/// What a command writes to its standard output.
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
    fn the_workspace_names_its_oldest_compiler() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        assert!(least_version(&root).unwrap() >= (1, 85));
    }
}
