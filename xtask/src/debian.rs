//! Downloads and unpacks Debian packages without installing them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::process::Log;

/// Downloads packages and unpacks them into `dir`, unless an earlier call has done that.
///
/// # Errors
/// If the download or the unpacking fails.
pub fn fetch(dir: &Path, packages: &[String], log: &mut Log) -> Result<()> {
    let done = dir.join("fetched");
    let list = packages.join("\n");
    if std::fs::read_to_string(&done).is_ok_and(|text| text == list) {
        return Ok(());
    }
    let debs = dir.join("debs");
    // Remove the packages of an interrupted attempt, which may have other versions.
    let _ = std::fs::remove_dir_all(&debs);
    std::fs::create_dir_all(&debs)?;
    log.run(
        Command::new("apt-get")
            .current_dir(&debs)
            .args(["-qq", "download"])
            .args(packages),
    )?;
    for file in std::fs::read_dir(&debs)? {
        let file = file?.path();
        log.run(Command::new("dpkg-deb").arg("-x").arg(&file).arg(dir))
            .with_context(|| format!("cannot unpack {}", file.display()))?;
    }
    std::fs::remove_dir_all(&debs)?;
    std::fs::write(done, list)?;
    Ok(())
}

/// Returns the values of a field in apt's output.
pub fn fields<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines()
        .filter_map(move |line| line.strip_prefix(name)?.strip_prefix(": "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_match_whole_names() {
        let text = "Package: a\nVersion: 2-1\nVersionX: 3\n\nPackage: a\nVersion: 1-1\n";
        assert_eq!(fields(text, "Version").collect::<Vec<_>>(), ["2-1", "1-1"]);
    }
}
