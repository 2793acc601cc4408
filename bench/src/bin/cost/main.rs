//! The cost of a connection's calls compared with the explicit verbs: 64-octet RDMA Writes, in
//! alternating rounds.
//!
//! ```sh
//! cargo run --release -p iwarp-bench --bin iwarp-cost             # 15 rounds
//! cargo run --release -p iwarp-bench --bin iwarp-cost 5 20000     # 5 rounds of 20,000 Writes
//! ```
//!
//! Both programs do the same: Writes with a completion each, one after the other; Writes with 64 in
//! flight; 64 that are started and awaited together, as futures and by completions; and lists of 16
//! with one completion. Prints the medians of the rates, and the median of the ratios of adjacent
//! rounds.

use iwarp::verbs::cm::{Connector, ListeningId};
use iwarp::verbs::{
    Access, CompletionQueue, Config, Context, Cqe, Device, MemoryRegion, ProtectionDomain,
    QpInitAttr, RemoteMemory, Result, SendWr, WcStatus,
};
use iwarp::{Connection, Region, RemoteRegion};
use iwarp_figures::Spread;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

const OCTETS: usize = 64;
const WINDOW: usize = 64;
const LIST: usize = 16;

/// The explicit verbs, connected within this process.
struct Explicit {
    connection: iwarp::verbs::cm::ConnectedId,
    cq: CompletionQueue,
    source: MemoryRegion,
    there: RemoteMemory,
    _peer: (iwarp::verbs::cm::ConnectedId, MemoryRegion),
}

impl Explicit {
    fn new() -> Result<Self> {
        let device = Device::by_address([127, 0, 0, 1].into())?;
        let ctx = Context::open(&device, Config::from_env())?;
        let pd = ProtectionDomain::new(&ctx);
        let listener = ListeningId::bind(&ctx, ([127, 0, 0, 1], 0).into())?;
        let to = listener.local_addr();
        let other = ctx.create_cq(16, None)?;
        let target = pd.reg_mr(OCTETS, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let there = target.remote();
        let cq = ctx.create_cq(256, None)?;
        let qp = pd.create_qp(&QpInitAttr::new(&cq, &cq))?;
        let theirs = pd.create_qp(&QpInitAttr::new(&other, &other))?;
        let (accepted, connection) = std::thread::scope(|scope| {
            let server = scope.spawn(|| listener.accept(None)?.accept(theirs, &Default::default()));
            let connection = Connector::new(&ctx).connect(to, qp);
            (
                server.join().expect("the server does not panic"),
                connection,
            )
        });
        Ok(Self {
            connection: connection?,
            cq,
            source: pd.reg_mr(OCTETS, Access::empty())?,
            there,
            _peer: (accepted?, target),
        })
    }

    /// Takes completions; returns how many Writes they stand for.
    fn take(&self, writes: usize) -> Result<usize> {
        let mut done = [Cqe::default(); 16];
        let n = self.cq.wait(&mut done, None)?;
        let good = done[..n].iter().all(|d| d.status == WcStatus::Success);
        assert!(good, "{done:?}");
        Ok(n * writes)
    }

    /// Posts Writes one by one. With `window` in flight, waits until at least `least` have
    /// completed.
    fn windowed(&self, writes: usize, window: usize, least: usize) -> Result<()> {
        let elements = [self.source.sge(..)?];
        let wr = SendWr::write(1, self.there.addr, self.there.rkey, &elements).signaled();
        let mut outstanding = 0;
        for _ in 0..writes {
            if outstanding == window {
                while outstanding > window - least {
                    outstanding -= self.take(1)?;
                }
            }
            self.connection.post_send(&[wr])?;
            outstanding += 1;
        }
        while outstanding > 0 {
            outstanding -= self.take(1)?;
        }
        Ok(())
    }

    fn listed(&self, writes: usize) -> Result<()> {
        let elements = [self.source.sge(..)?];
        let wr = SendWr::write(1, self.there.addr, self.there.rkey, &elements);
        let mut list = [wr; LIST];
        list[LIST - 1] = wr.signaled();
        for _ in 0..writes / LIST {
            self.connection.post_send(&list)?;
            self.take(LIST)?;
        }
        Ok(())
    }
}

/// The calls of a connection, within this process.
struct Calls {
    connection: Connection,
    source: Region<u8>,
    there: RemoteRegion<u8>,
    _peer: (Connection, Region<u8>),
}

impl Calls {
    fn new() -> Result<Self> {
        let listener = iwarp::listen("127.0.0.1:0").bind()?;
        let to = listener.local_addr();
        let server = std::thread::spawn(move || listener.accept().wait());
        let connection = iwarp::connect(to).wait()?;
        let accepted = server.join().expect("the server does not panic")?;
        let target = accepted.share::<u8>(OCTETS, Access::REMOTE_WRITE)?;
        Ok(Self {
            source: connection.allocate(OCTETS)?,
            connection,
            there: target.remote(),
            _peer: (accepted, target),
        })
    }

    fn one_by_one(&self, writes: usize) -> Result<()> {
        (0..writes).try_for_each(|_| self.connection.write(&self.source, &self.there).wait())
    }

    fn windowed(&self, writes: usize) -> Result<()> {
        let mut on_their_way = VecDeque::with_capacity(WINDOW);
        for _ in 0..writes {
            if on_their_way.len() == WINDOW
                && let Some(oldest) = on_their_way.pop_front()
            {
                iwarp::Operation::wait(oldest)?;
            }
            on_their_way.push_back(self.connection.write(&self.source, &self.there).started());
        }
        on_their_way
            .into_iter()
            .try_for_each(iwarp::Operation::wait)
    }

    fn joined(&self, writes: usize) -> Result<()> {
        let mut futures = Vec::with_capacity(WINDOW);
        for _ in 0..writes / WINDOW {
            futures.clear();
            let write = || Some(self.connection.write(&self.source, &self.there));
            futures.extend((0..WINDOW).map(|_| write()));
            block_on(Join(&mut futures))?;
        }
        Ok(())
    }

    fn listed(&self, writes: usize) -> Result<()> {
        let mut batch = self.connection.batch();
        for _ in 0..writes / LIST {
            for _ in 0..LIST {
                batch.write(&self.source, &self.there)?;
            }
            batch.submit().wait()?;
        }
        Ok(())
    }
}

/// Awaits all of some futures.
struct Join<'a, F>(&'a mut [Option<F>]);

impl<F: Future<Output = Result<()>> + Unpin> Future for Join<'_, F> {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Result<()>> {
        let mut all = true;
        for slot in self.0.iter_mut() {
            let Some(future) = slot else { continue };
            match Pin::new(future).poll(cx)? {
                Poll::Ready(()) => *slot = None,
                Poll::Pending => all = false,
            }
        }
        if all {
            Poll::Ready(Ok(()))
        } else {
            Poll::Pending
        }
    }
}

/// Runs a future in this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }

        fn wake_by_ref(self: &Arc<Self>) {
            self.0.unpark();
        }
    }
    thread_local! {
        static WAKER: Waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    }
    let mut future = pin!(future);
    WAKER.with(|waker| {
        loop {
            match future.as_mut().poll(&mut TaskContext::from_waker(waker)) {
                Poll::Ready(done) => return done,
                Poll::Pending => std::thread::park(),
            }
        }
    })
}

/// Returns the rate in millions of Writes per second.
fn rate(writes: usize, round: impl FnOnce(usize) -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    round(writes)?;
    Ok(writes as f64 / start.elapsed().as_secs_f64() / 1e6)
}

/// Returns the median of at least one round.
fn median(values: Vec<f64>) -> f64 {
    Spread::of(values).map_or(f64::NAN, |spread| spread.median)
}

fn compare(
    name: &str,
    rounds: usize,
    writes: usize,
    calls: impl Fn(usize) -> Result<()>,
    explicit: impl Fn(usize) -> Result<()>,
) -> Result<()> {
    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (a, b) = (rate(writes, &explicit)?, rate(writes, &calls)?);
        theirs.push(a);
        ours.push(b);
        ratios.push(b / a);
    }
    let (ours, theirs, ratio) = (median(ours), median(theirs), median(ratios));
    println!("{name}: {ours:.2} M/s by calls, {theirs:.2} M/s by verbs, ratio {ratio:.2}");
    Ok(())
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let rounds = args.next().map_or(Ok(15), |n| n.parse())?;
    let writes = args.next().map_or(Ok(200_000), |n| n.parse())?;
    if rounds == 0 || writes < WINDOW {
        return Err("usage: iwarp-cost [ROUNDS [WRITES]]".into());
    }
    let (calls, verbs) = (Calls::new()?, Explicit::new()?);
    compare(
        "one after the other",
        rounds,
        writes.div_ceil(10),
        |n| calls.one_by_one(n),
        |n| verbs.windowed(n, 1, 1),
    )?;
    compare(
        "64 on their way",
        rounds,
        writes,
        |n| calls.windowed(n),
        |n| verbs.windowed(n, WINDOW, 1),
    )?;
    compare(
        "64 joined",
        rounds,
        writes,
        |n| calls.joined(n),
        |n| verbs.windowed(n, WINDOW, WINDOW),
    )?;
    compare(
        "lists of 16",
        rounds,
        writes,
        |n| calls.listed(n),
        |n| verbs.listed(n),
    )?;
    Ok(())
}
