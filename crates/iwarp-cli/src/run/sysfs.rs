//! `iwarp run --sysfs`: the devices in `/sys/class/infiniband`, for programs that look there by themselves.
//!
//! A program cannot add devices to the kernel's sysfs. It therefore gets a mount namespace in which a small file system covers
//! `/sys/class`. The machine's other classes are bound into it unchanged; `infiniband` is ours. An ordinary user may do that
//! in a user namespace, in which the user keeps the same number and gains no rights.

use crate::error::{Context as _, Error, Result};
use iwarp::Device;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount,
    open_tree,
};
use rustix::thread::UnshareFlags;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

const CLASSES: &str = "/sys/class";
const OURS: &str = "infiniband";

/// Shows the devices to this process and its children.
///
/// # Errors
/// When the machine allows neither mounts nor user namespaces.
pub(super) fn show(devices: &[Device]) -> Result<()> {
    enter().map_err(|e| {
        Error::failed(format!(
            "--sysfs needs a mount namespace, by root or in a user namespace: {e}"
        ))
    })?;
    cover(devices).context("covering /sys/class")
}

/// Enters namespaces of our own.
fn enter() -> std::io::Result<()> {
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
    // Without this the kernel does not let us set the group. A kernel before 3.19 has no such file, and needs none.
    let _ = fs::write("/proc/self/setgroups", "deny");
    fs::write("/proc/self/uid_map", format!("{0} {0} 1", user.as_raw()))?;
    fs::write("/proc/self/gid_map", format!("{0} {0} 1", group.as_raw()))?;
    Ok(())
}

#[expect(
    deprecated,
    reason = "unsafe only where threads share descriptors that are unshared; here are neither"
)]
fn unshare(flags: UnshareFlags) -> std::io::Result<()> {
    Ok(rustix::thread::unshare(flags)?)
}

fn cover(devices: &[Device]) -> std::io::Result<()> {
    let system = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&system, "mode", "0755")?;
    fsconfig_create(&system)?;
    let mount = fsmount(
        &system,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID,
    )?;
    // The file system is filled before it becomes visible.
    let root = PathBuf::from(format!("/proc/self/fd/{}", mount.as_raw_fd()));
    fill(&root.join(OURS), devices)?;
    let mut classes = Vec::new();
    for class in fs::read_dir(CLASSES)? {
        let name = class?.file_name();
        if name == OURS {
            continue;
        }
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_RECURSIVE;
        let tree = open_tree(rustix::fs::CWD, Path::new(CLASSES).join(&name), flags)?;
        fs::create_dir(root.join(&name))?;
        classes.push((name, tree));
    }
    let source_is_descriptor = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(&mount, "", rustix::fs::CWD, CLASSES, source_is_descriptor)?;
    for (name, tree) in classes {
        let to = Path::new(CLASSES).join(name);
        move_mount(&tree, "", rustix::fs::CWD, to, source_is_descriptor)?;
    }
    Ok(())
}

/// Writes the files that the kernel would show for each device.
fn fill(dir: &Path, devices: &[Device]) -> std::io::Result<()> {
    fs::create_dir(dir)?;
    for device in devices {
        let at = dir.join(&device.name);
        for (name, text) in files(device) {
            let file = at.join(name);
            fs::create_dir_all(file.parent().unwrap_or(&at))?;
            fs::write(file, format!("{text}\n"))?;
        }
        let net = at.join("device/net");
        fs::create_dir_all(&net)?;
        symlink(
            Path::new("../../../../net").join(&device.interface),
            net.join(&device.interface),
        )?;
    }
    Ok(())
}

/// Formats numbers as four hexadecimal digits each, separated by colons.
fn in_groups(groups: impl IntoIterator<Item = u16>) -> String {
    let groups: Vec<String> = groups.into_iter().map(|g| format!("{g:04x}")).collect();
    groups.join(":")
}

/// Returns names and contents of the files, with the values that `ibv_query_device` and similar calls report.
fn files(device: &Device) -> Vec<(String, String)> {
    let guid = in_groups([48, 32, 16, 0].map(|shift| (device.guid >> shift) as u16));
    let lid = format!("{:#x}", device.lid());
    let gid = match device.ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let mut files: Vec<(String, String)> = [
        ("node_type", "4: RNIC"),
        ("node_guid", guid.as_str()),
        ("sys_image_guid", guid.as_str()),
        ("node_desc", "iwarp"),
        ("hca_type", "iwarp"),
        ("hw_rev", "0x1"),
        ("fw_ver", env!("CARGO_PKG_VERSION")),
        ("ports/1/state", "4: ACTIVE"),
        ("ports/1/phys_state", "5: LinkUp"),
        ("ports/1/link_layer", "Ethernet"),
        ("ports/1/rate", "10 Gb/sec (1X QDR)"),
        ("ports/1/lid", lid.as_str()),
        ("ports/1/lid_mask_count", "0"),
        ("ports/1/sm_lid", "0x0"),
        ("ports/1/sm_sl", "0"),
        ("ports/1/cap_mask", "0x04090000"),
        ("ports/1/pkeys/0", "0xffff"),
        ("ports/1/gid_attrs/types/0", "RoCE v2"),
        ("ports/1/gid_attrs/ndevs/0", device.interface.as_str()),
    ]
    .map(|(name, text)| (name.to_owned(), text.to_owned()))
    .into();
    for index in 0..GID_TABLE {
        let gid = if index == 0 {
            gid
        } else {
            Ipv6Addr::UNSPECIFIED
        };
        files.push((format!("ports/1/gids/{index}"), in_groups(gid.segments())));
    }
    files
}

/// Size of the GID table. Only the first entry is used.
const GID_TABLE: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_look_like_the_kernels() {
        let dir = std::env::temp_dir().join(format!("iwarp-sysfs-{}", std::process::id()));
        let lo = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
        fill(&dir, std::slice::from_ref(&lo)).unwrap();
        let at = dir.join(&lo.name);
        let read = |name: &str| fs::read_to_string(at.join(name)).unwrap();
        assert_eq!(
            read("ports/1/gids/0"),
            "0000:0000:0000:0000:0000:ffff:7f00:0001\n"
        );
        assert_eq!(
            read("ports/1/gids/3"),
            "0000:0000:0000:0000:0000:0000:0000:0000\n"
        );
        assert_eq!(read("node_guid").len(), 20);
        assert_eq!(
            read("ports/1/gid_attrs/ndevs/0"),
            format!("{}\n", lo.interface)
        );
        let net = fs::read_link(at.join("device/net").join(&lo.interface)).unwrap();
        assert_eq!(net, Path::new("../../../../net").join(&lo.interface));
        fs::remove_dir_all(&dir).unwrap();
    }
}
