//! Differences between the faces ([`Face`]) besides names and tables, and hints to programs that
//! refuse the face they see. Attributes for state changes, of which InfiniBand requires more than
//! iWARP, are in `transition`.
//!
//! Most programs that refuse a kind of NIC do so silently. The library suggests the other face when
//! a call fails that would succeed there, or when a library is loaded that is known to accept only
//! one kind.

use crate::abi::verbs::value::*;
use iwarp::Face;
use iwarp::runtime::{QueuePair, complain_once};
use iwarp_rnic::PostError;
use iwarp_rnic::qp::State;
use std::ffi::c_uint;
use std::sync::atomic::{AtomicBool, Ordering};

/// A number that no queue pair has. As the destination in a change to RTR, it means that the
/// connection manager connects the queue pair.
pub(crate) const MANAGED_QPN: u32 = 0;

/// Returns `true` if a new queue pair accepts receives before the program moves it to INIT.
/// InfiniBand forbids that, and a RoCE NIC's `ibv_post_recv` returns EINVAL in RESET. iWARP's IDLE
/// state allows it, and iWARP programs rely on it.
pub(crate) const fn receives_at_once(face: Face) -> bool {
    matches!(face, Face::Rnic)
}

/// Logs a hint if posting failed because a program for InfiniBand sends in RTR on an iWARP NIC.
#[cold]
pub(crate) fn post_failed(qp: &QueuePair, error: &iwarp::Error) {
    let early = matches!(error, iwarp::Error::Post(PostError::InvalidState))
        && qp.state() == State::Rtr
        && qp.context().config().face == Face::Rnic;
    if early {
        complain_once(format!(
            "the program sends from a queue pair that it has not moved to RTS; {}",
            advice(Face::Roce)
        ));
    }
}

/// Logs a hint if a queue pair has a type that iWARP lacks: with another face the program may not
/// ask for it.
pub(crate) fn type_refused(face: Face, qp_type: c_uint) {
    if face == Face::Roce
        && ![QPT_RC, QPT_UC, QPT_UD, QPT_XRC_SEND, QPT_XRC_RECV].contains(&qp_type)
    {
        complain_once(format!(
            "the program asks for a queue pair of type {qp_type}, and the wire has only \
             connections and datagrams (types {QPT_RC} to \
             {QPT_UD}, {QPT_XRC_SEND} and {QPT_XRC_RECV}); if it cannot go on, {}",
            advice(Face::Rnic)
        ));
    }
}

/// Logs a hint, once, if a loaded library ignores iWARP NICs.
pub(crate) fn listed(face: Face) {
    static IS_CHECKED: AtomicBool = AtomicBool::new(false);
    if face == Face::Rnic && !IS_CHECKED.swap(true, Ordering::Relaxed) {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        if let Some(user) = infiniband_only(&maps) {
            complain_once(format!(
                "{user} passes over iWARP NICs; {}",
                advice(Face::Roce)
            ));
        }
    }
}

fn advice(face: Face) -> String {
    let name = face.name();
    format!("try `iwarp run --as {name}` (IWARP_AS={name})")
}

/// Libraries that silently ignore iWARP NICs, by the beginning of their file's name, and their
/// users.
const INFINIBAND_ONLY: [(&str, &str); 1] = [("libuct_ib", "UCX")];

/// Returns the user of such a library if one is mapped.
fn infiniband_only(maps: &str) -> Option<&'static str> {
    let mut files = maps.lines().filter_map(|line| line.rsplit('/').next());
    files.find_map(|file| {
        let known = INFINIBAND_ONLY.iter().find(|k| file.starts_with(k.0))?;
        Some(known.1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_files_reveal_libraries() {
        let maps = "7f00-7f01 r--p 00000000 08:01 1234 /usr/lib/libibverbs.so.1\n\
                    7f02-7f03 r-xp 00000000 00:00 0\n";
        assert_eq!(infiniband_only(maps), None);
        let ucx = format!("{maps}7f04-7f05 r-xp 0 08:01 99 /usr/lib/ucx/libuct_ib.so.0.0.0\n");
        assert_eq!(infiniband_only(&ucx), Some("UCX"));
    }
}
