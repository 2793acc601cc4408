//! Sends a file by RDMA Writes to the server's memory. The last Write carries immediate data, which
//! tell the server that the file is complete.
//!
//! ```sh
//! cargo run --example file_transfer                                    # both ends in this process
//! cargo run --example file_transfer serve 192.0.2.7:7174 received.bin  # on one host, on another:
//! cargo run --example file_transfer send 192.0.2.7:7174 file.bin
//! ```
//!
//! This example shows only the principle. `iwarp cp` is a complete tool, with a ring of buffers,
//! resuming and checksums.

use iwarp::connection::Listen;
use iwarp::{Access, Endpoint, Error, Listener, RemoteRegion, Result};
use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;

/// Octets of the largest file. The kernel provides a page only when it is first written to, so a
/// small file uses little of this.
const ROOM: usize = 64 << 20;
/// Octets of one RDMA Write.
const PIECE: usize = 1 << 20;

fn listen(at: SocketAddr) -> Result<(Listener, iwarp::Region<u8>)> {
    let endpoint = Endpoint::local(at.ip())?;
    let memory = endpoint.share::<u8>(ROOM, Access::REMOTE_WRITE)?;
    let listen: Listen = endpoint.listen(at).private_data(memory.remote().to_bytes());
    Ok((listen.bind()?, memory))
}

fn serve((listener, memory): (Listener, iwarp::Region<u8>), to: &Path) -> Result<()> {
    let connection = listener.accept().wait()?;
    let length = connection.recv().wait()?.immediate().unwrap_or_default();
    std::fs::write(to, memory.slice(..length as usize)?.to_vec()?)?;
    println!("received {length} octets");
    connection.closed().wait()?.into_result()
}

fn send(to: SocketAddr, path: &Path) -> Result<()> {
    let mut file = std::fs::File::open(path)?;
    let connection = iwarp::connect(to).wait()?;
    let there = RemoteRegion::<u8>::from_bytes(connection.private_data())?;
    // While one piece is on its way, the other one is filled.
    let mut pieces = [
        connection.allocate::<u8>(PIECE)?,
        connection.allocate(PIECE)?,
    ];
    let mut before = None;
    let mut sent = 0;
    loop {
        let [current, other] = &mut pieces;
        let room = current.get_mut().ok_or(Error::Busy)?;
        let n = file.read(room)?;
        let target = there.slice(sent..sent + n)?;
        let write = connection.write(current.slice(..n)?, &target).started();
        if let Some(before) = before.replace(write) {
            iwarp::Operation::wait(before)?;
        }
        if n == 0 {
            break;
        }
        sent += n;
        std::mem::swap(current, other);
    }
    before.map_or(Ok(()), iwarp::Operation::wait)?;
    let length = u32::try_from(sent).map_err(|_| Error::InvalidArgument("the file is too long"))?;
    connection.write_with_immediate(&[], &there, length).wait()
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let copy = std::env::temp_dir().join(format!("iwarp-copy-{}", std::process::id()));
            let listening = listen("127.0.0.1:0".parse()?)?;
            let (to, program) = (listening.0.local_addr(), std::env::current_exe()?);
            let server = std::thread::spawn({
                let copy = copy.clone();
                move || serve(listening, &copy)
            });
            send(to, &program)?;
            server.join().expect("the server does not panic")?;
            let same = std::fs::read(&program)? == std::fs::read(&copy)?;
            std::fs::remove_file(&copy)?;
            println!("the copy is {}", if same { "the same" } else { "another" });
        }
        ["serve", at, to] => serve(listen(at.parse()?)?, to.as_ref())?,
        ["send", to, path] => send(to.parse()?, path.as_ref())?,
        _ => {
            return Err("usage: file_transfer [serve ADDR:PORT FILE | send ADDR:PORT FILE]".into());
        }
    }
    Ok(())
}
