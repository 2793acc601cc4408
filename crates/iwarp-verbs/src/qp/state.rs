//! States of queue pairs, as programs name them.

use crate::abi::verbs::value::*;
use crate::border::guard::{EINVAL, Res};
use iwarp_rnic::qp::State;
use std::ffi::c_uint;

pub(crate) const fn state_of(state: State) -> c_uint {
    match state {
        State::Reset => QPS_RESET,
        State::Init => QPS_INIT,
        State::Rtr => QPS_RTR,
        State::Rts => QPS_RTS,
        State::Sqd => QPS_SQD,
        State::Sqe => QPS_SQE,
        State::Error => QPS_ERR,
    }
}

pub(crate) fn to_state(state: c_uint) -> Res<State> {
    Ok(match state {
        QPS_RESET => State::Reset,
        QPS_INIT => State::Init,
        QPS_RTR => State::Rtr,
        QPS_RTS => State::Rts,
        QPS_SQD => State::Sqd,
        QPS_SQE => State::Sqe,
        QPS_ERR => State::Error,
        _ => return Err(EINVAL),
    })
}
