//! What a `tracing` subscriber sees of a connection.

use crate::common::wire::{Hello, Wire};
use crate::common::{alone, until};
use iwarp_proto::mpa::startup::{Flags, FrameKind};
use std::fmt::{Debug, Write as _};
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Collects the events up to level DEBUG, one line each: message and fields.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::DEBUG
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        self.0.lock().unwrap().push(line.message + &line.fields);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl Log {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// With requests in flight, so that each of them could be one more line.
#[test]
fn lost_connection_is_logged_once() {
    alone("lost_connection_is_logged_once", || {
        let log = Log::default();
        tracing::subscriber::set_global_default(log.clone()).unwrap();
        let listener = iwarp::listen("127.0.0.1:0").bind().unwrap();
        let mut wire = Wire::connect(listener.local_addr());
        let hello = Hello::client_server();
        wire.write(&hello.octets(FrameKind::Request));
        let accepting = std::thread::spawn(move || listener.accept().wait().unwrap());
        wire.crc = wire.read_hello(FrameKind::Reply).flags.has(Flags::CRC);
        // In this model, the initiator sends first.
        wire.rtr_write();
        let connection = accepting.join().unwrap();
        let receives = [connection.recv(), connection.recv(), connection.recv()];
        let peer = connection.peer_addr().unwrap();
        log.take();

        wire.reset();
        for receive in receives {
            receive.wait().unwrap_err();
        }
        connection
            .closed()
            .wait()
            .unwrap()
            .into_result()
            .unwrap_err();
        drop(connection);
        until("the log has a line", || !log.0.lock().unwrap().is_empty());
        let lines = log.take();
        assert_eq!(lines.len(), 1, "{lines:#?}");
        let line = &lines[0];
        assert!(line.starts_with("connection lost "), "{line}");
        assert!(line.contains(&format!("peer={peer}")), "{line}");
        assert!(line.contains("error=Connection reset by peer"), "{line}");
    });
}
