//! Both ends of a copy, over any transport with granted slots and short messages.
//!
//! This module does not depend on RDMA, and validates every message of the peer: offsets must be
//! the expected ones, lengths must fit the slot and the file, and only slots in use may be
//! freed. See `protocol.rs` for the order of messages.

use crate::auth::{Secret, client_handshake, server_handshake};
use crate::confine::{Place, Root};
use crate::part::{Existing, Hash, Part, Source};
use crate::protocol::{Grant, Have, MAX_SLOTS, Message};
use crate::transport::{
    Link, WORKING_INTERVAL, expect_message, peer_error, receive_message, unexpected,
};
use iwarp_cli_common::error::{Context as _, Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Called after every step with the bytes done and the total.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(u64, u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) size: u64,
    /// The part that the receiver already had, in bytes.
    pub(crate) resumed: u64,
    /// SHA-256 of the file, equal at both ends.
    pub(crate) hash: Hash,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Request<'a> {
    /// Path below the served directory.
    pub(crate) path: &'a str,
    /// Continue an existing partial file.
    pub(crate) resume: bool,
}

/// The rules of a server.
#[derive(Debug, Default)]
pub(crate) struct Terms {
    /// What to do with existing files when clients write; `None` if clients may only read.
    pub(crate) writing: Option<Existing>,
    /// The secret that clients must know, if any.
    pub(crate) secret: Option<Secret>,
}

/// Client: performs the handshake, which precedes [`put`] and [`get`].
///
/// # Errors
/// Fails if the versions differ, if one end requires a proof that the other cannot give, or if
/// the connection breaks.
pub(crate) fn begin(link: &mut impl Link, secret: Option<&Secret>) -> Result<()> {
    client_handshake(link, secret).map_err(|e| prefer_peer_error(link, e))
}

/// Client: writes a file below the served directory.
pub(crate) fn put(
    link: &mut impl Link,
    mut source: Source,
    request: Request<'_>,
    progress: Progress<'_>,
) -> Result<Summary> {
    put_inner(link, &mut source, request, progress).map_err(|e| prefer_peer_error(link, e))
}

fn put_inner(
    link: &mut impl Link,
    source: &mut Source,
    request: Request<'_>,
    progress: Progress<'_>,
) -> Result<Summary> {
    let (size, mode) = (source.size(), source.mode);
    link.send(&Message::Put {
        size,
        mode,
        resume: request.resume,
        path: request.path.to_owned(),
    })?;
    let (have, grant) = match expect_message(link)? {
        Message::Ready { have, grant } => (have, grant),
        other => return Err(unexpected(&other)),
    };
    let offset = at_work(link, |peer_gone| {
        source.resume(have.len, &have.hash, peer_gone)
    })?;
    link.send(&Message::Start { offset, size, mode })?;
    transmit(link, source, offset, &grant, progress)
}

/// Client: reads a file below the served directory into a local place.
pub(crate) fn get(
    link: &mut impl Link,
    place: Place,
    request: Request<'_>,
    progress: Progress<'_>,
) -> Result<Summary> {
    get_inner(link, place, request, progress).map_err(|e| prefer_peer_error(link, e))
}

fn get_inner(
    link: &mut impl Link,
    place: Place,
    request: Request<'_>,
    progress: Progress<'_>,
) -> Result<Summary> {
    // The user's own file is replaced, as by `cp` and `scp`.
    let part = at_work(link, |peer_gone| {
        Part::open(
            place,
            request.resume,
            u64::MAX,
            Existing::Replace,
            peer_gone,
        )
    })?;
    let (have, grant) = (
        Have {
            len: part.len(),
            hash: part.hash(),
        },
        link.grant()?,
    );
    link.send(&Message::Get {
        have,
        grant,
        path: request.path.to_owned(),
    })?;
    match expect_message(link)? {
        Message::Start { offset, size, mode } => {
            receive(link, part, Start { offset, size, mode }, &grant, progress)
        }
        other => Err(unexpected(&other)),
    }
}

/// Server: serves one client until it closes the connection. A failure is reported to the client
/// and ends the connection.
pub(crate) fn serve(
    link: &mut impl Link,
    root: &Root,
    terms: &Terms,
    log: &mut dyn FnMut(&str, Summary),
) -> Result<()> {
    let outcome = serve_requests(link, root, terms, log);
    if let Err(e) = &outcome {
        // This fails if the client has closed the connection.
        let _ = link.send(&Message::Error {
            text: e.to_string(),
        });
    }
    outcome
}

fn serve_requests(
    link: &mut impl Link,
    root: &Root,
    terms: &Terms,
    log: &mut dyn FnMut(&str, Summary),
) -> Result<()> {
    if !server_handshake(link, terms.secret.as_ref())? {
        return Ok(());
    }
    link.authenticated();
    while let Some(request) = receive_message(link)? {
        match request {
            Message::Put {
                size, resume, path, ..
            } => {
                let done = receive_upload(link, root, terms, &path, (size, resume))?;
                log(&path, done);
            }
            Message::Get { have, grant, path } => {
                let mut source = Source::new(root.read(&path)?)?;
                let offset = at_work(link, |peer_gone| {
                    source.resume(have.len, &have.hash, peer_gone)
                })?;
                link.send(&Message::Start {
                    offset,
                    size: source.size(),
                    mode: source.mode,
                })?;
                log(
                    &path,
                    transmit(link, &mut source, offset, &grant, &mut |_, _| {})?,
                );
            }
            Message::Error { text } => return Err(peer_error(&text)),
            other => return Err(unexpected(&other)),
        }
    }
    Ok(())
}

/// Server: receives a file from a client.
fn receive_upload(
    link: &mut impl Link,
    root: &Root,
    terms: &Terms,
    path: &str,
    (size, resume): (u64, bool),
) -> Result<Summary> {
    let Some(existing) = terms.writing else {
        return Err(Error::failed(
            "this server is read-only (it was started without --writable)",
        ));
    };
    let place = root.place(path)?;
    let part = at_work(link, |peer_gone| {
        Part::open(place, resume, size, existing, peer_gone)
    })?;
    let (have, grant) = (
        Have {
            len: part.len(),
            hash: part.hash(),
        },
        link.grant()?,
    );
    link.send(&Message::Ready { have, grant })?;
    match expect_message(link)? {
        Message::Start {
            offset,
            size: start_size,
            mode,
        } if start_size == size => {
            let start = Start { offset, size, mode };
            receive(link, part, start, &grant, &mut |_, _| {})
        }
        other => Err(unexpected(&other)),
    }
}

/// Performs work that may take long (hashing, syncing) in another thread. Meanwhile sends `Working`
/// to the peer, which would otherwise close the connection. If the peer closes the connection, sets
/// the flag that `work` gets, so that the work ends early and the client's place becomes free.
pub(super) fn at_work<T: Send>(
    link: &mut impl Link,
    work: impl FnOnce(&AtomicBool) -> Result<T> + Send,
) -> Result<T> {
    at_work_every(link, WORKING_INTERVAL, work)
}

/// Like [`at_work`]; sends `Working` once per `interval`.
pub(super) fn at_work_every<T: Send>(
    link: &mut impl Link,
    interval: Duration,
    work: impl FnOnce(&AtomicBool) -> Result<T> + Send,
) -> Result<T> {
    link.set_peer_waiting(true);
    let peer_gone = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        let (done, finished) = channel::<()>();
        let stop = &peer_gone;
        let worker = std::thread::Builder::new()
            .name("work".to_owned())
            .spawn_scoped(scope, move || {
                // Dropped when `work` ends, also by a panic.
                let _done = done;
                work(stop)
            })
            .context("cannot start a thread")?;
        let mut sent = Ok(());
        while sent.is_ok() && finished.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            sent = link.send(&Message::Working);
        }
        peer_gone.store(sent.is_err(), Ordering::Relaxed);
        let outcome = worker
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        sent.and(outcome)
    });
    link.set_peer_waiting(false);
    outcome
}

/// The peer's slots, as the sender uses them.
#[derive(Debug)]
struct Window {
    /// By slot.
    in_use: Vec<bool>,
    free: Vec<u16>,
}

impl Window {
    fn new(grant: &Grant) -> Self {
        // Reversed, so that slot 0 is used first.
        Self {
            in_use: vec![false; usize::from(grant.slots)],
            free: (0..grant.slots).rev().collect(),
        }
    }

    fn take(&mut self) -> Option<u16> {
        let slot = self.free.pop()?;
        if let Some(in_use) = self.in_use.get_mut(usize::from(slot)) {
            *in_use = true;
        }
        Some(slot)
    }

    /// Frees a slot.
    ///
    /// # Errors
    /// Fails if the slot is not in use. A peer that frees a slot twice could make this end
    /// overwrite data that it has not read.
    fn free(&mut self, slot: u16) -> Result<()> {
        match self.in_use.get_mut(usize::from(slot)) {
            Some(in_use @ true) => *in_use = false,
            _ => {
                return Err(Error::failed(format!(
                    "the peer freed slot {slot}, which was not in use"
                )));
            }
        }
        self.free.push(slot);
        Ok(())
    }
}

fn transmit(
    link: &mut impl Link,
    source: &mut Source,
    offset: u64,
    grant: &Grant,
    progress: Progress<'_>,
) -> Result<Summary> {
    let size = source.size();
    let mut window = Window::new(grant);
    let max_len = link.max_write_len(grant)?;
    let mut position = offset;
    progress(position, size);
    while position < size {
        // Process pending messages first, so that an error of the peer stops the copy immediately.
        while let Some(m) = link.try_recv()? {
            handle_free(&mut window, &m)?;
        }
        let slot = loop {
            match window.take() {
                Some(slot) => break slot,
                None => handle_free(&mut window, &expect_message(link)?)?,
            }
        };
        let rest = u32::try_from(size - position).unwrap_or(u32::MAX);
        let len = rest.min(max_len);
        link.write_slot(grant, slot, len, &mut |buf| source.fill(buf))?;
        link.send(&Message::Filled {
            slot,
            offset: position,
            len,
        })?;
        position += u64::from(len);
        progress(position, size);
    }
    let hash = source.hash();
    link.send(&Message::Finish { hash })?;
    loop {
        match expect_message(link)? {
            Message::Done => {
                return Ok(Summary {
                    size,
                    resumed: offset,
                    hash,
                });
            }
            m => handle_free(&mut window, &m)?,
        }
    }
}

/// Handles a message that arrives while data are sent: `Free` or `Working`.
fn handle_free(window: &mut Window, m: &Message) -> Result<()> {
    match m {
        Message::Free { slot } => window.free(*slot),
        Message::Working => Ok(()),
        other => Err(unexpected(other)),
    }
}

/// The fields of [`Message::Start`].
#[derive(Debug, Clone, Copy)]
struct Start {
    offset: u64,
    size: u64,
    mode: u32,
}

fn receive(
    link: &mut impl Link,
    mut part: Part,
    start: Start,
    grant: &Grant,
    progress: Progress<'_>,
) -> Result<Summary> {
    if start.offset != part.len() {
        if start.offset != 0 {
            return Err(Error::failed(
                "the peer wants to continue at an invalid offset",
            ));
        }
        part.restart()?;
    }
    if start.offset > start.size {
        return Err(Error::failed(
            "the peer wants to continue after the end of the file",
        ));
    }
    progress(part.len(), start.size);
    loop {
        match expect_message(link)? {
            Message::Filled { slot, offset, len } => {
                let missing = start.size.saturating_sub(part.len());
                if slot >= grant.slots
                    || len == 0
                    || len > grant.slot_size
                    || offset != part.len()
                    || u64::from(len) > missing
                {
                    return Err(Error::failed("the peer announced data that do not fit"));
                }
                link.read_slot(slot, len, &mut |data| part.append(data))?;
                link.send(&Message::Free { slot })?;
                progress(part.len(), start.size);
            }
            Message::Finish { hash } => {
                if part.len() != start.size {
                    return Err(Error::failed(
                        "the peer finished before the end of the file",
                    ));
                }
                at_work(link, |_| part.commit(&hash, start.mode))?;
                link.send(&Message::Done)?;
                return Ok(Summary {
                    size: start.size,
                    resumed: start.offset,
                    hash,
                });
            }
            other => return Err(unexpected(&other)),
        }
    }
}

/// Returns the peer's error if the peer has sent one, otherwise `own`. A peer that fails sends the
/// reason and closes the connection. Our own sending may fail before we have read the reason.
fn prefer_peer_error(link: &mut impl Link, own: Error) -> Error {
    // At most this many messages can be in flight.
    for _ in 0..2 * usize::from(MAX_SLOTS) + 4 {
        match link.try_recv() {
            Ok(Some(Message::Error { text })) => return peer_error(&text),
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => break,
        }
    }
    own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_slots_in_use_are_freed() {
        let grant = Grant {
            stag: 1,
            base: 0,
            slot_size: 1,
            slots: 2,
        };
        let mut window = Window::new(&grant);
        assert!(window.free(0).is_err());
        assert_eq!(
            [window.take(), window.take(), window.take()],
            [Some(0), Some(1), None]
        );
        assert!(window.free(2).is_err());
        window.free(1).unwrap();
        assert!(window.free(1).is_err());
        assert_eq!((window.take(), window.take()), (Some(1), None));
        // `Working` frees nothing, and `Done` is not expected now.
        handle_free(&mut window, &Message::Working).unwrap();
        assert_eq!(window.take(), None);
        assert!(handle_free(&mut window, &Message::Done).is_err());
        handle_free(&mut window, &Message::Free { slot: 0 }).unwrap();
        assert_eq!(window.take(), Some(0));
    }
}
