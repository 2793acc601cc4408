//! Huge pages for programs that map some: reserved by root for as long as a case runs.

use std::fs;
use std::path::{Path, PathBuf};

/// The kernel's number of reserved pages of 2 MiB.
const RESERVED: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// Additionally reserved pages. Dropping the value releases them.
pub(super) struct HugePages {
    file: PathBuf,
    added: u64,
}

impl HugePages {
    /// Reserves up to this number of pages. Returns `None` if the machine has no such pages, or
    /// this user may not reserve them.
    pub(super) fn reserve(number: u64) -> Option<Self> {
        Self::reserve_in(Path::new(RESERVED), number)
    }

    fn reserve_in(file: &Path, number: u64) -> Option<Self> {
        let before = read(file)?;
        write(file, before.checked_add(number)?)?;
        // The kernel reserves as many as it finds.
        let added = read(file)?.saturating_sub(before);
        let file = file.to_path_buf();
        Some(Self { file, added })
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // Reservations of others in the meantime stay.
        if let Some(now) = read(&self.file) {
            let _ = write(&self.file, now.saturating_sub(self.added));
        }
    }
}

fn read(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn write(file: &Path, number: u64) -> Option<()> {
    fs::write(file, number.to_string()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_restores_number() {
        let name = format!("iwarp-huge-pages-{}", std::process::id());
        let file = std::env::temp_dir().join(name);
        assert!(HugePages::reserve_in(&file, 8).is_none(), "no such pages");
        fs::write(&file, "3\n").unwrap();
        let pages = HugePages::reserve_in(&file, 8).unwrap();
        assert_eq!(read(&file), Some(11));
        // Another process reserves two.
        write(&file, 13).unwrap();
        drop(pages);
        assert_eq!(read(&file), Some(5));
        fs::remove_file(&file).unwrap();
    }
}
