//! The compared programs with quinn: QUIC over UDP, which encrypts all data.

use harness::{Job, Role, Work, role, sum};
use quinn::rustls::{RootCertStore, pki_types::PrivatePkcs8KeyDer};
use quinn::{ClientConfig, Endpoint, RecvStream, SendStream, ServerConfig};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    match role() {
        Role::Server(job) => serve(job).await,
        Role::Client(job, server) => request(job, server).await,
    }
}

/// The client trusts the certificate that it finds here, in place of an authority's.
fn certificate_path() -> std::path::PathBuf {
    std::env::temp_dir().join("iwarp-compare-quinn.der")
}

async fn serve(job: Job) -> anyhow::Result<()> {
    let certified = rcgen::generate_simple_self_signed(vec!["localhost".into()])?;
    let certificate = certified.cert.der().clone();
    std::fs::write(certificate_path(), &certificate)?;
    let key = PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der());
    let config = ServerConfig::with_single_cert(vec![certificate], key.into())?;
    let endpoint = Endpoint::server(config, "127.0.0.1:0".parse()?)?;
    job.listening(endpoint.local_addr()?);
    let connection = endpoint.accept().await.expect("a client").await?;
    let (mut to, mut from) = connection.accept_bi().await?;
    let mut buffer = job.payload();
    let _request = from.read_u8().await?;
    match job.work {
        Work::Echo => loop {
            from.read_exact(&mut buffer).await?;
            to.write_all(&buffer).await?;
        },
        Work::Get => loop {
            let _key = from.read_u64().await?;
            to.write_all(&buffer).await?;
        },
        Work::Bulk => {
            let (mut left, mut total) = (job.messages() * job.size, 0);
            while left > 0 {
                let n = from.read(&mut buffer).await?;
                let n = n.ok_or_else(|| anyhow::anyhow!("the client is gone"))?;
                total += sum(&buffer[..n]);
                left -= n;
            }
            to.write_u64(total).await?;
            std::future::pending().await
        }
    }
}

async fn connect(server: SocketAddr) -> anyhow::Result<(SendStream, RecvStream)> {
    let mut roots = RootCertStore::empty();
    roots.add(std::fs::read(certificate_path())?.into())?;
    let mut endpoint = Endpoint::client("127.0.0.1:0".parse()?)?;
    endpoint.set_default_client_config(ClientConfig::with_root_certificates(Arc::new(roots))?);
    let connection = endpoint.connect(server, "localhost")?.await?;
    let (mut to, from) = connection.open_bi().await?;
    // The peer sees a stream only when it carries data.
    to.write_u8(0).await?;
    Ok((to, from))
}

async fn request(job: Job, server: SocketAddr) -> anyhow::Result<()> {
    let (mut to, mut from) = connect(server).await?;
    let payload = job.payload();
    let mut buffer = vec![0; job.size];
    for key in job.rounds() {
        match job.work {
            Work::Echo => {
                to.write_all(&payload).await?;
                from.read_exact(&mut buffer).await?;
                job.check(&buffer);
            }
            Work::Get => {
                to.write_u64(key as u64).await?;
                from.read_exact(&mut buffer).await?;
                job.check(&buffer);
            }
            Work::Bulk => to.write_all(&payload).await?,
        }
    }
    let total = if job.work == Work::Bulk {
        Some(from.read_u64().await?)
    } else {
        None
    };
    job.done(total)
}
