//! The compared programs with tonic over TCP, its own transport.

use harness::{Role, role};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    match role() {
        Role::Server(job) => {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            job.listening(listener.local_addr()?);
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            let server = Server::builder().add_service(grpc::service(&job));
            Ok(server.serve_with_incoming(incoming).await?)
        }
        Role::Client(job, server) => {
            let channel = Endpoint::new(format!("http://{server}"))?.connect().await?;
            grpc::request(job, channel).await
        }
    }
}
