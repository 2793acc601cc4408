//! `iwarp unpack DIR`: writes the command, its libraries and the devices into a folder, for
//! programs in other containers.
//!
//! The folder is on a volume that both containers mount at the same path, and both have the same
//! network interfaces. Then the environment that this command prints is all that the programs need:
//! neither a command in front of them, nor a folder that they can write to.

use super::library::write_if_changed;
use super::{Settings, bundle, devices, own_path, preload, sysfs};
use clap::Args;
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_cli_common::out::line;
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Arguments of `iwarp unpack`.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES:
  iwarp unpack /opt/iwarp                        in an init container, on a shared volume
  docker run --rm -v vol:/opt/iwarp ghcr.io/iwarp-rs/iwarp unpack --as roce /opt/iwarp > iwarp.env
  docker run --rm -v vol:/opt/iwarp --env-file iwarp.env IMAGE ibv_devinfo

The programs must see the directory at the same path, and have the same network interfaces.")]
pub(crate) struct UnpackArgs {
    #[command(flatten)]
    pub(super) settings: Settings,
    /// The directory to write; it is created if it does not exist
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Writes the folder and prints the environment, one variable per line, in the form that
/// `docker run --env-file` reads.
pub(super) fn run(args: &UnpackArgs) -> Result<()> {
    let exe = own_path()?;
    let dir = std::path::absolute(&args.directory).context(args.directory.display())?;
    let command = dir.join("bin/iwarp");
    for name in ["bin", "lib"] {
        folder(&dir.join(name)).context(dir.display())?;
    }
    copy_command(&exe, &command).context(command.display())?;
    let libs = bundle::copy_libraries(&exe, &dir.join("lib/iwarp"))?;
    let mut variables = args.settings.variables(&libs, &command)?;
    let tree = dir.join("devices");
    sysfs::write(&tree, &devices(&variables)?, args.settings.face()).context(tree.display())?;
    variables.push(("IWARP_PATHS", tree.into()));
    preload(&mut variables, &libs.preloads.paths);
    for (name, value) in variables {
        let value = value.to_string_lossy();
        if value.contains('\n') {
            return Err(Error::failed(format!("{name} would contain a line break")));
        }
        line(format_args!("{name}={value}"));
    }
    Ok(())
}

/// Creates a folder that all users may read.
fn folder(dir: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(0o755).create(dir)
}

/// Copies this command, without the libraries that a bundle contains.
fn copy_command(exe: &Path, to: &Path) -> io::Result<()> {
    let len = bundle::command_len(exe)?;
    let mut octets = Vec::new();
    fs::File::open(exe)?.take(len).read_to_end(&mut octets)?;
    write_if_changed(&octets, to)?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o755))
}
