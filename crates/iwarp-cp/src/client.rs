//! `iwarp cp FILE HOST:PATH` and `iwarp cp HOST:PATH FILE`.

use crate::CpArgs;
use crate::confine::{Place, regular};
use crate::link::{Prepared, RdmaLink};
use crate::part::Source;
use crate::session::{self, Summary};
use indicatif::{ProgressBar, ProgressStyle};
use iwarp::verbs::Context;
use iwarp::verbs::cm::Connector;
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_cli_common::service::Budget;
use iwarp_cli_common::signals;
use iwarp_cli_common::{out, rdma, retry, units};
use rustix::fs::{Mode, OFlags};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// How to continue a copy that ended early.
const RESUME: &str = "the received data are kept: repeat the command to continue";
/// As [`RESUME`], for a command with `--no-resume`.
const RESUME_WITHOUT_OPTION: &str =
    "the received data are kept: repeat the command without --no-resume to continue";

pub(super) fn put(args: &CpArgs, file: &Path, peer: (&str, u16), path: &str) -> Result<()> {
    // Open the file before connecting, so that a bad name fails early.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let open = || {
        let fd = rustix::fs::open(file, flags, Mode::empty())
            .context(format_args!("'{}'", file.display()))?;
        Source::new(regular(fd, &file.display().to_string())?)
    };
    let mut first = Some(open()?);
    copy(args, peer, |link, progress| {
        let source = first.take().map_or_else(open, Ok)?;
        session::put(link, source, request(args, path), progress)
    })
}

pub(super) fn get(args: &CpArgs, peer: (&str, u16), path: &str, file: &Path) -> Result<()> {
    let target = if file.is_dir() {
        let name = path.rsplit('/').next().unwrap_or(path);
        file.join(name)
    } else {
        file.to_path_buf()
    };
    Place::local(&target)?.check_target()?;
    copy(args, peer, |link, progress| {
        let place = Place::local(&target)?;
        session::get(link, place, request(args, path), progress)
    })
}

fn request<'a>(args: &CpArgs, path: &'a str) -> session::Request<'a> {
    session::Request {
        path,
        resume: !args.no_resume,
    }
}

/// Connects and calls `work`. Retries if the server is busy, or if it evicts this client before it
/// has answered the request.
fn copy(
    args: &CpArgs,
    (host, port): (&str, u16),
    mut work: impl FnMut(&mut RdmaLink, session::Progress<'_>) -> Result<Summary>,
) -> Result<()> {
    let secret = args.secret()?;
    // Unlimited: this process makes only one copy.
    let budget = Budget::new(u64::MAX);
    let addresses = rdma::resolve(host, port)?;
    let bar = bar(args.quiet);
    let hint = if args.no_resume {
        RESUME_WITHOUT_OPTION
    } else {
        RESUME
    };
    let resumable = Arc::new(AtomicBool::new(false));
    let current = Arc::new(Mutex::new(None));
    let mut seconds = 0.0;
    let outcome = retry::retry_while_busy(|| {
        let (ctx, mut link) =
            rdma::try_addresses(&addresses, &crate::config(args), |ctx, peer| {
                let (prepared, qp) = Prepared::new(ctx, &budget)?;
                let connection = rdma::connect(&Connector::new(ctx), peer, qp)?;
                Ok((ctx.clone(), prepared.into_link(connection, None)))
            })?;
        if lock(&current).replace(ctx.clone()).is_none() {
            report_when_interrupted(&current, &resumable, &bar, hint)?;
        }
        let start = Instant::now();
        // `work` reports progress only after the server has answered the request.
        let mut answered = false;
        let outcome = session::begin(&mut link, secret.as_ref()).and_then(|()| {
            work(&mut link, &mut |done, all| {
                answered = true;
                show(&bar, done, all);
                resumable.store(is_resumable(done, all), Ordering::Release);
            })
        });
        let outcome = outcome.map_err(|e| match answered {
            true => e,
            false => link.refusal_to_busy(e),
        });
        link.close();
        seconds = start.elapsed().as_secs_f64();
        flush(&ctx);
        outcome
    });
    bar.finish_and_clear();
    let done = outcome.map_err(|e| match resumable.load(Ordering::Acquire) {
        true => Error::failed(format!("{e}; {hint}")),
        false => e,
    })?;
    if !args.quiet {
        out::line(format_args!("{}", summary(done, seconds)));
    }
    Ok(())
}

/// Returns `true` if a copy that ends after `done` bytes can be continued.
const fn is_resumable(done: u64, all: u64) -> bool {
    0 < done && done < all
}

fn lock(current: &Mutex<Option<Context>>) -> MutexGuard<'_, Option<Context>> {
    // Every statement leaves the value consistent, so a poisoned lock is harmless.
    current.lock().unwrap_or_else(PoisonError::into_inner)
}

/// On an interrupt, prints how to continue the copy and completes the capture of the connection.
fn report_when_interrupted(
    current: &Arc<Mutex<Option<Context>>>,
    resumable: &Arc<AtomicBool>,
    bar: &ProgressBar,
    hint: &'static str,
) -> Result<()> {
    let (current, resumable, bar) = (Arc::clone(current), Arc::clone(resumable), bar.clone());
    signals::on_interrupt(move |code| {
        bar.finish_and_clear();
        match resumable.load(Ordering::Acquire) {
            true => eprintln!("iwarp: interrupted; {hint}"),
            false => eprintln!("iwarp: interrupted"),
        }
        if let Some(ctx) = &*lock(&current) {
            flush(ctx);
        }
        code
    })
}

fn flush(ctx: &Context) {
    if let Err(e) = ctx.flush_capture() {
        tracing::warn!("the capture file is incomplete: {e}");
    }
}

/// Creates the progress bar. indicatif draws it on a terminal only.
fn bar(quiet: bool) -> ProgressBar {
    if quiet {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(0);
    let template = "{bar:30} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// Shows the progress of a copy.
fn show(bar: &ProgressBar, done: u64, all: u64) {
    if bar.length() != Some(all) {
        bar.set_length(all);
        // Data that the receiver already had do not count for the rate.
        bar.set_position(done);
        bar.reset_eta();
    }
    bar.set_position(done);
}

fn summary(done: Summary, seconds: f64) -> String {
    let moved = done.size - done.resumed;
    let hash: String = done.hash.iter().map(|b| format!("{b:02x}")).collect();
    let resumed = if done.resumed > 0 {
        format!(", the receiver already had {} octets", done.resumed)
    } else {
        String::new()
    };
    format!(
        "{moved} octets in {seconds:.3} s, {}{resumed}\nSHA-256 {hash}, equal at both ends",
        units::rate(moved as f64 / seconds.max(1e-9))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_counts_moved_data() {
        let summary_of = |resumed| {
            let (size, hash) = (5000, [0xab; 32]);
            let done = Summary {
                size,
                resumed,
                hash,
            };
            summary(done, 2.0)
        };
        let hash = "ab".repeat(32);
        let whole = summary_of(0);
        assert_eq!(
            whole,
            format!(
                "5000 octets in 2.000 s, {}\nSHA-256 {hash}, equal at both ends",
                units::rate(2500.0)
            )
        );
        let continued = summary_of(3000);
        let first = continued.lines().next().unwrap();
        assert_eq!(
            first,
            format!(
                "2000 octets in 2.000 s, {}, the receiver already had 3000 octets",
                units::rate(1000.0)
            )
        );
    }

    #[test]
    fn bar_follows_the_copy() {
        let bar = bar(false);
        for (done, all) in [(300, 1000), (1000, 1000), (0, 7)] {
            show(&bar, done, all);
            assert_eq!((bar.position(), bar.length()), (done, Some(all)));
        }
    }

    #[test]
    fn only_partial_copies_are_resumable() {
        let resumable =
            [(0, 0), (0, 9), (1, 9), (8, 9), (9, 9)].map(|(done, all)| is_resumable(done, all));
        assert_eq!(resumable, [false, false, true, true, false]);
    }
}
