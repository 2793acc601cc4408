//! Tests of `riomap` and `riowrite`: buffers into which the peer writes directly.

use crate::common::{Rs, pair, pair_with, pattern};
use iwarp_rsocket as rs;
use iwarp_rsocket::Errno;

/// Memory that the peer may write at any time, so it is read only through raw pointers.
struct Buffer(Vec<u8>);

impl Buffer {
    fn new(len: usize) -> Self {
        Self(vec![0; len])
    }

    fn map(&mut self, r: &Rs, offset: Option<u64>) -> Result<u64, Errno> {
        let (start, len) = (self.0.as_mut_ptr(), self.0.len());
        // SAFETY: each test unmaps the buffer or closes the socket before it drops the buffer,
        // which is read through raw pointers only.
        unsafe { rs::iomap(r.0, start, len, true, offset) }
    }

    fn unmap(&mut self, r: &Rs) -> Result<(), Errno> {
        rs::iounmap(r.0, self.0.as_mut_ptr(), self.0.len())
    }

    fn read(&self) -> Vec<u8> {
        // SAFETY: each address is inside the vector's memory.
        (0..self.0.len())
            .map(|i| unsafe { self.0.as_ptr().add(i).read_volatile() })
            .collect()
    }
}

fn pair_with_mappings() -> (Rs, Rs) {
    pair_with(|r| r.set(rs::SOL_RDMA, rs::RDMA_IOMAPSIZE, 4))
}

#[test]
fn iowrite_arrives_before_later_send() {
    let (c, s) = pair_with_mappings();
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
    // Writes inside the mapping, across its end, and before it.
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
fn mappings_are_added_and_removed() {
    let (c, s) = pair_with_mappings();
    let mut buffers: Vec<_> = (0..4).map(|_| Buffer::new(100)).collect();
    for (i, b) in buffers.iter_mut().enumerate() {
        b.map(&s, Some(i as u64 * 100)).unwrap();
    }
    let mut fifth = Buffer::new(10);
    assert_eq!(fifth.map(&s, None), Err(Errno::NOMEM));
    s.send_all(b".");
    assert_eq!(c.recv_n(1), b".");
    // One call may write across adjacent mappings.
    let data = pattern(0, 400);
    assert_eq!(rs::iowrite(c.0, &data, 0, 0), Ok(400));
    c.send_all(b"!");
    assert_eq!(s.recv_n(1), b"!");
    let got: Vec<u8> = buffers.iter().flat_map(Buffer::read).collect();
    assert_eq!(got, data);
    // The entry of a removed mapping is used again.
    buffers[2].unmap(&s).unwrap();
    assert_eq!(buffers[2].unmap(&s), Err(Errno::INVAL));
    let address = fifth.0.as_ptr() as u64;
    assert_eq!(
        fifth.map(&s, None),
        Ok(address),
        "without an offset, the mapping has the buffer's address"
    );
    s.send_all(b".");
    assert_eq!(c.recv_n(1), b".");
    assert_eq!(rs::iowrite(c.0, &[9; 10], address, 0), Ok(10));
    assert_eq!(
        rs::iowrite(c.0, &[9; 10], 200, 0),
        Ok(0),
        "the mapping at 200 was replaced"
    );
    c.send_all(b"!");
    assert_eq!(s.recv_n(1), b"!");
    assert_eq!(fifth.read(), [9; 10]);
    drop((c, s));
}

/// The peer is not notified when a mapping is removed. Its later Writes fail, and the buffer does
/// not change.
#[test]
fn unmapped_buffer_is_not_written() {
    let (c, s) = pair_with_mappings();
    let mut buffer = Buffer::new(100);
    buffer.map(&s, Some(0)).unwrap();
    s.send_all(b".");
    assert_eq!(c.recv_n(1), b".");
    buffer.unmap(&s).unwrap();
    assert_eq!(rs::iowrite(c.0, &[9; 100], 0, 0), Ok(100));
    // The connection may have ended already.
    let _ = rs::send(c.0, b"!", 0);
    let got = rs::recv(s.0, &mut [0; 1], 0);
    assert!(!matches!(got, Ok(1)), "{got:?}");
    assert_eq!(buffer.read(), [0; 100]);
}

#[test]
fn iomap_fails_without_entries_or_connection() {
    let (_c, s) = pair();
    let mut buffer = Buffer::new(10);
    assert_eq!(buffer.map(&s, None), Err(Errno::NOMEM));
    assert_eq!(buffer.map(&Rs::new(), None), Err(Errno::INVAL));
    let start = buffer.0.as_mut_ptr();
    // SAFETY: the peer may not write here, and the buffer is unmapped before it is dropped.
    let local = unsafe { rs::iomap(s.0, start, 10, false, Some(5)) };
    assert_eq!(local, Ok(5));
    buffer.unmap(&s).unwrap();
    // SAFETY: both calls fail without mapping anything.
    unsafe {
        assert_eq!(rs::iomap(s.0, start, 0, false, None), Err(Errno::INVAL));
        assert_eq!(
            rs::iomap(s.0, 4096 as *mut u8, 10, false, None),
            Err(Errno(libc::EFAULT))
        );
    }
}
