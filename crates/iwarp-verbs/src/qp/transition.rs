//! State changes that `ibv_modify_qp(3)` allows, with their required and optional attributes.
//!
//! The table is InfiniBand's, as Linux applies it to RoCE NICs. It has a row for each change, with
//! the attributes for each type of queue pair. All other attributes are refused. Linux has no such
//! table for iWARP NICs: siw ignores attributes that it does not use. On the iWARP face, therefore,
//! no attribute is required for a connection. Attributes that InfiniBand forbids are refused on
//! both faces, because siw would silently ignore them.
//!
//! The table lacks the alternate path, which Linux refuses on Ethernet.

use crate::abi::verbs::value::*;
use crate::border::guard::{EINVAL, Res, UNSUPPORTED};
use iwarp::Face;
use iwarp_rnic::qp::State::{self, Error, Init, Reset, Rtr, Rts, Sqd, Sqe};
use std::ffi::c_uint;

/// `enum ibv_qp_attr_mask` without vendor-specific bits and raw packets' rate limit.
const STANDARD: c_uint = (1 << 21) - 1;

const QP_PATH_MIG_STATE: c_uint = 1 << 18;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Attributes {
    required: c_uint,
    optional: c_uint,
}

/// An allowed change to a state other than RESET and ERR.
struct Row {
    from: State,
    to: State,
    ud: Attributes,
    uc: Attributes,
    rc: Attributes,
    xrc_send: Attributes,
    xrc_recv: Attributes,
}

const fn attributes(required: c_uint, optional: c_uint) -> Attributes {
    Attributes { required, optional }
}

const NONE: Attributes = attributes(0, 0);
const KEYS: c_uint = QP_PKEY_INDEX | QP_QKEY;
const TO_INIT: c_uint = QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS;
const PATH: c_uint = QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN;
/// Attributes of a reliable connection's responder, and of its requester.
const RESPONDER: c_uint = QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER;
const REQUESTER: c_uint = QP_RETRY_CNT | QP_RNR_RETRY | QP_MAX_QP_RD_ATOMIC;
/// Attributes that may change while a connection is in use.
const IN_USE: c_uint = QP_CUR_STATE | QP_ACCESS_FLAGS | QP_PATH_MIG_STATE;
const IN_USE_RESPONDER: c_uint = IN_USE | QP_MIN_RNR_TIMER;
/// Attributes that may change while the send queue is drained.
const DRAINED: c_uint = QP_AV | QP_ACCESS_FLAGS | QP_PKEY_INDEX | QP_PATH_MIG_STATE;
const DRAINED_RELIABLE: c_uint = DRAINED | QP_PORT | QP_TIMEOUT;

const fn row(from: State, to: State, ud: Attributes, connected: Attributes) -> Row {
    Row {
        from,
        to,
        ud,
        uc: connected,
        rc: connected,
        xrc_send: connected,
        xrc_recv: connected,
    }
}

/// A change to RTS with the attributes that may change while a connection is in use.
const fn to_rts(from: State) -> Row {
    Row {
        rc: attributes(0, IN_USE_RESPONDER),
        xrc_recv: attributes(0, IN_USE_RESPONDER),
        ..row(
            from,
            Rts,
            attributes(0, QP_CUR_STATE | QP_QKEY),
            attributes(0, IN_USE),
        )
    }
}

const ROWS: [Row; 9] = [
    row(
        Reset,
        Init,
        attributes(KEYS | QP_PORT, 0),
        attributes(TO_INIT, 0),
    ),
    row(
        Init,
        Init,
        attributes(0, KEYS | QP_PORT),
        attributes(0, TO_INIT),
    ),
    Row {
        rc: attributes(PATH | RESPONDER, QP_ACCESS_FLAGS | QP_PKEY_INDEX),
        xrc_recv: attributes(PATH | RESPONDER, QP_ACCESS_FLAGS | QP_PKEY_INDEX),
        ..row(
            Init,
            Rtr,
            attributes(0, KEYS),
            attributes(PATH, QP_ACCESS_FLAGS | QP_PKEY_INDEX),
        )
    },
    Row {
        from: Rtr,
        to: Rts,
        ud: attributes(QP_SQ_PSN, QP_CUR_STATE | QP_QKEY),
        uc: attributes(QP_SQ_PSN, IN_USE),
        rc: attributes(QP_SQ_PSN | QP_TIMEOUT | REQUESTER, IN_USE_RESPONDER),
        xrc_send: attributes(QP_SQ_PSN | QP_TIMEOUT | REQUESTER, IN_USE),
        xrc_recv: attributes(QP_SQ_PSN | QP_TIMEOUT, IN_USE_RESPONDER),
    },
    to_rts(Rts),
    row(
        Rts,
        Sqd,
        attributes(0, QP_EN_SQD_ASYNC_NOTIFY),
        attributes(0, QP_EN_SQD_ASYNC_NOTIFY),
    ),
    to_rts(Sqd),
    Row {
        from: Sqd,
        to: Sqd,
        ud: attributes(0, KEYS),
        uc: attributes(0, DRAINED),
        rc: attributes(0, DRAINED_RELIABLE | REQUESTER | RESPONDER),
        xrc_send: attributes(0, DRAINED_RELIABLE | REQUESTER),
        xrc_recv: attributes(0, DRAINED_RELIABLE | RESPONDER),
    },
    Row {
        uc: attributes(0, QP_CUR_STATE | QP_ACCESS_FLAGS),
        ..row(Sqe, Rts, attributes(0, QP_CUR_STATE | QP_QKEY), NONE)
    },
];

impl Row {
    const fn for_type(&self, qp_type: c_uint) -> Attributes {
        match qp_type {
            QPT_UD => self.ud,
            QPT_UC => self.uc,
            QPT_XRC_SEND => self.xrc_send,
            QPT_XRC_RECV => self.xrc_recv,
            _ => self.rc,
        }
    }
}

/// Returns the attributes of a change, or `None` if it is not allowed.
fn find(face: Face, qp_type: c_uint, from: State, to: State) -> Option<Attributes> {
    match (from, to) {
        // siw moves a queue pair that was never connected to ERR. Linux refuses that for
        // InfiniBand.
        (Reset, Error) => (face == Face::Rnic).then_some(NONE),
        (_, Reset | Error) => Some(NONE),
        _ => {
            let row = ROWS.iter().find(|row| (row.from, row.to) == (from, to))?;
            Some(row.for_type(qp_type))
        }
    }
}

pub(crate) fn required(qp_type: c_uint, from: State, to: State) -> c_uint {
    find(Face::Roce, qp_type, from, to).map_or(0, |attributes| attributes.required)
}

/// Removes attributes that only the other end of an XRC connection has. Linux ignores them, because
/// programs pass the same mask to both ends.
pub(crate) const fn relevant(qp_type: c_uint, mask: c_uint) -> c_uint {
    match qp_type {
        QPT_XRC_SEND => mask & !RESPONDER,
        QPT_XRC_RECV => mask & !REQUESTER,
        _ => mask,
    }
}

/// Checks a call of `ibv_modify_qp`, which keeps the state if `to` is `None`. Fails with EINVAL if
/// the change or its attributes are not allowed, and with EOPNOTSUPP for attributes that no
/// software driver in Linux supports.
pub(crate) fn check(
    face: Face,
    qp_type: c_uint,
    from: State,
    to: Option<State>,
    mask: c_uint,
) -> Res<()> {
    if mask & !STANDARD != 0 {
        return Err(UNSUPPORTED);
    }
    let lenient = face == Face::Rnic && qp_type == QPT_RC;
    let row = match to {
        // siw changes access rights in any state. InfiniBand has no change from RTR to RTR.
        None if lenient && from == Rtr => find(face, qp_type, Rts, Rts),
        _ => find(face, qp_type, from, to.unwrap_or(from)),
    };
    let mut row = row.ok_or(EINVAL)?;
    if lenient {
        row.optional |= row.required | QP_ACCESS_FLAGS;
        row.required = 0;
    }
    // The program may pass the current state only in states that can change without a call.
    if mask & QP_CUR_STATE != 0 && !matches!(from, Rtr | Rts | Sqd | Sqe) {
        return Err(EINVAL);
    }
    let allowed = row.required | row.optional | QP_STATE;
    match mask & row.required == row.required && mask & !allowed == 0 {
        true => Ok(()),
        false => Err(EINVAL),
    }
}

#[cfg(test)]
#[path = "transition_tests.rs"]
mod tests;
