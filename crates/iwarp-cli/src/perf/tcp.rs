//! The baseline: plain TCP between two processes, used as a careful program would.
//!
//! NODELAY is set. Bandwidth: one `send` per message, and `recv` of 256 KiB into one buffer that
//! stays in the cache. Latency: a ping-pong of whole messages, either sleeping in `recv` or
//! spinning on a non-blocking one.

use super::point::{
    Link, Op, Pending, Point, Poll, Role, STALL, Session, SpinGuard, Transport, stalled,
};
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_figures::Latencies;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Bytes requested by one `recv`.
const RECV_LEN: usize = 256 * 1024;
/// Largest number of connections that have not identified themselves yet.
const MAX_UNIDENTIFIED: usize = 256;

#[derive(Debug)]
pub(crate) struct Tcp;

#[derive(Debug)]
struct Listening {
    listener: TcpListener,
    link: Link,
}

/// How an end waits for data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    Sleep,
    /// Polls for this long, then sleeps.
    PollThenSleep(Duration),
    Spin,
}

#[derive(Debug)]
struct Connected {
    streams: Vec<TcpStream>,
    /// How long the library polls before it sleeps.
    busy_poll: Duration,
    /// One buffer per stream, large enough for a message and for a `recv`.
    bufs: Vec<Vec<u8>>,
}

impl Transport for Tcp {
    fn listen(&self, link: &Link, at: SocketAddr, _: IpAddr) -> Result<Box<dyn Pending>> {
        let listener = TcpListener::bind(at).context(format_args!("cannot listen on {at}"))?;
        listener
            .set_nonblocking(true)
            .context("cannot set up the listener")?;
        Ok(Box::new(Listening {
            listener,
            link: link.clone(),
        }))
    }

    fn connect(&self, link: &Link, to: SocketAddr) -> Result<Box<dyn Session>> {
        let mut streams = Vec::new();
        for i in 0..link.qps {
            let mut s = TcpStream::connect_timeout(&to, STALL)
                .context(format_args!("cannot connect to {to}"))?;
            set_up(&s)?;
            // Send the connection's index: the server may accept the connections in another order.
            s.write_all(&i.to_be_bytes())
                .context("cannot set up a connection")?;
            streams.push(s);
        }
        Ok(Box::new(Connected::new(streams, link)?))
    }
}

impl Pending for Listening {
    fn port(&self) -> u16 {
        self.listener.local_addr().map_or(0, |a| a.port())
    }

    fn accept(self: Box<Self>) -> Result<Box<dyn Session>> {
        let end = Instant::now() + STALL;
        let mut slots: Vec<Option<TcpStream>> = (0..self.link.qps).map(|_| None).collect();
        let mut unidentified: Vec<Unidentified> = Vec::new();
        while slots.iter().any(Option::is_none) {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream
                        .set_nonblocking(true)
                        .context("cannot set up a connection")?;
                    // Our client identifies its connections at once, so the oldest is a stranger's.
                    if unidentified.len() >= MAX_UNIDENTIFIED {
                        unidentified.remove(0);
                    }
                    unidentified.push(Unidentified {
                        stream,
                        index: Vec::new(),
                    });
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    if Instant::now() > end {
                        return Err(Error::failed(
                            "the client did not open its connections in time",
                        ));
                    }
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(e) => return Err(e).context("cannot accept"),
            }
            let mut remaining = Vec::new();
            for u in unidentified.drain(..) {
                remaining.extend(u.assign(&mut slots)?);
            }
            unidentified = remaining;
        }
        Ok(Box::new(Connected::new(
            slots.into_iter().flatten().collect(),
            &self.link,
        )?))
    }
}

/// A connection that has not sent its index; it may be a stranger's.
struct Unidentified {
    stream: TcpStream,
    /// The received part of the four bytes of the index.
    index: Vec<u8>,
}

impl Unidentified {
    /// Puts the connection into its slot if the index is complete. Returns the connection if it is
    /// not. Closes the connection if the slot is not free.
    fn assign(mut self, slots: &mut [Option<TcpStream>]) -> Result<Option<Self>> {
        let mut octets = [0; 4];
        let missing = octets.len() - self.index.len();
        match self.stream.read(&mut octets[..missing]) {
            Ok(0) => return Ok(None),
            Ok(n) => self.index.extend_from_slice(&octets[..n]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(Some(self)),
            Err(_) => return Ok(None),
        }
        let Ok(index) = self.index.as_slice().try_into() else {
            return Ok(Some(self));
        };
        if let Some(free @ None) = slots.get_mut(u32::from_be_bytes(index) as usize) {
            self.stream
                .set_nonblocking(false)
                .context("cannot set up a connection")?;
            set_up(&self.stream)?;
            *free = Some(self.stream);
        }
        Ok(None)
    }
}

fn set_up(s: &TcpStream) -> Result<()> {
    s.set_nodelay(true)
        .and_then(|()| s.set_read_timeout(Some(STALL)))
        .and_then(|()| s.set_write_timeout(Some(STALL)))
        .context("cannot set socket options")
}

impl Connected {
    fn new(streams: Vec<TcpStream>, link: &Link) -> Result<Self> {
        let len = usize::try_from(link.max_size)
            .context("message size")?
            .max(RECV_LEN);
        let bufs = streams.iter().map(|_| buffer(len)).collect::<Result<_>>()?;
        Ok(Self {
            streams,
            busy_poll: iwarp::Config::from_env().busy_poll,
            bufs,
        })
    }
}

/// Allocates a buffer. The client chooses the size, so a failure must not abort the server.
fn buffer(len: usize) -> Result<Vec<u8>> {
    let mut buf = Vec::new();
    buf.try_reserve_exact(len)
        .context(format_args!("no memory for a buffer of {len} octets"))?;
    buf.resize(len, 0x5a);
    Ok(buf)
}

impl Session for Connected {
    fn latency(
        &mut self,
        role: Role,
        point: &Point,
        iters: u64,
        hist: &mut Latencies,
    ) -> Result<()> {
        let (Some(s), Some(buf)) = (
            self.streams.first(),
            self.bufs
                .first_mut()
                .and_then(|b| b.get_mut(..point.size as usize)),
        ) else {
            return Err(Error::failed("the message is larger than announced"));
        };
        let wait = match (point.op, point.poll) {
            (Op::TcpPolls, _) => Wait::PollThenSleep(self.busy_poll),
            (_, Poll::Spin) => Wait::Spin,
            (_, Poll::Event) => Wait::Sleep,
        };
        match role {
            Role::Client => {
                let mut t0 = Instant::now();
                for _ in 0..iters {
                    send_all(s, buf, wait)?;
                    recv_all(s, buf, wait)?;
                    let t1 = Instant::now();
                    hist.record(t1 - t0);
                    t0 = t1;
                }
            }
            Role::Server => {
                for _ in 0..iters {
                    recv_all(s, buf, wait)?;
                    send_all(s, buf, wait)?;
                }
            }
        }
        Ok(())
    }

    fn bandwidth(&mut self, role: Role, point: &Point, iters: u64) -> Result<Duration> {
        let t0 = Instant::now();
        let n = self.streams.len() as u64;
        let transfer = |i: u64, s: &TcpStream, buf: &mut [u8]| {
            let share = iters / n + u64::from(i < iters % n);
            match role {
                Role::Client => send_stream(s, buf, point.size, share),
                Role::Server => receive_stream(s, buf, point.size, share),
            }
        };
        let mut pairs = (0..).zip(self.streams.iter().zip(self.bufs.iter_mut()));
        let first = pairs.next();
        std::thread::scope(|scope| {
            let others: Vec<_> = pairs
                .map(|(i, (s, b))| scope.spawn(move || transfer(i, s, b)))
                .collect();
            let mine = first.map_or(Ok(()), |(i, (s, b))| transfer(i, s, b));
            others.into_iter().fold(mine, |all, h| {
                all.and(
                    h.join()
                        .unwrap_or_else(|_| Err(Error::failed("a measuring thread failed"))),
                )
            })
        })?;
        Ok(t0.elapsed())
    }
}

fn send_stream(mut s: &TcpStream, buf: &[u8], size: u64, messages: u64) -> Result<()> {
    let message = buf
        .get(..size as usize)
        .ok_or_else(|| Error::failed("the message is larger than announced"))?;
    for _ in 0..messages {
        send_all(s, message, Wait::Sleep)?;
    }
    let mut ack = [0; 1];
    s.read_exact(&mut ack).map_err(transfer_error)
}

fn receive_stream(mut s: &TcpStream, buf: &mut [u8], size: u64, messages: u64) -> Result<()> {
    let mut remaining = size.saturating_mul(messages);
    while remaining > 0 {
        let want = remaining.min(RECV_LEN as u64) as usize;
        let n = recv_some(s, &mut buf[..want], Wait::Sleep, &mut SpinGuard::new())?;
        remaining -= n as u64;
    }
    s.write_all(&[1]).map_err(transfer_error)
}

fn send_all(s: &TcpStream, mut data: &[u8], wait: Wait) -> Result<()> {
    let spin = wait == Wait::Spin;
    let flags = if spin {
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT
    } else {
        SendFlags::NOSIGNAL
    };
    let mut guard = SpinGuard::new();
    while !data.is_empty() {
        match rustix::net::send(s, data, flags) {
            Ok(n) => data = data.get(n..).unwrap_or_default(),
            Err(Errno::AGAIN) if spin => guard.yield_without_progress()?,
            Err(Errno::INTR) => {}
            Err(e) => return Err(transfer_error(e.into())),
        }
    }
    Ok(())
}

fn recv_all(s: &TcpStream, buf: &mut [u8], wait: Wait) -> Result<()> {
    let mut got = 0;
    let mut guard = SpinGuard::new();
    while let Some(rest) = buf.get_mut(got..).filter(|r| !r.is_empty()) {
        got += recv_some(s, rest, wait, &mut guard)?;
    }
    Ok(())
}

fn recv_some(s: &TcpStream, buf: &mut [u8], wait: Wait, guard: &mut SpinGuard) -> Result<usize> {
    let end = match wait {
        Wait::PollThenSleep(time) => Some(Instant::now() + time),
        Wait::Sleep | Wait::Spin => None,
    };
    let mut polls = wait != Wait::Sleep;
    loop {
        let flags = match polls {
            true => RecvFlags::DONTWAIT,
            false => RecvFlags::empty(),
        };
        match rustix::net::recv(s, &mut *buf, flags) {
            Ok((0, _)) => {
                return Err(Error::failed(
                    "the peer closed the connection during a measurement",
                ));
            }
            Ok((n, _)) => {
                guard.reset();
                return Ok(n);
            }
            Err(Errno::AGAIN) if polls => {
                guard.yield_without_progress()?;
                polls = end.is_none_or(|end| Instant::now() < end);
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(transfer_error(e.into())),
        }
    }
}

fn transfer_error(e: std::io::Error) -> Error {
    match e.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => stalled(),
        _ => Error::failed(format!("the measured connection failed: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::point::{Metric, Wire};
    use super::*;
    use std::net::Ipv4Addr;

    const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn pair(link: &Link) -> (Box<dyn Session>, impl FnOnce() -> Box<dyn Session> + use<>) {
        let pending = Tcp
            .listen(link, (Ipv4Addr::LOCALHOST, 0).into(), LOCAL)
            .unwrap();
        let to = (Ipv4Addr::LOCALHOST, pending.port()).into();
        (Tcp.connect(link, to).unwrap(), move || {
            pending.accept().unwrap()
        })
    }

    fn link(qps: u32, max_size: u64) -> Link {
        Link {
            wire: Wire::Tcp,
            crc: false,
            markers: false,
            poll: Poll::Event,
            qps,
            depth: 1,
            max_size,
        }
    }

    #[test]
    fn huge_buffer_is_an_error() {
        assert_eq!(buffer(3).unwrap(), [0x5a; 3]);
        let e = buffer(isize::MAX as usize).unwrap_err().to_string();
        assert!(e.contains("no memory"), "{e}");
    }

    /// Strangers that connect to the port neither take a slot nor delay the client.
    #[test]
    fn strangers_do_not_interfere() {
        let l = link(2, 64);
        let pending = Tcp
            .listen(&l, (Ipv4Addr::LOCALHOST, 0).into(), LOCAL)
            .unwrap();
        let to: SocketAddr = (Ipv4Addr::LOCALHOST, pending.port()).into();
        let silent: Vec<_> = (0..3).map(|_| TcpStream::connect(to).unwrap()).collect();
        let mut wrong = TcpStream::connect(to).unwrap();
        wrong.write_all(&9u32.to_be_bytes()).unwrap();
        let mut client = Tcp.connect(&l, to).unwrap();
        let mut server = pending.accept().unwrap();
        drop((silent, wrong));
        let point = Point {
            op: Op::Tcp,
            size: 64,
            crc: false,
            poll: Poll::Event,
            metric: Metric::Bandwidth,
        };
        std::thread::scope(|scope| {
            scope.spawn(move || server.bandwidth(Role::Server, &point, 10).unwrap());
            client.bandwidth(Role::Client, &point, 10).unwrap();
        });
    }

    #[test]
    fn both_metrics_over_several_connections() {
        let l = link(3, 100_000);
        let (mut client, accept) = pair(&l);
        std::thread::scope(|scope| {
            let mut server = accept();
            let points = [
                (4, Poll::Event, Metric::Latency, 50),
                (100_000, Poll::Spin, Metric::Latency, 20),
                (100_000, Poll::Event, Metric::Bandwidth, 100),
                (1, Poll::Event, Metric::Bandwidth, 2),
            ]
            .map(|(size, poll, metric, n)| {
                (
                    Point {
                        op: Op::Tcp,
                        size,
                        crc: false,
                        poll,
                        metric,
                    },
                    n,
                )
            });
            scope.spawn(move || {
                let mut hist = Latencies::new();
                for (p, n) in points {
                    match p.metric {
                        Metric::Latency => server.latency(Role::Server, &p, n, &mut hist).unwrap(),
                        Metric::Bandwidth => drop(server.bandwidth(Role::Server, &p, n).unwrap()),
                    }
                }
                assert_eq!(hist.count(), 0, "only the client measures time");
            });
            for (p, n) in points {
                match p.metric {
                    Metric::Latency => {
                        let mut h = Latencies::new();
                        client.latency(Role::Client, &p, n, &mut h).unwrap();
                        assert_eq!(h.count(), n);
                        assert!(
                            h.quantile_us(0.5).unwrap() > 0.5,
                            "no round trip takes half a microsecond"
                        );
                    }
                    Metric::Bandwidth => {
                        assert!(client.bandwidth(Role::Client, &p, n).unwrap() > Duration::ZERO)
                    }
                }
            }
        });
    }

    #[test]
    fn closed_peer_is_an_error() {
        let (mut client, accept) = pair(&link(1, 64));
        drop(accept());
        let p = Point {
            op: Op::Tcp,
            size: 64,
            crc: false,
            poll: Poll::Spin,
            metric: Metric::Latency,
        };
        let e = client
            .latency(Role::Client, &p, 1000, &mut Latencies::new())
            .unwrap_err();
        assert!(e.to_string().contains("connection"), "{e}");
    }
}
