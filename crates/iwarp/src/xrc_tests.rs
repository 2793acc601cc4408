//! Tests of XRC domains and targets: numbers, look-ups, and the completion queues that drive a
//! target.

use super::*;
use crate::objects::events::AsyncEventKind;
use crate::testing::{attributes, context};
use iwarp_rnic::qp::State;
use std::os::fd::AsFd;

const TARGET: XrcTargetAttributes = XrcTargetAttributes {
    max_ird: 1,
    addressable: false,
};

fn domain(ctx: &Context) -> XrcDomain {
    ctx.open_xrc_domain(None, true, false).unwrap()
}

#[test]
fn numbers_are_unique() {
    let mut register = Register::default();
    assert_eq!(register.number(0xab12_3456), Some(0x12_3457));
    assert_eq!(
        register.number(7),
        Some(0x12_3458),
        "only the first number is random"
    );
    let taken = |register: &mut Register, number| {
        let entry = Entry {
            queue: Weak::new(),
            domain: 0,
            pd: 0,
        };
        register.queues.insert(number, entry);
    };
    taken(&mut register, 0x12_3459);
    assert_eq!(register.number(7), Some(0x12_345a));
    // The number 0 is not used.
    (register.last, _) = (0xff_fffe, taken(&mut register, 1));
    for next in [0xff_ffff, 2, 3] {
        assert_eq!(register.number(7), Some(next));
    }
}

#[test]
fn last_number_is_found() {
    for free in [1, 7, 8, NUMBER_MASK] {
        assert_eq!(next_number(7, |number| number != free), Some(free));
    }
    assert_eq!(next_number(7, |_| true), None, "all are taken");
}

/// Numbers of queues are unique on a device, and a target finds only the queues of its domain.
#[test]
fn domain_finds_its_queues() {
    let ctx = context();
    let [ours, other] = [(); 2].map(|()| domain(&ctx));
    let cq = ctx.create_cq(4, None).unwrap();
    let target = ctx.create_xrc_target(&ours, TARGET).unwrap();
    let default_pd = || {
        let target = Target::of(&target.inner).unwrap();
        (ours.default_pd(), target.default_pd())
    };
    assert_eq!(default_pd(), (None, 0));
    ctx.inner.registry::<Domains>().0.lock().last = 100;
    let [foreign, first, second] = [(&other, 6), (&ours, 7), (&ours, 8)].map(|(domain, pd)| {
        ctx.create_xrc_srq(domain, &cq, pd, 4, 1)
            .expect("the queue is created")
    });
    let numbers = [&foreign, &first, &second].map(SharedReceiveQueue::num);
    assert_eq!(numbers, [Some(101), Some(102), Some(103)]);
    let found = || [101, 102, 103, 104].map(|number| ours.queue(number).map(|queue| queue.pd));
    assert_eq!(found(), [None, Some(7), Some(8), None]);
    assert_eq!(default_pd(), (Some(7), 7));
    first.destroy();
    // A destroyed queue is not found, even if a handle exists.
    assert_eq!(found(), [None, None, Some(8), None]);
    assert_eq!(default_pd(), (Some(8), 8));
    second.destroy();
    assert_eq!(default_pd(), (None, 0));
    assert_eq!(ctx.inner.registry::<Domains>().0.lock().queues.len(), 1);
    target.destroy();
}

/// Entries of dropped domains are removed, so the register does not grow.
#[test]
fn register_drops_unused_domains() {
    let ctx = context();
    let open = |path| {
        let file = File::open(path).unwrap();
        ctx.open_xrc_domain(Some(file.as_fd()), true, false)
            .unwrap()
    };
    let kept = open("/dev/null");
    drop(open("/dev/zero"));
    assert_eq!(ctx.inner.registry::<Domains>().0.lock().by_file.len(), 2);
    drop(open("/"));
    assert_eq!(ctx.inner.registry::<Domains>().0.lock().by_file.len(), 2);
    assert!(open("/dev/null").is_same(&kept));
}

/// Polling a completion queue in which a target has completed receives drives the target's socket,
/// until the target is destroyed.
#[test]
fn completion_queues_drive_a_target_once() {
    let ctx = context();
    let qp = ctx.create_xrc_target(&domain(&ctx), TARGET).unwrap();
    let target = Target::of(&qp.inner).unwrap();
    let [a, b, c] = [(); 3].map(|()| ctx.create_cq(4, None).unwrap());
    let drivers = || target.drivers.lock().len();
    for cq in [&a, &b, &a, &b] {
        target.driven_by(&qp.inner, cq);
    }
    assert_eq!([drivers(), a.queue_pairs(), b.queue_pairs()], [2, 1, 1]);
    drop(a);
    for cq in [&c, &b] {
        target.driven_by(&qp.inner, cq);
    }
    assert_eq!([drivers(), b.queue_pairs(), c.queue_pairs()], [2, 1, 1]);
    target.forget(&qp.inner);
    assert_eq!([drivers(), b.queue_pairs(), c.queue_pairs()], [0; 3]);
    qp.destroy();
    target.driven_by(&qp.inner, &b);
    assert_eq!([drivers(), b.queue_pairs()], [0; 2]);
}

#[test]
fn initiator_ignores_receive_attributes() {
    let ctx = context();
    let [send, recv] = [(); 2].map(|()| ctx.create_cq(4, None).unwrap());
    let pd = ctx.allocate_pd();
    for srq in [None, Some(ctx.create_srq(pd, 4, 1).unwrap())] {
        let asked = QpAttributes {
            srq,
            max_recv_wr: 5,
            max_ird: 3,
            max_ord: 2,
            ..attributes(&ctx, &send, &recv)
        };
        let qp = ctx.create_xrc_initiator(&asked, false).unwrap();
        let config = qp.config();
        assert_eq!((config.max_recv_wr, config.max_ird), (0, 0));
        assert_eq!((config.shared_receive, config.max_ord), (false, 2));
        assert_eq!([send.queue_pairs(), recv.queue_pairs()], [1, 0]);
        assert_eq!(
            (qp.xrc_end(), qp.state()),
            (Some(XrcEnd::Initiator), State::Reset)
        );
        qp.destroy();
    }
}

/// The effects are applied to each queue that a target has used.
#[test]
fn each_used_queue_gets_its_effects() {
    let ctx = context();
    let domain = domain(&ctx);
    let qp = ctx.create_xrc_target(&domain, TARGET).unwrap();
    let target = Target::of(&qp.inner).unwrap();
    let cqs = [(); 3].map(|()| ctx.create_cq(1, None).unwrap());
    let pd = ctx.allocate_pd();
    let queues = cqs.each_ref().map(|cq| {
        let queue = ctx.create_xrc_srq(&domain, cq, pd, 4, 1);
        queue.unwrap()
    });
    let mut effects = Effects::default();
    for queue in &queues {
        target.select(queue.num().unwrap()).unwrap();
        // One completion more than the queue can hold.
        for _ in 0..2 {
            target.complete(Cqe::default(), &mut effects);
        }
        let mut delivered = target.delivered.lock();
        delivered.limits.push(Arc::clone(&queue.inner));
    }
    let overflowed = target.raise_due(&qp.inner);
    for cq in &cqs {
        let times = overflowed.iter().filter(|other| other.is_same(cq)).count();
        assert_eq!((times, cq.queue_pairs()), (1, 1));
    }
    let mut notified = Vec::new();
    while let Some(event) = ctx.try_async_event() {
        if let AsyncEventKind::SrqLimitReached(srq) = event.kind {
            notified.push(srq);
        }
    }
    assert_eq!(notified.len(), queues.len());
    for queue in &queues {
        assert!(notified.iter().any(|srq| srq.is_same(queue)));
    }
    target.forget(&qp.inner);
    qp.destroy();
}
