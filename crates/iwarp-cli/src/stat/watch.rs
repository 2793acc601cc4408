//! `iwarp stat --watch`: repeats the query, on a terminal or into a pipe.

use super::query::{Answers, Query};
use super::rates::Previous;
use super::screen::{Event, Key, Screen, Size, Waker};
use super::table;
use super::view::{Column, View};
use iwarp_cli_common::error::{Context as _, Result};
use iwarp_cli_common::out;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// How often, and after which delay, a process is queried again if it answered before and its
/// answer breaks off now. If it is ending, its socket closes soon; if not, it answers soon.
const RETRIES: usize = 40;
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Repeats a query. If the chosen processes have ended, there is no further answer.
pub(super) struct Repeater {
    query: Query,
    answered_before: bool,
}

impl Repeater {
    pub(super) const fn new(query: Query) -> Self {
        Self {
            query,
            answered_before: false,
        }
    }

    /// Queries the processes. Returns `None` if the chosen processes have ended.
    ///
    /// # Errors
    /// No chosen process can be queried.
    pub(super) fn next(&mut self) -> Result<Option<Answers>> {
        let mut retries = 0;
        loop {
            let answers = self.query.ask()?;
            if self.query.pids.is_empty() || !answers.stats.is_empty() {
                self.answered_before = true;
                return Ok(Some(answers));
            }
            let broke_off = answers.silent.iter().any(|s| !s.timed_out);
            if self.answered_before && retries < RETRIES && broke_off {
                retries += 1;
                std::thread::sleep(RETRY_DELAY);
                continue;
            }
            let (silent, before) = (&answers.silent, self.answered_before);
            return self.query.no_answer(silent, before).map(|()| None);
        }
    }
}

/// Writes the text of each answer to stdout, every `pause`. Ends if stdout is closed.
///
/// # Errors
/// No chosen process can be queried, or writing fails.
pub(super) fn lines(
    mut repeater: Repeater,
    pause: Duration,
    show: impl Fn(&Answers, &Previous) -> Result<String>,
) -> Result<()> {
    let mut previous = Previous::default();
    while let Some(answers) = repeater.next()? {
        for s in &answers.silent {
            eprintln!("iwarp: {}", s.sentence());
        }
        if !out::text(&show(&answers, &previous)?)? {
            break;
        }
        previous = Previous::new(&answers.stats);
        std::thread::sleep(pause);
    }
    Ok(())
}

/// Shows the table on a terminal until the user ends it, or the chosen processes have ended.
///
/// # Errors
/// No chosen process can be queried.
pub(super) fn screen(
    mut screen: Screen,
    repeater: Repeater,
    pause: Duration,
    view: View,
) -> Result<()> {
    let background = Background::start(repeater, screen.waker()?)?;
    let mut browser = Browser::new(view, pause);
    let result = browser.run(&mut screen, &background);
    // Leave the alternate screen before an error is printed.
    screen.close();
    result
}

/// Queries in a thread of its own, because a process that does not answer takes seconds, and keys
/// must work meanwhile.
struct Background {
    requests: SyncSender<()>,
    answers: Receiver<Result<Option<Answers>>>,
}

impl Background {
    fn start(mut repeater: Repeater, waker: Waker) -> Result<Self> {
        let (requests, requested) = sync_channel(1);
        let (answered, answers) = sync_channel(1);
        let work = move || {
            while requested.recv().is_ok() {
                if answered.send(repeater.next()).is_err() {
                    break;
                }
                waker.wake();
            }
        };
        std::thread::Builder::new()
            .name("query".to_owned())
            .spawn(work)
            .context("cannot start a thread")?;
        Ok(Self { requests, answers })
    }
}

/// The latest answers, and the part of them that is visible.
struct Browser {
    view: View,
    pause: Duration,
    answers: Answers,
    /// The figures of the answers before, for rates.
    previous: Previous,
    /// `false` before the first answers.
    ready: bool,
    /// Number of lines above the visible ones.
    top: usize,
}

impl Browser {
    fn new(view: View, pause: Duration) -> Self {
        Self {
            view,
            pause,
            answers: Answers::default(),
            previous: Previous::default(),
            ready: false,
            top: 0,
        }
    }

    fn run(&mut self, screen: &mut Screen, background: &Background) -> Result<()> {
        // `None` while a query is in progress.
        let mut next_query = Some(Instant::now());
        loop {
            match screen.wait(next_query) {
                Event::End | Event::Key(Key::Quit) => return Ok(()),
                Event::Key(key) => self.key(key, screen.size()),
                Event::Redraw => {}
                Event::TimedOut => {
                    next_query = None;
                    // The thread ends only with this one.
                    let _ = background.requests.send(());
                    continue;
                }
                Event::Woken => match background.answers.try_recv() {
                    Ok(Ok(Some(answers))) => {
                        self.take(answers);
                        next_query = Instant::now().checked_add(self.pause);
                    }
                    Ok(Ok(None)) => return Ok(()),
                    Ok(Err(error)) => return Err(error),
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => continue,
                },
            }
            if self.ready && !self.draw(screen) {
                return Ok(());
            }
        }
    }

    fn take(&mut self, answers: Answers) {
        if self.ready {
            self.previous = Previous::new(&self.answers.stats);
        }
        self.answers = answers;
        self.ready = true;
    }

    /// Moves the visible part, or changes the order.
    fn key(&mut self, key: Key, size: Size) {
        let page = size.rows.saturating_sub(2).max(1);
        self.top = match key {
            Key::Up => self.top.saturating_sub(1),
            Key::Down => self.top.saturating_add(1),
            Key::PageUp => self.top.saturating_sub(page),
            Key::PageDown => self.top.saturating_add(page),
            Key::Home => 0,
            Key::End => usize::MAX,
            Key::NextSort => {
                self.view.sort = Column::after(self.view.sort);
                0
            }
            Key::Quit => self.top,
        };
    }

    /// Returns all lines below the heading.
    fn body(&self, width: usize) -> String {
        let mut body = String::new();
        for silent in &self.answers.silent {
            body.push_str(&silent.sentence());
            body.push('\n');
        }
        let shown = table::table(&self.answers.stats, &self.previous, &self.view, Some(width));
        if shown.is_empty() && body.is_empty() {
            body.push_str("no process that uses iwarp, or none with such a queue pair\n");
        }
        body + &shown
    }

    /// Returns the first line of the screen.
    fn heading(&self, first: usize, last: usize, all: usize) -> String {
        let stats = &self.answers.stats;
        let processes = table::plural(stats.len() as u64, "process", "es");
        let queue_pairs: usize = stats.iter().map(|s| s.document.queue_pairs.len()).sum();
        let queue_pairs = table::plural(queue_pairs as u64, "queue pair", "s");
        let sort = self.view.sort;
        let sort = sort.map_or_else(|| "process".to_owned(), Column::name);
        format!(
            "iwarp stat: {processes}, {queue_pairs}, by {sort}, every {} s; lines {first}–{last} \
             of {all}; q quits, s sorts, ↑ ↓ scroll",
            self.pause.as_secs_f64()
        )
    }

    /// Draws the heading and the visible lines. Returns `false` if the terminal has been closed.
    fn draw(&mut self, screen: &mut Screen) -> bool {
        let size = screen.size();
        let body = self.body(size.columns);
        let lines: Vec<&str> = body.lines().collect();
        let room = size.rows.saturating_sub(1);
        self.top = self.top.min(lines.len().saturating_sub(room));
        let last = lines.len().min(self.top + room);
        let first = last.min(self.top + 1);
        let heading = table::truncated(&self.heading(first, last, lines.len()), size.columns);
        let visible = lines.get(self.top..last).unwrap_or_default();
        screen.draw(
            [heading.trim_end()]
                .into_iter()
                .chain(visible.iter().copied()),
        )
    }
}
