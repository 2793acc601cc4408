//! The program of `hello.rs` by the explicit verbs: the client sends a line, and the server answers
//! with another one.
//!
//! ```sh
//! cargo run -p iwarp --example hello_verbs                        # both ends in this process, or:
//! cargo run -p iwarp --example hello_verbs serve 127.0.0.1:7171   # in one terminal, and
//! cargo run -p iwarp --example hello_verbs connect 127.0.0.1:7171 # in another one
//! ```
//!
//! The client prints:
//!
//! ```text
//! the server answered: you said 'hello over RDMA'
//! ```
//!
//! Receives are posted before the connection is made, because each incoming message needs a posted
//! receive. The program learns of every sent and received message by a completion.

use anyhow::{Result, ensure};
use iwarp::verbs::cm::{ConnectionRequest, Connector, ListeningId};
use iwarp::verbs::{
    Access, CompletionQueue, Config, Context, Cqe, Device, MemoryRegion, ProtectionDomain,
    QpInitAttr, QueuePair, RecvWr, SendWr, WcStatus,
};
use std::net::SocketAddr;

/// Octets of the longest line.
const LONGEST: usize = 256;

/// The objects of one end, except for its queue pair.
struct End {
    cq: CompletionQueue,
    inbox: MemoryRegion,
}

impl End {
    /// Creates an end and its queue pair, with one receive posted.
    fn new(ctx: &Context) -> Result<(Self, QueuePair)> {
        let pd = ProtectionDomain::new(ctx);
        let cq = ctx.create_cq(16, None)?;
        let inbox = pd.reg_mr(LONGEST, Access::LOCAL_WRITE)?;
        let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
        let receive = RecvWr {
            wr_id: 1,
            sges: &[inbox.sge(..)?],
        };
        qp.post_recv(&[receive])?;
        Ok((Self { cq, inbox }, qp))
    }

    /// Posts a Send of a line. Inline data is copied when posted, so the line may be dropped.
    fn say(&self, qp: &QueuePair, line: &str) -> Result<()> {
        Ok(qp.post_send(&[SendWr::inline(2, &[line.as_bytes()]).signaled()])?)
    }

    /// Waits for a line from the peer. The completion of our own Send may come before it.
    fn hear(&self) -> Result<String> {
        loop {
            let mut done = [Cqe::default()];
            self.cq.wait(&mut done, None)?;
            let [done] = done;
            ensure!(done.status == WcStatus::Success, "{:?}", done.status);
            if done.wr_id == 1 {
                let octets = self.inbox.to_vec(..done.byte_len as usize)?;
                return Ok(String::from_utf8_lossy(&octets).into_owned());
            }
        }
    }
}

fn answer(ctx: &Context, request: ConnectionRequest) -> Result<()> {
    let (end, qp) = End::new(ctx)?;
    let connection = request.accept(qp, &Default::default())?;
    end.say(&connection, &format!("you said '{}'", end.hear()?))?;
    // The client closes when it has heard the answer.
    Ok(connection.wait_disconnected(None)?)
}

fn serve((ctx, listener): &(Context, ListeningId)) -> Result<()> {
    println!("listening on {}", listener.local_addr());
    loop {
        if let Err(error) = answer(ctx, listener.accept(None)?) {
            eprintln!("a client failed: {error}");
        }
    }
}

fn connect(to: &str) -> Result<()> {
    let to = to.parse()?;
    let ctx = Context::open(&Device::route_to(to)?, Config::from_env())?;
    let (end, qp) = End::new(&ctx)?;
    let connection = Connector::new(&ctx).connect(to, qp)?;
    end.say(&connection, "hello over RDMA")?;
    println!("the server answered: {}", end.hear()?);
    Ok(())
}

fn listen(at: &str) -> Result<(Context, ListeningId)> {
    let at: SocketAddr = at.parse()?;
    let ctx = Context::open(&Device::by_address(at.ip())?, Config::from_env())?;
    let listener = ListeningId::bind(&ctx, at)?;
    Ok((ctx, listener))
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let listening = listen("127.0.0.1:0")?;
            let to = listening.1.local_addr().to_string();
            std::thread::spawn(move || serve(&listening));
            connect(&to)
        }
        ["serve", at] => serve(&listen(at)?),
        ["connect", to] => connect(to),
        _ => anyhow::bail!("usage: hello_verbs [serve ADDR:PORT | connect ADDR:PORT]"),
    }
}
