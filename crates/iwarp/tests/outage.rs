//! Connections that end during a network outage: messages whose requests have completed still arrive, and the peer learns of the
//! end. A peer that never comes back is noticed.
//!
//! Each test runs itself again in a network namespace of its own. One of its threads is in a second namespace, and a pair of
//! virtual network cards connects the two. The kernel removes all of it when the test's process ends. Where namespaces are not
//! allowed, the tests are skipped; with `IWARP_REQUIRE_NAMESPACES=1` they fail.

mod common;

use common::wire::{Hello, Wire};
use common::*;
use iwarp::raw::cm::CmEventKind;
use iwarp::{Blame, Config, Cqe, SendOp, State, WcStatus};
use iwarp_proto::mpa::startup::FrameKind;
use iwarp_proto::rdmap::Opcode;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

const NEAR: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 7, 1));
const FAR: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 7, 2));
/// Environment variable that is set for the copy of this program in its namespace.
const INSIDE: &str = "IWARP_TEST_OUTAGE_INSIDE";

/// Two connected network namespaces: the calling thread is in the near one, a helper thread in the far one.
struct Net {
    /// Work for the thread in the far namespace.
    far: Sender<Box<dyn FnOnce() + Send>>,
}

/// Runs the command `ip` in the namespace of this thread.
fn ip(args: &str) {
    let out = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(out.status.success(), "ip {args}: {out:?}");
}

impl Net {
    fn new() -> Self {
        let (far, work) = channel::<Box<dyn FnOnce() + Send>>();
        let (tell, place) = channel();
        std::thread::spawn(move || {
            // SAFETY: a new namespace concerns this thread only.
            let status = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
            let thread = std::fs::read_link("/proc/thread-self").unwrap();
            tell.send(format!("/proc/{}/ns/net", thread.display()))
                .unwrap();
            work.into_iter().for_each(|job| job());
        });
        let place = place.recv().unwrap();
        ip(&format!(
            "link add near type veth peer name far netns {place}"
        ));
        ip(&format!("addr add {NEAR}/24 dev near"));
        ip("link set lo up");
        ip("link set near up");
        let net = Self { far };
        net.at_far(|| {
            ip(&format!("addr add {FAR}/24 dev far"));
            ip("link set far up");
        });
        net
    }

    /// Runs `job` in the far namespace and returns its result. Sockets and devices that it opens belong to that namespace.
    fn at_far<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> R {
        let (tell, result) = channel();
        let job = move || tell.send(job()).unwrap();
        self.far.send(Box::new(job)).unwrap();
        result.recv().unwrap()
    }

    /// Runs `during` while the network is out.
    fn outage<R>(&self, during: impl FnOnce() -> R) -> R {
        ip("link set near down");
        let result = during();
        ip("link set near up");
        result
    }

    /// Returns a connection: the initiator in the near namespace, the responder in the far one.
    fn pair(&self, config: &Config) -> (End, End) {
        // The first end starts the progress thread, which inherits this thread's namespace.
        let near = End::new(NEAR, config);
        let server = self.at_far({
            let config = config.clone();
            move || Server::new(FAR, &config)
        });
        near.connect(server.address, b"");
        let far = server.accept();
        near.expect(CmEventKind::Established);
        far.expect(CmEventKind::Established);
        (near, far)
    }
}

/// Returns a command that runs its arguments in a network namespace of their own. Users other than root get a user namespace,
/// too, because only root may create network namespaces.
fn namespace() -> Command {
    let mut command = Command::new("unshare");
    command.arg("--net");
    // SAFETY: no condition.
    if unsafe { libc::geteuid() } != 0 {
        command.args(["--user", "--map-root-user"]);
    }
    let paths = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    command.env("PATH", paths);
    command
}

/// Runs `body`, the body of the test `name`, in namespaces of its own.
fn inside(name: &str, body: impl FnOnce(&Net)) {
    if std::env::var_os(INSIDE).is_some() {
        let _guard = Watchdog::new();
        return body(&Net::new());
    }
    // The probe does everything that the test needs permission for.
    let probe =
        "ip link add near type veth peer name far && ip link set near up && unshare --net true";
    let out = namespace().args(["sh", "-c", probe]).output();
    let obstacle = match out {
        Ok(out) if out.status.success() => None,
        Ok(out) => Some(String::from_utf8_lossy(&out.stderr).trim().to_owned()),
        Err(e) => Some(format!("unshare: {e}")),
    };
    if let Some(reason) = obstacle {
        let required = std::env::var_os("IWARP_REQUIRE_NAMESPACES").is_some_and(|v| v == "1");
        assert!(!required, "no network namespaces: {reason}");
        println!("skipped: no network namespaces: {reason}");
        return;
    }
    let out = namespace()
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", name])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    let err = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{text}{err}");
    assert!(text.contains("1 passed"), "{text}{err}");
}

/// The linger time, and the unit in which outages are measured.
const BRIEF: Duration = Duration::from_millis(1000);

/// A configuration in which a silent peer is never given up.
fn patient() -> Config {
    let mut c = config();
    c.linger = BRIEF;
    c.peer_timeout = None;
    c
}

/// The ways to end a connection after which messages of completed requests still arrive.
#[derive(Debug, Clone, Copy)]
enum Way {
    Disconnect,
    Error,
    Reset,
    Destroy,
}

const WAYS: [Way; 4] = [Way::Disconnect, Way::Error, Way::Reset, Way::Destroy];

impl Way {
    fn end(self, end: &End) {
        match self {
            Self::Disconnect => end.id.disconnect().unwrap(),
            Self::Error => end.qp.modify(State::Error).unwrap(),
            Self::Reset => end.qp.modify(State::Reset).unwrap(),
            Self::Destroy => end.qp.destroy(),
        }
    }
}

#[test]
fn completed_sends_arrive_after_an_outage() {
    inside("completed_sends_arrive_after_an_outage", |net| {
        let pairs = WAYS.map(|way| (way, net.pair(&patient())));
        let before = sockets();
        let memory = net.outage(|| {
            let memory = pairs.each_ref().map(|(way, (near, far))| {
                let (from, to) = (near.mem(8), far.mem(8));
                from.set(0, 77);
                far.post_recv(1, &[to.sge(8)]);
                near.post(1, SendOp::Send, &[from.sge(8)]);
                near.expect_status(1, WcStatus::Success);
                way.end(near);
                (from, to)
            });
            // No acknowledgement can come, so the descriptors are closed after the linger time. A reset here would discard the
            // Sends.
            until("the connections are let go", || {
                sockets() + WAYS.len() <= before
            });
            std::thread::sleep(BRIEF);
            memory
        });
        for ((way, (_near, far)), (_, to)) in pairs.iter().zip(memory) {
            println!("{way:?}");
            assert_eq!(far.expect_status(1, WcStatus::Success).byte_len, 8);
            assert_eq!(to.word(0), 77, "{way:?}");
            assert_eq!(far.expect_disconnected().status, 0, "{way:?}");
        }
    });
}

/// The peer has sent something during the outage, too. It may arrive before our own Send has left. If it met a closed socket,
/// the kernel would answer with a reset, which discards our Send.
#[test]
fn completed_sends_arrive_though_both_ends_have_sent() {
    inside("completed_sends_arrive_though_both_ends_have_sent", |net| {
        let mut c = patient();
        c.peer_timeout = config().peer_timeout;
        let pairs = [0; 6].map(|_| net.pair(&c));
        let memory = net.outage(|| {
            // The peer sends first, so that its TCP also retransmits first.
            let memory = pairs.each_ref().map(|(_, far)| {
                let (from, to) = (far.mem(8), far.mem(8));
                far.post_recv(1, &[to.sge(8)]);
                far.post(2, SendOp::Send, &[from.sge(8)]);
                far.expect_status(2, WcStatus::Success);
                (from, to)
            });
            std::thread::sleep(BRIEF / 5);
            let ours = pairs.each_ref().map(|(near, _)| near.mem(8));
            for (i, ((near, _), mem)) in pairs.iter().zip(&ours).enumerate() {
                near.post(1, SendOp::Send, &[mem.sge(8)]);
                near.expect_status(1, WcStatus::Success);
                WAYS[i % WAYS.len()].end(near);
            }
            std::thread::sleep(BRIEF * 3);
            (memory, ours)
        });
        for (_near, far) in &pairs {
            far.expect_status(1, WcStatus::Success);
            far.expect_disconnected();
        }
        drop(memory);
    });
}

#[test]
fn the_end_of_an_idle_connection_is_heard_after_an_outage() {
    inside(
        "the_end_of_an_idle_connection_is_heard_after_an_outage",
        |net| {
            let pairs = WAYS.map(|way| (way, net.pair(&patient())));
            let mut out = [Cqe::default(); 1];
            net.outage(|| {
                for (way, (near, _)) in &pairs {
                    way.end(near);
                }
                std::thread::sleep(BRIEF * 2);
            });
            for (way, (_near, far)) in &pairs {
                println!("{way:?}");
                assert_eq!(far.expect_disconnected().status, 0, "{way:?}");
                assert_eq!(far.cq.poll(&mut out), Ok(0), "{way:?}");
            }
        },
    );
}

#[test]
fn completed_sends_arrive_though_a_later_one_is_cut() {
    inside("completed_sends_arrive_though_a_later_one_is_cut", |net| {
        for way in [Way::Disconnect, Way::Error, Way::Destroy] {
            println!("{way:?}");
            let end = End::new(NEAR, &patient());
            let listener = net.at_far(|| TcpListener::bind((FAR, 0)).unwrap());
            end.connect(listener.local_addr().unwrap(), b"");
            let mut wire = Wire::new(listener.accept().unwrap().0);
            wire.read_hello(FrameKind::Request);
            wire.write(&Hello::enhanced(true, false).octets(FrameKind::Reply));
            end.expect(CmEventKind::Established);
            wire.expect(Opcode::WRITE);
            let (small, large) = (end.mem(8), end.mem(1 << 20));
            small.set(0, 77);
            let before = sockets();
            net.outage(|| {
                end.post(1, SendOp::Send, &[small.sge(8)]);
                end.expect_status(1, WcStatus::Success);
                // These are more than the socket takes, so the last FPDU in it is cut.
                for wr_id in 2..20 {
                    end.post(wr_id, SendOp::Send, &[large.sge(1 << 20)]);
                }
                way.end(&end);
                until("the connection is let go", || sockets() < before);
                std::thread::sleep(BRIEF);
            });
            // Our initiator sends empty Writes to a silent responder. Skip those.
            let first = std::iter::repeat_with(|| wire.recv())
                .find(|(header, _)| header.opcode() != Opcode::WRITE)
                .unwrap();
            assert_eq!(first.0.opcode(), Opcode::SEND);
            assert_eq!(first.1, 77u64.to_ne_bytes(), "{way:?}");
            // The stream ends inside a message, before all 18 MiB have come.
            let mut rest = Vec::new();
            let end = std::io::Read::read_to_end(&mut wire.socket, &mut rest);
            println!("{} octets more, then {end:?}", rest.len());
            assert!(rest.len() < 18 << 20);
        }
    });
}

#[test]
fn a_peer_that_has_vanished_is_noticed() {
    inside("a_peer_that_has_vanished_is_noticed", |net| {
        let mut c = config();
        c.peer_timeout = Some(Duration::from_secs(2));
        let idle = net.pair(&c);
        let busy = net.pair(&c);
        let unaware = net.pair(&patient());
        let memory = busy.0.mem(8);
        ip("link set near down");
        busy.0.post(1, SendOp::Send, &[memory.sge(8)]);
        busy.0.expect_status(1, WcStatus::Success);
        for end in [&idle.0, &idle.1, &busy.0, &busy.1] {
            assert_eq!(end.expect_disconnected().status, libc::ECONNRESET);
            assert_eq!(end.qp.fault().unwrap().blame, Blame::Transport);
        }
        for end in [&unaware.0, &unaware.1] {
            assert_eq!(end.qp.state(), State::Rts);
            assert!(end.channel.is_empty());
        }
    });
}
