//! The compared programs with tonic over rdma-io.

use harness::{Role, role};
use rdma_io::send_recv_transport::SendRecvConfig;
use rdma_io_tonic::{RdmaConnector, RdmaIncoming};
use tonic::transport::{Endpoint, Server};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    match role() {
        Role::Server(job) => {
            let incoming = RdmaIncoming::bind(&"127.0.0.1:0".parse()?, SendRecvConfig::stream())?;
            job.listening(incoming.local_addr().expect("it is bound"));
            let server = Server::builder().add_service(grpc::service(&job));
            Ok(server.serve_with_incoming(incoming).await?)
        }
        Role::Client(job, server) => {
            let connector = RdmaConnector::new(SendRecvConfig::stream());
            let endpoint = Endpoint::new(format!("http://{server}"))?;
            grpc::request(job, endpoint.connect_with_connector(connector).await?).await
        }
    }
}
