//! Reads the statistics of other processes. Up to [`BATCH`] processes are asked in parallel, so
//! that several unresponsive processes delay the result no longer than one.

use super::place::{Candidate, Connected, candidates, search_directories};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Maximum number of processes asked in parallel. Each needs a file descriptor.
const BATCH: usize = 256;
/// Maximum number of processes per other user that root asks, so that a user with very many
/// processes cannot delay root.
const PER_USER_MAX: u32 = 1024;
/// Maximum length of an answer: enough for 60,000 queue pairs.
const ANSWER_MAX: usize = 64 << 20;
/// Upper limit of the timeout for one `poll`.
const POLL_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

/// The processes to ask, and how long to wait for their answers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Question {
    /// Process to ask; `None` for all.
    pub pid: Option<u32>,
    /// Directory to search for sockets, for processes that have this directory in `IWARP_STAT`;
    /// `None` for the default directories.
    pub directory: Option<PathBuf>,
    /// Timeout of the answers; default 3 s. Processes are asked in groups of 256, one group after
    /// the other, and the timeout applies to each group.
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
    /// The document as the process has sent it: JSON in UTF-8, if the process is honest.
    /// [`TimedOut`](io::ErrorKind::TimedOut) if the process is stopped, or too many clients ask it.
    pub document: io::Result<Vec<u8>>,
}

impl Question {
    /// Asks all processes of this user; as root, those of all users. Blocks at most for about
    /// [`patience`](Self::patience) per group. The answers are in no particular order.
    ///
    /// # Errors
    /// No file descriptor or memory is left. A process that cannot be asked is not an error.
    pub fn ask(&self) -> io::Result<Vec<Answer>> {
        let uid = rustix::process::geteuid().as_raw();
        let directories = match &self.directory {
            Some(dir) => vec![dir.clone()],
            None => search_directories(uid),
        };
        let all: Vec<_> = directories
            .iter()
            .flat_map(|directory| candidates(directory))
            .collect();
        let Some(pid) = self.pid else {
            return self.ask_these(&all, uid);
        };
        // A socket's name contains the process ID in that process's namespace, which is nearly
        // always the ID in our namespace. Ask those with the wanted ID first.
        let (likely, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|c| c.pid_in_name == pid);
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
                    Connected::Process(socket, peer) => (peer.pid, peer.uid, Some(socket)),
                    Connected::Busy(owner) => (Some(candidate.pid_in_name), owner, None),
                    Connected::Nothing => continue,
                };
                // A process of another namespace may have no ID in ours. Then use the ID in the
                // socket's name.
                let number = pid.unwrap_or(candidate.pid_in_name);
                if self.pid.is_some_and(|wanted| wanted != number) {
                    continue;
                }
                let count = asked.entry(owner).or_default();
                *count += 1;
                if owner != uid && *count > PER_USER_MAX {
                    continue;
                }
                let answer = Answer {
                    pid,
                    uid: owner,
                    document: Err(timed_out()),
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

fn timed_out() -> io::Error {
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
    fn read_more(&mut self) -> bool {
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
        let remaining = end.map_or(POLL_TIMEOUT_MAX, |end| {
            end.saturating_duration_since(Instant::now())
        });
        if remaining.is_zero() || !wait(&open, remaining.min(POLL_TIMEOUT_MAX)) {
            break;
        }
        for reading in open.extract_if(.., Reading::read_more) {
            answers.push(reading.answer);
        }
    }
    answers.extend(open.into_iter().map(|reading| reading.answer));
    answers
}

/// Waits until one of the sockets can be read. Returns `false` if that fails or takes longer than
/// `remaining`.
fn wait(open: &[Reading], remaining: Duration) -> bool {
    let mut fds: Vec<_> = open
        .iter()
        .map(|reading| PollFd::new(&reading.socket, PollFlags::IN))
        .collect();
    let limit = Timespec::try_from(remaining).unwrap_or_default();
    match poll(&mut fds, Some(&limit)) {
        Ok(ready) => ready > 0,
        Err(Errno::INTR) => true,
        Err(_) => false,
    }
}

/// Reads without blocking. Returns `true` at the end of the answer.
fn read_some(socket: &OwnedFd, document: &mut Vec<u8>) -> io::Result<bool> {
    let mut piece = [0u8; 16 * 1024];
    // The loop is limited, so that a process that sends endlessly does not delay the others.
    for _ in 0..16 {
        match rustix::io::read(socket, &mut piece[..]) {
            Ok(0) => return Ok(true),
            Ok(n) if document.len() + n > ANSWER_MAX => {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the answer is too long",
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    #[test]
    fn answer_has_a_limit() {
        for (len, fits) in [(ANSWER_MAX - 1, true), (ANSWER_MAX, false)] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            theirs.write_all(&[7]).unwrap();
            let mut document = vec![0; len];
            let read = read_some(&ours.into(), &mut document);
            assert_eq!(read.ok(), fits.then_some(false), "{len}");
        }
    }
}
