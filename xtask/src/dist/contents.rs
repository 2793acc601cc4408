//! What several kinds of artefacts need: an empty folder to prepare them in, and the licences.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use xtask::context::Context;
use xtask::layout::File;

use crate::deb::NOTICES;
use crate::notices;

/// The licences of this project.
const OWN: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];

/// Returns an empty folder below the target folder in which a kind of artefact is prepared.
///
/// # Errors
/// If the earlier folder cannot be removed, or if the new one cannot be created.
pub(super) fn folder(context: &Context, kind: &str) -> Result<PathBuf> {
    let dir = context.target.join(format!("dist-{kind}"));
    match fs::remove_dir_all(&dir) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => fs::create_dir_all(&dir),
    }
    .with_context(|| format!("emptying {}", dir.display()))?;
    Ok(dir)
}

/// Returns the licences of this project and of all foreign crates, to be put into the folder `to`.
/// Writes the latter to the folder `dir`.
///
/// # Errors
/// If the licences cannot be read or written.
pub(super) fn licences(context: &Context, dir: &Path, to: &Path) -> Result<Vec<File>> {
    let foreign = dir.join(NOTICES);
    fs::write(&foreign, notices::text(context)?)?;
    let mut files = vec![File::copy(foreign, to.join(NOTICES))];
    files.extend(OWN.map(|name| File::copy(context.root.join(name), to.join(name))));
    Ok(files)
}
