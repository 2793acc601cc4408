//! `iwarp devices`: lists the devices of this machine with their addresses.

use clap::Args;
use iwarp::{Config, Device, DeviceAddress, Face, LIMITS};
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_cli_common::out;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Arguments of `iwarp devices`.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES:
  iwarp devices            list devices, their addresses and GID indices
  iwarp devices -v         with all limits
  iwarp devices --json     as JSON, for programs")]
pub(crate) struct DevicesArgs {
    /// Show all limits of each device
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// Print JSON instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &DevicesArgs) -> Result<()> {
    let list = Device::list().context("cannot list the network interfaces")?;
    let face = Config::from_env().face;
    if args.json {
        let list: Vec<_> = list.iter().map(|d| as_json(d, face)).collect();
        let text = serde_json::to_string_pretty(&json!({ "devices": list })).context("JSON")?;
        out::line(format_args!("{text}"));
        return Ok(());
    }
    if list.is_empty() {
        return Err(Error::failed(
            "no device: no interface with an address is up, or IWARP_BIND excludes them all",
        ));
    }
    out::line(format_args!(
        "{}",
        as_text(&list, face, args.verbose).trim_end()
    ));
    Ok(())
}

/// Formats the GUID as `ibv_devinfo` does.
fn guid(d: &Device) -> String {
    let [a, b, c, d] = [48, 32, 16, 0].map(|shift| (d.guid >> shift) as u16);
    format!("{a:04x}:{b:04x}:{c:04x}:{d:04x}")
}

fn limits() -> [(&'static str, u64); 8] {
    [
        ("max_qp_wr", LIMITS.max_qp_wr.into()),
        ("max_sge", LIMITS.max_sge.into()),
        ("max_inline", LIMITS.max_inline.into()),
        ("max_cqe", LIMITS.max_cqe.into()),
        ("max_mr", LIMITS.max_mr.into()),
        ("max_message", LIMITS.max_message.into()),
        ("max_ird", LIMITS.max_ird.into()),
        ("max_ord", LIMITS.max_ord.into()),
    ]
}

fn as_json(d: &Device, face: Face) -> Value {
    let limits: serde_json::Map<_, _> = limits()
        .into_iter()
        .map(|(k, v)| (k.to_owned(), v.into()))
        .collect();
    let address = |a: &DeviceAddress| {
        let indices = gid_indices(d, a, face);
        json!({ "address": with_scope(d, a), "gid_indices": indices })
    };
    json!({
        "name": d.name,
        "interface": d.interface,
        "mtu": d.mtu,
        "loopback": d.loopback,
        "guid": guid(d),
        "addresses": d.addresses.iter().map(address).collect::<Vec<_>>(),
        "limits": limits,
    })
}

/// Returns the address as text. A link-local address includes its interface, as programs need it.
fn with_scope(d: &Device, a: &DeviceAddress) -> String {
    match a.scope_id {
        0 => a.ip.to_string(),
        _ => format!("{}%{}", a.ip, d.interface),
    }
}

fn gid_indices(d: &Device, a: &DeviceAddress, face: Face) -> Vec<u32> {
    let table = d.gids(face).into_iter();
    table
        .filter(|e| e.gid == a.gid())
        .map(|e| e.index)
        .collect()
}

fn as_text(list: &[Device], face: Face, verbose: bool) -> String {
    let width =
        |f: fn(&Device) -> usize, head: &str| list.iter().map(f).max().unwrap_or(0).max(head.len());
    let (n, i) = (
        width(|d| d.name.len(), "DEVICE"),
        width(|d| d.interface.len(), "INTERFACE"),
    );
    let mut out = String::new();
    let mut line = |cells: [&str; 4]| {
        let [name, interface, mtu, guid] = cells;
        let _ = writeln!(out, "{name:n$}  {interface:i$}  {mtu:>6}  {guid}");
    };
    line(["DEVICE", "INTERFACE", "MTU", "GUID"]);
    for d in list {
        line([&d.name, &d.interface, &d.mtu.to_string(), &guid(d)]);
        for a in &d.addresses {
            let indices = gid_indices(d, a, face);
            let indices: Vec<String> = indices.iter().map(u32::to_string).collect();
            let gid = match &indices[..] {
                [] => "no GID".to_owned(),
                some => format!("GID {}", some.join(", ")),
            };
            line(["", &format!("{gid:10}  {}", with_scope(d, a)), "", ""]);
        }
    }
    if verbose {
        out.push_str("\nLimits, the same for all devices:\n");
        for (name, value) in limits() {
            let _ = writeln!(out, "  {name:12} {value}");
        }
    }
    out.lines()
        .fold(String::new(), |text, line| text + line.trim_end() + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_listed_in_both_forms() {
        let list = Device::list().unwrap();
        let lo = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
        let text = as_text(&list, Face::Rnic, true);
        let row = text.lines().position(|l| l.starts_with(&lo.name)).unwrap();
        let rows: Vec<&str> = text.lines().skip(row).collect();
        assert!(rows[0].ends_with(&guid(&lo)), "{text}");
        let below = |rows: &[&str]| rows[1].split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(below(&rows), "GID 0 127.0.0.1", "{text}");
        assert!(text.contains("max_inline"));
        let text = as_text(std::slice::from_ref(&lo), Face::Roce, false);
        assert!(!text.contains("max_inline"));
        let rows: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(below(&rows), "GID 0, 1 127.0.0.1", "{text}");
        let j = as_json(&lo, Face::Roce);
        assert_eq!(j["addresses"][0]["address"], "127.0.0.1");
        assert_eq!(j["addresses"][0]["gid_indices"], json!([0, 1]));
        assert_eq!(j["limits"]["max_sge"], LIMITS.max_sge);
    }

    #[test]
    fn guid_begins_with_its_high_bits() {
        let mut lo = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
        lo.guid = 0x0102_0304_0506_0708;
        assert_eq!(guid(&lo), "0102:0304:0506:0708");
    }

    #[test]
    fn link_local_address_names_its_interface() {
        for d in Device::list().unwrap() {
            for a in &d.addresses {
                let local = with_scope(&d, a).contains(&format!("%{}", d.interface));
                assert_eq!(local, a.scope_id != 0, "{a:?}");
            }
        }
    }
}
