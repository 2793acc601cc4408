//! Alternating ping-pongs of plain TCP, bare framing and RDMA Writes, with both processes spinning.
//!
//! The speed of a virtual processor changes several times a second, by half or more, when other
//! virtual machines use the same hardware. Ping-pongs that are measured one after the other would
//! run at different speeds. So each of them runs for some milliseconds at a time, many times, and
//! all of them get the same mixture of speeds.

use crate::peer::ReceivingProcess;
use crate::probe::{self, Framing};
use crate::rdma::{self, LatencyArgs};
use crate::stats::Samples;
use crate::{OnOff, Wait, tcp};
use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Map, Value, json};
use std::time::Instant;

/// Names of the ping-pongs in the results.
const NAMES: [&str; 5] = [
    "tcp-spin",
    "probe-spin",
    "probe-spin-crc",
    "write-spin",
    "write-spin-crc",
];
const TURNS: u32 = 40;

#[derive(Debug, Args)]
pub(crate) struct SpinArgs {
    /// Octets per message
    #[arg(long)]
    size: usize,
    /// Round trips of each ping-pong; a tenth more are made to warm up
    #[arg(long, default_value_t = 20_000)]
    iters: u32,
}

impl SpinArgs {
    const fn per_turn(&self) -> u32 {
        self.iters.div_ceil(TURNS)
    }

    /// Number of round trips at the beginning of a turn that are not counted. They are slower,
    /// because the caches contain the data of the other ping-pongs.
    const fn warm_up(&self) -> u32 {
        self.per_turn().div_ceil(10)
    }
}

/// Calls `round_trip` for each round trip, with the index of the ping-pong, and `true` if the round
/// trip is counted.
fn take_turns(a: &SpinArgs, mut round_trip: impl FnMut(usize, bool) -> Result<()>) -> Result<()> {
    for turn in 0..TURNS {
        for i in 0..NAMES.len() {
            // Reverse every second turn, so that a ping-pong does not always follow the same one.
            let index = match turn % 2 {
                0 => i,
                _ => NAMES.len() - 1 - i,
            };
            for i in 0..a.warm_up() + a.per_turn() {
                round_trip(index, i >= a.warm_up())?;
            }
        }
    }
    Ok(())
}

/// Runs the process that measures the time.
pub(crate) fn measure(a: &SpinArgs) -> Result<Value> {
    let mut peer = ReceivingProcess::start()?;
    let mut stream = || tcp::connect(peer.address()?, true);
    let (plain, off, on) = (stream()?, stream()?, stream()?);
    let mut tcp = tcp::PingPong::new(plain, a.size, Wait::Spin);
    let probe =
        |stream, crc| probe::PingPong::new(stream, &Framing::with_crc(crc), a.size, Wait::Spin);
    let (mut probe, mut probe_crc) = (probe(&off, OnOff::Off), probe(&on, OnOff::On));
    let mut writes =
        |crc| rdma::PingPong::connect(&LatencyArgs::writes(a.size, crc), peer.address()?);
    let (mut write, mut write_crc) = (writes(OnOff::Off)?, writes(OnOff::On)?);
    let mut samples: Vec<Samples> = NAMES.map(|_| Samples::default()).into();
    take_turns(a, |index, counted| {
        let start = Instant::now();
        match index {
            0 => tcp.ask(),
            1 => probe.ask(),
            2 => probe_crc.ask(),
            3 => write.ask(),
            _ => write_crc.ask(),
        }?;
        let took = start.elapsed();
        if let Some(samples) = samples.get_mut(index).filter(|_| counted) {
            samples.round_trip(took);
        }
        Ok(())
    })?;
    write.finish()?;
    write_crc.finish()?;
    let named = NAMES.iter().zip(&samples);
    Ok(Value::Object(
        named
            .map(|(name, samples)| ((*name).to_owned(), samples.report()))
            .collect::<Map<String, Value>>(),
    ))
}

/// Runs the process that answers.
pub(crate) fn peer(a: &SpinArgs) -> Result<Value> {
    let (plain, off, on) = (tcp::accept(true)?, tcp::accept(true)?, tcp::accept(true)?);
    let mut tcp = tcp::PingPong::new(plain, a.size, Wait::Spin);
    let probe =
        |stream, crc| probe::PingPong::new(stream, &Framing::with_crc(crc), a.size, Wait::Spin);
    let (mut probe, mut probe_crc) = (probe(&off, OnOff::Off), probe(&on, OnOff::On));
    let writes = |crc| rdma::PingPong::accept(&LatencyArgs::writes(a.size, crc));
    let (mut write, mut write_crc) = (writes(OnOff::Off)?, writes(OnOff::On)?);
    take_turns(a, |index, _| {
        let answered = match index {
            0 => tcp.answer(),
            1 => probe.answer(),
            2 => probe_crc.answer(),
            3 => write.answer(),
            _ => write_crc.answer(),
        }?;
        if !answered {
            bail!("the sender closed the connection during a turn");
        }
        Ok(())
    })?;
    write.answer_end()?;
    write_crc.answer_end()?;
    Ok(json!({}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_are_shared_equally() {
        let a = SpinArgs {
            size: 4,
            iters: 1001,
        };
        let mut counted = [0; NAMES.len()];
        let mut all = [0; NAMES.len()];
        take_turns(&a, |index, is_counted| {
            all[index] += 1;
            counted[index] += u32::from(is_counted);
            Ok(())
        })
        .unwrap();
        assert_eq!(counted, [26 * TURNS; NAMES.len()]);
        assert_eq!(all, [29 * TURNS; NAMES.len()]);
    }
}
