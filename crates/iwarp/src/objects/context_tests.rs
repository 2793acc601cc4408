//! Tests of opened devices: numbers of queue pairs, sums of their counters, and captures.

use super::*;
use crate::testing;
use iwarp_rnic::{SendFlags, SendOp, SendWr};
use std::io::IoSlice;

/// Numbers have 24 bits, and those that are taken or belong to management are left out.
#[test]
fn numbers_go_round() {
    let ctx = testing::context();
    let from = |first, taken: &[u32]| {
        ctx.inner.next_qp.store(first, Ordering::Relaxed);
        [0; 4].map(|_| ctx.inner.any_number(&|num| taken.contains(&num)))
    };
    assert_eq!(from(0x00ff_fffe, &[]), [0x00ff_fffe, 0x00ff_ffff, 2, 3]);
    assert_eq!(from(0xffff_fffe, &[3]), [0x00ff_fffe, 0x00ff_ffff, 2, 4]);
    assert_eq!(from(7, &[7, 9]), [8, 10, 11, 12]);
}

/// What a queue pair has counted stays in the sum when it is gone, and is in it once.
#[test]
fn sums_have_each_queue_pair_once() {
    let ctx = testing::context();
    let cq = ctx.create_cq(8, None).unwrap();
    let sent = || ctx.inner.totals().unwrap().tx_messages;
    let qps = [0; 2].map(|_| testing::queue_pair(&ctx, &cq, &cq));
    let _peers = qps.each_ref().map(|qp| {
        let peer = testing::connected(qp);
        let wr = SendWr {
            wr_id: 1,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            sges: &[],
            inline: &[],
        };
        qp.post_send(&[wr]).unwrap();
        peer
    });
    assert_eq!(sent(), 2);
    for qp in qps {
        qp.destroy();
        assert_eq!(sent(), 2);
        drop(qp);
        assert_eq!(sent(), 2);
    }
}

/// Devices that name the same file write to one capture, each other file is one of its own, and a flush brings all to the file.
#[test]
fn devices_share_the_capture_of_a_file() {
    let file =
        |name: &str| std::env::temp_dir().join(format!("iwarp-{name}-{}", std::process::id()));
    let pattern = std::env::temp_dir().join("iwarp-context-a-%p");
    let (a, b) = (file("context-a"), file("context-b"));
    for (path, octets) in [(&a, "first"), (&b, "second"), (&pattern, "third")] {
        let ctx = testing::context_with(Config {
            capture: Some(path.clone()),
            ..Config::default()
        });
        let ends = ["127.0.0.1:1", "127.0.0.1:2"].map(|end| end.parse().unwrap());
        let recorder = ctx.inner.hooks.recorder.as_ref().unwrap();
        let flow = recorder.connection(ends[0], ends[1], true);
        flow.sent(&[IoSlice::new(octets.as_bytes())]);
        ctx.flush_capture().unwrap();
    }
    let has = |path: &std::path::Path, octets: &str| {
        let file = std::fs::read(path).unwrap();
        file.windows(octets.len())
            .any(|part| part == octets.as_bytes())
    };
    let octets = ["first", "second", "third"];
    assert_eq!(octets.map(|octets| has(&a, octets)), [true, false, true]);
    assert_eq!(octets.map(|octets| has(&b, octets)), [false, true, false]);
    std::fs::remove_file(&a).unwrap();
    std::fs::remove_file(&b).unwrap();
    assert!(!pattern.exists());
    // Without a capture there is nothing to do.
    testing::context().flush_capture().unwrap();
}

/// Who is told that nobody accesses memory any more has waited for those who do.
#[test]
fn accesses_to_memory_are_waited_for() {
    let ctx = testing::context();
    let access = ctx.inner.memory.read();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ctx.wait_for_accesses();
            tell.send(()).unwrap();
        });
        let early = told.recv_timeout(Duration::from_millis(50));
        assert!(early.is_err(), "it has not waited");
        drop(access);
        told.recv().unwrap();
    });
}

/// Threads of the parent may have held locks at the time of the fork, and nobody in the child unlocks them.
#[test]
fn a_child_of_the_process_does_not_wait_for_locks() {
    let ctx = testing::context();
    assert!(ctx.inner.is_ours());
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let num = qp.num();
    assert!(ctx.inner.totals().is_some() && ctx.inner.qp_if_free(num).is_some());
    let _locked = (ctx.inner.past.lock(), ctx.inner.qps.write());
    let is_right = fork::check_in_child(|| {
        !ctx.inner.is_ours()
            && ctx.inner.totals().is_none()
            && ctx.inner.qp_numbers().is_none()
            && ctx.inner.qp_if_free(num).is_none()
    });
    assert!(is_right);
}

/// The number of a datagram queue pair is free when it is gone.
#[test]
fn the_number_of_a_datagram_queue_pair_is_free_when_it_is_gone() {
    let qp = testing::datagram_queue_pair();
    let ctx = qp.context();
    assert!(ctx.inner.datagrams.contains(qp.num()));
    qp.destroy();
    assert!(!ctx.inner.datagrams.contains(qp.num()));
}

#[test]
fn completion_queues_are_counted_while_they_exist() {
    let ctx = testing::context();
    let mut cqs = Vec::new();
    for exist in 1..4 {
        cqs.push(ctx.create_cq(4, None).unwrap());
        assert_eq!(ctx.inner.completion_queues(), exist);
    }
    let handle = cqs.pop();
    let other = handle.clone();
    drop(handle);
    assert_eq!(ctx.inner.completion_queues(), 3);
    drop(other);
    assert_eq!(ctx.inner.completion_queues(), 2);
}

/// Whatever kind of queue pair has it.
#[test]
fn a_number_that_is_in_use_is_not_given_again() {
    let datagrams = testing::datagram_queue_pair();
    let ctx = datagrams.context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    for taken in [datagrams.num(), qp.num()] {
        ctx.inner.next_qp.store(taken, Ordering::Relaxed);
        let next = testing::queue_pair(&ctx, &cq, &cq);
        assert_ne!(next.num(), taken);
        next.destroy();
    }
    qp.destroy();
    datagrams.destroy();
}
