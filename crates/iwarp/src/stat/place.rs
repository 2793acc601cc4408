//! The directories and names of the sockets through which processes are asked, and which of them
//! are trusted.
//!
//! Each process has a Unix socket in the directory that `IWARP_STAT` names. By default it is in
//! `/run/user/UID`, or in `/tmp` if it cannot be created there. Its name is `iwarp-stat.PID.RANDOM`
//! and its mode 0600, so the kernel lets only the same user and root connect. Other users of `/tmp`
//! gain nothing:
//!
//! * the name cannot be guessed, so no other user can take it before;
//! * a client opens the entry without following a symbolic link, checks the opened entry, and
//!   connects to that very entry;
//! * it skips entries of other users, unless it is root, and sockets whose process runs as a
//!   different user than the entry's owner.
//!
//! A killed process leaves its entry. The next client finds that nothing listens there, and removes
//! it.

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
/// Most connections that the kernel lets wait until they are accepted.
const BACKLOG: i32 = 16;
/// Maximum number of entries to check per directory, to bound the time.
const ENTRIES_MAX: usize = 65_536;
/// Most sockets of one directory that are asked.
const CANDIDATES_MAX: usize = 4096;

const SHARED: &str = "/tmp";
const RUNTIME: &str = "/run/user";

/// Returns the directories for a socket of user `uid`, the preferred one first.
fn homes(uid: u32) -> Vec<PathBuf> {
    vec![Path::new(RUNTIME).join(uid.to_string()), SHARED.into()]
}

/// Returns the directories in which user `uid` searches for sockets. Root searches those of all
/// users.
pub(super) fn places(uid: u32) -> Vec<PathBuf> {
    if uid != 0 {
        return homes(uid);
    }
    let users = std::fs::read_dir(RUNTIME).into_iter().flatten().flatten();
    let mut places: Vec<_> = users.map(|entry| entry.path()).collect();
    places.push(SHARED.into());
    places
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

/// Creates this process's socket in `chosen`, or in a default directory if it is `None`, and
/// listens there.
///
/// # Errors
/// The error of the last directory that was tried.
pub(super) fn open(chosen: Option<&Path>) -> io::Result<(OwnedFd, PathBuf)> {
    let homes = chosen.map_or_else(
        || homes(rustix::process::geteuid().as_raw()),
        |dir| vec![dir.to_owned()],
    );
    let mut error = io::Error::from(io::ErrorKind::NotFound);
    for home in homes {
        match open_in(&home) {
            Ok(opened) => return Ok(opened),
            Err(e) => error = e,
        }
    }
    Err(error)
}

fn open_in(home: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let random = getrandom::u64().map_err(|e| io::Error::other(e.to_string()))?;
    let name = format!("{PREFIX}{}.{random:016x}", std::process::id());
    let (path, hidden) = (home.join(&name), home.join(format!(".{name}")));
    let socket = unix_socket()?;
    // Do this before the socket has a name: `bind` gives the entry these rights, less the umask.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    // The socket gets its final name only when it listens. Before, a client would take it for the
    // entry of a dead process.
    bind(&socket, &SocketAddrUnix::new(&hidden)?)?;
    let named = listen(&socket, BACKLOG)
        .map_err(io::Error::from)
        .and_then(|()| std::fs::rename(&hidden, &path));
    if let Err(e) = named {
        let _ = std::fs::remove_file(&hidden);
        return Err(e);
    }
    // If no client ever asked, the entries of killed processes would accumulate. So one start in 64
    // removes them.
    if random.is_multiple_of(64) {
        sweep(home);
    }
    Ok((socket, path))
}

/// Removes entries that dead processes of this user have left in `home`.
fn sweep(home: &Path) {
    let uid = rustix::process::geteuid().as_raw();
    for candidate in candidates(home) {
        let _ = candidate.connect(uid);
    }
}

/// An entry that may be the socket of a process.
pub(super) struct Candidate {
    home: Arc<OwnedFd>,
    name: String,
    /// The process number in the entry's name. It is valid in the namespace of that process.
    pub(super) named: u32,
}

/// Returns the entries of a directory that have the name of a statistics socket; none if the
/// directory cannot be read.
pub(super) fn candidates(home: &Path) -> Vec<Candidate> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let (Ok(dir), Ok(entries)) = (
        openat(CWD, home, flags, Mode::empty()),
        std::fs::read_dir(home),
    ) else {
        return Vec::new();
    };
    let dir = Arc::new(dir);
    entries
        .take(ENTRIES_MAX)
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let named = process_of(&name)?;
            Some(Candidate {
                home: Arc::clone(&dir),
                name,
                named,
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
    /// A trusted process listens. The socket is connected and does not block.
    Process(OwnedFd, PeerCredentials),
    /// A process listens but accepts no connection at the moment. The value is the owner of the
    /// entry.
    Busy(u32),
    /// The entry cannot be used: it is not a socket, it belongs to another user, or its process is
    /// dead.
    Nothing,
}

impl Candidate {
    /// Connects on behalf of user `uid`. Never blocks. Removes the entry if its process is dead.
    ///
    /// # Errors
    /// The system's error if no descriptors or no memory are left. An entry that cannot be used is
    /// no error.
    pub(super) fn connect(&self, uid: u32) -> io::Result<Connected> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let entry = match openat(&*self.home, &self.name, flags, Mode::empty()) {
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
        // Connect to the opened entry: its name may mean another one by now.
        let through = format!("/proc/self/fd/{}", entry.as_fd().as_raw_fd());
        match connect(&socket, &SocketAddrUnix::new(through)?) {
            Ok(()) => {}
            Err(Errno::AGAIN) => return Ok(Connected::Busy(stat.st_uid)),
            Err(Errno::CONNREFUSED) => {
                let _ = unlinkat(&*self.home, &self.name, AtFlags::empty());
                return Ok(Connected::Nothing);
            }
            Err(_) => return Ok(Connected::Nothing),
        }
        let who = peer_credentials(&socket)?;
        if who.uid != stat.st_uid {
            tracing::debug!(name = self.name, "a socket of one user, served by another");
            return Ok(Connected::Nothing);
        }
        Ok(Connected::Process(socket, who))
    }
}

#[cfg(test)]
#[path = "place_tests.rs"]
mod tests;
