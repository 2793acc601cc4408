//! Tests of event sources in tokio's reactor: connection events, completions through a channel, and
//! asynchronous events, also with many tasks.
#![cfg(feature = "tokio")]

use iwarp::runtime::cm::{CmEventKind, CmId};
use iwarp::runtime::{AsyncEventKind, create_event_channel};
use iwarp::tokio::Watched;
use iwarp::verbs::cm::{ConnectedId, Connector, ListeningId};
use iwarp::verbs::{
    Context, Cqe, MemoryRegion, ProtectionDomain, QpInitAttr, RecvWr, SendWr, WcOpcode, WcStatus,
};
use iwarp::{Access, Config, Device};
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

fn open() -> Context {
    let device = Device::by_address("127.0.0.1".parse().unwrap()).unwrap();
    Context::open(&device, Config::default()).unwrap()
}

fn any() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// Awaits `f` with a time limit, which passes only if a wake-up is lost.
async fn bounded<F: Future>(f: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(20), f)
        .await
        .expect("a wake-up was lost")
}

/// Connects two queue pairs of one device with the `async` calls.
async fn pair(
    ctx: &Context,
    server: iwarp::verbs::QueuePair,
    client: iwarp::verbs::QueuePair,
) -> (ConnectedId, ConnectedId) {
    let listener = ListeningId::bind(ctx, any()).unwrap();
    let to = listener.local_addr();
    let accept = async {
        let request = listener.accept_async().await.unwrap();
        request
            .accept_async(server, &Default::default())
            .await
            .unwrap()
    };
    let connector = Connector::new(ctx);
    let (a, b) = tokio::join!(accept, connector.connect_async(to, client));
    (a, b.unwrap())
}

fn receive(qp: &iwarp::runtime::QueuePair, mr: &MemoryRegion) {
    let sges = &[mr.sge(..).unwrap()];
    qp.post_recv(&[RecvWr { wr_id: 1, sges }]).unwrap();
}

async fn ping_pong(rounds: u32) {
    let ctx = open();
    let pd = ProtectionDomain::new(&ctx);
    let ends = [(); 2].map(|()| {
        let channel = ctx.create_channel().unwrap();
        let cq = ctx.create_cq(16, Some(&channel)).unwrap();
        let mr = pd.reg_mr(4, Access::LOCAL_WRITE).unwrap();
        let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
        receive(&qp, &mr);
        (Watched::new(channel).unwrap(), cq, mr, qp)
    });
    let [(channel_a, cq_a, mr_a, qp_a), (channel_b, cq_b, mr_b, qp_b)] = ends;
    let (a, b) = pair(&ctx, qp_a, qp_b).await;
    let hear = async |channel: &Watched<_>, cq: &_, mr: &MemoryRegion, qp: &ConnectedId| loop {
        let mut done = [Cqe::default()];
        assert_eq!(channel.completions(cq, &mut done).await.unwrap(), 1);
        assert_eq!(done[0].status, WcStatus::Success);
        if done[0].opcode == WcOpcode::Recv {
            let octets = mr.to_vec(..).unwrap();
            receive(qp, mr);
            return u32::from_be_bytes(octets.try_into().unwrap());
        }
    };
    let say = |qp: &ConnectedId, n: u32| {
        let octets = n.to_be_bytes();
        qp.post_send(&[SendWr::inline(2, &[&octets]).signaled()])
            .unwrap();
    };
    let left = async {
        for n in 0..rounds {
            assert_eq!(hear(&channel_a, &cq_a, &mr_a, &a).await, n);
            say(&a, n + 1);
        }
    };
    let right = async {
        for n in 0..rounds {
            say(&b, n);
            assert_eq!(hear(&channel_b, &cq_b, &mr_b, &b).await, n + 1);
        }
    };
    tokio::join!(left, right);
}

#[tokio::test]
async fn completions_by_channel_on_one_thread() {
    bounded(ping_pong(300)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_connections_on_several_threads() {
    let tasks: Vec<_> = (0..8).map(|_| tokio::spawn(ping_pong(100))).collect();
    for task in tasks {
        bounded(task).await.unwrap();
    }
}

#[tokio::test]
async fn connection_events() {
    let ctx = open();
    let listener = ListeningId::bind(&ctx, any()).unwrap();
    let channel = create_event_channel().unwrap();
    let id = CmId::create(&channel, Some(&ctx));
    let events = Watched::new(channel).unwrap();
    id.resolve_addr(None, listener.local_addr()).unwrap();
    let event = bounded(events.next()).await.unwrap();
    assert_eq!(event.kind, CmEventKind::AddrResolved);
    id.resolve_route().unwrap();
    let pd = ProtectionDomain::new(&ctx);
    let cq = ctx.create_cq(4, None).unwrap();
    let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq)).unwrap();
    id.set_queue_pair(Some(&qp));
    id.connect(&Default::default()).unwrap();
    let request = bounded(listener.accept_async()).await.unwrap();
    request.reject(b"not today").unwrap();
    assert_eq!(
        bounded(events.next()).await.unwrap().kind,
        CmEventKind::RouteResolved
    );
    let event = bounded(events.next()).await.unwrap();
    assert_eq!(event.kind, CmEventKind::Rejected);
    assert_eq!(event.private_data, b"not today");
    // No further event arrives.
    let more = tokio::time::timeout(Duration::from_millis(20), events.next()).await;
    assert!(more.is_err());
}

#[tokio::test]
async fn asynchronous_events() {
    let ctx = open();
    let events = Watched::new(ctx.clone()).unwrap();
    let pd = ProtectionDomain::new(&ctx);
    // The completion queue has room for one completion only.
    let small = ctx.create_cq(1, None).unwrap();
    let other = ctx.create_cq(16, None).unwrap();
    let (server, client) = (
        pd.create_qp(&QpInitAttr::new(&other, &other)).unwrap(),
        pd.create_qp(&QpInitAttr::new(&small, &other)).unwrap(),
    );
    let (_a, b) = pair(&ctx, server, client).await;
    let wr = SendWr::write(1, 0, 1, &[]).signaled();
    b.post_send(&[wr, wr, wr]).unwrap();
    let overflow = async {
        while !matches!(
            events.next().await.unwrap().kind,
            AsyncEventKind::CqError(_)
        ) {}
    };
    bounded(overflow).await;
}
