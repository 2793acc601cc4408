//! `iwarp cp serve`: offers a directory until it is stopped.

use super::CpArgs;
use super::confine::Root;
use super::link::{Half, RdmaLink};
use super::session::{self, Summary};
use crate::error::{Context as _, Result};
use crate::{out, rdma, units};
use iwarp::Context;
use iwarp::cm::{ConnectionParameters, ConnectionRequest};
use std::net::SocketAddr;
use std::path::Path;

/// Serves a directory.
///
/// # Errors
/// When the directory cannot be opened or the address not be listened on.
pub(super) fn run(args: &CpArgs, dir: &Path, port: u16) -> Result<()> {
    let root = Root::open(dir)?;
    let (ctx, listener) = rdma::listen(args.bind, port, &super::config(args))?;
    // Also with --quiet: who starts a server needs to know where it is, above all with port 0.
    out::line(format_args!(
        "iwarp cp: serving on {}",
        listener.local_addr()
    ));
    let quiet = args.quiet;
    rdma::serve_clients(
        &listener,
        || false,
        move |request, from| {
            let outcome = accept(&ctx, request).and_then(|mut link| {
                let outcome = session::serve(&mut link, &root, &mut |path, done| {
                    log(quiet, from, path, done);
                });
                link.close();
                outcome
            });
            match outcome {
                Ok(()) => tracing::info!(%from, "client done"),
                Err(e) => tracing::warn!(%from, "{e}"),
            }
            // The server ends by being killed: what is recorded must be in the file by then.
            if let Err(e) = ctx.flush_capture() {
                tracing::warn!("capture: {e}");
            }
        },
    )
}

fn accept(ctx: &Context, request: ConnectionRequest) -> Result<RdmaLink> {
    let (half, qp) = Half::new(ctx)?;
    let connection = request
        .accept(qp, &ConnectionParameters::default())
        .context("accept")?;
    Ok(half.connected(connection))
}

fn log(quiet: bool, from: SocketAddr, path: &str, done: Summary) {
    if !quiet {
        out::line(format_args!(
            "{from} '{}' {} octets",
            path.escape_default(),
            done.size - done.resumed
        ));
    }
    tracing::debug!(%from, path, size = %units::size(done.size), "verified");
}
