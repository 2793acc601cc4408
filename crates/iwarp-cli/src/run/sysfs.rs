//! Shows the devices in `/sys/class/infiniband` and `/dev/infiniband`, for programs that read these
//! folders themselves.
//!
//! `/dev/infiniband` contains a node per RDMA device and one for the connection manager, for
//! programs that use `access`, `stat` or `open`. All nodes are the null device, because programs
//! use the devices through our libraries.
//!
//! Where the machine allows it, the entries are mounted ([`cover`]). Elsewhere, as in most
//! containers, a preload library redirects the program to a folder with the entries. The library
//! has no effect on statically linked programs and direct system calls.

use super::cover;
use super::library::{check_trusted, temporary_name, user_dir};
use iwarp::{Device, Face, GidKind};
use iwarp_cli_common::error::{Context as _, Error, Result};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::net::Ipv6Addr;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};

const CLASSES: &str = "/sys/class";
const NODES: &str = "/dev";
/// Our folders in `/sys/class` and `/dev`.
const INFINIBAND: &str = "infiniband";
const INFINIBAND_VERBS: &str = "infiniband_verbs";
/// Every node is this device.
const NULL: &str = "/dev/null";
/// Device numbers that the kernel's `/sys` reports for the first verbs device.
const MAJOR: u32 = 231;
const FIRST_MINOR: u32 = 192;

/// How the devices are shown.
#[derive(Debug)]
pub(super) enum Shown {
    /// By mounts, to this process and its children.
    Mounted,
    /// In this folder, to programs with the preload library.
    Copied(PathBuf),
}

/// Shows the devices. `preload` means that the preload library is available, for machines that
/// allow neither mounts nor user namespaces.
pub(super) fn show(devices: &[Device], face: Face, preload: bool) -> Result<Shown> {
    match cover::enter() {
        Ok(()) => mount(devices, face).map(|()| Shown::Mounted),
        Err(_) if preload => {
            let tree = copy(devices, face).context("the devices in a folder of this user")?;
            Ok(Shown::Copied(tree))
        }
        Err(e) => Err(Error::failed(format!(
            "the devices cannot be shown in /sys/class/infiniband and /dev/infiniband: \
             that needs a mount namespace ({e}), or the library \
             libiwarp_paths.so beside the other libraries"
        ))),
    }
}

fn mount(devices: &[Device], face: Face) -> Result<()> {
    let in_classes = |root: &Path| {
        fill_classes(root, devices, face)?;
        Ok([INFINIBAND, INFINIBAND_VERBS].map(Into::into).into())
    };
    cover::cover(Path::new(CLASSES), in_classes).context("covering /sys/class")?;
    mount_nodes(devices).context("covering /dev")
}

/// Returns the names in `/dev/infiniband`.
fn nodes(devices: &[Device]) -> Vec<String> {
    let of_devices = devices.iter().map(|d| format!("uverbs{}", d.index));
    of_devices.chain(["rdma_cm".to_owned()]).collect()
}

fn mount_nodes(devices: &[Device]) -> io::Result<()> {
    let nodes = nodes(devices);
    cover::cover(Path::new(NODES), |root| {
        let dir = root.join(INFINIBAND);
        fs::create_dir(&dir)?;
        for node in &nodes {
            fs::write(dir.join(node), "")?;
        }
        Ok(vec![INFINIBAND.into()])
    })?;
    for node in &nodes {
        cover::bind(
            Path::new(NULL),
            &Path::new(NODES).join(INFINIBAND).join(node),
        )?;
    }
    Ok(())
}

/// Creates a folder with the entries that are to be visible below `/`, and returns its path, which
/// depends only on the devices. An existing folder is replaced atomically.
fn copy(devices: &[Device], face: Face) -> Result<PathBuf> {
    let dir = user_dir()?;
    let mut hash = DefaultHasher::new();
    format!("{devices:?} {face:?}").hash(&mut hash);
    let name = format!("devices-{:016x}", hash.finish());
    let final_path = dir.join(name);
    write(&final_path, devices, face).context(dir.display())?;
    Ok(final_path)
}

/// Writes the entries that are to be visible below `/` into the folder `to`, which is replaced
/// atomically if it exists.
pub(super) fn write(to: &Path, devices: &[Device], face: Face) -> io::Result<()> {
    let temporary = temporary_name(to);
    let filled = fill_tree(&temporary, devices, face).and_then(|()| put_in_place(&temporary, to));
    let _ = fs::remove_dir_all(&temporary);
    filled
}

fn fill_tree(root: &Path, devices: &[Device], face: Face) -> io::Result<()> {
    let folder = |path: &Path| {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(path)
    };
    let below = |path: &str| root.join(path.trim_start_matches('/'));
    folder(&below(CLASSES))?;
    fill_classes(&below(CLASSES), devices, face)?;
    let dir = below(NODES).join(INFINIBAND);
    folder(&dir)?;
    for node in nodes(devices) {
        symlink(NULL, dir.join(node))?;
    }
    Ok(())
}

/// Renames a new folder to `to`, or exchanges it with the existing folder.
fn put_in_place(new: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, new, CWD, to, RenameFlags::NOREPLACE) {
        Err(rustix::io::Errno::EXIST) => {
            check_trusted(to)?;
            Ok(renameat_with(CWD, new, CWD, to, RenameFlags::EXCHANGE)?)
        }
        done => Ok(done?),
    }
}

/// Writes the folders of `/sys/class`.
fn fill_classes(root: &Path, devices: &[Device], face: Face) -> io::Result<()> {
    fill_infiniband(&root.join(INFINIBAND), devices, face)?;
    fill_verbs(&root.join(INFINIBAND_VERBS), devices)
}

/// Writes the entries of `/sys/class/infiniband_verbs`.
fn fill_verbs(dir: &Path, devices: &[Device]) -> io::Result<()> {
    fs::create_dir(dir)?;
    fs::write(dir.join("abi_version"), "6\n")?;
    for device in devices {
        let device_dir = dir.join(format!("uverbs{}", device.index));
        fs::create_dir(&device_dir)?;
        let minor = FIRST_MINOR + device.index;
        fs::write(device_dir.join("ibdev"), format!("{}\n", device.name))?;
        fs::write(device_dir.join("dev"), format!("{MAJOR}:{minor}\n"))?;
        fs::write(device_dir.join("abi_version"), "1\n")?;
    }
    Ok(())
}

/// Writes the entries of `/sys/class/infiniband`.
fn fill_infiniband(dir: &Path, devices: &[Device], face: Face) -> io::Result<()> {
    fs::create_dir(dir)?;
    for device in devices {
        let device_dir = dir.join(&device.name);
        for (name, text) in files(device, face) {
            let file = device_dir.join(name);
            fs::create_dir_all(file.parent().unwrap_or(&device_dir))?;
            fs::write(file, format!("{text}\n"))?;
        }
        let net = device_dir.join("device/net");
        fs::create_dir_all(&net)?;
        symlink(
            Path::new("../../../../net").join(&device.interface),
            net.join(&device.interface),
        )?;
    }
    Ok(())
}

/// Formats groups of four hexadecimal digits, separated by colons.
fn in_groups(groups: impl IntoIterator<Item = u16>) -> String {
    let groups: Vec<String> = groups.into_iter().map(|g| format!("{g:04x}")).collect();
    groups.join(":")
}

/// Returns names and contents of a device's files. The values agree with `ibv_query_device` and
/// similar calls.
fn files(device: &Device, face: Face) -> Vec<(String, String)> {
    let guid = in_groups([48, 32, 16, 0].map(|shift| (device.guid >> shift) as u16));
    let lid = format!("{:#x}", device.lid(face));
    let node_type = match face {
        Face::Rnic => "4: RNIC",
        Face::Roce => "1: CA",
    };
    let mut files: Vec<(String, String)> = [
        ("node_type", node_type),
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
    ]
    .map(|(name, text)| (name.to_owned(), text.to_owned()))
    .into();
    files.extend(gid_files(device, face));
    if face == Face::Roce {
        files.extend(hw_counters());
    }
    files
}

/// Counters that rxe and mlx5 have in `hw_counters` and that are always zero here: TCP handles
/// losses, duplicates and reordering, and there are no congestion notification packets, adaptive
/// retransmissions or RoCE checksums.
///
/// The files are static, so traffic counters would be wrong and are left out; see `iwarp stat`.
const ALWAYS_ZERO: [&str; 16] = [
    "duplicate_request",
    "implied_nak_seq_err",
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "out_of_seq_request",
    "out_of_sequence",
    "packet_seq_err",
    "rcvd_seq_err",
    "roce_adp_retrans",
    "roce_adp_retrans_to",
    "roce_slow_restart",
    "roce_slow_restart_cnps",
    "roce_slow_restart_trans",
    "rp_cnp_handled",
    "rp_cnp_ignored",
    "rx_icrc_encapsulated",
];

/// Returns the files of the port's `hw_counters`.
fn hw_counters() -> impl Iterator<Item = (String, String)> {
    // How long the kernel caches the values, in milliseconds.
    let lifespan = ("lifespan", "10");
    let zeros = ALWAYS_ZERO.map(|name| (name, "0"));
    let all = zeros.into_iter().chain([lifespan]);
    all.map(|(name, value)| (format!("ports/1/hw_counters/{name}"), value.to_owned()))
}

/// Returns the files of the GID table. Empty entries are zeros and have no attributes.
fn gid_files(device: &Device, face: Face) -> Vec<(String, String)> {
    let table = device.gids(face);
    let mut files = Vec::new();
    for index in 0..face.gid_table_len() {
        let entry = table.iter().find(|entry| entry.index == index);
        let gid = entry.map_or(Ipv6Addr::UNSPECIFIED, |entry| entry.gid.into());
        files.push((format!("ports/1/gids/{index}"), in_groups(gid.segments())));
        let Some(entry) = entry else { continue };
        let kind = match entry.kind {
            GidKind::RoceV2 => "RoCE v2",
            // The kernel has one name for all other types.
            _ => "IB/RoCE v1",
        };
        for (name, text) in [("types", kind), ("ndevs", &device.interface)] {
            files.push((format!("ports/1/gid_attrs/{name}/{index}"), text.to_owned()));
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_match_the_kernels() {
        let dir = std::env::temp_dir().join(format!("iwarp-sysfs-{}", std::process::id()));
        let lo = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
        fill_infiniband(&dir, std::slice::from_ref(&lo), Face::Rnic).unwrap();
        let lo_dir = dir.join(&lo.name);
        let read = |name: &str| fs::read_to_string(lo_dir.join(name)).unwrap();
        assert_eq!(
            read("ports/1/gids/0"),
            "0000:0000:0000:0000:0000:ffff:7f00:0001\n"
        );
        assert_eq!(
            read("ports/1/gids/31"),
            "0000:0000:0000:0000:0000:0000:0000:0000\n"
        );
        assert!(!lo_dir.join("ports/1/gid_attrs/types/31").exists());
        assert_eq!(read("ports/1/gid_attrs/types/0"), "IB/RoCE v1\n");
        assert!(!lo_dir.join("ports/1/hw_counters").exists());
        assert_eq!(read("node_guid").len(), 20);
        assert_eq!(
            read("ports/1/gid_attrs/ndevs/0"),
            format!("{}\n", lo.interface)
        );
        let net = fs::read_link(lo_dir.join("device/net").join(&lo.interface)).unwrap();
        assert_eq!(net, Path::new("../../../../net").join(&lo.interface));
        fs::remove_dir_all(&dir).unwrap();
        fill_infiniband(&dir, std::slice::from_ref(&lo), Face::Roce).unwrap();
        assert_eq!(read("node_type"), "1: CA\n");
        assert_eq!(read("ports/1/gids/0"), read("ports/1/gids/1"));
        assert_eq!(read("ports/1/gid_attrs/types/0"), "IB/RoCE v1\n");
        assert_eq!(read("ports/1/gid_attrs/types/1"), "RoCE v2\n");
        assert_eq!(read("ports/1/hw_counters/out_of_sequence"), "0\n");
        assert_eq!(read("ports/1/hw_counters/lifespan"), "10\n");
        // A traffic counter that stays zero would be wrong.
        for name in ["sent_pkts", "rx_write_requests", "out_of_buffer"] {
            assert!(!lo_dir.join("ports/1/hw_counters").join(name).exists());
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}
