//! rdmacm-utils: connection set-up in all its forms.

use anyhow::Result;

use super::case::{Case, Verdict, expect, expect_lines};
use super::stage::Stage;

const NEEDS: &[&str] = &["rdmacm-utils"];

/// The cases of this file.
pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("rping", "`-C 10 -V`", |stage| {
            rping(stage, "127.0.0.1", 10, &["-V"])
        }),
        Case::new("rping", "IPv6", |stage| rping(stage, "::1", 10, &["-V"])),
        Case::new("rping", "`-q`", |stage| {
            rping(stage, "127.0.0.1", 10, &["-V", "-q"])
        }),
        Case::new("rping", "`-S 64 … 65000`", |stage| {
            for size in ["64", "100", "1000", "4096", "10000", "65000"] {
                rping(stage, "127.0.0.1", 20, &["-V", "-S", size])?;
            }
            Ok(Verdict::passed("6 sizes"))
        }),
    ]
    .into_iter()
    .map(|case| case.needs(NEEDS))
    .collect()
}

/// A server and a client that exchange `count` pings. Both print each of them with `-v`.
fn rping(stage: &Stage, address: &str, count: usize, options: &[&str]) -> Result<Verdict> {
    let (port, pings) = (stage.port()?, count.to_string());
    let number = port.to_string();
    let mut server = vec![
        "rping", "-s", "-a", address, "-p", &number, "-C", &pings, "-v",
    ];
    server.extend(options);
    let server = stage.start(&server)?;
    stage.wait_for_port(port)?;
    let mut client = vec![
        "rping", "-c", "-a", address, "-p", &number, "-C", &pings, "-v",
    ];
    client.extend(options);
    let said = stage.start(&client)?.success()?;
    expect_lines(&said, "ping data: rdma-ping-", count)?;
    expect(&said, &format!("rdma-ping-{}", count - 1))?;
    let said = server.success()?;
    expect_lines(&said, "server ping data: rdma-ping-", count)?;
    Ok(Verdict::passed(format!("{count} pings")))
}
