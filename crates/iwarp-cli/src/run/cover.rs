//! Mounts for `iwarp run --sysfs`: a program sees other entries in folders of the system, and no
//! other program does.
//!
//! A program cannot add entries to the kernel's folders. It therefore gets a mount namespace in
//! which small file systems cover them. The other entries of a covered folder are bound into it
//! unchanged. An ordinary user may do that in a user namespace, in which the user keeps the same
//! number and gains no rights.

use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount,
    open_tree,
};
use rustix::thread::UnshareFlags;
use std::ffi::OsString;
use std::fs;
use std::io::{ErrorKind, Result};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

const BY_DESCRIPTOR: MoveMountFlags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;

/// Enters namespaces of our own.
///
/// # Errors
/// The kernel's, where the machine allows neither mounts nor user namespaces.
pub(super) fn enter() -> Result<()> {
    let user = rustix::process::geteuid();
    let group = rustix::process::getegid();
    if unshare(UnshareFlags::NEWNS).is_ok() {
        // File systems that are mounted here must not appear outside.
        mount_change(
            "/",
            MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
        )?;
        return Ok(());
    }
    unshare(UnshareFlags::NEWUSER | UnshareFlags::NEWNS)?;
    // Without this the kernel does not let us set the group. A kernel before 3.19 has no such file,
    // and needs none.
    let _ = fs::write("/proc/self/setgroups", "deny");
    fs::write("/proc/self/uid_map", format!("{0} {0} 1", user.as_raw()))?;
    fs::write("/proc/self/gid_map", format!("{0} {0} 1", group.as_raw()))?;
    Ok(())
}

#[expect(
    deprecated,
    reason = "unsafe only where threads share descriptors that are unshared; here are neither"
)]
fn unshare(flags: UnshareFlags) -> Result<()> {
    Ok(rustix::thread::unshare(flags)?)
}

/// Covers a folder. `fill` writes the new entries into a file system that nobody sees yet, and
/// returns their names. They replace those of the same names.
///
/// # Errors
/// The kernel's. The folder may be covered in part then.
pub(super) fn cover(
    folder: &Path,
    fill: impl FnOnce(&Path) -> Result<Vec<OsString>>,
) -> Result<()> {
    let system = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&system, "mode", "0755")?;
    fsconfig_create(&system)?;
    let mount = fsmount(
        &system,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID,
    )?;
    let root = PathBuf::from(format!("/proc/self/fd/{}", mount.as_raw_fd()));
    let ours = fill(&root)?;
    let mut others = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        if ours.contains(&name) {
            continue;
        }
        match keep(&folder.join(&name), &root.join(&name)) {
            Ok(tree) => others.extend(tree.map(|tree| (name, tree))),
            // It has gone since the folder was read.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    move_mount(&mount, "", CWD, folder, BY_DESCRIPTOR)?;
    for (name, tree) in others {
        move_mount(&tree, "", CWD, folder.join(name), BY_DESCRIPTOR)?;
    }
    Ok(())
}

/// Makes a place for an entry of a folder that is going to be covered. Returns what is to be
/// mounted there; nothing for a symbolic link, which is copied.
fn keep(from: &Path, to: &Path) -> Result<Option<OwnedFd>> {
    let kind = fs::symlink_metadata(from)?.file_type();
    if kind.is_symlink() {
        symlink(fs::read_link(from)?, to)?;
        return Ok(None);
    }
    let tree = clone_of(from)?;
    if kind.is_dir() {
        fs::create_dir(to)?;
    } else {
        fs::write(to, "")?;
    }
    Ok(Some(tree))
}

/// Returns a copy of a mounted file or folder, to be mounted elsewhere.
fn clone_of(path: &Path) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    Ok(open_tree(CWD, path, flags)?)
}

/// Mounts a file over another file.
///
/// # Errors
/// The kernel's.
pub(super) fn bind(from: &Path, to: &Path) -> Result<()> {
    Ok(move_mount(clone_of(from)?, "", CWD, to, BY_DESCRIPTOR)?)
}
