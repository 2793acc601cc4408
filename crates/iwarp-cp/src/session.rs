//! Both ends of a copy, over any transport with granted slots and short messages.
//!
//! This module does not depend on RDMA and trusts no message of a peer: offsets must be the
//! expected ones, lengths must fit the slot and the file, and slots must be used and freed in turn.
//! See `protocol.rs` for the order of messages.

use crate::auth::{Secret, client_handshake, server_handshake};
use crate::confine::{Place, Root};
use crate::part::{Existing, Hash, Part, Source};
use crate::protocol::{Grant, Have, MAX_SLOTS, Message};
use crate::transport::{Link, STILL_THERE, expect, peer_error, receive_message, unexpected};
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
/// The rules of a server.
#[derive(Debug, Default)]
pub(crate) struct Terms {
    /// What to do with existing files when clients write; `None` if clients may only read.
    pub(crate) writing: Option<Existing>,
    /// The secret that clients must prove to know, if any.
    pub(crate) secret: Option<Secret>,
}

/// Client: performs the handshake, which precedes [`put`] and [`get`].
///
/// # Errors
/// Fails if the versions differ, if one end requires a proof that the other cannot give, or if
/// the connection breaks.
pub(crate) fn begin(link: &mut impl Link, secret: Option<&Secret>) -> Result<()> {
    client_handshake(link, secret).map_err(|e| cause(link, e))
}

/// Client: writes a file below the served directory.
pub(crate) fn put(
    link: &mut impl Link,
    mut source: Source,
    request: Request<'_>,
    progress: Progress<'_>,
) -> Result<Summary> {
    put_inner(link, &mut source, request, progress).map_err(|e| cause(link, e))
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
    let (have, grant) = match expect(link)? {
        Message::Ready { have, grant } => (have, grant),
        other => return Err(unexpected(&other)),
    };
    let offset = at_work(link, |gone| source.resume(have.len, &have.hash, gone))?;
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
    get_inner(link, place, request, progress).map_err(|e| cause(link, e))
}

fn get_inner(
    link: &mut impl Link,
    place: Place,
    request: Request<'_>,
    progress: Progress<'_>,
) -> Result<Summary> {
    // The user's own file is replaced, as by `cp` and `scp`.
    let part = at_work(link, |gone| {
        Part::open(place, request.resume, u64::MAX, Existing::Replace, gone)
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
    match expect(link)? {
        Message::Start { offset, size, mode } => {
            receive(link, part, Offer { offset, size, mode }, &grant, progress)
        }
        other => Err(unexpected(&other)),
    }
}

/// Server: serves one client until it closes. A failure is reported to the client and ends the
/// connection.
pub(crate) fn serve(
    link: &mut impl Link,
    root: &Root,
    terms: &Terms,
    log: &mut dyn FnMut(&str, Summary),
) -> Result<()> {
    let outcome = serve_requests(link, root, terms, log);
    if let Err(e) = &outcome {
        // The client may have gone; then the report fails, too.
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
                let done = take(link, root, terms, &path, (size, resume))?;
                log(&path, done);
            }
            Message::Get { have, grant, path } => {
                let mut source = Source::new(root.read(&path)?)?;
                let offset = at_work(link, |gone| source.resume(have.len, &have.hash, gone))?;
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
fn take(
    link: &mut impl Link,
    root: &Root,
    terms: &Terms,
    path: &str,
    (size, resume): (u64, bool),
) -> Result<Summary> {
    let Some(existing) = terms.writing else {
        return Err(Error::failed(
            "this server only gives files and takes none (it was started without --writable)",
        ));
    };
    let place = root.place(path)?;
    let part = at_work(link, |gone| Part::open(place, resume, size, existing, gone))?;
    let (have, grant) = (
        Have {
            len: part.len(),
            hash: part.hash(),
        },
        link.grant()?,
    );
    link.send(&Message::Ready { have, grant })?;
    match expect(link)? {
        Message::Start {
            offset,
            size: again,
            mode,
        } if again == size => {
            let offer = Offer { offset, size, mode };
            receive(link, part, offer, &grant, &mut |_, _| {})
        }
        other => Err(unexpected(&other)),
    }
}

/// Performs work that may take long (hashing, syncing) in another thread, and sends `Working` to
/// the peer meanwhile, which otherwise would close the connection. If the peer has gone, sets the
/// flag that `work` gets, so that the work ends early and frees the client's place.
pub(super) fn at_work<T: Send>(
    link: &mut impl Link,
    work: impl FnOnce(&AtomicBool) -> Result<T> + Send,
) -> Result<T> {
    at_work_every(link, STILL_THERE, work)
}

/// Like [`at_work`]; sends a message once per `pause`.
pub(super) fn at_work_every<T: Send>(
    link: &mut impl Link,
    pause: Duration,
    work: impl FnOnce(&AtomicBool) -> Result<T> + Send,
) -> Result<T> {
    link.peer_waits(true);
    let gone = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        let (done, finished) = channel::<()>();
        let stop = &gone;
        let worker = std::thread::Builder::new()
            .name("work".to_owned())
            .spawn_scoped(scope, move || {
                // Dropped at the end, also on a panic.
                let _done = done;
                work(stop)
            })
            .context("cannot start a thread")?;
        let mut told = Ok(());
        while told.is_ok() && finished.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
            told = link.send(&Message::Working);
        }
        gone.store(told.is_err(), Ordering::Relaxed);
        let outcome = worker
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        told.and(outcome)
    });
    link.peer_waits(false);
    outcome
}

/// The peer's slots, as the sender uses them.
#[derive(Debug)]
struct Window {
    taken: Vec<bool>,
    free: Vec<u16>,
}

impl Window {
    fn new(grant: &Grant) -> Self {
        // Reversed, so that slot 0 is used first.
        Self {
            taken: vec![false; usize::from(grant.slots)],
            free: (0..grant.slots).rev().collect(),
        }
    }

    fn take(&mut self) -> Option<u16> {
        let slot = self.free.pop()?;
        if let Some(t) = self.taken.get_mut(usize::from(slot)) {
            *t = true;
        }
        Some(slot)
    }

    /// # Errors
    /// Fails if the peer frees an unused slot: reusing it could overwrite data that it has not
    /// read.
    fn give_back(&mut self, slot: u16) -> Result<()> {
        match self.taken.get_mut(usize::from(slot)) {
            Some(t @ true) => *t = false,
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
    let chunk = link.chunk(grant)?;
    let mut at = offset;
    progress(at, size);
    while at < size {
        // Process pending messages first: an error of the peer stops the copy now.
        while let Some(m) = link.try_recv()? {
            freed(&mut window, &m)?;
        }
        let slot = loop {
            match window.take() {
                Some(slot) => break slot,
                None => freed(&mut window, &expect(link)?)?,
            }
        };
        let len = u32::try_from(size - at).unwrap_or(u32::MAX).min(chunk);
        link.write_slot(grant, slot, len, &mut |buf| source.fill(buf))?;
        link.send(&Message::Filled {
            slot,
            offset: at,
            len,
        })?;
        at += u64::from(len);
        progress(at, size);
    }
    let hash = source.hash();
    link.send(&Message::Finish { hash })?;
    loop {
        match expect(link)? {
            Message::Done => {
                return Ok(Summary {
                    size,
                    resumed: offset,
                    hash,
                });
            }
            m => freed(&mut window, &m)?,
        }
    }
}

fn freed(window: &mut Window, m: &Message) -> Result<()> {
    match m {
        Message::Free { slot } => window.give_back(*slot),
        Message::Working => Ok(()),
        other => Err(unexpected(other)),
    }
}

/// The announcement of the sender of the data.
#[derive(Debug, Clone, Copy)]
struct Offer {
    offset: u64,
    size: u64,
    mode: u32,
}

fn receive(
    link: &mut impl Link,
    mut part: Part,
    offer: Offer,
    grant: &Grant,
    progress: Progress<'_>,
) -> Result<Summary> {
    if offer.offset != part.len() {
        if offer.offset != 0 {
            return Err(Error::failed(
                "the peer wants to continue at an invalid offset",
            ));
        }
        part.restart()?;
    }
    if offer.offset > offer.size {
        return Err(Error::failed(
            "the peer wants to continue after the end of the file",
        ));
    }
    progress(part.len(), offer.size);
    loop {
        match expect(link)? {
            Message::Filled { slot, offset, len } => {
                let left = offer.size.saturating_sub(part.len());
                if slot >= grant.slots
                    || len == 0
                    || len > grant.slot_size
                    || offset != part.len()
                    || u64::from(len) > left
                {
                    return Err(Error::failed("the peer announced data that do not fit"));
                }
                link.read_slot(slot, len, &mut |data| part.append(data))?;
                link.send(&Message::Free { slot })?;
                progress(part.len(), offer.size);
            }
            Message::Finish { hash } => {
                if part.len() != offer.size {
                    return Err(Error::failed(
                        "the peer finished before the end of the file",
                    ));
                }
                at_work(link, |_| part.commit(&hash, offer.mode))?;
                link.send(&Message::Done)?;
                return Ok(Summary {
                    size: offer.size,
                    resumed: offer.offset,
                    hash,
                });
            }
            other => return Err(unexpected(&other)),
        }
    }
}

/// Returns the peer's error if it has sent one, otherwise `mine`. A peer that fails sends the
/// reason and closes; our own sending may fail before that reason has been read.
fn cause(link: &mut impl Link, mine: Error) -> Error {
    // At most this many messages can be in flight.
    for _ in 0..2 * usize::from(MAX_SLOTS) + 4 {
        match link.try_recv() {
            Ok(Some(Message::Error { text })) => return peer_error(&text),
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => break,
        }
    }
    mine
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that frees a slot twice, or an unused one, could have unread data overwritten.
    #[test]
    fn slot_in_use_is_freed_once() {
        let grant = Grant {
            stag: 1,
            base: 0,
            slot_size: 1,
            slots: 2,
        };
        let mut window = Window::new(&grant);
        assert!(window.give_back(0).is_err());
        assert_eq!(
            [window.take(), window.take(), window.take()],
            [Some(0), Some(1), None]
        );
        assert!(window.give_back(2).is_err());
        window.give_back(1).unwrap();
        assert!(window.give_back(1).is_err());
        assert_eq!((window.take(), window.take()), (Some(1), None));
        // `Working` frees nothing, and `Done` is not expected now.
        freed(&mut window, &Message::Working).unwrap();
        assert_eq!(window.take(), None);
        assert!(freed(&mut window, &Message::Done).is_err());
        freed(&mut window, &Message::Free { slot: 0 }).unwrap();
        assert_eq!(window.take(), Some(0));
    }
}
