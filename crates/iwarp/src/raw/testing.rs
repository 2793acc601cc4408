//! What unit tests of these objects begin with.

use super::qp::Handover;
use super::{CompletionQueue, Context, QpAttributes, QueuePair, UdAttributes, UdQueuePair};
use crate::config::Config;
use crate::device::{Device, DeviceAddress};
use crate::sys::connect::Ends;
use crate::sys::stream::TcpStream;
use iwarp_rnic::qp::{State, StreamConfig, StreamTimes};

/// On the loopback interface.
pub(crate) fn context() -> Context {
    context_with(Config::default())
}

/// The same with other settings.
pub(super) fn context_with(config: Config) -> Context {
    let device = Device::by_address([127, 0, 0, 1].into()).unwrap();
    Context::open(&device, config).unwrap()
}

/// The loopback device, as if it had these addresses.
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

/// Room for one request in either direction, and a protection domain of its own.
pub(super) fn attributes(
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

/// With these attributes.
pub(super) fn queue_pair(
    ctx: &Context,
    send: &CompletionQueue,
    recv: &CompletionQueue,
) -> QueuePair {
    ctx.create_qp(&attributes(ctx, send, recv)).unwrap()
}

/// For datagrams, on the loopback interface and ready to send, with room for four requests of up to four inline octets.
pub(super) fn datagram_queue_pair() -> UdQueuePair {
    let ctx = context();
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

/// Connects it, as the initiator, in full operation without CRCs. Returns the peer.
pub(super) fn connected(qp: &QueuePair) -> std::net::TcpStream {
    connected_for(qp, None).unwrap()
}

/// The same with a stream that was set up for this life of the queue pair.
pub(super) fn connected_for(
    qp: &QueuePair,
    life: Option<u64>,
) -> crate::Result<std::net::TcpStream> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ours.set_nonblocking(true).unwrap();
    let ends = Ends {
        local: ours.local_addr().unwrap(),
        peer: ours.peer_addr().unwrap(),
    };
    let config = StreamConfig {
        initiator: true,
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
        stream: TcpStream::from_socket(ours.into()).unwrap(),
        ends,
        watched: None,
        config,
        flow: None,
        cm: None,
        life,
    };
    qp.inner.attach(handover)?;
    Ok(listener.accept().unwrap().0)
}
