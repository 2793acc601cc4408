//! tower's layers around remote procedure calls over an [`iwarp::Channel`].

use crate::common::{listen, within};
use iwarp::connection::ChannelMessage;
use iwarp::{Channel, Error, Result};
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tower::timeout::error::Elapsed;
use tower::{BoxError, Service, ServiceBuilder, ServiceExt as _};

/// The calls that wait for answers, by their numbers.
type Calls = Mutex<HashMap<u64, oneshot::Sender<ChannelMessage>>>;

/// A client: each request and its answer begin with the number of the call.
#[derive(Clone)]
struct Rpc {
    channel: Channel,
    calls: Arc<Calls>,
    last: Arc<AtomicU64>,
}

impl Rpc {
    /// Also starts a task that gives answers to their calls.
    fn new(channel: Channel) -> Self {
        let calls = Arc::<Calls>::default();
        tokio::spawn(read_answers(channel.clone(), calls.clone()));
        let last = Arc::default();
        Self {
            channel,
            calls,
            last,
        }
    }
}

async fn read_answers(channel: Channel, calls: Arc<Calls>) -> Result<()> {
    while let Some(answer) = channel.recv().await? {
        let number = number(&answer);
        let call = calls.lock().expect("no panic").remove(&number);
        // A call that has timed out does not wait any more.
        let _ = call.map(|call| call.send(answer));
    }
    Ok(())
}

fn number(message: &[u8]) -> u64 {
    u64::from_be_bytes(*message.first_chunk().expect("eight bytes"))
}

impl Service<String> for Rpc {
    type Response = String;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<String>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<()>> {
        // Flow control is in the call: a message waits for a credit of the channel.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, argument: String) -> Self::Future {
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        let (tell, answer) = oneshot::channel();
        self.calls.lock().expect("no panic").insert(number, tell);
        let request = [&number.to_be_bytes(), argument.as_bytes()].concat();
        let channel = self.channel.clone();
        Box::pin(async move {
            channel.send(&request).await?;
            let answer = answer.await.map_err(|_| Error::Closed)?;
            Ok(String::from_utf8_lossy(&answer[8..]).into_owned())
        })
    }
}

/// What the server has seen, and what lets it answer.
#[derive(Default)]
struct Seen {
    pending: AtomicUsize,
    most_pending: AtomicUsize,
    go_on: Notify,
}

/// Answers `hold` when `go_on` is notified, `never` not at all, and others immediately.
async fn serve(channel: Channel, seen: Arc<Seen>) -> Result<()> {
    let mut tasks = JoinSet::new();
    while let Some(request) = channel.recv().await? {
        let (channel, seen) = (channel.clone(), seen.clone());
        tasks.spawn(async move {
            let pending = seen.pending.fetch_add(1, Ordering::SeqCst) + 1;
            seen.most_pending.fetch_max(pending, Ordering::SeqCst);
            match &request[8..] {
                b"hold" => seen.go_on.notified().await,
                b"never" => std::future::pending().await,
                _ => {}
            }
            seen.pending.fetch_sub(1, Ordering::SeqCst);
            channel.send(request.to_ascii_uppercase()).await
        });
    }
    Ok(())
}

/// Returns a client, and what its server has seen.
async fn client() -> Result<(Rpc, Arc<Seen>)> {
    let (listener, address) = listen();
    let seen = Arc::<Seen>::default();
    let server = seen.clone();
    tokio::spawn(
        async move { serve(Channel::open(listener.accept().await?).await?, server).await },
    );
    let channel = Channel::open(iwarp::connect(address).await?).await?;
    Ok((Rpc::new(channel), seen))
}

/// While two calls are pending, no third one can start. Ten calls have ten answers.
#[tokio::test(flavor = "multi_thread")]
async fn concurrency_limit_bounds_requests() {
    let test = async {
        let (rpc, seen) = client().await?;
        let service = ServiceBuilder::new().concurrency_limit(2).service(rpc);
        let mut calls = JoinSet::new();
        for _ in 0..10 {
            calls.spawn(service.clone().oneshot("hold".to_owned()));
        }
        while seen.pending.load(Ordering::SeqCst) < 2 {
            tokio::task::yield_now().await;
        }
        let mut third = service.clone();
        let third = std::future::poll_fn(|cx| Poll::Ready(third.poll_ready(cx).is_pending()));
        assert!(third.await);
        let mut answers = 0;
        while answers < 10 {
            seen.go_on.notify_one();
            let next = tokio::time::timeout(Duration::from_millis(10), calls.join_next()).await;
            if let Ok(Some(answer)) = next {
                assert_eq!(answer.expect("no panic")?, "HOLD");
                answers += 1;
            }
        }
        assert_eq!(seen.most_pending.load(Ordering::SeqCst), 2);
        Ok::<_, BoxError>(())
    };
    within(test).await.expect("ten answers");
}

/// A call times out, and later calls of the same channel are answered.
#[tokio::test(flavor = "multi_thread")]
async fn timeout_affects_one_call() {
    let test = async {
        let (rpc, _) = client().await?;
        let impatient = Duration::from_millis(20);
        let mut service = ServiceBuilder::new()
            .timeout(impatient)
            .service(rpc.clone());
        let error = service.ready().await?.call("never".to_owned()).await;
        assert!(error.expect_err("no answer comes").is::<Elapsed>());
        let patient = Duration::from_secs(100);
        let mut service = ServiceBuilder::new().timeout(patient).service(rpc);
        assert_eq!(
            service.ready().await?.call("hello".to_owned()).await?,
            "HELLO"
        );
        Ok::<_, BoxError>(())
    };
    within(test).await.expect("an answer");
}
