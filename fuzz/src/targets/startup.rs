//! MPA Request and Reply frames, read in portions of any size, and the reactions of responder and
//! initiator. RFC 5044 section 7.1, RFC 6581 sections 6 and 9.

use iwarp_proto::mpa::negotiate::{Agreed, Initiator, LocalParams, Outcome, Responder, RtrSet};
use iwarp_proto::mpa::startup::{
    EnhancedPrefix, Flags, Frame, FrameHeader, FrameKind, FrameReader, MAX_FRAME_LEN, Progress,
};

use super::print;

/// The input: a byte that selects our role and parameters, a byte for the size of the portions, and
/// the stream.
pub fn startup(data: &[u8]) {
    let Some((&[choice, portion], stream)) = data.split_first_chunk() else {
        return;
    };
    let kind = if choice & 1 == 0 {
        FrameKind::Request
    } else {
        FrameKind::Reply
    };
    let params = params(choice);
    let mut reader = FrameReader::new(kind);
    let whole = Frame::parse(stream);
    match read(&mut reader, stream, usize::from(portion)) {
        Ok(true) => {
            let frame = reader.frame().expect("the reader said that it is complete");
            assert_eq!(
                whole,
                Ok(Some(frame)),
                "the frame depends on the portions in which it is read"
            );
            check_header(&frame);
            match kind {
                FrameKind::Request => on_request(&frame, &params),
                FrameKind::Reply => on_reply_frame(&frame, params),
            }
        }
        Ok(false) => assert!(
            !matches!(whole, Ok(Some(_))),
            "the reader waits although the frame is complete"
        ),
        Err(()) => assert!(
            !matches!(&whole, Ok(Some(frame)) if frame.header().kind == kind),
            "the reader refuses a valid frame"
        ),
    }
}

fn params(choice: u8) -> LocalParams {
    LocalParams {
        revision: 1 + (choice >> 1 & 1),
        crc: choice & 4 != 0,
        markers_rx: choice & 8 != 0,
        peer_to_peer: choice & 16 != 0,
        ird_ord_negotiate: choice & 32 != 0,
        rtr_offer: if choice & 64 != 0 {
            RtrSet::ALL
        } else {
            RtrSet::NONE
        },
        max_ird: if choice & 128 != 0 { u16::MAX } else { 16 },
        ..LocalParams::default()
    }
}

/// Reads the stream in portions of this size (0: all at once). Returns `true` if the stream
/// contains a complete frame, and an error if the reader refuses it.
fn read(reader: &mut FrameReader, stream: &[u8], portion: usize) -> Result<bool, ()> {
    let mut consumed_len = 0;
    while consumed_len < stream.len() {
        let size = if portion == 0 { stream.len() } else { portion };
        let input = &stream[consumed_len..stream.len().min(consumed_len + size)];
        match reader.push(input) {
            Ok(Progress::NeedMore) => consumed_len += input.len(),
            Ok(Progress::Frame { consumed }) => {
                assert!(consumed <= input.len());
                assert_eq!(reader.missing(), Ok(0));
                let length = reader.frame().map(|frame| frame.header().frame_len());
                assert_eq!(
                    length,
                    Some(consumed_len + consumed),
                    "the reader consumes octets after the frame"
                );
                return Ok(true);
            }
            Err(error) => {
                print(&error);
                print(&(error.to_string(), error.terminate(), error.code()));
                return Err(());
            }
        }
    }
    Ok(false)
}

/// Checks that the header and the enhanced prefix can be encoded and parsed again.
fn check_header(frame: &Frame<'_>) {
    print(frame);
    let mut out = [0xa5; 20];
    assert_eq!(frame.header().emit(&mut out), out.len());
    assert_eq!(FrameHeader::parse(&out).as_ref(), Ok(frame.header()));
    if let Ok(Some(prefix)) = frame.prefix() {
        let mut out = [0xa5; EnhancedPrefix::LEN];
        assert_eq!(prefix.emit(&mut out), out.len());
        assert_eq!(out, frame.private_data()[..out.len()]);
        assert_eq!(EnhancedPrefix::parse(&out), Some(prefix));
    }
}

/// Handles a request as the responder, and checks that each reply is valid.
fn on_request(frame: &Frame<'_>, params: &LocalParams) {
    let pending = match Responder::on_request(frame, params) {
        Ok(pending) => pending,
        Err(error) => return print(&error),
    };
    print(&pending);
    let data = frame
        .private_data()
        .get(pending.private_data())
        .expect("the range is in the frame");
    assert_eq!(data, frame.ulp_private_data());
    let mut out = [0xa5; MAX_FRAME_LEN];
    let (length, agreed) = pending
        .accept(params, data, &mut out)
        .expect("private data of the request's length fits into the reply");
    check_limits(&agreed, params);
    let reply = Frame::parse(&out[..length])
        .expect("our reply is valid")
        .expect("and complete");
    assert_eq!(reply.header().kind, FrameKind::Reply);
    assert_eq!(
        reply.prefix().map(|prefix| prefix.is_some()),
        Ok(pending.enhanced())
    );
    assert!(!reply.header().flags.has(Flags::REJECT));
    for length in [
        pending.reject(data, &mut out),
        pending.reject_insufficient_ird(9, data, &mut out),
    ] {
        assert!(
            length > 0,
            "private data of the request's length does not fit into a rejection"
        );
        let reply = Frame::parse(&out[..length])
            .expect("our reply is valid")
            .expect("and complete");
        assert!(reply.header().flags.has(Flags::REJECT));
    }
}

/// Handles a reply as the initiator.
fn on_reply_frame(frame: &Frame<'_>, params: LocalParams) {
    let initiator = Initiator::new(params, b"fuzz").expect("the parameters are valid");
    match initiator.on_reply(frame) {
        Ok(Outcome::Accepted(agreed)) => {
            assert!(!frame.header().flags.has(Flags::REJECT));
            check_limits(&agreed, &params);
        }
        Ok(rejected @ Outcome::Rejected { .. }) => print(&rejected),
        Err(error) => print(&(error, error.terminate())),
    }
}

/// Checks that the negotiated values are within our limits.
fn check_limits(agreed: &Agreed, params: &LocalParams) {
    print(agreed);
    assert!(
        agreed.ird <= params.max_ird.max(1),
        "IRD {} exceeds {}",
        agreed.ird,
        params.max_ird
    );
    assert!(
        agreed.ord <= params.max_ord,
        "ORD {} exceeds {}",
        agreed.ord,
        params.max_ord
    );
    assert!(agreed.crc || !params.crc, "the peer disabled the CRC");
    assert_eq!(agreed.markers_rx, params.markers_rx);
}
