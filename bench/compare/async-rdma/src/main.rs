//! The compared programs with async-rdma: messages of its agent, and Reads.

use anyhow::Context;
use async_rdma::{LocalMrReadAccess, LocalMrWriteAccess, Rdma, RdmaBuilder, RdmaListener};
use harness::{Job, Role, Work, role, sum};
use std::alloc::Layout;
use std::net::{SocketAddr, TcpListener};

/// The port of the device, and the index of the address in its table.
const PORT: (u8, usize) = (1, 0);

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    match role() {
        Role::Server(job) => serve(job).await,
        Role::Client(job, server) => request(job, server).await,
    }
}

/// Returns registered memory that contains the octets.
fn registered(rdma: &Rdma, octets: &[u8]) -> anyhow::Result<async_rdma::LocalMr> {
    let mut memory = rdma.alloc_local_mr(Layout::from_size_align(octets.len(), 8)?)?;
    memory.as_mut_slice().copy_from_slice(octets);
    Ok(memory)
}

async fn serve(job: Job) -> anyhow::Result<()> {
    // The crate's listener does not return its port.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let listener = RdmaListener::bind(address).await?;
    job.listening(address);
    let rdma = listener.accept(PORT.0, PORT.1, job.size).await?;
    match job.work {
        Work::Echo => loop {
            rdma.send(&rdma.receive().await?).await?;
        },
        Work::Get => {
            rdma.send_local_mr(registered(&rdma, &job.payload())?)
                .await?
        }
        Work::Bulk => {
            let mut total = 0;
            for _ in 0..job.messages() {
                total += sum(&rdma.receive().await?.as_slice());
            }
            rdma.send(&registered(&rdma, &u64::to_le_bytes(total))?)
                .await?;
        }
    }
    std::future::pending().await
}

async fn request(job: Job, server: SocketAddr) -> anyhow::Result<()> {
    let builder = RdmaBuilder::default()
        .set_port_num(PORT.0)
        .set_gid_index(PORT.1);
    let rdma = builder
        .set_max_message_length(job.size)
        .connect(server)
        .await?;
    let mut memory = registered(&rdma, &job.payload())?;
    match job.work {
        Work::Echo => {
            for _ in job.rounds() {
                rdma.send(&memory).await?;
                job.check(&rdma.receive().await?.as_slice());
            }
        }
        Work::Get => {
            let value = rdma.receive_remote_mr().await?;
            for _ in job.rounds() {
                rdma.read(&mut memory, &value).await?;
                job.check(&memory.as_slice());
            }
        }
        Work::Bulk => {
            for _ in job.rounds() {
                rdma.send(&memory).await?;
            }
            let total = rdma.receive().await?;
            let total = total
                .as_slice()
                .first_chunk()
                .copied()
                .context("eight octets")?;
            job.done(Some(u64::from_le_bytes(total)));
        }
    }
    job.done(None)
}
