//! The smallest complete program: the client sends a line, and the server answers with another one.
//!
//! ```sh
//! cargo run -p iwarp --example hello                           # both ends in this process, or:
//! cargo run -p iwarp --example hello serve 127.0.0.1:7171      # in one terminal, and
//! cargo run -p iwarp --example hello connect 127.0.0.1:7171    # in another one
//! ```
//!
//! The client prints:
//!
//! ```text
//! the server answered: you said 'hello over RDMA'
//! ```

use iwarp::{Connection, Listener};

fn answer(connection: &Connection) -> iwarp::Result<()> {
    let line = connection.recv().wait()?; // a slice of the receive buffer
    let answer = format!("you said '{}'", String::from_utf8_lossy(&line));
    connection.send(answer).wait()?;
    connection.closed().wait()?.into_result()
}

fn serve(listener: &Listener) -> iwarp::Result<()> {
    println!("listening on {}", listener.local_addr());
    loop {
        let connection = listener.accept().wait()?;
        if let Err(error) = answer(&connection) {
            eprintln!("a client failed: {error}");
        }
    }
}

fn connect(to: &str) -> anyhow::Result<()> {
    let connection = iwarp::connect(to).wait()?;
    connection.send("hello over RDMA").wait()?;
    let answer = String::from_utf8(connection.recv().wait()?.to_vec())?;
    println!("the server answered: {answer}");
    Ok(()) // the connection is dropped, which disconnects gracefully
}

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let listener = iwarp::listen("127.0.0.1:0").bind()?;
            let to = listener.local_addr().to_string();
            std::thread::spawn(move || serve(&listener));
            connect(&to)
        }
        ["serve", at] => Ok(serve(&iwarp::listen(at).bind()?)?),
        ["connect", to] => connect(to),
        _ => anyhow::bail!("usage: hello [serve ADDR:PORT | connect ADDR:PORT]"),
    }
}
