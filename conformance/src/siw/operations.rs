//! Individual operations with `guest/peer.c` at both ends: private data, IRD and ORD, rejected
//! connections, disconnects, and errors with their Terminate messages.

use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};

use super::lab::{Both, Lab, NETS, OurRole, ROLES, Setup};
use crate::case::Case;
use crate::guest::Net;

/// Time limit of one exchange, in seconds.
const LIMIT: u64 = 40;

/// An exchange: the arguments of `peer` at both ends, and texts that their outputs must contain.
struct Exchange {
    name: &'static str,
    server: &'static str,
    client: &'static str,
    server_prints: &'static [&'static str],
    client_prints: &'static [&'static str],
    client_status: i32,
}

const SUCCESS: Exchange = Exchange {
    name: "",
    server: "",
    client: "",
    server_prints: &["changed 0"],
    client_prints: &["event ESTABLISHED", "event DISCONNECTED"],
    client_status: 0,
};

const EXCHANGES: &[Exchange] = &[
    Exchange {
        name: "private-data-0",
        server: "priv=0",
        client: "priv=0 op=send:8",
        server_prints: &["CONNECT_REQUEST status 0 priv 0 "],
        client_prints: &["ESTABLISHED status 0 priv 0 "],
        ..SUCCESS
    },
    Exchange {
        name: "private-data-1-30",
        server: "priv=30",
        client: "priv=1 op=send:8",
        server_prints: &["CONNECT_REQUEST status 0 priv 1 "],
        client_prints: &["ESTABLISHED status 0 priv 30 ", "private data: 0 wrong"],
        ..SUCCESS
    },
    Exchange {
        name: "private-data-251",
        server: "priv=251",
        client: "priv=251 op=send:8",
        server_prints: &[
            "CONNECT_REQUEST status 0 priv 251 ",
            "private data: 0 wrong",
        ],
        client_prints: &["ESTABLISHED status 0 priv 251 ", "private data: 0 wrong"],
        ..SUCCESS
    },
    Exchange {
        name: "reads-0-0",
        server: "ird=0 ord=0",
        client: "ird=0 ord=0 op=write:64,send:8",
        server_prints: &["changed 64"],
        ..SUCCESS
    },
    Exchange {
        name: "reads-1-1",
        server: "ird=1 ord=1",
        client: "ird=1 ord=1 op=read:2000,read:2000,read:2000,read:2000",
        client_prints: &["wc 4 success"],
        ..SUCCESS
    },
    Exchange {
        name: "reads-server-2-client-16",
        server: "ird=2 ord=2",
        client: "ird=16 ord=16 op=read:64,read:64,read:64,read:64,read:64,read:64",
        client_prints: &["wc 6 success"],
        ..SUCCESS
    },
    Exchange {
        name: "reads-server-16-client-2",
        server: "ird=16 ord=16",
        client: "ird=2 ord=2 op=read:64,read:64,read:64,read:64,read:64,read:64",
        client_prints: &["wc 6 success"],
        ..SUCCESS
    },
    Exchange {
        name: "reads-64-64",
        server: "ird=64 ord=64",
        client: "ird=64 ord=64 op=read:64,read:65536",
        client_prints: &["wc 2 success"],
        ..SUCCESS
    },
    Exchange {
        name: "zero-length",
        server: "",
        client: "op=write:0,send:0,read:0",
        client_prints: &["wc 3 success"],
        ..SUCCESS
    },
    Exchange {
        name: "sizes-around-a-segment",
        server: "recvs=16",
        client: "op=write:1421,write:1428,write:1429,send:1420,send:1424,send:1425,read:1427,\
                 read:1433,send:3,write:65535",
        // Bytes that are overwritten with their old value do not count as changed.
        server_prints: &["changed 652"],
        client_prints: &["wc 10 success"],
        ..SUCCESS
    },
    Exchange {
        name: "server-sends-first",
        server: "op=send:100 pause=0",
        // The client sends nothing until the server has stopped waiting for the client's first
        // message, even on a busy machine.
        client: "pause=1000 stay=1000 op=send:8",
        server_prints: &["wc 1000 success"],
        client_prints: &["wc 1000 success len 100"],
        ..SUCCESS
    },
    Exchange {
        name: "reject",
        server: "reject=1",
        client: "",
        server_prints: &["rejected"],
        client_prints: &["event REJECTED"],
        client_status: 3,
    },
    Exchange {
        name: "reject-with-data",
        server: "reject=1 priv=64",
        client: "",
        server_prints: &["rejected"],
        client_prints: &["event REJECTED", "priv 64 "],
        client_status: 3,
    },
    Exchange {
        name: "server-closes",
        server: "close=us",
        client: "close=peer",
        ..SUCCESS
    },
    Exchange {
        name: "client-exits",
        server: "",
        client: "op=send:8 close=exit",
        server_prints: &["wc 1000 success", "event DISCONNECTED"],
        client_prints: &["event ESTABLISHED"],
        ..SUCCESS
    },
    Exchange {
        name: "client-exits-in-a-write",
        server: "",
        client: "op=write:65536,write:65536,write:65536,write:65536 close=exit",
        server_prints: &["event DISCONNECTED"],
        client_prints: &["event ESTABLISHED"],
        ..SUCCESS
    },
];

/// Runs Reads, Writes and Sends in both directions. Replaces rping for MPA revision 1: rping uses
/// the Read depths, which siw does not report with this revision.
pub(super) fn all_operations(lab: &Lab, setup: &Setup, size: u32) -> Result<String> {
    // siw computes the CRC of a Read Response before it sends the memory. A Write in between would
    // make the CRC wrong, so the Write is posted after the Read has completed.
    let ops = format!("op=read:{size},wait,write:{size},send:8");
    let both = run_peers(
        lab,
        setup,
        &format!("pause=600 {ops}"),
        &format!("pause=100 stay=4000 {ops}"),
    )?
    .expect_success()?;
    let (server, client) = server_and_client(&both, setup.we);
    let all = [
        "wc 1 success",
        "wc 2 success",
        "wc 3 success",
        "wc 1000 success len 8",
    ];
    check_output("server", server, &all)?;
    check_output("client", client, &all)?;
    Ok(String::new())
}

/// An invalid operation, for which the peer must send a Terminate.
struct InvalidOperation {
    name: &'static str,
    server: &'static str,
    op: &'static str,
    /// Layer, type and code of the Terminate that RFC 5040 requires.
    terminate: (u8, u8, u8),
    /// siw executes the operation instead of sending a Terminate.
    allowed_by_siw: bool,
}

const INVALID_OPERATIONS: &[InvalidOperation] = &[
    InvalidOperation {
        name: "write-bad-stag",
        server: "",
        op: "write+stag:64",
        terminate: (1, 1, 0),
        allowed_by_siw: false,
    },
    InvalidOperation {
        name: "write-beyond-the-end",
        server: "",
        op: "write+end:64",
        terminate: (1, 1, 1),
        allowed_by_siw: false,
    },
    InvalidOperation {
        name: "write-below-the-start",
        server: "",
        op: "write+low:64",
        terminate: (1, 1, 1),
        allowed_by_siw: false,
    },
    InvalidOperation {
        name: "write-without-permission",
        server: "access=r",
        op: "write:64",
        // DDP has no error code for missing permission, so RDMAP reports it.
        terminate: (0, 1, 2),
        allowed_by_siw: false,
    },
    InvalidOperation {
        name: "write-other-pd",
        server: "otherpd=1",
        op: "write:64",
        terminate: (1, 1, 2),
        allowed_by_siw: false,
    },
    InvalidOperation {
        name: "read-bad-stag",
        server: "",
        op: "read+stag:64",
        terminate: (0, 1, 0),
        allowed_by_siw: false,
    },
    InvalidOperation {
        name: "read-beyond-the-end",
        server: "",
        op: "read+end:64",
        terminate: (0, 1, 1),
        allowed_by_siw: false,
    },
    InvalidOperation {
        name: "read-without-permission",
        server: "access=w",
        op: "read:64",
        terminate: (0, 1, 2),
        allowed_by_siw: true,
    },
    InvalidOperation {
        name: "read-other-pd",
        server: "otherpd=1",
        op: "read:64",
        terminate: (0, 1, 3),
        allowed_by_siw: false,
    },
    InvalidOperation {
        name: "send-too-long",
        server: "recvlen=64",
        op: "send:65",
        terminate: (1, 2, 5),
        allowed_by_siw: false,
    },
    InvalidOperation {
        name: "send-without-receive",
        server: "recvs=0",
        op: "send:8",
        terminate: (1, 2, 2),
        allowed_by_siw: false,
    },
];

pub(super) fn cases() -> Vec<Case<Lab>> {
    let mut cases = Vec::new();
    for net in NETS {
        for we in ROLES {
            let setup = |name: &str| Setup {
                name: name.to_owned(),
                driver: "",
                // With the default time-out, our side would hold a Send that finds no receive.
                settings: &[("IWARP_RNR_TIMEOUT_MS", "0")],
                net,
                we,
            };
            for talk in EXCHANGES {
                cases.push(setup(talk.name).case(|lab, setup| run_exchange(lab, setup, talk)));
            }
            for invalid in INVALID_OPERATIONS {
                let setup = setup(&format!("error-{}", invalid.name));
                cases.push(setup.case(|lab, setup| expect_terminate(lab, setup, invalid)));
            }
            // The user-mode network does not forward datagrams to the guest.
            if net == Net::Tap && we == OurRole::Connect {
                let setup = Setup {
                    settings: &[("IWARP_PORT_MAPPER", "on")],
                    ..setup("port-mapper")
                };
                cases.push(setup.case(query_port_mapper));
            }
            for (side, ours) in [("we-die", true), ("siw-dies", false)] {
                cases.push(setup(side).case(move |lab, setup| kill_one_end(lab, setup, ours)));
            }
        }
    }
    cases
}

fn run_peers(lab: &Lab, setup: &Setup, server: &str, client: &str) -> Result<Both> {
    let server = format!("peer serve {{addr}} {{port}} {server}");
    let client = format!("peer connect {{addr}} {{port}} {client}");
    match setup.we {
        OurRole::Connect => lab.run_both(setup, &client, &server, LIMIT),
        OurRole::Serve => lab.run_both(setup, &server, &client, LIMIT),
    }
}

const fn server_and_client(both: &Both, we: OurRole) -> (&String, &String) {
    match we {
        OurRole::Connect => (&both.theirs.text, &both.ours.text),
        OurRole::Serve => (&both.ours.text, &both.theirs.text),
    }
}

fn check_output(side: &str, text: &str, wanted: &[&str]) -> Result<()> {
    for words in wanted {
        if !text.contains(words) {
            bail!(
                "{side}: no {words:?} in the output: {}",
                text.trim().replace('\n', " / ")
            );
        }
    }
    match text.lines().find(|line| line.starts_with("failed")) {
        Some(line) => bail!("{side}: {line}: {}", text.trim().replace('\n', " / ")),
        None => Ok(()),
    }
}

fn run_exchange(lab: &Lab, setup: &Setup, what: &Exchange) -> Result<String> {
    let both = run_peers(lab, setup, what.server, what.client)?;
    let both = match setup.we {
        OurRole::Connect => both.expect_status(what.client_status, 0),
        OurRole::Serve => both.expect_status(0, what.client_status),
    }?;
    let (server, client) = server_and_client(&both, setup.we);
    check_output("server", server, what.server_prints)?;
    check_output("client", client, what.client_prints)?;
    Ok(String::new())
}

fn expect_terminate(lab: &Lab, setup: &Setup, invalid: &InvalidOperation) -> Result<String> {
    let capture = match setup.net {
        Net::Tap => Some(lab.capture(&setup.title())?),
        Net::User => None,
    };
    let both = run_peers(lab, setup, invalid.server, &format!("op={}", invalid.op))?;
    let both = both.expect_success()?;
    let (server, client) = server_and_client(&both, setup.we);
    if setup.we == OurRole::Connect && invalid.allowed_by_siw {
        check_output("client", client, &["wc 1 success"])?;
        return Ok("siw executes it".to_owned());
    }
    check_output("server", server, &["event DISCONNECTED", "changed 0"])?;
    check_output("client", client, &["event DISCONNECTED"])?;
    // A Write or Send may complete before the peer has checked it. A Read completes only after the
    // peer's response.
    if invalid.op.starts_with("read") && client.contains("wc 1 success") {
        bail!("the invalid Read succeeded: {client}");
    }
    let Some(capture) = capture else {
        return Ok(String::new());
    };
    let file = capture.finish()?;
    let seen = super::wire::terminates(&file)?;
    let [seen] = &seen[..] else {
        bail!("{} Terminate messages instead of one", seen.len());
    };
    match setup.we {
        OurRole::Connect if seen.siw_layout => Ok(format!("siw: {}", seen.shown)),
        OurRole::Connect => bail!(
            "siw's Terminate does not have siw's known layout: {}",
            seen.shown
        ),
        OurRole::Serve if (seen.layer, seen.kind, seen.code) == invalid.terminate => {
            Ok(format!("we: {}", seen.shown))
        }
        OurRole::Serve => bail!(
            "wrong Terminate from us: {}; expected layer, type and code {:?}",
            seen.shown,
            invalid.terminate
        ),
    }
}

/// Connects after a query to the guest's port mapper, `iwpmd`. For a listener of siw, it returns
/// the port of the query.
fn query_port_mapper(lab: &Lab, setup: &Setup) -> Result<String> {
    // Dropping the value kills the daemon.
    let _mapper = lab.guest.start_command("exec iwpmd -s", 2 * LIMIT)?;
    lab.guest.run_checked(
        "for i in $(seq 200); do
        grep -q ':0F5F ' /proc/net/udp && exit 0; usleep 50000
        done; exit 1",
        30,
    )?;
    let capture = lab.capture_filtered(&setup.title(), "udp port 3935")?;
    let result = run_exchange(
        lab,
        setup,
        &Exchange {
            client: "op=read:64,send:8",
            client_prints: &["wc 2 success"],
            ..SUCCESS
        },
    );
    let file = capture.finish()?;
    result?;
    // The expected messages: our request, the daemon's accept, and our acknowledgement.
    let kinds = super::wire::fields(&file, "udp.port == 3935", "udp.payload")?;
    let kinds: Vec<&str> = kinds.iter().map(|octets| &octets[..2]).collect();
    match kinds[..] {
        ["04", "14", "24"] => Ok("iwpmd: request, accept, acknowledgement".to_owned()),
        _ => bail!("unexpected port mapper messages, by first octet: {kinds:?}"),
    }
}

/// Kills one end while data is in flight. The other end must get a disconnect event, and a new
/// connection must work.
fn kill_one_end(lab: &Lab, setup: &Setup, ours: bool) -> Result<String> {
    let (server, client) = (
        "rping -s -a {addr} -p {port} -S 60000",
        "rping -c -a {addr} -p {port} -S 60000",
    );
    let mut pair = match setup.we {
        OurRole::Connect => lab.start(setup, client, server, LIMIT),
        OurRole::Serve => lab.start(setup, server, client, LIMIT),
    }?;
    thread::sleep(Duration::from_secs(1));
    if ours {
        pair.ours.kill();
        let theirs = pair.theirs.wait()?;
        // After the disconnect event, rping may wait for ever for a message.
        if theirs.code == 124 && !theirs.text.contains("DISCONNECT EVENT") {
            bail!("the end on siw got no disconnect event: {}", theirs.text);
        }
    } else {
        drop(pair.theirs);
        let ours = pair.ours.wait(LIMIT)?;
        if ours.code == 124 {
            bail!("our end got no disconnect event: {}", ours.text);
        }
    }
    run_exchange(
        lab,
        setup,
        &Exchange {
            client: "op=read:64,send:8",
            client_prints: &["wc 2 success"],
            ..SUCCESS
        },
    )
}
