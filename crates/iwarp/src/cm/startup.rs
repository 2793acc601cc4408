//! The common parts of the initiator's and the responder's MPA start-up.

use super::id::ConnectionParameters;
use super::{reminders, xrc};
use crate::config::Config;
use crate::conn::qp::QueuePair;
use crate::crc::crc32c_append;
use crate::objects::context::Context;
use crate::objects::hooks::Observer;
use crate::sys::connect::Ends;
use crate::sys::stream::TcpStream;
use iwarp_proto::ddp::{Header, Stag, UntaggedHeader};
use iwarp_proto::mpa::framing::{FpduOptions, MarkerClock, encode_fpdu};
use iwarp_proto::mpa::negotiate::{Agreed, LocalParams, RtrSet};
use iwarp_proto::mpa::startup::{MAX_FRAME_LEN, NO_NEGOTIATION};
use iwarp_proto::rdmap::{Opcode, Terminate, TerminateCode};
use iwarp_rnic::qp::{QpConfig, StreamConfig};
use iwarp_rnic::startup::{Ending, Failure, Limits, Reading};
use std::io::{self, ErrorKind};

/// A connection in MPA start-up.
#[derive(Debug)]
pub(super) struct Starting {
    pub(super) stream: TcpStream,
    pub(super) ends: Ends,
    pub(super) flow: Option<Box<dyn Observer>>,
}

/// The result of reading a frame.
pub(super) enum Read<T> {
    Frame(T),
    /// The frame is not complete.
    NeedMore,
    /// The peer has closed its direction of the stream.
    Closed,
    /// The octets are not an MPA frame, or the frame cannot be accepted.
    Bad(Failure),
    /// The stream broke.
    Broken(io::Error),
}

impl Starting {
    /// Reads the frame, and no octet after it, because later octets are FPDUs.
    pub(super) fn read<S: Reading>(&self, session: &mut S) -> Read<S::Outcome> {
        //= rfc5044 section 7.1
        //# MPA requires that the Consumer MUST activate MPA, and any TCP enhancements
        //# for MPA, on a TCP half connection at the same location in the octet stream
        //# at both the sender and the receiver.
        let mut buf = [0u8; MAX_FRAME_LEN];
        loop {
            let wanted = session.wanted().min(buf.len());
            if wanted == 0 {
                return Read::NeedMore;
            }
            match self.stream.recv(&mut buf[..wanted]) {
                Ok(0) => return Read::Closed,
                Ok(n) => {
                    if let Some(flow) = &self.flow {
                        flow.received(&[&buf[..n]]);
                    }
                    match session.received(&buf[..n]) {
                        Ok(received) => {
                            if let Some(outcome) = received.outcome {
                                return Read::Frame(outcome);
                            }
                        }
                        Err(failure) => return Read::Bad(failure),
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Read::NeedMore,
                Err(e) => return Read::Broken(e),
            }
        }
    }

    /// Writes a frame with one system call, so that TCP sends it in one segment. Some receivers
    /// require this.
    pub(super) fn write(&self, frame: &[u8]) -> io::Result<()> {
        let n = self.stream.send(frame)?;
        self.written(frame, n)
    }

    /// Checks that all octets of a frame were written, and records them.
    pub(super) fn written(&self, frame: &[u8], n: usize) -> io::Result<()> {
        if let Some(flow) = &self.flow {
            flow.sent(&[io::IoSlice::new(&frame[..n])]);
        }
        if n == frame.len() {
            Ok(())
        } else {
            // This does not happen, because the send buffer of a new socket holds kilobytes.
            Err(io::Error::new(
                ErrorKind::WriteZero,
                "the socket accepted only a part of an MPA frame",
            ))
        }
    }

    /// Ends the stream of a failed start-up. The caller then drops the stream.
    pub(super) fn end(&self, ending: Ending, crc: bool) {
        match ending {
            Ending::Close => {}
            Ending::Reset => self.stream.abort(),
            Ending::Terminate(code) => self.terminate(code, crc),
        }
    }

    /// Sends a Terminate and closes gracefully.
    fn terminate(&self, code: TerminateCode, crc: bool) {
        let mut ulpdu = [0u8; 64];
        let header = Header::Untagged(UntaggedHeader {
            last: true,
            opcode: Opcode::TERMINATE,
            invalidate_stag: Stag(0),
            qn: 2,
            msn: 1,
            mo: 0,
        });
        let header_len = header.emit(&mut ulpdu);
        let len = header_len + Terminate::new(code).emit(&mut ulpdu[header_len..]);
        let mut fpdu = [0u8; 96];
        let options = FpduOptions {
            markers: false,
            crc: crc.then_some(crc32c_append as _),
        };
        if let Ok(n) = encode_fpdu(&ulpdu[..len], &options, &mut MarkerClock::new(), &mut fpdu) {
            let _ = self.write(&fpdu[..n]);
        }
        let _ = self.stream.shutdown_write();
    }
}

/// Returns the local parameters of the negotiation.
pub(super) fn local_params(
    ctx: &Context,
    p: &ConnectionParameters,
    qp: Option<&QpConfig>,
) -> LocalParams {
    let config = ctx.config();
    let max_ird = qp.map_or(iwarp_rnic::limits::MAX_IRD, |q| q.max_ird);
    let max_ord = qp.map_or(iwarp_rnic::limits::MAX_ORD, |q| q.max_ord);
    LocalParams {
        revision: config.mpa_revision,
        crc: config.crc,
        markers_rx: config.markers,
        ird: p.responder_resources.unwrap_or(max_ird).min(max_ird),
        ord: p.initiator_depth.unwrap_or(max_ord).min(max_ord),
        max_ird,
        max_ord,
        peer_to_peer: config.peer_to_peer,
        rtr_offer: RtrSet::WRITE_READ,
        ird_ord_negotiate: true,
    }
}

/// Returns the private data of a request or a reply: the program's private data, and that of our
/// extensions.
pub(super) fn private_data(qp: &QueuePair, p: &ConnectionParameters) -> Vec<u8> {
    let mut data = xrc::wrap(qp.xrc_end(), &p.private_data);
    if let Some(infiniband) = &p.infiniband {
        infiniband.append_to(&mut data);
    }
    data
}

/// Returns the ORD and IRD for the program. The negotiated IRD may be larger than the peer's ORD;
/// here it is not.
pub(super) fn depths(agreed: &Agreed) -> (u16, u16) {
    let least = |ours: u16, peers: u16| match peers {
        NO_NEGOTIATION => ours,
        peers => ours.min(peers),
    };
    (
        least(agreed.ord, agreed.peer_ird),
        least(agreed.ird, agreed.peer_ord),
    )
}

/// Returns the configuration of the queue pair's stream.
pub(super) fn stream_config(agreed: &Agreed, initiator: bool, ctx: &Context) -> StreamConfig {
    let reminders = match initiator {
        true => reminders::count_connection(),
        false => [None; 3],
    };
    let emss = ctx.config().mss.unwrap_or(536);
    limits(ctx.config()).stream(agreed, initiator, emss, reminders)
}

/// Returns the time limits of a start-up.
pub(super) const fn limits(config: &Config) -> Limits {
    Limits {
        connect: config.connect_timeout,
        reply: config.answer_timeout,
        request: config.handshake_timeout,
        first_fpdu: config.handshake_timeout,
        close: config.handshake_timeout,
        speak_first: config.speak_first,
    }
}

/// Starts to record a new connection, if the device records.
pub(super) fn record(ctx: &Context, ends: &Ends, active: bool) -> Option<Box<dyn Observer>> {
    let recorder = ctx.inner.hooks.recorder.as_ref()?;
    Some(recorder.connection(ends.local, ends.peer, active))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::testing;

    #[test]
    fn connection_is_captured_with_its_device() {
        let ends = Ends {
            local: "127.0.0.1:1".parse().unwrap(),
            peer: "127.0.0.1:2".parse().unwrap(),
        };
        let file = std::env::temp_dir().join(format!("iwarp-record-{}", std::process::id()));
        let recording = testing::context_with(Config {
            capture: Some(file.clone()),
            ..Config::default()
        });
        for active in [true, false] {
            assert!(record(&recording, &ends, active).is_some());
            assert!(record(&testing::context(), &ends, active).is_none());
        }
        drop(recording);
        std::fs::remove_file(file).unwrap();
    }
}
