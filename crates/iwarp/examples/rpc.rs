//! Remote procedure calls over a channel, as tasks: many calls share a connection, and answers come
//! in any order.
//!
//! ```sh
//! cargo run --example rpc        # server and clients in this process
//! ```
//!
//! A request is its number, eight octets, and the argument. The answer is the same number and the
//! result. One task of the client reads answers and gives each to the call that waits for it.

use iwarp::connection::ChannelMessage;
use iwarp::{Channel, Result};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::oneshot;

/// Serves each request of one client in a task of its own.
async fn serve(channel: Channel) -> Result<()> {
    while let Some(request) = channel.recv().await? {
        let channel = channel.clone();
        tokio::spawn(async move {
            let mut answer = request.to_vec();
            // The message is not needed any more, so the client may send another one.
            drop(request);
            if let Some(text) = answer.get_mut(8..) {
                text.reverse();
            }
            if let Err(error) = channel.send(&answer).await {
                eprintln!("an answer was not sent: {error}");
            }
        });
    }
    Ok(())
}

/// The client's end.
struct Client {
    channel: Channel,
    calls: Mutex<HashMap<u64, oneshot::Sender<ChannelMessage>>>,
    last: AtomicU64,
}

impl Client {
    async fn connect(to: SocketAddr) -> Result<Self> {
        Ok(Self {
            channel: Channel::open(iwarp::connect(to).await?).await?,
            calls: Mutex::default(),
            last: AtomicU64::new(0),
        })
    }

    /// Calls the server; any number of tasks may do so at the same time.
    async fn call(&self, argument: &[u8]) -> Result<Vec<u8>> {
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        let (tell, answer) = oneshot::channel();
        self.calls.lock().expect("no panic").insert(number, tell);
        let request = [&number.to_be_bytes(), argument].concat();
        self.channel.send(&request).await?;
        let answer = answer.await.map_err(|_| iwarp::Error::Closed)?;
        Ok(answer[8..].to_vec())
    }

    /// Gives answers to their calls until the server has finished.
    async fn read_answers(&self) -> Result<()> {
        while let Some(answer) = self.channel.recv().await? {
            let number = answer.first_chunk().map(|n| u64::from_be_bytes(*n));
            let call = number.and_then(|n| self.calls.lock().expect("no panic").remove(&n));
            if let Some(call) = call {
                let _ = call.send(answer);
            }
        }
        Ok(())
    }
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let listener = iwarp::listen("127.0.0.1:0").bind()?;
    let address = listener.local_addr();
    let server = tokio::spawn(async move {
        let connection = listener.accept().await?;
        serve(Channel::open(connection).await?).await
    });
    let client = std::sync::Arc::new(Client::connect(address).await?);
    let reader = tokio::spawn({
        let client = client.clone();
        async move { client.read_answers().await }
    });
    let calls = (0..100).map(|n| {
        let client = client.clone();
        tokio::spawn(async move { client.call(format!("call {n}").as_bytes()).await })
    });
    let mut right = 0;
    for (n, call) in calls.collect::<Vec<_>>().into_iter().enumerate() {
        let expected: Vec<u8> = format!("call {n}").bytes().rev().collect();
        right += usize::from(call.await?? == expected);
    }
    println!("{right} of 100 answers are right");
    client.channel.finish().await?;
    server.await??;
    Ok(reader.await??)
}
