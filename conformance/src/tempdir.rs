//! A temporary directory.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use anyhow::Result;

/// A directory that all users may read. Dropping the value removes it.
pub(crate) struct TempDir {
    pub(crate) path: PathBuf,
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

pub(crate) fn tempdir() -> Result<TempDir> {
    let path = std::env::temp_dir().join(format!("iwarp-apps-{}", std::process::id()));
    std::fs::create_dir(&path)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(TempDir { path })
}
