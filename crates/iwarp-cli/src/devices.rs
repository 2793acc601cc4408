//! `iwarp devices`: lists the devices of this machine.

use crate::error::{Context as _, Error, Result};
use crate::out;
use clap::Args;
use iwarp::{Device, LIMITS};
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Arguments of `iwarp devices`.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES:
  iwarp devices            one line per device
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

/// Lists the devices.
pub(crate) fn run(args: &DevicesArgs) -> Result<()> {
    let list = Device::list().context("cannot list the network interfaces")?;
    if args.json {
        let list: Vec<_> = list.iter().map(as_json).collect();
        let text = serde_json::to_string_pretty(&json!({ "devices": list })).context("JSON")?;
        out::line(format_args!("{text}"));
        return Ok(());
    }
    if list.is_empty() {
        return Err(Error::failed(
            "no device: no interface with an address is up, or IWARP_BIND excludes them all",
        ));
    }
    out::line(format_args!("{}", as_text(&list, args.verbose).trim_end()));
    Ok(())
}

/// An EUI-64 as `ibv_devinfo` shows it.
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

fn as_json(d: &Device) -> Value {
    let limits: serde_json::Map<_, _> = limits()
        .into_iter()
        .map(|(k, v)| (k.to_owned(), v.into()))
        .collect();
    json!({
        "name": d.name,
        "address": d.ip.to_string(),
        "interface": d.interface,
        "mtu": d.mtu,
        "loopback": d.loopback,
        "guid": guid(d),
        "limits": limits,
    })
}

fn as_text(list: &[Device], verbose: bool) -> String {
    let width =
        |f: fn(&Device) -> usize, head: &str| list.iter().map(f).max().unwrap_or(0).max(head.len());
    let (n, a, i) = (
        width(|d| d.name.len(), "DEVICE"),
        width(|d| d.ip.to_string().len(), "ADDRESS"),
        width(|d| d.interface.len(), "INTERFACE"),
    );
    let mut out = String::new();
    let mut line = |cells: [&str; 5]| {
        let [name, ip, interface, mtu, guid] = cells;
        let _ = writeln!(out, "{name:n$}  {ip:a$}  {interface:i$}  {mtu:>6}  {guid}");
    };
    line(["DEVICE", "ADDRESS", "INTERFACE", "MTU", "GUID"]);
    for d in list {
        let (ip, mtu) = (d.ip.to_string(), d.mtu.to_string());
        line([&d.name, &ip, &d.interface, &mtu, &guid(d)]);
    }
    if verbose {
        out.push_str("\nLimits, the same for all devices:\n");
        for (name, value) in limits() {
            let _ = writeln!(out, "  {name:12} {value}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_listed_in_both_forms() {
        let list = Device::list().unwrap();
        let lo = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
        let text = as_text(&list, true);
        let row = text.lines().find(|l| l.contains("127.0.0.1")).unwrap();
        assert!(
            row.starts_with(&lo.name) && row.ends_with(&guid(&lo)),
            "{text}"
        );
        assert!(text.contains("max_inline"));
        assert!(!as_text(&list, false).contains("max_inline"));
        let j = as_json(&lo);
        assert_eq!(j["address"], "127.0.0.1");
        assert_eq!(j["limits"]["max_sge"], LIMITS.max_sge);
    }
}
