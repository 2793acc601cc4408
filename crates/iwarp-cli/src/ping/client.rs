//! The asking end: what `rping -c` does.

use super::PingArgs;
use super::link::{Half, Link, out_of_turn};
use super::wire::{Info, data, printable};
use crate::error::{Context as _, Error, Result};
use crate::{out, rdma};
use iwarp::cm::Connector;
use iwarp::{Access, Config, MemoryRegion};
use std::time::{Duration, Instant};

/// Round trips, for the summary.
#[derive(Default)]
struct Times {
    count: u64,
    min: Duration,
    max: Duration,
    sum: Duration,
}

impl Times {
    fn add(&mut self, t: Duration) {
        self.min = if self.count == 0 { t } else { self.min.min(t) };
        self.max = self.max.max(t);
        self.sum += t;
        self.count += 1;
    }
}

/// Pings until the count is reached, or for ever.
pub(super) fn run(args: &PingArgs) -> Result<()> {
    if args.port == 0 {
        return Err(Error::usage("--port 0 belongs to 'iwarp ping serve'"));
    }
    let addresses = rdma::resolve(&args.target, args.port)?;
    let mut link = rdma::first_that_answers(&addresses, &Config::from_env(), |ctx, peer| {
        let (half, qp) = Half::new(ctx)?;
        let connector = Connector::new(ctx).reads(1, 1);
        Ok(half.connected(rdma::connect(&connector, peer, qp)?))
    })?;
    let size = args.size as usize;
    let source = link.allocate(size, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
    let sink = link.allocate(size, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let mut times = Times::default();
    let outcome = pings(args, &mut link, &source, &sink, &mut times);
    link.close();
    if times.count > 0 {
        let us = |t: Duration| t.as_secs_f64() * 1e6;
        out::line(format_args!(
            "{} pings of {size} octets, round trip min/avg/max {:.0}/{:.0}/{:.0} us",
            times.count,
            us(times.min),
            us(times.sum) / times.count as f64,
            us(times.max)
        ));
    }
    outcome
}

fn pings(
    args: &PingArgs,
    link: &mut Link,
    source: &MemoryRegion,
    sink: &MemoryRegion,
    times: &mut Times,
) -> Result<()> {
    for number in 0..args.count.unwrap_or(u64::MAX) {
        let sent = data(number, args.size as usize);
        source.write_at(0, &sent).context("memory")?;
        let start = Instant::now();
        ask(link, source)?;
        ask(link, sink)?;
        times.add(start.elapsed());
        if args.validate || args.verbose {
            let back = sink.to_vec(..).context("memory")?;
            if args.validate && back != sent {
                let at = back.iter().zip(&sent).position(|(a, b)| a != b);
                return Err(Error::failed(format!(
                    "ping {number}: the data differ from octet {} on",
                    at.unwrap_or(0)
                )));
            }
            if args.verbose {
                out::line(format_args!("ping data: {}", printable(&back)));
            }
        }
    }
    Ok(())
}

/// Says where a buffer is, and waits until the server has used it.
fn ask(link: &mut Link, mr: &MemoryRegion) -> Result<()> {
    let remote = mr.remote();
    let size = u32::try_from(remote.len).map_err(|_| out_of_turn())?;
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
