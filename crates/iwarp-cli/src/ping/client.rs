//! The client, like `rping -c`.

use super::PingArgs;
use super::link::{Link, Prepared, protocol_violation};
use super::wire::{Info, data, printable};
use iwarp::Access;
use iwarp::verbs::cm::Connector;
use iwarp::verbs::{Context, MemoryRegion};
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_cli_common::{out, rdma, retry, signals};
use iwarp_figures::Latencies;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Round-trip times for the summary.
struct Times {
    size: u32,
    sent: u64,
    round_trips: Latencies,
}

impl Times {
    fn new(size: u32) -> Self {
        Self {
            size,
            sent: 0,
            round_trips: Latencies::new(),
        }
    }

    fn answered(&mut self, t: Duration) {
        self.round_trips.record(t);
    }

    /// Returns the summary line, or `None` if nothing was sent.
    fn summary(&self) -> Option<String> {
        let answered = self.round_trips.count();
        let lost = self.sent - answered;
        let mut text = format!(
            "{} pings of {} octets, {answered} answered, {:.0} % lost",
            self.sent,
            self.size,
            lost as f64 * 100.0 / self.sent.max(1) as f64
        );
        if let Some(avg) = self.round_trips.mean_us() {
            let us = |share| self.round_trips.quantile_us(share).unwrap_or(avg);
            text += &format!(
                ", round trip min/avg/p50/p99/max {:.0}/{avg:.0}/{:.0}/{:.0}/{:.0} us",
                us(0.0),
                us(0.5),
                us(0.99),
                us(1.0)
            );
        }
        (self.sent > 0).then_some(text)
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every statement leaves the value consistent, so a poisoned lock is harmless.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pings until the count is reached or the user interrupts.
pub(super) fn run(args: &PingArgs) -> Result<()> {
    let addresses = rdma::resolve(&args.target, args.port)?;
    let times = Arc::new(Mutex::new(Times::new(args.size())));
    let current_ctx = Arc::new(Mutex::new(None));
    let outcome = retry::retry_while_busy(|| {
        let (ctx, peer, mut link) =
            rdma::try_addresses(&addresses, &rdma::config(), |ctx, peer| {
                let (prepared, qp) = Prepared::new(ctx)?;
                let connector = Connector::new(ctx).reads(1, 1);
                let link = prepared.into_link(rdma::connect(&connector, peer, qp)?, None);
                Ok((ctx.clone(), peer, link))
            })?;
        if lock(&current_ctx).replace(ctx).is_none() {
            print_summary_on_interrupt(&current_ctx, &times)?;
        }
        let outcome = pings(args, peer, &mut link, &times);
        let outcome = outcome.map_err(|e| match lock(&times).round_trips.count() {
            // The server had no place for this client: retry.
            0 => link.refusal_to_busy(e),
            _ => e,
        });
        link.close();
        if matches!(outcome, Err(Error::Busy(_))) {
            // The server did not accept the ping, so it does not count as lost.
            lock(&times).sent = 0;
        }
        outcome
    });
    if let Some(text) = lock(&times).summary() {
        out::line(format_args!("{text}"));
    }
    outcome
}

/// On an interrupt, prints the summary and completes the capture of the current connection.
fn print_summary_on_interrupt(
    current_ctx: &Arc<Mutex<Option<Context>>>,
    times: &Arc<Mutex<Times>>,
) -> Result<()> {
    let (current_ctx, times) = (Arc::clone(current_ctx), Arc::clone(times));
    signals::on_interrupt(move |_| {
        let times = lock(&times);
        if let Some(text) = times.summary() {
            out::line(format_args!("{text}"));
        }
        let ctx = lock(&current_ctx);
        if let Some(Err(e)) = ctx.as_ref().map(Context::flush_capture) {
            tracing::warn!("the capture file is incomplete: {e}");
        }
        // The exit status. An interrupt is the normal end, as for ping(8), so it is 0 unless no
        // ping was answered.
        i32::from(times.round_trips.count() == 0)
    })
}

fn pings(args: &PingArgs, peer: SocketAddr, link: &mut Link, times: &Mutex<Times>) -> Result<()> {
    let size = args.size() as usize;
    let source = &link.allocate(size, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
    let sink = &link.allocate(size, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let interval = args.interval();
    for number in 0.. {
        let sent = data(number, size);
        source.write_at(0, &sent).context("memory")?;
        let start = Instant::now();
        lock(times).sent += 1;
        advertise(link, source)?;
        advertise(link, sink)?;
        let took = start.elapsed();
        lock(times).answered(took);
        if args.validate || args.verbose {
            let back = sink.to_vec(..).context("memory")?;
            inspect(args, number, &sent, &back)?;
        }
        if !interval.is_zero() {
            out::line(format_args!(
                "{} octets from {peer}: seq={number} time={:.0} us",
                args.size(),
                took.as_secs_f64() * 1e6
            ));
        }
        match args.pause(number, start.elapsed()) {
            Some(pause) => std::thread::sleep(pause),
            None => break,
        }
    }
    Ok(())
}

/// Validates and prints the returned data, as the options request.
fn inspect(args: &PingArgs, number: u64, sent: &[u8], back: &[u8]) -> Result<()> {
    if args.validate && back != sent {
        let at = back.iter().zip(sent).position(|(a, b)| a != b);
        return Err(Error::failed(format!(
            "ping {number}: the returned data differ from byte {} on",
            at.unwrap_or(0)
        )));
    }
    if args.verbose {
        out::line(format_args!("ping data: {}", printable(back)));
    }
    Ok(())
}

/// Advertises a buffer and waits until the server has used it.
fn advertise(link: &mut Link, mr: &MemoryRegion) -> Result<()> {
    let remote = mr.remote();
    let size = u32::try_from(remote.len).map_err(|_| protocol_violation())?;
    link.send(Info {
        addr: remote.addr,
        rkey: remote.rkey,
        size,
    })?;
    match link.recv()? {
        Some(_) => Ok(()),
        None => Err(Error::failed("the server closed the connection")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Wrap {
        #[command(flatten)]
        args: PingArgs,
    }

    #[test]
    fn wrong_data_fail_only_with_validate() {
        for (options, refused) in [
            (&[][..], false),
            (&["-v"], false),
            (&["-V"], true),
            (&["-V", "-v"], true),
            (&["-V", "-i", "0", "-C", "2", "-d"], true),
        ] {
            let args = Wrap::parse_from([&["ping", "h"], options].concat()).args;
            let outcome = inspect(&args, 3, b"abcd", b"abxd");
            assert_eq!(outcome.is_err(), refused, "{options:?}");
            if let Err(e) = outcome {
                let text = "ping 3: the returned data differ from byte 2 on";
                assert_eq!(e.to_string(), text);
            }
            assert!(inspect(&args, 3, b"abcd", b"abcd").is_ok());
        }
    }
}
