//! The server, like `rping -s -P`.

use super::link::{Link, Prepared};
use super::wire::{Info, printable};
use super::{MAX_SIZE, PingArgs};
use iwarp::verbs::Context;
use iwarp::verbs::cm::{ConnectionParameters, ConnectionRequest};
use iwarp::{Access, Config};
use iwarp_cli_common::error::{Context as _, Error, Result};
use iwarp_cli_common::out;
use iwarp_cli_common::service::{self, Guest};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Answers until the count is reached; without a count, until the process is killed.
pub(super) fn run(args: &PingArgs) -> Result<()> {
    let bind = args
        .bind
        .map_or_else(|| service::WILDCARDS.to_vec(), |ip| vec![ip]);
    let config = args.limits.apply(Config::from_env());
    let (ctx, listener) = service::listen(&bind, args.port, &config)?;
    let gate = service::gate(&args.limits);
    out::line(format_args!(
        "iwarp ping: listening on {}",
        listener.local_addr()
    ));
    let answered = Arc::new(AtomicU64::new(0));
    let (limit, verbose) = (args.count, args.verbose);
    let enough = {
        let answered = Arc::clone(&answered);
        move || limit.is_some_and(|n| answered.load(Ordering::Acquire) >= n)
    };
    let stop = enough.clone();
    service::serve_clients(&listener, &gate, stop, move |request, guest, from| {
        let outcome = accept(&ctx, request, guest).and_then(|mut link| {
            let outcome = answer(&mut link, verbose, &answered, &enough);
            link.close();
            outcome
        });
        match outcome {
            Ok(n) => tracing::info!(%from, "{n} pings answered"),
            Err(e) => service::log_failure(from, &e),
        }
    })
}

fn accept(ctx: &Context, request: ConnectionRequest, guest: Guest) -> Result<Link> {
    let (prepared, qp) = match Prepared::new(ctx) {
        Ok(prepared) => prepared,
        Err(e) => return Err(service::refuse(request, e)),
    };
    let parameters = ConnectionParameters {
        responder_resources: Some(1),
        initiator_depth: Some(1),
        ..ConnectionParameters::default()
    };
    let connection = service::accept(request, qp, &parameters, &guest)?;
    Ok(prepared.into_link(connection, Some(guest)))
}

fn answer(
    link: &mut Link,
    verbose: bool,
    answered: &AtomicU64,
    enough: &dyn Fn() -> bool,
) -> Result<u64> {
    let buffer = link.allocate(MAX_SIZE as usize, Access::LOCAL_WRITE)?;
    let mut count = 0;
    while !enough() {
        let Some(source) = link.recv()? else {
            break;
        };
        let len = checked_size(source)?;
        if count == 0 {
            link.advance();
        }
        let sge = buffer.sge(..len).context("memory")?;
        link.read(source, sge)?;
        if count == 0 {
            link.advance();
        }
        let data = buffer.to_vec(..len).context("memory")?;
        if verbose {
            out::line(format_args!("server ping data: {}", printable(&data)));
        }
        link.send(Info::default())?;
        let Some(sink) = link.recv()? else {
            return Err(Error::failed(
                "the client closed the connection in the middle of a ping",
            ));
        };
        // Like rping: the text with its NUL, limited to the size of the sink.
        let text = data.iter().position(|b| *b == 0).map_or(len, |nul| nul + 1);
        let len = text.min(checked_size(sink)?);
        link.write(sink, buffer.sge(..len).context("memory")?)?;
        link.send(Info::default())?;
        link.served();
        count += 1;
        answered.fetch_add(1, Ordering::AcqRel);
    }
    Ok(count)
}

fn checked_size(info: Info) -> Result<usize> {
    if info.size > MAX_SIZE {
        return Err(Error::failed(format!(
            "the client's buffer has {} octets; the maximum is {MAX_SIZE}",
            info.size
        )));
    }
    Ok(info.size as usize)
}
