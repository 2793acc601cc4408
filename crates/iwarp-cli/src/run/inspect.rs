//! Finds the file that the kernel executes for a command, and the reasons why a program cannot load
//! our libraries.

use super::elf::Elf;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Longest chain of script interpreters, as in the kernel.
const SCRIPTS_MAX: usize = 5;
/// The part of a script's first line that the kernel reads.
const LINE_MAX: u64 = 256;
/// The attribute that holds a file's capabilities.
const CAPABILITIES: &str = "security.capability";

/// Why a program cannot load our libraries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Obstacle {
    Static,
    Musl,
    /// It is for another processor, or for 32 bits.
    Foreign,
    SetId,
    Capabilities,
    /// It is started by `env -i`.
    Cleared,
}

/// Describes the reason and the remedy.
impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Static => "it is linked statically; use a dynamically linked build",
            Self::Musl => {
                "it is linked with musl, and the libraries need glibc; use a build for glibc"
            }
            Self::Foreign => {
                "it is for another processor or for 32 bits; use a build for this machine"
            }
            Self::SetId => {
                "it is setuid or setgid, so the loader ignores LD_AUDIT and LD_LIBRARY_PATH; run a \
                 copy without that bit"
            }
            Self::Capabilities => {
                "its file has capabilities, so the loader ignores LD_AUDIT and LD_LIBRARY_PATH; \
                 run a copy of the file, without capabilities"
            }
            Self::Cleared => {
                "`env -i` removes LD_AUDIT and LD_LIBRARY_PATH; write `env -i iwarp run -- PROGRAM`"
            }
        })
    }
}

/// The program that a command executes, with the ELF file at the end of its chain of scripts.
#[derive(Debug)]
pub(super) struct Program {
    /// The file that the kernel executes.
    pub(super) file: PathBuf,
    /// The scripts that lead to the file, the outermost first.
    pub(super) scripts: Vec<PathBuf>,
    pub(super) elf: Elf,
    /// `env -i` precedes the file.
    cleared: bool,
}

impl Program {
    /// Finds the program of a command, through `PATH`, scripts and `env`. Returns `None` if it
    /// cannot be inspected; executing the command then gives a better error message.
    pub(super) fn find(command: &[OsString]) -> Option<Self> {
        let mut words = command.to_vec();
        let mut scripts = Vec::new();
        let mut cleared = false;
        // Bounded: each `env` shortens the command, and each script adds a known number of words.
        for _ in 0..=SCRIPTS_MAX {
            let file = look_up(words.first()?)?;
            if file.file_name() == Some(OsStr::new("env")) {
                let (rest, clears) = command_of_env(words.get(1..).unwrap_or_default());
                if !rest.is_empty() {
                    cleared |= clears;
                    words = rest;
                    continue;
                }
            }
            if let Some(elf) = Elf::read(&file).ok()? {
                return Some(Self {
                    file,
                    scripts,
                    elf,
                    cleared,
                });
            }
            let interpreter = interpreter(&file).ok()??;
            let arguments = words.split_off(1);
            words = interpreter;
            words.push(file.clone().into());
            words.extend(arguments);
            scripts.push(file);
        }
        None
    }

    /// Returns why the program cannot load our libraries, if it cannot.
    pub(super) fn obstacle(&self) -> Option<Obstacle> {
        if !self.elf.native {
            return Some(Obstacle::Foreign);
        }
        // The program may be the loader itself: `ld-linux-x86-64.so.2 PROGRAM`.
        let name = self.file.file_name().unwrap_or_default().as_bytes();
        if self.elf.loader.is_none() && !name.starts_with(b"ld-") {
            return Some(Obstacle::Static);
        }
        if self.elf.uses_musl() {
            return Some(Obstacle::Musl);
        }
        raised_rights(&self.file).or_else(|| self.cleared.then_some(Obstacle::Cleared))
    }
}

/// Returns how the program gains rights, if it does. The loader ignores the environment of such a
/// program (`AT_SECURE` in getauxval(3)).
fn raised_rights(file: &Path) -> Option<Obstacle> {
    let meta = fs::metadata(file).ok()?;
    let mode = meta.permissions().mode();
    let user = rustix::process::getuid().as_raw();
    let group = rustix::process::getgid().as_raw();
    let set_user = mode & 0o4000 != 0 && meta.uid() != user;
    // If the group may not execute the file, the setgid bit has another meaning.
    let set_group = mode & 0o2010 == 0o2010 && meta.gid() != group;
    if set_user || set_group {
        return Some(Obstacle::SetId);
    }
    let mut empty: [u8; 0] = [];
    let has_capabilities = rustix::fs::getxattr(file, CAPABILITIES, &mut empty).is_ok();
    // Root has all capabilities anyway, so the file gives it none.
    (has_capabilities && user != 0).then_some(Obstacle::Capabilities)
}

/// Finds the file that `execvp` would execute.
fn look_up(name: &OsStr) -> Option<PathBuf> {
    let usable = |path: &PathBuf| {
        path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
    };
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name)).filter(usable);
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(usable)
}

/// Returns a script's interpreter with its argument.
fn interpreter(file: &Path) -> io::Result<Option<Vec<OsString>>> {
    let mut start = Vec::new();
    File::open(file)?.take(LINE_MAX).read_to_end(&mut start)?;
    Ok(first_line(&start))
}

fn first_line(start: &[u8]) -> Option<Vec<OsString>> {
    let line = start.strip_prefix(b"#!")?;
    let end = line.iter().position(|octet| *octet == b'\n');
    let line = line[..end.unwrap_or(line.len())].trim_ascii();
    let cut = line.iter().position(u8::is_ascii_whitespace);
    let (name, argument) = line.split_at(cut.unwrap_or(line.len()));
    let words = [name, argument.trim_ascii()];
    let words = words.into_iter().filter(|word| !word.is_empty());
    let words: Vec<OsString> = words.map(|word| OsStr::from_bytes(word).into()).collect();
    (!words.is_empty()).then_some(words)
}

/// Returns the command that `env` starts with these arguments, and whether it clears the
/// environment.
fn command_of_env(arguments: &[OsString]) -> (Vec<OsString>, bool) {
    let mut clears = false;
    let mut rest: Vec<OsString> = arguments.to_vec();
    rest.reverse();
    while let Some(word) = rest.pop() {
        let octets = word.as_bytes();
        match octets {
            b"-i" | b"-" | b"--ignore-environment" => clears = true,
            b"--" => break,
            b"-u" | b"-C" | b"--unset" | b"--chdir" => {
                rest.pop();
            }
            _ if octets.starts_with(b"-S") || octets.starts_with(b"--split-string=") => {
                let text = match octets.strip_prefix(b"-S") {
                    Some([]) => rest.pop().unwrap_or_default().as_bytes().to_vec(),
                    Some(text) => text.to_vec(),
                    None => octets["--split-string=".len()..].to_vec(),
                };
                let words = text.split(u8::is_ascii_whitespace);
                let words = words.filter(|word| !word.is_empty());
                let words: Vec<_> = words.map(|word| OsStr::from_bytes(word).into()).collect();
                rest.extend(words.into_iter().rev());
            }
            _ if octets.starts_with(b"-") => {}
            _ if octets.contains(&b'=') => {}
            _ => {
                rest.push(word);
                break;
            }
        }
    }
    rest.reverse();
    (rest, clears)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<OsString> {
        text.split(' ').map(Into::into).collect()
    }

    #[test]
    fn shebang_names_interpreter_and_argument() {
        let read = |text: &str| first_line(text.as_bytes());
        assert_eq!(read("#!/bin/sh\necho"), Some(words("/bin/sh")));
        assert_eq!(read("#! /bin/sh -eu  \n"), Some(words("/bin/sh -eu")));
        let env = vec!["/usr/bin/env".into(), "-S python3 -u".into()];
        assert_eq!(read("#!/usr/bin/env -S python3 -u"), Some(env));
        for other in ["", "#!", "#!\n/bin/sh", "echo", "# !/bin/sh"] {
            assert_eq!(read(other), None, "{other:?}");
        }
    }

    #[test]
    fn env_is_resolved_to_its_command() {
        for (arguments, command, clears) in [
            ("prog -i", "prog -i", false),
            ("A=1 B=2 prog x", "prog x", false),
            ("-u A -C /tmp A=1 prog", "prog", false),
            ("-i A=1 prog", "prog", true),
            ("- prog", "prog", true),
            ("--unset=A -v -- prog", "prog", false),
            ("--split-string=prog x", "prog x", false),
        ] {
            let (rest, cleared) = command_of_env(&words(arguments));
            assert_eq!((rest, cleared), (words(command), clears), "{arguments}");
        }
        let split = ["-S", "-i A=1 prog -x", "y"].map(OsString::from);
        assert_eq!(command_of_env(&split), (words("prog -x y"), true));
        assert_eq!(command_of_env(&words("A=1")).0, Vec::<OsString>::new());
    }
}
