//! Tests of opened devices: queue pair numbers, totals of counters, captures, and forked children.

use super::*;
use crate::testing;
use iwarp_rnic::{SendFlags, SendOp, SendWr};
use std::io::IoSlice;

#[test]
fn queue_pair_numbers_wrap() {
    let ctx = testing::context();
    let numbers_from = |first, taken: &[u32]| {
        ctx.inner.next_qp.store(first, Ordering::Relaxed);
        [0; 4].map(|_| ctx.inner.next_free_number(&|num| taken.contains(&num)))
    };
    let wrapped = [0x00ff_fffe, 0x00ff_ffff, 2, 3];
    assert_eq!(numbers_from(0x00ff_fffe, &[]), wrapped);
    let wrapped = [0x00ff_fffe, 0x00ff_ffff, 2, 4];
    assert_eq!(numbers_from(0xffff_fffe, &[3]), wrapped, "3 is taken");
    assert_eq!(numbers_from(7, &[7, 9]), [8, 10, 11, 12]);
}

#[test]
fn totals_count_each_queue_pair_once() {
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

/// Devices with the same capture file add to one capture.
#[test]
fn devices_share_capture_file() {
    let file =
        |name: &str| std::env::temp_dir().join(format!("iwarp-{name}-{}", std::process::id()));
    // `%p` stands for the process id, so this is the same file as `a`.
    let pattern = std::env::temp_dir().join("iwarp-context-a-%p");
    let (a, b) = (file("context-a"), file("context-b"));
    for (path, octets) in [(&a, "first"), (&b, "second"), (&pattern, "third")] {
        let ctx = testing::context_with(Config {
            capture: Some(path.clone()),
            ..Config::default()
        });
        let [local, peer] = ["127.0.0.1:1", "127.0.0.1:2"].map(|addr| addr.parse().unwrap());
        let recorder = ctx.inner.hooks.recorder.as_ref().unwrap();
        let connection = recorder.connection(local, peer, true);
        connection.sent(&[IoSlice::new(octets.as_bytes())]);
        ctx.flush_capture().unwrap();
    }
    let contains = |path: &std::path::Path, octets: &str| {
        let file = std::fs::read(path).unwrap();
        file.windows(octets.len())
            .any(|part| part == octets.as_bytes())
    };
    let octets = ["first", "second", "third"];
    assert_eq!(
        octets.map(|octets| contains(&a, octets)),
        [true, false, true]
    );
    assert_eq!(
        octets.map(|octets| contains(&b, octets)),
        [false, true, false]
    );
    std::fs::remove_file(&a).unwrap();
    std::fs::remove_file(&b).unwrap();
    assert!(!pattern.exists());
    testing::context().flush_capture().unwrap();
}

#[test]
fn wait_for_accesses_waits() {
    let ctx = testing::context();
    let access = ctx.inner.memory.read();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ctx.wait_for_accesses();
            sender.send(()).unwrap();
        });
        let early = receiver.recv_timeout(Duration::from_millis(50));
        assert!(early.is_err(), "it returned during an access");
        drop(access);
        receiver.recv().unwrap();
    });
}

/// Threads of the parent may have held locks during the fork, and no thread of the child releases
/// them.
#[test]
fn child_does_not_wait_for_locks() {
    let ctx = testing::context();
    assert!(ctx.inner.is_ours());
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    let num = qp.num();
    assert!(ctx.inner.totals().is_some() && ctx.inner.qp_if_free(num).is_some());
    let _locked = (ctx.inner.retired_counters.lock(), ctx.inner.qps.write());
    let ok_in_child = fork::check_in_child(|| {
        !ctx.inner.is_ours()
            && ctx.inner.totals().is_none()
            && ctx.inner.qp_numbers().is_none()
            && ctx.inner.qp_if_free(num).is_none()
    });
    assert!(ok_in_child);
}

#[test]
fn datagram_number_is_released() {
    let qp = testing::datagram_queue_pair();
    let ctx = qp.context();
    assert!(ctx.inner.ud_qps.contains(qp.num()));
    qp.destroy();
    assert!(!ctx.inner.ud_qps.contains(qp.num()));
}

#[test]
fn live_completion_queues_are_counted() {
    let ctx = testing::context();
    let mut cqs = Vec::new();
    for count in 1..4 {
        cqs.push(ctx.create_cq(4, None).unwrap());
        assert_eq!(ctx.inner.completion_queues(), count);
    }
    let handle = cqs.pop();
    let second_handle = handle.clone();
    drop(handle);
    assert_eq!(ctx.inner.completion_queues(), 3);
    drop(second_handle);
    assert_eq!(ctx.inner.completion_queues(), 2);
}

#[test]
fn number_in_use_is_not_reused() {
    let datagram_qp = testing::datagram_queue_pair();
    let ctx = datagram_qp.context();
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = testing::queue_pair(&ctx, &cq, &cq);
    for taken in [datagram_qp.num(), qp.num()] {
        ctx.inner.next_qp.store(taken, Ordering::Relaxed);
        let next = testing::queue_pair(&ctx, &cq, &cq);
        assert_ne!(next.num(), taken);
        next.destroy();
    }
    qp.destroy();
    datagram_qp.destroy();
}
