//! The sockets of this process by number.

use crate::errno::{Errno, Result};
use crate::socket::Socket;
use parking_lot::RwLock;
use std::os::fd::RawFd;
use std::sync::Arc;

static TABLE: RwLock<Vec<Option<Arc<Socket>>>> = RwLock::new(Vec::new());

/// Enters a socket and returns its number.
pub(crate) fn insert(socket: Arc<Socket>) -> RawFd {
    let number = socket.number();
    let index = usize::try_from(number).unwrap_or_default();
    let old = {
        let mut table = TABLE.write();
        if table.len() <= index {
            table.resize_with(index + 1, || None);
        }
        table[index].replace(socket)
    };
    if let Some(old) = old {
        // The program has closed the descriptor without `close`, or the socket is a parent's: nobody may run its end.
        std::mem::forget(old);
    }
    number
}

/// Returns the socket with this number, if there is one.
pub(crate) fn find(number: RawFd) -> Option<Arc<Socket>> {
    let index = usize::try_from(number).ok()?;
    TABLE.read().get(index)?.clone()
}

/// Returns the socket with this number, if this process may use it.
///
/// # Errors
/// EBADF: there is none. EOPNOTSUPP: it belongs to the parent of this process.
pub(crate) fn get(number: RawFd) -> Result<Arc<Socket>> {
    let socket = find(number).ok_or(Errno::BADF)?;
    if socket.is_foreign() {
        return Err(Errno::NOTSUP);
    }
    Ok(socket)
}

/// Takes a socket off the table.
///
/// # Errors
/// EBADF: there is none.
pub(crate) fn remove(number: RawFd) -> Result<Arc<Socket>> {
    let index = usize::try_from(number).map_err(|_| Errno::BADF)?;
    let mut table = TABLE.write();
    table
        .get_mut(index)
        .and_then(Option::take)
        .ok_or(Errno::BADF)
}

/// Returns all sockets of this process, for its end. Returns none if a thread has ended with the table locked.
pub(crate) fn all() -> Vec<Arc<Socket>> {
    let Some(table) = TABLE.try_read_for(std::time::Duration::from_millis(200)) else {
        return Vec::new();
    };
    table
        .iter()
        .flatten()
        .filter(|s| !s.is_foreign())
        .cloned()
        .collect()
}
