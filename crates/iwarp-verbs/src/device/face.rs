//! What differs between the faces ([`Face`]) besides names and tables, and hints to programs that do not get on with the one they see.
//!
//! As a RoCE NIC the device belongs to InfiniBand's transport, whose changes of state need more attributes than iWARP's: `transition`
//! has them.
//!
//! A program that refuses a kind of NIC mostly does so in silence. The library hints at the other face where it can tell: when a call
//! fails that would not fail there, or when a library is loaded that is known to look for one kind only.

use crate::abi::verbs::value::*;
use iwarp::Face;
use iwarp::runtime::{QueuePair, complain_once};
use iwarp_rnic::PostError;
use iwarp_rnic::qp::State;
use std::ffi::c_uint;
use std::sync::atomic::{AtomicBool, Ordering};

/// A number that no queue pair has. At the change to RTR it says that the connection manager connects the queue pair.
pub(crate) const MANAGED_QPN: u32 = 0;

/// Returns `true` if a new queue pair accepts receives before the program has brought it to INIT. InfiniBand's verbs forbid that,
/// and `ibv_post_recv` of RoCE NICs says EINVAL in RESET. iWARP's verbs leave the state to the NIC: it is called IDLE there, and
/// receives may be posted in it, which programs for iWARP rely on.
pub(crate) const fn receives_at_once(face: Face) -> bool {
    matches!(face, Face::Rnic)
}

/// A request was not posted. Programs for InfiniBand alone leave a queue pair of an iWARP NIC in RTR and send from it.
#[cold]
pub(crate) fn post_failed(qp: &QueuePair, error: &iwarp::Error) {
    let early = matches!(error, iwarp::Error::Post(PostError::InvalidState))
        && qp.state() == State::Rtr
        && qp.context().config().face == Face::Rnic;
    if early {
        complain_once(format!(
            "the program sends from a queue pair that it has not moved to RTS; {}",
            other(Face::Roce)
        ));
    }
}

/// A queue pair was not created. Where its type is one that iWARP does not have, another face may keep the program from asking.
pub(crate) fn type_refused(face: Face, qp_type: c_uint) {
    if face == Face::Roce
        && ![QPT_RC, QPT_UC, QPT_UD, QPT_XRC_SEND, QPT_XRC_RECV].contains(&qp_type)
    {
        complain_once(format!(
            "the program asks for a queue pair of type {qp_type}, and the wire has only connections and datagrams (types {QPT_RC} to \
             {QPT_UD}, {QPT_XRC_SEND} and {QPT_XRC_RECV}); if it cannot go on, {}",
            other(Face::Rnic)
        ));
    }
}

/// The devices were listed.
pub(crate) fn listed(face: Face) {
    static IS_CHECKED: AtomicBool = AtomicBool::new(false);
    if face == Face::Rnic && !IS_CHECKED.swap(true, Ordering::Relaxed) {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        if let Some(user) = infiniband_only(&maps) {
            complain_once(format!(
                "{user} passes over iWARP NICs; {}",
                other(Face::Roce)
            ));
        }
    }
}

/// The advice at the end of a hint.
fn other(face: Face) -> String {
    let name = face.name();
    format!("try `iwarp run --as {name}` (IWARP_AS={name})")
}

/// Libraries that use the verbs and pass over iWARP NICs without a word, by the beginning of their file's name.
const INFINIBAND_ONLY: [(&str, &str); 1] = [("libuct_ib", "UCX")];

/// Returns the name of such a library, if one is among the mapped files.
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
    fn libraries_are_known_by_their_files() {
        let maps = "7f00-7f01 r--p 00000000 08:01 1234 /usr/lib/libibverbs.so.1\n\
                    7f02-7f03 r-xp 00000000 00:00 0\n";
        assert_eq!(infiniband_only(maps), None);
        let ucx = format!("{maps}7f04-7f05 r-xp 0 08:01 99 /usr/lib/ucx/libuct_ib.so.0.0.0\n");
        assert_eq!(infiniband_only(&ucx), Some("UCX"));
    }
}
