//! TCP servers with the preload library: redis, nginx and sockperf. redis and nginx use `epoll`;
//! sockperf calls `sendto` with an address.

use anyhow::{Result, bail, ensure};

use super::checks::{expect, noise, octets_sent};
use super::program::Program;
use super::stage::Stage;
use crate::case::{Case, Verdict};

/// Sizes in bytes of the values that redis stores, and of the file that nginx serves.
const VALUES: [usize; 4] = [1, 1000, 65_537, 4 << 20];
const FILE_BYTES: usize = (16 << 20) + 4097;

pub(super) fn cases() -> Vec<Case<Stage>> {
    vec![
        Case::new(
            "redis",
            "values over `librspreload.so`, and after a restart",
            redis,
        )
        .needs(&["redis-server", "redis-tools"]),
        Case::new("nginx", "16 MiB over `librspreload.so`", nginx).needs(&["nginx-light", "curl"]),
        Case::new(
            "sockperf",
            "`ping-pong --tcp --data-integrity` over `librspreload.so`",
            sockperf,
        )
        .needs(&["sockperf"]),
    ]
}

fn start(stage: &Stage, words: &[&str]) -> Result<Program> {
    stage.start_with(&["--rsockets", "--stats"], None, &[], words)
}

/// Fails unless the program's connections went through our library.
fn expect_sent(output: &str) -> Result<()> {
    let sent: u64 = output.lines().filter_map(octets_sent).sum();
    ensure!(sent > 0, "the program sent nothing through our library");
    Ok(())
}

fn redis(stage: &Stage) -> Result<Verdict> {
    let port = stage.port()?.to_string();
    let server = redis_server(stage, &port)?;
    let values: Vec<String> = VALUES
        .iter()
        .enumerate()
        .map(|(at, size)| hex(&noise(at as u64, *size)))
        .collect();
    for (at, value) in values.iter().enumerate() {
        let input = stage.dir().join(format!("value.{at}"));
        std::fs::write(&input, value)?;
        let key = format!("key.{at}");
        let words = ["redis-cli", "-p", &port, "-x", "SET", &key];
        let output = stage.start_with(&["--rsockets"], Some(&input), &[], &words)?;
        expect(&output.success()?, "OK")?;
    }
    expect_values(stage, &port, &values)?;
    let many = [
        "redis-benchmark",
        "-p",
        &port,
        "-c",
        "8",
        "-n",
        "2000",
        "-d",
        "1000",
        "-t",
        "set,get",
        "--csv",
    ];
    let output = start(stage, &many)?.success()?;
    expect(&output, "\"GET\",")?;
    expect_sent(&output)?;
    // Before it exits, the server writes its values to the append-only file.
    start(stage, &["redis-cli", "-p", &port, "SHUTDOWN"])?.success()?;
    expect_sent(&server.success()?)?;
    let _server = redis_server(stage, &port)?;
    expect_values(stage, &port, &values)?;
    Ok(Verdict::passed(format!("{} values", values.len())))
}

fn redis_server(stage: &Stage, port: &str) -> Result<Program> {
    let dir = stage.dir().display().to_string();
    #[rustfmt::skip]
    let words = [
        "redis-server", "--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "yes",
        "--dir", &dir,
    ];
    let mut server = start(stage, &words)?;
    server.wait_for("Ready to accept connections")?;
    Ok(server)
}

fn expect_values(stage: &Stage, port: &str, values: &[String]) -> Result<()> {
    for (at, value) in values.iter().enumerate() {
        let key = format!("key.{at}");
        let words = ["redis-cli", "-p", port, "GET", &key];
        let output = stage.start_with(&["--rsockets"], None, &[], &words)?;
        let output = output.success()?;
        ensure!(
            output.trim_end() == value,
            "{key} does not have the stored value"
        );
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn nginx(stage: &Stage) -> Result<Verdict> {
    let port = stage.port()?;
    let dir = stage.dir().display().to_string();
    let file = noise(1, FILE_BYTES);
    std::fs::create_dir(stage.dir().join("root"))?;
    std::fs::write(stage.dir().join("root/file"), &file)?;
    std::fs::write(
        stage.dir().join("nginx.conf"),
        nginx_configuration(&dir, port),
    )?;
    let conf = format!("{dir}/nginx.conf");
    let words = ["nginx", "-p", &dir, "-c", &conf, "-e", "stderr"];
    let mut server = start(stage, &words)?;
    stage.wait_for_port(port)?;
    let url = format!("http://127.0.0.1:{port}/file");
    for copy in ["copy.1", "copy.2"] {
        let output = start(
            stage,
            &["curl", "--silent", "--show-error", "-o", copy, &url],
        )?;
        expect_sent(&output.success()?)?;
        let found = std::fs::read(stage.dir().join(copy))?;
        ensure!(found == file, "{copy} differs from the file");
    }
    if let Some(status) = server.poll()? {
        bail!("nginx exited: {status}");
    }
    Ok(Verdict::passed("equal"))
}

/// Returns a configuration with one process, and with all files in the case's directory.
fn nginx_configuration(dir: &str, port: u16) -> String {
    let temp_paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|name| format!("{name}_temp_path {dir}/{name}; "))
        .collect();
    format!(
        "daemon off; master_process off; pid {dir}/nginx.pid; error_log stderr;\n\
         events {{ use epoll; }}\n\
         http {{ access_log off; {temp_paths}\n\
         server {{ listen 127.0.0.1:{port}; root {dir}/root; }} }}\n"
    )
}

fn sockperf(stage: &Stage) -> Result<Verdict> {
    let port = stage.port()?;
    let number = port.to_string();
    let address = ["--tcp", "-i", "127.0.0.1", "-p", &number];
    let _server = start(stage, &[&["sockperf", "server"], &address[..]].concat())?;
    stage.wait_for_port(port)?;
    // The client compares each answer with what it sent.
    let options = ["-t", "2", "-m", "1000", "--data-integrity"];
    let words = [&["sockperf", "ping-pong"], &address[..], &options].concat();
    let output = start(stage, &words)?.success()?;
    expect(
        &output,
        "# dropped messages = 0; # duplicated messages = 0; # out-of-order messages = 0",
    )?;
    expect_sent(&output)?;
    Ok(Verdict::passed("no message differs"))
}
