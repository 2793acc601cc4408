//! A replicated log: the leader writes each entry into the memory of its followers, and an entry is
//! committed when a majority has it. The followers' programs take no part until they read the log.
//!
//! ```sh
//! cargo run -p iwarp --example replicated_log                         # all in this process, or:
//! cargo run -p iwarp --example replicated_log serve 127.0.0.1:7171    # in one terminal,
//! cargo run -p iwarp --example replicated_log serve 127.0.0.1:7172    # in another, then:
//! cargo run -p iwarp --example replicated_log connect 127.0.0.1:7171 127.0.0.1:7172
//! ```
//!
//! The leader prints:
//!
//! ```text
//! committed 100 entries
//! ```
//!
//! A follower's memory has the number of its entries, and then the entries. The leader writes an
//! entry first, and then the number, so the log has no gap whenever the leader fails.

use anyhow::{Context as _, Result, ensure};
use iwarp::{Access, Connection, Endpoint, Listener, Region, RemoteRegion};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::task::JoinSet;

const ENTRY: usize = 8; // words
const ENTRIES: usize = 100;

/// Starts to append an entry. The result is ready when the follower has it.
fn append(
    (follower, log): &(Connection, RemoteRegion<u64>),
    number: usize,
) -> iwarp::Result<impl Future<Output = iwarp::Result<()>> + use<>> {
    let (at, count) = (1 + number * ENTRY, log.at(0)?);
    let (entry, place) = (vec![number as u64; ENTRY], log.slice(at..at + ENTRY)?);
    // Requests of a connection are placed in the order in which they start.
    let entry = follower.write(entry, &place).started();
    let length = follower.write(vec![number as u64 + 1], &count).started();
    // The answer to a Read proves that the Writes before it are placed.
    let proof = follower.get(&count).started();
    Ok(async { (entry.await, length.await, proof.await).2.map(drop) })
}

/// Appends entries, each when the one before is committed. Continues without followers that fail,
/// while a majority of all members, including the leader, has each entry.
async fn lead(followers: &[String]) -> Result<()> {
    let mut connected = BTreeMap::new();
    for (member, to) in followers.iter().enumerate() {
        let connection = iwarp::connect(to).await.context(to.clone())?;
        let log = RemoteRegion::from_bytes(connection.private_data())?;
        connected.insert(member, (connection, log));
    }
    let majority = followers.len().div_ceil(2);
    let mut pending = JoinSet::new();
    for number in 0..ENTRIES {
        for (&member, follower) in &connected {
            let appended = append(follower, number)?;
            pending.spawn(async move { (member, number, appended.await) });
        }
        let mut have = 0;
        while have < majority {
            match pending.join_next().await.context("no majority is left")?? {
                (_, of, Ok(())) => have += usize::from(of == number),
                (member, of, Err(error)) if connected.remove(&member).is_some() => {
                    eprintln!("{} is lost at entry {of}: {error}", followers[member]);
                }
                _ => {}
            }
        }
    }
    println!("committed {ENTRIES} entries");
    while pending.join_next().await.is_some() {}
    Ok(())
}

fn listen(at: &str) -> Result<(Listener, Region<u64>)> {
    let at: SocketAddr = at.parse()?;
    let endpoint = Endpoint::local(at.ip())?;
    let rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let log = endpoint.share(1 + ENTRIES * ENTRY, rights)?;
    let token = log.remote().to_bytes();
    let listener = endpoint.listen(at).private_data(token).bind()?;
    println!("listening on {}", listener.local_addr());
    Ok((listener, log))
}

/// Follows one leader until it leaves, or for this time, and checks the log.
async fn follow((listener, log): (Listener, Region<u64>), time: Duration) -> Result<()> {
    let leader = listener.accept().await?;
    let _ = tokio::time::timeout(time, leader.closed()).await;
    let entries = log.load(0)? as usize;
    for number in 0..entries {
        let entry = log.get(1 + number * ENTRY)?;
        ensure!(entry == number as u64, "entry {number} is wrong");
    }
    println!("a follower has {entries} entries");
    Ok(())
}

#[tokio::main]
async fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let (mut members, mut addresses) = (JoinSet::new(), Vec::new());
            // The last one leaves early, and the others are still a majority.
            for time in [Duration::MAX, Duration::MAX, Duration::from_millis(3)] {
                let log = listen("127.0.0.1:0")?;
                addresses.push(log.0.local_addr().to_string());
                members.spawn(follow(log, time));
            }
            lead(&addresses).await?;
            members.join_all().await.into_iter().collect()
        }
        ["serve", at] => follow(listen(at)?, Duration::MAX).await,
        ["connect", _, ..] => lead(&args[1..]).await,
        _ => anyhow::bail!("usage: replicated_log [serve ADDR:PORT | connect ADDR:PORT …]"),
    }
}
