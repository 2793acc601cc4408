//! Tests of directory entries: which are trusted, which are removed, and which are kept.

use super::*;
use rustix::fs::{Gid, Uid};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory that is removed after the test.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("iwarp-place-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn entry(&self, name: &str) -> PathBuf {
        self.0.join(format!("iwarp-stat.7.{name:0>16}"))
    }

    /// Connects to the only entry on behalf of user `uid`.
    fn connect(&self, uid: u32) -> Connected {
        let all = candidates(&self.0);
        assert_eq!(all.len(), 1);
        all[0].connect(uid).unwrap()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[test]
fn only_owner_may_connect() {
    let dir = Dir::new();
    let (_socket, path) = open(Some(&dir.0)).unwrap();
    let meta = std::fs::symlink_metadata(&path).unwrap();
    assert_eq!(meta.permissions().mode() & 0o077, 0);
    assert_eq!(meta.uid(), uid());
    let all = candidates(&dir.0);
    assert_eq!(all[0].pid_in_name, std::process::id());
    let Connected::Process(_, peer) = all[0].connect(uid()).unwrap() else {
        panic!("this process listens on the socket");
    };
    assert_eq!(peer.pid, Some(std::process::id()));
}

#[test]
fn dead_process_entry_is_removed() {
    let dir = Dir::new();
    let (socket, path) = open(Some(&dir.0)).unwrap();
    drop(socket);
    assert!(matches!(dir.connect(uid()), Connected::Nothing));
    assert!(!path.exists());
    // A removed entry is not listed.
    assert!(candidates(&dir.0).is_empty());
}

#[test]
fn links_and_files_are_ignored() {
    let dir = Dir::new();
    let target = dir.0.join("target.sock");
    let _listener = UnixListener::bind(&target).unwrap();
    let link = dir.entry("1");
    symlink(&target, &link).unwrap();
    assert!(matches!(dir.connect(uid()), Connected::Nothing));
    assert!(link.symlink_metadata().is_ok());
    std::fs::remove_file(&link).unwrap();

    let file = dir.entry("2");
    std::fs::write(&file, "").unwrap();
    assert!(matches!(dir.connect(uid()), Connected::Nothing));
    assert!(file.exists());
}

/// Every user who can write to a shared directory can create a socket there.
#[test]
fn foreign_socket_is_not_trusted() {
    let dir = Dir::new();
    let path = dir.entry("3");
    let _listener = UnixListener::bind(&path).unwrap();
    assert!(matches!(dir.connect(uid()), Connected::Process(..)));
    if uid() != 0 {
        eprintln!("partly skipped: only root can change an entry's owner");
        return;
    }
    let (user, group) = (Uid::from_raw(1), Gid::from_raw(1));
    rustix::fs::chown(&path, Some(user), Some(group)).unwrap();
    // A process of root listens on a socket of user 1. Other users skip the entry, and root does
    // not trust it.
    assert!(matches!(dir.connect(2), Connected::Nothing));
    assert!(matches!(dir.connect(0), Connected::Nothing));
    assert!(path.exists());
}

#[test]
fn busy_process_keeps_its_entry() {
    let dir = Dir::new();
    let (_socket, path) = open(Some(&dir.0)).unwrap();
    let mut waiting = Vec::new();
    for _ in 0..=2 * BACKLOG {
        match dir.connect(uid()) {
            Connected::Process(socket, _) => waiting.push(socket),
            Connected::Busy(owner) => {
                assert_eq!(owner, uid());
                assert!(path.exists());
                return;
            }
            Connected::Nothing => panic!("the process listens"),
        }
    }
    panic!(
        "{} connections wait, and the backlog is not full",
        waiting.len()
    );
}

#[test]
fn other_file_names_are_ignored() {
    assert_eq!(process_of("iwarp-stat.12.0123456789abcdef"), Some(12));
    for name in [
        "iwarp-stat.12",
        "iwarp-stat.12.0123456789abcde",
        "iwarp-stat.12.0123456789abcdeg",
        "iwarp-stat.x.0123456789abcdef",
        ".iwarp-stat.12.0123456789abcdef",
    ] {
        assert_eq!(process_of(name), None, "{name}");
    }
}
