//! Lesson 5: writes into the memory of the server `c/one_sided`, and reads it. This program uses
//! the explicit verbs; `cargo run -p iwarp --example kv` shows the shorter interface.
//!
//! ```text
//! usage: one_sided HOST
//! ```

use std::net::ToSocketAddrs as _;

use anyhow::{Context as _, Result, bail, ensure};
use iwarp::verbs::cm::Connector;
use iwarp::verbs::{
    Access, CompletionQueue, Config, Context, Cqe, Device, MemoryRegion, ProtectionDomain,
    QpInitAttr, QueuePair, RecvWr, RemoteMemory, SendWr, WcStatus,
};

const PORT: u16 = 7471;
const SIZE: usize = 256;

/// Waits for the next completion. Each request of this program has one.
fn completed(cq: &CompletionQueue) -> Result<()> {
    let mut done = [Cqe::default()];
    cq.wait(&mut done, None)?;
    ensure!(done[0].status == WcStatus::Success, "{:?}", done[0].status);
    Ok(())
}

fn read(cq: &CompletionQueue, qp: &QueuePair, mr: &MemoryRegion, peer: RemoteMemory) -> Result<()> {
    qp.post_send(&[SendWr::read(1, peer.addr, peer.rkey, &[mr.sge(..SIZE)?]).signaled()])?;
    completed(cq)?;
    let text = String::from_utf8(mr.to_vec(..SIZE)?)?;
    println!("read   '{}'", text.trim_end_matches('\0'));
    Ok(())
}

/// Posts a message without data.
fn message(qp: &QueuePair) -> Result<()> {
    Ok(qp.post_send(&[SendWr::send(0, &[]).signaled()])?)
}

fn main() -> Result<()> {
    let Some(host) = std::env::args().nth(1) else {
        bail!("usage: one_sided HOST");
    };
    let mut addresses = (host.as_str(), PORT).to_socket_addrs()?;
    let to = addresses.next().context("the host has no address")?;
    let context = Context::open(&Device::route_to(to)?, Config::from_env())?;
    let pd = ProtectionDomain::new(&context);
    let cq = context.create_cq(4, None)?;
    let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
    let local = pd.reg_mr(SIZE, Access::LOCAL_WRITE)?;
    qp.post_recv(&[RecvWr {
        wr_id: 0,
        sges: &[local.sge(..)?],
    }])?;

    let connection = Connector::new(&context).connect(to, qp)?;
    let qp = connection.qp();
    // On iWARP, the end that accepts may not send first. The two completions may have any order.
    message(qp)?;
    completed(&cq)?;
    completed(&cq)?;
    let offer = RemoteMemory::from_bytes(&local.to_vec(..RemoteMemory::ENCODED_LEN)?);
    let offer = offer.context("the server offers no memory")?;
    println!(
        "the server offers its memory with the rkey {:#010x}",
        offer.rkey
    );

    read(&cq, qp, &local, offer)?;
    let text = "Rust was here";
    let mut board = text.as_bytes().to_vec();
    board.resize(SIZE, 0);
    local.write_at(0, &board)?;
    let from = [local.sge(..)?];
    qp.post_send(&[SendWr::write(2, offer.addr, offer.rkey, &from).signaled()])?;
    completed(&cq)?;
    println!("wrote  '{text}'");
    read(&cq, qp, &local, offer)?;
    // The goodbye.
    message(qp)?;
    completed(&cq)?;
    Ok(connection.disconnect()?)
}
