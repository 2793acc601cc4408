//! Tests of MPA negotiation: CRC, markers, IRD and ORD, connection models, RTR.

use crate::peers::*;
use iwarp_proto::mpa::negotiate::*;
use iwarp_proto::mpa::startup::*;
use iwarp_proto::rdmap::TerminateCode;

#[test]
fn default_request_octets() {
    //= rfc5044 section 1.2
    //= type=test
    //# It is possible to disable this CRC check; however, CRCs MUST be enabled
    //# unless it is clear that the end-to-end connection through the network has
    //# data integrity at least as good as an MPA with CRC enabled (for example,
    //# when IPsec is implemented end to end).
    //= rfc5044 section 4.4
    //= type=test
    //# The default configuration for a
    //# connection MUST be to use CRCs.
    //= rfc5044 section 7.1.2
    //= type=test
    //# When MPA is started in the Initiator mode, the MPA implementation
    //# MUST send a valid MPA Request Frame.
    //= rfc6581 section 9.2
    //= type=test
    //# The initiator MUST set
    //# Control Flag A to 1 for the peer-to-peer model.
    //= rfc6581 section 9.2
    //= type=test
    //# The initiator MUST
    //# set each Control Flag B, C, and D to 1 for each of the options it
    //# supports, if Control Flag A is set to 1.
    let mut out = [0; 64];
    let n = Initiator::new(LocalParams::default(), b"x")
        .unwrap()
        .request(&mut out);
    assert_eq!(
        &out[..n],
        b"MPA ID Req Frame\x50\x02\x00\x05\x80\x10\xc0\x10x"
    );
    let i = Initiator::new(LocalParams::default(), b"x").unwrap();
    assert_eq!(i.request(&mut out[..n - 1]), 0);
}

#[test]
fn request_without_enhancements_has_revision_1() {
    //= rfc6581 section 10
    //= type=test
    //# The initiator MUST NOT use the enhanced RDMA connection establishment
    //# formats or function codes when no enhanced functionality is desired.
    let params = LocalParams {
        peer_to_peer: false,
        ird_ord_negotiate: false,
        ..BASE
    };
    let mut i = Initiator::new(params, b"").unwrap();
    //= rfc5044 section 7.1.1
    //= type=test
    //# For this version of
    //# the specification, senders MUST set this field to one.
    assert_eq!(i.request_octets(), b"MPA ID Req Frame\x40\x01\x00\x00");
    assert!(!i.prepare_retry());
}

#[test]
fn client_server_model_has_no_rtr() {
    //= rfc6581 section 9.2
    //= type=test
    //# The initiator MUST set Control Flag A to 0 for the client-server
    //# model.
    //= rfc6581 section 9.2
    //= type=test
    //# If Control Flag A is set to 0, then Control
    //# Flags B, C, and D MUST also be set to 0.
    let params = LocalParams {
        peer_to_peer: false,
        ..BASE
    };
    let i = Initiator::new(params, b"").unwrap();
    assert_eq!(i.request_octets()[20..], [0, 16, 0, 16]);
    let (ours, theirs) = connect(params, BASE);
    //= rfc6581 section 9.2
    //= type=test
    //# The responder MUST set Control Flag A to 0 if Control Flag A
    //# is 0 in the request.
    assert_eq!((ours.rtr, ours.peer_to_peer), (None, false));
    assert_eq!((theirs.rtr, theirs.peer_to_peer), (None, false));
    // If the reply has flag A although the request had not, the flag is ignored.
    let p = EnhancedPrefix {
        ird: 1,
        ord: 1,
        peer_to_peer: true,
        rtr_send: true,
        ..Default::default()
    };
    let a = accepted(&i, &frame(FrameKind::Reply, 2, 0x10, &prefix(p)));
    assert_eq!((a.rtr, a.peer_to_peer), (None, false));
    //= rfc6581 section 9.2
    //= type=test
    //# On reception, if Control
    //# Flag A is set to 0, then Control Flags B, C, and D MUST be ignored.
    let p = EnhancedPrefix {
        rtr_write: true,
        rtr_read: true,
        ..Default::default()
    };
    let request = frame(FrameKind::Request, 2, 0x10, &prefix(p));
    let pending = Responder::on_request(&parse(&request), &BASE).unwrap();
    assert_eq!(
        (pending.rtr_offer(), pending.peer_to_peer()),
        (RtrSet::NONE, false)
    );
    let mut out = [0; 64];
    let (n, _) = pending.accept(&BASE, b"", &mut out).unwrap();
    assert_eq!((out[20] & 0xc0, out[22] & 0xc0, n), (0, 0, 24));
}

#[test]
fn crc_and_marker_flags_are_combined() {
    //= rfc5044 section 4.4
    //= type=test
    //# An MPA implementation MUST implement CRC support and MUST either:
    //= rfc5044 section 7.1.1
    //= type=test
    //# When this bit is '1' in either the MPA Request Frame
    //# or MPA Reply Frame, CRCs MUST be generated and checked by both
    //# endpoints.
    //= rfc5044 section 7.1.1
    //= type=test
    //# When '1' Markers MUST be added as described in Section 4.3, MPA
    //# Markers.
    //= rfc5044 section 7.1.1
    //= type=test
    //# When this bit is '1' in an MPA Request Frame, the Initiator declares that
    //# Markers are REQUIRED in FPDUs sent from the Responder.
    //= rfc5044 section 7.1.1
    //= type=test
    //# When set to '1' in an MPA Reply Frame, this bit declares that Markers are
    //# REQUIRED in FPDUs sent from the Initiator.
    //= rfc5044 section 7.1.1
    //= type=test
    //# When in a received MPA Request Frame or MPA Reply Frame and the value is
    //# '0', Markers MUST NOT be added to the data stream by that endpoint.
    //= rfc5044 section 7.1.1
    //= type=test
    //# When this field is '0' in the MPA Request Frame and the MPA Reply Frame,
    //# CRCs MUST not be checked and need not be generated by either endpoint.
    //= rfc5044 section 4.4
    //= type=test
    //# If an MPA instance has declared that it does not require CRCs, it MUST turn
    //# off CRC checking immediately after receipt of an MPA mode declaration
    //# indicating that its peer also does not require CRCs.
    for bits in 0..32u8 {
        let on = |b: u8| bits & (1 << b) != 0;
        let revision = if on(4) { 2 } else { 1 };
        let i = LocalParams {
            revision,
            crc: on(0),
            markers_rx: on(1),
            ..BASE
        };
        let r = LocalParams {
            crc: on(2),
            markers_rx: on(3),
            ..BASE
        };
        let (ours, theirs) = connect(i, r);
        for a in [ours, theirs] {
            //= rfc5044 section 4.4
            //= type=test
            //# After receipt of an MPA startup declaration indicating that its peer
            //# requires CRCs, an MPA instance MUST continue generating and checking CRCs
            //# until the connection terminates.
            //= rfc5044 section C.1
            //= type=test
            //# Since the RDMAC RNIC will always request CRC use, then, according to the
            //# IETF MPA specification, both peers MUST generate and check CRCs.
            assert_eq!(a.crc, on(0) || on(2));
            //= rfc5044 section 3
            //= type=test
            //# MPA MUST provide the protocol version negotiated with its peer to DDP.
            assert_eq!((a.revision, a.enhanced), (revision, on(4)));
        }
        //= rfc5044 section 7.1.1
        //= type=test
        //# M: This bit declares an endpoint's REQUIRED Marker usage.
        assert_eq!((ours.markers_rx, ours.markers_tx), (on(1), on(3)));
        assert_eq!((theirs.markers_rx, theirs.markers_tx), (on(3), on(1)));
    }
}

#[test]
fn ird_and_ord_agree_for_all_pairs() {
    //= rfc6581 section 9.1
    //= type=test
    //# Upon receiving the MPA Accept Frame from the responder, the initiator
    //# MUST set its IRD at least to the responder ORD and its ORD at most to
    //# the responder IRD.
    //= rfc6581 section 9.1
    //= type=test
    //# The
    //# responder MUST set its ORD at most to the initiator IRD.
    //= rfc6581 section 9.1
    //= type=test
    //# The responder and initiator MUST pass the peer's provided IRD and ORD
    //# values to the ULP, in addition to using the values as calculated by
    //# the preceding rules.
    //= rfc6581 section 9.1
    //= type=test
    //# The responder ORD SHOULD be set to a value less than or equal to the
    //# initiator IRD.
    let values = [0, 1, 2, 9, 16, 127, 128, 129, 0x3ffe, 0x3fff, 0xffff];
    for ird in values {
        for ord in values {
            for responder_ird in values {
                for responder_ord in values {
                    let i = LocalParams { ird, ord, ..BASE };
                    let r = LocalParams {
                        ird: responder_ird,
                        ord: responder_ord,
                        ..BASE
                    };
                    let (ours, theirs) = connect(i, r);
                    assert!(
                        ours.ord <= theirs.ird && theirs.ord <= ours.ird,
                        "{ours:?} {theirs:?}"
                    );
                    assert!(ours.ird <= 128 && theirs.ird <= 128);
                    assert!(ours.ord <= ord && theirs.ord <= responder_ord);
                    assert_eq!((ours.peer_ird, ours.peer_ord), (theirs.ird, theirs.ord));
                    assert_eq!(theirs.peer_ird, ird.min(128));
                    // Each ORD is as large as both sides allow.
                    assert_eq!(theirs.ord, responder_ord.min(128).min(ird));
                    // An ORD of zero stays zero, because the RTR message is then not a Read.
                    assert_eq!(ours.ord, ord.min(128));
                }
            }
        }
    }
}

/// IRD and ORD have 14 bits on the wire, and 0x3fff means "no negotiation".
#[test]
fn ird_and_ord_fit_14_bits() {
    let boundless = LocalParams {
        ird: u16::MAX,
        ord: u16::MAX,
        max_ird: u16::MAX,
        max_ord: u16::MAX,
        ..BASE
    };
    let request = Initiator::new(boundless, b"").unwrap();
    let prefix = EnhancedPrefix::parse(&request.request_octets()[20..]).unwrap();
    assert_eq!((prefix.ird, prefix.ord), (0x3ffe, 0x3ffe));
    let (ours, theirs) = connect(boundless, boundless);
    assert_eq!((ours.ird, ours.ord), (0x3ffe, 0x3ffe));
    assert_eq!((theirs.ird, theirs.ord), (0x3ffe, 0x3ffe));
}

#[test]
fn responder_replies_like_siw() {
    // (IRD, ORD) of the request, of the responder's parameters, and of siw's reply.
    for (req, own, reply) in [
        ((16, 16), (2, 2), (16, 2)),
        ((2, 2), (16, 16), (16, 2)),
        ((0, 0), (0, 0), (0, 0)),
        ((2, 9), (4, 4), (9, 2)),
    ] {
        let p = EnhancedPrefix {
            ird: req.0,
            ord: req.1,
            ..Default::default()
        };
        let request = frame(FrameKind::Request, 2, 0x10, &prefix(p));
        let params = LocalParams {
            ird: own.0,
            ord: own.1,
            ..BASE
        };
        let mut out = [0; 64];
        let (n, _) = Responder::on_request(&parse(&request), &params)
            .unwrap()
            .accept(&params, b"", &mut out)
            .unwrap();
        let p = parse(&out[..n]).prefix().unwrap().unwrap();
        assert_eq!((p.ird, p.ord), reply, "request {req:?} own {own:?}");
    }
}

#[test]
fn ird_and_ord_without_negotiation() {
    //= rfc6581 section 9.1
    //= type=test
    //# The responder MUST respond to an initiator ORD value of
    //# 0x3FFF by leaving its local endpoint IRD value unchanged and setting
    //# the IRD to 0x3FFF in its reply message.
    //= rfc6581 section 9.1
    //= type=test
    //# The responder MUST respond to an initiator IRD
    //# value of 0x3FFF by leaving its local endpoint ORD value unchanged,
    //# and setting ORD to 0x3FFF in its reply message.
    //= rfc6581 section 9.1
    //= type=test
    //# The initiator MUST leave its
    //# local endpoint ORD value unchanged upon receiving a responder IRD
    //# value of 0x3FFF.
    //= rfc6581 section 9.1
    //= type=test
    //# The initiator MUST
    //# leave its local endpoint IRD value unchanged upon receiving a
    //# responder ORD value of 0x3FFF.
    let i = LocalParams {
        ird: 3,
        ord: 4,
        ird_ord_negotiate: false,
        ..BASE
    };
    let r = LocalParams {
        ird: 5,
        ord: 6,
        ..BASE
    };
    let (ours, theirs) = connect(i, r);
    assert_eq!((ours.ird, ours.ord, theirs.ird, theirs.ord), (3, 4, 5, 6));
    for a in [ours, theirs] {
        assert_eq!((a.peer_ird, a.peer_ord), (NO_NEGOTIATION, NO_NEGOTIATION));
    }
    // The request negotiates only the ORD.
    let p = EnhancedPrefix {
        ird: NO_NEGOTIATION,
        ord: 9,
        ..Default::default()
    };
    let request = frame(FrameKind::Request, 2, 0x10, &prefix(p));
    let mut out = [0; 64];
    let pending = Responder::on_request(&parse(&request), &r).unwrap();
    let (n, a) = pending.accept(&r, b"", &mut out).unwrap();
    assert_eq!((a.ird, a.ord), (9, 6));
    let p = parse(&out[..n]).prefix().unwrap().unwrap();
    assert_eq!((p.ird, p.ord), (9, NO_NEGOTIATION));
    // siw replies to 0x3fff with its own numbers, which are ignored.
    let i = Initiator::new(i, b"").unwrap();
    let p = EnhancedPrefix {
        ird: 2,
        ord: 9,
        peer_to_peer: true,
        rtr_write: true,
        ..Default::default()
    };
    let a = accepted(&i, &frame(FrameKind::Reply, 2, 0x10, &prefix(p)));
    assert_eq!((a.ird, a.ord, a.peer_ird, a.peer_ord), (3, 4, 2, 9));
    // The initiator negotiates, but the responder does not.
    let i = Initiator::new(
        LocalParams {
            ird: 3,
            ord: 4,
            ..BASE
        },
        b"",
    )
    .unwrap();
    let p = EnhancedPrefix {
        ird: NO_NEGOTIATION,
        ord: NO_NEGOTIATION,
        ..p
    };
    let a = accepted(&i, &frame(FrameKind::Reply, 2, 0x10, &prefix(p)));
    assert_eq!((a.ird, a.ord), (3, 4));
}

#[test]
fn responder_ord_above_limit_is_refused() {
    //= rfc6581 section 9.1
    //= type=test
    //# If the initiator does not have sufficient
    //# resources for the required IRD, it MUST send a TERM message to the
    //# responder indicating insufficient resources and terminate the
    //# connection due to insufficient resources.
    //= rfc6581 section 9.1
    //= type=test
    //# Thus, the TERM message MUST contain Layer 2, Error Type 0, Error Code 6.
    let i = Initiator::new(BASE, b"").unwrap();
    let p = EnhancedPrefix {
        ird: 16,
        ord: 200,
        peer_to_peer: true,
        rtr_write: true,
        ..Default::default()
    };
    let e = i
        .on_reply(&parse(&frame(FrameKind::Reply, 2, 0x10, &prefix(p))))
        .unwrap_err();
    assert_eq!(
        e,
        StartupError::InsufficientIrd {
            needed: 200,
            max: 128
        }
    );
    assert_eq!(
        e.terminate(),
        Some(TerminateCode {
            layer: 2,
            etype: 0,
            code: 6
        })
    );
    // The IRD is raised to the maximum of the device.
    let p = EnhancedPrefix { ord: 128, ..p };
    assert_eq!(
        accepted(&i, &frame(FrameKind::Reply, 2, 0x10, &prefix(p))).ird,
        128
    );
}

/// The bit of the Read in the argument of [`set`].
const READ: u8 = 4;

fn set(bits: u8) -> RtrSet {
    RtrSet {
        send: bits & 1 != 0,
        write: bits & 2 != 0,
        read: bits & 4 != 0,
    }
}

#[test]
fn rtr_is_negotiated_for_all_pairs() {
    //= rfc6581 section 9.2
    //= type=test
    //# If Control Flag A
    //# is 1 in the MPA Request message, then the responder MUST set Control
    //# Flag A to 1 in the MPA reply message.
    //= rfc6581 section 9.2
    //= type=test
    //# If the responder does
    //# not support any of the initiator-specified RTR indication options,
    //# then the responder MUST set at least one RTR indication type option
    //# it supports.
    //= rfc6581 section 9.2
    //= type=test
    //# Upon receiving the MPA Accept Frame with Control Flag A set to 1, the
    //# initiator MUST generate one of the negotiated RTR indications.
    //= rfc6581 section 9.2
    //= type=test
    //# If
    //# the initiator is not able to generate any of the responder-supported
    //# RTR indications, then it MUST send a TERM message to the responder
    //# indicating failure to negotiate a mutually compatible connection
    //# model or RTR option, and terminate the connection.
    //= rfc6581 section 9.2
    //= type=test
    //# Thus, the TERM message MUST contain Layer 2, Error Type 0, Error Code 7.
    //= rfc6581 section 9.2
    //= type=test
    //# The responder MUST support at least one RTR indication option if it supports
    //# Enhanced RDMA connection establishment.
    //= rfc6581 section 9.2
    //= type=test
    //# The responder is not required to specify all RTR indication options it
    //# supports.
    //= rfc6581 section 9.2
    //= type=test
    //# The responder MUST set at least one RTR indication option if it supports
    //# more than one initiator-specified RTR indication option.
    for offered in 1..8 {
        for supported in 0..8 {
            let i = LocalParams {
                rtr_offer: set(offered),
                ord: 0,
                ..BASE
            };
            let r = LocalParams {
                rtr_offer: set(supported),
                ird: 0,
                peer_to_peer: false,
                ..BASE
            };
            let initiator = Initiator::new(i, b"").unwrap();
            let pending = Responder::on_request(&parse(initiator.request_octets()), &r).unwrap();
            // A Read requires an ORD, so it is offered only if no other message is.
            let offered = match offered & !READ {
                0 => offered,
                others => others,
            };
            assert_eq!(pending.rtr_offer(), set(offered));
            let mut out = [0; 64];
            let (n, theirs) = pending.accept(&r, b"", &mut out).unwrap();
            let p = parse(&out[..n]).prefix().unwrap().unwrap();
            let named = [p.rtr_send, p.rtr_write, p.rtr_read]
                .iter()
                .filter(|&&f| f)
                .count();
            assert!(p.peer_to_peer && named == 1, "exactly one: {p:?}");
            let supported = if supported == 0 { 2 } else { supported };
            match initiator.on_reply(&parse(&out[..n])) {
                Ok(Outcome::Accepted(ours)) => {
                    let rtr = ours.rtr.unwrap();
                    assert_eq!(theirs.rtr, Some(rtr));
                    assert!(set(offered).contains(rtr) && set(supported).contains(rtr));
                    assert!(ours.peer_to_peer && theirs.peer_to_peer);
                    if offered & supported & 2 != 0 {
                        assert_eq!(rtr, Rtr::Write);
                    }
                    //= rfc6581 section 9.1
                    //= type=test
                    //# If the initiator ORD is insufficient to support the selected connection
                    //# model, the responder IRD MAY be increased;
                    // A Read as RTR message requires an ORD and an IRD of at least 1.
                    if rtr == Rtr::Read {
                        assert!(ours.ord >= 1 && theirs.ird >= 1);
                    }
                }
                Err(e) => {
                    assert_eq!(offered & supported, 0);
                    assert_eq!(e, StartupError::NoMatchingRtr);
                    assert_eq!(
                        e.terminate(),
                        Some(TerminateCode {
                            layer: 2,
                            etype: 0,
                            code: 7
                        })
                    );
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn unusual_rtr_replies_are_accepted() {
    let i = Initiator::new(BASE, b"").unwrap();
    let reply = |p: EnhancedPrefix| frame(FrameKind::Reply, 2, 0x10, &prefix(p));
    let p2p = EnhancedPrefix {
        ird: 16,
        ord: 16,
        peer_to_peer: true,
        ..Default::default()
    };
    // The reply may contain messages that were not offered.
    let a = accepted(
        &i,
        &reply(EnhancedPrefix {
            rtr_send: true,
            rtr_read: true,
            ..p2p
        }),
    );
    assert_eq!(a.rtr, Some(Rtr::Read));
    // Without flag A, the model is client-server.
    let a = accepted(
        &i,
        &reply(EnhancedPrefix {
            peer_to_peer: false,
            ..p2p
        }),
    );
    assert_eq!((a.rtr, a.peer_to_peer), (None, false));
    // An empty offer is replaced by Write and Read, which every peer supports.
    let i = Initiator::new(
        LocalParams {
            rtr_offer: RtrSet::NONE,
            ..BASE
        },
        b"",
    )
    .unwrap();
    assert_eq!(i.request_octets()[22] & 0xc0, 0xc0);
    // If the request has flag A but no RTR message (siw), the reply contains Write.
    let request = frame(FrameKind::Request, 2, 0x10, &prefix(p2p));
    let mut out = [0; 64];
    let (_, a) = Responder::on_request(&parse(&request), &BASE)
        .unwrap()
        .accept(&BASE, b"", &mut out)
        .unwrap();
    assert_eq!(a.rtr, Some(Rtr::Write));
}

#[test]
fn small_responder_ord_keeps_offered_ird() {
    // The initiator supports as many Reads as it has offered, even if the responder requests fewer.
    // If the responder requests more, it supports more.
    for (ord, ird) in [(0, 16), (4, 16), (16, 16), (20, 20)] {
        let reply = EnhancedPrefix {
            ird: 16,
            ord,
            peer_to_peer: true,
            rtr_write: true,
            ..EnhancedPrefix::default()
        };
        let initiator = Initiator::new(BASE, b"").unwrap();
        let reply = frame(FrameKind::Reply, 2, 0x50, &prefix(reply));
        assert_eq!(accepted(&initiator, &reply).ird, ird);
    }
}
