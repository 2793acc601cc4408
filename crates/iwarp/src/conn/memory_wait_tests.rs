//! Tests of queue pairs that wait for memory to become unused, because they invalidate it.
//!
//! Invariant of the `unsafe` code: a test keeps the memory that it registers until its end, and
//! does not access it.

use crate::conn::attributes::QpAttributes;
use crate::conn::pool;
use crate::conn::qp::QueuePair;
use crate::objects::context::Context;
use crate::objects::memory_waiters::MemoryWaiters;
use crate::testing::{attributes, connected, context, queue_pair, until};
use iwarp_proto::ddp::{Header, Stag, TaggedHeader, UntaggedHeader};
use iwarp_proto::rdmap::Opcode;
use iwarp_rnic::qp::{RxBuffer, RxPlan};
use iwarp_rnic::{Access, Cqe, FastRegister, RecvWr, SendOp, SendWr, Sge, WcStatus};
use std::io::Write;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(20);

#[test]
fn queue_pair_is_listed_once() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let [a, b, c] = [(); 3].map(|()| queue_pair(&ctx, &cq, &cq));
    let waiting = MemoryWaiters::default();
    assert!(waiting.insert(&a.inner) && waiting.insert(&b.inner));
    assert!(!waiting.insert(&a.inner) && !waiting.insert(&b.inner));
    assert_eq!(waiting.0.lock().len(), 2);
    a.destroy();
    drop(a);
    assert!(waiting.insert(&c.inner) && !waiting.insert(&b.inner));
    assert_eq!(waiting.0.lock().len(), 2);
}

fn region(ctx: &Context, octets: &[u8], pd: u32) -> Sge {
    let (addr, len) = (octets.as_ptr() as u64, octets.len());
    // SAFETY: by the module's invariant, the memory lives until the end of the test, which does not
    // access it.
    let stag = unsafe { ctx.allocate_fast(addr, len as u64, pd) }.unwrap();
    let wr = FastRegister {
        new_stag: Stag(stag),
        offset: 0,
        len: len as u64,
        iova: addr,
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
        pages: None,
    };
    ctx.fast_register(&wr, pd).unwrap();
    Sge {
        addr,
        len: len as u32,
        lkey: stag,
    }
}

fn connection(ctx: &Context, pd: u32) -> (QueuePair, std::net::TcpStream) {
    let cq = ctx.create_cq(4, None).unwrap();
    let attributes = QpAttributes {
        pd,
        ..attributes(ctx, &cq, &cq)
    };
    let qp = ctx.create_qp(&attributes).unwrap();
    let peer = connected(&qp);
    (qp, peer)
}

/// Lets the peer send the beginning of an RDMA Write to a region. Returns the plan for reading the
/// rest directly into the region. While the plan is not released, the region is in use.
fn begin_direct_read(qp: &QueuePair, peer: &mut std::net::TcpStream, sge: Sge) -> RxPlan {
    let header = Header::Tagged(TaggedHeader {
        last: true,
        opcode: Opcode::WRITE,
        stag: Stag(sge.lkey),
        to: sge.addr,
    });
    let mut octets = vec![0; 2 + header.len() + 100];
    let ulpdu = header.len() as u16 + sge.len as u16;
    octets[..2].copy_from_slice(&ulpdu.to_be_bytes());
    header.emit(&mut octets[2..]);
    peer.write_all(&octets).unwrap();
    let start = Instant::now();
    loop {
        let g = qp.inner.state.lock();
        if g.machine.rx_is_direct() {
            let (mut buffer, mut plan) = (RxBuffer::new().unwrap(), pool::rx_plan());
            let memory = qp.inner.ctx.memory.read();
            g.machine.rx_plan(&mut buffer, &memory, &mut plan, |_| ());
            return plan;
        }
        drop(g);
        assert!(start.elapsed() < LIMIT, "the header is not read");
        std::thread::yield_now();
    }
}

/// Creates a queue pair with an unfinished read into `octets`, and another queue pair whose request
/// 2 invalidates that region. Returns both with their peers, the plan of the read, and the region.
fn invalidated_while_read(
    ctx: &Context,
    octets: &[u8],
) -> ([(QueuePair, std::net::TcpStream); 2], RxPlan, Sge) {
    let pd = ctx.allocate_pd();
    let sge = region(ctx, octets, pd);
    let [mut reader, invalidator] = [(); 2].map(|()| connection(ctx, pd));
    let plan = begin_direct_read(&reader.0, &mut reader.1, sge);
    let stag = Stag(sge.lkey);
    let wr = SendWr::new(2, SendOp::LocalInvalidate { stag }, &[]).signaled();
    invalidator.0.post_send(&[wr]).unwrap();
    ([reader, invalidator], plan, sge)
}

#[test]
fn invalidation_waits_for_access() {
    let ctx = context();
    let octets = vec![7u8; 40_000];
    let (ends, mut plan, sge) = invalidated_while_read(&ctx, &octets);
    let [(reader, _), (invalidator, _)] = &ends;
    let is_valid = ctx.region(sge.lkey).unwrap().valid;
    assert!(!is_valid, "new accesses are refused at once");
    let cq = &invalidator.inner.send_cq;
    let mut cqes = [Cqe::default(); 2];
    assert_eq!(cq.poll(&mut cqes).unwrap(), 0);
    {
        let memory = ctx.inner.memory.read();
        plan.release(&memory);
        assert!(memory.take_unused());
    }
    ctx.inner.memory_unused();
    assert_eq!(cq.poll(&mut cqes).unwrap(), 1);
    assert_eq!((cqes[0].wr_id, cqes[0].status), (2, WcStatus::Success));
    assert!(ctx.inner.waiting.0.lock().is_empty());
    reader.destroy();
    invalidator.destroy();
}

/// The access may end after the queue pair has checked it, and before the queue pair is on the
/// list. So the queue pair retries after it was added.
#[test]
fn added_waiter_retries() {
    let ctx = context();
    let octets = vec![7u8; 40_000];
    let (ends, mut plan, _) = invalidated_while_read(&ctx, &octets);
    let [(reader, _), (invalidator, _)] = &ends;
    ctx.inner.waiting.0.lock().clear();
    plan.release(&ctx.inner.memory.read());
    ctx.inner.wait_for_memory(&invalidator.inner);
    let mut cqes = [Cqe::default(); 2];
    assert_eq!(invalidator.inner.send_cq.poll(&mut cqes).unwrap(), 1);
    reader.destroy();
    invalidator.destroy();
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transfer {
    Sent,
    Received,
    Placed,
}

/// After an access has ended, the next system call that sends or receives notifies the waiting
/// queue pairs.
#[test]
fn each_transfer_notifies_waiters() {
    let ctx = context();
    for transfer in [Transfer::Sent, Transfer::Received, Transfer::Placed] {
        let octets = [(); 2].map(|()| vec![7u8; 40_000]);
        let (ends, mut plan, _) = invalidated_while_read(&ctx, &octets[0]);
        let [(reader, _), (invalidator, _)] = &ends;
        let cq = &invalidator.inner.send_cq;
        let pd = ctx.allocate_pd();
        let (other, mut peer) = connection(&ctx, pd);
        if transfer == Transfer::Placed {
            let mut placed = begin_direct_read(&other, &mut peer, region(&ctx, &octets[1], pd));
            placed.release(&ctx.inner.memory.read());
        }
        plan.release(&ctx.inner.memory.read());
        let mut cqes = [Cqe::default(); 2];
        assert_eq!(cq.take_ready(&mut cqes).unwrap(), 0);
        match transfer {
            Transfer::Sent => {
                let wr = SendWr::new(3, SendOp::Send, &[]).signaled();
                other.post_send(&[wr]).unwrap();
            }
            Transfer::Received | Transfer::Placed => peer.write_all(&[0]).unwrap(),
        }
        let notified = || cq.take_ready(&mut cqes).unwrap() == 1;
        until(&format!("no waiter is notified: {transfer:?}"), notified);
        assert_eq!((cqes[0].wr_id, cqes[0].status), (2, WcStatus::Success));
        for qp in [reader, invalidator, &other] {
            qp.destroy();
        }
    }
}

/// A Send with Invalidate is delivered when the access to the region ends, without another read of
/// the socket.
#[test]
fn send_with_invalidate_waits_for_access() {
    let ctx = context();
    let octets = vec![7u8; 40_000];
    let pd = ctx.allocate_pd();
    let sge = region(&ctx, &octets, pd);
    let [mut reader, mut other] = [(); 2].map(|()| connection(&ctx, pd));
    let mut plan = begin_direct_read(&reader.0, &mut reader.1, sge);
    let wr = RecvWr {
        wr_id: 3,
        sges: &[],
    };
    other.0.post_recv(&[wr]).unwrap();
    let header = Header::Untagged(UntaggedHeader {
        last: true,
        opcode: Opcode::SEND_INV,
        invalidate_stag: Stag(sge.lkey),
        qn: 0,
        msn: 1,
        mo: 0,
    });
    // The CRC may be zero, because it is not checked.
    let mut fpdu = vec![0; 2 + header.len() + 4];
    fpdu[..2].copy_from_slice(&(header.len() as u16).to_be_bytes());
    header.emit(&mut fpdu[2..]);
    other.1.write_all(&fpdu).unwrap();
    let waits = || other.0.inner.state.lock().machine.waits_for_memory();
    until("the message does not wait", waits);
    let cq = &other.0.inner.recv_cq;
    let mut cqes = [Cqe::default(); 2];
    assert_eq!(cq.take_ready(&mut cqes).unwrap(), 0);
    plan.release(&ctx.inner.memory.read());
    ctx.inner.memory_unused();
    assert_eq!(cq.take_ready(&mut cqes).unwrap(), 1);
    assert_eq!((cqes[0].wr_id, cqes[0].status), (3, WcStatus::Success));
    for (qp, _) in [&reader, &other] {
        qp.destroy();
    }
}
