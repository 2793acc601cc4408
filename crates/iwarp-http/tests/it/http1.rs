//! hyper's HTTP/1 over [`iwarp::Stream`].

use crate::common::{accept, connect, listen, pattern, whole, within};
use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, Version};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::sync::Mutex;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

/// Longer than any message of a stream, and no multiple of one.
const LONG: usize = 1_000_001;

type Body = BoxBody<Bytes, Infallible>;

/// Returns a body of unknown length, and the sender of its parts.
fn in_parts() -> (mpsc::Sender<Bytes>, Body) {
    let (sender, parts) = mpsc::channel(1);
    let frames = ReceiverStream::new(parts).map(|part| Ok(Frame::data(part)));
    (sender, BoxBody::new(StreamBody::new(frames)))
}

async fn echo(request: Request<Incoming>) -> hyper::Result<Response<Full<Bytes>>> {
    Ok(Response::new(Full::new(whole(request.into_body()).await?)))
}

/// Three exchanges use one connection, which the client then ends.
#[tokio::test(flavor = "multi_thread")]
async fn long_bodies_keep_alive() {
    let (listener, address) = listen();
    let server = tokio::spawn(async move {
        let stream = accept(&listener).await?;
        let connection = stream.channel().connection().clone();
        let http = hyper::server::conn::http1::Builder::new();
        http.serve_connection(TokioIo::new(stream), service_fn(echo))
            .await?;
        anyhow::Ok(connection.closed().await?)
    });
    let client = async {
        let io = TokioIo::new(connect(address).await?);
        let (mut requests, connection) = hyper::client::conn::http1::handshake(io).await?;
        let connection = tokio::spawn(connection);
        for (round, len) in [LONG, 0, 2 * LONG].into_iter().enumerate() {
            requests.ready().await?;
            let body = pattern(len, round as u64);
            let request = Request::post("/echo").header("host", "iwarp");
            let request = request.body(Full::new(body.clone()))?;
            let response = requests.send_request(request).await?;
            assert_eq!(response.version(), Version::HTTP_11);
            assert!(whole(response.into_body()).await? == body, "round {round}");
        }
        drop(requests);
        anyhow::Ok(connection.await??)
    };
    within(client).await.expect("three exchanges");
    let end = within(server).await.expect("no panic").expect("served");
    assert!(end.is_graceful(), "{end}");
}

/// How the server ends a body of unknown length.
#[derive(Clone, Copy)]
enum Ending {
    Complete,
    /// It closes the connection after a part of the body.
    Cut,
}

/// Requests a body of unknown length, and reads it to its end.
async fn endless(version: Version, ending: Ending) -> hyper::Result<Bytes> {
    let (listener, address) = listen();
    let (parts, body) = in_parts();
    let body = Mutex::new(Some(body));
    let (opened, connection) = tokio::sync::oneshot::channel();
    let server = tokio::spawn(async move {
        let stream = accept(&listener).await.expect("a client");
        let _ = opened.send(stream.channel().connection().clone());
        let body = || body.lock().expect("no panic").take().expect("one request");
        let answer = service_fn(|_| async { Ok::<_, Infallible>(Response::new(body())) });
        let http = hyper::server::conn::http1::Builder::new();
        // It fails if the connection is closed meanwhile.
        let _ = http.serve_connection(TokioIo::new(stream), answer).await;
    });
    let io = TokioIo::new(connect(address).await.expect("a server"));
    let (mut requests, client) = hyper::client::conn::http1::handshake(io).await?;
    let client = tokio::spawn(client);
    let request = Request::get("/").version(version).header("host", "iwarp");
    let request = request.body(Empty::<Bytes>::new()).expect("a request");
    parts.send(pattern(LONG, 1)).await.expect("a receiver");
    let mut body = requests.send_request(request).await?.into_body();
    let first = body
        .frame()
        .await
        .expect("a first frame")?
        .into_data()
        .expect("data");
    match ending {
        Ending::Complete => drop(parts),
        Ending::Cut => {
            let connection = connection.await.expect("a connection");
            connection.close().expect("this process owns it");
            // While the sender lives, hyper does not end the body.
            connection.closed().await.expect("this process owns it");
            std::mem::forget(parts);
        }
    }
    let rest = whole(body).await;
    drop(requests);
    server.await.expect("no panic");
    let _ = client.await.expect("no panic");
    Ok([first, rest?].concat().into())
}

/// In HTTP/1.0 the end of the connection is the end of the body.
#[tokio::test(flavor = "multi_thread")]
async fn end_of_stream_ends_body() {
    for version in [Version::HTTP_10, Version::HTTP_11] {
        let body = within(endless(version, Ending::Complete)).await;
        assert!(body.expect("a body") == pattern(LONG, 1), "{version:?}");
    }
}

/// A closed connection is not mistaken for the end of a body, even in HTTP/1.0.
#[tokio::test(flavor = "multi_thread")]
async fn closed_connection_cuts_body() {
    for version in [Version::HTTP_10, Version::HTTP_11] {
        let body = within(endless(version, Ending::Cut)).await;
        body.expect_err("a cut body is an error");
    }
}
