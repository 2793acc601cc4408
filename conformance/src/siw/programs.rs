//! Unmodified programs of rdma-core and perftest. On this machine they run on our C library, in the guest on siw.

use anyhow::{Context as _, Result, bail};

use super::cases::{Case, NETS, ROLES, Settings, We};
use super::guest::Net;
use super::lab::{Both, Lab};

/// A program and the command lines of its server and its client.
struct Program {
    name: &'static str,
    server: &'static str,
    client: &'static str,
}

const PROGRAMS: &[Program] = &[
    Program {
        name: "rping",
        server: "rping -s -a {addr} -p {port} -C 10 -S 64 -V",
        client: "rping -c -a {addr} -p {port} -C 10 -S 64 -V",
    },
    Program {
        name: "rping-65000",
        server: "rping -s -a {addr} -p {port} -C 3 -S 65000 -V",
        client: "rping -c -a {addr} -p {port} -C 3 -S 65000 -V",
    },
    Program {
        name: "ucmatose",
        server: "ucmatose -b {addr} -p {port} -c 3 -C 5 -S 1000",
        client: "ucmatose -s {addr} -p {port} -c 3 -C 5 -S 1000",
    },
    Program {
        name: "rdma_client",
        server: "rdma_server -s {addr} -p {port}",
        client: "rdma_client -s {addr} -p {port}",
    },
    Program {
        name: "rdma_xclient",
        server: "rdma_xserver -p {port} -c r",
        client: "rdma_xclient -s {addr} -p {port} -c r",
    },
    Program {
        name: "rstream",
        server: "rstream -b {addr} -p {port} -S 65536 -C 20 -I 20 -T v",
        client: "rstream -s {addr} -p {port} -S 65536 -C 20 -I 20 -T v",
    },
    Program {
        name: "rstream-64",
        server: "rstream -b {addr} -p {port} -S 64 -C 1 -I 100 -T v",
        client: "rstream -s {addr} -p {port} -S 64 -C 1 -I 100 -T v",
    },
];

const NO_CRC: Settings = &[("IWARP_CRC", "off")];

/// Programs of perftest.
const PERFTEST: &[&str] = &[
    "ib_write_bw",
    "ib_read_bw",
    "ib_send_bw",
    "ib_write_lat",
    "ib_read_lat",
    "ib_send_lat",
];

/// Seconds that one program may take in the emulated machine.
pub(super) const LIMIT: u64 = 60;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for net in NETS {
        for we in ROLES {
            let case = |name: String, run: super::cases::Run| Case {
                name,
                driver: "",
                settings: &[],
                net,
                we,
                run,
            };
            // siw cannot read a CRC that is split over segments, and the user-mode network divides the stream anew. With
            // much traffic nearly every connection with CRCs would fail there, so these cases switch CRCs off.
            let bulk = match net {
                Net::User => NO_CRC,
                Net::Tap => &[],
            };
            for program in PROGRAMS {
                cases.push(Case {
                    settings: if program.name == "rstream" { bulk } else { &[] },
                    ..case(
                        program.name.to_owned(),
                        Box::new(|lab, case| plain(lab, case, program)),
                    )
                });
            }
            for name in PERFTEST {
                let sizes: &[u32] = if name.ends_with("_bw") {
                    &[2, 4096, 65536, 1 << 20]
                } else {
                    &[2, 64, 65536, 1 << 20]
                };
                for &size in sizes {
                    cases.push(Case {
                        settings: if size >= 4096 { bulk } else { &[] },
                        ..case(
                            format!("{name}-{size}"),
                            Box::new(move |lab, case| perftest(lab, case, name, size)),
                        )
                    });
                }
            }
        }
    }
    cases
}

fn plain(lab: &Lab, case: &Case, program: &Program) -> Result<String> {
    let (ours, theirs) = match case.we {
        We::Connect => (program.client, program.server),
        We::Serve => (program.server, program.client),
    };
    let both = lab.talk(case, ours, theirs, LIMIT)?.succeeded()?;
    for text in [&both.ours.text, &both.theirs.text] {
        if text.contains("mismatch") || text.contains("verify") && text.contains("fail") {
            bail!("{text}");
        }
    }
    Ok(String::new())
}

/// Returns the command line of a perftest program in the guest, without the address of the server.
pub(super) fn words(name: &str, size: u32, rounds: u32, net: Net) -> String {
    let device = match net {
        Net::User => "siw_user",
        Net::Tap => "siw_tap",
    };
    format!("{} -d {device}", our_words(name, size, rounds))
}

fn our_words(name: &str, size: u32, rounds: u32) -> String {
    // The default queue of the bandwidth tests is longer than the shortest test here, which has 10 messages.
    let depth = if name.ends_with("_bw") { " -t 8" } else { "" };
    format!("{name} -R -F -p {{port}} -s {size} -n {rounds}{depth}")
}

fn run_perftest(lab: &Lab, case: &Case, name: &str, size: u32, rounds: u32) -> Result<Both> {
    let (ours, theirs) = (
        our_words(name, size, rounds),
        words(name, size, rounds, case.net),
    );
    match case.we {
        We::Connect => lab.talk(case, &format!("{ours} {{addr}}"), &theirs, LIMIT),
        We::Serve => lab.talk(case, &ours, &format!("{theirs} {{addr}}"), LIMIT),
    }
}

/// Runs a perftest program on both sides and returns what the client measured.
pub(super) fn measure(
    lab: &Lab,
    case: &Case,
    name: &str,
    size: u32,
    rounds: u32,
) -> Result<String> {
    let both = run_perftest(lab, case, name, size, rounds)?;
    figure(&both, name, size, case.we)
}

fn perftest(lab: &Lab, case: &Case, name: &str, size: u32) -> Result<String> {
    let rounds = if size >= 1 << 20 { 10 } else { 100 };
    let both = run_perftest(lab, case, name, size, rounds)?;
    // If our FIN arrives while siw is sending its last Send, siw reports that Send as failed.
    let quirk = both.theirs.code == 1
        && both.theirs.text.contains("Bad wc status 2")
        && both.theirs.text.contains("Failed to close connection");
    let both = if quirk {
        both.ended(0, 1)?
    } else {
        both.succeeded()?
    };
    let figure = figure(&both, name, size, case.we)?;
    Ok(if quirk {
        format!("{figure}; siw: last Send failed by our FIN")
    } else {
        figure
    })
}

/// Returns the result in the client's output.
fn figure(both: &Both, name: &str, size: u32, we: We) -> Result<String> {
    let text = match we {
        We::Connect => &both.ours.text,
        We::Serve => &both.theirs.text,
    };
    value(text, name, size).with_context(|| format!("no result in: {text}"))
}

/// Returns the average bandwidth in MB/s or the typical latency in microseconds, with its unit.
pub(super) fn value(text: &str, name: &str, size: u32) -> Option<String> {
    let row: Vec<&str> = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|words| words.first().and_then(|word| word.parse().ok()) == Some(size))?;
    // Columns of a row: size, rounds, then peak and average, or minimum, maximum and typical.
    if name.ends_with("_bw") {
        row.get(3).map(|value| format!("{value} MB/s"))
    } else {
        row.get(4).map(|value| format!("{value} us"))
    }
}
