//! The table of placeholders. Each `read` and `write` looks up its descriptor, so a look-up is a
//! single load.

use libc::c_int;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// Number of descriptors in the table. A larger descriptor cannot be a placeholder.
pub(crate) const MAX: usize = 1 << 16;

/// The rsocket of each descriptor, plus one; zero if there is none.
static SOCKETS: [AtomicI32; MAX] = [const { AtomicI32::new(0) }; MAX];
/// The number of placeholders of each rsocket.
static USERS: [AtomicU32; MAX] = [const { AtomicU32::new(0) }; MAX];

fn slot(fd: c_int) -> Option<&'static AtomicI32> {
    SOCKETS.get(usize::try_from(fd).ok()?)
}

fn users(socket: c_int) -> Option<&'static AtomicU32> {
    USERS.get(usize::try_from(socket).ok()?)
}

#[inline]
pub(crate) fn find(fd: c_int) -> Option<c_int> {
    match slot(fd)?.load(Ordering::Acquire) {
        0 => None,
        n => Some(n - 1),
    }
}

/// Makes a descriptor a placeholder. Returns `false` if one of the numbers is outside the table.
pub(crate) fn insert(fd: c_int, socket: c_int) -> bool {
    let (Some(slot), Some(users)) = (slot(fd), users(socket)) else {
        return false;
    };
    users.fetch_add(1, Ordering::AcqRel);
    slot.store(socket + 1, Ordering::Release);
    true
}

/// Removes a placeholder. Returns its rsocket, and `true` if it was the last placeholder.
pub(crate) fn remove(fd: c_int) -> Option<(c_int, bool)> {
    let socket = match slot(fd)?.swap(0, Ordering::AcqRel) {
        0 => return None,
        n => n - 1,
    };
    let last = users(socket).is_none_or(|u| u.fetch_sub(1, Ordering::AcqRel) == 1);
    Some((socket, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remove_reports_last_placeholder() {
        assert_eq!((find(900), find(-1), find(i32::MAX)), (None, None, None));
        assert!(insert(900, 0) && insert(901, 0));
        assert_eq!((find(900), find(901)), (Some(0), Some(0)));
        assert_eq!(remove(900), Some((0, false)));
        assert_eq!(remove(900), None);
        assert_eq!(remove(901), Some((0, true)));
        assert!(!insert(902, i32::MAX) && !insert(-1, 0));
        assert_eq!(find(902), None);
    }
}
