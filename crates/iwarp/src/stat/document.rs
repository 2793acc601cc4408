//! Writes the JSON document with this process's statistics, piece by piece.
//!
//! The format version is 1. New members do not change it; it becomes 2 if the meaning of a member
//! changes. Counters never decrease. Durations are in nanoseconds, and their names end in `_ns`.

use super::json::Json;
use super::report::{self, DeviceReport, LinkReport, MemoryWalk, QpReport, QpWalk};
use iwarp_rnic::counters::Counters;
use std::io::Read as _;

pub(super) const FORMAT: u64 = 1;
/// Queue pairs per piece. Reading them takes a few dozen microseconds.
const PIECE_QPS: usize = 16;
/// Length at which the command line is truncated.
const COMMAND_MAX: u64 = 1024;

enum Step {
    Process,
    QueuePairs(Vec<QpWalk>),
    Memory(MemoryWalk),
    Done,
}

pub(super) struct Document {
    step: Step,
    json: Json,
}

impl Document {
    pub(super) fn new() -> Self {
        Self {
            step: Step::Process,
            json: Json::default(),
        }
    }

    /// Returns the next piece, or `None` after the last.
    pub(super) fn next(&mut self) -> Option<String> {
        let json = &mut self.json;
        match &mut self.step {
            Step::Process => {
                json.open('{');
                json.number_of("format", Some(FORMAT));
                process(json);
                json.name("queue_pairs");
                json.open('[');
                self.step = Step::QueuePairs(report::qp_walks());
            }
            Step::QueuePairs(walks) => {
                let mut count = 0;
                while count < PIECE_QPS
                    && let Some(walk) = walks.last_mut()
                {
                    match walk.next() {
                        Some(Some(qp)) => queue_pair(json, walk.device(), &qp),
                        // The queue pair was destroyed, or belongs to the parent process.
                        Some(None) => {}
                        None => {
                            walks.pop();
                            continue;
                        }
                    }
                    count += 1;
                }
                if walks.is_empty() {
                    json.close(']');
                    self.step = Step::Memory(MemoryWalk::new());
                }
            }
            Step::Memory(walk) => {
                if !walk.step() {
                    json.name("devices");
                    json.open('[');
                    report::devices(walk).iter().for_each(|d| device(json, d));
                    json.close(']');
                    json.close('}');
                    self.step = Step::Done;
                }
            }
            Step::Done => return None,
        }
        Some(json.take())
    }
}

fn process(json: &mut Json) {
    json.name("process");
    json.open('{');
    json.number_of("pid", Some(std::process::id().into()));
    let uid = rustix::process::geteuid().as_raw();
    json.number_of("uid", Some(uid.into()));
    json.text_of("command", Some(command()));
    json.text_of("version", Some(env!("CARGO_PKG_VERSION")));
    json.number_of("age_ns", Some(super::age_ns()));
    json.close('}');
}

/// Returns the command line as `ps` shows it.
fn command() -> String {
    let mut line = Vec::new();
    if let Ok(file) = std::fs::File::open("/proc/self/cmdline") {
        let _ = file.take(COMMAND_MAX).read_to_end(&mut line);
    }
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    line.trim_end().to_owned()
}

fn counters(json: &mut Json, counters: &Counters) {
    json.name("counters");
    json.open('{');
    for (name, value) in counters.named() {
        json.number_of(name, Some(value));
    }
    json.close('}');
}

fn device(json: &mut Json, d: &DeviceReport) {
    json.open('{');
    json.text_of("name", Some(&d.name));
    json.text_of("address", Some(d.address));
    json.number_of("opened", Some(d.opened.into()));
    json.number_of("queue_pairs", Some(d.queue_pairs as u64));
    json.number_of("completion_queues", Some(d.completion_queues.into()));
    json.number_of("registrations", Some(d.registrations as u64));
    json.number_of("registered_octets", Some(d.registered_octets));
    counters(json, &d.counters);
    json.close('}');
}

fn queue_pair(json: &mut Json, device: &str, qp: &QpReport) {
    json.open('{');
    json.text_of("device", Some(device));
    json.number_of("number", Some(qp.number.into()));
    json.text_of("state", Some(qp.state));
    json.text_of("kind", Some(if qp.numbered { "numbered" } else { "cm" }));
    json.number_of("pd", Some(qp.pd.into()));
    json.number_of("sends_outstanding", Some(qp.sends_outstanding.into()));
    json.number_of("receives_posted", qp.receives_posted.map(u64::from));
    json.number_of("send_completions_waiting", Some(qp.send_completions as u64));
    json.number_of("recv_completions_waiting", Some(qp.recv_completions as u64));
    json.number_of("held_ns", qp.held_ns);
    json.number_of("held_total_ns", Some(qp.held_total_ns));
    counters(json, &qp.counters);
    json.text_of("end", qp.fault.as_ref());
    match &qp.link {
        Some(l) => link(json, l),
        None => json.text_of("connection", None::<&str>),
    }
    json.close('}');
}

fn link(json: &mut Json, l: &LinkReport) {
    json.name("connection");
    json.open('{');
    json.text_of("local", Some(l.local));
    json.text_of("peer", Some(l.peer));
    json.number_of("age_ns", u64::try_from(l.age.as_nanos()).ok());
    json.number_of("unacknowledged_octets", l.unacknowledged_octets);
    let tcp = |value: fn(&crate::sys::sockopt::TcpInfo) -> u32| {
        l.tcp.as_ref().map(|t| u64::from(value(t)))
    };
    json.number_of("tcp_retransmits", tcp(|t| t.retransmits));
    json.number_of("tcp_lost_segments", tcp(|t| t.lost_segments));
    json.number_of(
        "tcp_unacknowledged_segments",
        tcp(|t| t.unacknowledged_segments),
    );
    json.number_of(
        "tcp_congestion_window_segments",
        tcp(|t| t.congestion_window_segments),
    );
    json.number_of("tcp_segment_octets", tcp(|t| t.segment_octets));
    json.number_of("tcp_rtt_us", tcp(|t| t.rtt_us));
    json.number_of("tcp_rtt_variation_us", tcp(|t| t.rtt_variation_us));
    json.close('}');
}
