//! Tests of writing: plans, errors of the socket, injected faults, and changes of the MSS.

use super::super::super::attributes::QpAttributes;
use super::super::super::qp::QueuePair;
use super::*;
use crate::config::Config;
use crate::objects::context::Context;
use crate::testing;
use crate::testing::{
    attributes, break_off, connected, context, context_with, queue_pair, unwatched_link,
};
use iwarp_rnic::qp::State;
use iwarp_rnic::{SendFlags, SendOp, SendWr, Sge};
use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

const FPDU_LEN: usize = 2 + 18 + PAYLOAD.len() + 4;
const PAYLOAD: [u8; 1000] = [5; 1000];

fn connection(ctx: &Context, sends: u32) -> (QueuePair, TcpStream) {
    let cq = ctx.create_cq(8, None).unwrap();
    let qp = ctx
        .create_qp(&QpAttributes {
            max_send_wr: sends,
            max_inline: 1024,
            ..attributes(ctx, &cq, &cq)
        })
        .unwrap();
    let peer = connected(&qp);
    peer.set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    (qp, peer)
}

const SEND: SendWr<'static> = SendWr {
    wr_id: 1,
    op: SendOp::Send,
    flags: SendFlags::INLINE,
    sges: &[],
    inline: &[&PAYLOAD],
};

/// If the requests do not fit into one plan, the posting thread and the progress thread send all of
/// them; the program need not poll. A fault that is not due changes nothing.
#[test]
fn several_plans_are_sent_without_poll() {
    for fault in [None, Some("seed=251;log=/dev/null;reset,bytes=1G")] {
        let ctx = context_with(Config {
            fault: fault.map(|text| text.parse().unwrap()),
            ..Config::default()
        });
        let sends = 1500;
        let (qp, mut peer) = connection(&ctx, sends);
        let reader = std::thread::spawn(move || {
            let mut octets = vec![0; FPDU_LEN * sends as usize];
            peer.read_exact(&mut octets).map(|()| peer)
        });
        qp.post_send(&vec![SEND; sends as usize]).unwrap();
        let _peer = reader.join().unwrap().expect("all requests are sent");
        qp.destroy();
    }
}

/// Sending stops at the octet at which a fault is due, and then the fault takes effect.
#[test]
fn fault_stops_sending_at_its_octet() {
    for (fault, end) in [
        (
            "seed=252;log=/dev/null;stall,bytes=100",
            ErrorKind::WouldBlock,
        ),
        (
            "seed=253;log=/dev/null;reset,bytes=100",
            ErrorKind::ConnectionReset,
        ),
    ] {
        let ctx = context_with(Config {
            fault: Some(fault.parse().unwrap()),
            ..Config::default()
        });
        let (qp, mut peer) = connection(&ctx, 4);
        qp.post_send(&[SEND; 2]).unwrap();
        let mut octets = [0; 3 * FPDU_LEN];
        peer.read_exact(&mut octets[..100]).unwrap();
        if end == ErrorKind::WouldBlock {
            // No octet must arrive in this time.
            let pause = Duration::from_millis(50);
            peer.set_read_timeout(Some(pause)).unwrap();
        }
        let more = peer.read(&mut octets).map_err(|error| error.kind());
        assert_eq!(more, Err(end), "{fault}");
        qp.destroy();
    }
}

/// A failed write ends the connection. If the queue pair is connected by number, its connection
/// stays up, because data from the peer may still be readable.
#[test]
fn failed_write_ends_connection() {
    let ctx = context();
    for by_number in [false, true] {
        let (qp, peer) = connection(&ctx, 1);
        let socket = unwatched_link(&qp);
        if by_number {
            qp.inner.state.lock().machine.set_by_number();
        }
        break_off(&socket, peer);
        qp.post_send(&[SEND]).unwrap();
        let g = qp.inner.state.lock();
        let up = g.machine.state() == State::Rts && g.link.is_open();
        assert_eq!((up, g.link.is_peer_gone()), (by_number, by_number));
        assert!(g.link.open().is_none_or(|open| open.stalled.is_none()));
        drop(g);
        qp.destroy();
    }
}

/// Posts a Write that needs several segments. Sends nothing.
fn post_segmented_write(qp: &QueuePair, g: &mut QpState) {
    let sges = [Sge {
        addr: 0,
        len: 4000,
        lkey: 1,
    }];
    let mut effects = Effects::default();
    let write = SendWr::write(1, 0x1000, 7, &sges);
    let mut host = DriveHost::new(&qp.inner, &mut effects);
    g.machine.post_send(&write, &mut host).unwrap();
    drop(host);
    g.machine.set_emss(1460);
    assert!(g.machine.is_segmenting());
}

/// The MSS is read for each plan if FPDUs are aligned to segments, and for every sixteenth plan of
/// a large message if they are not.
#[test]
fn mss_is_read_for_some_plans() {
    let ctx = context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = queue_pair(&ctx, &cq, &cq);
    let _peer = connected(&qp);
    let mut g = qp.inner.state.lock();
    assert!(
        ![(); 40].iter().any(|()| wants_mss(&mut g)),
        "small messages"
    );
    post_segmented_write(&qp, &mut g);
    let plans: Vec<_> = (0..40).filter(|_| wants_mss(&mut g)).collect();
    assert_eq!(plans, [0, 16, 32]);
    g.machine.align(1460);
    assert!([(); 40].iter().all(|()| wants_mss(&mut g)));
    let mut effects = Effects::default();
    g.machine
        .abort(&mut DriveHost::new(&qp.inner, &mut effects));
    drop(g);
    effects.apply(&qp.inner);
    qp.destroy();
}

/// The segments of loopback are large. After the MSS was read, the message fits into one segment,
/// unless the configuration limits the MSS.
#[test]
fn segments_adapt_to_mss() {
    for (limit, fits) in [(None, true), (Some(1460), false)] {
        let ctx = context_with(Config {
            mss: limit,
            ..Config::default()
        });
        let cq = ctx.create_cq(4, None).unwrap();
        for aligned in [false, true] {
            let qp = queue_pair(&ctx, &cq, &cq);
            let _peer = connected(&qp);
            let socket = testing::link(&qp);
            let mss = socket.stream.mss().unwrap();
            let mut g = qp.inner.state.lock();
            post_segmented_write(&qp, &mut g);
            if aligned {
                g.machine.align(1460);
            }
            update_mss(&qp.inner, &mut g, &socket);
            assert_eq!(g.machine.is_segmenting(), !fits);
            assert_eq!(g.machine.alignment(), aligned.then_some(mss));
            let mut effects = Effects::default();
            g.machine
                .abort(&mut DriveHost::new(&qp.inner, &mut effects));
            drop(g);
            effects.apply(&qp.inner);
            qp.destroy();
        }
    }
}

/// The stream ends during the system call, and the queue pair already has its next stream.
#[test]
fn plan_of_old_stream_is_dropped() {
    let ctx = context();
    let (qp, _peer) = connection(&ctx, 2);
    let (other, _other_peer) = connection(&ctx, 2);
    let old = unwatched_link(&other);
    let start = std::time::Instant::now();
    let mut refused = 0;
    while refused < 50 {
        assert!(start.elapsed() < Duration::from_secs(20));
        match old.stream.send(&[1; 4096]) {
            Ok(_) => refused = 0,
            Err(_) => {
                refused += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    let mut effects = Effects::default();
    let mut g = qp.inner.state.lock();
    g.machine
        .post_send(&SEND, &mut DriveHost::new(&qp.inner, &mut effects))
        .unwrap();
    let memory = qp.inner.ctx.memory.read();
    let Filled::Ready(plan) = fill(&qp.inner, &mut g, &old, &memory, &mut effects) else {
        panic!("the request is not in a plan");
    };
    let (g, more) = write(&qp.inner, g, &old, memory, (plan, true), &mut effects);
    assert!(!more && g.link.open().is_some_and(|open| open.stalled.is_none()));
    drop(g);
    effects.apply(&qp.inner);
    [qp, other].iter().for_each(QueuePair::destroy);
}

#[test]
fn sent_request_completes_before_held_receive() {
    let ctx = context();
    let (qp, _peer) = connection(&ctx, 2);
    let answer = iwarp_rnic::Cqe {
        wr_id: 7,
        ..iwarp_rnic::Cqe::default()
    };
    qp.inner.held_receives.hold(answer);
    qp.post_send(&[SEND.signaled()]).unwrap();
    let mut cqes = [iwarp_rnic::Cqe::default(); 3];
    testing::until("the request does not complete", || {
        qp.inner.send_cq.len() == 2
    });
    assert_eq!(qp.inner.send_cq.take_ready(&mut cqes), Ok(2));
    assert_eq!([cqes[0].wr_id, cqes[1].wr_id], [1, 7]);
    qp.destroy();
}
