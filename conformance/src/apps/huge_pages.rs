//! Reserves huge pages while a case runs, for programs that map them. Needs root.

use std::fs;
use std::path::{Path, PathBuf};

/// The file with the kernel's number of reserved 2 MiB pages.
const RESERVED: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

/// Additionally reserved pages. Dropping the value releases them.
pub(super) struct HugePages {
    file: PathBuf,
    added: u64,
}

impl HugePages {
    /// Reserves up to `number` pages. Returns `None` if the machine does not support huge pages, or
    /// the user may not reserve them.
    pub(super) fn reserve(number: u64) -> Option<Self> {
        Self::reserve_in(Path::new(RESERVED), number)
    }

    fn reserve_in(file: &Path, number: u64) -> Option<Self> {
        let before = read(file)?;
        write(file, before.checked_add(number)?)?;
        // The kernel may reserve fewer pages than requested.
        let added = read(file)?.saturating_sub(before);
        let file = file.to_path_buf();
        Some(Self { file, added })
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // Subtract only our pages: others may have reserved pages in the meantime.
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
    fn release_keeps_reservations_of_others() {
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
