//! Fixtures for unit tests of the runtime's objects.

use crate::config::Config;
use crate::conn::attach::Handover;
use crate::conn::attributes::QpAttributes;
use crate::conn::link::{Open, Socket};
use crate::conn::qp::QpState;
use crate::conn::qp::QueuePair;
use crate::device::{Device, DeviceAddress, gid_of};
use crate::objects::context::Context;
use crate::objects::cq::CompletionQueue;
use crate::sys::connect::Ends;
use crate::sys::stream::TcpStream;
use crate::ud::UdAddress;
use crate::ud::UdAttributes;
use crate::ud::UdQueuePair;
use crate::ud::UdSendWr;
use iwarp_proto::ddp::{Header, Stag, UntaggedHeader};
use iwarp_proto::rdmap::Opcode;
use iwarp_rnic::SendFlags;
use iwarp_rnic::qp::{State, StreamConfig, StreamTimes};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Waits until `is_so` returns `true`. Panics with `failure` after 20 seconds.
pub(crate) fn until(failure: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < end, "{failure}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn context() -> Context {
    context_with(Config::default())
}

/// Opens the loopback device with these settings.
pub(crate) fn context_with(config: Config) -> Context {
    let device = Device::by_address([127, 0, 0, 1].into()).unwrap();
    Context::open(&device, config).unwrap()
}

/// Returns the loopback device with these addresses instead of its own.
pub(crate) fn device_at(addresses: &[&str]) -> Device {
    let mut device = Device::by_address([127, 0, 0, 1].into()).unwrap();
    let address = |(place, text): (u32, &&str)| DeviceAddress {
        ip: text.parse().unwrap(),
        scope_id: 0,
        place: Some(place),
    };
    device.addresses = (0..).zip(addresses).map(address).collect();
    device
}

/// Returns attributes with room for one request per direction, and a new protection domain.
pub(crate) fn attributes(
    ctx: &Context,
    send: &CompletionQueue,
    recv: &CompletionQueue,
) -> QpAttributes {
    QpAttributes {
        pd: ctx.allocate_pd(),
        send_cq: send.clone(),
        recv_cq: recv.clone(),
        srq: None,
        unreliable: false,
        max_send_wr: 1,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
        signal_all: false,
        max_ird: 0,
        max_ord: 0,
    }
}

pub(crate) fn queue_pair(
    ctx: &Context,
    send: &CompletionQueue,
    recv: &CompletionQueue,
) -> QueuePair {
    ctx.create_qp(&attributes(ctx, send, recv)).unwrap()
}

/// Returns a datagram queue pair on the loopback device, ready to send, with room for four requests
/// of up to four bytes of inline data.
pub(crate) fn datagram_queue_pair() -> UdQueuePair {
    datagram_queue_pair_of(&context())
}

pub(crate) fn datagram_queue_pair_of(ctx: &Context) -> UdQueuePair {
    let cq = ctx.create_cq(4, None).unwrap();
    let attributes = UdAttributes {
        pd: ctx.allocate_pd(),
        send_cq: cq.clone(),
        recv_cq: cq,
        srq: None,
        max_send_wr: 4,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 4,
        signal_all: false,
    };
    let qp = ctx.create_ud_qp(&attributes).unwrap();
    for to in [State::Init, State::Rtr, State::Rts] {
        qp.modify(to).unwrap();
    }
    qp
}

/// Posts `count` datagrams of four octets from the queue pair to itself, from and to `ip`.
pub(crate) fn post_to_itself(qp: &UdQueuePair, ip: IpAddr, flags: SendFlags, count: usize) {
    let wr = UdSendWr {
        wr_id: 1,
        immediate: None,
        flags: flags | SendFlags::INLINE,
        to: UdAddress::new(gid_of(ip), gid_of(ip), 0, 0).unwrap(),
        remote_qp: qp.num(),
        remote_qkey: 0,
        sges: &[],
        inline: &[b"self"],
    };
    qp.post_send(&vec![wr; count]).unwrap();
}

/// Connects `qp` as the initiator, without CRCs, to a TCP socket. Returns the socket.
pub(crate) fn connected(qp: &QueuePair) -> std::net::TcpStream {
    connected_for(qp, None).unwrap()
}

/// The peer's first FPDU: an empty Send without CRC.
pub(crate) const EMPTY_SEND: [u8; 24] = {
    let mut octets = [0; 24];
    (octets[1], octets[2], octets[3], octets[15]) = (18, 0x41, 0x43, 1);
    octets
};

/// Connects `qp` as [`connected`] does, with a stream for `epoch`.
pub(crate) fn connected_for(
    qp: &QueuePair,
    epoch: Option<u64>,
) -> crate::Result<std::net::TcpStream> {
    attached(qp, epoch, true)
}

pub(crate) fn connected_as_responder(qp: &QueuePair) -> std::net::TcpStream {
    attached(qp, None, false).unwrap()
}

fn attached(
    qp: &QueuePair,
    epoch: Option<u64>,
    initiator: bool,
) -> crate::Result<std::net::TcpStream> {
    let (handover, peer) = unattached(epoch, initiator);
    qp.inner.attach(handover)?;
    Ok(peer)
}

/// Returns a stream that can be attached to a queue pair, and the peer's socket.
pub(crate) fn unattached(epoch: Option<u64>, initiator: bool) -> (Handover, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ours.set_nonblocking(true).unwrap();
    let ends = Ends {
        local: ours.local_addr().unwrap(),
        peer: ours.peer_addr().unwrap(),
    };
    let config = StreamConfig {
        initiator,
        crc: false,
        markers_tx: false,
        markers_rx: false,
        ird: 0,
        ord: 0,
        rtr: None,
        rtr_send_expected: false,
        emss: 1460,
        times: StreamTimes::NONE,
    };
    let handover = Handover {
        infiniband: None,
        stream: TcpStream::from_socket(ours.into()).unwrap(),
        ends,
        watched: None,
        config,
        flow: None,
        cm: None,
        epoch,
    };
    (handover, listener.accept().unwrap().0)
}

pub(crate) fn open(g: &mut QpState) -> &mut Open {
    g.link.open_mut().expect("a connection")
}

pub(crate) fn link(qp: &QueuePair) -> Arc<Socket> {
    qp.inner
        .state
        .lock()
        .link
        .socket()
        .cloned()
        .expect("a connection")
}

/// Returns the queue pair's socket. The progress thread does not watch it any more.
pub(crate) fn unwatched_link(qp: &QueuePair) -> Arc<Socket> {
    let link = link(qp);
    link.engine.pause(&link.stream);
    link
}

/// Resets an unwatched connection from the peer's end, without sending anything.
pub(crate) fn break_off(link: &Socket, peer: std::net::TcpStream) {
    let end = socket2::SockRef::from(&peer);
    end.set_linger(Some(Duration::ZERO)).unwrap();
    drop(peer);
    until("the connection is not reset", || link.stream.is_hung_up());
}

/// Returns the stream's first FPDU: a Send without CRC. The payload's length is a multiple of four
/// octets.
pub(crate) fn send_fpdu(payload: &[u8]) -> Vec<u8> {
    send_fpdu_of(1, payload)
}

/// Returns the FPDU of [`send_fpdu`] with this message sequence number.
pub(crate) fn send_fpdu_of(msn: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header::Untagged(UntaggedHeader {
        last: true,
        opcode: Opcode::SEND,
        invalidate_stag: Stag(0),
        qn: 0,
        msn,
        mo: 0,
    });
    let len = header.len() + payload.len();
    let mut octets = vec![0; 2 + header.len()];
    octets[..2].copy_from_slice(&(len as u16).to_be_bytes());
    header.emit(&mut octets[2..]);
    octets.extend_from_slice(payload);
    assert_eq!(octets.len() % 4, 0, "padding is needed");
    octets.extend_from_slice(&[0; 4]);
    octets
}
