//! Sends a file by RDMA Writes to the server's memory. The last Write carries immediate data, which
//! tell the server that the file is complete.
//!
//! ```sh
//! cargo run --example file_transfer_verbs  # both ends in this process
//! cargo run --example file_transfer_verbs serve 192.0.2.7:7174 received.bin  # host 1; host 2:
//! cargo run --example file_transfer_verbs send 192.0.2.7:7174 file.bin
//! ```
//!
//! This example shows only the principle. `iwarp cp` is a complete tool, with a ring of buffers,
//! resuming and checksums.

use iwarp::verbs::cm::{ConnectionParameters, Connector, ListeningId};
use iwarp::verbs::{
    Access, Config, Context, Cqe, Device, ProtectionDomain, QpInitAttr, RecvWr, RemoteMemory,
    Result, SendOp, SendWr, WcFlags, WcStatus,
};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

/// Octets of the largest file.
const ROOM: usize = 64 << 20;
/// Octets of one RDMA Write.
const PIECE: usize = 1 << 20;

fn serve(listener: &ListeningId, ctx: &Context, to: &Path) -> Result<()> {
    let pd = ProtectionDomain::new(ctx);
    let cq = ctx.create_cq(16, None)?;
    // The kernel provides a page only when it is first written to, so a small file uses little of
    // this.
    let memory = pd.reg_mr(ROOM, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    let request = listener.accept(None)?;
    let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
    // A Write with immediate data consumes a receive, which needs no buffer.
    let receive = RecvWr {
        wr_id: 1,
        sges: &[],
    };
    qp.post_recv(&[receive])?;
    let parameters = ConnectionParameters {
        private_data: memory.remote().to_bytes().to_vec(),
        ..Default::default()
    };
    let connection = request.accept(qp, &parameters)?;
    let mut done = [Cqe::default()];
    cq.wait(&mut done, Some(Duration::from_secs(60)))?;
    let [done] = done;
    if done.status != WcStatus::Success || !done.flags.contains(WcFlags::WITH_IMM) {
        return Err(iwarp::Error::ConnectionLost("no file came".into()));
    }
    // This completion comes after all earlier Writes were placed. The immediate data are the
    // length.
    let data = memory.to_vec(..(done.imm_or_stag as usize).min(ROOM))?;
    std::fs::write(to, &data)?;
    println!("received {} octets", data.len());
    // The client takes the disconnect as the confirmation that the file is stored.
    connection.disconnect()?;
    connection.wait_disconnected(Some(Duration::from_secs(30)))
}

fn send(to: SocketAddr, file: &Path) -> Result<()> {
    let data = std::fs::read(file)?;
    let ctx = Context::open(&Device::route_to(to)?, Config::from_env())?;
    let pd = ProtectionDomain::new(&ctx);
    let cq = ctx.create_cq(256, None)?;
    let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
    let connection = Connector::new(&ctx).connect(to, qp)?;
    let room = RemoteMemory::from_bytes(connection.private_data())
        .filter(|room| room.len >= data.len() as u64)
        .ok_or(iwarp::Error::InvalidArgument("the file does not fit"))?;
    let memory = pd.reg_mr(data.len().max(1), Access::LOCAL_WRITE)?;
    memory.write_at(0, &data)?;
    let start = Instant::now();
    for at in (0..data.len()).step_by(PIECE) {
        let sges = [memory.sge(at..data.len().min(at + PIECE))?];
        let wr = SendWr::write(1, room.addr + at as u64, room.rkey, &sges);
        connection.post_send(&[wr])?;
    }
    let last = SendOp::WriteImm {
        remote_addr: room.addr,
        rkey: room.rkey,
        imm: data.len() as u32,
    };
    let last = SendWr::new(2, last, &[]).signaled();
    connection.post_send(&[last])?;
    let mut done = [Cqe::default()];
    cq.wait(&mut done, Some(Duration::from_secs(60)))?;
    assert_eq!(done[0].status, WcStatus::Success, "{done:?}");
    connection.wait_disconnected(Some(Duration::from_secs(60)))?;
    println!(
        "sent {} octets in {:.3} s",
        data.len(),
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

fn listen(at: SocketAddr) -> Result<(Context, ListeningId)> {
    let ctx = Context::open(&Device::by_address(at.ip())?, Config::from_env())?;
    let listener = ListeningId::bind(&ctx, at)?;
    println!("listening on {}", listener.local_addr());
    Ok((ctx, listener))
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let dir = std::env::temp_dir();
            let name = |what: &str| dir.join(format!("iwarp-{what}-{}", std::process::id()));
            let (from, there) = (name("sent"), name("received"));
            let data: Vec<u8> = (0..10_000_019u32).map(|i| (i % 251) as u8).collect();
            std::fs::write(&from, &data)?;
            let (ctx, listener) = listen("127.0.0.1:0".parse()?)?;
            let to = listener.local_addr();
            let target = there.clone();
            let server = std::thread::spawn(move || serve(&listener, &ctx, &target));
            let sent = send(to, &from);
            let served = server.join().expect("no panic");
            let same = std::fs::read(&there).is_ok_and(|copy| copy == data);
            let _ = (std::fs::remove_file(from), std::fs::remove_file(there));
            sent?;
            served?;
            assert!(same, "the copy differs");
            println!("the copy is the same");
        }
        ["serve", at, file] => {
            let (ctx, listener) = listen(at.parse()?)?;
            serve(&listener, &ctx, Path::new(file))?;
        }
        ["send", to, file] => send(to.parse()?, Path::new(file))?,
        _ => {
            let usage = "usage: file_transfer_verbs [serve ADDR:PORT FILE | send ADDR:PORT FILE]";
            return Err(usage.into());
        }
    }
    Ok(())
}
