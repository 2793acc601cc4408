//! Reads the statistics of other processes. Many are asked at the same time, so that unresponsive
//! processes delay the others no longer than one of them would.

use super::place::{Candidate, Connected, candidates, places};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Processes asked at the same time. Each needs a file descriptor.
const BATCH: usize = 256;
/// Maximum of processes per other user that root asks. A user may have created them only to waste
/// root's time.
const STRANGERS_MAX: u32 = 1024;
/// Maximum length of an answer: enough for 60,000 queue pairs.
const ANSWER_MAX: usize = 64 << 20;
/// Maximum wait without data, even if the patience is longer.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// The processes to ask, and how long to wait for their answers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Question {
    /// Process to ask; `None` for all.
    pub pid: Option<u32>,
    /// Directory to search for sockets, for processes with this directory in `IWARP_STAT`; `None`
    /// for the default ones.
    pub directory: Option<PathBuf>,
    /// How long the processes may take to answer; default 3 s. Processes are asked in groups of
    /// 256, one after the other, and each group may take this long.
    pub patience: Duration,
}

impl Default for Question {
    fn default() -> Self {
        Self {
            pid: None,
            directory: None,
            patience: Duration::from_secs(3),
        }
    }
}

/// The answer of one process.
#[derive(Debug)]
#[non_exhaustive]
pub struct Answer {
    /// Process ID from the kernel; `None` if the process is in a PID namespace that is not visible
    /// here.
    pub pid: Option<u32>,
    /// User ID from the kernel.
    pub uid: u32,
    /// The document, unverified: JSON in UTF-8 from an honest process.
    /// [`TimedOut`](io::ErrorKind::TimedOut) if the process is stopped, or too many others ask it.
    pub document: io::Result<Vec<u8>>,
}

impl Question {
    /// Asks all processes of this user, or of all users as root. Blocks for about
    /// [`patience`](Self::patience) at most per group. The answers are in no particular order.
    ///
    /// # Errors
    /// No file descriptors or no memory left. A process that cannot be asked is no error.
    pub fn ask(&self) -> io::Result<Vec<Answer>> {
        let uid = rustix::process::geteuid().as_raw();
        let places = match &self.directory {
            Some(dir) => vec![dir.clone()],
            None => places(uid),
        };
        let all: Vec<_> = places.iter().flat_map(|home| candidates(home)).collect();
        let Some(pid) = self.pid else {
            return self.ask_these(&all, uid);
        };
        // The name has the process ID in the namespace of that process, which is nearly always the
        // ID here.
        let (likely, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|c| c.named == pid);
        let found = self.ask_these(&likely, uid)?;
        if !found.is_empty() {
            return Ok(found);
        }
        self.ask_these(&others, uid)
    }

    fn ask_these(&self, candidates: &[Candidate], uid: u32) -> io::Result<Vec<Answer>> {
        let mut asked: HashMap<u32, u32> = HashMap::new();
        let mut answers = Vec::new();
        for batch in candidates.chunks(BATCH) {
            let mut open = Vec::new();
            for candidate in batch {
                let (pid, owner, socket) = match candidate.connect(uid)? {
                    Connected::Process(socket, who) => (who.pid, who.uid, Some(socket)),
                    Connected::Busy(owner) => (Some(candidate.named), owner, None),
                    Connected::Nothing => continue,
                };
                // A process of another namespace has no ID here; use the one in the socket's name.
                let number = pid.unwrap_or(candidate.named);
                if self.pid.is_some_and(|wanted| wanted != number) {
                    continue;
                }
                let count = asked.entry(owner).or_default();
                *count += 1;
                if owner != uid && *count > STRANGERS_MAX {
                    continue;
                }
                let answer = Answer {
                    pid,
                    uid: owner,
                    document: Err(overdue()),
                };
                match socket {
                    Some(socket) => open.push(Reading {
                        answer,
                        socket,
                        document: Vec::new(),
                    }),
                    None => answers.push(answer),
                }
            }
            answers.extend(collect(open, self.patience));
        }
        Ok(answers)
    }
}

fn overdue() -> io::Error {
    io::ErrorKind::TimedOut.into()
}

struct Reading {
    /// The answer if no more data arrives.
    answer: Answer,
    socket: OwnedFd,
    document: Vec<u8>,
}

impl Reading {
    /// Reads without blocking. Returns `true` if the answer is complete or has failed.
    fn go_on(&mut self) -> bool {
        match read_some(&self.socket, &mut self.document) {
            Ok(false) => return false,
            Ok(true) => self.answer.document = Ok(std::mem::take(&mut self.document)),
            Err(e) => self.answer.document = Err(e),
        }
        true
    }
}

/// Reads from all processes until each answer has ended or `patience` is over.
fn collect(mut open: Vec<Reading>, patience: Duration) -> Vec<Answer> {
    let mut answers = Vec::new();
    let end = Instant::now().checked_add(patience);
    while !open.is_empty() {
        let left = end.map_or(LONGEST, |end| end.saturating_duration_since(Instant::now()));
        if left.is_zero() || !wait(&open, left.min(LONGEST)) {
            break;
        }
        for reading in open.extract_if(.., Reading::go_on) {
            answers.push(reading.answer);
        }
    }
    answers.extend(open.into_iter().map(|reading| reading.answer));
    answers
}

/// Waits until one of the sockets can be read. Returns `false` if that fails or takes longer than
/// `left`.
fn wait(open: &[Reading], left: Duration) -> bool {
    let mut fds: Vec<_> = open
        .iter()
        .map(|reading| PollFd::new(&reading.socket, PollFlags::IN))
        .collect();
    let limit = Timespec::try_from(left).unwrap_or_default();
    match poll(&mut fds, Some(&limit)) {
        Ok(ready) => ready > 0,
        Err(Errno::INTR) => true,
        Err(_) => false,
    }
}

/// Reads without blocking. Returns `true` at the end of the answer.
fn read_some(socket: &OwnedFd, document: &mut Vec<u8>) -> io::Result<bool> {
    let mut piece = [0u8; 16 * 1024];
    // Limited per call, so that a process that sends endlessly does not block the others.
    for _ in 0..16 {
        match rustix::io::read(socket, &mut piece[..]) {
            Ok(0) => return Ok(true),
            Ok(n) if document.len() + n > ANSWER_MAX => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "its answer has no end",
                ));
            }
            Ok(n) => document.extend_from_slice(piece.get(..n).unwrap_or_default()),
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(false)
}
