//! Mounts for `iwarp run --sysfs`: one program sees additional entries in system folders.
//!
//! Programs cannot add entries to the kernel's folders. So the program gets a mount namespace in
//! which a small file system covers each of these folders. The existing entries of the folder are
//! bind-mounted into the file system. Ordinary users may do that in a user namespace, in which they
//! keep their user ID and gain no rights.

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

/// Enters new namespaces.
///
/// # Errors
/// Returns the kernel's error if the machine allows neither mounts nor user namespaces.
pub(super) fn enter() -> Result<()> {
    let user = rustix::process::geteuid();
    let group = rustix::process::getegid();
    if unshare(UnshareFlags::NEWNS).is_ok() {
        // Mounts must not propagate to other namespaces.
        mount_change(
            "/",
            MountPropagationFlags::PRIVATE | MountPropagationFlags::REC,
        )?;
        return Ok(());
    }
    unshare(UnshareFlags::NEWUSER | UnshareFlags::NEWNS)?;
    // Required before setting the group. Kernels before 3.19 lack this file and do not need it.
    let _ = fs::write("/proc/self/setgroups", "deny");
    fs::write("/proc/self/uid_map", format!("{0} {0} 1", user.as_raw()))?;
    fs::write("/proc/self/gid_map", format!("{0} {0} 1", group.as_raw()))?;
    Ok(())
}

#[expect(
    deprecated,
    reason = "unsafe only if threads share the unshared descriptors; there are none here"
)]
fn unshare(flags: UnshareFlags) -> Result<()> {
    Ok(rustix::thread::unshare(flags)?)
}

/// Covers a folder. `fill` writes the new entries into a file system that is not visible yet, and
/// returns their names. They replace existing entries of these names.
///
/// # Errors
/// Returns the kernel's error. In that case the folder may be partly covered.
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
    let new_names = fill(&root)?;
    let mut existing = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        if new_names.contains(&name) {
            continue;
        }
        match keep(&folder.join(&name), &root.join(&name)) {
            Ok(tree) => existing.extend(tree.map(|tree| (name, tree))),
            // The entry was removed after the folder was read.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    move_mount(&mount, "", CWD, folder, BY_DESCRIPTOR)?;
    for (name, tree) in existing {
        move_mount(&tree, "", CWD, folder.join(name), BY_DESCRIPTOR)?;
    }
    Ok(())
}

/// Keeps an entry of the covered folder visible. Creates a mount point for it, and returns the tree
/// to mount there. A symbolic link is copied instead, and `None` is returned.
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

/// Returns a detached copy of a mounted file or folder.
fn clone_of(path: &Path) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    Ok(open_tree(CWD, path, flags)?)
}

/// Mounts a file over another file.
pub(super) fn bind(from: &Path, to: &Path) -> Result<()> {
    Ok(move_mount(clone_of(from)?, "", CWD, to, BY_DESCRIPTOR)?)
}
