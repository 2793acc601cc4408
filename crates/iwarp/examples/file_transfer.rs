//! Sends a file by RDMA Writes to the server's memory. The last Write carries immediate data, which
//! notifies the server that the file is complete. The server answers with a checksum.
//!
//! ```sh
//! cargo run -p iwarp --example file_transfer                    # both ends in this process, or:
//! cargo run -p iwarp --example file_transfer serve 127.0.0.1:7171 copy.bin      # in one terminal,
//! cargo run -p iwarp --example file_transfer connect 127.0.0.1:7171 file.bin    # in another one
//! ```
//!
//! The client prints:
//!
//! ```text
//! the copy is the same
//! ```
//!
//! `iwarp cp` is a complete tool, with a ring of buffers, resuming and checksums.

use anyhow::{Context as _, Result, ensure};
use iwarp::{Access, Endpoint, Listener, Operation, Region, RemoteRegion};
use std::io::Read;
use std::net::SocketAddr;
use std::path::Path;

/// Bytes of the largest file. The kernel provides a page only when it is first written to.
const ROOM: usize = 256 << 20;
/// Bytes of one RDMA Write.
const PIECE: usize = 1 << 20;

/// FNV-1a.
fn checksum(hash: u64, bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(hash, step)
}

fn listen(at: &str) -> Result<(Listener, Region<u8>)> {
    let at: SocketAddr = at.parse()?;
    let endpoint = Endpoint::local(at.ip())?;
    let memory = endpoint.share::<u8>(ROOM, Access::REMOTE_WRITE)?;
    let token = memory.remote().to_bytes();
    let listener = endpoint.listen(at).private_data(token).bind()?;
    println!("listening on {}", listener.local_addr());
    Ok((listener, memory))
}

/// Receives one file; others would overwrite it.
fn serve((listener, memory): (Listener, Region<u8>), to: &Path) -> Result<()> {
    let connection = listener.accept().wait()?;
    let message = connection.recv().wait()?;
    let length = message.immediate().context("no length")?;
    let bytes = memory.slice(..length as usize)?.to_vec()?;
    std::fs::write(to, &bytes).with_context(|| format!("cannot write {}", to.display()))?;
    connection.send(&checksum(0, &bytes).to_be_bytes()).wait()?;
    Ok(connection.closed().wait()?.into_result()?)
}

fn send(to: &str, path: &Path) -> Result<()> {
    let file = std::fs::File::open(path);
    let mut file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let connection = iwarp::connect(to).wait()?;
    let there = RemoteRegion::<u8>::from_bytes(connection.private_data())?;
    // While one piece is on its way, the other one is filled.
    let mut pieces = [
        connection.allocate::<u8>(PIECE)?,
        connection.allocate(PIECE)?,
    ];
    let mut on_its_way = None;
    let (mut sent, mut hash) = (0, 0);
    loop {
        let [current, other] = &mut pieces;
        let room = current.get_mut().context("it is still in use")?;
        let n = file.read(room)?;
        hash = checksum(hash, &room[..n]);
        let target = there
            .slice(sent..sent + n)
            .context("the file is too long")?;
        let write = connection.write(current.slice(..n)?, &target).started();
        on_its_way.replace(write).map_or(Ok(()), Operation::wait)?;
        if n == 0 {
            break;
        }
        sent += n;
        std::mem::swap(current, other);
    }
    let length = u32::try_from(sent)?;
    let last = connection.write_with_immediate(&[], &there, length);
    last.wait()?;
    let answer = connection.recv().wait()?;
    ensure!(*answer == hash.to_be_bytes(), "the checksums differ");
    println!("the copy is the same");
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let copy = std::env::temp_dir().join(format!("iwarp-copy-{}", std::process::id()));
            let listening = listen("127.0.0.1:0")?;
            let (to, program) = (
                listening.0.local_addr().to_string(),
                std::env::current_exe()?,
            );
            let target = copy.clone();
            let server = std::thread::spawn(move || serve(listening, &target));
            send(&to, &program)?;
            server.join().expect("the server does not panic")?;
            ensure!(
                std::fs::read(&program)? == std::fs::read(&copy)?,
                "the copy differs"
            );
            Ok(std::fs::remove_file(&copy)?)
        }
        ["serve", at, to] => serve(listen(at)?, to.as_ref()),
        ["connect", to, path] => send(to, path.as_ref()),
        _ => anyhow::bail!("usage: file_transfer [serve ADDR:PORT FILE | connect ADDR:PORT FILE]"),
    }
}
