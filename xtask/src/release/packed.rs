//! Packages the published crates and the programs that use them, and unpacks the packages.
//!
//! The crates become a workspace of their own below the target folder, in which a dependency on one
//! of them is the unpacked package. Development dependencies are removed, because users of a crate
//! do not build them, and they would influence which versions and features cargo selects.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::package;
use xtask::context::Context;
use xtask::process::{Log, cargo};

/// The folder with the programs, relative to the root. Each is a package of the workspace.
const PROGRAMS: &str = "packaging/programs";

/// A package that cargo has written, unpacked.
pub(super) struct Unpacked {
    pub(super) name: String,
    /// The folder with its manifest.
    pub(super) folder: PathBuf,
    /// Cargo's metadata of the crate in the workspace.
    pub(super) metadata: Value,
}

/// The unpacked packages.
pub(super) struct Packed {
    /// The published crates.
    pub(super) crates: Vec<Unpacked>,
    /// The programs, which are not published.
    pub(super) programs: Vec<Unpacked>,
    /// The folder with the workspace of the published crates.
    pub(super) workspace: PathBuf,
    /// The folder of the programs. It is outside of the work tree, and is removed at the end.
    _outside: TemporaryFolder,
}

impl Packed {
    /// Packages and unpacks everything. Files that are not committed are packaged as well; the
    /// check `publish` refuses them.
    ///
    /// # Errors
    /// If cargo or tar fail.
    pub(super) fn new(context: &Context, log: &mut Log) -> Result<Self> {
        let (crates, programs) = (package::published(context)?, programs(context)?);
        let mut package = cargo(&context.root);
        package.args(["package", "--locked", "--no-verify", "--allow-dirty"]);
        for metadata in crates.iter().chain(&programs) {
            package.args(["--package", text(metadata, "name")?]);
        }
        log.run(&mut package)?;

        let workspace = context.target.join("xtask-release/packages");
        if workspace.exists() {
            fs::remove_dir_all(&workspace)?;
        }
        fs::create_dir_all(&workspace)?;
        let outside = TemporaryFolder::new("programs")?;
        let crates = unpack(context, log, crates, &workspace)?;
        let programs = unpack(context, log, programs, outside.path())?;
        for package in &crates {
            let manifest = package.folder.join("Cargo.toml");
            let text = fs::read_to_string(&manifest)?;
            fs::write(&manifest, without_development(&text))?;
        }
        let packed = Self {
            crates,
            programs,
            workspace,
            _outside: outside,
        };
        fs::write(packed.workspace.join("Cargo.toml"), packed.root_manifest())?;
        log.say(format!("{} packages", packed.crates.len()));
        Ok(packed)
    }

    /// Returns a cargo command in the workspace of the published crates, with a target folder of
    /// its own. Warnings are errors.
    pub(super) fn cargo(&self, context: &Context) -> Command {
        let mut command = cargo(&self.workspace);
        self.set_environment(context, &mut command);
        command
    }

    /// Sets the variables of [`Packed::cargo`].
    pub(super) fn set_environment(&self, context: &Context, command: &mut Command) {
        command
            .env(
                "CARGO_TARGET_DIR",
                context.target.join("xtask-release/build"),
            )
            .env("RUSTFLAGS", "-Dwarnings");
    }

    /// Removes the lock file, so that cargo selects versions anew, as for a user's new project.
    pub(super) fn forget_versions(&self) -> Result<()> {
        match fs::remove_file(self.workspace.join("Cargo.lock")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Returns the arguments that make cargo use the unpacked packages instead of the registry's.
    pub(super) fn patches(&self) -> impl Iterator<Item = String> {
        self.crates.iter().flat_map(|package| {
            let (name, folder) = (&package.name, package.folder.display());
            let patch = format!("patch.crates-io.{name}.path=\"{folder}\"");
            ["--config".to_owned(), patch]
        })
    }

    /// Returns the manifest of the workspace of the published crates.
    fn root_manifest(&self) -> String {
        let mut text = String::from("[workspace]\nresolver = \"3\"\nmembers = [\"*-*\"]\n");
        text.push_str("\n[patch.crates-io]\n");
        for package in &self.crates {
            let (name, folder) = (&package.name, package.folder.display());
            text.push_str(&format!("{name} = {{ path = \"{folder}\" }}\n"));
        }
        text
    }
}

/// Returns a field of a package's metadata.
pub(super) fn text<'a>(metadata: &'a Value, field: &str) -> Result<&'a str> {
    let value = metadata[field].as_str();
    value.with_context(|| format!("the output of cargo metadata has no {field}"))
}

/// Returns cargo's metadata of each program.
fn programs(context: &Context) -> Result<Vec<Value>> {
    let folder = context.root.join(PROGRAMS);
    let mut programs = package::members(context)?;
    programs.retain(|package| {
        let manifest = package["manifest_path"].as_str();
        manifest.is_some_and(|path| Path::new(path).starts_with(&folder))
    });
    if programs.is_empty() {
        bail!("there are no programs in {PROGRAMS}");
    }
    Ok(programs)
}

/// Unpacks packages into `to`. Files get the current time: cargo gives all files of a package the
/// same time, and would not notice that they changed since the last run.
fn unpack(
    context: &Context,
    log: &mut Log,
    packages: Vec<Value>,
    to: &Path,
) -> Result<Vec<Unpacked>> {
    let mut unpacked = Vec::new();
    for metadata in packages {
        let name = text(&metadata, "name")?.to_owned();
        let folder = format!("{name}-{}", text(&metadata, "version")?);
        let file = context
            .target
            .join("package")
            .join(format!("{folder}.crate"));
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--gzip", "--touch", "--file"])
            .arg(file);
        log.run(tar.arg("--directory").arg(to))?;
        let folder = to.join(folder);
        // A user's project selects versions itself.
        fs::remove_file(folder.join("Cargo.lock")).context("a package has no Cargo.lock")?;
        unpacked.push(Unpacked {
            name,
            folder,
            metadata,
        });
    }
    Ok(unpacked)
}

/// Returns a packaged manifest without its development dependencies. Cargo has written it, so each
/// table has a heading of its own.
fn without_development(manifest: &str) -> String {
    let mut out = String::new();
    let mut inside = false;
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line.contains("dev-dependencies");
        }
        if !inside {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

/// A folder outside of the work tree, removed with its contents when it is dropped.
pub(super) struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    /// Creates a folder whose name contains `purpose`.
    ///
    /// # Errors
    /// If the folder cannot be created.
    pub(super) fn new(purpose: &str) -> Result<Self> {
        let name = format!("iwarp-{purpose}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }

    /// Returns the path of the folder.
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn development_dependencies_are_removed() {
        let manifest = "[package]\nname = \"a\"\n\n[dependencies.b]\nversion = \"1\"\n\n\
            [dev-dependencies.c]\nversion = \"2\"\n\n\
            [target.\"cfg(x)\".dev-dependencies.d]\nversion = \"3\"\n\n[lints.rust]\ne = 4\n";
        let left = without_development(manifest);
        assert_eq!(
            left,
            "[package]\nname = \"a\"\n\n[dependencies.b]\nversion = \"1\"\n\n[lints.rust]\ne = 4\n"
        );
    }
}
