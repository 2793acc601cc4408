//! The compared programs with rdma-io: its stream with its default transport, and Reads by its
//! `AsyncQp`.

use harness::{Job, Role, Work, role, sum};
use rdma_io::async_cm::{AsyncCmId, AsyncCmListener};
use rdma_io::async_cq::AsyncCq;
use rdma_io::async_qp::AsyncQp;
use rdma_io::async_stream::AsyncRdmaStream;
use rdma_io::cm::{ConnParam, PortSpace};
use rdma_io::mr::{AccessFlags, OwnedMemoryRegion, RemoteMr};
use rdma_io::qp::QpInitAttr;
use rdma_io::send_recv_transport::{SendRecvConfig, SendRecvTransport};
use rdma_io::transport::TransportBuilder;
use std::net::SocketAddr;

type Stream = AsyncRdmaStream<SendRecvTransport>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    match role() {
        Role::Server(job) => serve(job).await,
        Role::Client(job, server) => request(job, server).await,
    }
}

async fn serve(job: Job) -> anyhow::Result<()> {
    let listener = AsyncCmListener::bind(&"127.0.0.1:0".parse()?)?;
    job.listening(listener.local_addr().expect("it is bound"));
    if job.work == Work::Get {
        return serve_value(&job, &listener).await;
    }
    let mut stream = AsyncRdmaStream::new(SendRecvConfig::stream().accept(&listener).await?);
    let mut buffer = vec![0; job.size];
    if job.work == Work::Echo {
        loop {
            read_exact(&mut stream, &mut buffer).await?;
            stream.write_all(&buffer).await?;
        }
    }
    let (mut left, mut total) = (job.messages() * job.size, 0);
    while left > 0 {
        let n = stream.read(&mut buffer).await?;
        anyhow::ensure!(n > 0, "the client is gone");
        total += sum(&buffer[..n]);
        left -= n;
    }
    stream.write_all(&total.to_le_bytes()).await?;
    std::future::pending().await
}

async fn request(job: Job, server: SocketAddr) -> anyhow::Result<()> {
    if job.work == Work::Get {
        return request_value(job, server).await;
    }
    let mut stream = AsyncRdmaStream::new(SendRecvConfig::stream().connect(&server).await?);
    let payload = job.payload();
    let mut buffer = vec![0; job.size];
    for _ in job.rounds() {
        stream.write_all(&payload).await?;
        if job.work == Work::Echo {
            read_exact(&mut stream, &mut buffer).await?;
            job.check(&buffer);
        }
    }
    let mut total = [0; 8];
    if job.work == Work::Bulk {
        read_exact(&mut stream, &mut total).await?;
    }
    job.done(Some(u64::from_le_bytes(total)))
}

async fn read_exact(stream: &mut Stream, mut buffer: &mut [u8]) -> anyhow::Result<()> {
    while !buffer.is_empty() {
        let n = stream.read(buffer).await?;
        anyhow::ensure!(n > 0, "the peer is gone");
        buffer = &mut buffer[n..];
    }
    Ok(())
}

/// Sends the address and key of the value in a message. The client needs nothing else.
async fn serve_value(job: &Job, listener: &AsyncCmListener) -> anyhow::Result<()> {
    let id = listener.get_request().await?;
    let (pd, context) = (id.alloc_pd()?, id.verbs_context().expect("a device"));
    let cqs = [
        AsyncCq::create_tokio(context.clone(), 4)?,
        AsyncCq::create_tokio(context, 4)?,
    ];
    let attributes = QpInitAttr::default();
    let qp = id.create_qp_with_cq(&pd, &attributes, Some(cqs[0].cq()), Some(cqs[1].cq()))?;
    let _id = listener.complete_accept(id, &ConnParam::default()).await?;
    let [send_cq, receive_cq] = cqs;
    let qp = AsyncQp::new(qp, send_cq, receive_cq);
    let rights = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
    let value = pd.reg_mr_owned(job.payload(), rights)?;
    let RemoteMr { addr, rkey, len } = value.to_remote();
    let token = serde_json::to_vec(&(addr, rkey, len))?;
    let length = token.len();
    let token = pd.reg_mr_owned(token, AccessFlags::LOCAL_WRITE)?;
    qp.send(&token, 0, length, 0).await?;
    std::future::pending().await
}

async fn request_value(job: Job, server: SocketAddr) -> anyhow::Result<()> {
    let id = AsyncCmId::new(PortSpace::Tcp)?;
    id.resolve_addr(None, &server, 2000).await?;
    id.resolve_route(2000).await?;
    let (pd, context) = (id.alloc_pd()?, id.verbs_context().expect("a device"));
    let cqs = [
        AsyncCq::create_tokio(context.clone(), 4)?,
        AsyncCq::create_tokio(context, 4)?,
    ];
    let attributes = QpInitAttr::default();
    let qp = id.create_qp_with_cq(&pd, &attributes, Some(cqs[0].cq()), Some(cqs[1].cq()))?;
    let [send_cq, receive_cq] = cqs;
    let qp = AsyncQp::new(qp, send_cq, receive_cq);
    let value: OwnedMemoryRegion = pd.reg_mr_owned(vec![0; job.size], AccessFlags::LOCAL_WRITE)?;
    qp.post_recv_buffer(&value, 0)?;
    id.connect(&ConnParam::default()).await?;
    let received = qp.recv_cq().poll_wr_id(0).await?;
    let token = &value.as_slice()[..received.byte_len() as usize];
    let (addr, rkey, len) = serde_json::from_slice(token)?;
    let there = RemoteMr { addr, rkey, len };
    for round in job.rounds() {
        let read = qp
            .read_remote(&value, 0, job.size, &there, 0, round as u64)
            .await?;
        anyhow::ensure!(read.is_success(), "the Read failed");
        job.check(value.as_slice());
    }
    job.done(None)
}
