//! Workers in the style of threads: they share a connection, draw tickets from the peer's memory by
//! atomics, and write results there.
//!
//! `cargo xtask release` builds this program outside of the workspace, against the packaged crates,
//! and compares what it prints with `expected.txt`.

use iwarp::{Access, Connection, Endpoint, RemoteRegion, Result};
use std::thread;

const WORKERS: usize = 4;
const TICKETS: usize = 1000;

/// Draws tickets until none is left, and writes the square of each to its place. Returns the number
/// of tickets that it got.
fn work(connection: &Connection, table: &RemoteRegion<u64>) -> Result<usize> {
    let (counter, results) = (table.at(0)?, table.slice(1..)?);
    let mut drawn = 0;
    loop {
        let ticket = connection.fetch_add(&counter, 1).wait()?;
        let Some(place) = usize::try_from(ticket)
            .ok()
            .filter(|&ticket| ticket < TICKETS)
        else {
            return Ok(drawn);
        };
        connection
            .write(&[ticket * ticket], &results.at(place)?)
            .wait()?;
        drawn += 1;
    }
}

/// Returns what the program prints.
fn run() -> Result<String> {
    let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
    let rights = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let table = endpoint.share::<u64>(1 + TICKETS, rights)?;
    let token = table.remote().to_bytes();
    let listener = endpoint.listen("127.0.0.1:0").private_data(token).bind()?;
    let address = listener.local_addr();
    let server = thread::spawn(move || -> Result<()> {
        listener.accept().wait()?.closed().wait()?.into_result()
    });

    let connection = iwarp::connect(address).wait()?;
    let remote = RemoteRegion::<u64>::from_bytes(connection.private_data())?;
    let drawn: Result<usize> = thread::scope(|scope| {
        let work = || scope.spawn(|| work(&connection, &remote));
        let workers: Vec<_> = (0..WORKERS).map(|_| work()).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().expect("the worker does not panic"))
            .sum()
    });
    let drawn = drawn?;
    connection.shutdown().wait()?;
    drop(connection);
    server.join().expect("the server does not panic")?;

    let results = table.to_vec()?;
    let right = (0..TICKETS)
        .filter(|&n| results[1 + n] == (n * n) as u64)
        .count();
    Ok(format!(
        "{WORKERS} workers drew {drawn} tickets; {right} results are right\n"
    ))
}

fn main() -> Result<()> {
    print!("{}", run()?);
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn output_is_expected() {
        assert_eq!(super::run().unwrap(), include_str!("../expected.txt"));
    }
}
