//! A queue of work in the server's memory. Workers take items by atomics, and write results by RDMA
//! Writes; the server's program takes no part.
//!
//! ```sh
//! cargo run -p iwarp --example work_queue                           # all in this process, or:
//! cargo run -p iwarp --example work_queue serve 127.0.0.1:7171      # in one terminal, and
//! cargo run -p iwarp --example work_queue connect 127.0.0.1:7171    # in others, one per worker
//! ```
//!
//! Each worker prints:
//!
//! ```text
//! all results of this worker are in place
//! ```

use anyhow::{Result, ensure};
use iwarp::{Access, Endpoint, Listener, Region, RemoteRegion};
use std::net::SocketAddr;

const ITEMS: usize = 1000;

/// The tokens of the queue, in the order in which they are sent.
struct Queue {
    /// The number of the next item.
    next: RemoteRegion<u64>,
    items: RemoteRegion<u64>,
    results: RemoteRegion<u64>,
}

impl Queue {
    fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut tokens = bytes.chunks(RemoteRegion::<u64>::ENCODED_LEN);
        let mut token = || RemoteRegion::from_bytes(tokens.next().unwrap_or_default());
        Ok(Self {
            next: token()?,
            items: token()?,
            results: token()?,
        })
    }
}

/// Takes items until none is left.
fn work(at: &str) -> Result<()> {
    let connection = iwarp::connect(at).wait()?;
    let queue = Queue::from_bytes(connection.private_data())?;
    let mut squares = Vec::new();
    loop {
        // No two workers get the same number.
        let number = connection.fetch_add(&queue.next, 1).wait()? as usize;
        if number >= queue.items.len() {
            break;
        }
        let item = connection.get(&queue.items.at(number)?).wait()?;
        let (square, place) = (item * item, queue.results.at(number)?);
        connection.write(&[square], &place).wait()?;
        squares.push((number, square));
    }
    // A Write has completed when its data may be reused. The answer to a later Read proves that it
    // is placed.
    let results = connection.allocate::<u64>(queue.results.len())?;
    connection.read_into(&results, &queue.results).wait()?;
    for (number, square) in &squares {
        ensure!(results.get(*number)? == *square, "{number} is not in place");
    }
    println!("all results of this worker are in place");
    println!("it had {} items", squares.len());
    Ok(())
}

/// Returns a listener whose peers get the tokens of the queue, and the queue's memory.
fn listen(at: &str) -> Result<(Listener, [Region<u64>; 3])> {
    let at: SocketAddr = at.parse()?;
    let endpoint = Endpoint::local(at.ip())?;
    let next = endpoint.share::<u64>(1, Access::REMOTE_ATOMIC | Access::REMOTE_READ)?;
    let items = endpoint.adopt((1..=ITEMS as u64).collect::<Vec<_>>(), Access::REMOTE_READ)?;
    let results = endpoint.share(ITEMS, Access::REMOTE_READ | Access::REMOTE_WRITE)?;
    let tokens = [&next, &items, &results].map(|region| region.remote().to_bytes());
    let listener = endpoint.listen(at).private_data(tokens.concat()).bind()?;
    Ok((listener, [next, items, results]))
}

fn serve(listener: &Listener) -> Result<()> {
    println!("listening on {}", listener.local_addr());
    loop {
        let worker = listener.accept().wait()?;
        // The connection lasts until its worker leaves.
        std::thread::spawn(move || worker.closed().wait());
    }
}

fn four_workers() -> Result<()> {
    let (listener, [_next, _items, results]) = listen("127.0.0.1:0")?;
    let to = listener.local_addr().to_string();
    std::thread::spawn(move || serve(&listener));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(|| work(&to))).collect();
        let mut ends = workers.into_iter().map(|worker| worker.join());
        ends.try_for_each(|end| end.expect("no panic"))
    })?;
    let squares: Vec<_> = (1..=ITEMS as u64).map(|n| n * n).collect();
    ensure!(results.to_vec()? == squares, "a result is missing");
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => four_workers(),
        ["serve", at] => {
            let (listener, _memory) = listen(at)?;
            serve(&listener)
        }
        ["connect", to] => work(to),
        _ => anyhow::bail!("usage: work_queue [serve ADDR:PORT | connect ADDR:PORT]"),
    }
}
