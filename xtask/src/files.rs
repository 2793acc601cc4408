//! The files of the tree, as git sees them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// Returns all files that are committed or that git would add, except ignored files. Paths are
/// relative to the root and sorted.
///
/// # Errors
/// If git is missing, or if `root` is not a work tree.
pub fn listed(root: &Path) -> Result<Vec<String>> {
    let output = Command::new("git")
        .current_dir(root)
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .output()
        .context("cannot start git")?;
    if !output.status.success() {
        bail!(
            "git ls-files failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    let mut files: Vec<String> = output
        .stdout
        .split(|&byte| byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| String::from_utf8_lossy(name).into_owned())
        // A file may be deleted but still in the index. Links are left out, because their targets
        // are listed themselves.
        .filter(|name| {
            let meta = root.join(name).symlink_metadata();
            meta.is_ok_and(|meta| meta.is_file())
        })
        .collect();
    files.sort_unstable();
    files.dedup();
    Ok(files)
}

/// Path prefixes of files that programs or other projects wrote.
const FOREIGN: &[&str] = &[
    "Cargo.lock",
    "bench/compare/Cargo.lock",
    "bench/compare/async-rdma/Cargo.lock",
    "rfcs/rfc",
    "fuzz/seeds/",
    "fuzz/host/seeds/",
];
/// Suffixes of binary files.
const BINARY: &[&str] = &[".pcap", ".pcapng", ".bin", ".png"];

/// Returns the text files among [`listed`] that this project's developers write.
///
/// # Errors
/// As [`listed`].
pub fn own_texts(root: &Path) -> Result<Vec<String>> {
    let mut files = listed(root)?;
    files.retain(|file| is_own_text(file));
    Ok(files)
}

fn is_own_text(file: &str) -> bool {
    !FOREIGN.iter().any(|start| file.starts_with(start))
        && !BINARY.iter().any(|end| file.ends_with(end))
}

/// Reads a text file. Octets that are not UTF-8 are replaced, so reading a binary file is no error.
///
/// # Errors
/// If the file cannot be read.
pub fn read(root: &Path, file: &str) -> Result<String> {
    let bytes = std::fs::read(root.join(file)).with_context(|| format!("cannot read {file}"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_files_are_left_out() {
        assert!(is_own_text("README.md") && is_own_text("crates/iwarp/src/lib.rs"));
        assert!(!is_own_text("rfcs/rfc5040.txt") && !is_own_text("Cargo.lock"));
        assert!(is_own_text("rfcs/exceptions/rfc5040.txt") && !is_own_text("a.pcap"));
    }

    /// GitLab can cache only folders inside the work tree, so its jobs keep the crates that cargo
    /// fetches there. If git did not ignore them, `tidy` would check them.
    #[test]
    fn cargo_home_of_ci_is_ignored() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let ci = read(&root, ".gitlab-ci.yml").unwrap();
        let home = ci
            .lines()
            .find_map(|line| line.trim().strip_prefix("CARGO_HOME: $CI_PROJECT_DIR/"))
            .expect("a folder that is cached");
        let entry = format!("/{home}");
        for file in [".gitignore", ".containerignore"] {
            let ignored = read(&root, file).unwrap();
            assert!(ignored.lines().any(|line| line == entry), "{file}: {entry}");
        }
    }
}
