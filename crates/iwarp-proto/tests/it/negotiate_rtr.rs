//! Tests of MPA negotiation: the RTR message, and the IRD and ORD that it requires.

use crate::peers::*;
use iwarp_proto::mpa::negotiate::*;
use iwarp_proto::mpa::startup::*;

#[test]
fn rtr_read_raises_ird() {
    let initiator = LocalParams {
        rtr_offer: RtrSet::only(Rtr::Read),
        ord: 0,
        ..BASE
    };
    let responder = LocalParams {
        rtr_offer: RtrSet::only(Rtr::Read),
        ird: 0,
        ..BASE
    };
    let request = EnhancedPrefix {
        ird: 4,
        ord: 0,
        peer_to_peer: true,
        rtr_read: true,
        ..EnhancedPrefix::default()
    };
    let request = frame(FrameKind::Request, 2, 0x50, &prefix(request));
    let pending = Responder::on_request(&parse(&request), &responder).unwrap();
    let mut out = [0; MAX_FRAME_LEN];
    let (n, agreed) = pending.accept(&responder, b"", &mut out).unwrap();
    assert_eq!((agreed.ird, agreed.rtr), (1, Some(Rtr::Read)));
    assert_eq!(parse(&out[..n]).prefix().unwrap().unwrap().ird, 1);
    let (ours, theirs) = connect(initiator, responder);
    assert_eq!((ours.rtr, ours.ord, theirs.ird), (Some(Rtr::Read), 1, 1));
}

#[test]
fn rtr_prefers_write_then_read() {
    let set = |send, write, read| RtrSet { send, write, read }.preferred();
    for send in [false, true] {
        assert_eq!(set(send, true, true), Some(Rtr::Write));
        assert_eq!(set(send, true, false), Some(Rtr::Write));
        assert_eq!(set(send, false, true), Some(Rtr::Read));
    }
    assert_eq!(set(true, false, false), Some(Rtr::Send));
    assert_eq!(set(false, false, false), None);
}

/// If a Read is offered as RTR message, the requested ORD is at least 1, unless the device supports
/// none.
#[test]
fn rtr_read_requests_ord() {
    for (ord, max_ord, requested) in [(0, 0, 0), (3, 0, 0), (0, 1, 1), (0, 8, 1), (3, 8, 3)] {
        let params = LocalParams {
            rtr_offer: RtrSet::only(Rtr::Read),
            ord,
            max_ord,
            ..BASE
        };
        let initiator = Initiator::new(params, b"").unwrap();
        let request = parse(initiator.request_octets());
        let prefix = request.prefix().unwrap().unwrap();
        assert_eq!(prefix.ord, requested, "ORD {ord} of {max_ord}");
    }
}

#[test]
fn rtr_set_of_one_message() {
    let all = [Rtr::Send, Rtr::Write, Rtr::Read];
    for rtr in all {
        let set = RtrSet::only(rtr);
        assert_eq!(all.map(|r| set.contains(r)), all.map(|r| r == rtr));
        assert_eq!(set.preferred(), Some(rtr));
    }
}
