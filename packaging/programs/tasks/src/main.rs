//! A replicated log in the style of spawned tasks: each Write is a task of its own.
//!
//! `cargo xtask release` builds this program outside of the workspace, against the packaged crates,
//! and compares what it prints with `expected.txt`.

use bytes::Bytes;
use iwarp::{Access, Connection, Endpoint, RemoteRegion, Stream};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinSet;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const FOLLOWERS: usize = 3;
const ENTRIES: usize = 100;
const ENTRY_BYTES: usize = 4096;

/// The leader's view of a follower.
struct Follower {
    connection: Connection,
    log: RemoteRegion<u8>,
}

/// Shares a log, and returns its contents when the leader has closed the connection.
async fn follow(endpoint: Endpoint, listener: iwarp::Listener) -> Result<Vec<u8>, Failure> {
    let log = endpoint.share::<u8>(ENTRIES * ENTRY_BYTES, Access::REMOTE_WRITE)?;
    let connection = listener.accept().await?;
    connection.send(&log.remote().to_bytes()).await?;
    connection.closed().await?.into_result()?;
    Ok(log.to_vec()?)
}

fn entry(number: usize) -> Bytes {
    Bytes::from(vec![(number % 251) as u8; ENTRY_BYTES])
}

/// Replicates all entries. The handle of an entry's data is shared by its Writes.
async fn replicate() -> Result<usize, Failure> {
    let mut following = JoinSet::new();
    let mut followers = Vec::new();
    for _ in 0..FOLLOWERS {
        let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
        let listener = endpoint.listen("127.0.0.1:0").bind()?;
        let address = listener.local_addr();
        following.spawn(follow(endpoint, listener));
        let connection = iwarp::connect(address).await?;
        let token = connection.recv().await?;
        let log = RemoteRegion::from_bytes(&token)?;
        followers.push(Follower { connection, log });
    }
    let mut writes = JoinSet::new();
    for number in 0..ENTRIES {
        let (data, start) = (entry(number), number * ENTRY_BYTES);
        for follower in &followers {
            let place = follower.log.slice(start..start + ENTRY_BYTES)?;
            writes.spawn(follower.connection.write(data.clone(), &place));
        }
    }
    while let Some(write) = writes.join_next().await {
        write??;
    }
    drop(followers); // closes the connections
    let expected = (0..ENTRIES).map(entry).collect::<Vec<_>>().concat();
    let mut complete = 0;
    while let Some(log) = following.join_next().await {
        complete += usize::from(log?? == expected);
    }
    Ok(complete)
}

/// Sends a text through a byte stream and back, as tokio's I/O traits.
async fn echo(text: &str) -> Result<String, Failure> {
    let listener = iwarp::listen("127.0.0.1:0").bind()?;
    let address = listener.local_addr();
    let server = tokio::spawn(async move {
        let channel = iwarp::Channel::open(listener.accept().await?).await?;
        let (mut read, mut write) = tokio::io::split(Stream::from(channel));
        tokio::io::copy(&mut read, &mut write).await?;
        write.shutdown().await?;
        Ok::<_, Failure>(())
    });
    let channel = iwarp::Channel::open(iwarp::connect(address).await?).await?;
    let mut stream = Stream::from(channel);
    stream.write_all(text.as_bytes()).await?;
    stream.shutdown().await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    server.await??;
    Ok(answer)
}

/// Returns what the program prints.
async fn run() -> Result<String, Failure> {
    let complete = replicate().await?;
    let answer = echo("a byte stream").await?;
    Ok(format!(
        "{complete} of {FOLLOWERS} logs are complete\nthe stream returned {answer:?}\n"
    ))
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    print!("{}", run().await?);
    Ok(())
}

#[cfg(test)]
mod tests {
    #[tokio::test(flavor = "multi_thread")]
    async fn output_is_expected() {
        assert_eq!(super::run().await.unwrap(), include_str!("../expected.txt"));
    }
}
