//! The cases between us and siw.

use anyhow::{Result, bail};

use super::lab::{Lab, NETS, OurRole, ROLES, Settings, Setup};
use super::{iser, operations, programs};
use crate::case::Case;
use crate::needs::Need;

/// Configurations of the ping cases: a name, siw's module parameters, and our environment
/// variables.
const CONFIGURATIONS: &[(&str, &str, Settings)] = &[
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

/// Returns all cases, ordered by driver parameters.
pub(super) fn all() -> Vec<Case<Lab>> {
    let mut cases = Vec::new();
    for (name, driver, settings) in CONFIGURATIONS {
        for net in NETS {
            for we in ROLES {
                // As MPA initiator, siw always uses revision 2 and never falls back to revision 1.
                if *name == "revision-1" && we == OurRole::Serve {
                    continue;
                }
                for size in [64, 65000] {
                    let setup = Setup {
                        name: format!("ping-{name}-{size}"),
                        driver,
                        settings,
                        net,
                        we,
                    };
                    let run = match *name {
                        "revision-1" => operations::all_operations,
                        _ => ping,
                    };
                    cases.push(setup.case(move |lab, setup| run(lab, setup, size)));
                }
            }
        }
    }
    cases.extend(programs::cases());
    cases.extend(operations::cases());
    cases.extend(iser::cases());
    // Reloading the driver takes a second, so cases with the same parameters are adjacent.
    let mut order: Vec<&str> = Vec::new();
    for case in &cases {
        if !order.contains(&driver(case)) {
            order.push(driver(case));
        }
    }
    cases.sort_by_key(|case| order.iter().position(|name| *name == driver(case)));
    cases
}

/// Returns the module parameters of siw that a case needs; empty for the unmodified driver.
pub(super) fn driver(case: &Case<Lab>) -> &'static str {
    let driver = case.needs.iter().find_map(|need| match need {
        Need::Siw(parameters) => Some(*parameters),
        _ => None,
    });
    driver.unwrap_or_default()
}

/// Time limit for five pings on a busy machine, in seconds.
const PING_LIMIT: u64 = 40;

/// Runs `iwarp ping` against `rping`, which use Send, RDMA Read and RDMA Write, and compare the
/// data.
fn ping(lab: &Lab, setup: &Setup, size: u32) -> Result<String> {
    let theirs = match setup.we {
        OurRole::Connect => {
            lab.run_both(
                setup,
                &format!("iwarp ping {{addr}} -p {{port}} -C 5 -S {size} -V"),
                &format!("rping -s -a {{addr}} -p {{port}} -C 5 -S {size}"),
                PING_LIMIT,
            )?
            .expect_success()?
            .theirs
        }
        OurRole::Serve => {
            // `iwarp ping serve` does not close first, because rping hangs if it receives the
            // disconnect event before it has handled the last message.
            let mut pair = lab.start(
                setup,
                "iwarp ping serve -a {addr} -p {port}",
                &format!("rping -c -a {{addr}} -p {{port}} -C 5 -S {size} -V"),
                PING_LIMIT,
            )?;
            let theirs = pair.theirs.wait()?;
            if theirs.code != 0 {
                bail!(
                    "rping exited with status {}: {} | output of iwarp ping: {}",
                    theirs.code,
                    theirs.text.trim(),
                    pair.ours.output_so_far()
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
