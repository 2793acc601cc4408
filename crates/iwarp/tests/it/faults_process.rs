//! Tests of faults of a whole process: forks, exhausted descriptors, floods of connections, and
//! leaked resources. Each test runs in its own process, because it counts or limits the resources
//! of the process.

use crate::common::wire::{Hello, Wire, initiator, responder};
use crate::common::*;
use iwarp::runtime::cm::{CmEventKind, CmId};
use iwarp::runtime::create_event_channel;
use iwarp::verbs::{
    Context, Cqe, MemoryRegion, PostError, PostFailed, ProtectionDomain, QpInitAttr, QueuePair,
    RecvWr, SendOp, SendWr, WcStatus, cm,
};
use iwarp::{Access, Device, Error};
use iwarp_proto::mpa::startup::FrameKind;
use iwarp_proto::rdmap::{Opcode, TerminateCode};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};
use std::time::{Duration, Instant};

fn processor_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the structure is valid to write, and all zeros are a valid value.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let of = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec as u64) + Duration::from_micros(t.tv_usec as u64)
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}

#[test]
fn parent_and_child_work_after_fork() {
    alone("parent_and_child_work_after_fork", || {
        let mut healthy = Healthy::new(V4);
        healthy.check();
        let ctx = context(V4, &config());
        // SAFETY: no other thread of this process holds a lock now, because the progress thread
        // sleeps and the harness waits.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                Healthy::new(V4).check();
                // A device that was opened before the fork serves new connections.
                let channel = create_event_channel().unwrap();
                let id = CmId::create(&channel, Some(&ctx));
                id.bind((V4, 0).into()).unwrap();
                id.listen(1).unwrap();
                let end = End::new(V4, &config());
                end.connect(id.addresses().0.unwrap(), b"");
                expect(&channel, CmEventKind::ConnectRequest)
                    .id
                    .reject(b"")
                    .unwrap();
                end.expect(CmEventKind::Rejected);
                // The child drops its copy of the connection. That must not end the parent's
                // connection.
                drop(healthy);
            }));
            // SAFETY: `_exit` skips the test harness's exit handlers, which belong to the parent.
            unsafe { libc::_exit(i32::from(good.is_err())) };
        }
        let start = Instant::now();
        let mut status = 0;
        loop {
            healthy.check();
            // SAFETY: `status` is valid for writes, and the process is our child.
            match unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } {
                0 if start.elapsed() < LIMIT => {}
                0 => {
                    // SAFETY: the process is our child, and was not reaped yet.
                    unsafe { libc::kill(child, libc::SIGKILL) };
                    panic!("the child hangs");
                }
                got => break assert_eq!(got, child),
            }
        }
        assert_eq!(status, 0, "the child failed");
        // After a pause in polling, the parent's progress thread has to serve the connection.
        std::thread::sleep(Duration::from_millis(5));
        healthy.check();
        Healthy::new(V6).check();
    });
}

/// Waits for a child of this process, which must exit with 0.
fn child_succeeds(child: libc::pid_t) {
    let mut status = 0;
    // SAFETY: `status` is valid for writes, and the process is our child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed");
}

/// A child neither writes to nor reads from the stream of a queue pair that belongs to its parent.
#[test]
fn child_cannot_use_inherited_queue_pair() {
    alone("child_cannot_use_inherited_queue_pair", || {
        let (client, server) = pair(V4, &config());
        let (mine, theirs) = (client.mem(64), server.mem(64));
        server.post_recv(1, &[theirs.sge(8)]);
        client.post_recv(2, &[mine.sge(8)]);
        mine.set(1, 7);
        // SAFETY: the child takes none of the parent's locks, and ends with `_exit`.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let sges = [mine.sge(8)];
            let refused = |posted: Result<(), PostFailed>| {
                let invalid = |error: &Error| matches!(error, Error::Post(PostError::InvalidState));
                posted.is_err_and(|failed| invalid(failed.error()))
            };
            let send = SendWr::new(3, SendOp::Send, &sges).signaled();
            let receive = RecvWr {
                wr_id: 4,
                sges: &sges,
            };
            let good = refused(client.qp.post_send(&[send]))
                && refused(client.qp.post_recv(&[receive]))
                && client
                    .cq
                    .poll(&mut [Cqe::default()])
                    .is_ok_and(|polled| polled == 0);
            // SAFETY: `_exit` skips the test harness's exit handlers, which belong to the parent.
            unsafe { libc::_exit(i32::from(!good)) };
        }
        child_succeeds(child);
        let mut second = mine.sge(8);
        second.addr += 8;
        client.post(5, SendOp::Send, &[second]);
        client.expect_status(5, WcStatus::Success);
        server.expect_status(1, WcStatus::Success);
        assert_eq!(theirs.word(0), 7, "the parent's message, not the child's");
        server.post(6, SendOp::Send, &[theirs.sge(8)]);
        server.expect_status(6, WcStatus::Success);
        client.expect_status(2, WcStatus::Success);
        assert_eq!(mine.word(0), 7);
    });
}

/// Reads from the peer of `end` without a pause, so that a fork is likely to happen while some lock
/// is held.
fn read_for_ever(end: &End, theirs: &Mem) {
    let mine = end.mem(1 << 16);
    let read = SendOp::Read {
        remote_addr: theirs.addr(),
        rkey: theirs.stag,
    };
    loop {
        end.post(1, read, &[mine.sge(1 << 16)]);
        end.expect_status(1, WcStatus::Success);
    }
}

/// A child inherits every lock in its state at the time of the fork. A locked lock stays locked
/// forever in the child, because its holder does not exist there. Therefore dropping inherited
/// objects must not take a lock.
#[test]
fn child_forked_under_traffic_drops_inheritance() {
    alone("child_forked_under_traffic_drops_inheritance", || {
        let mut inherited = Some(Inherited::new());
        let (client, server) = {
            let both = inherited.as_mut().unwrap();
            (both.client.take().unwrap(), both.server.take().unwrap())
        };
        let (theirs, ctx) = (server.mem(1 << 16), server.ctx.clone());
        let registers = server.ctx.clone();
        std::thread::spawn(move || {
            let pd = ProtectionDomain::new(&registers);
            loop {
                drop(pd.reg_mr(64, Access::LOCAL_WRITE).unwrap());
            }
        });
        std::thread::spawn(move || read_for_ever(&client, &theirs));
        std::thread::spawn(move || {
            let mut none = [Cqe::default()];
            loop {
                assert_eq!(server.cq.poll(&mut none), Ok(0));
            }
        });
        for round in 0..150 {
            // SAFETY: the child only drops inherited objects, which takes no locks (this is what
            // the test checks), and ends with `_exit`.
            let child = unsafe { libc::fork() };
            assert!(child >= 0);
            if child == 0 {
                let stag = inherited.as_ref().unwrap().region.lkey();
                drop(inherited.take());
                // This call may fail to notice that the region belongs to the parent, but it must
                // not block forever. It may take a second, so only every tenth child makes it.
                if round % 10 == 0 {
                    let _ = ctx.deregister(stag);
                }
                // SAFETY: `_exit` skips the test harness's exit handlers, which belong to the
                // parent.
                unsafe { libc::_exit(0) };
            }
            let (start, mut status) = (Instant::now(), 0);
            // SAFETY: `status` is valid for writes, and the process is our child.
            while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
                if start.elapsed() > LIMIT {
                    // SAFETY: the process is our child, and was not reaped yet.
                    unsafe { libc::kill(child, libc::SIGKILL) };
                    panic!("the child hangs");
                }
                std::thread::sleep(Duration::from_micros(200));
            }
            assert_eq!(status, 0, "the child failed");
            // The parent's objects still exist.
            let parents = inherited.as_ref().unwrap();
            assert!(parents.ctx.region(parents.region.lkey()).is_some());
        }
        let parents = inherited.unwrap();
        let again = std::net::TcpStream::connect(parents.listener.local_addr());
        assert!(again.is_ok(), "the parent's listener is gone: {again:?}");
        parents.connection.disconnect().unwrap();
        parents.connection.wait_disconnected(Some(LIMIT)).unwrap();
    });
}

/// One object of each type that implements `Drop`.
struct Inherited {
    ctx: Context,
    region: MemoryRegion,
    connection: cm::ConnectedId,
    listener: cm::ListeningId,
    _unconnected: QueuePair,
    client: Option<End>,
    server: Option<End>,
}

impl Inherited {
    /// Creates all objects on the device context that serves the traffic between `client` and
    /// `server`.
    fn new() -> Self {
        let (client, server) = pair(V4, &config());
        let ctx = server.ctx.clone();
        let pd = ProtectionDomain::new(&ctx);
        let region = pd.reg_mr(1 << 16, Access::LOCAL_WRITE).unwrap();
        let listener = cm::ListeningId::bind(&ctx, (V4, 0).into()).unwrap();
        let qp = || {
            pd.create_qp(&QpInitAttr::new(&server.cq, &server.cq))
                .unwrap()
        };
        let peer = (qp(), listener.local_addr(), ctx.clone());
        let connecting = std::thread::spawn(move || {
            let connection = cm::Connector::new(&peer.2).connect(peer.1, peer.0);
            // The connection stays open until the process ends.
            std::mem::forget(connection.unwrap());
        });
        let request = listener.accept(Some(LIMIT)).unwrap();
        let connection = request.accept(qp(), &Default::default()).unwrap();
        connecting.join().unwrap();
        Self {
            _unconnected: qp(),
            ctx,
            region,
            connection,
            listener,
            client: Some(client),
            server: Some(server),
        }
    }
}

/// `Context::deregister` is safe to call for any key. After a call for the key of a `MemoryRegion`,
/// the region still frees its pages when it is dropped.
#[test]
fn pages_deregistered_by_key_are_freed() {
    alone("pages_deregistered_by_key_are_freed", || {
        const LEN: usize = 1 << 30;
        let ctx = context(V4, &config());
        let pd = ProtectionDomain::new(&ctx);
        let mapped = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let size = status.lines().find_map(|l| l.strip_prefix("VmSize:"));
            let size: usize = size.unwrap().trim_end_matches("kB").trim().parse().unwrap();
            size * 1024
        };
        for by_key in [false, true] {
            let before = mapped();
            let mr = pd.reg_mr(LEN, Access::LOCAL_WRITE).unwrap();
            assert!(mapped() >= before + LEN);
            if by_key {
                ctx.deregister(mr.lkey()).unwrap();
                mr.write_at(0, b"its pages are there as long as it is")
                    .unwrap();
            }
            drop(mr);
            assert!(mapped() < before + LEN / 2, "by key: {by_key}");
        }
    });
}

#[test]
fn descriptors_run_out_and_come_back() {
    alone("descriptors_run_out_and_come_back", || {
        let few = Rlimit {
            current: Some(128),
            maximum: Some(128),
        };
        setrlimit(Resource::Nofile, few).unwrap();
        let mut healthy = Healthy::new(V4);
        let server = Server::new(V4, &config());
        let end = End::new(V4, &config());
        end.resolve(server.address);
        let waiting = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let device = Device::by_address(V4).unwrap();
        let mut all = Vec::new();
        while let Ok(one) = waiting.try_clone() {
            all.push(one);
        }
        // Each call that needs a descriptor returns the error.
        let full = |e: Error| assert_eq!(e.errno(), libc::EMFILE, "{e}");
        full(Context::open(&device, config()).unwrap_err());
        full(create_event_channel().unwrap_err());
        full(end.ctx.create_channel().unwrap_err());
        full(
            CmId::create(&end.channel, Some(&end.ctx))
                .bind((V4, 0).into())
                .unwrap_err(),
        );
        end.id.connect(&parameters(b"")).unwrap();
        end.expect_failure(CmEventKind::ConnectError, libc::EMFILE);
        healthy.check();
        // A peer that connects now has to wait. In the meantime the listener must not use processor
        // time by repeated attempts to accept.
        waiting.connect(&server.address.into()).unwrap();
        let before = processor_time();
        std::thread::sleep(Duration::from_millis(400));
        let used = processor_time() - before;
        assert!(used < Duration::from_millis(100), "{used:?}");
        assert!(server.channel.is_empty());
        healthy.check();
        drop(all);
        let mut wire = Wire::new(waiting.into());
        wire.write(&Hello::enhanced(true, false).octets(FrameKind::Request));
        let accepted = server.accept();
        wire.read_hello(FrameKind::Reply);
        wire.rtr_write();
        accepted.expect(CmEventKind::Established);
        end.id.connect(&parameters(b"")).unwrap();
        let other = server.accept();
        end.expect(CmEventKind::Established);
        other.expect(CmEventKind::Established);
        healthy.check();
    });
}

/// RFC 5042 section 6.4.1: a lingering connection whose peer reads nothing is kept for a long time,
/// unless a listener needs its descriptor.
#[test]
fn closing_connection_frees_descriptor_for_listener() {
    alone("closing_connection_frees_descriptor_for_listener", || {
        let few = Rlimit {
            current: Some(128),
            maximum: Some(128),
        };
        setrlimit(Resource::Nofile, few).unwrap();
        let mut slow = config();
        slow.linger = LIMIT * 10;
        slow.handshake_timeout = LIMIT * 10;
        let server = Server::new(V4, &slow);
        let (wire, end) = initiator(&server, &Hello::enhanced(true, false));
        let mem = end.mem(16 << 20);
        end.post(
            1,
            SendOp::Write {
                rkey: 1,
                remote_addr: 0,
            },
            &[mem.sge(16 << 20)],
        );
        until("TCP takes no more", || {
            let before = end.qp.counters().tx_bytes;
            std::thread::sleep(Duration::from_millis(50));
            before > 0 && before == end.qp.counters().tx_bytes
        });
        let connected = open_files();
        drop(end);
        let waiting = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let mut all = Vec::new();
        while let Ok(one) = waiting.try_clone() {
            all.push(one);
        }
        assert!(connected + all.len() >= 128 - 4, "the stream is still open");
        waiting.connect(&server.address.into()).unwrap();
        let mut next = Wire::new(waiting.into());
        next.write(&Hello::enhanced(true, false).octets(FrameKind::Request));
        server.request().id.destroy();
        drop((all, wire));
    });
}

/// A rejected connection, and a connection whose peer has sent no request, are closed when a
/// listener needs their descriptors.
#[test]
fn failed_connections_free_descriptors_for_listener() {
    let name = "failed_connections_free_descriptors_for_listener";
    alone(name, || {
        let few = Rlimit {
            current: Some(128),
            maximum: Some(128),
        };
        setrlimit(Resource::Nofile, few).unwrap();
        let mut slow = config();
        slow.handshake_timeout = LIMIT * 10;
        let request = Hello::enhanced(true, false).octets(FrameKind::Request);
        // No descriptor of the first round may be closed during the second round, which counts
        // descriptors.
        let mut kept = Vec::new();
        for is_rejected in [true, false] {
            let server = Server::new(V4, &slow);
            let before = open_files();
            let mut old = Wire::connect(server.address);
            if is_rejected {
                old.write(&request);
                server.request().id.reject(b"").unwrap();
                old.read_hello(FrameKind::Reply);
            }
            until("it is accepted", || open_files() == before + 2);
            let waiting = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            let mut all = Vec::new();
            while let Ok(one) = waiting.try_clone() {
                all.push(one);
            }
            waiting.connect(&server.address.into()).unwrap();
            let mut next = Wire::new(waiting.into());
            next.write(&request);
            server.request().id.destroy();
            match is_rejected {
                true => assert!(old.ends()),
                false => old.ends_with_reset(),
            }
            drop(all);
            kept.push((server, next));
        }
    });
}

#[test]
fn silent_flood_admits_other_peers() {
    alone("silent_flood_admits_other_peers", || {
        let most = getrlimit(Resource::Nofile).maximum;
        assert!(
            most.is_none_or(|n| n >= 4096),
            "this test needs descriptors: {most:?}"
        );
        let mut healthy = Healthy::new(V4);
        let mut slow = config();
        slow.handshake_timeout = LIMIT * 10;
        let server = Server::new(V4, &slow);
        let mut flood: Vec<Wire> = (0..1100).map(|_| Wire::connect(server.address)).collect();
        // The listener resets the oldest connections. The youngest may still send a request.
        flood[0].ends_with_reset();
        healthy.check();
        for _ in 0..10 {
            let (mut wire, end) = initiator(&server, &Hello::enhanced(true, false));
            let mem = end.mem(8);
            end.post_recv(1, &[mem.sge(8)]);
            wire.untagged(Opcode::SEND, b"12345678");
            end.expect_status(1, WcStatus::Success);
        }
        let mut youngest = flood.pop().unwrap();
        youngest.write(&Hello::enhanced(true, false).octets(FrameKind::Request));
        server.request().id.destroy();
        drop(flood);
        healthy.check();
    });
}

#[test]
fn full_backlog_drains() {
    alone("full_backlog_drains", || {
        let mut healthy = Healthy::new(V4);
        let mut slow = config();
        slow.handshake_timeout = LIMIT * 10;
        let server = Server::new(V4, &slow);
        let request = Hello::enhanced(true, false).octets(FrameKind::Request);
        let mut peers = Vec::new();
        for _ in 0..220 {
            let mut wire = Wire::connect(server.address);
            wire.write(&request);
            peers.push(wire);
        }
        until("the backlog is full", || server.channel.len() >= 128);
        healthy.check();
        for _ in 0..220 {
            server.request().id.reject(b"").unwrap();
        }
        for wire in &mut peers {
            wire.read_hello(FrameKind::Reply);
            wire.fin();
            assert!(wire.ends());
        }
        healthy.check();
        let (_wire, _end) = initiator(&server, &Hello::enhanced(true, false));
    });
}

/// A listener keeps rejected connections open, but their number is limited to an eighth of the
/// descriptor limit.
#[test]
fn rejected_initiators_do_not_accumulate() {
    alone("rejected_initiators_do_not_accumulate", || {
        let few = Rlimit {
            current: Some(256),
            maximum: Some(256),
        };
        setrlimit(Resource::Nofile, few).unwrap();
        let mut healthy = Healthy::new(V4);
        let mut slow = config();
        slow.handshake_timeout = LIMIT * 10;
        let server = Server::new(V4, &slow);
        let request = Hello::enhanced(true, false).octets(FrameKind::Request);
        let mut rejected = Vec::new();
        for _ in 0..33 {
            let mut wire = Wire::connect(server.address);
            wire.write(&request);
            server.request().id.reject(b"").unwrap();
            wire.read_hello(FrameKind::Reply);
            rejected.push(wire);
        }
        // 32 stay open; the oldest one was closed.
        assert!(rejected[0].ends());
        for wire in &mut rejected[1..] {
            assert!(wire.stays_open(Duration::from_millis(5)));
        }
        healthy.check();
    });
}

#[test]
fn destroyed_connection_closes_without_peer() {
    let name = "destroyed_connection_closes_without_peer";
    alone(name, || {
        // The first connection opens sockets that the process keeps, so it is set up before
        // counting.
        let _other = Healthy::new(V4);
        let end = End::new(V4, &config());
        let before = sockets();
        let mut wire = responder(&end, &Hello::enhanced(true, false));
        assert_eq!(sockets(), before + 2, "one socket at each end");
        end.qp.destroy();
        assert!(wire.ends());
        until("its descriptor is closed", || sockets() == before + 1);
        drop(wire);
    });
}

#[test]
fn no_descriptors_are_leaked() {
    alone("no_descriptors_are_leaked", || {
        // The engine keeps its descriptors after the last connection, so it is started before
        // counting.
        Healthy::new(V4).check();
        until("the first connection is gone", || {
            let now = open_files();
            std::thread::sleep(Duration::from_millis(50));
            now == open_files()
        });
        std::thread::sleep(LINGER * 2);
        let before = open_files();
        for round in 0..20 {
            let server = Server::new(V4, &config());
            // A good connection that is disconnected, aborted, or dropped.
            let (client, accepted) = pair(V4, &config());
            match round % 3 {
                0 => client.id.disconnect().unwrap(),
                1 => accepted.qp.abort(),
                _ => {}
            }
            // A connection whose peer breaks the rules. The events of its queue pair are not read.
            let (mut wire, guilty) = initiator(&server, &Hello::enhanced(true, false));
            wire.write_op(1, 1, b"12345678");
            wire.expect_terminate(TerminateCode::DDP_TAGGED_INVALID_STAG);
            // A connection that cannot send, because its peer does not read.
            let stuck = End::new(V4, &config());
            let deaf = responder(&stuck, &Hello::enhanced(true, false));
            let mem = stuck.mem(1 << 20);
            for wr_id in 0..20 {
                stuck.post(wr_id, SendOp::Send, &[mem.sge(1 << 20)]);
            }
            // An incomplete MPA request, and a complete one that is not answered.
            let mut half = Wire::connect(server.address);
            half.write(b"MPA ID");
            let mut asks = Wire::connect(server.address);
            asks.write(&Hello::enhanced(true, false).octets(FrameKind::Request));
            let request = server.request();
            // An attempt to connect that is destroyed before it ends.
            let silent = std::net::TcpListener::bind((V4, 0)).unwrap();
            let trying = End::new(V4, &config());
            trying.connect(silent.local_addr().unwrap(), b"");
            if round % 2 == 0 {
                request.id.destroy();
            }
            drop((request, guilty, stuck, deaf, trying, client, accepted));
        }
        let start = Instant::now();
        while open_files() > before {
            assert!(
                start.elapsed() < LIMIT,
                "{} descriptors more than before",
                open_files() - before
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}

/// Before the process exits, delayed work is completed: the delayed end of a connection, and the
/// capture file.
#[test]
fn exit_waits_for_delayed_sends() {
    const NAME: &str = "exit_waits_for_delayed_sends";
    const PEER: &str = "TEST_PEER";
    const CAPTURE: &str = "TEST_CAPTURE";
    if let Ok(peer) = std::env::var(PEER) {
        let mut config = config();
        config.capture = std::env::var_os(CAPTURE).map(Into::into);
        let end = End::new(V4, &config);
        end.connect(peer.parse().unwrap(), b"");
        end.expect(CmEventKind::Established);
        return;
    }
    let _guard = Watchdog::new();
    let listener = std::net::TcpListener::bind((V4, 0)).unwrap();
    let peer = listener.local_addr().unwrap().to_string();
    let file = format!("iwarp-end-of-process-{}", std::process::id());
    let file = std::env::temp_dir().join(file);
    let variables = [(PEER, peer.as_str()), (CAPTURE, file.to_str().unwrap())];
    let ends_later = || {
        let mut wire = Wire::new(listener.accept().unwrap().0);
        wire.read_hello(FrameKind::Request);
        wire.write(&Hello::enhanced(true, false).octets(FrameKind::Reply));
        wire.expect(Opcode::WRITE);
        let apart = wire.stays_open(Duration::from_millis(20));
        assert!(wire.ends());
        apart
    };
    // On a busy machine this thread may check too late, so one success is enough.
    let apart = (0..20).any(|_| {
        std::thread::scope(|scope| {
            let ends_later = scope.spawn(ends_later);
            alone_with(NAME, &variables, || unreachable!("only for children"));
            ends_later.join().unwrap()
        })
    });
    assert!(apart);
    let recorded = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let request = b"MPA ID Req Frame";
    assert!(recorded.windows(request.len()).any(|part| part == request));
}
