//! The table of cases that run between us and siw.

use anyhow::{Result, bail};

use super::guest::Net;
use super::lab::Lab;
use super::{iser, operations, programs};

/// Our part in setting up the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum We {
    /// We are the initiator.
    Connect,
    /// siw is the initiator.
    Serve,
}

/// Our settings: `IWARP_*` variables with their values.
pub(super) type Settings = &'static [(&'static str, &'static str)];

/// Runs a case and returns a note for the table, which may be empty.
pub(super) type Run = Box<dyn Fn(&Lab, &Case) -> Result<String>>;

/// One row of the table.
pub(super) struct Case {
    pub(super) name: String,
    /// Module parameters of siw; empty for the unchanged driver.
    pub(super) driver: &'static str,
    pub(super) settings: Settings,
    pub(super) net: Net,
    /// Our part in setting up the connection.
    pub(super) we: We,
    pub(super) run: Run,
}

impl Case {
    /// Returns the name of the case in the table and for `--only`.
    pub(super) fn title(&self) -> String {
        let direction = match self.we {
            We::Connect => "us->siw",
            We::Serve => "siw->us",
        };
        format!("{} {direction} {}", self.name, self.net.name())
    }
}

pub(super) const NETS: [Net; 2] = [Net::User, Net::Tap];
pub(super) const ROLES: [We; 2] = [We::Connect, We::Serve];

/// The combinations of settings on both sides: a name, siw's module parameters, our settings.
const KINDS: &[(&str, &str, Settings)] = &[
    ("crc", "", &[]),
    ("no-crc", "", &[("IWARP_CRC", "off")]),
    ("client-server", "", &[("IWARP_PEER_TO_PEER", "off")]),
    ("revision-1", "", &[("IWARP_MPA_REV", "1")]),
    ("siw-crc", "mpa_crc_required=1", &[("IWARP_CRC", "off")]),
    ("siw-no-crc", "mpa_crc_strict=1", &[("IWARP_CRC", "off")]),
    ("siw-revision-1", "mpa_version=1", &[]),
    ("siw-rtr-write", "peer_to_peer=1 rtr=2", &[]),
    ("siw-rtr-read", "peer_to_peer=1 rtr=1", &[]),
    ("siw-rtr-both", "peer_to_peer=1 rtr=3", &[]),
    ("siw-rtr-none", "peer_to_peer=1 rtr=0", &[]),
    ("siw-gso", "try_gso=1", &[]),
];

/// Returns all cases. Those with the same driver parameters follow each other.
pub(super) fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, driver, settings) in KINDS {
        for net in NETS {
            for we in ROLES {
                // As initiator siw always uses revision 2 and never falls back to 1.
                if *name == "revision-1" && we == We::Serve {
                    continue;
                }
                for size in [64, 65000] {
                    cases.push(Case {
                        name: format!("ping-{name}-{size}"),
                        driver,
                        settings,
                        net,
                        we,
                        run: match *name {
                            "revision-1" => {
                                Box::new(move |lab, case| operations::everything(lab, case, size))
                            }
                            _ => Box::new(move |lab, case| ping(lab, case, size)),
                        },
                    });
                }
            }
        }
    }
    cases.extend(programs::cases());
    cases.extend(operations::cases());
    cases.extend(iser::cases());
    // Loading the driver takes a second, so cases with the same parameters are put together.
    let mut order: Vec<&str> = Vec::new();
    for case in &cases {
        if !order.contains(&case.driver) {
            order.push(case.driver);
        }
    }
    cases.sort_by_key(|case| order.iter().position(|driver| *driver == case.driver));
    cases
}

/// Seconds for five pings. They take less than one, unless the machine is busy.
const PING_LIMIT: u64 = 40;

/// Runs `iwarp ping` against `rping`, which uses Send, RDMA Read and RDMA Write and compares the data.
fn ping(lab: &Lab, case: &Case, size: u32) -> Result<String> {
    let theirs = match case.we {
        We::Connect => {
            lab.talk(
                case,
                &format!("iwarp ping {{addr}} -p {{port}} -C 5 -S {size} -V"),
                &format!("rping -s -a {{addr}} -p {{port}} -C 5 -S {size}"),
                PING_LIMIT,
            )?
            .succeeded()?
            .theirs
        }
        We::Serve => {
            // Our server has no count and does not close, so rping closes first. rping hangs if it learns of the disconnect
            // before it has handled the last message.
            let mut pair = lab.start(
                case,
                "iwarp ping serve -a {addr} -p {port}",
                &format!("rping -c -a {{addr}} -p {{port}} -C 5 -S {size} -V"),
                PING_LIMIT,
            )?;
            let theirs = pair.theirs.wait()?;
            if theirs.code != 0 {
                bail!(
                    "rping ended with {}: {} | ours: {}",
                    theirs.code,
                    theirs.text.trim(),
                    pair.ours.said()
                );
            }
            theirs
        }
    };
    if theirs.text.contains("mismatch") {
        bail!("{}", theirs.text);
    }
    Ok(String::new())
}
