//! The compared programs with iwarp: messages, a stream for bulk data, and Reads of shared memory.

use harness::{Job, Role, Work, role, sum};
use iwarp::{Access, Channel, Endpoint, RemoteRegion, Stream};
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    match role() {
        Role::Server(job) => serve(job).await,
        Role::Client(job, server) => request(job, server).await,
    }
}

async fn serve(job: Job) -> anyhow::Result<()> {
    let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
    let value = endpoint.adopt(job.payload(), Access::REMOTE_READ)?;
    let listener = endpoint
        .listen("127.0.0.1:0")
        .private_data(value.remote().to_bytes())
        .bind()?;
    job.listening(listener.local_addr());
    let connection = listener.accept().await?;
    match job.work {
        Work::Echo => loop {
            connection.send(&*connection.recv().await?).await?;
        },
        Work::Get => {}
        Work::Bulk => {
            let mut stream = Stream::from(Channel::open(connection).await?);
            let (mut left, mut total) = (job.messages() * job.size, 0);
            let mut buffer = vec![0; job.size];
            while left > 0 {
                let n = stream.read(&mut buffer).await?;
                anyhow::ensure!(n > 0, "the client is gone");
                total += sum(&buffer[..n]);
                left -= n;
            }
            stream.write_u64(total).await?;
            stream.flush().await?;
        }
    }
    std::future::pending().await
}

async fn request(job: Job, server: SocketAddr) -> anyhow::Result<()> {
    let connection = iwarp::connect(server).await?;
    let payload = job.payload();
    match job.work {
        Work::Echo => {
            for _ in job.rounds() {
                connection.send(&payload).await?;
                job.check(&connection.recv().await?);
            }
        }
        Work::Get => {
            let there = RemoteRegion::<u8>::from_bytes(connection.private_data())?;
            let mut value = connection.allocate::<u8>(job.size)?;
            for _ in job.rounds() {
                connection.read_into(&value, &there).await?;
                job.check(value.get_mut().expect("nobody else uses it"));
            }
        }
        Work::Bulk => {
            let mut stream = Stream::from(Channel::open(connection).await?);
            for _ in job.rounds() {
                stream.write_all(&payload).await?;
            }
            stream.flush().await?;
            job.done(Some(stream.read_u64().await?));
        }
    }
    job.done(None)
}
