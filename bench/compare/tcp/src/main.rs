//! The compared programs with tokio's TCP.

use harness::{Job, Role, Work, role, sum};
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    match role() {
        Role::Server(job) => serve(job).await,
        Role::Client(job, server) => request(job, server).await,
    }
}

async fn serve(job: Job) -> anyhow::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    job.listening(listener.local_addr()?);
    let (mut stream, _) = listener.accept().await?;
    stream.set_nodelay(true)?;
    let mut buffer = job.payload();
    match job.work {
        Work::Echo => loop {
            stream.read_exact(&mut buffer).await?;
            stream.write_all(&buffer).await?;
        },
        Work::Get => loop {
            let _key = stream.read_u64().await?;
            stream.write_all(&buffer).await?;
        },
        Work::Bulk => {
            let (mut left, mut total) = (job.messages() * job.size, 0);
            while left > 0 {
                let n = stream.read(&mut buffer).await?;
                anyhow::ensure!(n > 0, "the client is gone");
                total += sum(&buffer[..n]);
                left -= n;
            }
            stream.write_u64(total).await?;
            Ok(std::future::pending().await)
        }
    }
}

async fn request(job: Job, server: SocketAddr) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    let payload = job.payload();
    let mut buffer = vec![0; job.size];
    for key in job.rounds() {
        match job.work {
            Work::Echo => {
                stream.write_all(&payload).await?;
                stream.read_exact(&mut buffer).await?;
                job.check(&buffer);
            }
            Work::Get => {
                stream.write_u64(key as u64).await?;
                stream.read_exact(&mut buffer).await?;
                job.check(&buffer);
            }
            Work::Bulk => stream.write_all(&payload).await?,
        }
    }
    let total = if job.work == Work::Bulk {
        Some(stream.read_u64().await?)
    } else {
        None
    };
    job.done(total)
}
