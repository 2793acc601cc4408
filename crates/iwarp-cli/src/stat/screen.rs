//! The terminal of `iwarp stat --watch`: its size, keys, signals, and the way back.
//!
//! The table is drawn on the terminal's alternate screen, so the shell's text is unchanged when the
//! command ends. Signals are received as octets of a pipe, so one `poll` waits for everything.

use iwarp_cli_common::error::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::low_level::{emulate_default_handler, pipe};
use std::io::{IsTerminal as _, Read as _, Stdin, Stdout, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Enters the alternate screen, hides the cursor, and cuts lines off at the margin.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
/// Undoes [`ENTER`].
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";
/// The size if the terminal does not know its own.
const DEFAULT_SIZE: Size = Size {
    rows: 24,
    columns: 80,
};

/// The size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// Why [`Screen::wait`] returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    Key(Key),
    /// The size has changed, or the screen must be drawn again.
    Redraw,
    /// Another thread has called [`Waker::wake`].
    Woken,
    /// The user or a signal ends the command.
    End,
    TimedOut,
}

/// A key with a meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    NextSort,
    Quit,
}

/// The keys, and the octets that terminals send for them.
const KEYS: [(Key, &[&[u8]]); 8] = [
    (Key::Up, &[b"\x1b[A", b"\x1bOA", b"k"]),
    (Key::Down, &[b"\x1b[B", b"\x1bOB", b"j", b"\r", b"\n"]),
    (Key::PageUp, &[b"\x1b[5~", b"b"]),
    (Key::PageDown, &[b"\x1b[6~", b" "]),
    (Key::Home, &[b"\x1b[H", b"\x1b[1~", b"\x1bOH", b"g"]),
    (Key::End, &[b"\x1b[F", b"\x1b[4~", b"\x1bOF", b"G"]),
    (Key::NextSort, &[b"s"]),
    (Key::Quit, &[b"q", b"Q"]),
];

/// Takes the next key from `input`. Other octets are dropped. Returns `None` if the input is empty
/// or ends inside a sequence.
fn next_key(input: &mut Vec<u8>) -> Option<Key> {
    while !input.is_empty() {
        for (key, sequences) in KEYS {
            if let Some(sequence) = sequences.iter().find(|s| input.starts_with(s)) {
                input.drain(..sequence.len());
                return Some(key);
            }
        }
        let mut sequences = KEYS.iter().flat_map(|(_, sequences)| *sequences);
        if input.len() < 4 && sequences.any(|s| s.starts_with(input)) {
            return None;
        }
        input.remove(0);
    }
    None
}

/// Ends the waiting of a [`Screen`].
pub(super) struct Waker {
    woken: Arc<AtomicBool>,
    pipe: UnixStream,
}

impl Waker {
    pub(super) fn wake(&self) {
        self.woken.store(true, Ordering::Release);
        // If the pipe is full, the screen does not wait.
        let _ = (&self.pipe).write(&[0]);
    }
}

/// Signals that have arrived and were not handled.
#[derive(Debug, Default)]
struct Arrived {
    resized: Arc<AtomicBool>,
    suspended: Arc<AtomicBool>,
    /// The signal that ends the command, or 0.
    ended: Arc<AtomicUsize>,
}

/// The terminal, with its old settings, which are restored on drop.
pub(super) struct Screen {
    out: Stdout,
    /// Standard input and its old settings, if it is a terminal.
    keyboard: Option<(Stdin, Termios)>,
    input: Vec<u8>,
    pipe: UnixStream,
    pipe_in: UnixStream,
    arrived: Arrived,
    woken: Arc<AtomicBool>,
    active: bool,
}

impl Screen {
    /// Opens the screen if standard output is a terminal that can move its cursor.
    ///
    /// # Errors
    /// No file descriptors are left, or the terminal has been closed.
    pub(super) fn open() -> Result<Option<Self>> {
        let out = std::io::stdout();
        let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
        if !out.is_terminal() || dumb {
            return Ok(None);
        }
        let stdin = std::io::stdin();
        let keyboard = match stdin.is_terminal() {
            true => tcgetattr(&stdin).ok().map(|old| (stdin, old)),
            false => None,
        };
        let (pipe, pipe_in) = UnixStream::pair().context("cannot wait for signals")?;
        let nonblocking = pipe
            .set_nonblocking(true)
            .and_then(|()| pipe_in.set_nonblocking(true));
        nonblocking.context("cannot wait for signals")?;
        let mut screen = Self {
            out,
            keyboard,
            input: Vec::new(),
            pipe,
            pipe_in,
            arrived: Arrived::default(),
            woken: Arc::default(),
            active: false,
        };
        screen.register().context("cannot wait for signals")?;
        screen.enter().context("cannot use the terminal")?;
        Ok(Some(screen))
    }

    /// Registers the signals. The flags come before the pipe, so that they are set when the pipe
    /// wakes the screen.
    fn register(&self) -> std::io::Result<()> {
        let arrived = &self.arrived;
        signal_hook::flag::register(SIGWINCH, Arc::clone(&arrived.resized))?;
        signal_hook::flag::register(SIGTSTP, Arc::clone(&arrived.suspended))?;
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            let number = usize::try_from(signal).unwrap_or_default();
            signal_hook::flag::register_usize(signal, Arc::clone(&arrived.ended), number)?;
        }
        for signal in [SIGWINCH, SIGTSTP, SIGINT, SIGTERM, SIGHUP] {
            pipe::register(signal, self.pipe_in.try_clone()?)?;
        }
        Ok(())
    }

    /// Returns a value with which another thread can end [`wait`](Self::wait).
    ///
    /// # Errors
    /// No file descriptors are left.
    pub(super) fn waker(&self) -> Result<Waker> {
        Ok(Waker {
            woken: Arc::clone(&self.woken),
            pipe: self.pipe_in.try_clone().context("cannot start a thread")?,
        })
    }

    /// Switches to the alternate screen. The keyboard delivers single keys, which are not echoed;
    /// Ctrl-C and Ctrl-Z still send signals.
    fn enter(&mut self) -> std::io::Result<()> {
        if let Some((stdin, old)) = &self.keyboard {
            let mut raw = old.clone();
            raw.local_modes
                .remove(LocalModes::ICANON | LocalModes::ECHO);
            tcsetattr(stdin, OptionalActions::Flush, &raw)?;
        }
        self.active = true;
        self.out.write_all(ENTER.as_bytes())?;
        self.out.flush()
    }

    /// Restores the terminal. Errors are ignored: the terminal may have been closed.
    fn leave(&mut self) {
        if !std::mem::take(&mut self.active) {
            return;
        }
        let _ = self.out.write_all(LEAVE.as_bytes());
        let _ = self.out.flush();
        if let Some((stdin, old)) = &self.keyboard {
            let _ = tcsetattr(stdin, OptionalActions::Flush, old);
        }
    }

    pub(super) fn size(&self) -> Size {
        match tcgetwinsize(&self.out) {
            Ok(size) if size.ws_row > 0 && size.ws_col > 0 => Size {
                rows: size.ws_row.into(),
                columns: size.ws_col.into(),
            },
            _ => DEFAULT_SIZE,
        }
    }

    /// Draws these lines, at most as many as the terminal has. Returns `false` if the terminal has
    /// been closed.
    pub(super) fn draw<'a>(&mut self, lines: impl Iterator<Item = &'a str>) -> bool {
        let mut frame = String::from("\x1b[H");
        for (i, line) in lines.take(self.size().rows).enumerate() {
            if i > 0 {
                frame.push_str("\r\n");
            }
            frame.push_str(line);
            // Erases the rest of the old line.
            frame.push_str("\x1b[K");
        }
        frame.push_str("\x1b[J");
        let written = self.out.write_all(frame.as_bytes());
        written.and_then(|()| self.out.flush()).is_ok()
    }

    /// Waits for a key, a signal or another thread, at most until `end`; forever if it is `None`.
    pub(super) fn wait(&mut self, end: Option<Instant>) -> Event {
        loop {
            if let Some(event) = self.signal() {
                return event;
            }
            if let Some(key) = next_key(&mut self.input) {
                return Event::Key(key);
            }
            if self.woken.swap(false, Ordering::Acquire) {
                return Event::Woken;
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Event::TimedOut;
            }
            if !self.poll(left) {
                return Event::End;
            }
        }
    }

    /// Returns the event of a signal that has arrived.
    fn signal(&mut self) -> Option<Event> {
        if self.arrived.ended.load(Ordering::Acquire) != 0 {
            return Some(Event::End);
        }
        if self.arrived.suspended.swap(false, Ordering::AcqRel) {
            self.leave();
            let _ = emulate_default_handler(SIGTSTP);
            // The process continues here after SIGCONT.
            return Some(match self.enter() {
                Ok(()) => Event::Redraw,
                Err(_) => Event::End,
            });
        }
        let resized = self.arrived.resized.swap(false, Ordering::AcqRel);
        resized.then_some(Event::Redraw)
    }

    /// Waits until there is a key or an octet of the pipe, and reads it. Returns `false` if the
    /// terminal has been closed.
    fn poll(&mut self, limit: Option<Duration>) -> bool {
        let mut fds = vec![PollFd::new(&self.pipe, PollFlags::IN)];
        if let Some((stdin, _)) = &self.keyboard {
            fds.push(PollFd::new(stdin, PollFlags::IN));
        }
        let limit = limit.map(|limit| Timespec::try_from(limit).unwrap_or_default());
        match poll(&mut fds, limit.as_ref()) {
            Err(Errno::INTR) => return true,
            Err(_) => return false,
            Ok(_) => {}
        }
        let key = fds.get(1).is_some_and(|fd| !fd.revents().is_empty());
        drop(fds);
        let mut octets = [0; 64];
        // Nonblocking. What the octets stand for is in the flags.
        while (&self.pipe).read(&mut octets).is_ok_and(|n| n > 0) {}
        if !key {
            return true;
        }
        let Some((stdin, _)) = &self.keyboard else {
            return true;
        };
        match rustix::io::read(stdin, &mut octets) {
            Ok(0) => false,
            Ok(n) => {
                self.input
                    .extend_from_slice(octets.get(..n).unwrap_or_default());
                true
            }
            Err(error) => matches!(error, Errno::INTR | Errno::AGAIN),
        }
    }

    /// Restores the terminal. If a signal other than SIGINT has ended the command, ends the process
    /// by that signal, so that its parent sees the cause.
    pub(super) fn close(mut self) {
        self.leave();
        let signal = i32::try_from(self.arrived.ended.load(Ordering::Acquire)).unwrap_or_default();
        if signal != 0 && signal != SIGINT {
            let _ = emulate_default_handler(signal);
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(input: &mut Vec<u8>) -> Vec<Key> {
        std::iter::from_fn(|| next_key(input)).collect()
    }

    #[test]
    fn keys_are_parsed_in_order() {
        let mut input = b"\x1b[A\x1bOBx\x1b[6~\xc3\xa4q\x1b[5~".to_vec();
        assert_eq!(
            keys(&mut input),
            [Key::Up, Key::Down, Key::PageDown, Key::Quit, Key::PageUp]
        );
        assert!(input.is_empty());
    }

    #[test]
    fn split_sequence_is_one_key() {
        let mut input = b"\x1b".to_vec();
        for more in [&b"["[..], b"6"] {
            assert_eq!(keys(&mut input), []);
            input.extend_from_slice(more);
        }
        assert_eq!(keys(&mut input), []);
        input.extend_from_slice(b"~q");
        assert_eq!(keys(&mut input), [Key::PageDown, Key::Quit]);
        // An unknown sequence does not hide the next key.
        input.extend_from_slice(b"\x1b[200~\x1b[B");
        assert_eq!(keys(&mut input), [Key::Down]);
    }
}
