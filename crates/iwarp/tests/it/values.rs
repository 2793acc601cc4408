//! Tests of the attributes that objects report. Each attribute has a distinct value.

use crate::common::loopback;
use crate::common::loopback::{attributes, device, gid};
use iwarp::connection::Refusal;
use iwarp::runtime::{Context, QpAttributes, UdAttributes, XrcTargetAttributes};
use iwarp::verbs::{MemoryRegion, ProtectionDomain, State};
use iwarp::{Access, Config, Error, Options, RemoteRegion};
use iwarp_proto::ddp::Stag;
use iwarp_rnic::qp::XrcEnd;
use iwarp_rnic::{FastRegister, RecvWr};
use std::fs::File;
use std::os::fd::AsFd as _;

fn context() -> Context {
    Context::open(&device(), Config::default()).unwrap()
}

#[test]
fn a_context() {
    let (a, b) = (context(), context());
    assert!(a.is_same(&a.clone()) && !a.is_same(&b));
    assert_eq!(a.device().name, device().name);
    assert_eq!(a.config(), &Config::default());
    let (first, second) = (a.allocate_pd(), a.try_allocate_pd().unwrap());
    assert!(first != second && first != 0 && second != 0);
    let address = "127.0.0.1".parse().unwrap();
    assert_eq!(a.device().address(address).unwrap().gid(), gid());
    assert!(a.queue_pair(0).is_none() && a.try_async_event().is_none());
    assert!(a.async_events().is_empty());
    assert_eq!(a.async_events().len(), 0);
    let none = a.async_event(Some(std::time::Duration::from_millis(1)));
    assert!(matches!(none, Err(Error::TimedOut(_))));
}

#[test]
fn a_completion_queue() {
    let ctx = context();
    let channel = ctx.create_channel().unwrap();
    let (a, b) = (ctx.create_cq(5, Some(&channel)), ctx.create_cq(9, None));
    let (a, b) = (a.unwrap(), b.unwrap());
    assert!(a.channel().is_some() && b.channel().is_none());
    assert!(a.is_same(&a.clone()) && !a.is_same(&b));
    assert_eq!((a.capacity(), a.len(), a.is_empty()), (5, 0, true));
    assert_eq!((a.user_data(), b.user_data()), (0, 0));
    a.set_user_data(77);
    assert_eq!((a.user_data(), b.user_data()), (77, 0));
    a.resize(7).unwrap();
    assert_eq!(a.capacity(), 7);
    assert!(matches!(a.resize(0), Err(Error::InvalidArgument(_))));
    assert_eq!(a.capacity(), 7);

    // Connected queue pairs and datagram queue pairs are counted, each for one direction.
    let pd = ctx.allocate_pd();
    assert_eq!((a.queue_pairs(), b.queue_pairs()), (0, 0));
    let connected = |send, recv| {
        let one = attributes(pd, send, 1);
        let recv_cq = Clone::clone(recv);
        ctx.create_qp(&QpAttributes { recv_cq, ..one }).unwrap()
    };
    let (first, second) = (connected(&a, &b), connected(&a, &a));
    let datagrams = ctx.create_ud_qp(&ud_attributes(pd, &a)).unwrap();
    assert_eq!((a.queue_pairs(), b.queue_pairs()), (3, 1));
    first.destroy();
    assert_eq!((a.queue_pairs(), b.queue_pairs()), (2, 0));
    datagrams.destroy();
    second.destroy();
    assert_eq!(a.queue_pairs(), 0);

    // Flushed requests stay here until they are polled.
    let qp = connected(&a, &b);
    qp.modify(State::Init).unwrap();
    let receives = [RecvWr {
        wr_id: 3,
        sges: &[],
    }; 2];
    qp.post_recv(&receives).unwrap();
    qp.modify(State::Error).unwrap();
    assert_eq!((b.len(), b.is_empty()), (2, false));
    assert!(a.is_empty());
    let mut out = [Default::default(); 4];
    assert_eq!(b.take_ready(&mut out[..1]), Ok(1));
    assert_eq!((out[0].wr_id, out[0].qp_num), (3, qp.num()));
    assert_eq!(b.poll(&mut out), Ok(1));
    assert_eq!(b.poll(&mut out), Ok(0));
}

fn ud_attributes(pd: u32, cq: &iwarp::runtime::CompletionQueue) -> UdAttributes {
    UdAttributes {
        pd,
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        srq: None,
        max_send_wr: 8,
        max_recv_wr: 8,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
        signal_all: false,
    }
}

#[test]
fn queue_pairs() {
    let ctx = context();
    let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(16, None).unwrap());
    let want = attributes(pd, &cq, 3);
    let (a, b) = (ctx.create_qp(&want).unwrap(), ctx.create_qp(&want).unwrap());
    assert!(a.num() != b.num() && a.num() < 1 << 24 && a.num() > 1);
    assert!(a.is_same(&a.clone()) && !a.is_same(&b));
    assert!(ctx.queue_pair(a.num()).unwrap().is_same(&a));
    assert!(a.context().is_same(&ctx));
    assert_eq!(
        (a.state(), a.fault(), a.addresses()),
        (State::Reset, None, None)
    );
    assert_eq!(a.counters(), Default::default());
    assert_eq!((a.xrc_end(), a.xrc_domain().is_none()), (None, true));
    a.set_user_data(5);
    assert_eq!((a.user_data(), b.user_data()), (5, 0));
    let c = a.config();
    assert_eq!((c.qp_num, c.pd), (a.num(), pd));
    assert_eq!((c.max_send_wr, c.max_recv_wr, c.max_inline), (16, 16, 64));
    assert_eq!((c.max_ird, c.max_ord, c.shared_receive), (3, 3, false));
    assert!(matches!(a.modify(State::Sqd), Err(Error::InvalidState(_))));
    a.modify(State::Init).unwrap();
    assert_eq!((a.state(), b.state()), (State::Init, State::Reset));
    a.destroy();
    assert!(ctx.queue_pair(a.num()).is_none());
    assert!(ctx.queue_pair(b.num()).is_some());
    // An unreliable connection has no Reads, regardless of the attributes.
    let unreliable = true;
    let qp = ctx.create_qp(&QpAttributes { unreliable, ..want });
    let c = qp.unwrap().config();
    assert_eq!((c.max_ird, c.max_ord), (0, 0));

    let want = ud_attributes(pd, &cq);
    let (a, b) = (ctx.create_ud_qp(&want), ctx.create_ud_qp(&want));
    let (a, b) = (a.unwrap(), b.unwrap());
    assert!(a.num() != b.num() && a.is_same(&a.clone()) && !a.is_same(&b));
    assert!(a.context().is_same(&ctx));
    assert_eq!((a.pd(), a.state(), a.qkey()), (pd, State::Reset, 0));
    assert_eq!(a.user_data(), 0);
    // The sequence starts at a random number, so that new datagrams are not taken for duplicates of
    // old ones.
    assert_ne!(a.sequence(), b.sequence());
    a.set_qkey(0x1234);
    a.set_user_data(6);
    assert_eq!((a.qkey(), a.user_data()), (0x1234, 6));
    assert_eq!((b.qkey(), b.user_data()), (0, 0));
    assert_eq!((a.counters(), a.drops()), Default::default());
    a.destroy();
    b.destroy();
}

#[test]
fn shared_receive_queues() {
    let ctx = context();
    let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(16, None).unwrap());
    let a = ctx.create_srq(pd, 6, 2).unwrap();
    let b = ctx.create_tag_srq(&cq, pd + 1, 5, 3, 4).unwrap();
    assert!(a.is_same(&a.clone()) && !a.is_same(&b));
    assert_eq!((a.pd(), b.pd()), (pd, pd + 1));
    assert_eq!((a.attributes(), b.attributes()), ((6, 2, 0), (5, 3, 0)));
    assert!(a.tag_cq().is_none() && b.tag_cq().unwrap().is_same(&cq));
    assert_eq!((a.num(), b.num()), (None, None));
    assert_eq!((a.len(), a.is_empty()), (0, true));
    let receives = [RecvWr {
        wr_id: 1,
        sges: &[],
    }; 7];
    let failed = a.post(&receives).unwrap_err();
    let outcome = (failed.accepted(), failed.error().errno());
    assert_eq!(outcome, (6, libc_enomem()));
    assert_eq!((a.len(), a.is_empty(), b.len()), (6, false, 0));
    a.set_limit(4).unwrap();
    assert!(matches!(a.set_limit(7), Err(Error::InvalidArgument(_))));
    assert!(matches!(a.resize(5), Err(Error::InvalidArgument(_))));
    a.resize(8).unwrap();
    assert_eq!((a.attributes(), a.len()), ((8, 2, 4), 6));
    a.set_user_data(9);
    assert_eq!((a.user_data(), b.user_data()), (9, 0));
    assert!(matches!(
        ctx.create_tag_srq(&cq, pd, 5, 3, 0),
        Err(Error::InvalidArgument(_))
    ));
}

fn libc_enomem() -> i32 {
    std::io::Error::from(std::io::ErrorKind::OutOfMemory)
        .raw_os_error()
        .unwrap_or(12)
}

#[test]
fn domains_of_extended_reliable_connections() {
    let (ctx, other) = (context(), context());
    let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(16, None).unwrap());
    let file = File::open("/proc/self/exe").unwrap();
    let open = |create, exclusive| ctx.open_xrc_domain(Some(file.as_fd()), create, exclusive);
    assert!(matches!(open(false, false), Err(Error::Io(_))));
    let domain = open(true, true).unwrap();
    assert!(matches!(open(true, true), Err(Error::InvalidArgument(_))));
    assert!(open(false, false).unwrap().is_same(&domain));
    let own = ctx.open_xrc_domain(None, true, false).unwrap();
    assert!(!own.is_same(&domain));
    assert!(matches!(
        ctx.open_xrc_domain(None, false, false),
        Err(Error::InvalidArgument(_))
    ));
    let a = ctx.create_xrc_srq(&domain, &cq, pd, 4, 1).unwrap();
    let b = ctx.create_xrc_srq(&domain, &cq, pd, 4, 1).unwrap();
    assert!(a.num().is_some() && a.num() != b.num());
    assert!(other.create_xrc_srq(&domain, &cq, pd, 4, 1).is_err());
    let attributes = || XrcTargetAttributes {
        max_ird: 3,
        addressable: false,
    };
    assert!(other.create_xrc_target(&domain, attributes()).is_err());
    let target = ctx.create_xrc_target(&domain, attributes()).unwrap();
    assert_eq!(target.xrc_end(), Some(XrcEnd::Target));
    assert!(target.xrc_domain().unwrap().is_same(&domain));
    assert_eq!((target.config().max_ird, target.config().max_ord), (3, 0));
    let one = loopback::attributes(pd, &cq, 3);
    let initiator = ctx.create_xrc_initiator(&one, false).unwrap();
    assert_eq!(initiator.xrc_end(), Some(XrcEnd::Initiator));
    assert!(initiator.xrc_domain().is_none());
    assert_eq!(
        (initiator.config().max_ird, initiator.config().max_ord),
        (0, 3)
    );
    // An initiator has no receives, regardless of the attributes.
    let (recv_cq, srq) = (ctx.create_cq(4, None), ctx.create_srq(pd, 4, 1));
    let (recv_cq, srq) = (recv_cq.unwrap(), Some(srq.unwrap()));
    let with_receives = QpAttributes {
        recv_cq: recv_cq.clone(),
        srq,
        ..one
    };
    let initiator = ctx.create_xrc_initiator(&with_receives, false).unwrap();
    let c = initiator.config();
    assert_eq!((c.max_recv_wr, c.shared_receive), (0, false));
    assert_eq!(recv_cq.queue_pairs(), 0);
}

#[test]
fn registrations() {
    let ctx = context();
    let pd = ctx.allocate_pd();
    let words = vec![0_u64; 8].into_boxed_slice();
    let addr = words.as_ptr() as u64;
    // SAFETY: the memory outlives the registrations, and is not accessed.
    let fast = unsafe { ctx.allocate_fast(addr, 64, pd) }.unwrap();
    let register = FastRegister {
        new_stag: Stag(fast),
        offset: 16,
        len: 40,
        iova: 0x5000,
        access: Access::REMOTE_READ,
        pages: None,
    };
    assert!(!ctx.region(fast).unwrap().valid);
    let too_long = FastRegister {
        len: 49,
        ..register
    };
    assert!(matches!(
        ctx.fast_register(&too_long, pd),
        Err(Error::Memory(_))
    ));
    assert!(ctx.fast_register(&register, pd + 1).is_err());
    assert!(!ctx.region(fast).unwrap().valid);
    ctx.fast_register(&register, pd).unwrap();
    let info = ctx.region(fast).unwrap();
    assert!(info.valid && !info.on_demand);
    assert_eq!(
        (info.stag, info.pd, info.access),
        (Stag(fast), pd, Access::REMOTE_READ)
    );
    assert_eq!((info.iova, info.len), (0x5000, 40));
    assert!(
        ctx.fast_register(&register, pd).is_err(),
        "the STag is not free"
    );
    ctx.deregister(fast).unwrap();
    assert!(ctx.region(fast).is_none_or(|info| !info.valid));
    assert!(matches!(ctx.deregister(fast), Err(Error::Memory(_))));
    let null = ctx.register_null(pd).unwrap();
    assert!(ctx.region(null).unwrap().valid);
    ctx.deregister(null).unwrap();
}

#[test]
fn regions() {
    let ctx = context();
    let (pd, other) = (ProtectionDomain::new(&ctx), ProtectionDomain::new(&ctx));
    assert_ne!(pd.number(), other.number());
    assert!(pd.context().is_same(&ctx));
    let rights = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let region: MemoryRegion = pd.reg_mr(24, rights).unwrap();
    assert_eq!((region.len(), region.is_empty()), (24, false));
    assert_eq!(region.access(), rights);
    let info = ctx.region(region.lkey()).unwrap();
    assert_eq!((info.pd, info.len, info.access), (pd.number(), 24, rights));
    let there = region.remote();
    assert_eq!(
        (there.addr, there.rkey, there.len),
        (info.iova, region.lkey(), 24)
    );
    let part = there.slice(8, 16).unwrap();
    assert_eq!(
        (part.addr, part.rkey, part.len),
        (info.iova + 8, there.rkey, 16)
    );
    assert!(there.slice(8, 17).is_none() && there.slice(25, 0).is_none());
    assert!(there.slice(24, 0).is_some() && there.slice(u64::MAX, 2).is_none());
    assert_eq!(
        iwarp::verbs::RemoteMemory::from_bytes(&part.to_bytes()),
        Some(part)
    );
    assert_eq!(
        iwarp::verbs::RemoteMemory::from_bytes(&part.to_bytes()[1..]),
        None
    );
    let sge = region.sge(4..10).unwrap();
    assert_eq!(
        (sge.addr, sge.len, sge.lkey),
        (info.iova + 4, 6, region.lkey())
    );
    for (start, end) in [(0, 25), (25, 25), (10, 9)] {
        assert!(region.sge(start..end).is_err(), "{start}..{end}");
    }
    region.write_at(3, &[1, 2, 3]).unwrap();
    assert_eq!(region.to_vec(2..7).unwrap(), [0, 1, 2, 3, 0]);
    let mut out = [9; 2];
    region.read_at(4, &mut out).unwrap();
    assert_eq!(out, [2, 3]);
    assert!(region.write_at(22, &[1, 2, 3]).is_err());
    assert!(region.read_at(23, &mut out).is_err());
    assert_eq!(
        (region.load_u8(5).unwrap(), region.load_u8(23).unwrap()),
        (3, 0)
    );
    assert!(region.load_u8(24).is_err());
    region.store_u64(16, 41).unwrap();
    assert_eq!(region.fetch_add_u64(16, 2).unwrap(), 41);
    assert_eq!(
        (region.load_u64(16).unwrap(), region.load_u64(8).unwrap()),
        (43, 0)
    );
    for at in [17, 20, 24] {
        assert!(region.load_u64(at).is_err() && region.store_u64(at, 1).is_err());
        assert!(region.fetch_add_u64(at, 1).is_err());
    }
    assert_eq!(
        pd.reg_mr(0, rights).map(|region| region.is_empty()).ok(),
        Some(true)
    );
}

/// Regions of elements, and the tokens of their peers.
#[test]
fn regions_of_elements() {
    let endpoint = iwarp::Endpoint::local("127.0.0.1".parse().unwrap()).unwrap();
    assert_eq!(endpoint.device().name, device().name);
    let rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let region = endpoint.share::<u32>(10, rights).unwrap();
    assert_eq!(
        (region.len(), region.octets(), region.is_empty()),
        (10, 40, false)
    );
    assert_eq!(region.shared(), rights);
    assert!(endpoint.allocate::<u32>(1).unwrap().shared().is_empty());
    assert!(endpoint.share::<u32>(1, Access::LOCAL_WRITE).is_err());
    region.write_at(0, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]).unwrap();
    let part = region.slice(3..=7).unwrap();
    assert_eq!((part.len(), part.octets()), (5, 20));
    assert_eq!(part.to_vec().unwrap(), [3, 4, 5, 6, 7]);
    part.set(1, 44).unwrap();
    assert_eq!((part.get(1).unwrap(), region.get(4).unwrap()), (44, 44));
    let octets = part.bytes();
    assert_eq!(
        (octets.len(), octets.slice(4..8).unwrap().to_vec().unwrap()),
        (20, 44_u32.to_ne_bytes().to_vec())
    );
    assert_eq!(octets.load(4).unwrap(), 44_u32.to_ne_bytes()[0]);
    for range in [0..6, 5..6, 6..6] {
        assert!(matches!(
            part.slice(range),
            Err(Error::Refused(Refusal::OutOfRange { len: 5, .. }))
        ));
    }
    assert!(part.slice(5..).unwrap().is_empty() && part.get(5).is_err());
    let (there, whole) = (part.remote(), region.remote());
    assert_eq!(
        (there.len(), there.octets(), there.is_empty()),
        (5, 20, false)
    );
    assert_eq!(there.rights(), rights);
    assert_eq!(whole.slice(3..8).unwrap(), there);
    assert_ne!(whole.slice(2..7).unwrap(), there);
    assert_eq!(there.at(2).unwrap(), whole.slice(5..6).unwrap());
    assert_eq!((there.bytes().len(), there.bytes().rights()), (20, rights));
    assert_eq!(RemoteRegion::from_bytes(&there.to_bytes()).unwrap(), there);
    assert!(there.at(5).is_err() && there.slice(2..6).is_err());
    assert!(there.slice(5..).unwrap().is_empty());
    let words = endpoint.allocate::<u64>(2).unwrap();
    words.store(1, 7).unwrap();
    assert_eq!(words.fetch_add(1, 3).unwrap(), 7);
    assert_eq!((words.load(0).unwrap(), words.load(1).unwrap()), (0, 10));
    assert!(words.load(2).is_err() && words.store(2, 0).is_err());
}

#[test]
fn a_connection() {
    let options = Options::new().receives(7).message_size(300);
    let listener = options.clone().listen("127.0.0.1:0").private_data("answer");
    let listener = listener.bind().unwrap();
    let to = listener.local_addr();
    assert!(to.port() != 0 && to.ip().is_loopback());
    let server = std::thread::spawn(move || {
        let incoming = listener.wait_incoming(None).unwrap();
        assert_eq!(incoming.private_data(), b"question");
        let peer = incoming.peer_addr();
        (incoming.wait().unwrap(), peer)
    });
    let a = options.connect(to).private_data("question").wait().unwrap();
    let (b, peer) = server.join().unwrap();
    assert_eq!(
        (a.private_data(), b.private_data()),
        (&b"answer"[..], &b""[..])
    );
    assert_eq!((a.peer_addr(), b.local_addr()), (Some(to), Some(to)));
    assert_eq!(a.local_addr(), b.peer_addr());
    assert_eq!(peer, a.local_addr());
    assert!(a.is_initiator() && !b.is_initiator());
    for end in [&a, &b] {
        assert_eq!((end.receives(), end.message_size()), (7, 300));
        assert!(end.fault().is_none());
        assert_eq!(end.endpoint().device().name, device().name);
    }
    let mut batch = a.batch();
    assert_eq!((batch.len(), batch.is_empty()), (0, true));
    batch.send("one").unwrap();
    batch.send("two").unwrap();
    assert_eq!((batch.len(), batch.is_empty()), (2, false));
    batch.clear();
    assert!(batch.is_empty());
    batch.submit().wait().unwrap();
    assert!(b.recv().now().unwrap().is_none(), "nothing was sent");
}

/// Logs and panics identify objects by their `Debug` output.
#[test]
fn debug_output_of_objects() {
    let ctx = context();
    let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(9, None).unwrap());
    let name = &device().name;
    assert_eq!(
        format!("{ctx:?}"),
        format!("Context {{ device: {name:?}, .. }}")
    );
    assert_eq!(
        format!("{cq:?}"),
        "CompletionQueue { capacity: 9, waiting: 0, .. }"
    );
    let qp = ctx.create_qp(&attributes(pd, &cq, 1)).unwrap();
    assert_eq!(
        format!("{qp:?}"),
        format!("QueuePair {{ num: {}, .. }}", qp.num())
    );
    let datagrams = ctx.create_ud_qp(&ud_attributes(pd, &cq)).unwrap();
    assert_eq!(
        format!("{datagrams:?}"),
        format!("UdQueuePair {{ num: {}, .. }}", datagrams.num())
    );
    let srq = ctx.create_srq(pd, 6, 2).unwrap();
    assert_eq!(format!("{srq:?}"), "SharedReceiveQueue { capacity: 6, .. }");
    let domain = ctx.open_xrc_domain(None, true, false).unwrap();
    assert_eq!(format!("{domain:?}"), "XrcDomain { .. }");
    let channel = iwarp::runtime::create_event_channel().unwrap();
    let ids = [0; 2].map(|_| iwarp::runtime::cm::CmId::create(&channel, Some(&ctx)));
    let [first, second] = ids.each_ref().map(|id| format!("{id:?}"));
    assert!(
        first.starts_with("CmId { serial: ") && first != second,
        "{first}"
    );
    datagrams.destroy();
    qp.destroy();
}

/// The completion of a flushed request contains its operation.
#[test]
fn flushed_requests_keep_their_kind() {
    use iwarp_rnic::{SendFlags, SendOp, SendWr, WcOpcode, WcStatus};
    let ctx = context();
    let (pd, cq) = (ctx.allocate_pd(), ctx.create_cq(9, None).unwrap());
    let receives = [RecvWr {
        wr_id: 3,
        sges: &[],
    }];
    let read = SendOp::Read {
        remote_addr: 0,
        rkey: 7,
    };
    let qp = ctx.create_qp(&attributes(pd, &cq, 1)).unwrap();
    qp.modify(State::Init).unwrap();
    qp.post_recv(&receives).unwrap();
    qp.modify(State::Error).unwrap();
    let wr = SendWr {
        wr_id: 4,
        op: read,
        flags: SendFlags::SIGNALED,
        sges: &[],
        inline: &[],
    };
    qp.post_send(&[wr]).unwrap();
    let datagrams = ctx.create_ud_qp(&ud_attributes(pd, &cq)).unwrap();
    datagrams.modify(State::Init).unwrap();
    datagrams.post_recv(&receives).unwrap();
    datagrams.modify(State::Error).unwrap();
    let mut out = [Default::default(); 4];
    let n = cq.poll(&mut out).unwrap();
    let reported: Vec<_> = out[..n]
        .iter()
        .map(|c| (c.wr_id, c.status, c.opcode, c.qp_num))
        .collect();
    let flushed = WcStatus::Flushed;
    let expected = [
        (3, flushed, WcOpcode::Recv, qp.num()),
        (4, flushed, WcOpcode::Read, qp.num()),
        (3, flushed, WcOpcode::Recv, datagrams.num()),
    ];
    assert_eq!(reported, expected);
}

/// An identifier that is bound to a wildcard address gets its source address when it resolves the
/// peer's address, and keeps its port.
#[test]
fn wildcard_identifier_gets_source_address() {
    let channel = iwarp::runtime::create_event_channel().unwrap();
    let limit = Some(std::time::Duration::from_secs(20));
    for any in ["0.0.0.0:0", "[::]:0"] {
        let id = iwarp::runtime::cm::CmId::create(&channel, None);
        id.bind(any.parse().unwrap()).unwrap();
        let bound = id.addresses().0.unwrap();
        assert!(bound.ip().is_unspecified() && bound.port() != 0);
        let peer = "127.0.0.1:9".parse().unwrap();
        id.resolve_addr(None, peer).unwrap();
        let event = channel.next(limit).unwrap();
        assert_eq!(event.kind, iwarp::runtime::cm::CmEventKind::AddrResolved);
        let (local, to) = id.addresses();
        let local = local.unwrap();
        assert!(local.ip().to_canonical().is_loopback(), "{local}");
        assert_eq!((local.port(), to), (bound.port(), Some(peer)));
        id.destroy();
    }
}

/// A new range of a region is checked for the region's new rights, or for its current rights if
/// they do not change.
#[test]
fn changed_region_checks_new_rights() {
    // This memory is mapped and not writable.
    static CONSTANT: [u8; 64] = [7; 64];
    let variable = Box::new([0u8; 64]);
    let constant = (CONSTANT.as_ptr() as u64, 64, 0);
    let variable = (variable.as_ptr() as u64, 64, 0);
    let (read, write) = (Access::empty(), Access::LOCAL_WRITE);
    let ctx = Context::open(&device(), Config::default()).unwrap();
    for (before, memory, named, good) in [
        (read, constant, None, true),
        (read, constant, Some(read), true),
        (read, constant, Some(write), false),
        (read, variable, Some(write), true),
        (write, constant, None, false),
        (write, constant, Some(read), true),
        (write, constant, Some(write), false),
        (write, variable, None, true),
    ] {
        // SAFETY: both ranges remain mapped, and nothing accesses them.
        let stag = unsafe { ctx.register(variable.0, 64, 0, 1, before) }.unwrap();
        // SAFETY: the range remains mapped, and nothing accesses it.
        let changed = unsafe { ctx.reregister(stag, Some(memory), None, named) };
        match changed {
            Ok(stag) => assert!(good && ctx.deregister(stag).is_ok()),
            Err(error) => assert!(!good && matches!(error, Error::BadAddress), "{error}"),
        }
    }
}
