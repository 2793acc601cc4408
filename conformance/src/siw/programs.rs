//! Unmodified programs of rdma-core and perftest. On this machine they use our C library; in the
//! guest they use siw.

use anyhow::Result;

use super::lab::{Both, Lab, NETS, OurRole, ROLES, Settings, Setup};
use crate::case::Case;
use crate::guest::Net;
use crate::programs::{self, Program};

const NO_CRC: Settings = &[("IWARP_CRC", "off")];
/// Message size from which traffic counts as bulk, in bytes.
const BULK: u32 = 4096;

pub(super) fn cases() -> Vec<Case<Lab>> {
    let mut cases = Vec::new();
    for net in NETS {
        for we in ROLES {
            for program in programs::all(false) {
                // siw cannot read a CRC that is split across segments, and the user-mode network
                // re-segments the stream. Bulk traffic with CRCs would nearly always fail on it.
                let is_bulk =
                    program.name == "rstream" || program.sizes.iter().any(|size| *size >= BULK);
                let setup = Setup {
                    name: program.name.clone(),
                    driver: "",
                    settings: if is_bulk && net == Net::User {
                        NO_CRC
                    } else {
                        &[]
                    },
                    net,
                    we,
                };
                cases.push(setup.case(move |lab, setup| run(lab, setup, &program)));
            }
        }
    }
    cases
}

pub(super) const fn device(net: Net) -> &'static str {
    match net {
        Net::User => "siw_user",
        Net::Tap => "siw_tap",
    }
}

fn run_both(lab: &Lab, setup: &Setup, program: &Program) -> Result<Both> {
    let (ours, theirs) = match setup.we {
        OurRole::Connect => (&program.client, &program.server),
        OurRole::Serve => (&program.server, &program.client),
    };
    let theirs = theirs.replace("{device}", &format!("-d {}", device(setup.net)));
    lab.run_both(
        setup,
        &ours.replace("{device}", ""),
        &theirs,
        program.rules.limit,
    )
}

/// Checks both outputs, and returns the note for the table.
fn note(both: &Both, program: &Program, we: OurRole) -> Result<String> {
    match we {
        OurRole::Connect => program.check(&both.theirs, &both.ours),
        OurRole::Serve => program.check(&both.ours, &both.theirs),
    }
}

/// Runs a program, and returns the client's result.
pub(super) fn measure(lab: &Lab, setup: &Setup, program: &Program) -> Result<String> {
    note(&run_both(lab, setup, program)?, program, setup.we)
}

fn run(lab: &Lab, setup: &Setup, program: &Program) -> Result<String> {
    let both = run_both(lab, setup, program)?;
    // If our FIN arrives while siw processes its last Send, siw reports that Send as failed.
    let siw_send_failed = both.theirs.code == 1
        && both.theirs.text.contains("Bad wc status 2")
        && both.theirs.text.contains("Failed to close connection");
    let both = if siw_send_failed {
        both.expect_status(0, 1)?
    } else {
        both.expect_success()?
    };
    let note = note(&both, program, setup.we)?;
    Ok(if siw_send_failed {
        format!("{note}; siw reported its last Send as failed because of our FIN")
    } else {
        note
    })
}
