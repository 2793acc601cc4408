//! Tests of `iwarp::verbs`: its additions to `runtime`, and its objects together.

use iwarp::verbs::cm::{ConnectedId, ConnectionParameters, Connector, ListeningId};
use iwarp::verbs::{
    Access, AsyncEventKind, CompletionQueue, Config, Context, Cqe, Device, Error, PostError,
    ProtectionDomain, QpInitAttr, RecvWr, SendOp, SendWr, State, WcOpcode, WcStatus,
};
use std::net::IpAddr;
use std::time::Duration;

const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

fn open() -> Context {
    let device = Device::by_address([127, 0, 0, 1].into()).unwrap();
    Context::open(&device, Config::from_env()).unwrap()
}

/// Connects two queue pairs with these attributes. Returns the connecting end and the accepting
/// end.
fn connect(
    pd: &ProtectionDomain,
    a: &QpInitAttr<'_>,
    b: &QpInitAttr<'_>,
) -> (ConnectedId, ConnectedId) {
    let ctx = pd.context();
    let listener = ListeningId::bind(ctx, ([127, 0, 0, 1], 0).into()).unwrap();
    let to = listener.local_addr();
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let qp = pd.create_qp(b).unwrap();
            let request = listener.accept(LIMIT).unwrap();
            request
                .accept(qp, &ConnectionParameters::default())
                .unwrap()
        });
        let qp = pd.create_qp(a).unwrap();
        assert_eq!(qp.state(), State::Init);
        let connected = Connector::new(ctx).connect(to, qp).unwrap();
        (connected, accepted.join().unwrap())
    })
}

fn next(cq: &CompletionQueue) -> Cqe {
    let mut done = [Cqe::default()];
    cq.wait(&mut done, LIMIT).unwrap();
    done[0]
}

/// Checks that `?` converts the error of a failed post.
fn question_mark(connection: &ConnectedId, wrs: &[SendWr<'_>]) -> iwarp::Result<()> {
    connection.post_send(wrs)?;
    Ok(())
}

#[test]
fn failed_post_reports_accepted_count() {
    let ctx = open();
    let (pd, cq) = (
        ProtectionDomain::new(&ctx),
        ctx.create_cq(64, None).unwrap(),
    );
    let attr = QpInitAttr::new(&cq, &cq).max_inline_data(16).max_sge(1, 1);
    let (a, b) = connect(&pd, &attr, &attr);
    let short = SendWr::inline(1, &[b"short"]);
    let long = SendWr::inline(2, &[&[0; 17]]);
    let inbox = pd.reg_mr(64, Access::LOCAL_WRITE).unwrap();
    let receive = RecvWr {
        wr_id: 3,
        sges: &[inbox.sge(..).unwrap()],
    };
    b.post_recv(&[receive]).unwrap();
    let failed = a.post_send(&[short.signaled(), long, short]).unwrap_err();
    assert_eq!(failed.accepted(), 1);
    assert!(
        matches!(failed.error(), Error::Post(PostError::InlineTooLong)),
        "{failed:?}"
    );
    assert!(
        failed.to_string().contains("request 1 of the list"),
        "{failed}"
    );
    assert!(std::error::Error::source(&failed).is_some());
    let done = [next(&cq), next(&cq)];
    assert!(done.iter().any(|d| d.wr_id == 1) && done.iter().any(|d| d.wr_id == 3));
    assert_eq!(inbox.to_vec(..5).unwrap(), b"short");
    let all = a.post_send_all(&[short, long]).unwrap_err();
    assert_eq!(all.accepted(), 1, "one request is accepted");
    assert!(matches!(question_mark(&a, &[long]), Err(Error::Post(_))));
    let two = [inbox.sge(..1).unwrap(); 2];
    let receive = RecvWr {
        wr_id: 4,
        sges: &two,
    };
    assert_eq!(b.post_recv(&[receive]).unwrap_err().accepted(), 0);
    let early = b.wait_disconnected(Some(Duration::ZERO));
    assert!(matches!(early, Err(Error::TimedOut(_))), "{early:?}");
    drop(a);
    b.wait_disconnected(LIMIT).unwrap();
    assert!(b.fault().is_none() && b.counters() != Default::default());
}

/// A connection request contains the connector's depths and source address. A listener ignores
/// peers that are not admitted. Dropping a request rejects it.
#[test]
fn request_reports_private_data_and_depths() {
    let ctx = open();
    let (pd, cq) = (
        ProtectionDomain::new(&ctx),
        ctx.create_cq(16, None).unwrap(),
    );
    let attr = QpInitAttr::new(&cq, &cq).rd_atomic(3, 5);
    let listener = ListeningId::bind(&ctx, ([127, 0, 0, 1], 0).into()).unwrap();
    let to = listener.local_addr();
    let connector = Connector::new(&ctx).source(([127, 0, 0, 2], 0).into());
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| connector.connect(to, pd.create_qp(&attr).unwrap()));
        let request = listener.accept(LIMIT).unwrap();
        assert_eq!(request.local_addr(), Some(to));
        assert_eq!(
            request.peer_addr().unwrap().ip(),
            IpAddr::from([127, 0, 0, 2])
        );
        // The peer wants to have five Reads in flight, and accepts three.
        assert_eq!(request.peer_reads(), (Some(5), Some(3)));
        drop(request);
        assert!(refused.join().unwrap().is_err());
    });
    let strangers = ListeningId::builder(&ctx).peers("192.0.2.0/24".parse().unwrap());
    let strangers = strangers.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let refused = connector.connect(strangers.local_addr(), pd.create_qp(&attr).unwrap());
    assert!(refused.is_err(), "{refused:?}");
    let none = strangers.accept(Some(Duration::from_millis(50)));
    assert!(matches!(none, Err(Error::TimedOut(_))), "{none:?}");
}

#[test]
fn sq_sig_all_signals_every_request() {
    let ctx = open();
    let (pd, cq) = (
        ProtectionDomain::new(&ctx),
        ctx.create_cq(16, None).unwrap(),
    );
    let attr = QpInitAttr::new(&cq, &cq);
    let (a, _b) = connect(&pd, &attr.clone().sq_sig_all(true), &attr);
    let nothing = SendWr::new(
        7,
        SendOp::Write {
            remote_addr: 0,
            rkey: 0,
        },
        &[],
    );
    a.post_send(&[nothing]).unwrap();
    assert_eq!((next(&cq).wr_id, a.state()), (7, State::Rts));
}

#[test]
fn events_of_each_kind_arrive() {
    let kinds = [
        ("QP_FATAL", "QpFatal"),
        ("QP_REQ_ERR", "QpRequestError"),
        ("QP_ACCESS_ERR", "QpAccessError"),
        ("COMM_EST", "CommunicationEstablished"),
        ("SQ_DRAINED", "SqDrained"),
        ("QP_LAST_WQE_REACHED", "LastWqeReached"),
        ("PORT_ACTIVE", "Port(Active)"),
        ("PORT_ERR", "Port(Error)"),
        ("LID_CHANGE", "Port(LidChange)"),
        ("GID_CHANGE", "Port(GidChange)"),
    ];
    for (name, event_name) in kinds {
        let device = Device::by_address([127, 0, 0, 1].into()).unwrap();
        let mut config = Config::from_env();
        config.fault = Some(
            format!("event={name},op=write,nth=1;log=/dev/null")
                .parse()
                .unwrap(),
        );
        let ctx = Context::open(&device, config).unwrap();
        let (pd, cq) = (
            ProtectionDomain::new(&ctx),
            ctx.create_cq(16, None).unwrap(),
        );
        let attr = QpInitAttr::new(&cq, &cq);
        let (a, _b) = connect(&pd, &attr, &attr);
        let nothing = SendWr::new(
            7,
            SendOp::Write {
                remote_addr: 0,
                rkey: 0,
            },
            &[],
        );
        a.post_send(&[nothing.signaled()]).unwrap();
        let wanted = match event_name.starts_with("Port") {
            true => event_name.to_owned(),
            false => format!("{event_name}(EventQp({}))", a.num()),
        };
        // Other events may precede it, such as `CommunicationEstablished`.
        while format!("{:?}", ctx.async_event(LIMIT).unwrap().kind) != wanted {}
    }
}

#[test]
fn peers_share_srq_and_channel() {
    let ctx = open();
    let pd = ProtectionDomain::new(&ctx);
    let channel = ctx.create_channel().unwrap();
    let cq = ctx.create_cq(8, Some(&channel)).unwrap();
    cq.resize(64).unwrap();
    assert_eq!((cq.capacity(), cq.len(), cq.is_empty()), (64, 0, true));
    let srq = pd.create_srq(8, 1).unwrap();
    let inbox = pd.reg_mr(8 * 64, Access::LOCAL_WRITE).unwrap();
    for slot in 0..4_usize {
        let sges = [inbox.sge(slot * 64..(slot + 1) * 64).unwrap()];
        let receive = RecvWr {
            wr_id: slot as u64,
            sges: &sges,
        };
        srq.post(&[receive]).unwrap();
    }
    assert_eq!((srq.len(), srq.attributes().0), (4, 8));
    srq.set_limit(3).unwrap();
    assert!(srq.set_limit(9).is_err());
    let theirs = ctx.create_cq(8, None).unwrap();
    let mine = QpInitAttr::new(&cq, &cq).srq(&srq);
    let peers = [(); 2].map(|()| connect(&pd, &QpInitAttr::new(&theirs, &theirs), &mine));
    cq.arm(false);
    for (peer, _) in &peers {
        peer.post_send(&[SendWr::inline(9, &[b"to whom it concerns"]).signaled()])
            .unwrap();
        assert_eq!(next(&theirs).status, WcStatus::Success);
    }
    assert!(channel.event(LIMIT).unwrap().is_same(&cq));
    assert!(channel.try_event().is_none());
    for _ in &peers {
        let done = next(&cq);
        assert_eq!(
            (done.status, done.opcode),
            (WcStatus::Success, WcOpcode::Recv)
        );
    }
    // Other events may precede it, such as `CommunicationEstablished`.
    loop {
        if let AsyncEventKind::SrqLimitReached(which) = ctx.async_event(LIMIT).unwrap().kind {
            assert!(which.is_same(&srq));
            break;
        }
    }
    assert_eq!(srq.len(), 2);
}

#[test]
fn window_grants_part_until_dropped() {
    let ctx = open();
    let (pd, cq) = (
        ProtectionDomain::new(&ctx),
        ctx.create_cq(64, None).unwrap(),
    );
    let theirs = ctx.create_cq(64, None).unwrap();
    let (a, b) = connect(
        &pd,
        &QpInitAttr::new(&theirs, &theirs),
        &QpInitAttr::new(&cq, &cq),
    );
    assert!(
        pd.alloc_mw(&pd.reg_mr(8, Access::LOCAL_WRITE).unwrap())
            .is_err()
    );
    let memory = pd
        .reg_mr(64, Access::LOCAL_WRITE | Access::MW_BIND)
        .unwrap();
    assert!(ProtectionDomain::new(&ctx).alloc_mw(&memory).is_err());
    let window = pd.alloc_mw(&memory).unwrap();
    assert!(window.bind_mw(0..65, Access::REMOTE_READ).is_err());
    // The connecting end sends the first message.
    a.post_send(&[SendWr::new(
        1,
        SendOp::Write {
            remote_addr: 0,
            rkey: 0,
        },
        &[],
    )
    .signaled()])
        .unwrap();
    assert_eq!(next(&theirs).status, WcStatus::Success);
    let (bind, there) = window.bind_mw(16..32, Access::REMOTE_READ).unwrap();
    b.post_send(&[SendWr::new(1, bind, &[]).signaled()])
        .unwrap();
    assert_eq!(next(&cq).status, WcStatus::Success);
    assert_eq!((there.len, there.rkey), (16, window.rkey()));
    memory.write_at(16, &[7; 16]).unwrap();
    let sink = pd.reg_mr(16, Access::LOCAL_WRITE).unwrap();
    let sges = [sink.sge(..).unwrap()];
    let read = SendWr::read(2, there.addr, there.rkey, &sges).signaled();
    a.post_send(&[read]).unwrap();
    assert_eq!(next(&theirs).status, WcStatus::Success);
    assert_eq!(sink.to_vec(..).unwrap(), [7; 16]);
    // The window keeps its region. Dropping the window revokes the rights.
    drop(memory);
    a.post_send(&[read]).unwrap();
    assert_eq!(next(&theirs).status, WcStatus::Success);
    drop(window);
    a.post_send(&[read]).unwrap();
    assert_eq!(next(&theirs).status, WcStatus::RemoteAccess);
    assert!(a.fault().is_some());
    let number = b.num();
    loop {
        if let AsyncEventKind::QpAccessError(qp) = ctx.async_event(LIMIT).unwrap().kind {
            assert_eq!(qp.num(), number);
            break;
        }
    }
}

#[tokio::test]
async fn tasks_wait_for_completions_and_events() {
    let ctx = open();
    let (pd, cq) = (
        ProtectionDomain::new(&ctx),
        ctx.create_cq(64, None).unwrap(),
    );
    let listener = ListeningId::bind_with_backlog(&ctx, ([127, 0, 0, 1], 0).into(), 4).unwrap();
    let to = listener.local_addr();
    let attr = QpInitAttr::new(&cq, &cq);
    let server = async {
        let request = listener.accept_async().await.unwrap();
        assert_eq!(request.private_data(), b"hello");
        let qp = pd.create_qp(&attr).unwrap();
        let parameters = ConnectionParameters {
            private_data: b"welcome".to_vec(),
            ..Default::default()
        };
        request.accept_async(qp, &parameters).await.unwrap()
    };
    let client = async {
        let connector = Connector::new(&ctx).private_data(b"hello").reads(1, 1);
        let qp = pd.create_qp(&attr.clone().rd_atomic(1, 1)).unwrap();
        connector.connect_async(to, qp).await.unwrap()
    };
    let (a, b) = tokio::join!(client, server);
    assert_eq!(a.private_data(), b"welcome");
    assert_eq!(a.addresses().1, Some(to));
    let channel = ctx.create_channel().unwrap();
    let watched = iwarp::tokio::Watched::new(channel.clone()).unwrap();
    let other = ctx.create_cq(4, Some(&channel)).unwrap();
    let (c, d) = connect(&pd, &QpInitAttr::new(&other, &other), &attr);
    c.post_send(&[SendWr::new(
        5,
        SendOp::Write {
            remote_addr: 0,
            rkey: 0,
        },
        &[],
    )
    .signaled()])
        .unwrap();
    let mut done = [Cqe::default()];
    assert_eq!(watched.completions(&other, &mut done).await.unwrap(), 1);
    assert_eq!(done[0].wr_id, 5);
    a.post_send(&[SendWr::new(
        6,
        SendOp::Write {
            remote_addr: 0,
            rkey: 0,
        },
        &[],
    )
    .signaled()])
        .unwrap();
    assert_eq!(cq.completions(&mut done).await.unwrap(), 1);
    assert_eq!(done[0].wr_id, 6);
    a.disconnect().unwrap();
    b.disconnected().await.unwrap();
    drop((c, d));
}

#[test]
fn queue_pair_ends_with_its_owner() {
    let ctx = open();
    let (pd, cq) = (ProtectionDomain::new(&ctx), ctx.create_cq(1, None).unwrap());
    let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
    let handle = ctx.queue_pair(qp.num()).unwrap();
    assert!(handle.is_same(&qp));
    drop(qp);
    assert!(handle.post_recv(&[]).is_err() && ctx.queue_pair(handle.num()).is_none());
}

#[test]
fn drop_order_does_not_matter() {
    let ctx = open();
    let (pd, cq) = (
        ProtectionDomain::new(&ctx),
        ctx.create_cq(64, None).unwrap(),
    );
    let attr = QpInitAttr::new(&cq, &cq);
    let (a, b) = connect(&pd, &attr, &attr);
    let memory = pd.reg_mr(8, Access::empty()).unwrap();
    let sges = [memory.sge(..).unwrap()];
    let write = SendWr::write(1, 0, 1, &sges).signaled();
    drop((ctx, pd, memory));
    a.post_send(&[write]).unwrap();
    // The memory is deregistered, so the request fails.
    assert_eq!(next(&cq).status, WcStatus::LocalProtection);
    drop(cq);
    drop(a);
    let _ = b.wait_disconnected(LIMIT);
    // This queue pair was never connected.
    let ctx = open();
    let (pd, cq) = (ProtectionDomain::new(&ctx), ctx.create_cq(1, None).unwrap());
    let qp = pd
        .create_qp(&QpInitAttr::new(&cq, &cq).cap(4, 4).sq_sig_all(true))
        .unwrap();
    assert!(
        pd.create_qp(&QpInitAttr::new(&cq, &cq).cap(u32::MAX, 1))
            .is_err()
    );
    drop((ctx, pd, cq));
    assert!(qp.post_send(&[SendWr::inline(1, &[])]).is_err() && qp.num() > 0);
}
