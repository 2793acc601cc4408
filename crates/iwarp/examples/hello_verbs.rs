//! The program of `hello.rs` by the explicit verbs: the client sends a line, and the server answers
//! with another one.
//!
//! ```sh
//! cargo run --example hello_verbs                            # both ends in this process
//! cargo run --example hello_verbs serve 192.0.2.7:7171       # on one host, then on another:
//! cargo run --example hello_verbs connect 192.0.2.7:7171
//! ```
//!
//! Receives are posted before the connection is made, because each incoming message needs a posted
//! receive. The program learns of every sent and received message by a completion.

use iwarp::verbs::cm::{Connector, ListeningId};
use iwarp::verbs::{
    Access, CompletionQueue, Config, Context, Cqe, Device, MemoryRegion, ProtectionDomain,
    QpInitAttr, QueuePair, RecvWr, Result, SendWr, WcStatus,
};
use std::net::SocketAddr;
use std::time::Duration;

/// Octets of the longest line.
const LONGEST: usize = 256;

/// The objects of one end, except for its queue pair.
struct End {
    ctx: Context,
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
        let ctx = ctx.clone();
        Ok((Self { ctx, cq, inbox }, qp))
    }

    /// Posts a Send of a line. Inline data is copied when posted, so the line may be dropped.
    fn say(&self, qp: &QueuePair, line: &str) -> Result<()> {
        Ok(qp.post_send(&[SendWr::inline(2, &[line.as_bytes()]).signaled()])?)
    }

    /// Waits for a line from the peer. The completion of our own Send may come before it.
    fn hear(&self) -> Result<String> {
        loop {
            let mut done = [Cqe::default()];
            self.cq.wait(&mut done, Some(Duration::from_secs(30)))?;
            let [done] = done;
            assert_eq!(done.status, WcStatus::Success, "{done:?}");
            if done.wr_id == 1 {
                let octets = self.inbox.to_vec(..done.byte_len as usize)?;
                return Ok(String::from_utf8_lossy(&octets).into_owned());
            }
        }
    }
}

fn serve(listener: &ListeningId, ctx: &Context) -> Result<()> {
    let request = listener.accept(None)?;
    let (end, qp) = End::new(ctx)?;
    let connection = request.accept(qp, &Default::default())?;
    let line = end.hear()?;
    println!("server heard: {line}");
    end.say(&connection, &format!("you said '{line}'"))?;
    // The client closes when it has heard the answer.
    connection.wait_disconnected(Some(Duration::from_secs(30)))
}

fn connect(to: SocketAddr) -> Result<()> {
    let ctx = Context::open(&Device::route_to(to)?, Config::from_env())?;
    let (end, qp) = End::new(&ctx)?;
    let connection = Connector::new(&end.ctx).connect(to, qp)?;
    end.say(&connection, "hello over RDMA")?;
    println!("client heard: {}", end.hear()?);
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
            let (ctx, listener) = listen("127.0.0.1:0".parse()?)?;
            let to = listener.local_addr();
            let server = std::thread::spawn(move || serve(&listener, &ctx));
            connect(to)?;
            server.join().expect("the server does not panic")?;
        }
        ["serve", at] => {
            let (ctx, listener) = listen(at.parse()?)?;
            serve(&listener, &ctx)?;
        }
        ["connect", to] => connect(to.parse()?)?,
        _ => return Err("usage: hello_verbs [serve ADDR:PORT | connect ADDR:PORT]".into()),
    }
    Ok(())
}
