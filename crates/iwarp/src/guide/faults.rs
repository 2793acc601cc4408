//! Testing with faults: a device that fails when a test wants it to.
//!
//! ```
//! use iwarp::{Config, End, Options};
//!
//! // The client's connection is reset when its third message is posted.
//! let mut config = Config::from_env();
//! config.fault = Some("seed=1;reset,op=send,nth=3;log=/dev/null".parse().unwrap());
//!
//! let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! let address = listener.local_addr();
//! let server = std::thread::spawn(move || listener.accept().wait()?.closed().wait());
//! let connection = Options::new().config(config).connect(address).wait()?;
//! let sent = (0..10).take_while(|n| connection.send(format!("{n}")).wait().is_ok());
//! assert!(sent.count() <= 3);
//! assert_eq!(connection.closed().wait()?, End::Reset);
//! assert_eq!(server.join().unwrap()?, End::Reset);
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # Why
//!
//! The code for lost connections and failed requests runs seldom, so it is seldom right. TCP over
//! loopback does not fail on demand, but this RNIC does: at a chosen request, byte or time, and at
//! the same one in each later run. The peer needs no set-up.
//!
//! # Where faults come from
//!
//! | Set by | Applies to |
//! | --- | --- |
//! | [`Config::fault`](crate::Config::fault) | connections of one endpoint: use it in tests |
//! | `IWARP_FAULT` in the environment | every [`Config::from_env`](crate::Config::from_env) of the process |
//! | `iwarp run --fault` | an unmodified C program |
//!
//! [`fault`](crate::fault) has the grammar, and [`Spec::help`](crate::fault::Spec::help) lists the
//! faults. [Test your error
//! paths](https://github.com/iwarp-rs/iwarp/blob/main/docs/fault-injection.md) explains each one,
//! and what a replay repeats. Useful ones for a connection:
//!
//! | Fault | What the program has to survive |
//! | --- | --- |
//! | `refuse`, `unreachable` | no connection |
//! | `create=mr`, `create=qp` | no memory for a new region or connection |
//! | `reset`, `close`, `crc` | a connection that ends in the middle |
//! | `status=RETRY_EXC_ERR` | a request that fails |
//! | `remote-access` | a token that the peer does not accept any more |
//! | `delay=20ms`, `stall=1s`, `slow=64K` | a peer that is slow, but not gone |
//!
//! # A test with many faults
//!
//! Put the part that must hold with every fault into a function, and call it with a list of
//! specifications. A good invariant: the call returns, with the right data or with an error.
//!
//! ```
//! use iwarp::{Config, Endpoint, Options, Result};
//! use std::net::SocketAddr;
//!
//! /// Asks the server for the upper case of a text, with an injected fault.
//! fn ask(server: SocketAddr, text: &str, fault: &str) -> Result<Vec<u8>> {
//!     let mut config = Config::from_env();
//!     let spec = format!("seed=1;{fault};log=/dev/null");
//!     config.fault = Some(spec.parse().expect("a specification of faults"));
//!     let connection = Options::new().config(config).connect(server).wait()?;
//!     connection.send(text).wait()?;
//!     Ok(connection.recv().wait()?.to_vec())
//! }
//!
//! # let listener = iwarp::listen("127.0.0.1:0").bind()?;
//! # let server = listener.local_addr();
//! # std::thread::spawn(move || -> Result<()> {
//! #     loop {
//! #         let client = listener.accept().wait()?;
//! #         // A client that fails does not end the server.
//! #         let _ = client.recv().wait().map(|m| client.send(&m.to_ascii_uppercase()).wait());
//! #         let _ = client.closed().wait();
//! #     }
//! # });
//! let fatal = ["refuse", "create=qp", "reset,op=send", "status=RETRY_EXC_ERR,op=send"];
//! for fault in fatal {
//!     assert!(ask(server, "hello", fault).is_err(), "{fault}");
//! }
//! for fault in ["delay=5ms,op=send", "stall=10ms,op=send"] {
//!     assert_eq!(ask(server, "hello", fault)?, b"HELLO", "{fault}");
//! }
//! # Ok::<(), iwarp::Error>(())
//! ```
//!
//! # Repeat a failure
//!
//! Each process logs its specification with its seed, and each injected fault, to standard error or
//! to the file of `log=`. Use the logged specification to repeat the run. With `p=0.1%` and no
//! seed, a nightly test finds cases that nobody has thought of.
