//! Properties of requests, completions and errors.

use super::*;
use crate::AllocError;
use crate::memory::MemoryError;
use std::string::{String, ToString};
use std::vec::Vec;

/// Requests with payload, requests that take a receive at the peer, requests with a response, and
/// local requests.
#[test]
fn operations_are_classified() {
    let (remote_addr, rkey, stag) = (0, 0, Stag(1));
    let bind = Bind {
        mw_stag: stag,
        new_stag: stag,
        mr_stag: stag,
        addr: 0,
        len: 0,
        access: Access::empty(),
    };
    let register = FastRegister {
        new_stag: stag,
        offset: 0,
        len: 0,
        iova: 0,
        access: Access::empty(),
        pages: None,
    };
    let add = SendOp::FetchAdd {
        remote_addr,
        rkey,
        add: 1,
        mask: 0,
    };
    let swap = SendOp::CmpSwap {
        remote_addr,
        rkey,
        compare: 0,
        swap: 0,
        compare_mask: 0,
        swap_mask: 0,
    };
    let write_imm = SendOp::WriteImm {
        remote_addr,
        rkey,
        imm: 0,
    };
    let (yes, no) = (true, false);
    let cases = [
        (SendOp::Send, [yes, yes, no, no, no]),
        (SendOp::SendImm(0), [yes, yes, no, no, no]),
        (SendOp::SendInv(0), [yes, yes, no, no, no]),
        (SendOp::Write { remote_addr, rkey }, [yes, no, no, no, no]),
        (write_imm, [yes, yes, no, no, no]),
        (
            SendOp::AtomicWrite { remote_addr, rkey },
            [yes, no, no, yes, no],
        ),
        (SendOp::Read { remote_addr, rkey }, [no, no, yes, yes, no]),
        (
            SendOp::ReadInv { remote_addr, rkey },
            [no, no, yes, yes, no],
        ),
        (add, [no, no, yes, yes, no]),
        (swap, [no, no, yes, yes, no]),
        (SendOp::LocalInvalidate { stag }, [no, no, no, no, yes]),
        (SendOp::Bind(bind), [no, no, no, no, yes]),
        (SendOp::FastRegister(register), [no, no, no, no, yes]),
    ];
    for (op, kinds) in cases {
        let is = [
            op.has_payload(),
            op.takes_receive(),
            op.has_response(),
            op.completes_by_response(),
            op.is_local(),
        ];
        assert_eq!(is, kinds, "{op:?}");
    }
}

/// A datagram's sender and a message's tag are valid only with the matching flags.
#[test]
fn completion_fields_depend_on_flags() {
    let cases = [
        (WcFlags::empty(), 0, None),
        (WcFlags::WITH_IMM | WcFlags::TAG_DATA, 0, None),
        (WcFlags::GRH, 77, None),
        (WcFlags::TAG_MATCH, 0, Some((0x1234_5678_9abc, 77))),
    ];
    for (flags, src_qp, tag) in cases {
        let cqe = Cqe {
            flags,
            vendor_err: 77,
            timestamp_ns: 0x1234_5678_9abc,
            ..Cqe::default()
        };
        assert_eq!((cqe.src_qp(), cqe.tag()), (src_qp, tag), "{flags:?}");
    }
}

#[test]
fn each_error_has_its_message() {
    let messages = [
        (AllocError.to_string(), "out of memory"),
        (PostError::QueueFull.to_string(), "poll completions"),
        (PostError::TooManySges.to_string(), "elements"),
        (PostError::InlineTooLong.to_string(), "inline data"),
        (PostError::MessageTooLong.to_string(), "2^31 bytes"),
        (PostError::InvalidRequest.to_string(), "parameters"),
        (PostError::InvalidState.to_string(), "state"),
        (
            PostError::UsesSharedReceiveQueue.to_string(),
            "shared receive queue",
        ),
        (MemoryError::TableFull.to_string(), "deregister some"),
        (MemoryError::OutOfMemory.to_string(), "region table"),
        (MemoryError::BadAccess.to_string(), "local write"),
        (MemoryError::NoSuchStag.to_string(), "does not exist"),
        (
            MemoryError::WrongProtectionDomain.to_string(),
            "protection domain",
        ),
        (MemoryError::NotBindable.to_string(), "windows"),
        (MemoryError::OutOfRange.to_string(), "not inside"),
        (MemoryError::Busy.to_string(), "unbind"),
        (MemoryError::InUse.to_string(), "try again"),
        (MemoryError::StillValid.to_string(), "invalidate it"),
        (
            MemoryError::NotInvalidatable.to_string(),
            "cannot be invalidated",
        ),
    ];
    for (text, what) in &messages {
        assert!(text.contains(what), "{text}");
    }
    let mut texts: Vec<&String> = messages.iter().map(|(text, _)| text).collect();
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), messages.len());
}
