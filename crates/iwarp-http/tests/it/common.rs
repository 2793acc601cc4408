//! Streams and bodies for the tests of this program.

use bytes::Bytes;
use http_body_util::BodyExt as _;
use iwarp::{Channel, Connection, Listener, Stream};
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

/// Long enough for a busy machine. No test asserts that something takes time.
const LIMIT: Duration = Duration::from_secs(120);

/// Fails the test if it hangs.
pub(crate) async fn within<T>(test: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(LIMIT, test).await;
    done.expect("the test does not hang")
}

pub(crate) fn listen() -> (Listener, SocketAddr) {
    let listener = iwarp::listen("127.0.0.1:0").bind().expect("a listener");
    let address = listener.local_addr();
    (listener, address)
}

pub(crate) async fn open(connection: Connection) -> iwarp::Result<Stream> {
    Ok(Stream::from(Channel::open(connection).await?))
}

pub(crate) async fn accept(listener: &Listener) -> iwarp::Result<Stream> {
    open(listener.accept().await?).await
}

pub(crate) async fn connect(to: SocketAddr) -> iwarp::Result<Stream> {
    open(iwarp::connect(to).await?).await
}

/// Returns `len` bytes in which no two messages of a stream are alike.
pub(crate) fn pattern(len: usize, seed: u64) -> Bytes {
    let words = (0..len.div_ceil(8) as u64).map(|n| (n ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).take(len).collect();
    bytes.into()
}

/// Reads a body to its end.
pub(crate) async fn whole<B>(body: B) -> Result<Bytes, B::Error>
where
    B: hyper::body::Body,
{
    Ok(body.collect().await?.to_bytes())
}
