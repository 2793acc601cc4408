//! Moves data between two processes through `Stream`, `Channel` and RDMA Writes, and through
//! tokio's TCP, alternately. The receiver reads every octet.

use crate::peer::{self, ReceivingProcess};
use anyhow::{Context as _, Result, ensure};
use clap::Args;
use iwarp::{Access, Channel, Config, Connection, Options, RemoteRegion, Stream};
use iwarp_figures::Spread;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

#[derive(Debug, Args)]
pub(crate) struct StreamsArgs {
    /// Rounds; each measures every row once
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Octets of a transfer in pieces of 64 KiB and more; a 16th of that in pieces of 64 octets
    #[arg(long, default_value_t = 1 << 30)]
    octets: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Tcp,
    Stream,
    Channel,
    /// RDMA Writes from a region into a ring of the peer's memory, as a replicated log makes them.
    Replicate,
}

/// Name, way, length of a piece, and whether CRCs are used. Ratios are to the TCP row of that
/// length.
const ROWS: [(&str, Way, usize, bool); 15] = [
    ("TCP, 64", Way::Tcp, 64, false),
    ("Stream, 64, CRC", Way::Stream, 64, true),
    ("TCP, 64 KiB", Way::Tcp, 65_536, false),
    ("Stream, 64 KiB, CRC", Way::Stream, 65_536, true),
    ("Stream, 64 KiB", Way::Stream, 65_536, false),
    ("Channel, 64 KiB, CRC", Way::Channel, 65_536, true),
    ("Channel, 64 KiB", Way::Channel, 65_536, false),
    ("TCP, 1 MiB", Way::Tcp, MIB, false),
    ("Stream, 1 MiB, CRC", Way::Stream, MIB, true),
    ("Stream, 1 MiB", Way::Stream, MIB, false),
    ("Channel, 1 MiB, CRC", Way::Channel, MIB, true),
    ("Channel, 1 MiB", Way::Channel, MIB, false),
    ("replicate, 1 MiB, CRC", Way::Replicate, MIB, true),
    ("replicate, 1 MiB", Way::Replicate, MIB, false),
    ("Stream, 64", Way::Stream, 64, false),
];
const MIB: usize = 1 << 20;
/// Pieces in the ring of a replicated log.
const RING: usize = 4;

impl StreamsArgs {
    /// Returns how many pieces a transfer has.
    const fn pieces(&self, size: usize) -> usize {
        let octets = if size < 1024 {
            self.octets / 16
        } else {
            self.octets
        };
        octets / size
    }
}

fn options(crc: bool) -> Options {
    let mut config = Config::from_env();
    config.crc = crc;
    Options::new().config(config)
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    Ok(builder.enable_io().build()?)
}

/// Runs the sender, and reports the medians.
pub(crate) fn measure(a: &StreamsArgs) -> Result<Value> {
    let mut peer = ReceivingProcess::start()?;
    let runtime = runtime()?;
    let mut times = vec![Vec::new(); ROWS.len()];
    for _ in 0..a.rounds {
        for (row, times) in ROWS.iter().zip(&mut times) {
            peer.say(row.0)?;
            let to = peer.address()?;
            runtime.block_on(send(a, *row, to))?;
            times.push(peer::number(&peer.report()?, "s"));
        }
    }
    Ok(Value::Object(report(&times)))
}

/// Returns, for each row, the median time, and the median of the ratios to TCP in the same round
/// with its range.
fn report(times: &[Vec<f64>]) -> Map<String, Value> {
    let mut rows = Map::new();
    for ((name, _, size, _), own) in ROWS.iter().zip(times) {
        let mut tcp = ROWS.iter().zip(times).filter(|(row, _)| row.1 == Way::Tcp);
        let tcp = tcp.find(|(row, _)| row.2 == *size).map(|(_, times)| times);
        let ratios = own.iter().zip(tcp.into_iter().flatten());
        let ratios = Spread::of(ratios.map(|(own, tcp)| own / tcp).collect());
        let own = Spread::of(own.clone());
        rows.insert(
            (*name).to_owned(),
            json!({
                "s": own.map(|own| own.median),
                "to_tcp": ratios.map(|ratios| ratios.median),
                "range": ratios.map(|ratios| [ratios.min, ratios.max]),
            }),
        );
    }
    rows
}

async fn send(
    a: &StreamsArgs,
    (_, way, size, crc): (&str, Way, usize, bool),
    to: SocketAddr,
) -> Result<()> {
    let (octets, pieces) = (vec![3; size], a.pieces(size));
    if way == Way::Tcp {
        let stream = TcpStream::connect(to).await?;
        stream.set_nodelay(true)?;
        return feed(stream, &octets, pieces).await;
    }
    let connection = options(crc).connect(to).await?;
    match way {
        Way::Stream => {
            let stream = Stream::from(Channel::open(connection).await?);
            feed(stream, &octets, pieces).await
        }
        Way::Channel => {
            let channel = Channel::open(connection).await?;
            for _ in 0..pieces {
                channel.send(&octets).await?;
            }
            Ok(channel.finish().await?)
        }
        Way::Replicate => replicate(&connection, &octets, pieces).await,
        Way::Tcp => Ok(()),
    }
}

async fn feed(mut to: impl AsyncWrite + Unpin, octets: &[u8], pieces: usize) -> Result<()> {
    for _ in 0..pieces {
        to.write_all(octets).await?;
    }
    Ok(to.shutdown().await?)
}

/// Writes the pieces into the peer's ring. The immediate data are the place in the ring; the peer
/// returns a place by a message.
async fn replicate(connection: &Connection, octets: &[u8], pieces: usize) -> Result<()> {
    let ring = RemoteRegion::<u8>::from_bytes(&connection.recv().await?)?;
    let entry = connection.allocate::<u8>(octets.len())?;
    entry.write_at(0, octets)?;
    let mut writes = VecDeque::new();
    for piece in 0..pieces {
        if piece >= RING {
            drop(connection.recv().await?);
        }
        let place = piece % RING;
        let to = ring.slice(place * octets.len()..(place + 1) * octets.len())?;
        let write = connection.write_with_immediate(&entry, &to, u32::try_from(place)?);
        writes.push_back(write.started());
        if writes.len() == RING {
            writes.pop_front().context("there is a Write")?.await?;
        }
    }
    for write in writes {
        write.await?;
    }
    for _ in 0..RING.min(pieces) {
        drop(connection.recv().await?);
    }
    Ok(())
}

/// Runs the receiver.
pub(crate) fn peer(a: &StreamsArgs) -> Result<Value> {
    let runtime = runtime()?;
    for _ in 0..a.rounds {
        for row in ROWS {
            ensure!(
                peer::read_line()? == row.0,
                "the sender requested another row"
            );
            let seconds = runtime.block_on(receive(a, row))?;
            peer::send_line(json!({ "s": seconds }))?;
        }
    }
    Ok(json!({}))
}

/// Returns the time from the connection to the last octet, in seconds.
async fn receive(a: &StreamsArgs, (_, way, size, crc): (&str, Way, usize, bool)) -> Result<f64> {
    let at = (Ipv4Addr::LOCALHOST, 0);
    let (begin, octets);
    if way == Way::Tcp {
        let listener = TcpListener::bind(at).await?;
        peer::send_line(listener.local_addr()?)?;
        let stream = listener.accept().await?.0;
        begin = Instant::now();
        octets = read(stream, size).await?;
    } else {
        let listener = options(crc).listen(at).bind()?;
        peer::send_line(listener.local_addr())?;
        let connection = listener.accept().await?;
        begin = Instant::now();
        octets = match way {
            Way::Stream => read(Stream::from(Channel::open(connection).await?), size).await?,
            Way::Channel => read_messages(&Channel::open(connection).await?).await?,
            _ => read_ring(&connection, size, a.pieces(size)).await?,
        };
    }
    ensure!(
        octets == a.pieces(size) * size,
        "{octets} octets were received"
    );
    Ok(begin.elapsed().as_secs_f64())
}

/// Reads every octet, as a program does that uses the data.
fn sum(octets: &[u8]) {
    let (words, rest) = octets.as_chunks::<8>();
    let words = words.iter().map(|word| u64::from_ne_bytes(*word));
    let rest = rest.iter().map(|octet| u64::from(*octet));
    std::hint::black_box(words.chain(rest).fold(0, u64::wrapping_add));
}

async fn read(mut from: impl AsyncRead + Unpin, size: usize) -> Result<usize> {
    // Programs that write little at a time read through a buffer.
    let mut octets = vec![0; size.max(8192)];
    let mut count = 0;
    loop {
        let n = from.read(&mut octets).await?;
        if n == 0 {
            return Ok(count);
        }
        sum(&octets[..n]);
        count += n;
    }
}

async fn read_messages(channel: &Channel) -> Result<usize> {
    let mut count = 0;
    while let Some(message) = channel.recv().await? {
        sum(&message);
        count += message.len();
    }
    Ok(count)
}

async fn read_ring(connection: &Connection, size: usize, pieces: usize) -> Result<usize> {
    let ring = connection.share::<u8>(size * RING, Access::REMOTE_WRITE)?;
    connection.send(ring.remote().to_bytes().to_vec()).await?;
    let mut entry = vec![0; size];
    for _ in 0..pieces {
        let written = connection.recv().await?;
        let place = written.immediate().context("a Write has a place")? as usize;
        drop(written);
        ring.read_at(place * size, &mut entry)?;
        sum(&entry);
        drop(connection.send("").started());
    }
    connection.shutdown().await?;
    Ok(size * pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_compares_rounds() {
        let times = vec![vec![2.0, 8.0, 4.0]; ROWS.len()];
        let rows = report(&times);
        assert_eq!(rows.len(), ROWS.len());
        let row = &rows["Stream, 1 MiB"];
        assert_eq!(*row, json!({"s": 4.0, "to_tcp": 1.0, "range": [1.0, 1.0]}));
    }
}
