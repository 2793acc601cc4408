//! Buffers mapped for the peer's direct Writes.

mod common;

use common::{Rs, pair, pair_with, pattern};
use iwarp_rsocket as rs;
use iwarp_rsocket::Errno;

/// Memory that the peer may write at any time; read only through raw pointers.
struct Buffer(Vec<u8>);

impl Buffer {
    fn new(len: usize) -> Self {
        Self(vec![0; len])
    }

    fn map(&mut self, r: &Rs, offset: Option<u64>) -> Result<u64, Errno> {
        let (at, len) = (self.0.as_mut_ptr(), self.0.len());
        // SAFETY: every test unmaps or closes before the buffer goes, and reads only what has been announced.
        unsafe { rs::iomap(r.0, at, len, true, offset) }
    }

    fn unmap(&mut self, r: &Rs) -> Result<(), Errno> {
        rs::iounmap(r.0, self.0.as_mut_ptr(), self.0.len())
    }

    fn read(&self) -> Vec<u8> {
        // SAFETY: the vector's own memory, octet by octet.
        (0..self.0.len())
            .map(|i| unsafe { self.0.as_ptr().add(i).read_volatile() })
            .collect()
    }
}

fn mappable() -> (Rs, Rs) {
    pair_with(|r| r.set(rs::SOL_RDMA, rs::RDMA_IOMAPSIZE, 4))
}

#[test]
fn writes_arrive_before_what_is_sent_afterwards() {
    let (c, s) = mappable();
    let mut buffer = Buffer::new(300_000);
    assert_eq!(buffer.map(&s, Some(1000)), Ok(1000));
    s.send_all(b"mapped");
    assert_eq!(c.recv_n(6), b"mapped");
    for round in 0..20 {
        let data = pattern(round * 7, 300_000);
        assert_eq!(rs::iowrite(c.0, &data, 1000, 0), Ok(300_000));
        c.send_all(b"!");
        assert_eq!(s.recv_n(1), b"!");
        assert_eq!(buffer.read(), data, "round {round}");
    }
    // A part, and beyond the end.
    assert_eq!(rs::iowrite(c.0, b"xyz", 1005, 0), Ok(3));
    assert_eq!(rs::iowrite(c.0, &[7; 10], 1000 + 299_998, 0), Ok(2));
    assert_eq!(rs::iowrite(c.0, &[7; 10], 999, 0), Ok(0));
    c.send_all(b"!");
    assert_eq!(s.recv_n(1), b"!");
    assert_eq!(
        (&buffer.read()[5..8], &buffer.read()[299_998..]),
        (&b"xyz"[..], &[7, 7][..])
    );
    drop((c, s));
}

#[test]
fn several_mappings_and_their_ends() {
    let (c, s) = mappable();
    let mut buffers: Vec<_> = (0..4).map(|_| Buffer::new(100)).collect();
    for (i, b) in buffers.iter_mut().enumerate() {
        b.map(&s, Some(i as u64 * 100)).unwrap();
    }
    let mut fifth = Buffer::new(10);
    assert_eq!(fifth.map(&s, None), Err(Errno::NOMEM));
    s.send_all(b".");
    assert_eq!(c.recv_n(1), b".");
    // One call crosses from buffer to buffer.
    let data = pattern(0, 400);
    assert_eq!(rs::iowrite(c.0, &data, 0, 0), Ok(400));
    c.send_all(b"!");
    assert_eq!(s.recv_n(1), b"!");
    let got: Vec<u8> = buffers.iter().flat_map(Buffer::read).collect();
    assert_eq!(got, data);
    // A place that is free again is used again.
    buffers[2].unmap(&s).unwrap();
    assert_eq!(buffers[2].unmap(&s), Err(Errno::INVAL));
    let address = fifth.0.as_ptr() as u64;
    assert_eq!(
        fifth.map(&s, None),
        Ok(address),
        "its own address is its name"
    );
    s.send_all(b".");
    assert_eq!(c.recv_n(1), b".");
    assert_eq!(rs::iowrite(c.0, &[9; 10], address, 0), Ok(10));
    assert_eq!(rs::iowrite(c.0, &[9; 10], 200, 0), Ok(0), "was replaced");
    c.send_all(b"!");
    assert_eq!(s.recv_n(1), b"!");
    assert_eq!(fifth.read(), [9; 10]);
    drop((c, s));
}

#[test]
fn without_room_or_connection() {
    let (_c, s) = pair();
    let mut buffer = Buffer::new(10);
    assert_eq!(buffer.map(&s, None), Err(Errno::NOMEM));
    assert_eq!(buffer.map(&Rs::new(), None), Err(Errno::INVAL));
    let at = buffer.0.as_mut_ptr();
    // SAFETY: for local use only, and unmapped before it goes.
    let local = unsafe { rs::iomap(s.0, at, 10, false, Some(5)) };
    assert_eq!(local, Ok(5));
    buffer.unmap(&s).unwrap();
    // SAFETY: nothing is mapped by these.
    unsafe {
        assert_eq!(rs::iomap(s.0, at, 0, false, None), Err(Errno::INVAL));
        assert_eq!(
            rs::iomap(s.0, 4096 as *mut u8, 10, false, None),
            Err(Errno(libc::EFAULT))
        );
    }
}
