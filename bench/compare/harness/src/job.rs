//! The role of a process, and the measurement that client and server make together.
//!
//! The client's standard input and output are pipes to the server's process. At the start of the
//! measurement, the client sends a line and waits for the answer, so the server can note its count
//! of allocations. At the end, it sends its results. A thread of the server's process answers; the
//! server itself takes no part.

use crate::count::allocations;
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio, exit};
use std::time::Instant;

/// Octets that a bulk transfer moves.
const BULK: usize = 1 << 30;
/// Round trips that are measured, after a tenth of them as preparation.
const ROUND_TRIPS: usize = 5_000;

/// What a program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// The client sends a message and waits until it comes back.
    Echo,
    /// The client sends messages in one direction, and the server replies with their sum.
    Bulk,
    /// The client fetches a value of the server.
    Get,
}

/// What this process is to do.
pub enum Role {
    /// Serve one client.
    Server(Job),
    /// Measure, with the server at the address.
    Client(Job, SocketAddr),
}

/// A measurement of one program.
pub struct Job {
    /// What the program does.
    pub work: Work,
    /// Octets of a message or value.
    pub size: usize,
    name: String,
    begin: Cell<Option<(Instant, u64)>>,
}

/// The result of a measurement.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Outcome {
    /// Time of one message, in nanoseconds.
    pub nanoseconds: f64,
    /// Allocations of the client's process for each message.
    pub client_allocations: f64,
    /// Allocations of the server's process for each message.
    pub server_allocations: f64,
}

/// Returns the role of this process, from its arguments `NAME [ADDRESS]`, and pins it to the first
/// processor, or to the second as the client.
///
/// # Panics
/// If the arguments are invalid.
pub fn role() -> Role {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_default();
    let (work, size) = match name.as_str() {
        "echo" => (Work::Echo, 64),
        "get" => (Work::Get, 4096),
        "bulk64k" => (Work::Bulk, 64 << 10),
        "bulk1m" => (Work::Bulk, 1 << 20),
        _ => panic!("usage: PROGRAM echo|get|bulk64k|bulk1m"),
    };
    let server = arguments
        .next()
        .map(|address| address.parse().expect("an address"));
    let mut processor = CpuSet::new();
    processor.set(usize::from(server.is_some()));
    sched_setaffinity(None, &processor).expect("the machine has two processors");
    let job = Job {
        work,
        size,
        name,
        begin: Cell::new(None),
    };
    match server {
        None => Role::Server(job),
        Some(address) => Role::Client(job, address),
    }
}

impl Job {
    /// Starts the client, which connects to `address`. The process ends with the client.
    pub fn listening(&self, address: SocketAddr) {
        let program = std::env::current_exe().expect("a program");
        let client = Command::new(program)
            .args([&self.name, &address.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let client = client.expect("the client starts");
        std::thread::spawn(|| watch(client));
    }

    /// Returns the octets of a message or value. All are the same, but their sum is not trivial.
    pub fn payload(&self) -> Vec<u8> {
        (0..self.size).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    /// Checks that a message or value is [`Self::payload`] as far as its first and last octets and
    /// its length show.
    ///
    /// # Panics
    /// If it is not.
    pub fn check(&self, octets: &[u8]) {
        let octet = |i: usize| (i * 7 + i / 251) as u8;
        let last = self.size - 1;
        assert_eq!(
            (octets.len(), octets[1], octets[last]),
            (self.size, octet(1), octet(last))
        );
    }

    /// Yields once for each message of the client. The measurement begins when all that prepares it
    /// has been yielded.
    pub fn rounds(&self) -> impl Iterator<Item = usize> {
        let first = self.preparation();
        (0..first + self.measured()).inspect(move |&round| {
            if round == first {
                println!("start");
                stdin()
                    .lock()
                    .read_line(&mut String::new())
                    .expect("the server's process");
                self.begin.set(Some((Instant::now(), allocations())));
            }
        })
    }

    /// Returns the number of messages that [`Self::rounds`] yields.
    pub fn messages(&self) -> usize {
        self.preparation() + self.measured()
    }

    /// Ends the measurement and the client. `total` is what the server has replied to bulk data.
    ///
    /// # Panics
    /// If `total` is not the sum of what was sent, or the messages were not sent.
    pub fn done(self, total: Option<u64>) -> ! {
        let end = (Instant::now(), allocations());
        let begin = self.begin.get().expect("the measurement has begun");
        if self.work == Work::Bulk {
            let sent = crate::sum(&self.payload()) * self.messages() as u64;
            assert_eq!(total, Some(sent), "the sum of the octets");
        }
        let each = |total: u64| total as f64 / self.measured() as f64;
        let outcome = Outcome {
            nanoseconds: each((end.0 - begin.0).as_nanos() as u64),
            client_allocations: each(end.1 - begin.1),
            server_allocations: self.measured() as f64,
        };
        println!("{}", serde_json::to_string(&outcome).expect("numbers"));
        stdout().flush().expect("the server's process");
        // The server's process ends first, so that its program sees no disconnect.
        let _ = stdin().lock().read_line(&mut String::new());
        exit(0);
    }

    fn preparation(&self) -> usize {
        if self.work == Work::Bulk {
            0
        } else {
            ROUND_TRIPS / 10
        }
    }

    fn measured(&self) -> usize {
        if self.work == Work::Bulk {
            BULK / self.size
        } else {
            ROUND_TRIPS
        }
    }
}

/// Answers the client, prints the result, and ends the process.
fn watch(mut client: Child) {
    let mut answers = client.stdin.take().expect("a pipe");
    let mut lines = BufReader::new(client.stdout.take().expect("a pipe"));
    let mut line = String::with_capacity(1000);
    if lines.read_line(&mut line).is_err() || line.trim() != "start" {
        eprintln!("the client ended before it measured");
        exit(1);
    }
    line.clear();
    let before = allocations();
    answers.write_all(b"\n").expect("the client waits");
    let read = lines.read_line(&mut line);
    let after = allocations();
    let Ok(mut outcome) = read
        .map_err(|_| ())
        .and_then(|_| serde_json::from_str::<Outcome>(&line).map_err(|_| ()))
    else {
        eprintln!("the client ended while it measured");
        exit(1);
    };
    // The client writes the number of its messages here.
    outcome.server_allocations = (after - before) as f64 / outcome.server_allocations;
    println!("{}", serde_json::to_string(&outcome).expect("numbers"));
    exit(0);
}
