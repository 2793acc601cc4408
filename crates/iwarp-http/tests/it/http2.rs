//! hyper's HTTP/2 over [`iwarp::Stream`].

use crate::common::{accept, connect, listen, pattern, whole, within};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper::service::{Service, service_fn};
use hyper::{Request, Response, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use iwarp::{Connection, End};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::{Barrier, Notify, oneshot};
use tokio::task::{JoinHandle, JoinSet};

const STREAMS: usize = 50;

type Body = Full<Bytes>;

/// Serves one connection, which it also returns. `stop` ends it after the pending exchanges.
fn serve<S>(service: S, stop: Arc<Notify>) -> (SocketAddr, JoinHandle<End>, Opened)
where
    S: Service<Request<Incoming>, Response = Response<Body>, Error = hyper::Error> + Send + 'static,
    S::Future: Send,
{
    let (listener, address) = listen();
    let (opened, connection) = oneshot::channel();
    let server = tokio::spawn(async move {
        let stream = accept(&listener).await.expect("a client");
        let connection = stream.channel().connection().clone();
        let _ = opened.send(connection.clone());
        let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        {
            let mut serving = std::pin::pin!(http.serve_connection(TokioIo::new(stream), service));
            tokio::select! {
                _ = &mut serving => {}
                () = stop.notified() => {
                    serving.as_mut().graceful_shutdown();
                    serving.await.expect("a graceful end");
                }
            }
        }
        connection.closed().await.expect("this process owns it")
    });
    (address, server, connection)
}

type Opened = oneshot::Receiver<Connection>;
type Client = JoinHandle<hyper::Result<()>>;

async fn client(to: SocketAddr) -> (SendRequest<Body>, Client) {
    let io = TokioIo::new(connect(to).await.expect("a server"));
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), io);
    let (requests, connection) = handshake.await.expect("HTTP/2");
    (requests, tokio::spawn(connection))
}

fn post(body: Bytes) -> Request<Body> {
    let request = Request::post("http://iwarp/echo").version(Version::HTTP_2);
    request.body(Full::new(body)).expect("a request")
}

/// No request is answered before all of them have arrived.
#[tokio::test(flavor = "multi_thread")]
async fn streams_are_concurrent() {
    let all = Arc::new(Barrier::new(STREAMS));
    let echo = service_fn(move |request: Request<Incoming>| {
        let all = all.clone();
        async move {
            let body = whole(request.into_body()).await?;
            all.wait().await;
            Ok(Response::new(Full::new(body)))
        }
    });
    let (address, server, _) = serve(echo, Arc::default());
    let (requests, connection) = client(address).await;
    let mut exchanges = JoinSet::new();
    for number in 0..STREAMS {
        let mut requests = requests.clone();
        exchanges.spawn(async move {
            let body = pattern(10_000 + 1000 * number, number as u64);
            let response = requests.send_request(post(body.clone())).await?;
            let echoed = whole(response.into_body()).await?;
            hyper::Result::Ok(echoed == body)
        });
    }
    drop(requests);
    let all_equal = async {
        while let Some(exchange) = exchanges.join_next().await {
            assert!(exchange.expect("no panic").expect("an answer"));
        }
        connection.await.expect("no panic").expect("a graceful end");
        server.await.expect("no panic")
    };
    let end = within(all_equal).await;
    assert!(end.is_graceful(), "{end}");
}

/// The pending exchange of four mebibytes in each direction is completed.
#[tokio::test(flavor = "multi_thread")]
async fn shutdown_completes_pending_exchange() {
    let (arrived, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let notify = (arrived.clone(), go_on.clone());
    let echo = service_fn(move |request: Request<Incoming>| {
        let (arrived, go_on) = notify.clone();
        async move {
            arrived.notify_one();
            go_on.notified().await;
            let body = whole(request.into_body()).await?;
            Ok(Response::new(Full::new(body)))
        }
    });
    let stop = Arc::new(Notify::new());
    let (address, server, _) = serve(echo, stop.clone());
    let (mut requests, connection) = client(address).await;
    let body = pattern(4 << 20, 3);
    let exchange = tokio::spawn(requests.send_request(post(body.clone())));
    let test = async {
        arrived.notified().await;
        stop.notify_one();
        // The client hears of the shutdown, and starts nothing else.
        go_on.notify_one();
        let response = exchange.await.expect("no panic").expect("an answer");
        assert!(whole(response.into_body()).await.expect("a body") == body);
        connection.await.expect("no panic").expect("a graceful end");
        requests
            .send_request(post(Bytes::new()))
            .await
            .expect_err("it has ended");
        server.await.expect("no panic")
    };
    let end = within(test).await;
    assert!(end.is_graceful(), "{end}");
}

/// All pending requests fail when the connection ends.
#[tokio::test(flavor = "multi_thread")]
async fn lost_connection_fails_all_streams() {
    let arrived = Arc::new(Barrier::new(STREAMS + 1));
    let notify = arrived.clone();
    let never = service_fn(move |_| {
        let arrived = notify.clone();
        async move {
            arrived.wait().await;
            std::future::pending().await
        }
    });
    let (address, server, opened) = serve(never, Arc::default());
    let (requests, connection) = client(address).await;
    let mut exchanges = JoinSet::new();
    for number in 0..STREAMS {
        let exchange = requests
            .clone()
            .send_request(post(pattern(100, number as u64)));
        exchanges.spawn(exchange);
    }
    let test = async {
        arrived.wait().await;
        opened
            .await
            .expect("a connection")
            .close()
            .expect("this process owns it");
        while let Some(exchange) = exchanges.join_next().await {
            exchange.expect("no panic").expect_err("no answer was sent");
        }
        connection
            .await
            .expect("no panic")
            .expect_err("it was lost");
        server.await.expect("no panic")
    };
    assert_eq!(within(test).await, End::Closed);
}
