//! A connection of this process to itself, and the query of its statistics.

use super::{Finding, Problem, problem};
use iwarp::stat::Question;
use iwarp::{Device, Listener};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// What the client sends, and the server returns.
const MESSAGE: &[u8] = b"iwarp doctor";

/// Connects to the address of the first device, and lets a message go there and back.
pub(super) fn connection() -> Finding {
    let Some(address) = address() else {
        return problem(
            "not tried, because there is no device",
            "see the lines above",
        );
    };
    match try_connection(address) {
        Ok(()) => Ok(format!("a message went to {address} and back")),
        Err(error) => Err(Problem {
            what: format!("connecting to {address} fails: {error}"),
            remedy: "see the lines above; a packet filter may drop the packets".to_owned(),
        }),
    }
}

/// Returns the address of the first device, which is a loopback address unless `IWARP_BIND`
/// excludes it.
fn address() -> Option<IpAddr> {
    let devices = Device::list().ok()?;
    let addresses = devices.iter().flat_map(|d| &d.addresses);
    // A link-local address has a scope, which the text would lack.
    addresses.filter(|a| a.scope_id == 0).map(|a| a.ip).next()
}

fn try_connection(address: IpAddr) -> iwarp::Result<()> {
    let listener = iwarp::listen(SocketAddr::new(address, 0)).bind()?;
    let to = listener.local_addr();
    let server = std::thread::spawn(move || answer(&listener));
    let connection = iwarp::connect(to).wait()?;
    connection.send(MESSAGE).wait()?;
    let back = connection.recv().wait()?;
    let same = *back == *MESSAGE;
    drop((back, connection));
    match server.join() {
        Ok(answered) => answered?,
        Err(_) => return Err(iwarp::Error::Closed),
    }
    match same {
        true => Ok(()),
        false => Err(iwarp::Error::Closed),
    }
}

fn answer(listener: &Listener) -> iwarp::Result<()> {
    let connection = listener.accept().wait()?;
    let message = connection.recv().wait()?.to_vec();
    connection.send(message).wait()?;
    connection.closed().wait().map(drop)
}

/// Queries the statistics of this process, whose engine the connection has started.
pub(super) fn statistics() -> Finding {
    let set = std::env::var_os("IWARP_STAT").unwrap_or_default();
    if set == "off" {
        return Ok("off (IWARP_STAT=off)".to_owned());
    }
    let mut question = Question::default();
    question.pid = Some(std::process::id());
    question.directory = Some(PathBuf::from(set)).filter(|directory| directory.is_absolute());
    let answered = |answers: Vec<iwarp::stat::Answer>| answers.iter().any(|a| a.document.is_ok());
    match question.ask().map(answered) {
        Ok(true) => Ok("`iwarp stat` can query the processes of this user".to_owned()),
        Ok(false) if address().is_none() => problem(
            "not tried, because there is no device",
            "see the lines above",
        ),
        Ok(false) => problem(
            "`iwarp stat` cannot query this process",
            "make /run/user/UID or /tmp writable, or set IWARP_STAT to a directory that is",
        ),
        Err(e) => problem(e.to_string(), "raise the limit of open files"),
    }
}
