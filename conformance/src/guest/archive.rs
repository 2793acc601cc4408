//! Writes the guest's file system as a cpio archive ("newc"), without root and without the cpio
//! program.

use std::fs::Metadata;
use std::io::{BufWriter, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context as _, Result};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

/// Archives all files below `root`. In the archive, they belong to the user root.
pub(crate) fn write(root: &Path, file: &Path) -> Result<()> {
    let out = std::fs::File::create(file).with_context(|| file.display().to_string())?;
    let mut out = BufWriter::new(out);
    let mut inode = 0;
    write_dir(root, root, &mut out, &mut inode)?;
    write_entry(&mut out, 0, "TRAILER!!!", 0, &[])?;
    out.flush()?;
    Ok(())
}

fn write_dir(root: &Path, dir: &Path, out: &mut impl Write, inode: &mut u32) -> Result<()> {
    let mut paths: Vec<_> = std::fs::read_dir(dir)?
        .map(|write_entry| write_entry.map(|write_entry| write_entry.path()))
        .collect::<std::io::Result<_>>()?;
    paths.sort();
    for path in paths {
        let metadata: Metadata = path.symlink_metadata()?;
        let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
        let permissions = metadata.permissions().mode() & 0o7777;
        *inode += 1;
        if metadata.is_dir() {
            write_entry(out, *inode, &name, DIRECTORY | permissions, &[])?;
            write_dir(root, &path, out, inode)?;
        } else if metadata.is_symlink() {
            let target = std::fs::read_link(&path)?;
            write_entry(
                out,
                *inode,
                &name,
                SYMLINK | 0o777,
                target.to_string_lossy().as_bytes(),
            )?;
        } else {
            debug_assert!(metadata.mode() & REGULAR != 0);
            write_entry(
                out,
                *inode,
                &name,
                REGULAR | permissions,
                &std::fs::read(&path)?,
            )?;
        }
    }
    Ok(())
}

/// Writes one entry: magic, thirteen hexadecimal fields, the name with NUL, and the data. Name and
/// data are padded to four bytes.
fn write_entry(
    out: &mut impl Write,
    inode: u32,
    name: &str,
    mode: u32,
    data: &[u8],
) -> std::io::Result<()> {
    let size = u32::try_from(data.len()).map_err(std::io::Error::other)?;
    let name_size = u32::try_from(name.len() + 1).map_err(std::io::Error::other)?;
    let fields = [inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
    write!(out, "070701")?;
    for field in fields {
        write!(out, "{field:08X}")?;
    }
    write!(out, "{name}\0")?;
    pad(out, 110 + name.len() + 1)?;
    out.write_all(data)?;
    pad(out, data.len())
}

fn pad(out: &mut impl Write, len: usize) -> std::io::Result<()> {
    out.write_all(&[0; 3][..len.next_multiple_of(4) - len])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned() {
        let mut out = Vec::new();
        write_entry(&mut out, 1, "bin/x", REGULAR | 0o755, b"hello").unwrap();
        write_entry(&mut out, 0, "TRAILER!!!", 0, &[]).unwrap();
        assert_eq!(&out[..6], b"070701");
        assert_eq!(&out[14..22], b"000081ED");
        assert_eq!(&out[110..116], b"bin/x\0");
        assert_eq!(&out[116..121], b"hello");
        assert_eq!(&out[124..130], b"070701");
        assert_eq!(out.len() % 4, 0);
    }
}
