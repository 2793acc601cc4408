//! Tests of the recorder: the contents of the file, and its decoding by `tshark` if that is
//! installed.

use super::*;
use crate::crc::crc32c_append;
use iwarp_proto::mpa::framing::{FpduOptions, MarkerClock, encode_fpdu};
use std::io::Write as _;
use std::process::Command;
use std::sync::atomic::AtomicU64;

struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!(
            "iwarp-capture-{}-{next}.pcapng",
            std::process::id()
        )))
    }

    /// Returns the packets of the file, from the IP header on.
    fn packets(&self) -> Vec<Vec<u8>> {
        let bytes = std::fs::read(&self.0).expect("file");
        let word = |offset: usize| {
            u32::from_le_bytes(bytes[offset..offset + 4].try_into().expect("word")) as usize
        };
        let (mut offset, mut packets) = (0, Vec::new());
        while offset < bytes.len() {
            if word(offset) == 6 {
                packets.push(bytes[offset + 28..offset + 28 + word(offset + 20)].to_vec());
            }
            offset += word(offset + 4);
        }
        assert_eq!(offset, bytes.len(), "the last block is complete");
        packets
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect("address")
}

/// Returns flags, sequence, acknowledgement and payload of an IPv4 packet.
fn tcp(packet: &[u8]) -> (u8, u32, u32, &[u8]) {
    let word =
        |offset: usize| u32::from_be_bytes(packet[offset..offset + 4].try_into().expect("word"));
    let head = usize::from(packet[32] >> 4) * 4;
    (packet[33], word(24), word(28), &packet[20 + head..])
}

/// RFC 5044 section 7.1.1: request and reply of revision 1 with the CRC flag.
const REQUEST: &[u8] = b"MPA ID Req Frame\x40\x01\x00\x04ping";
const REPLY: &[u8] = b"MPA ID Rep Frame\x40\x01\x00\x00";
/// A Write of five octets, with padding and CRC, as sent by Linux siw.
const WRITE_FPDU: [u8; 28] = [
    0x00, 0x13, 0xC1, 0x40, 0x7D, 0x91, 0x1E, 0x00, 0x00, 0x00, 0x7F, 0x96, 0x22, 0x01, 0x50, 0x00,
    0x41, 0x42, 0x43, 0x44, 0x45, 0x00, 0x00, 0x00, 0x1F, 0xAA, 0x61, 0xF0,
];

/// Returns an FPDU of a Write: a tagged DDP segment, the last of its message if `last`.
fn write_fpdu(offset: u64, payload: &[u8], last: bool) -> Vec<u8> {
    let mut fpdu = ((payload.len() + 14) as u16).to_be_bytes().to_vec();
    fpdu.extend_from_slice(&[if last { 0xC1 } else { 0x81 }, 0x40]);
    fpdu.extend_from_slice(&0x1234_5678_u32.to_be_bytes());
    fpdu.extend_from_slice(&offset.to_be_bytes());
    fpdu.extend_from_slice(payload);
    fpdu.resize(fpdu.len().next_multiple_of(4), 0);
    let crc = crc32c_append(0, &fpdu);
    fpdu.extend_from_slice(&crc.to_le_bytes());
    fpdu
}

#[test]
fn write_fpdu_matches_siw_frame() {
    let mut fpdu = write_fpdu(0x7F96_2201_5000, b"ABCDE", true);
    fpdu[4..8].copy_from_slice(&WRITE_FPDU[4..8]);
    let crc = crc32c_append(0, &fpdu[..24]);
    fpdu[24..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(fpdu, WRITE_FPDU);
}

#[test]
fn sequence_numbers_add_up() {
    let scratch = Scratch::new();
    let recorder = Recorder::create(&scratch.0).expect("file");
    let flow = recorder.flow(address("192.0.2.1:40000"), address("192.0.2.2:7174"));
    flow.opened(true);
    flow.opened(true);
    flow.sent(&[IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cde")]);
    flow.received(&[b"xyz"]);
    let long = vec![9u8; 3 * MAX_SEGMENT + 1];
    // SAFETY: `long` outlives the call.
    unsafe {
        flow.sent_raw(
            &[RawSlice::of(&long), RawSlice::of(b"not sent")],
            long.len(),
        )
    };
    flow.closed(false);
    flow.sent(&[IoSlice::new(b"too late")]);
    drop(flow);
    assert_eq!(recorder.packets(), 3 + 2 + 4 + 3);
    recorder.flush().expect("flush");

    let (mut next, mut payload) = ([None; 2], [Vec::new(), Vec::new()]);
    for packet in scratch.packets() {
        let (flags, sequence, acknowledgement, data) = tcp(&packet);
        let from = usize::from(packet[12..16] != [192, 0, 2, 1]);
        let expected = next[from].unwrap_or(sequence);
        assert_eq!(sequence, expected);
        if flags & ACK != 0 {
            assert_eq!(Some(acknowledgement), next[1 - from]);
        }
        assert!(data.len() <= MAX_SEGMENT);
        payload[from].extend_from_slice(data);
        let counted = u32::from(flags & (SYN | FIN) != 0);
        next[from] = Some(sequence.wrapping_add(data.len() as u32 + counted));
    }
    assert_eq!(payload[0], [b"abcde", &long[..]].concat());
    assert_eq!(payload[1], b"xyz");
}

/// A stream with markers may end in the middle of an FPDU. The fragment is recorded before the
/// close, in each direction.
#[test]
fn unfinished_fpdus_are_recorded() {
    for (sent, received) in [(0, 0), (5, 0), (0, 5), (5, 3)] {
        let file = Scratch::new();
        let recorder = Recorder::create(&file.0).expect("create");
        let flow = recorder.flow(address("192.0.2.1:1"), address("192.0.2.2:2"));
        flow.opened(true);
        flow.framed(true, true);
        flow.sent(&[IoSlice::new(&[7; 5][..sent])]);
        flow.received(&[&[9; 5][..received]]);
        flow.closed(true);
        drop((flow, recorder));
        let mut payload = [Vec::new(), Vec::new()];
        for packet in file.packets() {
            let from = usize::from(packet[12..16] != [192, 0, 2, 1]);
            payload[from].extend_from_slice(tcp(&packet).3);
        }
        assert_eq!(payload, [vec![7; sent], vec![9; received]]);
    }
}

/// If one direction has markers, each segment of both directions is one FPDU.
#[test]
fn markers_split_both_directions() {
    let stream = |markers| {
        let (options, mut clock) = (FpduOptions { markers, crc: None }, MarkerClock::new());
        let mut fpdu = || {
            let mut octets = [0; 600];
            let n = encode_fpdu(&[7; 500], &options, &mut clock, &mut octets).unwrap();
            octets[..n].to_vec()
        };
        [fpdu(), fpdu()]
    };
    for (sends, receives) in [(false, false), (true, false), (false, true), (true, true)] {
        let file = Scratch::new();
        let recorder = Recorder::create(&file.0).expect("create");
        let flow = recorder.flow(address("192.0.2.1:1"), address("192.0.2.2:2"));
        flow.opened(true);
        flow.framed(sends, receives);
        let fpdus = [sends, receives].map(stream);
        flow.sent(&[IoSlice::new(&fpdus[0].concat())]);
        flow.received(&[&fpdus[1].concat()]);
        drop((flow, recorder));
        let segments = fpdus.concat();
        let segments = match sends || receives {
            true => segments,
            false => segments.chunks(2).map(<[_]>::concat).collect(),
        };
        let packets = file.packets();
        let recorded: Vec<_> = packets[3..].iter().map(|packet| tcp(packet).3).collect();
        assert_eq!(recorded, segments, "{sends} {receives}");
    }
}

/// In a forked child, another thread of the parent may hold a lock of the recording for ever.
#[test]
fn child_drops_flow_without_locks() {
    let file = Scratch::new();
    let recorder = Recorder::create(&file.0).expect("create");
    let mut flow = Some(recorder.flow(address("192.0.2.1:1"), address("192.0.2.2:2")));
    let held = (recorder.shared.flows.lock(), recorder.shared.output.lock());
    let passed = fork::check_in_child(|| {
        flow.as_ref().is_some_and(|flow| !flow.is_recording()) && flow.take().is_some()
    });
    assert!(passed);
    drop(held);
    assert!(flow.is_some_and(|flow| flow.is_recording()));
}

/// The receiver acknowledges after each [`ACK_EVERY`] octets. Data that it sends acknowledges, too,
/// so no separate acknowledgements are needed.
#[test]
fn acknowledgements_are_recorded_at_intervals() {
    let piece = vec![1; (ACK_EVERY / 4) as usize - 100];
    for (answers, acknowledgements) in [(false, 4), (true, 0)] {
        let file = Scratch::new();
        let recorder = Recorder::create(&file.0).expect("create");
        let flow = recorder.flow(address("192.0.2.1:1"), address("192.0.2.2:2"));
        flow.opened(true);
        for _ in 0..20 {
            flow.sent(&[IoSlice::new(&piece)]);
            if answers {
                flow.received(&[b"yes"]);
            }
        }
        drop((flow, recorder));
        let packets = file.packets();
        let alone = packets[3..].iter().filter(|packet| {
            let (flags, .., payload) = tcp(packet);
            flags == ACK && payload.is_empty()
        });
        assert_eq!(alone.count(), acknowledgements, "{answers}");
    }
}

/// A reset connection ends with a reset, a closed connection ends with a FIN of each end. Nothing
/// is recorded after that.
#[test]
fn recording_ends_like_the_connection() {
    for (reset, wanted) in [
        (true, &[RST | ACK][..]),
        (false, &[FIN | ACK, FIN | ACK, ACK]),
    ] {
        let file = Scratch::new();
        let recorder = Recorder::create(&file.0).expect("create");
        let flow = recorder.flow(address("127.0.0.1:1"), address("127.0.0.1:2"));
        flow.opened(true);
        flow.received(&[b"last"]);
        flow.closed(reset);
        flow.received(&[b"late"]);
        flow.closed(!reset);
        drop((flow, recorder));
        let packets = file.packets();
        let flags: Vec<u8> = packets.iter().map(|p| tcp(p).0).collect();
        let start = [SYN, SYN | ACK, ACK, PSH | ACK];
        assert_eq!(flags, [&start[..], wanted].concat(), "{reset}");
    }
}

#[test]
fn limits_stop_between_packets() {
    for limits in [
        RecorderLimits::default().max_packets(5),
        RecorderLimits::default().max_bytes(1000),
    ] {
        let scratch = Scratch::new();
        let recorder = Recorder::create_with(&scratch.0, limits).expect("file");
        let flow = recorder.flow(address("192.0.2.1:1"), address("192.0.2.2:2"));
        assert!(flow.is_recording());
        for _ in 0..100 {
            flow.sent(&[IoSlice::new(b"ten octets")]);
        }
        assert!(!recorder.is_recording() && !flow.is_recording());
        // The file is complete without a flush, because the limit flushes it.
        let packets = scratch.packets();
        assert_eq!(packets.len() as u64, recorder.packets());
        let size = std::fs::metadata(&scratch.0).expect("file").len();
        assert!(
            limits
                .max_packets
                .is_none_or(|max| packets.len() as u64 == max)
        );
        assert!(
            limits
                .max_bytes
                .is_none_or(|max| size <= max && size + 100 > max),
            "{size}"
        );
    }
}

/// A full disk truncates a write in the middle of a packet.
#[test]
fn truncated_file_is_cut_to_packets() {
    let path = std::env::temp_dir().join(format!("iwarp-cut-{}", std::process::id()));
    let recorder = Recorder::create(&path).expect("recorder");
    let mut output = recorder.shared.output.lock();
    let header_len = output.written;
    for packet in [[1u8; 40], [2; 40]] {
        let block = pcapng::begin_packet(&mut output.buffer, 0, packet.len());
        output.buffer.extend_from_slice(&packet);
        pcapng::end_block(&mut output.buffer, block);
    }
    let block = pcapng::block_len(40);
    for (written, kept) in [(block + 5, block), (block - 1, 0), (2 * block, 2 * block)] {
        output.file.set_len(header_len).expect("empty again");
        let part = output.buffer[..written].to_vec();
        let mut end = &output.file;
        io::Seek::seek(&mut end, io::SeekFrom::Start(header_len)).expect("seek");
        end.write_all(&part).expect("part");
        output.truncate_to_whole_blocks();
        let file_len = std::fs::metadata(&path).expect("file").len();
        assert_eq!(file_len, header_len + kept as u64);
    }
    output.buffer.clear();
    drop(output);
    drop(recorder);
    std::fs::remove_file(&path).expect("removed");
}

#[test]
fn full_disk_stops_only_recording() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        println!("skipped: no /dev/full");
        return;
    }
    let error = Recorder::create(full).expect_err("the header cannot be written");
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    assert!(Recorder::create("/nonexistent/directory/file").is_err());

    let scratch = Scratch::new();
    let recorder = Recorder::create(&scratch.0).expect("file");
    recorder.shared.output.lock().file = File::create(full).expect("full");
    let flow = recorder.flow(address("192.0.2.1:1"), address("192.0.2.2:2"));
    flow.opened(true);
    assert!(
        recorder.is_recording(),
        "the packets are still in the buffer"
    );
    flow.sent(&[IoSlice::new(&vec![0; BUFFER])]);
    assert!(!recorder.is_recording());
    flow.sent(&[IoSlice::new(b"ignored")]);
    flow.closed(true);
}

#[test]
fn connection_within_process_is_recorded_once() {
    let scratch = Scratch::new();
    let recorder = Recorder::create(&scratch.0).expect("file");
    let (a, b) = (address("127.0.0.1:1000"), address("127.0.0.1:2000"));
    let first = recorder.flow(a, b);
    let second = recorder.flow(b, a);
    assert!(first.is_recording() && !second.is_recording());
    first.opened(true);
    second.opened(false);
    first.sent(&[IoSlice::new(b"once")]);
    second.received(&[b"once"]);
    assert_eq!(recorder.packets(), 4);
    drop(second);
    drop(first);
    let again = recorder.flow(b, a);
    assert!(again.is_recording());
}

#[test]
fn forked_child_does_not_write() {
    let scratch = Scratch::new();
    let recorder = Recorder::create(&scratch.0).expect("file");
    let flow = recorder.flow(address("192.0.2.1:1"), address("192.0.2.2:2"));
    flow.opened(true);
    // SAFETY: in the child, the calls return before they lock or allocate, and `_exit` ends it.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        flow.sent(&[IoSlice::new(b"child")]);
        flow.closed(false);
        let good = recorder.flush().is_ok() && !recorder.is_recording();
        // SAFETY: `_exit` is async-signal-safe.
        unsafe { libc::_exit(if good { 5 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `status` is valid for writes, and `child` is our child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(libc::WEXITSTATUS(status), 5, "status {status:#x}");
    assert_eq!(scratch.packets().len(), 0);
    drop(flow);
    drop(recorder);
    assert_eq!(scratch.packets().len(), 3);
}

/// Runs tshark with the options for iWARP; `None` if it is not installed.
fn tshark(file: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("tshark")
        .args([
            "--disable-heuristic",
            "smb_direct_iwarp",
            "--disable-heuristic",
            "rpcrdma_iwarp",
        ])
        .args([
            "-o",
            "tcp.try_heuristic_first:TRUE",
            "-o",
            "tcp.check_checksum:TRUE",
            "-o",
            "ip.check_checksum:TRUE",
        ])
        .arg("-r")
        .arg(file)
        .args(arguments)
        .output();
    match output {
        Ok(output) => {
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
            Some(String::from_utf8(output.stdout).expect("text"))
        }
        Err(error) => {
            let required =
                std::env::var_os("IWARP_REQUIRE_TSHARK").is_some_and(|value| value == "1");
            assert!(!required, "tshark is required but cannot be run: {error}");
            println!("skipped: tshark cannot be run: {error}");
            None
        }
    }
}

/// Messages per connection in [`two_connections`]. Each has two FPDUs.
const MESSAGES: u64 = 40;

fn two_connections(recorder: &Recorder) {
    for (local, peer, active) in [
        ("10.0.0.1:40001", "10.0.0.2:7174", true),
        ("[fd00::1]:7471", "[fd00::2]:40002", false),
    ] {
        let flow = recorder.flow(address(local), address(peer));
        flow.opened(active);
        let (ours, theirs) = if active {
            (REQUEST, REPLY)
        } else {
            (REPLY, REQUEST)
        };
        if active {
            flow.sent(&[IoSlice::new(ours)]);
            flow.received(&[theirs]);
        } else {
            flow.received(&[theirs]);
            flow.sent(&[IoSlice::new(ours)]);
        }
        if active {
            flow.sent(&[
                IoSlice::new(&WRITE_FPDU[..10]),
                IoSlice::new(&WRITE_FPDU[10..]),
            ]);
        } else {
            flow.received(&[&WRITE_FPDU]);
        }
        // Each message has a little more than 64 KiB, in two FPDUs. One call records it, in two
        // segments.
        for message in 0..MESSAGES {
            let payload = vec![message as u8; 60_000];
            let mut bytes = write_fpdu(message << 20, &payload, false);
            bytes.extend_from_slice(&write_fpdu(
                (message << 20) + 60_000,
                &payload[..9_001],
                true,
            ));
            if message % 2 == 0 {
                flow.sent(&[IoSlice::new(&bytes)]);
            } else {
                flow.received(&[&bytes]);
            }
        }
        flow.closed(!active);
    }
}

#[test]
fn tshark_reports_no_errors() {
    let scratch = Scratch::new();
    let recorder = Recorder::create(&scratch.0).expect("file");
    two_connections(&recorder);
    recorder.flush().expect("flush");

    let Some(expert) = tshark(&scratch.0, &["-q", "-z", "expert"]) else {
        return;
    };
    // Wireshark reports handshakes and closes as "chats" and a reset as a warning. Any other report
    // is an error.
    for line in expert.lines() {
        let finding = line.contains(" TCP ")
            || line.contains("IPv")
            || line.contains("iWARP")
            || line.contains("MPA");
        let expected = ["onnection ", "FIN"].iter().any(|word| line.contains(word));
        assert!(!finding || expected, "{expert}");
    }
    let count = |filter: &str| {
        let lines = tshark(
            &scratch.0,
            &["-Y", filter, "-T", "fields", "-e", "frame.number"],
        )
        .expect("ran before");
        lines.lines().count()
    };
    assert_eq!(count("iwarp_mpa.req"), 2);
    assert_eq!(count("iwarp_mpa.rep"), 2);
    assert_eq!(count("_ws.malformed"), 0);
    assert_eq!(
        count("tcp.checksum.status == 0 || ip.checksum.status == 0"),
        0
    );
    assert_eq!(count("tcp.analysis.flags && !tcp.flags.reset"), 0);
    let all = tshark(&scratch.0, &["-V", "-Y", "iwarp_mpa.fpdu"]).expect("ran before");
    let fpdus = 2 * (1 + 2 * MESSAGES as usize);
    assert_eq!(
        all.matches("(Good CRC32)").count(),
        fpdus,
        "{}",
        &all[..all.len().min(4000)]
    );
    assert_eq!(all.matches("Bad CRC32").count(), 0);
}
