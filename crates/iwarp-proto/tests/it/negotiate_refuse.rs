//! Tests of MPA negotiation with a peer that uses another revision, has the wrong role, sends too
//! much private data, or rejects.

use crate::peers::*;
use iwarp_proto::mpa::negotiate::*;
use iwarp_proto::mpa::startup::*;
use iwarp_proto::rdmap::TerminateCode;

/// Checks a responder's result for all revisions and flags in a request.
#[test]
fn responder_accepts_own_and_lower_revisions() {
    //= rfc5044 section 7.1.1
    //= type=test
    //# If the MPA receiver cannot interoperate with
    //# the received version, then it MUST close the connection and
    //# report an error locally.
    //= rfc6581 section 6
    //= type=test
    //# A host accepting MPA connections
    //# MUST continue to accept MPA Requests with version one, even if it
    //# supports version two.
    //= rfc6581 section 10
    //= type=test
    //# If the responder receives an
    //# enhanced MPA message, it MUST respond with an enhanced MPA
    //# message.
    //= rfc6581 section 10
    //= type=test
    //# If the responder receives an unenhanced
    //# MPA message ('S' is set to 0), it MUST respond with an unenhanced
    //# MPA message.
    //= rfc5044 section 7.1.1
    //= type=test
    //# MPA receivers compliant with this version of the specification MUST check
    //# this field.
    //= rfc6581 section 6
    //= type=test
    //# To use any enhanced connection establishment feature, this MUST be set to
    //# two or higher.
    //= rfc6581 section 10
    //= type=test
    //# The responder MUST continue to accept unenhanced connection requests.
    //= rfc6581 section 10
    //= type=test
    //# All responders are REQUIRED to issue unenhanced RDMA connection
    //# establishment responses in response to unenhanced RDMA connection
    //# establishment requests.
    //= rfc6581 section 10
    //= type=test
    //# The initiator requests enhanced RDMA connection establishment by sending an
    //# enhanced RDMA establishment request; an enhanced responder is REQUIRED to
    //# respond with an enhanced RDMA connection establishment response, whereas an
    //# unenhanced responder treats the enhanced request as incorrectly formatted
    //# and closes the TCP connection.
    for own in [1, 2] {
        let params = LocalParams {
            revision: own,
            ..BASE
        };
        for revision in 0..=255u8 {
            for flags in 0..=255u8 {
                let request = frame(FrameKind::Request, revision, flags, &[0; 8]);
                let result = Responder::on_request(&parse(&request), &params);
                if revision > own {
                    //= rfc6581 section 10
                    //= type=test
                    //# If the responder receives an enhanced MPA message and it does not support
                    //# enhanced RDMA connection establishment, it MUST close the TCP connection and
                    //# exit MPA.
                    assert_eq!(result, Err(StartupError::UnsupportedRevision { revision }));
                    assert_eq!(result.unwrap_err().terminate(), None);
                    continue;
                }
                let pending = result.unwrap();
                let enhanced = revision == 2 && flags & 0x10 != 0;
                assert_eq!(
                    (pending.revision(), pending.enhanced()),
                    (revision, enhanced)
                );
                assert_eq!(pending.private_data().len(), if enhanced { 4 } else { 8 });
                assert_eq!(
                    (pending.crc(), pending.markers()),
                    (flags & 0x40 != 0, flags & 0x80 != 0)
                );
                let mut out = [0; 64];
                let (n, a) = pending.accept(&params, b"", &mut out).unwrap();
                //= rfc5044 section 7.1.2
                //= type=test
                //# If the MPA Request Frame is properly formatted and the Private Data is
                //# acceptable, the implementation SHOULD return an MPA Reply Frame with the
                //# Rejected Connection bit set to '0';
                //= rfc5044 section 7.1.1
                //= type=test
                //# It MUST be set to zero when sending, and not checked on reception.
                //= rfc5044 section 7.1.1
                //= type=test
                //# R: This bit is set to zero, and not checked on reception in the MPA Request
                //# Frame.
                //= rfc6581 section 6
                //= type=test
                //# [RFC5044] specifies that 'Res' MUST be set to zero when sending and MUST NOT
                //# be checked on reception, making use of 'S' bit backwards compatibility with
                //# the original MPA Frame format.
                // The reply has the same revision, is enhanced if the request is, and has neither
                // reserved bits nor flag R.
                assert_eq!(out[17], revision);
                assert_eq!(out[16], 0x40 | if enhanced { 0x10 } else { 0 });
                assert_eq!(n, if enhanced { 24 } else { 20 });
                assert_eq!((a.revision, a.enhanced), (revision, enhanced));
                let n = pending.reject(b"no", &mut out);
                assert_eq!(out[16] & 0x30, 0x20 | if enhanced { 0x10 } else { 0 });
                assert_eq!(out[n - 2..n], *b"no");
            }
        }
    }
}

/// Checks an initiator's result for all revisions and flags in a reply.
#[test]
fn initiator_accepts_matching_replies_only() {
    //= rfc5044 section 7.1.2
    //= type=test
    //# MPA Initiator mode implementations MUST receive and validate an
    //# MPA Reply Frame.
    for own in [1, 2] {
        let i = Initiator::new(
            LocalParams {
                revision: own,
                crc: false,
                ..BASE
            },
            b"",
        )
        .unwrap();
        for revision in 0..=255u8 {
            for flags in 0..=255u8 {
                // IRD 16 with flag A, ORD 16 with flag C.
                let reply = frame(FrameKind::Reply, revision, flags, &[0x80, 16, 0x80, 16]);
                let s = flags & 0x10 != 0 && revision >= 2;
                match i.on_reply(&parse(&reply)) {
                    Err(StartupError::UnsupportedRevision { .. }) => assert!(revision > 2),
                    Ok(Outcome::Rejected { peer_ird, peer_ord }) => {
                        assert!(revision <= 2 && flags & 0x20 != 0);
                        let depth = s.then_some(16);
                        assert_eq!((peer_ird, peer_ord), (depth, depth));
                    }
                    Err(StartupError::NotEnhanced) => assert!(own == 2 && !s),
                    Err(StartupError::EnhancedUnasked) => assert!(own == 1 && s),
                    Ok(Outcome::Accepted(a)) => {
                        assert!(revision <= 2 && flags & 0x20 == 0 && s == (own == 2));
                        assert_eq!(a.enhanced, s);
                        assert_eq!(
                            (a.crc, a.markers_tx),
                            (flags & 0x40 != 0, flags & 0x80 != 0)
                        );
                        assert_eq!(a.rtr, s.then_some(Rtr::Write));
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

#[test]
fn revision_1_keeps_local_ird_and_ord() {
    let i = LocalParams {
        revision: 1,
        ird: 3,
        ord: 4,
        ..BASE
    };
    let r = LocalParams {
        ird: 0,
        ord: 6,
        ..BASE
    };
    let (ours, theirs) = connect(i, r);
    assert_eq!((ours.ird, ours.ord, ours.peer_ird), (3, 4, NO_NEGOTIATION));
    // An IRD of 1, for the zero-length Read that cxgb4 sends on unenhanced connections.
    assert_eq!(
        (theirs.ird, theirs.ord, theirs.peer_ord),
        (1, 6, NO_NEGOTIATION)
    );
}

#[test]
fn initiator_falls_back_to_revision_1() {
    //= rfc6581 section 10
    //= type=test
    //# In this case, the
    //# initiator MAY attempt to establish an RDMA connection using the
    //# unenhanced MPA protocol as defined in [RFC5044] if this protocol
    //# is compatible with the application, and let the ULP deal with ORD
    //# and IRD and peer-to-peer negotiations.
    let mut i = Initiator::new(BASE, b"hello").unwrap();
    let enhanced = i.request_octets().to_vec();
    // The first connection may have ended for another reason, so the request is repeated.
    assert!(i.prepare_retry());
    assert_eq!(i.request_octets(), enhanced);
    assert!(i.prepare_retry());
    assert_eq!(i.request_octets(), b"MPA ID Req Frame\x40\x01\x00\x05hello");
    assert!(!i.prepare_retry());
    let revision_1 = LocalParams {
        revision: 1,
        ..BASE
    };
    let (ours, _) = connect(revision_1, revision_1);
    assert_eq!((ours.revision, ours.enhanced, ours.rtr), (1, false, None));
    for revision in [0, 3, 255] {
        let e = Initiator::new(LocalParams { revision, ..BASE }, b"").unwrap_err();
        assert_eq!(e, StartupError::UnsupportedRevision { revision });
    }
}

#[test]
fn wrong_role_is_refused() {
    //= rfc5044 section 8
    //= type=test
    //# The following errors MUST be detected by MPA and the codes SHOULD be
    //# provided to DDP or other Consumer:
    //= rfc5044 section 7.1.1
    //= type=test
    //# Initiator mode receivers MUST check this field for the same value, and close
    //# the connection and report an error locally if any other value is detected.
    let i = Initiator::new(BASE, b"").unwrap();
    assert_eq!(
        i.on_reply(&parse(i.request_octets())),
        Err(StartupError::WrongRole)
    );
    //= rfc5044 section 7.1.1
    //= type=test
    //# Responder mode receivers MUST check this field for the same value, and close
    //# the connection and report an error locally if any other value is detected.
    let reply = frame(FrameKind::Reply, 1, 0, b"");
    assert_eq!(
        Responder::on_request(&parse(&reply), &BASE),
        Err(StartupError::WrongRole)
    );
    assert_eq!(
        StartupError::WrongRole.code(),
        Some(TerminateCode::MPA_INVALID_FRAME)
    );
    assert_eq!(StartupError::WrongRole.terminate(), None);
    //= rfc6581 section 9.3
    //= type=test
    //# The initiator or responder MUST generate the TERM message that
    //# contains Layer 2, Error Type 0, Error Code 5 when it encounters
    //# any error locally for which the special Error Code is not defined
    //# in Section 8 before resetting the connection.
    assert_eq!(
        StartupError::Local.terminate(),
        Some(TerminateCode {
            layer: 2,
            etype: 0,
            code: 5
        })
    );
}

#[test]
fn private_data_length_is_limited() {
    //= rfc5044 section 7.1.1
    //= type=test
    //# The Private Data field MUST be between 0 and 512
    //# octets in length.
    let data = [7; 513];
    for (revision, max) in [(1, 512), (2, 508)] {
        let params = LocalParams { revision, ..BASE };
        let i = Initiator::new(params, &data[..max]).unwrap();
        assert_eq!(i.request_octets().len(), 532);
        //= rfc5044 section 7.1.1
        //= type=test
        //# This field MUST contain the length in octets of the Private Data field.
        assert_eq!(i.request_octets()[18..20], [2, 0]);
        let e = Initiator::new(params, &data[..max + 1]).unwrap_err();
        assert_eq!(e, StartupError::PrivateDataTooLong { len: max + 1, max });
        let pending = Responder::on_request(&parse(i.request_octets()), &BASE).unwrap();
        let mut out = [0; MAX_FRAME_LEN];
        assert_eq!(
            pending.accept(&BASE, &data[..max], &mut out).unwrap().0,
            532
        );
        assert!(pending.accept(&BASE, &data[..max + 1], &mut out).is_err());
        assert_eq!(
            pending.accept(&BASE, &data[..max], &mut out[..531]),
            Err(StartupError::OutputTooSmall { needed: 532 })
        );
        assert_eq!(pending.reject(&data[..max], &mut out), 532);
        assert_eq!(pending.reject(&data[..max + 1], &mut out), 0);
    }
}

#[test]
fn rejection_carries_data_ird_and_ord() {
    //= rfc5044 section 7.1.2
    //= type=test
    //# The Responder SHOULD return an MPA Reply Frame with the
    //# "Reject Connection" bit set to '1' if the validation of the
    //# Private Data is not acceptable to the ULP.
    let i = Initiator::new(
        LocalParams {
            ird: 2,
            ord: 3,
            ..BASE
        },
        b"",
    )
    .unwrap();
    let pending = Responder::on_request(&parse(i.request_octets()), &BASE).unwrap();
    assert_eq!((pending.peer_ird(), pending.peer_ord()), (Some(2), Some(3)));
    let mut out = [0; 64];
    //= rfc5044 section 7.1.2
    //= type=test
    //# If the MPA Request Frame is properly formatted but the Private Data is not
    //# acceptable, the implementation SHOULD return an MPA Reply Frame with the
    //# Rejected Connection bit set to '1';
    let n = pending.reject(b"sorry", &mut out);
    let reply = parse(&out[..n]);
    //= rfc6581 section 9.1
    //= type=test
    //# The initiator MUST pass the responder provided IRD and ORD to the ULP for
    //# both MPA Accept and Reject messages.
    assert_eq!(reply.ulp_private_data(), b"sorry");
    // The CRC flag is copied from the request.
    let crc = reply.header().flags.has(Flags::CRC);
    assert!(crc && reply.header().flags.has(Flags::REJECT));
    assert_eq!(
        i.on_reply(&reply),
        Ok(Outcome::Rejected {
            peer_ird: Some(3),
            peer_ord: Some(2)
        })
    );
    //= rfc6581 section 9.1
    //= type=test
    //# The responder MAY reject the connection request if the initiator IRD is not
    //# sufficient for the ULP-required ORD and specify the required ORD in the MPA
    //# Reject Frame responder ORD.
    let n = pending.reject_insufficient_ird(9, b"", &mut out);
    assert_eq!(
        i.on_reply(&parse(&out[..n])),
        Ok(Outcome::Rejected {
            peer_ird: Some(3),
            peer_ord: Some(9)
        })
    );
}
