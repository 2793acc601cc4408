//! A cache in the style of blocking calls with time limits: the client asks for a place by a
//! message, and then reads the value from the peer's memory.
//!
//! `cargo xtask release` builds this program outside of the workspace, against the packaged crates,
//! and compares what it prints with `expected.txt`.

use iwarp::{Access, Endpoint, Error, Listener, RemoteRegion};
use std::time::Duration;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const VALUES: [&str; 3] = ["alpha", "beta", "gamma"];
const VALUE_BYTES: usize = 64;
/// Longer than any call takes, so that a call that hangs is an error.
const LIMIT: Duration = Duration::from_secs(30);

/// Answers each message, a number, with the token of the value of this number, as JSON.
fn serve(endpoint: &Endpoint, listener: &Listener) -> Result<(), Failure> {
    let cache = endpoint.share::<u8>(VALUES.len() * VALUE_BYTES, Access::REMOTE_READ)?;
    for (number, value) in VALUES.iter().enumerate() {
        cache.write_at(number * VALUE_BYTES, value.as_bytes())?;
    }
    let connection = listener.accept().wait_for(LIMIT)?;
    loop {
        let request = match connection.recv().wait_for(LIMIT) {
            Ok(message) => message,
            Err(Error::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let number = usize::from(*request.first().ok_or("an empty request")?);
        let start = number * VALUE_BYTES;
        let token = cache.slice(start..start + VALUES[number].len())?.remote();
        connection
            .send(serde_json::to_vec(&token)?)
            .wait_for(LIMIT)?;
    }
}

/// Returns what the program prints.
fn run() -> Result<String, Failure> {
    let endpoint = Endpoint::local([127, 0, 0, 1].into())?;
    let listener = endpoint.listen("127.0.0.1:0").bind()?;
    let address = listener.local_addr();
    let server = std::thread::spawn(move || serve(&endpoint, &listener));

    let connection = iwarp::connect(address).wait_for(LIMIT)?;
    let mut output = String::new();
    for number in 0..VALUES.len() {
        connection.send(vec![number as u8]).wait_for(LIMIT)?;
        let answer = connection.recv().wait_for(LIMIT)?;
        let place: RemoteRegion<u8> = serde_json::from_slice(&answer)?;
        let value = connection.read(&place).wait_for(LIMIT)?;
        output.push_str(&format!(
            "value {number} is {}\n",
            String::from_utf8(value)?
        ));
    }
    // A right that was not granted is refused before anything is sent.
    connection.send(vec![0]).wait_for(LIMIT)?;
    let place: RemoteRegion<u8> = serde_json::from_slice(&connection.recv().wait_for(LIMIT)?)?;
    let refused = matches!(
        connection.write(b"x", &place).wait_for(LIMIT),
        Err(Error::Refused(_))
    );
    output.push_str(&format!(
        "a Write without the right is refused: {refused}\n"
    ));
    drop(connection); // disconnects gracefully
    server.join().expect("the server does not panic")?;
    Ok(output)
}

fn main() -> Result<(), Failure> {
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
