//! libfabric's verbs provider, alone and with `ofi_rxm`, which implements reliable datagrams on top
//! of it. The provider ignores loopback interfaces.

use anyhow::{Result, bail};

use super::checks::expect;
use super::stage::{Stage, WIRE_V4, WIRE_V6};
use crate::case::{Case, Verdict};

const NEEDS: &[&str] = &["libfabric-bin"];
const RDM: &str = "verbs;ofi_rxm";
/// Number of message sizes with `-S all`, from 0 bytes to 6 MiB.
const SIZES: usize = 46;

pub(super) fn cases() -> Vec<Case<Stage>> {
    vec![
        Case::new("fi_info", "`-p verbs`, IPv4 and IPv6", info),
        Case::new("fi_pingpong", "`-p verbs -e msg -S all -c`", |stage| {
            pingpong(stage, "verbs", "msg")
        }),
        Case::new(
            "fi_pingpong",
            "`-p 'verbs;ofi_rxm' -e rdm -S all -c`",
            |stage| pingpong(stage, RDM, "rdm"),
        ),
    ]
    .into_iter()
    .map(|case| case.needs(NEEDS).wire())
    .collect()
}

/// Lists the devices that are not on loopback, and searches for a device by its address.
fn info(stage: &Stage) -> Result<Verdict> {
    let output = stage.start(&["fi_info", "-p", "verbs"])?.success()?;
    for text in [
        "provider: verbs",
        "fabric: Ethernet-iWARP",
        "type: FI_EP_MSG",
        "protocol: FI_PROTO_IWARP",
        "provider: verbs;ofi_rxm",
        "type: FI_EP_RDM",
    ] {
        expect(&output, text)?;
    }
    // Without `-a`, fi_info assumes IPv4.
    let formats = [
        (WIRE_V4, "FI_SOCKADDR_IN", "fi_sockaddr_in://10.77.0.1:0"),
        (WIRE_V6, "FI_SOCKADDR_IN6", "fi_sockaddr_in6://[fd77::1]:0"),
    ];
    for (address, format, found) in formats {
        let common = ["fi_info", "-p", "verbs", "-t", "FI_EP_MSG", "-v"];
        let words = [&common[..], &["-a", format, "-s", address]].concat();
        let output = stage.start(&words)?.success()?;
        expect(&output, &format!("src_addr: {found}"))?;
    }
    Ok(Verdict::passed("messages and datagrams over them"))
}

/// Sends messages of all sizes in both directions and compares their content. fi_pingpong's control
/// connection supports IPv4 only.
fn pingpong(stage: &Stage, provider: &str, kind: &str) -> Result<Verdict> {
    let port = stage.port()?;
    let number = port.to_string();
    let common = ["-p", provider, "-e", kind, "-S", "all", "-I", "10", "-c"];
    let mut words = vec!["fi_pingpong", "-B", &number];
    words.extend(common);
    let server = stage.start(&words)?;
    stage.wait_for_port(port)?;
    let mut words = vec!["fi_pingpong", "-P", &number];
    words.extend(common);
    words.push(WIRE_V4);
    let output = stage.start(&words)?.success()?;
    for output in [output, server.success()?] {
        let done = output.lines().filter(|line| line.contains("=10 ")).count();
        if done != SIZES {
            bail!("{done} sizes instead of {SIZES}");
        }
        expect(&output, "\n6m ")?;
    }
    Ok(Verdict::passed(format!("{SIZES} sizes")))
}
