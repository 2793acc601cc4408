//! The sockets of this process by number.

use crate::datagram::Datagram;
use crate::errno::{Errno, Result};
use crate::socket::Socket;
use iwarp::runtime::ProcessLock;
use std::any::Any;
use std::os::fd::RawFd;
use std::sync::Arc;

#[derive(Clone)]
pub(crate) enum Entry {
    Stream(Arc<Socket>),
    Datagram(Arc<Datagram>),
}

impl Entry {
    fn number(&self) -> RawFd {
        match self {
            Self::Stream(socket) => socket.number(),
            Self::Datagram(socket) => socket.number(),
        }
    }

    /// Returns the socket as an object, whose address distinguishes it from an earlier socket with
    /// the same number.
    pub(crate) fn object(self) -> Arc<dyn Any + Send + Sync> {
        match self {
            Self::Stream(socket) => socket,
            Self::Datagram(socket) => socket,
        }
    }
}

static TABLE: ProcessLock<Vec<Option<Entry>>> = ProcessLock::new("rsocket::TABLE", Vec::new());

pub(crate) fn insert(socket: Entry) -> RawFd {
    let number = socket.number();
    let index = usize::try_from(number).unwrap_or_default();
    let old = {
        let mut table = TABLE.lock();
        if table.len() <= index {
            table.resize_with(index + 1, || None);
        }
        table[index].replace(socket)
    };
    if let Some(old) = old {
        // The program closed the descriptor without `rclose`, or the old socket belongs to the
        // parent process. Its destructor must not run.
        std::mem::forget(old);
    }
    number
}

pub(crate) fn find(number: RawFd) -> Option<Entry> {
    let index = usize::try_from(number).ok()?;
    TABLE.lock().get(index)?.clone()
}

pub(crate) fn find_stream(number: RawFd) -> Option<Arc<Socket>> {
    match find(number)? {
        Entry::Stream(socket) => Some(socket),
        Entry::Datagram(_) => None,
    }
}

/// Returns a socket that this process may use. Fails with EBADF if there is no such socket, and
/// with EOPNOTSUPP if it is a stream socket of the parent process.
pub(crate) fn get(number: RawFd) -> Result<Entry> {
    match find(number).ok_or(Errno::BADF)? {
        Entry::Stream(socket) if socket.is_inherited() => Err(Errno::NOTSUP),
        entry => Ok(entry),
    }
}

/// As [`get`], but also fails with EOPNOTSUPP if it is a datagram socket.
pub(crate) fn get_stream(number: RawFd) -> Result<Arc<Socket>> {
    match get(number)? {
        Entry::Stream(socket) => Ok(socket),
        Entry::Datagram(_) => Err(Errno::NOTSUP),
    }
}

/// Removes a socket from the table. Fails with EBADF if there is no such socket.
pub(crate) fn remove(number: RawFd) -> Result<Entry> {
    let index = usize::try_from(number).map_err(|_| Errno::BADF)?;
    let mut table = TABLE.lock();
    table
        .get_mut(index)
        .and_then(Option::take)
        .ok_or(Errno::BADF)
}

/// Returns all stream sockets when the process exits. Returns none if the table stays locked, for
/// example by a thread that has exited.
pub(crate) fn all_streams() -> Vec<Arc<Socket>> {
    let mut tries = 0..200;
    let table = loop {
        if let Some(table) = TABLE.try_lock() {
            break table;
        }
        if tries.next().is_none() {
            return Vec::new();
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    };
    table
        .iter()
        .flatten()
        .filter_map(|entry| match entry {
            Entry::Stream(socket) if !socket.is_inherited() => Some(Arc::clone(socket)),
            _ => None,
        })
        .collect()
}
