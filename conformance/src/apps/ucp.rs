//! UCX's upper layer (UCP): programs that connect by worker addresses, which uses datagrams, or
//! through listeners of rdma_cm.
//!
//! `UCX_TLS` restricts UCX to one transport: `rc` for reliable connections, which UCX establishes
//! with datagrams, or `ud` for datagrams only.

use anyhow::{Context as _, Result, anyhow, bail};
use rustix::process::Signal;
use std::path::Path;

use super::checks::{expect, expect_lines};
use super::program::Program;
use super::stage::{Stage, WIRE_V4, WIRE_V6};
use crate::case::{Case, Verdict};

const TOOLS: &[&str] = &["ucx-utils"];
const LIBRARY: &[&str] = &["libucx-dev"];
const ROCE: &[&str] = &["--as", "roce"];
/// Debian's directory of UCX's examples. It is missing on systems without documentation.
const EXAMPLES: &str = "/usr/share/doc/libucx-dev/examples";
const SOURCE: &str = include_str!("ucp.c");
/// The operations that `ucp.c` reports when both processes have checked them.
const PARTS: [&str; 7] = [
    "tag",
    "stream",
    "active messages",
    "put",
    "get",
    "atomics of 32 bits",
    "atomics of 64 bits",
];
/// Operations of ucx_perftest: messages, memory, atomics.
const MESSAGES: &[&str] = &[
    "tag_lat",
    "tag_bw",
    "stream_lat",
    "stream_bw",
    "ucp_am_lat",
    "ucp_am_bw",
];
const MEMORY: &[&str] = &["ucp_put_lat", "ucp_put_bw", "ucp_get"];
const ATOMICS: &[&str] = &["ucp_add", "ucp_fadd", "ucp_swap", "ucp_cswap"];

pub(super) fn cases() -> Vec<Case<Stage>> {
    let mut cases = Vec::new();
    for tls in ["rc", "ud"] {
        cases.extend(perftests(tls));
    }
    for (tls, how) in [
        ("rc", "-c tag"),
        ("rc", "-c stream"),
        ("rc", "-c am"),
        ("ud", "-c tag"),
    ] {
        cases.push(client_server(tls, how, WIRE_V4));
    }
    cases.push(client_server("rc", "-c tag -6", WIRE_V6));
    for (tls, how) in [("rc", "-w"), ("rc", "-f"), ("rc", "-b"), ("ud", "-w")] {
        cases.push(hello(tls, how));
    }
    for (tls, how) in [("rc", ""), ("rc", "-A"), ("ud", "")] {
        cases.push(io_demo(tls, how, 1000));
    }
    cases.push(io_demo("rc", "", 50_000).long().limit(300));
    cases.push(
        Case::new(
            "io_demo",
            "`--as roce`, `UCX_TLS=rc`, its server is killed",
            io_demo_server_killed,
        )
        .needs(TOOLS)
        .busy_polls(),
    );
    for tls in ["rc", "ud"] {
        let what = format!(
            "`--as roce`, `UCX_TLS={tls}`: tag, stream, active messages, put, \
             get and atomics between two processes, with their content"
        );
        let case = Case::new("own program on UCP", what, move |stage| {
            own_program(stage, tls)
        });
        cases.push(case.needs(LIBRARY).busy_polls());
    }
    cases.into_iter().map(Case::wire).collect()
}

/// Starts a program that uses only this transport, and only the interface `wire0`. It listens only
/// with rdma_cm, because UCX would otherwise also use the same port over TCP.
fn start(stage: &Stage, tls: &str, words: &[&str]) -> Result<Program> {
    let only = format!("{tls},self");
    let variables = [
        ("UCX_TLS", only.as_str()),
        ("UCX_NET_DEVICES", "iwarp1:1"),
        ("UCX_SOCKADDR_TLS_PRIORITY", "rdmacm"),
        ("UCX_WARN_UNUSED_ENV_VARS", "n"),
    ];
    stage.start_with(ROCE, None, &variables, words)
}

fn split(words: &str) -> impl Iterator<Item = &str> {
    words.split_whitespace()
}

fn perftests(tls: &'static str) -> impl Iterator<Item = Case<Stage>> {
    let groups = [
        (MESSAGES, "8", "1000", false),
        (MEMORY, "8", "1000", false),
        (ATOMICS, "8", "1000", false),
        (MESSAGES, "262144", "200", true),
        (MEMORY, "262144", "200", true),
    ];
    groups
        .into_iter()
        .map(move |(tests, size, iterations, long)| {
            let what = format!(
                "`--as roce`, `UCX_TLS={tls}`, `-s {size}`: {}",
                tests.join(", ")
            );
            let case = Case::new("ucx_perftest", what, move |stage| {
                for test in tests {
                    perftest(stage, tls, test, size, iterations).with_context(|| *test)?;
                }
                Ok(Verdict::passed(format!("{} tests", tests.len())))
            });
            let case = case.needs(TOOLS).busy_polls();
            if long { case.long().limit(180) } else { case }
        })
}

/// Measures one operation. The programs exit with an error if a connection fails.
fn perftest(stage: &Stage, tls: &str, test: &str, size: &str, iterations: &str) -> Result<()> {
    let port = stage.port()?;
    let number = port.to_string();
    let mut words = vec!["ucx_perftest", "-p", &number, "-s", size, "-n", iterations];
    words.extend(["-w", "100", "-t", test]);
    let server = start(stage, tls, &words)?;
    stage.wait_for_port(port)?;
    words.insert(1, WIRE_V4);
    let output = start(stage, tls, &words)?.success()?;
    server.success()?;
    let last = output.lines().find(|line| line.starts_with("Final:"));
    let done = last.and_then(|line| line.split_whitespace().nth(1));
    if done != Some(iterations) {
        bail!("ucx_perftest did not complete {iterations} iterations: {last:?}");
    }
    Ok(())
}

/// Compiles an example of UCX. Returns `None` if the example is not installed.
fn example(stage: &Stage, name: &str) -> Result<Option<()>> {
    let source = format!("{EXAMPLES}/{name}.c");
    if !Path::new(&source).exists() {
        return Ok(None);
    }
    compile(stage, &source, name)?;
    Ok(Some(()))
}

fn compile(stage: &Stage, source: &str, name: &str) -> Result<()> {
    let words = ["cc", "-O1", "-o", name, source, "-lucp", "-lucs"];
    stage.start_plain(&words)?.success()?;
    Ok(())
}

/// Returns the text that UCX's examples send: the repeated alphabet and a final NUL.
fn alphabet(len: usize) -> String {
    ('A'..='Z').cycle().take(len - 1).collect()
}

/// The client sends texts, and the server prints the last text. The server then waits for the next
/// client, so the case kills it.
///
/// UCX does not acknowledge the messages. If the client exits while several are in flight, UCX
/// drops untagged messages that the server has not received, on any network. So the case sends only
/// one untagged message, which fits into one fragment.
fn client_server(tls: &'static str, how: &'static str, address: &'static str) -> Case<Stage> {
    let lengths: &[&str] = match how {
        "-c stream" => &["16", "3000"],
        _ => &["16", "3000", "1000000"],
    };
    let shown = lengths.join(", ");
    let what = format!("`--as roce`, `UCX_TLS={tls}`, `{how}`, `-s` {shown}");
    let case = Case::new("ucp_client_server", what, move |stage| {
        if example(stage, "ucp_client_server")?.is_none() {
            return Ok(Verdict::skipped(format!("{EXAMPLES} is not installed")));
        }
        let iterations = if how.contains("tag") { "10" } else { "1" };
        let last = format!(
            "Server: iteration #{iterations}\nUCX data message was received\n\n\n\
             ----- UCP TEST SUCCESS -------\n\n"
        );
        for len in lengths {
            let port = stage.port()?.to_string();
            let mut words = vec!["stdbuf", "-oL", "./ucp_client_server", "-p", &port];
            words.extend(["-i", iterations, "-s", len]);
            words.extend(split(how));
            let mut server = start(stage, tls, &words)?;
            stage.wait_for_port(port.parse()?)?;
            words.extend(["-a", address]);
            let client = start(stage, tls, &words)?.success()?;
            let text = alphabet(len.parse()?);
            if !client.contains(&text) {
                bail!("the client did not print the text of {len} bytes");
            }
            server
                .wait_for(&format!("{last}{text}."))
                .map_err(|_| anyhow!("the server did not print the last text of {len} bytes"))?;
        }
        Ok(Verdict::passed(format!("{} lengths", lengths.len())))
    });
    // On a busy machine, datagrams are lost, and UCX takes half a minute to send them again.
    case.needs(LIBRARY).busy_polls().limit(240)
}

/// The two processes exchange their worker addresses over TCP. `how` selects how they wait: with
/// epoll, in UCX, or by polling.
fn hello(tls: &'static str, how: &'static str) -> Case<Stage> {
    let what = format!("`--as roce`, `UCX_TLS={tls}`, `{how}`");
    let case = Case::new("ucp_hello_world", what, move |stage| {
        if example(stage, "ucp_hello_world")?.is_none() {
            return Ok(Verdict::skipped(format!("{EXAMPLES} is not installed")));
        }
        for len in ["16", "100000"] {
            let port = stage.port()?.to_string();
            let mut words = vec!["./ucp_hello_world", how, "-p", &port, "-s", len];
            let server = start(stage, tls, &words)?;
            stage.wait_for_port(port.parse()?)?;
            words.extend(["-n", WIRE_V4]);
            let output = start(stage, tls, &words)?.success()?;
            server.success()?;
            let text = alphabet(len.parse()?);
            expect_lines(&output, &text, 1)?;
        }
        Ok(Verdict::passed("2 messages"))
    });
    case.needs(LIBRARY)
}

/// Both ends check the content and the order of all transfers. The server then waits for the next
/// client, so the case kills it.
fn io_demo(tls: &'static str, how: &'static str, iterations: u32) -> Case<Stage> {
    let shown = if how.is_empty() {
        String::new()
    } else {
        format!(" {how}")
    };
    let what = format!(
        "`--as roce`, `UCX_TLS={tls}`, `-q{shown} -o read,write -d 64:262144 -i {iterations}`"
    );
    let case = Case::new("io_demo", what, move |stage: &Stage| {
        let port = stage.port()?.to_string();
        let mut words = vec!["io_demo", "-p", &port, "-q", "-d", "64:262144"];
        words.extend(split(how));
        let mut server = start(stage, tls, &words)?;
        stage.wait_for_port(port.parse()?)?;
        let number = iterations.to_string();
        words.extend(["-o", "read,write", "-i", &number, WIRE_V4]);
        let output = start(stage, tls, &words)?.success()?;
        expect(&output, "Client exit with status 'OK'")?;
        let moved = transfers(&output)?;
        if moved != (iterations, iterations) {
            bail!("the client reports {moved:?} transfers instead of {iterations}");
        }
        // The server notices the client's exit and waits for the next client.
        server.wait_for("disconnection completed")?;
        if let Some(status) = server.poll()? {
            bail!("the server exited: {status}");
        }
        Ok(Verdict::passed(format!("{iterations} transfers")))
    });
    case.needs(TOOLS).busy_polls()
}

/// Returns two sums over the client's reports, which it prints every second: the totals, and the
/// reads plus the writes.
fn transfers(output: &str) -> Result<(u32, u32)> {
    let (mut all, mut reads, mut writes) = (0, 0, 0);
    for report in output.lines().filter(|line| line.contains("] total min:")) {
        let totals: Vec<u32> = report
            .split("total:")
            .skip(1)
            .map_while(|rest| rest.split([' ', '|']).next()?.parse().ok())
            .collect();
        let [a, r, w] = totals[..] else {
            bail!("no totals in the client's report: {report}");
        };
        (all, reads, writes) = (all + a, reads + r, writes + w);
    }
    if reads == 0 || writes == 0 {
        bail!("{reads} reads and {writes} writes");
    }
    Ok((all, reads + writes))
}

/// Kills the server during transfers. rdma_cm must notify the client.
fn io_demo_server_killed(stage: &Stage) -> Result<Verdict> {
    let port = stage.port()?.to_string();
    let mut words = vec!["io_demo", "-p", &port, "-q", "-d", "64:262144"];
    let server = start(stage, "rc", &words)?;
    stage.wait_for_port(port.parse()?)?;
    words.extend(["-o", "read,write", "-i", "100000000", WIRE_V4]);
    let mut client = start(stage, "rc", &words)?;
    client.wait_for("Connected to server")?;
    server.signal(Signal::KILL);
    client.wait_for("detected error: Connection reset by remote peer")?;
    Ok(Verdict::passed("the client was notified"))
}

fn own_program(stage: &Stage, tls: &str) -> Result<Verdict> {
    std::fs::write(stage.dir().join("ucp.c"), SOURCE)?;
    compile(stage, "ucp.c", "ucp")?;
    let output = start(stage, tls, &["./ucp"])?.success()?;
    for part in PARTS {
        expect_lines(&output, &format!("{part}: correct"), 1)?;
    }
    Ok(Verdict::passed("7 operations"))
}
