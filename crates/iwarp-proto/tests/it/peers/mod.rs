//! Helpers of the negotiation tests: they create frames, and run a start-up between our two roles.

use iwarp_proto::mpa::negotiate::*;
use iwarp_proto::mpa::startup::*;

pub(crate) fn frame(kind: FrameKind, revision: u8, flags: u8, pd: &[u8]) -> Vec<u8> {
    let header = FrameHeader {
        kind,
        flags: Flags(flags),
        revision,
        pd_length: pd.len() as u16,
    };
    let mut out = vec![0; header.frame_len()];
    header.emit(&mut out);
    out[20..].copy_from_slice(pd);
    out
}

pub(crate) fn prefix(p: EnhancedPrefix) -> [u8; 4] {
    let mut out = [0; 4];
    p.emit(&mut out);
    out
}

pub(crate) fn parse(octets: &[u8]) -> Frame<'_> {
    Frame::parse(octets).unwrap().unwrap()
}

/// Runs a complete start-up. Returns the agreements of the initiator and the responder.
pub(crate) fn connect(i: LocalParams, r: LocalParams) -> (Agreed, Agreed) {
    let initiator = Initiator::new(i, b"ping").unwrap();
    let request = initiator.request_octets();
    let pending = Responder::on_request(&parse(request), &r).unwrap();
    assert_eq!(
        &parse(request).private_data()[pending.private_data()],
        b"ping"
    );
    let mut out = [0; MAX_FRAME_LEN];
    let (n, theirs) = pending.accept(&r, b"pong", &mut out).unwrap();
    let reply = parse(&out[..n]);
    assert_eq!(reply.ulp_private_data(), b"pong");
    match initiator.on_reply(&reply).unwrap() {
        Outcome::Accepted(ours) => (ours, theirs),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn accepted(i: &Initiator, reply: &[u8]) -> Agreed {
    match i.on_reply(&parse(reply)) {
        Ok(Outcome::Accepted(a)) => a,
        other => panic!("{other:?}"),
    }
}

pub(crate) const BASE: LocalParams = LocalParams {
    revision: 2,
    crc: true,
    markers_rx: false,
    ird: 16,
    ord: 16,
    max_ird: 128,
    max_ord: 128,
    peer_to_peer: true,
    rtr_offer: RtrSet::WRITE_READ,
    ird_ord_negotiate: true,
};
