//! GUIDs of devices. Programs identify devices by GUID, on one host and across hosts. Therefore no
//! two interfaces may share a GUID, and an interface has the same GUID in all processes.

use crate::sys::interfaces::InterfaceAddress;
use crate::sys::process_lock::ProcessLock;
use std::fs;

/// Returns the GUID of the interface's device: the EUI-64 of its MAC address, or a hash of names
/// that is marked as locally administered.
pub(super) fn guid(a: &InterfaceAddress) -> u64 {
    match a.mac {
        Some([a0, b, c, d, e, f]) if !a.shares_mac => {
            u64::from_be_bytes([a0 ^ 2, b, c, 0xff, 0xfe, d, e, f])
        }
        Some(mac) => local_guid(&[&mac, a.name.as_bytes()]),
        None => local_guid(&[&host_identity(), a.name.as_bytes()]),
    }
}

/// Returns the FNV-1a hash of the parts, marked as locally administered.
fn local_guid(parts: &[&[u8]]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in parts.iter().flat_map(|part| part.iter()) {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash & 0x00ff_ffff_ffff_ffff | 0x0200_0000_0000_0000
}

/// Returns the machine ID and the host name. The machine ID alone does not identify the host,
/// because containers may share it with their host.
fn host_identity() -> Vec<u8> {
    static HOST: ProcessLock<Option<Vec<u8>>> = ProcessLock::new("device::guid::HOST", None);
    let mut host_identity = HOST.lock();
    let read = || {
        let files = ["/etc/machine-id", "/proc/sys/kernel/hostname"];
        files.map(|f| fs::read(f).unwrap_or_default()).concat()
    };
    host_identity.get_or_insert_with(read).clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_mac_gives_different_guids() {
        let mac = Some([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
        let on = |name: &str, mac, shares_mac| {
            guid(&InterfaceAddress {
                name: name.into(),
                ip: "10.0.0.1".parse().unwrap(),
                index: 1,
                prefix_len: 8,
                up: true,
                running: true,
                mtu: 1500,
                mac,
                shares_mac,
                loopback: false,
            })
        };
        assert_eq!(on("eth0", mac, false), 0x5054_00ff_fe12_3456);
        let others = [
            on("eth0", mac, false),
            on("eth0.5", mac, true),
            on("eth0.6", mac, true),
            on("tun0", None, false),
            on("tun1", None, false),
        ];
        for (index, guid) in others.iter().enumerate() {
            assert!(!others[..index].contains(guid), "{others:x?}");
        }
        assert_eq!(on("tun1", None, false), others[4]);
        assert_eq!(others[1] >> 56, 2, "locally administered");
    }

    /// The example of the FNV authors, with the bit for local administration in the first octet.
    #[test]
    fn name_guid_is_fnv_hash() {
        for parts in [&[&b"foobar"[..]][..], &[b"foo", b"bar"]] {
            assert_eq!(local_guid(parts), 0x0294_4171_f739_67e8);
        }
    }

    #[test]
    fn host_identity_has_id_and_name() {
        let name = fs::read("/proc/sys/kernel/hostname").unwrap();
        let number = fs::read("/etc/machine-id").unwrap_or_default();
        assert_eq!(host_identity(), [number, name].concat());
    }
}
