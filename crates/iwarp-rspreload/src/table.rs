//! Which descriptors of the program stand for rsockets. A look-up is one load, because every `read` makes one.

use libc::c_int;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// Descriptors above it never stand for an rsocket.
const MAX: usize = 1 << 16;

/// The number of the rsocket plus one, or zero.
static SOCKETS: [AtomicI32; MAX] = [const { AtomicI32::new(0) }; MAX];
/// How many descriptors stand for an rsocket.
static USERS: [AtomicU32; MAX] = [const { AtomicU32::new(0) }; MAX];

fn slot(fd: c_int) -> Option<&'static AtomicI32> {
    SOCKETS.get(usize::try_from(fd).ok()?)
}

fn users(socket: c_int) -> Option<&'static AtomicU32> {
    USERS.get(usize::try_from(socket).ok()?)
}

/// Returns the rsocket behind a descriptor.
#[inline]
pub(crate) fn find(fd: c_int) -> Option<c_int> {
    match slot(fd)?.load(Ordering::Acquire) {
        0 => None,
        n => Some(n - 1),
    }
}

/// Lets a descriptor stand for an rsocket. Returns `false` if a number is too high.
pub(crate) fn insert(fd: c_int, socket: c_int) -> bool {
    let (Some(slot), Some(users)) = (slot(fd), users(socket)) else {
        return false;
    };
    users.fetch_add(1, Ordering::AcqRel);
    slot.store(socket + 1, Ordering::Release);
    true
}

/// Lets the descriptor stand for nothing. Returns the rsocket, and whether this was its last descriptor.
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
    fn the_last_user_is_told() {
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
