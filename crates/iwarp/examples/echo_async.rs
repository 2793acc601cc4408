//! An echo server and its clients as asynchronous tasks. The crate's futures run on any runtime;
//! this example uses tokio.
//!
//! ```sh
//! cargo run --example echo_async                       # both ends in this process
//! cargo run --example echo_async serve 192.0.2.7:7175  # on one host, then on another:
//! cargo run --example echo_async connect 192.0.2.7:7175
//! ```

use iwarp::verbs::cm::{ConnectionRequest, Connector, ListeningId};
use iwarp::verbs::{
    Access, CompletionQueue, Config, Context, Cqe, Device, MemoryRegion, ProtectionDomain,
    QpInitAttr, QueuePair, RecvWr, Result, SendWr, WcOpcode, WcStatus,
};
use std::net::SocketAddr;

/// Number of receives that a connection keeps posted.
const SLOTS: usize = 8;
/// Octets of the longest message.
const LONGEST: usize = 4096;

/// The buffers and the completion queue of one connection.
struct Messages {
    cq: CompletionQueue,
    /// The buffers of the receives: `SLOTS` of `LONGEST` octets.
    inbox: MemoryRegion,
    /// The message that is being sent.
    outbox: MemoryRegion,
}

impl Messages {
    fn new(ctx: &Context) -> Result<(Self, QueuePair)> {
        let pd = ProtectionDomain::new(ctx);
        let cq = ctx.create_cq(2 * SLOTS as u32, None)?;
        let inbox = pd.reg_mr(SLOTS * LONGEST, Access::LOCAL_WRITE)?;
        let outbox = pd.reg_mr(LONGEST, Access::LOCAL_WRITE)?;
        let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
        let this = Self { cq, inbox, outbox };
        for slot in 0..SLOTS {
            this.receive(&qp, slot)?;
        }
        Ok((this, qp))
    }

    fn receive(&self, qp: &QueuePair, slot: usize) -> Result<()> {
        let receive = RecvWr {
            wr_id: slot as u64,
            sges: &[self.inbox.sge(slot * LONGEST..(slot + 1) * LONGEST)?],
        };
        Ok(qp.post_recv(&[receive])?)
    }

    /// Waits for a completion. Returns `None` when the peer has closed.
    async fn next(&self) -> Result<Option<Cqe>> {
        let mut done = [Cqe::default()];
        self.cq.completions(&mut done).await?;
        let [done] = done;
        match done.status {
            WcStatus::Success => Ok(Some(done)),
            WcStatus::Flushed => Ok(None),
            status => Err(iwarp::Error::ConnectionLost(format!("{status:?}"))),
        }
    }

    /// Returns a received message and posts its receive again.
    fn take(&self, qp: &QueuePair, done: &Cqe) -> Result<Vec<u8>> {
        let slot = done.wr_id as usize;
        let at = slot * LONGEST;
        let message = self.inbox.to_vec(at..at + done.byte_len as usize)?;
        self.receive(qp, slot)?;
        Ok(message)
    }

    fn send(&self, qp: &QueuePair, message: &[u8]) -> Result<()> {
        self.outbox.write_at(0, message)?;
        let sges = [self.outbox.sge(..message.len())?];
        Ok(qp.post_send(&[SendWr::send(0, &sges).signaled()])?)
    }
}

async fn echo(ctx: Context, request: ConnectionRequest) -> Result<()> {
    let (messages, qp) = Messages::new(&ctx)?;
    let connection = request.accept_async(qp, &Default::default()).await?;
    while let Some(done) = messages.next().await? {
        if done.opcode == WcOpcode::Recv {
            let message = messages.take(&connection, &done)?;
            messages.send(&connection, &message)?;
        }
    }
    Ok(())
}

/// Serves each client in a task of its own, and ends when `clients` have left.
async fn serve(ctx: Context, listener: ListeningId, clients: usize) -> Result<()> {
    let mut tasks = Vec::new();
    for _ in 0..clients {
        let request = listener.accept_async().await?;
        tasks.push(tokio::spawn(echo(ctx.clone(), request)));
        tasks.retain(|task| !task.is_finished());
    }
    for task in tasks {
        task.await.expect("no panic")?;
    }
    Ok(())
}

async fn client(to: SocketAddr, number: usize) -> Result<()> {
    let ctx = Context::open(&Device::route_to(to)?, Config::from_env())?;
    let (messages, qp) = Messages::new(&ctx)?;
    let connection = Connector::new(&ctx).connect_async(to, qp).await?;
    for round in 0..50 {
        let message = format!("client {number}, message {round}").repeat(1 + round);
        messages.send(&connection, message.as_bytes())?;
        let (mut sent, mut back) = (false, None);
        while !sent || back.is_none() {
            let Some(done) = messages.next().await? else {
                return Err(iwarp::Error::ConnectionLost("the server closed".into()));
            };
            match done.opcode {
                WcOpcode::Recv => back = Some(messages.take(&connection, &done)?),
                _ => sent = true,
            }
        }
        assert_eq!(back.as_deref(), Some(message.as_bytes()));
    }
    println!("client {number}: 50 messages came back");
    Ok(())
}

fn listen(at: SocketAddr) -> Result<(Context, ListeningId)> {
    let ctx = Context::open(&Device::by_address(at.ip())?, Config::from_env())?;
    let listener = ListeningId::bind(&ctx, at)?;
    println!("listening on {}", listener.local_addr());
    Ok((ctx, listener))
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let clients = 8;
            let (ctx, listener) = listen("127.0.0.1:0".parse()?)?;
            let to = listener.local_addr();
            let server = tokio::spawn(serve(ctx, listener, clients));
            let all: Vec<_> = (0..clients)
                .map(|number| tokio::spawn(client(to, number)))
                .collect();
            for one in all {
                one.await??;
            }
            server.await??;
        }
        ["serve", at] => {
            let (ctx, listener) = listen(at.parse()?)?;
            serve(ctx, listener, usize::MAX).await?;
        }
        ["connect", to] => client(to.parse()?, 0).await?,
        _ => return Err("usage: echo_async [serve ADDR:PORT | connect ADDR:PORT]".into()),
    }
    Ok(())
}
