//! An unprivileged recorder of RDMA traffic. It writes the data of sockets to a pcapng file with
//! synthetic TCP/IP headers, so that Wireshark decodes it as iWARP (RFC 5044 section 4, RFC 793).
//!
//! The recording contains the real data of each direction in order, the real addresses, and the
//! time of each system call. Sequence numbers, acknowledgements, segment boundaries and the
//! handshake are synthetic, as on a perfect network. On a connection with markers each segment
//! contains exactly one FPDU, because Wireshark finds markers only then. An FPDU is recorded when
//! it is complete.
//!
//! Lock order: a flow's state, then the file. The flow's lock is held until its packet is in the
//! file, so the packets of a flow are recorded in the order of their sequence numbers.

mod framing;
mod output;
mod packet;
mod pcapng;

use crate::complain;
use crate::objects::hooks::{Observer, Recording};
use crate::sys::exit::AtExit;
use crate::sys::fork;
use crate::sys::process_lock::ProcessLock;
use crate::sys::raw_slice::RawSlice;
use framing::Framing;
use output::Output;
use packet::{ACK, Addresses, FIN, PSH, RST, SYN, Segment};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// Maximum payload of a synthetic segment, as on a loopback interface with an MTU of 65536.
const MAX_SEGMENT: usize = 65_483;
/// Octets in one direction after which a synthetic acknowledgement is recorded. Wireshark would
/// report a full window if there were none.
const ACK_EVERY: u32 = 256 << 10;
/// Approximate size of writes to the file.
const BUFFER: usize = 128 << 10;
/// How long the exit of the process waits for a thread that is writing to the file.
const EXIT_LOCK_TIMEOUT: Duration = Duration::from_millis(500);

/// Limits at which a [`Recorder`] stops; none by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct RecorderLimits {
    /// Maximum size of the file in bytes.
    pub max_bytes: Option<u64>,
    /// Maximum number of packets.
    pub max_packets: Option<u64>,
}

impl RecorderLimits {
    /// Stops before the file exceeds `max_bytes` bytes.
    #[must_use]
    pub fn max_bytes(mut self, max_bytes: u64) -> Self {
        self.max_bytes = Some(max_bytes);
        self
    }

    /// Stops after `max_packets` packets.
    #[must_use]
    pub fn max_packets(mut self, max_packets: u64) -> Self {
        self.max_packets = Some(max_packets);
        self
    }
}

/// Records the traffic of connections in a pcapng file, which Wireshark and `tshark` decode.
///
/// A clone writes to the same file. The file is complete after [`flush`](Self::flush), and after
/// the last clone and the last recorded connection are dropped. A recorder never disturbs the
/// traffic: an error of the file stops the recording and is reported once, as in
/// [`Config::from_env`](crate::Config::from_env). A child of `fork` does not record.
///
/// If both ends of a connection are in this process and record to the same file, each octet is
/// recorded once.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// # let path = std::env::temp_dir().join(format!("iwarp-doc-{}.pcapng", std::process::id()));
/// let limits = iwarp::RecorderLimits::default().max_bytes(8 << 20);
/// let recorder = iwarp::Recorder::create_with(&path, limits)?;
/// recorder.flush()?;
/// # std::fs::remove_file(path)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Recorder {
    shared: Arc<Shared>,
}

struct Shared {
    path: PathBuf,
    /// `false` after a limit or an error.
    active: AtomicBool,
    generation: u32,
    next_sequence: AtomicU32,
    /// Recorded connections, as (local, peer).
    flows: Mutex<HashSet<(SocketAddr, SocketAddr)>>,
    output: Mutex<Output>,
}

impl Recorder {
    /// Creates or overwrites the file at `path`, and records without a limit.
    ///
    /// # Errors
    /// The file cannot be created or written.
    pub fn create(path: impl AsRef<Path>) -> io::Result<Self> {
        Self::create_with(path, RecorderLimits::default())
    }

    /// Creates or overwrites the file at `path`, and stops at `limits`. The file is valid even
    /// then.
    ///
    /// # Errors
    /// The file cannot be created or written.
    pub fn create_with(path: impl AsRef<Path>, limits: RecorderLimits) -> io::Result<Self> {
        let path = path.as_ref().to_path_buf();
        Self::start(&path, limits).inspect_err(|error| {
            // A C program gets only an error number, so the message names the file.
            complain::once(format!("cannot record to {}: {error}", path.display()));
        })
    }

    fn start(path: &Path, limits: RecorderLimits) -> io::Result<Self> {
        let mut output = Output::new(File::create(path)?, limits);
        pcapng::file_header(&mut output.buffer);
        // Written now, so that the caller gets the error of a full or read-only file system.
        output.flush()?;
        Ok(Self {
            shared: Arc::new(Shared {
                path: path.to_owned(),
                active: AtomicBool::new(true),
                generation: fork::generation(),
                next_sequence: AtomicU32::new(0x1000_0000),
                flows: Mutex::new(HashSet::new()),
                output: Mutex::new(output),
            }),
        })
    }

    /// Writes all recorded data to the file.
    ///
    /// # Errors
    /// The file cannot be written. Recording stops in that case.
    pub fn flush(&self) -> io::Result<()> {
        self.shared.flush()
    }

    /// Writes all recorded data to the file. Waits for other threads at most for
    /// [`EXIT_LOCK_TIMEOUT`].
    fn flush_at_exit(&self) {
        if self.shared.is_child() {
            return;
        }
        if let Some(mut output) = fork::try_for(EXIT_LOCK_TIMEOUT, || self.shared.output.try_lock())
        {
            let result = output.flush();
            self.shared.report_lost_tail(result);
        }
    }

    /// Returns `true` until a limit or an error stops the recording.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        self.shared.is_recording()
    }

    /// Returns the number of packets recorded so far.
    #[must_use]
    pub fn packets(&self) -> u64 {
        self.shared.output.lock().packets
    }

    /// Starts to record a connection. Dropping the result stops it.
    pub(crate) fn flow(&self, local: SocketAddr, peer: SocketAddr) -> Flow {
        // Far from the numbers of earlier connections, so that a reused port does not look like a
        // continuation.
        let base = self
            .shared
            .next_sequence
            .fetch_add(0x0102_0304, Ordering::Relaxed);
        let muted = {
            let mut flows = self.shared.flows.lock();
            // If the other end is in this process, it records both directions.
            flows.contains(&(peer, local)) || !flows.insert((local, peer))
        };
        Flow {
            shared: Arc::clone(&self.shared),
            local,
            peer,
            addresses: Addresses::new(local, peer),
            muted,
            state: Mutex::new(FlowState {
                stage: Stage::New,
                ours: Direction::starting_at(base),
                theirs: Direction::starting_at(base.wrapping_add(0x4000_0000)),
            }),
        }
    }
}

static RECORDERS: ProcessLock<Vec<(PathBuf, Recorder)>> =
    ProcessLock::new("capture::RECORDERS", Vec::new());

/// Returns the recorder of a file, which all devices share. `%p` in the name is replaced by the
/// process ID.
pub(crate) fn shared_recorder(path: &Path, max_bytes: Option<u64>) -> io::Result<Recorder> {
    static FLUSH: AtExit = AtExit::new(flush_recorders);
    let name = path
        .to_string_lossy()
        .replace("%p", &std::process::id().to_string());
    let path = PathBuf::from(name);
    let mut recorders = RECORDERS.lock();
    if let Some((_, recorder)) = recorders.iter().find(|(p, _)| *p == path) {
        return Ok(recorder.clone());
    }
    let limits = max_bytes.map_or_else(RecorderLimits::default, |n| {
        RecorderLimits::default().max_bytes(n)
    });
    let recorder = Recorder::create_with(&path, limits)?;
    recorders.push((path, recorder.clone()));
    // `RECORDERS` is never dropped, so the recorders have to be flushed at exit.
    FLUSH.plan();
    Ok(recorder)
}

fn flush_recorders() {
    // The program may exit in a signal handler, on a thread that holds the lock.
    if let Some(recorders) = RECORDERS.try_lock() {
        for (_, recorder) in recorders.iter() {
            recorder.flush_at_exit();
        }
    }
}

impl Recording for Recorder {
    fn connection(&self, local: SocketAddr, peer: SocketAddr, active: bool) -> Box<dyn Observer> {
        let flow = self.flow(local, peer);
        flow.opened(active);
        Box::new(flow)
    }

    fn flush(&self) -> io::Result<()> {
        self.shared.flush()
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("path", &self.shared.path)
            .field("recording", &self.is_recording())
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn is_child(&self) -> bool {
        fork::generation() != self.generation
    }

    fn is_recording(&self) -> bool {
        self.active.load(Ordering::Relaxed) && !self.is_child()
    }

    fn flush(&self) -> io::Result<()> {
        if self.is_child() {
            return Ok(());
        }
        let result = self.output.lock().flush();
        if result.is_err() {
            self.active.store(false, Ordering::Relaxed);
        }
        result
    }

    /// Reports, once, that buffered packets could not be written.
    fn report_lost_tail(&self, result: io::Result<()>) {
        if let Err(error) = result
            && self.active.swap(false, Ordering::Relaxed)
        {
            complain::once(format!(
                "the last packets of the recording in {} are lost: {error}",
                self.path.display()
            ));
        }
    }

    /// Records a segment; `fill` appends its payload. A segment that would exceed a limit is not
    /// recorded and stops the recording.
    fn segment(
        &self,
        addresses: &Addresses,
        segment: &Segment,
        payload_len: usize,
        fill: impl FnOnce(&mut Vec<u8>),
    ) {
        let mut output = self.output.lock();
        if !self.active.load(Ordering::Relaxed) {
            return;
        }
        let result = output.segment(addresses, segment, payload_len, fill);
        match result {
            Ok(true) => {}
            Ok(false) => self.active.store(false, Ordering::Relaxed),
            Err(error) => {
                self.active.store(false, Ordering::Relaxed);
                complain::once(format!(
                    "recording to {} has stopped: {error}",
                    self.path.display()
                ));
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.is_child() {
            return;
        }
        let result = self.output.get_mut().flush();
        self.report_lost_tail(result);
    }
}

/// Recording of one connection, seen from this end.
pub(crate) struct Flow {
    shared: Arc<Shared>,
    local: SocketAddr,
    peer: SocketAddr,
    addresses: Addresses,
    /// `true` if the other end of the connection is in this process and records it.
    muted: bool,
    state: Mutex<FlowState>,
}

struct FlowState {
    stage: Stage,
    ours: Direction,
    theirs: Direction,
}

#[derive(PartialEq, Eq, Clone, Copy)]
enum Stage {
    New,
    Open,
    Closed,
}

/// One direction of the synthetic TCP stream.
struct Direction {
    /// Next sequence number.
    next: u32,
    unacknowledged: u32,
    /// Splits a stream with markers into segments of one FPDU each.
    framing: Option<Framing>,
}

impl Direction {
    fn starting_at(next: u32) -> Self {
        Self {
            next,
            unacknowledged: 0,
            framing: None,
        }
    }
}

impl FlowState {
    fn direction(&mut self, outgoing: bool) -> &mut Direction {
        if outgoing {
            &mut self.ours
        } else {
            &mut self.theirs
        }
    }
}

impl Observer for Flow {
    fn framed(&self, markers_tx: bool, markers_rx: bool) {
        if self.is_recording() && (markers_tx || markers_rx) {
            let mut state = self.state.lock();
            state.ours.framing = Some(Framing::new(markers_tx));
            state.theirs.framing = Some(Framing::new(markers_rx));
        }
    }

    fn sent(&self, parts: &[IoSlice<'_>]) {
        if self.is_recording() {
            let list: Vec<RawSlice> = parts.iter().map(|part| RawSlice::of(part)).collect();
            // SAFETY: `parts` borrows the slices for the whole call.
            unsafe { self.data(true, &list, usize::MAX) };
        }
    }

    fn received(&self, parts: &[&[u8]]) {
        if self.is_recording() {
            let list: Vec<RawSlice> = parts.iter().map(|part| RawSlice::of(part)).collect();
            // SAFETY: `parts` borrows the slices for the whole call.
            unsafe { self.data(false, &list, usize::MAX) };
        }
    }

    unsafe fn sent_raw(&self, list: &[RawSlice], count: usize) {
        if self.is_recording() {
            // SAFETY: guaranteed by the caller.
            unsafe { self.data(true, list, count) };
        }
    }

    unsafe fn received_raw(&self, list: &[RawSlice], count: usize) {
        if self.is_recording() {
            // SAFETY: guaranteed by the caller.
            unsafe { self.data(false, list, count) };
        }
    }

    fn closed(&self, reset: bool) {
        if !self.is_recording() {
            return;
        }
        let mut state = self.state.lock();
        if state.stage == Stage::Open {
            for outgoing in [true, false] {
                let framing = state.direction(outgoing).framing.take();
                if let Some(mut framing) = framing {
                    self.payload_in_segments(&mut state, outgoing, &framing.take_fragment());
                }
            }
            if reset {
                self.control(&mut state, true, RST | ACK);
            } else {
                self.control(&mut state, true, FIN | ACK);
                self.control(&mut state, false, FIN | ACK);
                self.control(&mut state, true, ACK);
            }
        }
        state.stage = Stage::Closed;
        // If the program is killed later, the file contains this connection completely.
        let _ = self.shared.flush();
    }
}

impl Flow {
    /// Records a TCP handshake. `active` is `true` if this end connected.
    pub(crate) fn opened(&self, active: bool) {
        if self.is_recording() {
            self.open(&mut self.state.lock(), active);
        }
    }

    #[inline]
    pub(crate) fn is_recording(&self) -> bool {
        !self.muted && self.shared.is_recording()
    }

    fn open(&self, state: &mut FlowState, active: bool) {
        if state.stage != Stage::New {
            return;
        }
        state.stage = Stage::Open;
        self.control(state, active, SYN);
        self.control(state, !active, SYN | ACK);
        self.control(state, active, ACK);
    }

    /// Records a segment without payload. SYN and FIN consume a sequence number.
    fn control(&self, state: &mut FlowState, outgoing: bool, flags: u8) {
        self.emit(state, outgoing, flags, 0, |_| ());
        if flags & (SYN | FIN) != 0 {
            let direction = state.direction(outgoing);
            direction.next = direction.next.wrapping_add(1);
        }
    }

    fn emit(
        &self,
        state: &mut FlowState,
        outgoing: bool,
        flags: u8,
        len: usize,
        fill: impl FnOnce(&mut Vec<u8>),
    ) {
        let (from, to) = if outgoing {
            (&state.ours, &mut state.theirs)
        } else {
            (&state.theirs, &mut state.ours)
        };
        let acknowledges = flags & ACK != 0;
        let segment = Segment {
            outgoing,
            flags,
            sequence: from.next,
            acknowledgement: if acknowledges { to.next } else { 0 },
        };
        if acknowledges {
            to.unacknowledged = 0;
        }
        self.shared.segment(&self.addresses, &segment, len, fill);
    }

    /// # Safety
    /// See [`Flow::sent_raw`].
    unsafe fn data(&self, outgoing: bool, list: &[RawSlice], count: usize) {
        let mut state = self.state.lock();
        // Wireshark needs a handshake, even if the recording starts in the middle of a connection.
        self.open(&mut state, outgoing);
        if state.stage != Stage::Open {
            return;
        }
        let total: usize = list
            .iter()
            .fold(0, |sum, part| part.len().saturating_add(sum));
        let mut left = total.min(count);
        let mut list = list.iter();
        let mut part = RawSlice::default();
        let mut copy = |out: &mut Vec<u8>, mut room: usize| {
            while room > 0 {
                if part.is_empty() {
                    match list.next() {
                        Some(next) => part = *next,
                        None => return,
                    }
                }
                // SAFETY: `part` is part of the caller's list, whose memory is readable.
                let copied = unsafe { part.append_to(out, room) };
                part = part.after(copied);
                room -= copied;
            }
        };
        if let Some(mut framing) = state.direction(outgoing).framing.take() {
            copy(framing.input(), left);
            framing.split(|fpdu| self.payload_in_segments(&mut state, outgoing, fpdu));
            state.direction(outgoing).framing = Some(framing);
            return;
        }
        while left > 0 {
            let len = left.min(MAX_SEGMENT);
            self.payload_segment(&mut state, outgoing, len, |out| copy(out, len));
            left -= len;
        }
    }

    fn payload_in_segments(&self, state: &mut FlowState, outgoing: bool, octets: &[u8]) {
        for piece in octets.chunks(MAX_SEGMENT) {
            self.payload_segment(state, outgoing, piece.len(), |out| {
                out.extend_from_slice(piece);
            });
        }
    }

    /// Records a segment with payload, and an acknowledgement after each [`ACK_EVERY`] octets.
    fn payload_segment(
        &self,
        state: &mut FlowState,
        outgoing: bool,
        len: usize,
        fill: impl FnOnce(&mut Vec<u8>),
    ) {
        self.emit(state, outgoing, PSH | ACK, len, fill);
        let direction = state.direction(outgoing);
        direction.next = direction.next.wrapping_add(len as u32);
        direction.unacknowledged += len as u32;
        if direction.unacknowledged >= ACK_EVERY {
            self.control(state, !outgoing, ACK);
        }
    }
}

impl fmt::Debug for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flow")
            .field("local", &self.local)
            .field("peer", &self.peer)
            .field("muted", &self.muted)
            .finish_non_exhaustive()
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        if !self.muted && !self.shared.is_child() {
            self.shared.flows.lock().remove(&(self.local, self.peer));
        }
    }
}

#[cfg(test)]
#[path = "capture/capture_tests.rs"]
mod tests;
