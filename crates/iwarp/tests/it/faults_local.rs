//! Tests of programs that misuse their own objects: completion queues that overflow, queue pairs
//! destroyed in every state, memory deregistered under traffic, invalid local keys, and memory
//! windows bound while the receive side is busy.

use crate::common::wire::{Hello, Wire, initiator, responder};
use crate::common::*;
use iwarp::runtime::cm::{CmEventKind, CmId};
use iwarp::runtime::{AsyncEventKind, CqError, Cqe, RecvWr, SendOp, SendWr, State, WcStatus};
use iwarp::{Access, Error};
use iwarp_proto::mpa::startup::FrameKind;
use iwarp_proto::rdmap::Opcode;
use iwarp_rnic::memory::{Stag, WindowType};
use iwarp_rnic::{Bind, PostError};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn cq_overflow_ends_only_its_qps() {
    //= rfc5040 section 8.1.1
    //= type=test
    //# 10. An RNIC MUST ensure that if a CQ overflows, any Streams that do not use
    //# the CQ MUST remain unaffected.
    others_are_served(|| {
        let server = Server::new(V4, &config());
        let mut wire = Wire::connect(server.address);
        wire.write(&Hello::enhanced(true, false).octets(FrameKind::Request));
        let end = server.end_with(server.request(), None, 16, 4);
        end.id.accept(&parameters(b"")).unwrap();
        wire.read_hello(FrameKind::Reply);
        wire.rtr_write();
        end.expect(CmEventKind::Established);
        let mem = end.mem(64);
        for wr_id in 0..8 {
            end.post_recv(wr_id, &[mem.sge(8)]);
        }
        // The fifth completion does not fit. The stream is reset, because no further completion can
        // be reported.
        for _ in 0..5 {
            wire.untagged(Opcode::SEND, b"12345678");
        }
        end.expect_disconnected();
        let mut kinds = Vec::new();
        let cq = loop {
            match end.ctx.async_event(Some(LIMIT)).unwrap().kind {
                AsyncEventKind::CqError(cq) => break cq,
                other => kinds.push(other),
            }
        };
        assert!(cq.is_same(&end.cq), "{kinds:?}");
        // Completions from before the overflow can still be polled. After them, every poll reports
        // the overflow.
        let mut out = [Cqe::default(); 16];
        assert_eq!(end.cq.poll(&mut out).unwrap(), 4);
        for (wr_id, cqe) in out[..4].iter().enumerate() {
            assert_eq!((cqe.wr_id, cqe.status), (wr_id as u64, WcStatus::Success));
        }
        for _ in 0..2 {
            assert_eq!(end.cq.poll(&mut out), Err(CqError::Overflow));
        }
        wire.ends_with_reset();
        // Another completion queue of the same device still works.
        let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
        let mem = Mem::new(&end.ctx, end.pd, 64);
        end.post_recv(1, &[mem.sge(8)]);
        wire.untagged(Opcode::SEND, b"12345678");
        end.expect_status(1, WcStatus::Success);
    });
}

#[test]
fn destroyed_qp_does_not_overflow_cq() {
    others_are_served(|| {
        let (client, server) = pair(V4, &config());
        let small = server.ctx.create_cq(8, None).unwrap();
        let mem = server.mem(64);
        let busy = queue_pair(&server.ctx, server.pd, &small, None, 4);
        busy.modify(State::Init).unwrap();
        let sges = [mem.sge(8)];
        for wr_id in 0..100 {
            busy.post_recv(&[RecvWr { wr_id, sges: &sges }]).unwrap();
        }
        busy.destroy();
        assert_eq!(small.poll(&mut [Cqe::default()]), Ok(0));
        // Posting to the destroyed queue pair fails.
        let failed = busy
            .post_recv(&[RecvWr {
                wr_id: 1,
                sges: &sges,
            }])
            .unwrap_err();
        assert!(matches!(
            (failed.accepted(), failed.error()),
            (0, Error::Post(PostError::InvalidState))
        ));
        assert!(
            server
                .ctx
                .try_async_event()
                .is_none_or(|e| !matches!(e.kind, AsyncEventKind::CqError(_)))
        );
        drop(client);
    });
}

/// Stops the other threads of a test when dropped. If the test panics, the scope would otherwise
/// wait for those threads forever.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Returns the rounds of a test with disturbing threads: at least 10 and at most `most`. After ten
/// rounds, no round starts later than after one second, so that the test is short on a busy
/// machine.
fn rounds(most: u32) -> impl Iterator<Item = u32> {
    let start = Instant::now();
    (0..most).take_while(move |i| *i < 10 || start.elapsed() < Duration::from_secs(1))
}

/// The stages of a connection, in order. The test ends the queue pair or identifier in each of
/// them.
const STAGES: [&str; 8] = [
    "reset",
    "init",
    "resolved",
    "connecting",
    "requested",
    "connected",
    "traffic",
    "disconnected",
];

/// Returns `true` if a connection in `stage` has passed the stage `other`, or is in it.
fn reached(stage: &str, other: &str) -> bool {
    let at = |name: &str| STAGES.iter().position(|stage| *stage == name).unwrap();
    at(stage) >= at(other)
}

/// Moves our end to `stage`. Returns the server's end, if it exists then.
fn advance(stage: &str, end: &End, mem: &Mem, server: &Server) -> Option<End> {
    let reached = |other: &str| reached(stage, other);
    if reached("init") {
        end.qp.modify(State::Init).unwrap();
        end.post_recv(1, &[mem.sge(8)]);
    }
    if reached("resolved") {
        end.resolve(server.address);
    }
    if reached("connecting") {
        end.id.connect(&parameters(b"")).unwrap();
    }
    let far = reached("requested").then(|| server.end(server.request()));
    if let Some(far) = far.as_ref().filter(|_| reached("connected")) {
        far.id.accept(&parameters(b"")).unwrap();
        end.expect(CmEventKind::Established);
        far.expect(CmEventKind::Established);
    }
    if reached("traffic") {
        for wr_id in 2..20 {
            end.post(wr_id, SendOp::Send, &[mem.sge(1 << 16)]);
        }
    }
    if let Some(far) = far.as_ref().filter(|_| reached("disconnected")) {
        far.qp.abort();
        end.expect_disconnected();
    }
    far
}

/// The ways in which the test ends a connection.
const ACTS: [&str; 5] = ["destroy", "disconnect", "abort", "modify", "id first"];

fn end_connection(act: &str, stage: &str, end: &mut End) {
    match act {
        "destroy" => end.qp.destroy(),
        "disconnect" => {
            let disconnected = end.id.disconnect();
            assert_eq!(
                disconnected.is_ok(),
                reached(stage, "connected"),
                "{stage}: {disconnected:?}"
            );
            end.qp.disconnect();
        }
        "abort" => end.qp.abort(),
        "modify" => end.qp.modify(State::Error).unwrap(),
        _ => {
            end.id.destroy();
            end.qp.destroy();
        }
    }
}

#[test]
fn every_state_can_be_ended() {
    others_are_served(|| {
        for (stage, act) in STAGES.iter().flat_map(|s| ACTS.map(|act| (*s, act))) {
            let server = Server::new(V4, &config());
            let mut end = End::new(V4, &config());
            let mem = end.mem(1 << 16);
            let far = advance(stage, &end, &mem, &server);
            let start = Instant::now();
            end_connection(act, stage, &mut end);
            if let Some(far) = far.filter(|_| stage == "connected" || stage == "traffic") {
                far.expect_disconnected();
            }
            if reached(stage, "init") && (act == "abort" || act == "modify") {
                // Each posted request completes: one receive, and the Sends of the stage
                // "traffic".
                let posted = if reached(stage, "traffic") { 19 } else { 1 };
                for _ in 0..posted {
                    end.poll();
                }
                assert!(end.cq.is_empty());
            }
            assert!(start.elapsed() < LIMIT, "{stage}, {act}");
            drop(end);
            drop(server);
        }
    });
}

#[test]
fn reset_qp_connects_again() {
    others_are_served(|| {
        let mut end = End::new(V4, &config());
        for round in 0..3 {
            let mut wire = responder(&end, &Hello::enhanced(true, false));
            let mem = end.mem(64);
            end.post_recv(1, &[mem.sge(8)]);
            wire.untagged(Opcode::SEND, b"12345678");
            end.expect_status(1, WcStatus::Success);
            // At the reset, a received Send is held for lack of a receive, and our own Sends fill
            // the socket.
            wire.untagged(Opcode::SEND, b"held");
            until("held", || end.qp.counters().receiver_not_ready > round);
            let big = end.mem(1 << 20);
            for wr_id in 0..20 {
                end.post(wr_id, SendOp::Send, &[big.sge(1 << 20)]);
            }
            end.qp.modify(State::Reset).unwrap();
            end.expect(CmEventKind::Disconnected);
            assert_eq!(end.qp.state(), State::Reset);
            while end.cq.poll(&mut [Cqe::default()]).unwrap() > 0 {}
            drop(wire);
            // The next round connects the same queue pair with a new identifier.
            end.id.destroy();
            end.id = CmId::create(&end.channel, Some(&end.ctx));
        }
    });
}

#[test]
fn deregistration_under_traffic() {
    others_are_served(|| {
        let (client, server) = pair(V4, &config());
        let theirs = server.mem(1 << 20);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _stop = Stop(&stop);
            // One thread changes the memory tables all the time, while the two ends of the
            // connection work in two others.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for ctx in [&client.ctx, &server.ctx] {
                        let pd = ctx.allocate_pd();
                        let mem = Mem::new(ctx, pd, 4096);
                        ctx.deregister(mem.stag).unwrap();
                    }
                }
            });
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _ = server.cq.poll(&mut [Cqe::default()]);
                }
            });
            let mine = client.mem(1 << 20);
            for _ in rounds(300) {
                let (remote_addr, rkey) = (theirs.addr(), theirs.stag);
                client.post(1, SendOp::Write { remote_addr, rkey }, &[mine.sge(1 << 18)]);
                client.post(2, SendOp::Read { remote_addr, rkey }, &[mine.sge(1 << 18)]);
                client.expect_status(1, WcStatus::Success);
                client.expect_status(2, WcStatus::Success);
            }
        });
        // Now deregister the memory that the peer is reading.
        let mine = client.mem(1 << 20);
        let (remote_addr, rkey) = (theirs.addr(), theirs.stag);
        for wr_id in 0..16 {
            client.post(
                wr_id,
                SendOp::Read { remote_addr, rkey },
                &[mine.sge(1 << 20)],
            );
        }
        server.ctx.deregister(theirs.stag).unwrap();
        // Reads that were answered earlier succeed. The first refused Read and all later ones fail.
        let all: Vec<_> = (0..16).map(|_| client.poll().status).collect();
        let good = all.iter().take_while(|s| **s == WcStatus::Success).count();
        assert!(
            all[good..].iter().all(|s| *s != WcStatus::Success),
            "{all:?}"
        );
        assert!(good == 16 || client.qp.state() == State::Error);
        let late = SendWr::new(99, SendOp::Read { remote_addr, rkey }, &[]).signaled();
        let _ = client.qp.post_send(&[late]);
        client.qp.destroy();
        server.qp.destroy();
    });
}

#[test]
fn local_keys_are_checked() {
    others_are_served(|| {
        for op in ["send", "write", "read sink", "receive"] {
            let (client, server) = pair(V4, &config());
            let (mine, theirs) = (client.mem(4096), server.mem(4096));
            let read_only = Mem::with(&client.ctx, client.pd, 4096, Access::empty());
            let gone = client.mem(4096);
            client.ctx.deregister(gone.stag).unwrap();
            let (remote_addr, rkey) = (theirs.addr(), theirs.stag);
            match op {
                "send" => client.post(1, SendOp::Send, &[gone.sge(64)]),
                "write" => client.post(1, SendOp::Write { remote_addr, rkey }, &[gone.sge(4096)]),
                "read sink" => {
                    client.post(1, SendOp::Read { remote_addr, rkey }, &[read_only.sge(64)]);
                }
                _ => {
                    client.post_recv(1, &[read_only.sge(64)]);
                    server.post(7, SendOp::Send, &[theirs.sge(64)]);
                }
            }
            client.post_recv(2, &[mine.sge(64)]);
            client.expect_status(1, WcStatus::LocalProtection);
            client.expect_status(2, WcStatus::Flushed);
            client.expect_disconnected();
            server.expect_disconnected();
            assert_eq!(server.qp.counters().terminates_received, 1, "{op}");
        }
    });
}

#[test]
fn binds_ignore_busy_receive_side() {
    others_are_served(|| {
        let (client, server) = pair(V4, &config());
        let (mine, theirs) = (client.mem(1 << 16), server.mem(1 << 16));
        let stop = AtomicBool::new(false);
        let window = server
            .ctx
            .allocate_window(WindowType::Type2, server.pd)
            .unwrap();
        std::thread::scope(|scope| {
            let _stop = Stop(&stop);
            // One thread sends Writes without a pause. The progress thread or this thread, which
            // also binds, reads them.
            scope.spawn(|| {
                let (remote_addr, rkey) = (theirs.addr(), theirs.stag);
                while !stop.load(Ordering::Relaxed) {
                    client.post(1, SendOp::Write { remote_addr, rkey }, &[mine.sge(1 << 16)]);
                    client.expect_status(1, WcStatus::Success);
                }
            });
            let mut stag = window;
            for _ in rounds(500) {
                let new_stag = stag.with_key(stag.key().wrapping_add(1));
                let bind = Bind {
                    mw_stag: stag,
                    new_stag,
                    mr_stag: Stag(theirs.stag),
                    addr: theirs.addr(),
                    len: 64,
                    access: Access::REMOTE_WRITE,
                };
                server.post(2, SendOp::Bind(bind), &[]);
                server.expect_status(2, WcStatus::Success);
                server.post(3, SendOp::LocalInvalidate { stag: new_stag }, &[]);
                server.expect_status(3, WcStatus::Success);
                stag = new_stag;
            }
        });
    });
}
