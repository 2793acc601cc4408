//! The smallest complete program: the client sends a line, and the server answers with another one.
//!
//! ```sh
//! cargo run --example hello        # both ends in this process
//! ```

fn main() -> iwarp::Result<()> {
    let listener = iwarp::listen("127.0.0.1:0").bind()?;
    let address = listener.local_addr();
    let server = std::thread::spawn(move || -> iwarp::Result<()> {
        let connection = listener.accept().wait()?;
        let line = String::from_utf8_lossy(&connection.recv().wait()?).into_owned();
        println!("server heard: {line}");
        connection.send(format!("you said '{line}'")).wait()?;
        connection.closed().wait()?.into_result()
    });
    let connection = iwarp::connect(address).wait()?;
    connection.send("hello over RDMA").wait()?;
    let answer = connection.recv().wait()?;
    println!("client heard: {}", String::from_utf8_lossy(&answer));
    drop(connection); // disconnects gracefully
    server.join().expect("the server does not panic")
}
