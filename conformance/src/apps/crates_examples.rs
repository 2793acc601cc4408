//! Runs the examples of published crates, and checks their output.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};

use super::checks::{expect, expect_lines};
use super::crates_view::{Face, View};
use super::stage::{Stage, WIRE_V4};

type Executables = BTreeMap<String, String>;

/// The first device. With `--bind`, it is the only one.
const DEVICE: &str = "iwarp0";

fn path<'a>(all: &'a Executables, name: &str) -> Result<&'a str> {
    let found = all.get(name).map(String::as_str);
    found.with_context(|| format!("the example {name} was not built"))
}

fn run(stage: &Stage, view: View, words: &[&str]) -> Result<String> {
    stage
        .start_with(&view.options(), None, &[], words)?
        .success()
}

/// Runs both ends of an example. Both get the arguments `own`; the client also gets `client`.
fn pair(
    stage: &Stage,
    view: View,
    example: &str,
    own: &[&str],
    client: &[&str],
) -> Result<[String; 2]> {
    let port = stage.port()?;
    let number = port.to_string();
    let mut words = vec![example, "-p", &number];
    words.extend(own);
    let server = stage.start_with(&view.options(), None, &[], &words)?;
    stage.wait_for_port(port)?;
    words.extend(client);
    Ok([run(stage, view, &words)?, server.success()?])
}

pub(super) fn sideway(stage: &Stage, view: View, all: &Executables) -> Result<usize> {
    let gids = run(stage, view, &[path(all, "show_gids")?])?;
    expect_lines(&gids, WIRE_V4, if view.face == Face::Roce { 2 } else { 1 })?;
    let devices = run(stage, view, &[path(all, "ibv_devinfo")?])?;
    expect(&devices, "Active (4)")?;
    let node = if view.face == Face::Roce {
        "InfiniBand (0)"
    } else {
        "iWARP (1)"
    };
    expect(&devices, node)?;
    // On RoCE NICs, GID index 0 is RoCE v1.
    let index = if view.face == Face::Roce { "1" } else { "0" };
    for name in ["rc_pingpong", "rc_pingpong_split"] {
        let own = ["-d", DEVICE, "-g", index];
        for output in pair(stage, view, path(all, name)?, &own, &[WIRE_V4])? {
            expect(&output, "1000 iters in ")?;
        }
    }
    let own = ["-b", WIRE_V4];
    for more in [&[][..], &["-q"]] {
        let words = [&own[..], more].concat();
        let [output, _] = pair(stage, view, path(all, "cmtime")?, &words, &["-s", WIRE_V4])?;
        expect_lines(&output, " Disconnect ", 1)?;
    }
    Ok(5)
}

/// The example of ibverbs uses GID index 1 of the first device: on an iWARP NIC, `::1`; on a RoCE
/// NIC, the IPv4 address with RoCE v2.
pub(super) fn ibverbs(stage: &Stage, view: View, all: &Executables) -> Result<usize> {
    let output = run(stage, view, &[path(all, "loopback")?])?;
    expect_lines(&output, "sent", 1)?;
    expect_lines(&output, "received", 1)?;
    Ok(1)
}

/// The examples `devices` and `rpc` of async-rdma. Its examples `client` and `server` use immediate
/// data, see `crates.txt`.
pub(super) fn async_rdma(stage: &Stage, view: View, all: &Executables) -> Result<usize> {
    let devices = run(stage, view, &[path(all, "devices")?])?;
    expect_lines(&devices, DEVICE, 1)?;
    let output = run(stage, view, &[path(all, "rpc")?])?;
    expect(&output, "response: hello")?;
    expect(&output, "response: world")?;
    Ok(2)
}
