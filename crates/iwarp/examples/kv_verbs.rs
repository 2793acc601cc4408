//! A key-value store whose clients look up keys by RDMA Reads only. The server's program takes no
//! part in the look-ups.
//!
//! ```sh
//! cargo run --example kv_verbs                               # both ends in this process
//! cargo run --example kv_verbs serve 192.0.2.7:7172          # on one host, then on another:
//! cargo run --example kv_verbs get 192.0.2.7:7172 colour shape
//! ```
//!
//! The table is registered memory: buckets of 128 octets, found by a hash of the key and open
//! addressing. The server changes a bucket in place. Each bucket begins and ends with a version
//! number. If the two differ, or are odd, the reader saw a bucket that was being changed, and reads
//! it again. The client gets the address of the table from the private data of the connection.

use iwarp::verbs::cm::{ConnectedId, ConnectionParameters, Connector, ListeningId};
use iwarp::verbs::{
    Access, CompletionQueue, Config, Context, Cqe, Device, MemoryRegion, ProtectionDomain,
    QpInitAttr, RemoteMemory, Result, SendWr, WcStatus,
};
use std::net::SocketAddr;
use std::time::Duration;

/// Number of buckets.
const BUCKETS: u64 = 1024;
/// Octets of a bucket.
const BUCKET: usize = 128;
/// Offsets in a bucket, behind the first version: key, value, second version.
const KEY: usize = 8;
const VALUE: usize = 40;
const BEHIND: usize = 120;

fn hash(key: &str) -> u64 {
    // FNV-1a, because both sides must compute the same hash, also on different machines.
    key.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Returns `text` padded with zeros to `len` octets, or `None` if it is empty or does not fit.
fn field(text: &str, len: usize) -> Option<Vec<u8>> {
    let mut out = text.as_bytes().to_vec();
    let fits = !out.is_empty() && out.len() <= len;
    out.resize(len, 0);
    fits.then_some(out)
}

fn text(octets: &[u8]) -> String {
    let end = octets.iter().position(|b| *b == 0).unwrap_or(octets.len());
    String::from_utf8_lossy(&octets[..end]).into_owned()
}

/// The server's side of the table.
struct Table(MemoryRegion);

impl Table {
    fn put(&self, key: &str, value: &str) -> Result<()> {
        let bad = iwarp::Error::InvalidArgument("keys have 1 to 32 octets, values 1 to 80");
        let (Some(k), Some(v)) = (field(key, VALUE - KEY), field(value, BEHIND - VALUE)) else {
            return Err(bad);
        };
        for step in 0..BUCKETS {
            let at = (hash(key).wrapping_add(step) % BUCKETS) as usize * BUCKET;
            let there = self.0.to_vec(at + KEY..at + VALUE)?;
            if there[0] != 0 && there != k {
                continue;
            }
            // The first version is odd while the bucket changes. Both versions are stored with
            // release ordering, so a reader that sees them equal and even has read a consistent
            // bucket.
            let version = self.0.load_u64(at)?;
            self.0.store_u64(at, version + 1)?;
            self.0.write_at(at + KEY, &k)?;
            self.0.write_at(at + VALUE, &v)?;
            self.0.store_u64(at + BEHIND, version + 2)?;
            return self.0.store_u64(at, version + 2);
        }
        Err(iwarp::Error::OutOfMemory)
    }
}

/// Serves the table to one client after the other until `clients` have left.
fn serve(listener: &ListeningId, ctx: &Context, clients: usize) -> Result<()> {
    let pd = ProtectionDomain::new(ctx);
    let memory = pd.reg_mr(
        BUCKETS as usize * BUCKET,
        Access::LOCAL_WRITE | Access::REMOTE_READ,
    )?;
    let table = Table(memory);
    table.put("colour", "blue")?;
    table.put("shape", "round")?;
    let cq = ctx.create_cq(16, None)?;
    for _ in 0..clients {
        let request = listener.accept(None)?;
        let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
        let parameters = ConnectionParameters {
            private_data: table.0.remote().to_bytes().to_vec(),
            ..Default::default()
        };
        let connection = request.accept(qp, &parameters)?;
        // While the client is connected, one value changes again and again.
        let mut round = 0;
        while connection
            .wait_disconnected(Some(Duration::from_millis(1)))
            .is_err_and(|e| matches!(e, iwarp::Error::TimedOut(_)))
        {
            round += 1;
            table.put("round", &round.to_string())?;
        }
    }
    Ok(())
}

struct Client {
    connection: ConnectedId,
    cq: CompletionQueue,
    sink: MemoryRegion,
    table: RemoteMemory,
}

impl Client {
    fn connect(to: SocketAddr) -> Result<Self> {
        let ctx = Context::open(&Device::route_to(to)?, Config::from_env())?;
        let pd = ProtectionDomain::new(&ctx);
        let cq = ctx.create_cq(16, None)?;
        let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
        let connection = Connector::new(&ctx).connect(to, qp)?;
        let table = RemoteMemory::from_bytes(connection.private_data())
            .ok_or(iwarp::Error::InvalidState("this server has no table"))?;
        let sink = pd.reg_mr(BUCKET, Access::LOCAL_WRITE)?;
        Ok(Self {
            connection,
            cq,
            sink,
            table,
        })
    }

    fn bucket(&self, number: u64) -> Result<Vec<u8>> {
        let from = self
            .table
            .slice(number * BUCKET as u64, BUCKET as u64)
            .ok_or(iwarp::Error::InvalidArgument("outside the table"))?;
        let sges = [self.sink.sge(..)?];
        let read = SendWr::read(1, from.addr, from.rkey, &sges).signaled();
        loop {
            self.connection.post_send(&[read])?;
            let mut done = [Cqe::default()];
            self.cq.wait(&mut done, Some(Duration::from_secs(30)))?;
            assert_eq!(done[0].status, WcStatus::Success);
            let bucket = self.sink.to_vec(..)?;
            if bucket[..KEY] == bucket[BEHIND..] && bucket[0] % 2 == 0 {
                return Ok(bucket);
            }
        }
    }

    fn get(&self, key: &str) -> Result<Option<String>> {
        for step in 0..BUCKETS {
            let bucket = self.bucket(hash(key).wrapping_add(step) % BUCKETS)?;
            match text(&bucket[KEY..VALUE]) {
                k if k == key => return Ok(Some(text(&bucket[VALUE..BEHIND]))),
                k if k.is_empty() => return Ok(None),
                _ => {}
            }
        }
        Ok(None)
    }
}

fn show(client: &Client, keys: &[&str]) -> Result<()> {
    for key in keys {
        match client.get(key)? {
            Some(value) => println!("{key} = {value}"),
            None => println!("{key} is not there"),
        }
    }
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
            let server = std::thread::spawn(move || serve(&listener, &ctx, 1));
            let client = Client::connect(to)?;
            show(&client, &["colour", "shape", "size"])?;
            assert_eq!(client.get("colour")?.as_deref(), Some("blue"));
            assert_eq!(client.get("size")?, None);
            // Each read of a changing value returns a complete number, never smaller than the one
            // before.
            let mut last = 0u64;
            for _ in 0..200 {
                let now = client.get("round")?.map_or(Ok(0), |v| v.parse())?;
                assert!(now >= last, "{now} after {last}");
                last = now;
            }
            println!("200 reads of a changing value, the last was {last}");
            drop(client);
            server.join().expect("the server does not panic")?;
        }
        ["serve", at] => {
            let (ctx, listener) = listen(at.parse()?)?;
            serve(&listener, &ctx, usize::MAX)?;
        }
        ["get", to, ref keys @ ..] => show(&Client::connect(to.parse()?)?, keys)?,
        _ => return Err("usage: kv_verbs [serve ADDR:PORT | get ADDR:PORT KEY…]".into()),
    }
    Ok(())
}
