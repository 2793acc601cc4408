//! Finds Terminate messages and fields in packet captures, with tshark.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::guest::image::sbin;

/// A Terminate message (RFC 5040 section 4.8).
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Terminate {
    /// Layer: 0 RDMAP, 1 DDP, 2 MPA.
    pub(super) layer: u8,
    pub(super) kind: u8,
    pub(super) code: u8,
    /// The message has siw's layout: layer and type are swapped, and the flags are the low bits of
    /// their octet.
    pub(super) siw_layout: bool,
    /// The four octets of the control word and their meaning, as text.
    pub(super) shown: String,
}

/// Returns the Terminate messages in a capture.
pub(super) fn terminates(file: &Path) -> Result<Vec<Terminate>> {
    // A Terminate is an untagged segment with opcode 7. Its control word follows the 18 octets of
    // the header.
    let payloads = fields(file, "iwarp_rdma.opcode == 7", "tcp.payload")?;
    payloads
        .iter()
        .map(|payload| {
            let octets = octets(payload)?;
            let at =
                terminate_offset(&octets).with_context(|| format!("no Terminate in {payload}"))?;
            Ok(decode([
                octets[at],
                octets[at + 1],
                octets[at + 2],
                octets[at + 3],
            ]))
        })
        .collect()
}

/// Returns the values of a field in the packets of a capture that match a filter.
pub(super) fn fields(file: &Path, filter: &str, field: &str) -> Result<Vec<String>> {
    let out = Command::new(sbin("tshark"))
        .args([
            "--disable-heuristic",
            "smb_direct_iwarp",
            "--disable-heuristic",
            "rpcrdma_iwarp",
        ])
        .args(["-o", "tcp.try_heuristic_first:TRUE", "-r"])
        .arg(file)
        .args(["-Y", filter, "-T", "fields", "-e", field])
        .output()
        .context("tshark")?;
    if !out.status.success() {
        bail!("tshark: {}", String::from_utf8_lossy(&out.stderr));
    }
    let text = String::from_utf8_lossy(&out.stdout);
    Ok(text
        .lines()
        .map(str::to_owned)
        .filter(|line| !line.is_empty())
        .collect())
}

fn octets(hex: &str) -> Result<Vec<u8>> {
    let digits: String = hex.chars().filter(char::is_ascii_hexdigit).collect();
    (0..digits.len() / 2)
        .map(|i| Ok(u8::from_str_radix(&digits[2 * i..2 * i + 2], 16)?))
        .collect()
}

/// Returns the offset of a Terminate's control word in a payload that consists of whole FPDUs.
fn terminate_offset(octets: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let len = usize::from(u16::from_be_bytes([*octets.get(at)?, *octets.get(at + 1)?]));
        let header = octets.get(at + 2..at + 2 + len)?;
        // An untagged segment with the opcode Terminate.
        if len >= 22 && header[0] & 0x80 == 0 && header[1] & 0x0f == 7 {
            return Some(at + 2 + 18);
        }
        at += (2 + len).next_multiple_of(4) + 4;
    }
}

fn decode(word: [u8; 4]) -> Terminate {
    let siw_layout = word[2] & 0x07 != 0;
    let (high, low) = (word[0] >> 4, word[0] & 0x0f);
    let (layer, kind) = if siw_layout { (low, high) } else { (high, low) };
    let code = word[1];
    Terminate {
        layer,
        kind,
        code,
        siw_layout,
        shown: format!(
            "{:02x} {:02x} {:02x} {:02x}: layer {layer} type {kind} code {code}",
            word[0], word[1], word[2], word[3]
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_are_recognized() {
        let siw = decode([0x21, 0x02, 0x03, 0x00]);
        assert_eq!(
            (siw.layer, siw.kind, siw.code, siw.siw_layout),
            (1, 2, 2, true)
        );
        let ours = decode([0x12, 0x02, 0xc0, 0x00]);
        assert_eq!(
            (ours.layer, ours.kind, ours.code, ours.siw_layout),
            (1, 2, 2, false)
        );
    }

    #[test]
    fn terminate_follows_other_fpdus() {
        // A tagged segment of 14 + 1 octets, then a Terminate of 18 + 4.
        let mut octets = vec![0, 15, 0xc1, 0x40];
        octets.resize(2 + 15 + 3 + 4, 0);
        octets.extend([0, 22, 0x41, 0x47]);
        octets.resize(24 + 2 + 18, 0);
        octets.extend([0x11, 0, 0xc0, 0]);
        assert_eq!(terminate_offset(&octets), Some(44));
        assert_eq!(terminate_offset(&octets[..24]), None);
    }
}
