//! The directories and names of statistics sockets, and the checks whether a socket is trusted.
//!
//! Each process has a Unix socket in the directory of `IWARP_STAT`. The default is `/run/user/UID`,
//! or `/tmp` if the socket cannot be created there. Its name is `iwarp-stat.PID.RANDOM` and its
//! mode is 0600, so only the same user and root can connect. Other users who can write to `/tmp`
//! cannot interfere:
//!
//! * the name cannot be guessed, so no other user can create it first;
//! * a client opens the directory entry without following symbolic links, checks the opened entry,
//!   and connects to it, and not to its name;
//! * a client skips entries of other users, unless it is root, and sockets whose process runs as
//!   another user than the entry's owner.
//!
//! A killed process leaves its entry behind. The next client removes it, because no process
//! listens.

use crate::sys::sockopt::{PeerCredentials, peer_credentials};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fchmod, fstat, openat, unlinkat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const PREFIX: &str = "iwarp-stat.";
/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 16;
/// Maximum number of entries to check per directory, to bound the time.
const ENTRIES_MAX: usize = 65_536;
/// Maximum number of sockets per directory to ask.
const CANDIDATES_MAX: usize = 4096;

const SHARED: &str = "/tmp";
const RUNTIME: &str = "/run/user";

/// Returns the directories for a socket of user `uid`, in order of preference.
fn default_directories(uid: u32) -> Vec<PathBuf> {
    vec![Path::new(RUNTIME).join(uid.to_string()), SHARED.into()]
}

/// Returns the directories to search for sockets on behalf of user `uid`; for root, those of all
/// users.
pub(super) fn search_directories(uid: u32) -> Vec<PathBuf> {
    if uid != 0 {
        return default_directories(uid);
    }
    let users = std::fs::read_dir(RUNTIME).into_iter().flatten().flatten();
    let mut search_directories: Vec<_> = users.map(|entry| entry.path()).collect();
    search_directories.push(SHARED.into());
    search_directories
}

fn unix_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

/// Creates this process's socket and listens on it: in the directory `chosen`, or in a default
/// directory if that is `None`.
///
/// # Errors
/// The error of the last directory.
pub(super) fn open(chosen: Option<&Path>) -> io::Result<(OwnedFd, PathBuf)> {
    let default_directories = chosen.map_or_else(
        || default_directories(rustix::process::geteuid().as_raw()),
        |dir| vec![dir.to_owned()],
    );
    let mut error = io::Error::from(io::ErrorKind::NotFound);
    for directory in default_directories {
        match open_in(&directory) {
            Ok(opened) => return Ok(opened),
            Err(e) => error = e,
        }
    }
    Err(error)
}

fn open_in(directory: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let random = getrandom::u64().map_err(|e| io::Error::other(e.to_string()))?;
    let name = format!("{PREFIX}{}.{random:016x}", std::process::id());
    let (path, hidden) = (directory.join(&name), directory.join(format!(".{name}")));
    let socket = unix_socket()?;
    // Before `bind`, which gives the directory entry this mode, reduced by the umask.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    // The socket is renamed after `listen`. Otherwise a client could take it for the socket of a
    // dead process.
    bind(&socket, &SocketAddrUnix::new(&hidden)?)?;
    let pid_in_name = listen(&socket, BACKLOG)
        .map_err(io::Error::from)
        .and_then(|()| std::fs::rename(&hidden, &path));
    if let Err(e) = pid_in_name {
        let _ = std::fs::remove_file(&hidden);
        return Err(e);
    }
    // Without clients, the entries of killed processes would accumulate. Therefore one in 64
    // processes removes them.
    if random.is_multiple_of(64) {
        sweep(directory);
    }
    Ok((socket, path))
}

/// Removes entries of this user's dead processes.
fn sweep(directory: &Path) {
    let uid = rustix::process::geteuid().as_raw();
    for candidate in candidates(directory) {
        let _ = candidate.connect(uid);
    }
}

/// A directory entry that may be the socket of a process.
pub(super) struct Candidate {
    directory: Arc<OwnedFd>,
    name: String,
    /// The process ID in the entry's name. It is the ID in the namespace of that process.
    pub(super) pid_in_name: u32,
}

/// Returns the entries of a directory whose names are names of statistics sockets. Returns none if
/// the directory cannot be read.
pub(super) fn candidates(directory: &Path) -> Vec<Candidate> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let (Ok(dir), Ok(entries)) = (
        openat(CWD, directory, flags, Mode::empty()),
        std::fs::read_dir(directory),
    ) else {
        return Vec::new();
    };
    let dir = Arc::new(dir);
    entries
        .take(ENTRIES_MAX)
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let pid_in_name = process_of(&name)?;
            Some(Candidate {
                directory: Arc::clone(&dir),
                name,
                pid_in_name,
            })
        })
        .take(CANDIDATES_MAX)
        .collect()
}

/// Returns the process ID in the name of a socket, or `None` if it is not the name of a statistics
/// socket.
fn process_of(name: &str) -> Option<u32> {
    let (pid, random) = name.strip_prefix(PREFIX)?.split_once('.')?;
    let hexadecimal = random.len() == 16 && random.bytes().all(|b| b.is_ascii_hexdigit());
    let pid = pid.parse().ok()?;
    hexadecimal.then_some(pid)
}

pub(super) enum Connected {
    /// A connected nonblocking socket of a trusted process.
    Process(OwnedFd, PeerCredentials),
    /// A process listens, but its backlog is full. The value is the owner of the entry.
    Busy(u32),
    /// The entry cannot be used: it is not a socket, it belongs to another user, or its process is
    /// dead.
    Nothing,
}

impl Candidate {
    /// Connects on behalf of user `uid`. Never blocks. Removes the entry if its process is dead.
    ///
    /// # Errors
    /// No file descriptor or memory is left. An entry that cannot be used is not an error.
    pub(super) fn connect(&self, uid: u32) -> io::Result<Connected> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let entry = match openat(&*self.directory, &self.name, flags, Mode::empty()) {
            Ok(entry) => entry,
            Err(e @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => return Err(e.into()),
            Err(_) => return Ok(Connected::Nothing),
        };
        let stat = fstat(&entry)?;
        let is_socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
        if !is_socket || (uid != 0 && stat.st_uid != uid) {
            return Ok(Connected::Nothing);
        }
        let socket = unix_socket()?;
        // Connect to the opened entry, because its name may refer to another entry by now.
        let through = format!("/proc/self/fd/{}", entry.as_fd().as_raw_fd());
        match connect(&socket, &SocketAddrUnix::new(through)?) {
            Ok(()) => {}
            Err(Errno::AGAIN) => return Ok(Connected::Busy(stat.st_uid)),
            Err(Errno::CONNREFUSED) => {
                let _ = unlinkat(&*self.directory, &self.name, AtFlags::empty());
                return Ok(Connected::Nothing);
            }
            Err(_) => return Ok(Connected::Nothing),
        }
        let peer = peer_credentials(&socket)?;
        if peer.uid != stat.st_uid {
            tracing::debug!(
                name = self.name,
                "the process of a socket runs as another user than its owner"
            );
            return Ok(Connected::Nothing);
        }
        Ok(Connected::Process(socket, peer))
    }
}

#[cfg(test)]
#[path = "place_tests.rs"]
mod tests;
