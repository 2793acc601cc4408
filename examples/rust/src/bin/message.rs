//! Lesson 4: the client sends a message, and the server answers. It talks to `c/message`, too. The
//! crate posts the receives itself, and `wait` returns the completion as a result.
//!
//! ```text
//! usage: message               waits for one client on 127.0.0.1, port 7471
//!        message serve ADDRESS waits on another address of this host
//!        message HOST          sends a message to the server on HOST
//! ```

use anyhow::{Result, bail};

const PORT: u16 = 7471;

fn serve(address: &str) -> Result<()> {
    let listener = iwarp::listen((address, PORT)).bind()?;
    println!("waiting on port {PORT}");
    let peer = listener.accept().wait()?;
    let message = String::from_utf8(peer.recv().wait()?.to_vec())?;
    println!("received  {message}");
    let answer = format!("you said '{message}'");
    peer.send(answer.clone()).wait()?;
    println!("sent      {answer}");
    peer.closed().wait()?.into_result()?;
    Ok(())
}

fn ask(host: &str) -> Result<()> {
    let peer = iwarp::connect((host, PORT)).wait()?;
    peer.send("hello from Rust").wait()?;
    println!("sent      hello from Rust");
    let answer = String::from_utf8(peer.recv().wait()?.to_vec())?;
    println!("received  {answer}");
    Ok(()) // the connection is dropped, which disconnects gracefully
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => serve("127.0.0.1"),
        ["serve", address] => serve(address),
        [host] => ask(host),
        _ => bail!("usage: message [serve ADDRESS | HOST]"),
    }
}
