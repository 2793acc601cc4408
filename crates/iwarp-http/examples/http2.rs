//! HTTP/2 by hyper over a [`Stream`](iwarp::Stream): concurrent requests share one connection.
//!
//! ```sh
//! cargo run -p iwarp-http --example http2                         # both ends in this process, or:
//! cargo run -p iwarp-http --example http2 serve 127.0.0.1:7171    # in one terminal, and
//! cargo run -p iwarp-http --example http2 connect 127.0.0.1:7171  # in another one
//! ```
//!
//! The client prints:
//!
//! ```text
//! GET /0 by HTTP/2.0: 200 OK, 0 bytes
//! GET /10000 by HTTP/2.0: 200 OK, 10000 bytes
//! GET /index.html by HTTP/2.0: 404 Not Found, 0 bytes
//! ```
//!
//! `TokioIo` of hyper-util makes a stream an I/O object of hyper. HTTP/1 works in the same way.

use anyhow::Result;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use iwarp::{Channel, Connection, Listener, Stream};
use std::convert::Infallible;

async fn open(connection: Connection) -> iwarp::Result<TokioIo<Stream>> {
    let channel = Channel::open(connection).await?;
    Ok(TokioIo::new(Stream::from(channel)))
}

/// Answers `GET /N` with N bytes.
async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut response = Response::new(Full::default());
    match request.uri().path()[1..].parse::<u16>().map(usize::from) {
        Ok(len) => *response.body_mut() = vec![b'x'; len].into(),
        Err(_) => *response.status_mut() = StatusCode::NOT_FOUND,
    }
    Ok(response)
}

async fn serve(listener: Listener) -> Result<()> {
    println!("listening on {}", listener.local_addr());
    loop {
        let connection = listener.accept().await?;
        tokio::spawn(async move {
            let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            let served = http.serve_connection(open(connection).await?, service_fn(answer));
            if let Err(error) = served.await {
                eprintln!("a client failed: {error}");
            }
            Ok::<_, iwarp::Error>(())
        });
    }
}

async fn connect(to: &str) -> Result<()> {
    let io = open(iwarp::connect(to).await?).await?;
    let (requests, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await?;
    let connection = tokio::spawn(connection);
    let mut exchanges = Vec::new();
    for path in ["/0", "/10000", "/index.html"] {
        let mut requests = requests.clone();
        let request = Request::get(format!("http://iwarp{path}")).body(Empty::<Bytes>::new())?;
        exchanges.push(tokio::spawn(async move {
            let response = requests.send_request(request).await?;
            let (version, status) = (response.version(), response.status());
            let len = response.into_body().collect().await?.to_bytes().len();
            hyper::Result::Ok(format!("GET {path} by {version:?}: {status}, {len} bytes"))
        }));
    }
    for exchange in exchanges {
        println!("{}", exchange.await??);
    }
    drop(requests); // ends the connection
    Ok(connection.await??)
}

#[tokio::main]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let listener = iwarp::listen("127.0.0.1:0").bind()?;
            let to = listener.local_addr().to_string();
            tokio::spawn(serve(listener));
            connect(&to).await
        }
        ["serve", at] => serve(iwarp::listen(at).bind()?).await,
        ["connect", to] => connect(to).await,
        _ => anyhow::bail!("usage: http2 [serve ADDR:PORT | connect ADDR:PORT]"),
    }
}
