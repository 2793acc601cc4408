//! Unmodified programs of rdma-core and perftest. On this machine they use our C library, in the
//! guest siw.

use anyhow::Result;

use super::lab::{Both, Lab, NETS, ROLES, Settings, Setup, We};
use crate::case::Case;
use crate::guest::Net;
use crate::programs::{self, Program};

const NO_CRC: Settings = &[("IWARP_CRC", "off")];
/// Message size in bytes from which a program counts as bulk traffic.
const BULK: u32 = 4096;

pub(super) fn cases() -> Vec<Case<Lab>> {
    let mut cases = Vec::new();
    for net in NETS {
        for we in ROLES {
            for program in programs::all(false) {
                // siw cannot read a CRC that is split over segments, and the user-mode network
                // segments the stream anew. Bulk traffic with CRCs would nearly always fail there.
                let much =
                    program.name == "rstream" || program.sizes.iter().any(|size| *size >= BULK);
                let setup = Setup {
                    name: program.name.clone(),
                    driver: "",
                    settings: if much && net == Net::User {
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

fn talk(lab: &Lab, setup: &Setup, program: &Program) -> Result<Both> {
    let (ours, theirs) = match setup.we {
        We::Connect => (&program.client, &program.server),
        We::Serve => (&program.server, &program.client),
    };
    let theirs = theirs.replace("{device}", &format!("-d {}", device(setup.net)));
    lab.talk(
        setup,
        &ours.replace("{device}", ""),
        &theirs,
        program.rules.limit,
    )
}

/// Judges both outputs, and returns the note for the table.
fn note(both: &Both, program: &Program, we: We) -> Result<String> {
    match we {
        We::Connect => program.check(&both.theirs, &both.ours),
        We::Serve => program.check(&both.ours, &both.theirs),
    }
}

/// Runs a program, and returns what the client measured.
pub(super) fn measure(lab: &Lab, setup: &Setup, program: &Program) -> Result<String> {
    note(&talk(lab, setup, program)?, program, setup.we)
}

fn run(lab: &Lab, setup: &Setup, program: &Program) -> Result<String> {
    let both = talk(lab, setup, program)?;
    // If our FIN arrives while siw processes its last Send, siw reports that Send as failed.
    let quirk = both.theirs.code == 1
        && both.theirs.text.contains("Bad wc status 2")
        && both.theirs.text.contains("Failed to close connection");
    let both = if quirk {
        both.ended(0, 1)?
    } else {
        both.succeeded()?
    };
    let note = note(&both, program, setup.we)?;
    Ok(if quirk {
        format!("{note}; siw: last Send failed by our FIN")
    } else {
        note
    })
}
