//! Differences between an iWARP NIC and a RoCE NIC ([`Face`], the kind that programs see) besides
//! names and function tables, and hints for users of programs that refuse the kind they see.
//! InfiniBand requires more attributes for a state change than iWARP; see `transition`.
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

/// Returns `true` if receives may be posted in RESET, before the program moves the queue pair.
/// InfiniBand forbids that, and a RoCE NIC's `ibv_post_recv` returns EINVAL in RESET. iWARP's IDLE
/// state allows it, and iWARP programs rely on it.
pub(crate) const fn allows_receives_in_reset(face: Face) -> bool {
    matches!(face, Face::Rnic)
}

/// Logs a hint if posting failed because the program sends in RTR on an iWARP NIC.
#[cold]
pub(crate) fn hint_if_sent_in_rtr(qp: &QueuePair, error: &iwarp::Error) {
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

/// Logs a hint if the program asks a RoCE NIC for a queue pair type that is not supported. The
/// program may ask an iWARP NIC for another type, so there is no hint then.
pub(crate) fn hint_unsupported_type(face: Face, qp_type: c_uint) {
    if face == Face::Roce
        && ![QPT_RC, QPT_UC, QPT_UD, QPT_XRC_SEND, QPT_XRC_RECV].contains(&qp_type)
    {
        complain_once(format!(
            "the program asks for a queue pair of type {qp_type}, but only connections and \
             datagrams are supported (types {QPT_RC} to {QPT_UD}, {QPT_XRC_SEND} and \
             {QPT_XRC_RECV}); if the program does not work without it, {}",
            advice(Face::Rnic)
        ));
    }
}

/// Logs a hint, at most once, if a library that ignores iWARP NICs is loaded.
pub(crate) fn hint_ignored_nics(face: Face) {
    static IS_CHECKED: AtomicBool = AtomicBool::new(false);
    if face == Face::Rnic && !IS_CHECKED.swap(true, Ordering::Relaxed) {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        if let Some(user) = infiniband_only(&maps) {
            complain_once(format!("{user} ignores iWARP NICs; {}", advice(Face::Roce)));
        }
    }
}

fn advice(face: Face) -> String {
    let name = face.name();
    format!("try `iwarp run --as {name}` (IWARP_AS={name})")
}

/// Libraries that silently ignore iWARP NICs: start of the file name, and the project it belongs
/// to.
const INFINIBAND_ONLY: [(&str, &str); 1] = [("libuct_ib", "UCX")];

/// Returns the project of such a library if one is mapped.
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
    fn libraries_are_found_by_mappings() {
        let maps = "7f00-7f01 r--p 00000000 08:01 1234 /usr/lib/libibverbs.so.1\n\
                    7f02-7f03 r-xp 00000000 00:00 0\n";
        assert_eq!(infiniband_only(maps), None);
        let ucx = format!("{maps}7f04-7f05 r-xp 0 08:01 99 /usr/lib/ucx/libuct_ib.so.0.0.0\n");
        assert_eq!(infiniband_only(&ucx), Some("UCX"));
    }
}
