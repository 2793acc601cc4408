//! Decodes a capture file with the decoder of this project and with tshark, and compares them.

use crate::common::str;
use iwarp_proto::crc32c;
use iwarp_proto::mpa::framing::{FpduOptions, MARKER_INTERVAL};
use iwarp_proto::mpa::pretty::Stream;
use iwarp_proto::rdmap::Opcode;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Runs tshark with the options that captures of iWARP need, and returns its output. Returns `None`
/// if tshark is not installed, or panics if `IWARP_REQUIRE_TSHARK` is 1.
///
/// The two disabled heuristics mistake the content of Sends for SMB Direct or RPC-over-RDMA and
/// report it as malformed. The preference makes tshark try MPA before it selects a protocol by
/// port.
pub(crate) fn tshark(file: &Path, args: &[&str]) -> Option<String> {
    let out = Command::new("tshark")
        .args(["--disable-heuristic", "smb_direct_iwarp"])
        .args(["--disable-heuristic", "rpcrdma_iwarp"])
        .args(["-o", "tcp.try_heuristic_first:TRUE"])
        .args(["-o", "tcp.check_checksum:TRUE"])
        .args(["-o", "ip.check_checksum:TRUE"])
        .args(["-r", str(file)])
        .args(args)
        .output();
    match out {
        Ok(out) => {
            let err = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success(), "{args:?}: {err}");
            Some(String::from_utf8(out.stdout).expect("text"))
        }
        Err(e) => {
            let required = std::env::var_os("IWARP_REQUIRE_TSHARK").is_some_and(|v| v == "1");
            assert!(!required, "tshark is required but cannot be run: {e}");
            println!("skipped: tshark cannot be run: {e}");
            None
        }
    }
}

/// One FPDU: the length of its ULPDU and its opcode.
pub(crate) type Fpdu = (usize, u8);

/// The content of a capture, on which both decoders agree.
#[derive(Debug, Default)]
pub(crate) struct Decoded {
    /// FPDUs of each direction, by source port.
    pub(crate) fpdus: BTreeMap<u16, Vec<Fpdu>>,
    /// FPDUs that tshark cannot decode for a known reason.
    pub(crate) beyond_tshark: usize,
    /// Octets of TCP payload.
    pub(crate) octets: usize,
}

impl Decoded {
    pub(crate) fn opcodes(&self) -> std::collections::BTreeSet<u8> {
        self.fpdus.values().flatten().map(|(_, op)| *op).collect()
    }
}

/// Decodes a capture of one connection with both decoders and panics if they differ. With `cut`,
/// the capture may end inside an FPDU. Returns `None` if tshark is not installed.
pub(crate) fn check(file: &Path, markers: bool, crc: bool, cut: bool) -> Option<Decoded> {
    let mut decoded = Decoded::default();
    // The FPDUs that tshark is expected to find.
    let mut expected = BTreeMap::new();
    for (port, octets) in streams(file) {
        decoded.octets += octets.len();
        let (fpdus, visible) = decode(&octets, markers, crc, cut);
        decoded.beyond_tshark += fpdus.len() - visible.len();
        decoded.fpdus.insert(port, fpdus);
        expected.insert(port, visible);
    }
    assert_eq!(decoded.fpdus.len(), 2, "one connection has two directions");

    let seen = fpdus_in_tshark(file, expected.keys().copied())?;
    for (port, expected) in &expected {
        let seen = &seen[port];
        let differ = expected.iter().zip(seen).position(|(a, b)| a != b);
        assert!(
            seen == expected,
            "port {port}: {} FPDUs and {} in tshark, different from {differ:?} on",
            expected.len(),
            seen.len()
        );
    }
    check_frames(file);

    let text = tshark(file, &["-V", "-Y", "iwarp_mpa.fpdu"]).expect("ran before");
    let visible: usize = expected.values().map(Vec::len).sum();
    let good = text.matches("(Good CRC32)").count();
    assert_eq!(good, if crc { visible } else { 0 });
    assert_eq!(text.matches("Bad CRC32").count(), 0);
    Some(decoded)
}

/// Returns the FPDUs that tshark decodes, by source port.
fn fpdus_in_tshark(
    file: &Path,
    ports: impl Iterator<Item = u16>,
) -> Option<BTreeMap<u16, Vec<Fpdu>>> {
    let mut seen: BTreeMap<u16, Vec<Fpdu>> = ports.map(|p| (p, Vec::new())).collect();
    let fields = tshark(
        file,
        &[
            "-T",
            "fields",
            "-E",
            "separator=|",
            "-E",
            "occurrence=a",
            "-e",
            "tcp.srcport",
            "-e",
            "iwarp_mpa.ulpdulength",
            "-e",
            "iwarp_rdma.opcode",
            "-Y",
            "iwarp_mpa.fpdu",
        ],
    )?;
    for line in fields.lines() {
        let mut cells = line.split('|');
        let port = cells.next().and_then(|p| p.parse().ok()).expect("a port");
        let lens = cells.next().expect("lengths").split(',');
        let ops = cells.next().expect("opcodes").split(',');
        let list = seen.get_mut(&port).expect("a port of the connection");
        for (len, op) in lens.zip(ops) {
            let op = u8::from_str_radix(op.trim_start_matches("0x"), 16).expect("an opcode");
            list.push((len.parse().expect("a length"), op));
        }
    }
    Some(seen)
}

/// Checks the set-up frames, and that tshark finds no errors, warnings or TCP anomalies.
fn check_frames(file: &Path) {
    let count = |filter: &str| {
        let lines = tshark(file, &["-Y", filter, "-T", "fields", "-e", "frame.number"]);
        lines.expect("ran before").lines().count()
    };
    assert_eq!(count("iwarp_mpa.req"), 1);
    assert_eq!(count("iwarp_mpa.rep"), 1);
    assert_eq!(count("_ws.malformed"), 0);
    assert_eq!(count("_ws.expert.severity == 0x800000"), 0);
    // Severity "error", then "warning": tshark warns about revision 2 and its flag in set-up
    // frames.
    let warnings =
        "_ws.expert.severity == 0x600000 && !iwarp_mpa.req && !iwarp_mpa.rep && !tcp.flags.reset";
    assert_eq!(count(warnings), 0);
    assert_eq!(
        count("tcp.checksum.status == 0 || ip.checksum.status == 0"),
        0
    );
    assert_eq!(count("tcp.analysis.flags && !tcp.flags.reset"), 0);
}

/// Decodes one direction with our decoder. Returns all FPDUs, and those that tshark can decode.
fn decode(octets: &[u8], markers: bool, crc: bool, cut: bool) -> (Vec<Fpdu>, Vec<Fpdu>) {
    let options = FpduOptions {
        markers,
        crc: crc.then_some(crc32c::append as _),
    };
    let text = Stream::new(octets, options).to_string();
    let mut lines = text.lines();
    let first = lines.next().expect("a set-up frame");
    assert!(first.contains("MPA Re"), "{first}");
    let mut parsed = Vec::new();
    for line in lines {
        let (at, rest) = line.trim_start().split_once(' ').expect("an offset");
        let at: usize = at.parse().expect("an offset");
        if rest.contains("incomplete FPDU") {
            assert!(cut, "{line}");
            parsed.push((at, None));
            continue;
        }
        let bad = ["BAD", " -- ", "cut short", "shorter"]
            .iter()
            .any(|b| rest.contains(b));
        assert!(!bad, "{line}");
        assert_eq!(rest.contains("CRC good"), crc, "{line}");
        let len = rest.strip_prefix("FPDU ").expect("an FPDU");
        let len = len.split([' ', ':']).next().and_then(|n| n.parse().ok());
        let name = rest.split_once(": ").expect("an opcode").1;
        let name = name.split(' ').next().expect("an opcode");
        let op = (0..=15).find(|op| format!("{:?}", Opcode(*op)) == name);
        parsed.push((at, Some((len.expect("a length"), op.expect("an opcode")))));
    }
    let start = parsed.first().map_or(octets.len(), |(at, _)| *at);
    let ends = parsed
        .iter()
        .skip(1)
        .map(|(at, _)| *at)
        .chain([octets.len()]);
    let (mut all, mut visible) = (Vec::new(), Vec::new());
    for ((at, fpdu), end) in parsed.iter().zip(ends) {
        let Some(fpdu) = fpdu else { continue };
        all.push(*fpdu);
        // If a marker follows immediately after an FPDU with markers, Wireshark counts it as part
        // of that FPDU, and so considers the FPDU's length wrong.
        let first_marker = (at - start).next_multiple_of(MARKER_INTERVAL);
        let miscounted = (end - start) % MARKER_INTERVAL == 0 && start + first_marker < end;
        if !(markers && miscounted) {
            visible.push(*fpdu);
        }
    }
    (all, visible)
}

/// Returns the TCP payload of each direction by source port. The pcapng file must contain raw IP
/// packets without gaps.
fn streams(file: &Path) -> BTreeMap<u16, Vec<u8>> {
    let file = std::fs::read(file).expect("the capture");
    let mut rest = &file[..];
    let mut out: BTreeMap<u16, (u32, Vec<u8>)> = BTreeMap::new();
    let u32_at = |b: &[u8], at: usize| u32::from_le_bytes(b[at..at + 4].try_into().unwrap());
    while !rest.is_empty() {
        let (kind, len) = (u32_at(rest, 0), u32_at(rest, 4) as usize);
        let (block, next) = rest.split_at(len);
        rest = next;
        if kind != 6 {
            continue;
        }
        let captured = u32_at(block, 20) as usize;
        let packet = &block[28..28 + captured];
        let ip_len = if packet[0] >> 4 == 4 {
            usize::from(packet[0] & 15) * 4
        } else {
            40
        };
        let tcp = &packet[ip_len..];
        let port = u16::from_be_bytes([tcp[0], tcp[1]]);
        let sequence = u32::from_be_bytes(tcp[4..8].try_into().unwrap());
        let payload = &tcp[usize::from(tcp[12] >> 4) * 4..];
        let syn_or_fin = tcp[13] & 3 != 0;
        let (expected, octets) = out.entry(port).or_insert((sequence, Vec::new()));
        assert_eq!(*expected, sequence, "a gap in the recording");
        *expected = sequence.wrapping_add(payload.len() as u32 + u32::from(syn_or_fin));
        octets.extend_from_slice(payload);
    }
    out.into_iter()
        .map(|(port, (_, octets))| (port, octets))
        .collect()
}
