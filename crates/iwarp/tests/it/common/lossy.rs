//! A lossy link between the two namespaces of `net`: a TUN device in each namespace, and a
//! forwarding thread per direction. The threads drop, duplicate, reorder and corrupt packets, which
//! a seed selects. Many kernels lack `sch_netem`, which would do the same.

use super::net::{Net, ip};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Addresses of the link's ends, IPv4 and IPv6.
pub const NEAR: [IpAddr; 2] = ends(1);
pub const FAR: [IpAddr; 2] = ends(2);

const fn ends(last: u8) -> [IpAddr; 2] {
    [
        IpAddr::V4(Ipv4Addr::new(10, 9, 8, last)),
        IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, last as u16)),
    ]
}

/// Shares of affected packets, in thousandths.
#[derive(Debug, Clone, Copy)]
pub struct Shares {
    pub dropped: u32,
    pub doubled: u32,
    pub overtaken: u32,
    pub spoiled: u32,
}

/// Numbers of packets in both directions, by what happened to them.
#[derive(Debug, Default)]
pub struct Fates {
    pub passed: AtomicU32,
    pub dropped: AtomicU32,
    pub doubled: AtomicU32,
    pub overtaken: AtomicU32,
    pub spoiled: AtomicU32,
}

pub struct Link {
    pub fates: Arc<Fates>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// Opens a TUN device in the namespace of this thread, and brings it up.
fn tun(addresses: [IpAddr; 2]) -> io::Result<File> {
    const TUNSETIFF: u32 = 0x4004_54ca;
    const IFF_TUN: i16 = 1;
    const IFF_NO_PI: i16 = 0x1000;
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    // SAFETY: the structure consists of plain numbers, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lossy") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = IFF_TUN | IFF_NO_PI;
    // SAFETY: the request accesses one structure of this type, which is valid.
    let status = unsafe { libc::ioctl(device.as_raw_fd(), TUNSETIFF as _, &raw mut request) };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    ip(&format!("addr add {}/24 dev lossy", addresses[0]));
    ip(&format!("addr add {}/64 dev lossy nodad", addresses[1]));
    ip("link set lossy up");
    Ok(device)
}

impl Link {
    /// Creates the link. The treatment of packets depends on `seed` and their order.
    ///
    /// # Errors
    /// TUN devices are not available.
    pub fn new(net: &Net, shares: Shares, seed: u64) -> io::Result<Self> {
        let near = tun(NEAR)?;
        let far = net.at_far(|| tun(FAR))?;
        let (fates, stop) = (Arc::<Fates>::default(), Arc::<AtomicBool>::default());
        let ways = [(near.try_clone()?, far.try_clone()?), (far, near)];
        let threads = ways.into_iter().zip(1..).map(|((from, to), way)| {
            let mut way = OneWay {
                from,
                to,
                shares,
                random: seed.wrapping_mul(2).wrapping_add(way),
                held: None,
                fates: Arc::clone(&fates),
            };
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    way.turn();
                }
            })
        });
        Ok(Self {
            threads: threads.collect(),
            fates,
            stop,
        })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // If the thread has panicked, its message is printed already.
            let _ = thread.join();
        }
    }
}

struct OneWay {
    from: File,
    to: File,
    shares: Shares,
    random: u64,
    /// A delayed packet, and the number of packets that have to overtake it first.
    held: Option<(Vec<u8>, u32)>,
    fates: Arc<Fates>,
}

impl OneWay {
    /// Returns a number below 1000 (SplitMix64).
    fn next(&mut self) -> u32 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % 1000) as u32
    }

    /// Forwards the next packet, if one arrives. If none arrives for a while, forwards a delayed
    /// packet.
    fn turn(&mut self) {
        let mut packet = vec![0; 65_536];
        match self.from.read(&mut packet) {
            Ok(len) => {
                packet.truncate(len);
                self.pass(packet);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                if !readable(&self.from, Duration::from_millis(5))
                    && let Some((late, _)) = self.held.take()
                {
                    self.give(&late);
                }
            }
            Err(e) => panic!("reading a packet: {e}"),
        }
    }

    fn pass(&mut self, mut packet: Vec<u8>) {
        let (shares, fates) = (self.shares, Arc::clone(&self.fates));
        let count = |fate: &AtomicU32| fate.fetch_add(1, Ordering::Relaxed);
        let mut drawn = self.next();
        let mut meets = |share: u32| {
            let yes = drawn < share;
            drawn = drawn.wrapping_sub(share);
            yes
        };
        if meets(shares.dropped) {
            count(&fates.dropped);
        } else if meets(shares.doubled) {
            count(&fates.doubled);
            self.give(&packet);
            self.give(&packet);
        } else if meets(shares.overtaken) && self.held.is_none() {
            count(&fates.overtaken);
            let by = 1 + self.next() % 40;
            self.held = Some((packet, by));
            return;
        } else if meets(shares.spoiled) && spoil(&mut packet) {
            count(&fates.spoiled);
            self.give(&packet);
        } else {
            count(&fates.passed);
            self.give(&packet);
        }
        match self.held.take() {
            Some((late, 1)) => self.give(&late),
            Some((late, left)) => self.held = Some((late, left - 1)),
            None => {}
        }
    }

    fn give(&mut self, packet: &[u8]) {
        // If the queue is full, the packet is lost, as on a real link.
        let _ = self.to.write(packet);
    }
}

/// Flips a bit of a UDP datagram and removes the UDP checksum, so that UDP accepts the datagram.
/// Returns `false` if the packet is not an unfragmented IPv4 datagram; IPv6 requires the checksum.
fn spoil(packet: &mut [u8]) -> bool {
    const HEADERS: usize = 20 + 8;
    let is_udp = packet.len() > HEADERS && packet[0] == 0x45 && packet[9] == 17;
    // The flag for more fragments, and the offset.
    if !is_udp || packet[6] & 0x3f != 0 || packet[7] != 0 {
        return false;
    }
    packet[26..28].fill(0);
    let at = HEADERS + (packet.len() - HEADERS) / 2;
    packet[at] ^= 0x10;
    true
}

fn readable(file: &File, limit: Duration) -> bool {
    let mut poll = libc::pollfd {
        fd: file.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the pointer is to one valid entry.
    unsafe { libc::poll(&raw mut poll, 1, limit.as_millis() as i32) > 0 }
}
