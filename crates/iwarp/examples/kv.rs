//! A key-value store whose clients look up keys by RDMA Reads only. The server's program takes no
//! part in the look-ups.
//!
//! ```sh
//! cargo run --example kv        # server and client in this process
//! ```
//!
//! The table is shared memory: buckets of 16 words, found by a hash of the key and open addressing.
//! A bucket begins and ends with a version number. If the two differ, or are odd, the reader saw a
//! bucket that was being changed, and reads it again. The client gets the token of the table from
//! the private data of the connection.

use iwarp::bytemuck::{cast_slice, cast_slice_mut};
use iwarp::{Access, Connection, Endpoint, Error, Region, RemoteRegion, Result};
use std::time::Duration;

const BUCKETS: usize = 1024;
/// Words of a bucket: version, 4 for the key, 10 for the value, version.
const WORDS: usize = 16;
const VALUE: usize = 5;

fn bucket(key: &str, step: usize) -> usize {
    // FNV-1a, because both ends must compute the same hash, also on different machines.
    let hash = key.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    });
    (hash as usize).wrapping_add(step) % BUCKETS
}

/// Returns text in words, padded with zeros.
fn words<const N: usize>(text: &str) -> Result<[u64; N]> {
    let mut out = [0; N];
    if text.is_empty() || text.len() > size_of_val(&out) {
        return Err(Error::InvalidArgument("1 to 32 and 1 to 80 octets"));
    }
    cast_slice_mut(&mut out)[..text.len()].copy_from_slice(text.as_bytes());
    Ok(out)
}

fn text(words: &[u64]) -> String {
    let text = String::from_utf8_lossy(cast_slice(words));
    text.trim_end_matches('\0').into()
}

fn put(table: &Region<u64>, key: &str, value: &str) -> Result<()> {
    let (k, v) = (words::<4>(key)?, words::<10>(value)?);
    for step in 0..BUCKETS {
        let at = bucket(key, step) * WORDS;
        let there = table.slice(at + 1..at + VALUE)?.to_vec()?;
        if there != [0; 4] && there != k {
            continue;
        }
        // The first version is odd while the bucket changes.
        let version = table.load(at)?;
        table.store(at, version + 1)?;
        table.write_at(at + 1, &k)?;
        table.write_at(at + VALUE, &v)?;
        table.store(at + WORDS - 1, version + 2)?;
        return table.store(at, version + 2);
    }
    Err(Error::OutOfMemory)
}

fn get(connection: &Connection, table: &RemoteRegion<u64>, key: &str) -> Result<Option<String>> {
    let k = words::<4>(key)?;
    for step in 0..BUCKETS {
        let at = bucket(key, step) * WORDS;
        let mut there = vec![1_u64; WORDS];
        while there[0] != there[WORDS - 1] || !there[0].is_multiple_of(2) {
            there = connection.read(&table.slice(at..at + WORDS)?).wait()?;
        }
        if there[1] == 0 {
            break;
        } else if there[1..VALUE] == k {
            return Ok(Some(text(&there[VALUE..WORDS - 1])));
        }
    }
    Ok(None)
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
    let table = endpoint.share::<u64>(BUCKETS * WORDS, Access::REMOTE_READ)?;
    put(&table, "colour", "blue")?;
    let listen = endpoint.listen("127.0.0.1:0");
    let listener = listen.private_data(table.remote().to_bytes()).bind()?;
    let address = listener.local_addr();
    let server = std::thread::spawn(move || -> Result<()> {
        let client = listener.accept().wait()?;
        // While the client is connected, one value changes again and again.
        let mut round = 0;
        while let Err(Error::TimedOut(_)) = client.closed().wait_for(Duration::from_millis(1)) {
            round += 1;
            put(&table, "round", &round.to_string())?;
        }
        Ok(())
    });
    let client = iwarp::connect(address).wait()?;
    let there = RemoteRegion::from_bytes(client.private_data())?;
    println!("colour = {:?}", get(&client, &there, "colour")?);
    println!("size = {:?}", get(&client, &there, "size")?);
    let mut last = 0_u64;
    for _ in 0..200 {
        let now = get(&client, &there, "round")?.map_or(Ok(0), |v| v.parse())?;
        assert!(now >= last, "{now} after {last}");
        last = now;
    }
    println!("200 reads of a changing value, the last was {last}");
    drop(client);
    Ok(server.join().expect("the server does not panic")?)
}
