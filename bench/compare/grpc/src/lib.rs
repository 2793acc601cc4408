//! The compared programs as a gRPC service. The programs that use it add a transport.

use anyhow::Context as _;
use bytes::Bytes;
use generated::compared_client::ComparedClient;
use generated::compared_server::{Compared, ComparedServer};
use harness::{Job, Work, sum};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

mod generated {
    include!(concat!(env!("OUT_DIR"), "/compared.Compared.rs"));
}

/// The only message: octets.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Message {
    #[prost(bytes = "bytes", tag = "1")]
    octets: Bytes,
}

/// The server: its value.
pub struct Server(Bytes);

/// Returns the service, for tonic's server.
pub fn service(job: &Job) -> ComparedServer<Server> {
    ComparedServer::new(Server(job.payload().into()))
}

#[tonic::async_trait]
impl Compared for Server {
    async fn echo(&self, request: Request<Message>) -> Result<Response<Message>, Status> {
        Ok(Response::new(request.into_inner()))
    }

    async fn get(&self, _key: Request<Message>) -> Result<Response<Message>, Status> {
        Ok(Response::new(Message {
            octets: self.0.clone(),
        }))
    }

    async fn bulk(
        &self,
        request: Request<Streaming<Message>>,
    ) -> Result<Response<Message>, Status> {
        let (mut messages, mut total) = (request.into_inner(), 0);
        while let Some(message) = messages.message().await? {
            total += sum(&message.octets);
        }
        Ok(Response::new(Message {
            octets: total.to_le_bytes().to_vec().into(),
        }))
    }
}

/// Makes the calls of the client, and ends the process.
///
/// # Errors
/// If a call fails.
pub async fn request(job: Job, channel: Channel) -> anyhow::Result<()> {
    let mut client = ComparedClient::new(channel);
    let payload = Message {
        octets: job.payload().into(),
    };
    if job.work == Work::Bulk {
        let (to, messages) = tokio::sync::mpsc::channel(8);
        let call = async move { client.bulk(ReceiverStream::new(messages)).await };
        let reply = tokio::spawn(call);
        for _ in job.rounds() {
            to.send(payload.clone()).await?;
        }
        drop(to);
        let total = reply.await??.into_inner().octets;
        let total = total.first_chunk().copied().context("eight octets")?;
        job.done(Some(u64::from_le_bytes(total)));
    }
    let key = Message {
        octets: Bytes::from_static(&[0; 8]),
    };
    for _ in job.rounds() {
        let reply = match job.work {
            Work::Echo => client.echo(payload.clone()).await?,
            _ => client.get(key.clone()).await?,
        };
        job.check(&reply.into_inner().octets);
    }
    job.done(None)
}
