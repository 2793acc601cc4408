//! Reads the JSON document with the statistics of a process (format 1 of `iwarp::stat`). Unknown
//! members are ignored; members that another version of the library does not send are empty.

use serde::Deserialize;
use std::collections::BTreeMap;

/// The version of the format that this command reads.
pub(super) const FORMAT: u64 = 1;

/// Counters by name, as in `iwarp::runtime::Counters::named`.
pub(crate) type Counters = BTreeMap<String, u64>;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Document {
    pub(crate) format: u64,
    pub(crate) process: Process,
    pub(crate) queue_pairs: Vec<QueuePair>,
    pub(crate) devices: Vec<Device>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Process {
    /// The process ID as the process reports it. The ID from the kernel takes precedence.
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) command: String,
    pub(crate) version: String,
    pub(crate) age_ns: u64,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) opened: u64,
    pub(crate) queue_pairs: u64,
    pub(crate) completion_queues: u64,
    pub(crate) registrations: u64,
    pub(crate) registered_octets: u64,
    pub(crate) counters: Counters,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct QueuePair {
    pub(crate) device: String,
    pub(crate) number: u32,
    pub(crate) state: String,
    pub(crate) kind: String,
    pub(crate) pd: u32,
    pub(crate) sends_outstanding: u64,
    pub(crate) receives_posted: Option<u64>,
    /// How long a Send has been waiting for a receive; `None` if none is waiting.
    pub(crate) held_ns: Option<u64>,
    /// Time in which Sends waited for a receive.
    pub(crate) held_total_ns: u64,
    pub(crate) counters: Counters,
    /// Why the connection ended.
    pub(crate) end: Option<String>,
    pub(crate) connection: Option<Connection>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Connection {
    pub(crate) local: String,
    pub(crate) peer: String,
    pub(crate) age_ns: u64,
    pub(crate) unacknowledged_octets: Option<u64>,
    pub(crate) tcp_retransmits: Option<u64>,
    pub(crate) tcp_unacknowledged_segments: Option<u64>,
    pub(crate) tcp_congestion_window_segments: Option<u64>,
    pub(crate) tcp_rtt_us: Option<u64>,
}

/// Returns a counter, or 0 if the process does not report it.
pub(super) fn counter(counters: &Counters, name: &str) -> u64 {
    counters.get(name).copied().unwrap_or(0)
}

#[derive(Debug, Clone, Default)]
pub(crate) struct ProcessStats {
    /// The process ID from the kernel. If the process is not visible from this PID namespace, the
    /// ID that it reports itself.
    pub(crate) pid: u32,
    /// The user ID from the kernel.
    pub(crate) uid: u32,
    /// The document as received, for `--json`.
    pub(crate) raw: serde_json::Value,
    pub(crate) document: Document,
}

impl ProcessStats {
    /// Parses an answer.
    ///
    /// # Errors
    /// Describes what is wrong with the answer.
    pub(crate) fn read(pid: Option<u32>, uid: u32, text: &[u8]) -> Result<Self, String> {
        let raw: serde_json::Value =
            serde_json::from_slice(text).map_err(|e| format!("its answer is not JSON: {e}"))?;
        let mut document: Document = Document::deserialize(&raw)
            .map_err(|e| format!("its answer has an unknown form: {e}"))?;
        if document.format != FORMAT {
            return Err(format!(
                "its library uses format {} of the statistics, but this command supports \
                 format {FORMAT}",
                document.format
            ));
        }
        document.queue_pairs.sort_by(|a, b| {
            let key = |qp: &QueuePair| (qp.connection.is_none(), qp.device.clone(), qp.number);
            key(a).cmp(&key(b))
        });
        let pid = pid.unwrap_or(document.process.pid);
        Ok(Self {
            pid,
            uid,
            raw,
            document,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_format_fails_unknown_members_pass() {
        let error = ProcessStats::read(None, 0, br#"{"format":2}"#).unwrap_err();
        assert!(error.contains("format 2"), "{error}");
        let error = ProcessStats::read(None, 0, b"{").unwrap_err();
        assert!(error.contains("not JSON"), "{error}");
        let error = ProcessStats::read(None, 0, br#"{"format":1,"devices":7}"#).unwrap_err();
        assert!(error.contains("unknown form"), "{error}");
        let stats = ProcessStats::read(
            None,
            5,
            br#"{"format":1,"new":[],"process":{"pid":9,"colour":"red"}}"#,
        )
        .unwrap();
        assert_eq!((stats.pid, stats.uid), (9, 5));
        // The ID from the kernel takes precedence.
        let stats = ProcessStats::read(Some(7), 5, br#"{"format":1,"process":{"pid":9}}"#).unwrap();
        assert_eq!(stats.pid, 7);
    }
}
