//! Tests of connection set-up, of the end of connections, and of their settings.

use super::*;
use crate::device::Device;
use crate::testing;
use crate::verbs::{ProtectionDomain, QpInitAttr};
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::pin::{Pin, pin};
use std::task::{self, Poll};
use std::time::Instant;

/// Regression: a blocking `connect` gave up after 60 s, although the peer's program was allowed
/// more time.
#[test]
fn device_limits_expire_first() {
    for seconds in [0, 60, 3600, u64::MAX] {
        let limit = Duration::from_secs(seconds);
        let longer = |config: &Config| {
            let whole = set_up_limit(config);
            whole > limit || whole == Duration::MAX
        };
        let patient = [
            Config {
                answer_timeout: limit,
                ..Config::default()
            },
            Config {
                connect_timeout: limit,
                ..Config::default()
            },
        ];
        assert!(patient.iter().all(longer), "{limit:?}");
    }
}

const LIMIT: Duration = Duration::from_secs(20);

/// An MPA request of revision 1 without private data (RFC 5044 section 7.1.1).
const REQUEST: &[u8; 20] = b"MPA ID Req Frame\x40\x01\x00\x00";

fn wait_until(failure: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is() {
        assert!(Instant::now() < end, "{failure}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn queue_pair(ctx: &Context) -> QueuePair {
    let (pd, cq) = (ProtectionDomain::new(ctx), ctx.create_cq(4, None).unwrap());
    pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap()
}

fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut task::Context::from_waker(Waker::noop()))
}

/// Returns an established connection and its identifier.
fn connected(ctx: &Context) -> (ConnectedId, CmId) {
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, Some(ctx));
    id.write_event(CmEventKind::User(0), 0).unwrap();
    let event = CmEvent {
        kind: CmEventKind::Established,
        ..channel.try_next().unwrap()
    };
    let connection = ConnectedId::settle(OwnedId(id.clone()), channel, queue_pair(ctx), event);
    (connection.unwrap(), id)
}

#[test]
fn every_call_reports_the_end() {
    let (connection, id) = connected(&testing::context());
    for (status, wanted) in [(0, None), (libc::ECONNRESET, Some(libc::ECONNRESET))] {
        let ways: [&dyn Fn() -> Result<()>; 2] = [
            &|| connection.wait_disconnected(Some(LIMIT)),
            &|| match poll_once(pin!(connection.disconnected())) {
                Poll::Ready(end) => end,
                Poll::Pending => panic!("the event is pending"),
            },
        ];
        for ended in ways {
            id.write_event(CmEventKind::User(0), status).unwrap();
            let end = ended().map_err(|e| e.errno());
            assert_eq!(end.err(), wanted);
            assert!(connection.try_ended().is_none());
        }
        id.write_event(CmEventKind::User(0), status).unwrap();
        assert_eq!(connection.try_ended(), Some(status));
        assert!(connection.try_ended().is_none());
    }
}

#[test]
fn dropped_connection_destroys_identifier() {
    let (connection, id) = connected(&testing::context());
    id.write_event(CmEventKind::User(0), 0).unwrap();
    drop(connection);
    assert!(id.channel().is_empty());
    let late = id.write_event(CmEventKind::User(0), 0);
    assert!(matches!(late, Err(Error::InvalidArgument(_))));
}

#[test]
fn dropped_listener_rejects_pending_requests() {
    let listener = ListeningId::bind(&testing::context(), ([127, 0, 0, 1], 0).into()).unwrap();
    let address = listener.local_addr();
    let mut peer = TcpStream::connect(address).unwrap();
    peer.set_read_timeout(Some(LIMIT)).unwrap();
    peer.write_all(REQUEST).unwrap();
    wait_until("no request arrives", || !listener.channel.is_empty());
    drop(listener);
    let mut reply = [0; 20];
    peer.read_exact(&mut reply).unwrap();
    assert_eq!(&reply[..17], b"MPA ID Rep Frame\x60", "CRC, rejected");
    wait_until("the listener still listens", || {
        TcpStream::connect(address).is_err()
    });
}

/// An attempt uses the device's address as the source, unless the program sets another. Dropping
/// the future cancels the attempt.
#[test]
fn attempt_has_source_and_is_cancelled() {
    let device = testing::device_at(&["127.0.0.5"]);
    let ctx = Context::open(&device, Config::default()).unwrap();
    let connector = Connector::new(&ctx);
    let named = connector.clone().source(([127, 0, 0, 6], 0).into());
    for (connector, from) in [(connector, [127, 0, 0, 5]), (named, [127, 0, 0, 6])] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (mut peer, source) = {
            let mut attempt = pin!(connector.connect_async(address, queue_pair(&ctx)));
            assert!(poll_once(attempt.as_mut()).is_pending());
            listener.accept().unwrap()
        };
        assert_eq!(source.ip(), IpAddr::from(from));
        peer.set_read_timeout(Some(LIMIT)).unwrap();
        let end = peer.read_to_end(&mut Vec::new());
        assert!(!end.is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock));
    }
}

#[test]
fn failed_setups_have_errors() {
    use CmEventKind::{ConnectError, Disconnected, Established, Rejected, Unreachable};
    let ctx = testing::context();
    let (pd, cq) = (ProtectionDomain::new(&ctx), ctx.create_cq(4, None).unwrap());
    let settled = |kind, status, replied| {
        let channel = create_event_channel().unwrap();
        let id = CmId::create(&channel, Some(&ctx));
        let event = CmEvent {
            kind,
            status,
            id: id.clone(),
            listener: None,
            private_data: b"because".to_vec(),
            replied,
            responder_resources: None,
            initiator_depth: None,
            xrc: None,
            datagrams: None,
            service_status: 0,
            infiniband: None,
            _untaken: None,
        };
        let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
        ConnectedId::settle(OwnedId(id), channel, qp, event)
    };
    let connection = settled(Established, 0, false).unwrap();
    assert_eq!(connection.private_data(), b"because");
    for (kind, status, replied, wanted) in [
        (Rejected, libc::ECONNREFUSED, true, "because"),
        (Rejected, libc::ECONNREFUSED, false, "os 111"),
        (Unreachable, libc::ETIMEDOUT, false, "time"),
        (Unreachable, libc::EHOSTUNREACH, false, "os 113"),
        (ConnectError, libc::EPROTO, false, "handshake"),
        (ConnectError, libc::ENOSPC, false, "unsupported"),
        (ConnectError, libc::ETIMEDOUT, false, "os 110"),
        (Disconnected, 0, false, "lost"),
    ] {
        let reported = match settled(kind, status, replied).unwrap_err() {
            Error::Rejected(data) => String::from_utf8(data).unwrap(),
            Error::TimedOut(_) => "time".into(),
            Error::Handshake(_) => "handshake".into(),
            Error::Unsupported(_) => "unsupported".into(),
            Error::ConnectionLost(_) => "lost".into(),
            Error::Io(e) => format!("os {}", e.raw_os_error().unwrap()),
            other => panic!("{other:?}"),
        };
        assert_eq!(reported, wanted, "{kind:?} {status}");
    }
}

/// Each builder call changes only its own setting, in any order. For other settings, those of the
/// device apply.
#[test]
fn listener_settings_combine_in_any_order() {
    let mut config = Config::default();
    (config.admission.half_open, config.admission.connections) = (7, 8);
    let device = config.admission.clone();
    let ctx = Context::open(&Device::by_address([127, 0, 0, 1].into()).unwrap(), config);
    let ctx = ctx.unwrap();
    let few = Admission {
        connections: 3,
        ..Admission::default()
    };
    let peers: Networks = "192.0.2.0/24".parse().unwrap();
    let with_peers = |admission: &Admission| Admission {
        peers: peers.clone(),
        ..admission.clone()
    };
    let builder = || ListeningId::builder(&ctx);
    for (made, admission, backlog) in [
        (builder(), device.clone(), 0),
        (builder().peers(peers.clone()), with_peers(&device), 0),
        (builder().admission(few.clone()), few.clone(), 0),
        (
            builder()
                .admission(few.clone())
                .peers(peers.clone())
                .backlog(9),
            with_peers(&few),
            9,
        ),
        (
            builder()
                .backlog(9)
                .peers(peers.clone())
                .admission(few.clone()),
            few.clone(),
            9,
        ),
    ] {
        assert_eq!((made.admission, made.backlog), (admission, backlog));
    }
}

#[test]
fn source_sets_address_and_port() {
    let ctx = testing::context();
    let (pd, cq) = (ProtectionDomain::new(&ctx), ctx.create_cq(4, None).unwrap());
    let listener = ListeningId::bind(&ctx, ([127, 0, 0, 1], 0).into()).unwrap();
    // No other test uses this address, so the port remains free.
    let free = TcpListener::bind("127.0.0.77:0")
        .unwrap()
        .local_addr()
        .unwrap();
    for source in [free, SocketAddr::new(free.ip(), 0)] {
        let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
        let connector = Connector::new(&ctx).source(source);
        let from = std::thread::scope(|scope| {
            scope.spawn(|| connector.connect(listener.local_addr(), qp).map(drop));
            let request = listener.accept(None).unwrap();
            let from = request.peer_addr().unwrap();
            request.reject(b"").unwrap();
            from
        });
        assert_eq!(from.ip(), source.ip());
        assert!([0, from.port()].contains(&source.port()), "{from} {source}");
    }
}
