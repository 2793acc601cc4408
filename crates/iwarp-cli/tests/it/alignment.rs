//! On a link with an MTU of 1500 octets, each TCP segment begins with an FPDU header and ends with
//! an FPDU (RFC 5044 section 5.1). The tests capture packets between two network namespaces while
//! `iwarp perf` runs, and look for FPDU boundaries in each segment.
//!
//! Each test starts this program again in new namespaces, where it may create the link. The kernel
//! removes the link with the namespaces.

use crate::common::{LIMIT, Running, Scratch, iwarp, str};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};

/// Set for the copy of this program inside the namespaces.
const INSIDE: &str = "ALIGNMENT_TEST_INSIDE";
const NEAR: &str = "10.9.8.1";
const FAR: &str = "10.9.8.2";

/// Creates a pair of interfaces in two namespaces, without offloads: they would show what the
/// kernel passes to the interface in one piece, not the segments on the wire.
const LINK: &str = "
    set -e
    mount -t tmpfs none /run
    ip netns add far
    ip link add near mtu 1500 type veth peer name far mtu 1500 netns far
    ip addr add 10.9.8.1/24 dev near
    ip -n far addr add 10.9.8.2/24 dev far
    for option in tso gso gro; do
        ethtool -K near $option off >/dev/null
        ip netns exec far ethtool -K far $option off >/dev/null
    done
    ip link set lo up
    ip link set near up
    ip -n far link set far up
";

/// Returns why the tests cannot run on this machine, or `None` if they can.
fn obstacle() -> Option<String> {
    for program in ["ethtool", "dumpcap", "ip"] {
        let paths = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
        if !paths
            .split(':')
            .any(|dir| Path::new(dir).join(program).exists())
        {
            return Some(format!("{program} is not installed"));
        }
    }
    let out = namespaces().args(["true"]).output().expect("unshare");
    (!out.status.success()).then(|| String::from_utf8_lossy(&out.stderr).trim().to_owned())
}

/// Returns a command that runs its arguments in new network and mount namespaces. An ordinary user
/// also needs a user namespace.
fn namespaces() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount"]);
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command
}

/// Returns `true` in the process that is inside the namespaces. Outside, runs the named test in a
/// process inside the namespaces, or skips it, and returns `false`.
fn is_inside(name: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    if let Some(reason) = obstacle() {
        println!("skipped: {reason}");
        return false;
    }
    let out = namespaces()
        .args(["sh", "-c", &format!("{LINK}\nexec \"$@\""), "sh"])
        .arg(std::env::current_exe().expect("own path"))
        .args(["--exact", "--nocapture", &format!("alignment::{name}")])
        .env(INSIDE, "1")
        .env(
            "PATH",
            std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin",
        )
        .output()
        .expect("unshare");
    let (text, err) = (
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr),
    );
    assert!(out.status.success(), "{text}{err}");
    assert!(text.contains("1 passed"), "{text}{err}");
    println!("{text}");
    false
}

/// A running packet capture at the near end.
struct Recording(Running);

impl Recording {
    fn start(file: &Path) -> Self {
        let mut child = Command::new("dumpcap")
            .args([
                "-q",
                "-P",
                "-B",
                "256",
                "-i",
                "near",
                "-f",
                "tcp",
                "-w",
                str(file),
            ])
            .stderr(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .expect("dumpcap");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let ready = lines.any(|line| line.expect("text").starts_with("File: "));
        assert!(ready, "dumpcap does not start");
        std::thread::spawn(move || lines.for_each(|line| println!("dumpcap: {line:?}")));
        Self(Running(child))
    }

    fn finish(mut self) {
        // The last packets need a moment to get from the kernel to dumpcap.
        std::thread::sleep(std::time::Duration::from_millis(300));
        let id = i32::try_from(self.0.0.id()).ok().and_then(Pid::from_raw);
        kill_process(id.expect("an id"), Signal::INT).expect("dumpcap runs");
        assert!(self.0.wait(LIMIT).expect("dumpcap hangs").success());
    }
}

/// Runs `iwarp perf` over the link with these environment variables at both ends, and captures the
/// packets in `file`.
fn capture_traffic(file: &Path, args: &[&str], settings: &[(&str, &str)]) {
    let mut server = Command::new("ip");
    server.args(["netns", "exec", "far"]);
    let serve = iwarp(&["perf", "serve", "--bind", &format!("{FAR}:0")]);
    server.arg(serve.get_program()).args(serve.get_args());
    let mut server = Running(
        server
            .envs(settings.iter().copied())
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .expect("the server starts"),
    );
    let mut lines = BufReader::new(server.0.stdout.take().expect("piped"));
    let mut line = String::new();
    lines.read_line(&mut line).expect("a line");
    // The server's first line contains `HOST:port`.
    let port = line
        .split_whitespace()
        .find_map(|word| word.rsplit_once(':')?.1.parse::<u16>().ok());
    let address = format!("{FAR}:{}", port.expect("a port"));
    std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));

    let recording = Recording::start(file);
    let mut client = iwarp(&["perf", "connect", &address, "--rounds", "1", "--no-pin"]);
    let out = client
        .args(args)
        .envs(settings.iter().copied())
        .output()
        .expect("the client starts");
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    recording.finish();
}

/// A segment that carries data.
#[derive(Clone)]
struct Segment {
    /// Sequence number of the first octet.
    sequence: u32,
    data: Vec<u8>,
    /// The ends of the receiver's window in the last acknowledgements before the segment, in the
    /// order of capture. The sender may not have received the latest acknowledgements yet when it
    /// sent the segment.
    window_ends: Vec<u32>,
}

/// One direction of a connection: address and port of the sender, then of the receiver.
type Flow = (u32, u16, u32, u16);

/// Acknowledgements that may be in flight to the sender while it sends a segment.
const ACKNOWLEDGEMENTS: usize = 8;

/// Returns all segments of a capture by direction, in the order of capture.
fn segments(file: &Path) -> BTreeMap<Flow, Vec<Segment>> {
    let mut octets = Vec::new();
    std::fs::File::open(file)
        .and_then(|mut file| file.read_to_end(&mut octets))
        .expect("the recording");
    let u16_at = |o: &[u8], at: usize| u16::from_be_bytes([o[at], o[at + 1]]);
    let u32_at = |o: &[u8], at: usize| u32::from_be_bytes([o[at], o[at + 1], o[at + 2], o[at + 3]]);
    let mut flows: BTreeMap<Flow, Vec<Segment>> = BTreeMap::new();
    let mut scales: BTreeMap<Flow, u8> = BTreeMap::new();
    // The ends of each direction's window, from the last acknowledgements of the other direction.
    let mut ends: BTreeMap<Flow, Vec<u32>> = BTreeMap::new();
    let mut rest = &octets[24..];
    while rest.len() >= 16 {
        let len = u32::from_le_bytes([rest[8], rest[9], rest[10], rest[11]]) as usize;
        let packet = &rest[16..16 + len];
        rest = &rest[16 + len..];
        let ip = &packet[14..];
        let ip = &ip[..usize::from(u16_at(ip, 2))];
        assert!(ip.len() <= 1500, "a packet of {} octets", ip.len());
        let tcp = &ip[usize::from(ip[0] & 15) * 4..];
        let flow = (
            u32_at(ip, 12),
            u16_at(tcp, 0),
            u32_at(ip, 16),
            u16_at(tcp, 2),
        );
        let back = (flow.2, flow.3, flow.0, flow.1);
        let header = usize::from(tcp[12] >> 4) * 4;
        let syn = tcp[13] & 2 != 0;
        if syn {
            scales.insert(flow, window_scale(&tcp[20..header]));
        }
        if tcp[13] & 16 != 0 {
            let scale = if syn {
                0
            } else {
                scales.get(&flow).copied().unwrap_or(0)
            };
            let end = u32_at(tcp, 8).wrapping_add(u32::from(u16_at(tcp, 14)) << scale);
            let ends = ends.entry(back).or_default();
            if ends.len() == ACKNOWLEDGEMENTS {
                ends.remove(0);
            }
            ends.push(end);
        }
        if tcp.len() > header {
            flows.entry(flow).or_default().push(Segment {
                sequence: u32_at(tcp, 4),
                data: tcp[header..].to_vec(),
                window_ends: ends.get(&flow).cloned().unwrap_or_default(),
            });
        }
    }
    flows
}

/// Returns the window scale option of a SYN (RFC 7323), or 0 if there is none.
fn window_scale(mut options: &[u8]) -> u8 {
    loop {
        match *options {
            [1, ..] => options = &options[1..],
            [3, 3, scale, ..] => return scale,
            [0, ..] | [] | [_] => return 0,
            [_, len, ..] => options = options.get(usize::from(len).max(2)..).unwrap_or(&[]),
        }
    }
}

/// Counts of segments by their boundaries.
#[derive(Debug, Default)]
struct Found {
    connections: usize,
    segments: usize,
    /// Segments of the full size of 1448 octets.
    full: usize,
    /// Segments with several FPDUs.
    shared: usize,
    /// Segments that TCP had to cut at the end of the receiver's window.
    window_cuts: usize,
    /// Segments after such a cut, until a segment ends with an FPDU again.
    after_cuts: usize,
    /// Segments that begin or end inside an FPDU for no such reason.
    misaligned: usize,
}

/// Examines all iWARP connections of a capture.
fn examine(file: &Path) -> Found {
    let mut found = Found::default();
    for (flow, list) in segments(file) {
        let start = &list[0];
        let is_mpa = start.data.starts_with(b"MPA ID ");
        if !is_mpa {
            continue;
        }
        found.connections += 1;
        let private_len = usize::from(u16::from_be_bytes([start.data[18], start.data[19]]));
        assert_eq!(
            start.data.len(),
            20 + private_len,
            "{flow:?}: the MPA frame is alone in one segment"
        );
        let bounds = boundaries(&list);
        let mut after_cut = false;
        for segment in &list[1..] {
            let from = segment.sequence.wrapping_sub(start.sequence);
            let to = from + segment.data.len() as u32;
            found.segments += 1;
            found.full += usize::from(segment.data.len() == 1448);
            found.shared += usize::from(bounds.range(from + 1..to).next().is_some());
            let (begins, ends) = (bounds.contains(&from), bounds.contains(&to));
            let end = segment.sequence.wrapping_add(segment.data.len() as u32);
            let at_window = segment.window_ends.contains(&end);
            match (begins, ends) {
                (true, true) => after_cut = false,
                (true, false) if at_window => {
                    found.window_cuts += 1;
                    after_cut = true;
                }
                _ if after_cut => {
                    found.after_cuts += 1;
                    after_cut = !ends;
                }
                _ => found.misaligned += 1,
            }
        }
    }
    found
}

/// Returns the stream offsets at which FPDUs begin.
fn boundaries(list: &[Segment]) -> BTreeSet<u32> {
    let first = list[0].sequence;
    let mut stream = Vec::new();
    // A segment that was lost before the capture appears later, when TCP retransmits it.
    let mut sorted: Vec<&Segment> = list.iter().collect();
    sorted.sort_by_key(|segment| segment.sequence.wrapping_sub(first));
    for segment in sorted {
        let at = segment.sequence.wrapping_sub(first) as usize;
        assert!(at <= stream.len(), "the recording has lost packets");
        // Skip retransmitted octets: they are identical.
        if at + segment.data.len() > stream.len() {
            let known = stream.len() - at;
            stream.extend_from_slice(&segment.data[known..]);
        }
    }
    let mut at = list[0].data.len();
    let mut bounds = BTreeSet::from([at as u32]);
    while let Some([high, low]) = stream.get(at..at + 2) {
        let ulpdu = usize::from(u16::from_be_bytes([*high, *low]));
        at += iwarp_proto::mpa::framing::fpdu_len(ulpdu);
        bounds.insert(at as u32);
    }
    assert_eq!(at, stream.len(), "the last FPDU is complete");
    bounds
}

/// Arguments for mixed traffic: bulk data, partly filled segments, many small messages, and Reads.
const EVERYTHING: &[&str] = &[
    "--op",
    "write,send,read",
    "--size",
    "64,3000,4096,200K",
    "--iters",
    "20",
    "--poll",
    "event",
];

#[test]
fn every_segment_begins_with_an_fpdu() {
    if !is_inside("every_segment_begins_with_an_fpdu") {
        return;
    }
    let scratch = Scratch::new();
    let file = scratch.path("aligned.pcap");
    capture_traffic(&file, EVERYTHING, &[]);
    let found = examine(&file);
    println!("{NEAR} and {FAR}: {found:?}");
    assert!(found.connections >= 4 && found.full > 10_000, "{found:?}");
    assert!(
        found.shared > 100,
        "small messages share segments: {found:?}"
    );
    assert_eq!(found.misaligned, 0, "{found:?}");
    // TCP may cut a segment at the end of the window, but rarely.
    assert!(
        found.window_cuts + found.after_cuts < found.segments / 20,
        "{found:?}"
    );
}

#[test]
fn without_alignment_segments_begin_inside_fpdus() {
    if !is_inside("without_alignment_segments_begin_inside_fpdus") {
        return;
    }
    let scratch = Scratch::new();
    let file = scratch.path("free.pcap");
    capture_traffic(&file, EVERYTHING, &[("IWARP_ALIGN", "off")]);
    let found = examine(&file);
    // Shows that `examine` detects misaligned segments.
    assert!(found.misaligned > 100, "{found:?}");
}
