//! Measures our library with siw, and siw with itself, in one guest. The guest's processors are
//! emulated, so the results can only be compared with each other.

use anyhow::{Context as _, Result};

use super::lab::{Lab, OurRole, Settings, Setup};
use super::programs;
use crate::guest::{Guest, Net};
use crate::programs as common;

/// Measured programs: name, message size in bytes, number of messages.
const PROGRAMS: &[(&str, u32, u32)] = &[
    ("ib_write_bw", 65536, 300),
    ("ib_send_bw", 65536, 300),
    ("ib_read_bw", 65536, 300),
    ("ib_write_lat", 64, 500),
    ("ib_send_lat", 64, 500),
];

/// The columns for our library with siw: heading, our role, our environment variables.
const COLUMNS: &[(&str, OurRole, Settings)] = &[
    ("us->siw", OurRole::Connect, &[]),
    ("no CRC", OurRole::Connect, &[("IWARP_CRC", "off")]),
    ("siw->us", OurRole::Serve, &[]),
    ("no CRC", OurRole::Serve, &[("IWARP_CRC", "off")]),
];

/// Number of runs. Each result is their median.
const ROUNDS: usize = 3;

pub(super) fn table(lab: &Lab) -> Result<String> {
    let mut text = format!("{:20}", "TAP, MSS 1460");
    for (title, ..) in COLUMNS {
        text.push_str(&format!("{title:>14}"));
    }
    text.push_str(&format!("{:>14}\n", "siw->siw"));
    // siw with itself uses the loopback device. Set its MTU to that of the TAP device, so that the
    // columns are comparable.
    lab.guest.run_checked("ip link set lo mtu 1500", 20)?;
    for &(name, size, rounds) in PROGRAMS {
        text.push_str(&format!("{:20}", format!("{name} {size}")));
        for (_, we, settings) in COLUMNS {
            let setup = Setup {
                name: String::new(),
                driver: "",
                settings,
                net: Net::Tap,
                we: *we,
            };
            let all = (0..ROUNDS)
                .map(|_| programs::measure(lab, &setup, &common::measurement(name, size, rounds)));
            text.push_str(&column(all));
        }
        let all = (0..ROUNDS).map(|round| measure_siw_with_itself(lab, name, size, rounds, round));
        text.push_str(&column(all));
        text.push('\n');
    }
    lab.guest.run_checked("ip link set lo mtu 65536", 20)?;
    Ok(text)
}

/// Formats the median, with its unit, as a column.
fn column(all: impl Iterator<Item = Result<String>>) -> String {
    let mut values: Vec<(f64, String)> = all
        .filter_map(Result::ok)
        .filter_map(|text| Some((text.split_whitespace().next()?.parse().ok()?, text)))
        .collect();
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    let median = values.get(values.len() / 2);
    format!("{:>14}", median.map_or("-", |(_, text)| text))
}

/// Runs one measurement with both ends in the guest.
fn measure_siw_with_itself(
    lab: &Lab,
    name: &str,
    size: u32,
    rounds: u32,
    round: usize,
) -> Result<String> {
    let address = Guest::address(Net::Tap);
    let port = 7200 + u16::try_from(round)?;
    let words = common::perftest_words(name, size, rounds)
        .replace("{port}", &port.to_string())
        .replace("{device}", &format!("-d {}", programs::device(Net::Tap)));
    let mut server = lab.guest.start_command(&words, common::LIMIT)?;
    lab.guest.listens(port, &mut server)?;
    let client = lab
        .guest
        .run(&format!("{words} {address}"), common::LIMIT)?;
    let _ = server.wait_at_most(5)?;
    common::perftest_result(&client.text, name, size).with_context(|| client.text.clone())
}
