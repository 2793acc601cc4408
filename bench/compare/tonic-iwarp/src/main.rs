//! The compared programs with tonic over iwarp.

use harness::{Role, role};
use hyper_util::rt::TokioIo;
use iwarp::{Channel, Stream};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;
use tonic::transport::{Endpoint, Server};

/// A stream, with what tonic's server wants to know of it.
struct Io(Stream);

impl Connected for Io {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Io {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Io {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        octets: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, octets)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    match role() {
        Role::Server(job) => {
            let listener = iwarp::listen("127.0.0.1:0").bind()?;
            job.listening(listener.local_addr());
            let channel = Channel::open(listener.accept().await?).await?;
            let incoming = tokio_stream::once(io::Result::Ok(Io(channel.into())));
            let server = Server::builder().add_service(grpc::service(&job));
            server.serve_with_incoming(incoming).await?;
            std::future::pending().await
        }
        Role::Client(job, server) => {
            let connect = tower::service_fn(move |_| async move {
                let channel = Channel::open(iwarp::connect(server).await?).await?;
                Ok::<_, iwarp::Error>(TokioIo::new(Stream::from(channel)))
            });
            let endpoint = Endpoint::new(format!("http://{server}"))?;
            grpc::request(job, endpoint.connect_with_connector(connect).await?).await
        }
    }
}
