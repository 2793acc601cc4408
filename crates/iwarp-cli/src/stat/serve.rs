//! `iwarp stat serve`: an HTTP server with the statistics, for Prometheus.
//!
//! The server only reads. It listens on loopback unless told otherwise, and limits what clients can
//! occupy: each connection serves one request and has a time limit, clients have places
//! ([`Gate`]), processes are queried one query at a time, and an answer is reused for a moment.

use super::metrics::{self, Format};
use super::query::Query;
use clap::Args;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    ACCEPT, ALLOW, CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderValue, X_CONTENT_TYPE_OPTIONS,
};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_cli_common::out;
use iwarp_cli_common::service::{Gate, Guest, Limits};
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr as _;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;

/// The port, if `--bind` names none.
const DEFAULT_PORT: u16 = 7177;
/// Longest time in which a client must send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time of a connection. Querying processes may take some seconds for each 256 of them.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(120);
/// Largest request in bytes: hyper's minimum.
const REQUEST_MAX: usize = 8192;
/// How long an answer is reused, so that many clients cause no more queries than one.
const REUSE: Duration = Duration::from_millis(250);

/// Arguments of `iwarp stat serve`.
#[derive(Debug, Args)]
#[command(after_help = "The server answers GET and HEAD:
  /metrics    the statistics of all processes of this user (of all users for root), in the format
              that the client accepts: OpenMetrics, or Prometheus' text format
  /           a page with a link to it

Without --bind, only this host can connect, but every user of this host can. The statistics contain
command lines and addresses. On a network, restrict the clients with --allow, or put a server with
authentication in front.

EXAMPLES:
  iwarp stat serve
  iwarp stat serve --bind 192.0.2.7:7177 --allow 192.0.2.1
  curl http://127.0.0.1:7177/metrics")]
pub(super) struct ServeArgs {
    /// Address to listen on, with or without a port (default 7177). Port 0 selects a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1", value_parser = address)]
    bind: SocketAddr,
    /// Number of queue pairs that have samples of their own, divided among the processes. The
    /// samples of devices count all queue pairs
    #[arg(long, value_name = "N", default_value_t = 1000)]
    max_queue_pairs: usize,
    /// Query the processes that have IWARP_STAT=DIRECTORY
    #[arg(long, value_name = "DIRECTORY")]
    directory: Option<PathBuf>,
    #[command(flatten)]
    limits: Limits,
}

fn address(text: &str) -> std::result::Result<SocketAddr, String> {
    if let Ok(ip) = IpAddr::from_str(text) {
        return Ok(SocketAddr::new(ip, DEFAULT_PORT));
    }
    text.parse().map_err(|_| {
        "an IP address, with or without a port, for example 127.0.0.1:7177 or [::1]:7177".to_owned()
    })
}

/// Serves until a signal ends the process.
///
/// # Errors
/// The address cannot be used, or no memory is left.
pub(super) fn run(args: &ServeArgs) -> Result<()> {
    let listener = std::net::TcpListener::bind(args.bind)
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
        .context(format_args!("cannot listen on {}", args.bind))?;
    let at = listener.local_addr().context("cannot listen")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // For the queries, of which there is one at a time.
        .max_blocking_threads(1)
        .build()
        .context("cannot start the server")?;
    let set = std::env::var_os("IWARP_STAT");
    let source = Arc::new(Source {
        query: Query::new(Vec::new(), args.directory.as_ref(), set),
        queue_pairs: args.max_queue_pairs,
        latest: Mutex::new(None),
        loopback: at.ip().is_loopback(),
    });
    let gate = Gate::new(args.limits.clients(), args.limits.per_address());
    out::line(format_args!(
        "listening on {at}; http://{at}/metrics has the statistics"
    ));
    out::check()?;
    runtime.block_on(async {
        let listener = TcpListener::from_std(listener).context("cannot listen")?;
        accept(&listener, &gate, &args.limits, &source).await
    })
}

/// Accepts connections, each of which is served in a task of its own.
async fn accept(
    listener: &TcpListener,
    gate: &Arc<Gate>,
    limits: &Limits,
    source: &Arc<Source>,
) -> Result<()> {
    loop {
        let (stream, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(e) => {
                // No file descriptors are left; some become free when clients disconnect.
                tracing::warn!("accept: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if !limits.admits(from.ip()) {
            tracing::info!(%from, "refused by --allow");
            continue;
        }
        match gate.admit(from.ip()) {
            Ok(guest) => start(stream, from, guest, Arc::clone(source)),
            // Closing the connection tells the client to try again.
            Err(full) => tracing::info!(%from, "refused: {full}"),
        }
    }
}

/// Serves a client in a task of its own, which ends if the client is evicted.
fn start(stream: TcpStream, from: SocketAddr, guest: Guest, source: Arc<Source>) {
    let guest = Arc::new(guest);
    let task = tokio::spawn(connection(stream, from, Arc::clone(&guest), source));
    let task = task.abort_handle();
    guest.on_evict(move || {
        tracing::info!(%from, "evicted for another client");
        task.abort();
    });
}

/// Serves one request.
async fn connection(stream: TcpStream, from: SocketAddr, guest: Arc<Guest>, source: Arc<Source>) {
    guest.advance();
    let service = service_fn(|request| {
        guest.at_work();
        answer(request, Arc::clone(&source))
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIMEOUT)
        .keep_alive(false)
        .max_buf_size(REQUEST_MAX)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CONNECTION_TIMEOUT, served).await {
        Ok(Ok(())) => tracing::debug!(%from, "served"),
        Ok(Err(error)) => tracing::info!(%from, "{error}"),
        Err(_) => tracing::info!(%from, "the client does not take its answer"),
    }
}

/// Returns the response to a request. Its body is ignored.
async fn answer(
    request: Request<Incoming>,
    source: Arc<Source>,
) -> std::result::Result<Response<Full<Bytes>>, Infallible> {
    let headers = request.headers();
    if source.loopback && !names_loopback(headers) {
        return Ok(plain(
            StatusCode::FORBIDDEN,
            "the host is not a loopback address\n",
        ));
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
        let allow = HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(ALLOW, allow);
        return Ok(response);
    }
    Ok(match request.uri().path() {
        "/metrics" => {
            let format = accepted(headers);
            match source.text(format).await {
                Ok(text) => respond(StatusCode::OK, format.media_type(), text),
                Err(error) => {
                    tracing::warn!("{error}");
                    plain(
                        StatusCode::INTERNAL_SERVER_ERROR,
                        "the processes cannot be queried\n",
                    )
                }
            }
        }
        "/" => respond(StatusCode::OK, "text/html; charset=utf-8", PAGE.into()),
        _ => plain(StatusCode::NOT_FOUND, "there is only /metrics\n"),
    })
}

/// The page at `/`.
const PAGE: &str = "<!DOCTYPE html><html lang=\"en\"><title>iwarp</title>\
                    <h1>iwarp</h1><p><a href=\"/metrics\">Metrics</a></html>\n";

fn plain(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    respond(status, "text/plain; charset=utf-8", text.into())
}

fn respond(status: StatusCode, media: &'static str, text: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text));
    *response.status_mut() = status;
    for (name, value) in [
        (CONTENT_TYPE, media),
        (CACHE_CONTROL, "no-store"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ] {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Returns the format for the client: OpenMetrics if the client names it, as Prometheus does.
fn accepted(headers: &HeaderMap) -> Format {
    let names = |value: &HeaderValue| {
        value.to_str().is_ok_and(|value| {
            let mut types = value.split(',').filter_map(|t| t.split(';').next());
            types.any(|t| {
                t.trim()
                    .eq_ignore_ascii_case("application/openmetrics-text")
            })
        })
    };
    match headers.get_all(ACCEPT).iter().any(names) {
        true => Format::OpenMetrics,
        false => Format::Prometheus,
    }
}

/// Returns `true` if the request's host is an IP address or `localhost`. A web page of another host
/// can let its name resolve to 127.0.0.1, and would otherwise read the statistics in the user's
/// browser.
fn names_loopback(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(HOST) else {
        return true;
    };
    let Ok(host) = host.to_str() else {
        return false;
    };
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let ip = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || ip.parse::<IpAddr>().is_ok()
}

/// Queries the processes for all connections.
struct Source {
    query: Query,
    /// Number of queue pairs that have samples of their own.
    queue_pairs: usize,
    /// When the latest query ended, and its result in the format that was wanted.
    latest: Mutex<Option<(Instant, Format, Bytes)>>,
    /// `true` if the server listens on a loopback address.
    loopback: bool,
}

impl Source {
    /// Returns the statistics. Waits if another query is in progress.
    async fn text(self: &Arc<Self>, format: Format) -> Result<Bytes> {
        let mut latest = self.latest.lock().await;
        if let Some((when, of, text)) = &*latest
            && *of == format
            && when.elapsed() < REUSE
        {
            return Ok(text.clone());
        }
        let source = Arc::clone(self);
        let query = tokio::task::spawn_blocking(move || source.query(format));
        let text = query.await.map_err(|e| Error::failed(e.to_string()))??;
        *latest = Some((Instant::now(), format, text.clone()));
        Ok(text)
    }

    fn query(&self, format: Format) -> Result<Bytes> {
        let answers = self.query.ask()?;
        for silent in &answers.silent {
            tracing::debug!("{}", silent.sentence());
        }
        let options = metrics::Options {
            format,
            queue_pairs: self.queue_pairs,
        };
        Ok(metrics::text(&answers.stats, answers.silent.len(), options).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(hyper::header::HeaderName, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter().cloned();
        pairs
            .map(|(n, v)| (n, HeaderValue::from_static(v)))
            .collect()
    }

    #[test]
    fn addresses_have_a_default_port() {
        assert_eq!(address("::1"), Ok("[::1]:7177".parse().unwrap()));
        assert_eq!(address("127.0.0.1"), Ok("127.0.0.1:7177".parse().unwrap()));
        assert_eq!(address("[::1]:9"), Ok("[::1]:9".parse().unwrap()));
        for bad in ["", "9", "host", "127.0.0.1:", "127.0.0.1:99999", "[::1]"] {
            assert!(address(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn client_selects_the_format() {
        let prometheus = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5,*/*;q=0.1";
        assert_eq!(
            accepted(&headers(&[(ACCEPT, prometheus)])),
            Format::OpenMetrics
        );
        for other in ["*/*", "text/plain", "text/html, application/json;q=0.9"] {
            assert_eq!(accepted(&headers(&[(ACCEPT, other)])), Format::Prometheus);
        }
        assert_eq!(accepted(&headers(&[])), Format::Prometheus);
    }

    #[test]
    fn foreign_host_names_are_refused() {
        for good in [
            "localhost",
            "LOCALHOST:7177",
            "127.0.0.1:7177",
            "[::1]:7177",
            "127.0.0.1",
        ] {
            assert!(names_loopback(&headers(&[(HOST, good)])), "{good}");
        }
        for bad in [
            "evil.example",
            "evil.example:7177",
            "localhost.evil.example",
            "",
        ] {
            assert!(!names_loopback(&headers(&[(HOST, bad)])), "{bad}");
        }
        assert!(names_loopback(&headers(&[])));
    }
}
