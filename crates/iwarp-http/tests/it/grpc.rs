//! tonic over [`iwarp::Stream`]: its server takes streams of a listener, and its client a connector
//! of three lines.
//!
//! The service is what `tonic-build` would generate from this file, shortened:
//!
//! ```proto
//! service Sum {
//!   rpc Once (Numbers) returns (Total);
//!   rpc Running (stream Numbers) returns (stream Total);
//! }
//! ```

use crate::common::{connect, listen, open, within};
use hyper_util::rt::TokioIo;
use iwarp::Stream;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream as Items, StreamExt as _};
use tonic::body::Body;
use tonic::client::Grpc as Client;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, StreamingService, UnaryService};
use tonic::transport::server::{Connected, TcpConnectInfo};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;
use tower::service_fn;

#[derive(Clone, PartialEq, prost::Message)]
struct Numbers {
    #[prost(uint64, repeated, tag = "1")]
    all: Vec<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Total {
    #[prost(uint64, tag = "1")]
    sum: u64,
    /// The address of the client.
    #[prost(string, tag = "2")]
    peer: String,
}

fn total(numbers: &Numbers, before: u64, peer: Option<SocketAddr>) -> Result<Total, Status> {
    let add = |sum: u64, number: &u64| sum.checked_add(*number);
    let sum = numbers.all.iter().try_fold(before, add);
    Ok(Total {
        sum: sum.ok_or_else(|| Status::out_of_range("the sum exceeds 64 bits"))?,
        peer: peer.map(|peer| peer.to_string()).unwrap_or_default(),
    })
}

#[derive(Clone, Copy)]
struct Sum;

impl UnaryService<Numbers> for Sum {
    type Response = Total;
    type Future = BoxFuture<Response<Total>, Status>;

    fn call(&mut self, request: Request<Numbers>) -> Self::Future {
        let peer = request.remote_addr();
        Box::pin(async move { total(request.get_ref(), 0, peer).map(Response::new) })
    }
}

type Totals = Pin<Box<dyn Items<Item = Result<Total, Status>> + Send>>;

impl StreamingService<Numbers> for Sum {
    type Response = Total;
    type ResponseStream = Totals;
    type Future = BoxFuture<Response<Totals>, Status>;

    fn call(&mut self, request: Request<Streaming<Numbers>>) -> Self::Future {
        let peer = request.remote_addr();
        let mut sum = 0;
        let totals = request.into_inner().map(move |numbers| {
            let next = total(&numbers?, sum, peer)?;
            sum = next.sum;
            Ok(next)
        });
        Box::pin(async move { Ok(Response::new(Box::pin(totals) as Totals)) })
    }
}

impl Service<http::Request<Body>> for Sum {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = Grpc::new(ProstCodec::<Total, Numbers>::default());
            Ok(match request.uri().path() {
                "/Sum/Once" => grpc.unary(Self, request).await,
                "/Sum/Running" => grpc.streaming(Self, request).await,
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

/// A stream with the addresses of its ends, which tonic gives to services.
struct Accepted {
    stream: Stream,
    ends: TcpConnectInfo,
}

impl Connected for Accepted {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.ends.clone()
    }
}

impl AsyncRead for Accepted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, out)
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Serves `clients` clients, and ends when they have left.
fn serve(clients: usize) -> (SocketAddr, JoinHandle<Result<(), tonic::transport::Error>>) {
    let (listener, address) = listen();
    let (accepted, incoming) = mpsc::channel::<iwarp::Result<Accepted>>(1);
    let accepting = async move {
        for _ in 0..clients {
            let connection = listener.accept().await?;
            let ends = TcpConnectInfo {
                local_addr: connection.local_addr(),
                remote_addr: connection.peer_addr(),
            };
            let stream = open(connection).await?;
            let _ = accepted.send(Ok(Accepted { stream, ends })).await;
        }
        Ok::<_, iwarp::Error>(())
    };
    tokio::spawn(accepting);
    let incoming = ReceiverStream::new(incoming);
    let server = Server::default().serve_with_incoming(Sum, incoming);
    (address, tokio::spawn(server))
}

async fn client(to: SocketAddr) -> Client<Channel> {
    let endpoint = Endpoint::from_static("http://iwarp");
    let connector = service_fn(move |_| async move { connect(to).await.map(TokioIo::new) });
    let channel = endpoint.connect_with_connector(connector).await;
    Client::new(channel.expect("a channel"))
}

async fn once(client: &mut Client<Channel>, all: Vec<u64>) -> Result<Total, Status> {
    client
        .ready()
        .await
        .map_err(|error| Status::unavailable(error.to_string()))?;
    let codec = ProstCodec::<Numbers, Total>::default();
    let path = PathAndQuery::from_static("/Sum/Once");
    let response = client.unary(Request::new(Numbers { all }), path, codec);
    Ok(response.await?.into_inner())
}

/// A request of 200 kB, and a status other than success, on one connection.
#[tokio::test(flavor = "multi_thread")]
async fn unary_calls_and_errors() {
    let (address, server) = serve(1);
    let test = async {
        let mut client = client(address).await;
        let all: Vec<u64> = (1 << 20..).take(50_000).collect();
        let sum = all.iter().sum();
        let total = once(&mut client, all).await.expect("a total");
        assert_eq!(total.sum, sum);
        let peer: SocketAddr = total.peer.parse().expect("the client's address");
        assert!(peer.ip().is_loopback() && peer != address, "{peer}");
        let status = once(&mut client, vec![u64::MAX, 1])
            .await
            .expect_err("too large");
        assert_eq!(status.code(), Code::OutOfRange);
        assert_eq!(status.message(), "the sum exceeds 64 bits");
        assert_eq!(once(&mut client, vec![1, 2]).await.expect("a total").sum, 3);
        drop(client);
        server.await.expect("no panic").expect("a graceful end");
    };
    within(test).await;
}

/// Each request is answered before the next one is sent.
#[tokio::test(flavor = "multi_thread")]
async fn both_directions_stream() {
    let (address, server) = serve(1);
    let test = async {
        let mut client = client(address).await;
        client.ready().await.expect("a connection");
        let (numbers, requests) = mpsc::channel(1);
        let codec = ProstCodec::<Numbers, Total>::default();
        let path = PathAndQuery::from_static("/Sum/Running");
        let requests = Request::new(ReceiverStream::new(requests));
        let response = client
            .streaming(requests, path, codec)
            .await
            .expect("a stream");
        let mut totals = response.into_inner();
        let mut sum = 0;
        for round in 1..=100 {
            sum += round * round;
            let all = vec![round; usize::try_from(round).expect("it fits")];
            numbers.send(Numbers { all }).await.expect("a receiver");
            let total = totals.message().await.expect("no error").expect("a total");
            assert_eq!(total.sum, sum);
        }
        drop(numbers);
        assert_eq!(totals.message().await.expect("no error"), None);
        drop((client, totals));
        server.await.expect("no panic").expect("a graceful end");
    };
    within(test).await;
}
