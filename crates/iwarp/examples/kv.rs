//! A key-value cache whose clients look up keys by RDMA Reads only. The server's program takes no
//! part in the look-ups. It changes one value all the time.
//!
//! ```sh
//! cargo run -p iwarp --example kv                           # both ends in this process, or:
//! cargo run -p iwarp --example kv serve 127.0.0.1:7171      # in one terminal, and
//! cargo run -p iwarp --example kv connect 127.0.0.1:7171    # in another one
//! ```
//!
//! The client prints:
//!
//! ```text
//! colour = Some("blue"), size = None
//! 200 reads of a changing value
//! ```
//!
//! A bucket of the table has one key. It begins and ends with a version, and both are odd while it
//! changes. A reader that sees an odd version, or two different ones, reads the bucket again.

use anyhow::{Result, ensure};
use iwarp::bytemuck::{cast_slice, cast_slice_mut};
use iwarp::{Access, Connection, Endpoint, Listener, Region, RemoteRegion};
use std::net::SocketAddr;
use std::sync::atomic::{Ordering, fence};

const BUCKETS: usize = 1024;
/// Words of a bucket: version, 4 for the key, 10 for the value, version.
const WORDS: usize = 16;
const VALUE: usize = 5;

/// Returns the bucket of a key, in words. FNV-1a, because both ends must compute the same hash.
fn bucket(key: &str) -> usize {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    key.bytes().fold(0xcbf2_9ce4_8422_2325, step) as usize % BUCKETS * WORDS
}

/// Returns text in words, padded with zeros.
fn words<const N: usize>(text: &str) -> Result<[u64; N]> {
    let mut out = [0; N];
    ensure!(text.len() <= size_of_val(&out), "'{text}' is too long");
    cast_slice_mut(&mut out)[..text.len()].copy_from_slice(text.as_bytes());
    Ok(out)
}

fn put(table: &Region<u64>, key: &str, value: &str) -> Result<()> {
    let (k, v) = (words::<4>(key)?, words::<10>(value)?);
    let (first, last) = (bucket(key), bucket(key) + WORDS - 1);
    let version = table.load(first)?;
    table.store(first, version + 1)?;
    table.store(last, version + 1)?;
    fence(Ordering::Release); // the odd versions are visible before the bucket changes
    table.write_at(first + 1, &k)?;
    table.write_at(first + VALUE, &v)?;
    table.store(last, version + 2)?;
    Ok(table.store(first, version + 2)?)
}

fn get(connection: &Connection, table: &RemoteRegion<u64>, key: &str) -> Result<Option<String>> {
    let (first, k) = (bucket(key), words::<4>(key)?);
    let bucket = table.slice(first..first + WORDS)?;
    loop {
        let there = connection.read(&bucket).wait()?;
        if there[0] == there[WORDS - 1] && there[0].is_multiple_of(2) {
            let value = String::from_utf8_lossy(cast_slice(&there[VALUE..WORDS - 1]));
            return Ok((there[1..VALUE] == k).then(|| value.trim_end_matches('\0').into()));
        }
    }
}

fn listen(at: &str) -> Result<Listener> {
    let at: SocketAddr = at.parse()?;
    let endpoint = Endpoint::local(at.ip())?;
    let table = endpoint.share::<u64>(BUCKETS * WORDS, Access::REMOTE_READ)?;
    put(&table, "colour", "blue")?;
    let token = table.remote().to_bytes();
    let listener = endpoint.listen(at).private_data(token).bind()?;
    std::thread::spawn(move || -> Result<()> {
        for round in 1_u64.. {
            std::thread::sleep(std::time::Duration::from_micros(100));
            put(&table, "round", &round.to_string())?;
        }
        Ok(())
    });
    Ok(listener)
}

fn serve(listener: &Listener) -> Result<()> {
    println!("listening on {}", listener.local_addr());
    loop {
        let client = listener.accept().wait()?;
        std::thread::spawn(move || client.closed().wait());
    }
}

fn connect(to: &str) -> Result<()> {
    let client = iwarp::connect(to).wait()?;
    let table = RemoteRegion::from_bytes(client.private_data())?;
    let get = |key| get(&client, &table, key);
    println!("colour = {:?}, size = {:?}", get("colour")?, get("size")?);
    let round = |_| anyhow::Ok(get("round")?.map_or(Ok(0), |round| round.parse())?);
    let rounds: Vec<u64> = (0..200).map(round).collect::<Result<_>>()?;
    ensure!(rounds.is_sorted(), "a value was older than the one before");
    println!("200 reads of a changing value");
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let listener = listen("127.0.0.1:0")?;
            let to = listener.local_addr().to_string();
            std::thread::spawn(move || serve(&listener));
            connect(&to)
        }
        ["serve", at] => serve(&listen(at)?),
        ["connect", to] => connect(to),
        _ => anyhow::bail!("usage: kv [serve ADDR:PORT | connect ADDR:PORT]"),
    }
}
