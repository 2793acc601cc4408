//! `iwarp cp serve`: serves a directory until the process is killed.

use crate::CpArgs;
use crate::confine::Root;
use crate::link::{Prepared, RdmaLink};
use crate::session::{self, Summary};
use iwarp::verbs::Context;
use iwarp::verbs::cm::{ConnectionParameters, ConnectionRequest};
use iwarp_cli_common::error::Result;
use iwarp_cli_common::service::{self, Budget, Guest};
use iwarp_cli_common::text::printable;
use iwarp_cli_common::{out, units};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

/// Serves a directory.
///
/// # Errors
/// Fails if the directory cannot be opened, or if the server cannot listen on the address.
pub(super) fn run(args: &CpArgs, dir: &Path, port: u16) -> Result<()> {
    let terms = args.terms()?;
    let root = Root::open(dir)?;
    let bind = args.serve.addresses();
    let (ctx, listener) =
        service::listen(&bind, port, &args.serve.limits.apply(crate::config(args)))?;
    let gate = service::gate(&args.serve.limits);
    let budget = Budget::new(args.serve.memory());
    // Print this even with --quiet: the user needs the address, above all with port 0.
    out::line(format_args!(
        "iwarp cp: serving on {}",
        listener.local_addr()
    ));
    if args.is_anonymous() {
        eprintln!(
            "iwarp: warning: --anonymous: every client that can reach {} can read {}the files \
             below '{}'",
            listener.local_addr(),
            if terms.writing.is_some() {
                "and write "
            } else {
                ""
            },
            printable(&dir.display().to_string())
        );
    }
    let quiet = args.quiet;
    service::serve_clients(
        &listener,
        &gate,
        || false,
        move |request, guest, from| {
            let outcome = accept(&ctx, &budget, request, guest).and_then(|mut link| {
                let outcome = session::serve(&mut link, &root, &terms, &mut |path, done| {
                    log(quiet, from, path, done);
                });
                link.close();
                outcome
            });
            match outcome {
                Ok(()) => tracing::info!(%from, "client done"),
                Err(e) => service::log_failure(from, &e),
            }
            // A signal will end this process, so write the capture to the file after each client.
            if let Err(e) = ctx.flush_capture() {
                tracing::warn!("capture: {e}");
            }
        },
    )
}

fn accept(
    ctx: &Context,
    budget: &Arc<Budget>,
    request: ConnectionRequest,
    guest: Guest,
) -> Result<RdmaLink> {
    let (prepared, qp) = match Prepared::new(ctx, budget) {
        Ok(prepared) => prepared,
        Err(e) => return Err(service::refuse(request, e)),
    };
    let connection = service::accept(request, qp, &ConnectionParameters::default(), &guest)?;
    Ok(prepared.into_link(connection, Some(guest)))
}

fn log(quiet: bool, from: SocketAddr, path: &str, done: Summary) {
    if !quiet {
        out::line(format_args!(
            "{from} '{}' {} octets",
            printable(path),
            done.size - done.resumed
        ));
    }
    tracing::debug!(%from, path, size = %units::size(done.size), "verified");
}
