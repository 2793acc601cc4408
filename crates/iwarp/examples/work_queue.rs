//! A queue of work in the server's memory. Workers take items by atomics, and write results by RDMA
//! Writes; the server's program takes no part until all is done.
//!
//! ```sh
//! cargo run --example work_queue        # server and four workers in this process
//! ```

use iwarp::{Access, Endpoint, Options, RemoteRegion, Result};
use std::net::SocketAddr;

const ITEMS: usize = 1000;

/// The tokens of the queue, in the order in which they are sent: the number of the next item, the
/// items, the results.
struct Queue {
    next: RemoteRegion<u64>,
    items: RemoteRegion<u64>,
    results: RemoteRegion<u64>,
}

impl Queue {
    fn from_bytes(octets: &[u8]) -> Result<Self> {
        let token = |n| {
            let octets = octets.get(n * RemoteRegion::<u64>::ENCODED_LEN..);
            RemoteRegion::from_bytes(octets.unwrap_or_default())
        };
        Ok(Self {
            next: token(0)?,
            items: token(1)?,
            results: token(2)?,
        })
    }
}

/// Takes items until none is left; returns how many it had.
fn work(at: SocketAddr) -> Result<usize> {
    let connection = iwarp::connect(at).wait()?;
    let queue = Queue::from_bytes(connection.private_data())?;
    let mut had = 0;
    loop {
        // No two workers get the same number.
        let number = connection.fetch_add(&queue.next, 1).wait()? as usize;
        if number >= queue.items.len() {
            // The answer to a Read proves that the Writes before it are placed.
            connection.get(&queue.next).wait()?;
            return Ok(had);
        }
        let item = connection.get(&queue.items.at(number)?).wait()?;
        let square = [item * item];
        connection
            .write(&square, &queue.results.at(number)?)
            .wait()?;
        had += 1;
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
    let next = endpoint.share::<u64>(1, Access::REMOTE_ATOMIC | Access::REMOTE_READ)?;
    let items = endpoint.share::<u64>(ITEMS, Access::REMOTE_READ)?;
    let results = endpoint.share::<u64>(ITEMS, Access::REMOTE_WRITE)?;
    items.write_at(0, &(1..=ITEMS as u64).collect::<Vec<_>>())?;
    let tokens = [&next, &items, &results].map(|region| region.remote().to_bytes());
    let options = Options::new().receives(0).private_data(tokens.concat());
    let listener = endpoint.listen("127.0.0.1:0").options(options).bind()?;
    let at = listener.local_addr();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(move || work(at))).collect();
        for _ in 0..workers.len() {
            let connection = listener.accept().wait()?;
            // It lasts until its worker leaves.
            scope.spawn(move || connection.closed().wait());
        }
        for worker in workers {
            println!("a worker had {} items", worker.join().expect("no panic")?);
        }
        let squares = (1..=ITEMS as u64).map(|n| n * n);
        let right = results
            .to_vec()?
            .into_iter()
            .zip(squares)
            .filter(|(a, b)| a == b);
        println!("{} of {ITEMS} results are right", right.count());
        Ok(())
    })
}
