//! A counter in the server's memory that clients increment by RDMA atomics (RFC 7306 section 5).
//! The server's program takes no part in the additions.
//!
//! ```sh
//! cargo run --example counter                       # both ends in this process
//! cargo run --example counter serve 192.0.2.7:7173  # on one host, then on others:
//! cargo run --example counter add 192.0.2.7:7173 1000
//! ```

use iwarp::verbs::cm::{ConnectedId, ConnectionParameters, Connector, ListeningId};
use iwarp::verbs::{
    Access, Config, Context, Cqe, Device, MemoryRegion, ProtectionDomain, QpInitAttr, RemoteMemory,
    Result, SendWr, WcStatus,
};
use std::net::SocketAddr;
use std::time::Duration;

/// Number of additions that a client has posted and not yet completed.
const WINDOW: usize = 8;

/// Accepts clients, prints the counter when one leaves, and returns the counter when `clients` have
/// left.
fn serve(listener: &ListeningId, ctx: &Context, clients: usize) -> Result<u64> {
    let pd = ProtectionDomain::new(ctx);
    let counter = pd.reg_mr(8, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC)?;
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for number in 0..clients {
            let request = listener.accept(None)?;
            let (pd, counter) = (&pd, &counter);
            let thread = scope.spawn(move || -> Result<()> {
                let connection = accept(ctx, pd, counter, request)?;
                connection.wait_disconnected(None)?;
                println!("client {number} has left at {}", counter.load_u64(0)?);
                Ok(())
            });
            threads.push(thread);
        }
        for thread in threads {
            thread.join().expect("no panic")?;
        }
        counter.load_u64(0)
    })
}

fn accept(
    ctx: &Context,
    pd: &ProtectionDomain,
    counter: &MemoryRegion,
    request: iwarp::verbs::cm::ConnectionRequest,
) -> Result<ConnectedId> {
    let cq = ctx.create_cq(1, None)?;
    let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
    let parameters = ConnectionParameters {
        private_data: counter.remote().to_bytes().to_vec(),
        ..Default::default()
    };
    request.accept(qp, &parameters)
}

/// Adds one `times` times and returns the largest of the old values that the atomics returned.
fn add(to: SocketAddr, times: usize) -> Result<u64> {
    let ctx = Context::open(&Device::route_to(to)?, Config::from_env())?;
    let pd = ProtectionDomain::new(&ctx);
    let cq = ctx.create_cq(2 * WINDOW as u32, None)?;
    let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
    let connection = Connector::new(&ctx).connect(to, qp)?;
    let counter = RemoteMemory::from_bytes(connection.private_data())
        .ok_or(iwarp::Error::InvalidState("this server has no counter"))?;
    // Each outstanding addition has a word here for the old value.
    let old = pd.reg_mr(8 * WINDOW, Access::LOCAL_WRITE)?;
    let post = |slot: usize| -> Result<()> {
        let sges = [old.sge(8 * slot..8 * slot + 8)?];
        let wr = SendWr::fetch_add(slot as u64, counter.addr, counter.rkey, 1, &sges);
        Ok(connection.post_send(&[wr.signaled()])?)
    };
    let mut posted = times.min(WINDOW);
    for slot in 0..posted {
        post(slot)?;
    }
    let (mut done, mut largest) = (0, 0);
    while done < times {
        let mut cqes = [Cqe::default(); WINDOW];
        let n = cq.wait(&mut cqes, Some(Duration::from_secs(30)))?;
        for cqe in &cqes[..n] {
            assert_eq!(cqe.status, WcStatus::Success, "{cqe:?}");
            let slot = cqe.wr_id as usize;
            largest = old.load_u64(8 * slot)?.max(largest);
            done += 1;
            if posted < times {
                posted += 1;
                post(slot)?;
            }
        }
    }
    Ok(largest)
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
            let (clients, times) = (4, 500);
            let (ctx, listener) = listen("127.0.0.1:0".parse()?)?;
            let to = listener.local_addr();
            let server = std::thread::spawn(move || serve(&listener, &ctx, clients));
            let adders: Vec<_> = (0..clients)
                .map(|_| std::thread::spawn(move || add(to, times)))
                .collect();
            for adder in adders {
                adder.join().expect("no panic")?;
            }
            let total = server.join().expect("no panic")?;
            println!("{clients} clients added {times} each: {total}");
            assert_eq!(total, (clients * times) as u64);
        }
        ["serve", at] => {
            let (ctx, listener) = listen(at.parse()?)?;
            serve(&listener, &ctx, usize::MAX)?;
        }
        ["add", to, times] => {
            let largest = add(to.parse()?, times.parse()?)?;
            println!("added {times}; the counter was {largest} before the last of them");
        }
        _ => return Err("usage: counter [serve ADDR:PORT | add ADDR:PORT TIMES]".into()),
    }
    Ok(())
}
