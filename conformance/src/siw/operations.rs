//! Single operations of `guest/peer.c` at both ends: private data, IRD and ORD, rejected
//! connections, disconnects, and errors with their Terminate messages.

use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};

use super::lab::{Both, Lab, NETS, ROLES, Setup, We};
use crate::case::Case;
use crate::guest::Net;

/// Time limit of one conversation, in seconds.
const LIMIT: u64 = 40;

/// A conversation: the arguments of both ends, and text that their outputs must contain.
struct Talk {
    name: &'static str,
    server: &'static str,
    client: &'static str,
    server_says: &'static [&'static str],
    client_says: &'static [&'static str],
    client_ends: i32,
}

const ALL_WELL: Talk = Talk {
    name: "",
    server: "",
    client: "",
    server_says: &["changed 0"],
    client_says: &["event ESTABLISHED", "event DISCONNECTED"],
    client_ends: 0,
};

const TALKS: &[Talk] = &[
    Talk {
        name: "private-data-0",
        server: "priv=0",
        client: "priv=0 op=send:8",
        server_says: &["CONNECT_REQUEST status 0 priv 0 "],
        client_says: &["ESTABLISHED status 0 priv 0 "],
        ..ALL_WELL
    },
    Talk {
        name: "private-data-1-30",
        server: "priv=30",
        client: "priv=1 op=send:8",
        server_says: &["CONNECT_REQUEST status 0 priv 1 "],
        client_says: &["ESTABLISHED status 0 priv 30 ", "private data: 0 wrong"],
        ..ALL_WELL
    },
    Talk {
        name: "private-data-251",
        server: "priv=251",
        client: "priv=251 op=send:8",
        server_says: &[
            "CONNECT_REQUEST status 0 priv 251 ",
            "private data: 0 wrong",
        ],
        client_says: &["ESTABLISHED status 0 priv 251 ", "private data: 0 wrong"],
        ..ALL_WELL
    },
    Talk {
        name: "reads-0-0",
        server: "ird=0 ord=0",
        client: "ird=0 ord=0 op=write:64,send:8",
        server_says: &["changed 64"],
        ..ALL_WELL
    },
    Talk {
        name: "reads-1-1",
        server: "ird=1 ord=1",
        client: "ird=1 ord=1 op=read:2000,read:2000,read:2000,read:2000",
        client_says: &["wc 4 success"],
        ..ALL_WELL
    },
    Talk {
        name: "reads-server-2-client-16",
        server: "ird=2 ord=2",
        client: "ird=16 ord=16 op=read:64,read:64,read:64,read:64,read:64,read:64",
        client_says: &["wc 6 success"],
        ..ALL_WELL
    },
    Talk {
        name: "reads-server-16-client-2",
        server: "ird=16 ord=16",
        client: "ird=2 ord=2 op=read:64,read:64,read:64,read:64,read:64,read:64",
        client_says: &["wc 6 success"],
        ..ALL_WELL
    },
    Talk {
        name: "reads-64-64",
        server: "ird=64 ord=64",
        client: "ird=64 ord=64 op=read:64,read:65536",
        client_says: &["wc 2 success"],
        ..ALL_WELL
    },
    Talk {
        name: "zero-length",
        server: "",
        client: "op=write:0,send:0,read:0",
        client_says: &["wc 3 success"],
        ..ALL_WELL
    },
    Talk {
        name: "sizes-around-a-segment",
        server: "recvs=16",
        client: "op=write:1421,write:1428,write:1429,send:1420,send:1424,send:1425,read:1427,\
                 read:1433,send:3,write:65535",
        // Some written bytes had the same value before and do not count as changed.
        server_says: &["changed 652"],
        client_says: &["wc 10 success"],
        ..ALL_WELL
    },
    Talk {
        name: "server-sends-first",
        server: "op=send:100 pause=0",
        // The client stays silent until the server no longer waits for its first message, also on a
        // busy machine.
        client: "pause=1000 stay=1000 op=send:8",
        server_says: &["wc 1000 success"],
        client_says: &["wc 1000 success len 100"],
        ..ALL_WELL
    },
    Talk {
        name: "reject",
        server: "reject=1",
        client: "",
        server_says: &["rejected"],
        client_says: &["event REJECTED"],
        client_ends: 3,
    },
    Talk {
        name: "reject-with-data",
        server: "reject=1 priv=64",
        client: "",
        server_says: &["rejected"],
        client_says: &["event REJECTED", "priv 64 "],
        client_ends: 3,
    },
    Talk {
        name: "server-closes",
        server: "close=us",
        client: "close=peer",
        ..ALL_WELL
    },
    Talk {
        name: "client-exits",
        server: "",
        client: "op=send:8 close=exit",
        server_says: &["wc 1000 success", "event DISCONNECTED"],
        client_says: &["event ESTABLISHED"],
        ..ALL_WELL
    },
    Talk {
        name: "client-exits-in-a-write",
        server: "",
        client: "op=write:65536,write:65536,write:65536,write:65536 close=exit",
        server_says: &["event DISCONNECTED"],
        client_says: &["event ESTABLISHED"],
        ..ALL_WELL
    },
];

/// Runs Reads, Writes and Sends in both directions. Replaces rping for revision 1, where siw
/// reports no Read depth, which rping uses.
pub(super) fn everything(lab: &Lab, setup: &Setup, size: u32) -> Result<String> {
    // siw computes the CRC of a Read Response before it sends the memory. A Write in between would
    // invalidate the CRC, so it waits for the Read.
    let ops = format!("op=read:{size},wait,write:{size},send:8");
    let both = talk(
        lab,
        setup,
        &format!("pause=600 {ops}"),
        &format!("pause=100 stay=4000 {ops}"),
    )?
    .succeeded()?;
    let (server, client) = sides(&both, setup.we);
    let all = [
        "wc 1 success",
        "wc 2 success",
        "wc 3 success",
        "wc 1000 success len 8",
    ];
    says("server", server, &all)?;
    says("client", client, &all)?;
    Ok(String::new())
}

/// An operation that the peer must answer with a Terminate.
struct Wrong {
    name: &'static str,
    server: &'static str,
    op: &'static str,
    /// Layer, type and code of the Terminate that RFC 5040 requires from us.
    terminate: (u8, u8, u8),
    /// siw executes the operation instead of refusing it.
    allowed_by_siw: bool,
}

const WRONGS: &[Wrong] = &[
    Wrong {
        name: "write-bad-stag",
        server: "",
        op: "write+stag:64",
        terminate: (1, 1, 0),
        allowed_by_siw: false,
    },
    Wrong {
        name: "write-beyond-the-end",
        server: "",
        op: "write+end:64",
        terminate: (1, 1, 1),
        allowed_by_siw: false,
    },
    Wrong {
        name: "write-below-the-start",
        server: "",
        op: "write+low:64",
        terminate: (1, 1, 1),
        allowed_by_siw: false,
    },
    Wrong {
        name: "write-without-permission",
        server: "access=r",
        op: "write:64",
        // DDP has no error code for missing permission, so RDMAP reports it.
        terminate: (0, 1, 2),
        allowed_by_siw: false,
    },
    Wrong {
        name: "write-other-pd",
        server: "otherpd=1",
        op: "write:64",
        terminate: (1, 1, 2),
        allowed_by_siw: false,
    },
    Wrong {
        name: "read-bad-stag",
        server: "",
        op: "read+stag:64",
        terminate: (0, 1, 0),
        allowed_by_siw: false,
    },
    Wrong {
        name: "read-beyond-the-end",
        server: "",
        op: "read+end:64",
        terminate: (0, 1, 1),
        allowed_by_siw: false,
    },
    Wrong {
        name: "read-without-permission",
        server: "access=w",
        op: "read:64",
        terminate: (0, 1, 2),
        allowed_by_siw: true,
    },
    Wrong {
        name: "read-other-pd",
        server: "otherpd=1",
        op: "read:64",
        terminate: (0, 1, 3),
        allowed_by_siw: false,
    },
    Wrong {
        name: "send-too-long",
        server: "recvlen=64",
        op: "send:65",
        terminate: (1, 2, 5),
        allowed_by_siw: false,
    },
    Wrong {
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
                // Without a time-out of 0, our side would hold a Send that has no receive.
                settings: &[("IWARP_RNR_TIMEOUT_MS", "0")],
                net,
                we,
            };
            for talk in TALKS {
                cases.push(setup(talk.name).case(|lab, setup| converse(lab, setup, talk)));
            }
            for wrong in WRONGS {
                let setup = setup(&format!("error-{}", wrong.name));
                cases.push(setup.case(|lab, setup| refuse(lab, setup, wrong)));
            }
            // The user-mode network does not forward datagrams to the guest.
            if net == Net::Tap && we == We::Connect {
                let setup = Setup {
                    settings: &[("IWARP_PORT_MAPPER", "on")],
                    ..setup("port-mapper")
                };
                cases.push(setup.case(ask_port_mapper));
            }
            for (who, ours) in [("we-die", true), ("siw-dies", false)] {
                cases.push(setup(who).case(move |lab, setup| die(lab, setup, ours)));
            }
        }
    }
    cases
}

fn talk(lab: &Lab, setup: &Setup, server: &str, client: &str) -> Result<Both> {
    let server = format!("peer serve {{addr}} {{port}} {server}");
    let client = format!("peer connect {{addr}} {{port}} {client}");
    match setup.we {
        We::Connect => lab.talk(setup, &client, &server, LIMIT),
        We::Serve => lab.talk(setup, &server, &client, LIMIT),
    }
}

const fn sides(both: &Both, we: We) -> (&String, &String) {
    match we {
        We::Connect => (&both.theirs.text, &both.ours.text),
        We::Serve => (&both.ours.text, &both.theirs.text),
    }
}

fn says(who: &str, text: &str, wanted: &[&str]) -> Result<()> {
    for words in wanted {
        if !text.contains(words) {
            bail!(
                "{who}: no {words:?} in: {}",
                text.trim().replace('\n', " / ")
            );
        }
    }
    match text.lines().find(|line| line.starts_with("failed")) {
        Some(line) => bail!("{who}: {line}: {}", text.trim().replace('\n', " / ")),
        None => Ok(()),
    }
}

fn converse(lab: &Lab, setup: &Setup, what: &Talk) -> Result<String> {
    let both = talk(lab, setup, what.server, what.client)?;
    let both = match setup.we {
        We::Connect => both.ended(what.client_ends, 0),
        We::Serve => both.ended(0, what.client_ends),
    }?;
    let (server, client) = sides(&both, setup.we);
    says("server", server, what.server_says)?;
    says("client", client, what.client_says)?;
    Ok(String::new())
}

fn refuse(lab: &Lab, setup: &Setup, wrong: &Wrong) -> Result<String> {
    let capture = match setup.net {
        Net::Tap => Some(lab.capture(&setup.title())?),
        Net::User => None,
    };
    let both = talk(lab, setup, wrong.server, &format!("op={}", wrong.op))?;
    let both = both.succeeded()?;
    let (server, client) = sides(&both, setup.we);
    if setup.we == We::Connect && wrong.allowed_by_siw {
        says("client", client, &["wc 1 success"])?;
        return Ok("siw lets it pass".to_owned());
    }
    says("server", server, &["event DISCONNECTED", "changed 0"])?;
    says("client", client, &["event DISCONNECTED"])?;
    // A Write or Send may complete before the peer has checked it; a Read completes after the
    // peer's answer.
    if wrong.op.starts_with("read") && client.contains("wc 1 success") {
        bail!("the read succeeded: {client}");
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
        We::Connect if seen.siw_layout => Ok(format!("siw: {}", seen.shown)),
        We::Connect => bail!(
            "siw's Terminate has another layout than we know: {}",
            seen.shown
        ),
        We::Serve if (seen.layer, seen.kind, seen.code) == wrong.terminate => {
            Ok(format!("we: {}", seen.shown))
        }
        We::Serve => bail!(
            "our Terminate is {}, {:?} expected",
            seen.shown,
            wrong.terminate
        ),
    }
}

/// Connects after a query to the guest's port mapper, `iwpmd`, which knows siw's listeners and
/// returns the same port.
fn ask_port_mapper(lab: &Lab, setup: &Setup) -> Result<String> {
    // Dropping the value kills the daemon.
    let _mapper = lab.guest.start_command("exec iwpmd -s", 2 * LIMIT)?;
    lab.guest.must(
        "for i in $(seq 200); do
        grep -q ':0F5F ' /proc/net/udp && exit 0; usleep 50000
        done; exit 1",
        30,
    )?;
    let capture = lab.capture_of(&setup.title(), "udp port 3935")?;
    let result = converse(
        lab,
        setup,
        &Talk {
            client: "op=read:64,send:8",
            client_says: &["wc 2 success"],
            ..ALL_WELL
        },
    );
    let file = capture.finish()?;
    result?;
    // Our request, the daemon's accept, and our acknowledgement, without which the daemon would
    // repeat its accept.
    let kinds = super::wire::fields(&file, "udp.port == 3935", "udp.payload")?;
    let kinds: Vec<&str> = kinds.iter().map(|octets| &octets[..2]).collect();
    match kinds[..] {
        ["04", "14", "24"] => Ok("iwpmd: asked, accepted, acknowledged".to_owned()),
        _ => bail!("messages of the kinds {kinds:?}"),
    }
}

/// Kills one end while data is exchanged. The other end must notice, and a new connection must
/// work.
fn die(lab: &Lab, setup: &Setup, ours: bool) -> Result<String> {
    let (server, client) = (
        "rping -s -a {addr} -p {port} -S 60000",
        "rping -c -a {addr} -p {port} -S 60000",
    );
    let mut pair = match setup.we {
        We::Connect => lab.start(setup, client, server, LIMIT),
        We::Serve => lab.start(setup, server, client, LIMIT),
    }?;
    thread::sleep(Duration::from_secs(1));
    if ours {
        pair.ours.kill();
        let theirs = pair.theirs.wait()?;
        // rping may wait for ever for a message after the disconnect event.
        if theirs.code == 124 && !theirs.text.contains("DISCONNECT EVENT") {
            bail!("siw's side did not notice: {}", theirs.text);
        }
    } else {
        drop(pair.theirs);
        let ours = pair.ours.wait(LIMIT)?;
        if ours.code == 124 {
            bail!("our side did not notice: {}", ours.text);
        }
    }
    converse(
        lab,
        setup,
        &Talk {
            client: "op=read:64,send:8",
            client_says: &["wc 2 success"],
            ..ALL_WELL
        },
    )
}
