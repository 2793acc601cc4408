//! Opens an RDMA port of `iwarp perf serve`. For each client that requests a link, the server opens
//! a port that accepts exactly one connection.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::peer::{self, RESPONSE_LIMIT};

/// An RDMA port that the server keeps open until this value is dropped.
pub(super) struct PerfPort {
    pub(super) address: SocketAddr,
    _control: BufReader<TcpStream>,
}

impl PerfPort {
    /// Requests a link. Retries while the server is busy with another client.
    pub(super) fn open(server: SocketAddr) -> Result<Self> {
        let start = Instant::now();
        loop {
            if let Some(perf_port) = Self::try_open(server)? {
                return Ok(perf_port);
            }
            if start.elapsed() > RESPONSE_LIMIT {
                bail!("the server stayed busy with another client");
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    fn try_open(server: SocketAddr) -> Result<Option<Self>> {
        let mut control = BufReader::new(peer::connect(server)?);
        let hello = json!({"type": "hello", "protocol": 2, "version": "hostile"});
        let link = json!({
            "wire": "rdma", "crc": true, "markers": false, "poll": "event", "qps": 1, "depth": 16,
            "max_size": 64,
        });
        for request in [hello, json!({"type": "open", "id": 0, "link": link})] {
            writeln!(control.get_mut(), "{request}")?;
            let mut line = String::new();
            // A server that rejects the client may reset the connection instead of replying.
            if !matches!(control.read_line(&mut line), Ok(1..)) {
                return Ok(None);
            }
            let reply: Value = serde_json::from_str(&line).context("invalid reply of perf")?;
            match reply["type"].as_str() {
                Some("busy") => return Ok(None),
                Some("hello") => {}
                Some("listening") => {
                    let port = reply["port"]
                        .as_u64()
                        .context("the reply of perf contains no port")?;
                    return Ok(Some(Self {
                        address: (server.ip(), u16::try_from(port)?).into(),
                        _control: control,
                    }));
                }
                _ => bail!("unexpected reply of perf: {line}"),
            }
        }
        bail!("perf opened no RDMA port")
    }
}
