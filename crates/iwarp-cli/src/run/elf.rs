//! Reads a program's ELF file: the machine, the dynamic loader, and the needed libraries. See
//! elf(5).

use object::Endianness;
use object::elf::{
    DT_NEEDED, DT_NULL, DT_RPATH, DT_RUNPATH, DT_STRSZ, DT_STRTAB, FileHeader64, ProgramHeader64,
};
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _};
use object::read::{ReadCache, ReadRef};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

/// Largest string table that is read. Most have kilobytes; those with C++ symbols have megabytes.
const STRINGS_MAX: u64 = 64 << 20;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Elf {
    /// The file is for this command's processor, and for 64 bits.
    pub(super) native: bool,
    /// The dynamic loader; `None` for statically linked programs.
    pub(super) loader: Option<PathBuf>,
    /// The libraries that the file is linked with.
    pub(super) needed: Vec<OsString>,
    /// Folders that the loader searches before those of `LD_LIBRARY_PATH`.
    pub(super) rpath: Option<OsString>,
    /// Folders that the loader searches after those of `LD_LIBRARY_PATH`.
    pub(super) runpath: Option<OsString>,
}

impl Elf {
    /// Reads a file. Returns `None` if it is not an ELF file.
    ///
    /// # Errors
    /// Returns the system's error, or `InvalidData` for a damaged ELF file.
    pub(super) fn read(path: &Path) -> io::Result<Option<Self>> {
        let file = ReadCache::new(File::open(path)?);
        let Ok(start) = (&file).read_bytes_at(0, 5) else {
            return Ok(None);
        };
        if !start.starts_with(b"\x7fELF") {
            return Ok(None);
        }
        // Anything but ELFCLASS64 is for 32 bits, for which there are no libraries.
        if start[4] != 2 {
            return Ok(Some(Self::default()));
        }
        let parsed = Self::parse(&file);
        let damaged = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        parsed.map(Some).map_err(damaged)
    }

    fn parse(file: &ReadCache<File>) -> Result<Self, String> {
        let header = FileHeader64::<Endianness>::parse(file).map_err(|e| e.to_string())?;
        let endian = header.endian().map_err(|e| e.to_string())?;
        let headers = header
            .program_headers(endian, file)
            .map_err(|e| e.to_string())?;
        let mut elf = Self {
            native: header.e_machine(endian) == machine() && endian == Endianness::default(),
            ..Self::default()
        };
        for segment in headers {
            if let Some(loader) = segment
                .interpreter(endian, file)
                .map_err(|e| e.to_string())?
            {
                elf.loader = Some(OsString::from_vec(loader.to_vec()).into());
            }
        }
        elf.read_dynamic(file, endian, headers)?;
        Ok(elf)
    }

    /// Reads the dynamic section, if there is one.
    fn read_dynamic(
        &mut self,
        file: &ReadCache<File>,
        endian: Endianness,
        headers: &[ProgramHeader64<Endianness>],
    ) -> Result<(), String> {
        let mut entries = Vec::new();
        for segment in headers {
            let dynamic = segment.dynamic(endian, file).map_err(|e| e.to_string())?;
            let dynamic = dynamic.unwrap_or_default().iter();
            let pairs = dynamic.map(|entry| (entry.d_tag(endian), entry.d_val(endian)));
            entries.extend(pairs.take_while(|(tag, _)| *tag != u64::from(DT_NULL)));
        }
        let value = |wanted: u32| {
            let found = entries.iter().find(|(tag, _)| *tag == u64::from(wanted));
            found.map(|(_, value)| *value)
        };
        let (Some(address), Some(size)) = (value(DT_STRTAB), value(DT_STRSZ)) else {
            return Ok(());
        };
        let offset = headers.iter().find_map(|segment| {
            let within = address.checked_sub(segment.p_vaddr(endian))?;
            (segment.p_type(endian) == object::elf::PT_LOAD && within < segment.p_filesz(endian))
                .then(|| segment.p_offset(endian).checked_add(within))?
        });
        let damaged = "the dynamic section is damaged";
        let strings = offset
            .filter(|_| size <= STRINGS_MAX)
            .and_then(|offset| file.read_bytes_at(offset, size).ok())
            .ok_or(damaged)?;
        let text = |offset: u64| {
            let rest = strings.get(usize::try_from(offset).ok()?..)?;
            let len = rest.iter().position(|octet| *octet == 0)?;
            Some(OsString::from_vec(rest[..len].to_vec()))
        };
        for (tag, value) in &entries {
            match u32::try_from(*tag) {
                Ok(DT_NEEDED) => self.needed.push(text(*value).ok_or(damaged)?),
                Ok(DT_RPATH) => self.rpath = Some(text(*value).ok_or(damaged)?),
                Ok(DT_RUNPATH) => self.runpath = Some(text(*value).ok_or(damaged)?),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns `true` if the program's loader is musl's.
    pub(super) fn uses_musl(&self) -> bool {
        let name = self.loader.as_deref().and_then(Path::file_name);
        name.is_some_and(|name| name.as_encoded_bytes().starts_with(b"ld-musl"))
    }
}

/// Returns this command's processor as in the ELF header (`e_machine`).
const fn machine() -> u16 {
    if cfg!(target_arch = "x86_64") {
        object::elf::EM_X86_64
    } else if cfg!(target_arch = "aarch64") {
        object::elf::EM_AARCH64
    } else if cfg!(target_arch = "riscv64") {
        object::elf::EM_RISCV
    } else if cfg!(target_arch = "powerpc64") {
        object::elf::EM_PPC64
    } else if cfg!(target_arch = "s390x") {
        object::elf::EM_S390
    } else {
        object::elf::EM_NONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_file_is_native_and_dynamic() {
        let elf = Elf::read(Path::new("/proc/self/exe")).unwrap().unwrap();
        assert!(elf.native);
        if cfg!(target_env = "gnu") {
            assert!(elf.needed.iter().any(|name| name == "libc.so.6"), "{elf:?}");
            assert!(!elf.uses_musl() && elf.loader.is_some());
        }
    }

    #[test]
    fn other_files_are_no_programs() {
        let path = std::env::temp_dir().join(format!("iwarp-elf-{}", std::process::id()));
        let read = |octets: &[u8]| {
            std::fs::write(&path, octets).unwrap();
            Elf::read(&path)
        };
        assert_eq!(read(b"").unwrap(), None);
        assert_eq!(read(b"#!/bin/sh\n").unwrap(), None);
        assert_eq!(read(b"\x7fELF\x01").unwrap(), Some(Elf::default()));
        let own = std::fs::read("/proc/self/exe").unwrap();
        // No truncation causes a panic.
        for len in [6, 60, 64, 100, 500, 2000] {
            let _ = read(&own[..len]);
        }
        assert!(read(&own[..64]).is_err());
        let mut loader = Elf::default();
        for (path, musl) in [("/lib/ld-musl-x86_64.so.1", true), ("/lib64/ld.so", false)] {
            loader.loader = Some(path.into());
            assert_eq!(loader.uses_musl(), musl);
        }
        std::fs::remove_file(&path).unwrap();
    }
}
