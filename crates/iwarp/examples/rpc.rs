//! Remote procedure calls over a channel, as tasks: many calls share a connection, and answers come
//! in any order. The server answers with the argument, backwards.
//!
//! ```sh
//! cargo run -p iwarp --example rpc                           # both ends in this process, or:
//! cargo run -p iwarp --example rpc serve 127.0.0.1:7171      # in one terminal, and
//! cargo run -p iwarp --example rpc connect 127.0.0.1:7171    # in another one
//! ```
//!
//! The client prints:
//!
//! ```text
//! 100 of 100 answers are right
//! ```
//!
//! A request is its number, eight bytes, and the argument. The answer is the same number and the
//! result. One task of the client reads answers and gives each to the call that waits for it.

use iwarp::connection::ChannelMessage;
use iwarp::{Channel, Connection, Listener, Result};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;

/// Serves each request of one client in a task of its own.
async fn answer(connection: Connection) -> Result<()> {
    let channel = Channel::open(connection).await?;
    while let Some(request) = channel.recv().await? {
        let channel = channel.clone();
        tokio::spawn(async move {
            let mut answer = request.to_vec();
            drop(request); // returns the receive buffer, so the client may send another request
            answer.get_mut(8..).unwrap_or_default().reverse();
            channel.send(&answer).await
        });
    }
    Ok(())
}

async fn serve(listener: Listener) -> Result<()> {
    println!("listening on {}", listener.local_addr());
    loop {
        tokio::spawn(answer(listener.accept().await?));
    }
}

struct Client {
    channel: Channel,
    calls: Mutex<HashMap<u64, oneshot::Sender<ChannelMessage>>>,
    last: AtomicU64,
}

impl Client {
    async fn connect(to: &str) -> Result<Arc<Self>> {
        let client = Arc::new(Self {
            channel: Channel::open(iwarp::connect(to).await?).await?,
            calls: Mutex::default(),
            last: AtomicU64::new(0),
        });
        tokio::spawn(client.clone().read_answers());
        Ok(client)
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

    /// Gives answers to their calls. When the connection ends, the pending calls fail.
    async fn read_answers(self: Arc<Self>) {
        while let Ok(Some(answer)) = self.channel.recv().await {
            let number = answer.first_chunk().map(|n| u64::from_be_bytes(*n));
            let call = number.and_then(|n| self.calls.lock().expect("no panic").remove(&n));
            let _ = call.map(|call| call.send(answer));
        }
        self.calls.lock().expect("no panic").clear();
    }
}

async fn connect(to: &str) -> anyhow::Result<()> {
    let client = Client::connect(to).await?;
    let mut calls = tokio::task::JoinSet::new();
    for n in 0..100 {
        let (client, argument) = (client.clone(), format!("call {n}").into_bytes());
        calls.spawn(async move {
            let answer = client.call(&argument).await?;
            Ok::<_, iwarp::Error>(answer.iter().rev().eq(&argument))
        });
    }
    let mut right = 0;
    while let Some(is_right) = calls.join_next().await {
        right += usize::from(is_right??);
    }
    println!("{right} of 100 answers are right");
    Ok(client.channel.finish().await?)
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {
            let listener = iwarp::listen("127.0.0.1:0").bind()?;
            let to = listener.local_addr().to_string();
            tokio::spawn(serve(listener));
            connect(&to).await
        }
        ["serve", at] => Ok(serve(iwarp::listen(at).bind()?).await?),
        ["connect", to] => connect(to).await,
        _ => anyhow::bail!("usage: rpc [serve ADDR:PORT | connect ADDR:PORT]"),
    }
}
