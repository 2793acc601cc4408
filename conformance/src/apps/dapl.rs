//! uDAPL, an older API on top of verbs, with its test programs `dtest` and `dapltest`. Its
//! providers connect in three ways: `cma` with rdma_cm; `scm` exchanges queue pair numbers over
//! TCP, and `ucm` in UD messages.
//!
//! The programs select a provider from a configuration file, which the case writes. They do not
//! work over loopback: `cma` requires that a listener has a device, and `scm` listens on the first
//! address that is not a loopback address. `dapltest` always exits with 0, so the case checks its
//! output. `dapltest` does not work with `ucm`, which expects a LID and a queue pair number where
//! `dapltest` passes an IPv4 address; `dtest` exchanges both over TCP. On a RoCE NIC, where the LID
//! is 0, `dtest` interprets the LID as a missing reply.

use anyhow::{Result, bail};

use super::checks::{expect, expect_lines};
use super::program::Program;
use super::stage::{Stage, WIRE_V4};
use crate::case::{Case, Verdict};

/// The provider's name, its library, and the device in the provider's notation.
const PROVIDERS: &[(&str, &str, &str)] = &[
    ("cma", "libdaplofa.so.2", "wire0 0"),
    ("scm", "libdaploscm.so.2", "iwarp1 1"),
    ("ucm", "libdaploucm.so.2", "iwarp1 1"),
];
/// The TCP port on which the server of `dtest` sends its client the provider's address.
const DTEST_PORT: u16 = 15828;

pub(super) fn cases() -> Vec<Case<Stage>> {
    let dtests = [
        ("cma", "rnic"),
        ("scm", "rnic"),
        ("ucm", "rnic"),
        ("cma", "roce"),
        ("scm", "roce"),
    ]
    .map(|(provider, face)| {
        Case::new("dtest", what(face, provider), move |stage| {
            dtest(stage, face, provider)
        })
    });
    let dapltests = [
        ("cma", "rnic"),
        ("scm", "rnic"),
        ("cma", "roce"),
        ("scm", "roce"),
    ]
    .map(|(provider, face)| {
        let what = format!(
            "{}: transactions, performance, limits",
            what(face, provider)
        );
        Case::new("dapltest", what, move |stage| {
            dapltest(stage, face, provider)
        })
        .limit(120)
    });
    dtests
        .into_iter()
        .chain(dapltests)
        .map(|case| case.needs(&["dapl2-utils"]).wire())
        .collect()
}

fn what(face: &str, provider: &str) -> String {
    match face {
        "roce" => format!("`--as roce`, `{provider}`"),
        _ => format!("`{provider}`"),
    }
}

/// A stage with a configuration file of providers, and the kind of NIC.
struct Setup<'a> {
    stage: &'a Stage,
    face: &'a str,
    providers: String,
}

impl<'a> Setup<'a> {
    fn new(stage: &'a Stage, face: &'a str) -> Result<Self> {
        let path = stage.dir().join("dat.conf");
        let lines = PROVIDERS.iter().map(|(name, library, device)| {
            format!("{name} u2.0 nonthreadsafe default {library} dapl.2.0 \"{device}\" \"\"\n")
        });
        std::fs::write(&path, lines.collect::<String>())?;
        Ok(Self {
            stage,
            face,
            providers: path.display().to_string(),
        })
    }

    fn start(&self, words: &[&str]) -> Result<Program> {
        let variables = [("DAT_OVERRIDE", self.providers.as_str())];
        let all = [&["stdbuf", "-oL"], words].concat();
        self.stage
            .start_with(&["--as", self.face], None, &variables, &all)
    }
}

/// Both ends write, read and send to each other, with each of the program's modes of waiting.
fn dtest(stage: &Stage, face: &str, provider: &str) -> Result<Verdict> {
    let setting = Setup::new(stage, face)?;
    const WAIT_MODES: [&[&str]; 3] = [&[], &["-c"], &["-p"]];
    for way in WAIT_MODES {
        let common = ["dtest", "-P", provider, "-b", "65536", "-B", "20"];
        let server = [&common[..], way].concat();
        let client = [&server[..], &["-h", WIRE_V4]].concat();
        let server = setting.start(&server)?;
        stage.wait_for_port(DTEST_PORT)?;
        let client = setting.start(&client)?;
        for (program, own, peer) in [(client, "client", "server"), (server, "server", "client")] {
            let output = program.success()?;
            expect(
                &output,
                &format!("RDMA write buffer contains: {peer} RDMA write data"),
            )?;
            expect_read(&output, own, peer)?;
            expect(&output, "DAPL Test Complete. PASSED")?;
        }
    }
    Ok(Verdict::passed(format!(
        "{} modes of waiting",
        WAIT_MODES.len()
    )))
}

/// Checks the result of the Read. It is the peer's text, or, because `dtest` does not synchronize
/// both ends, the text that this end wrote there before.
fn expect_read(output: &str, own: &str, peer: &str) -> Result<()> {
    let read = |text: String| format!("RDMA read buffer contains: {text}");
    match output.contains(&read(format!("{own} RDMA write data"))) {
        true => Ok(()),
        false => expect(output, &read(format!("{peer} RDMA read data"))),
    }
}

/// A transaction of `dapltest` with operations of each kind, whose data are checked.
const TRANSACTION: &str = "client RW 4096 1 server RW 2048 4 client RR 4096 2 \
    client SR 1024 4 server SR 4096 2 client SR 1024 3 -f server SR 2048 1 -f";

fn dapltest(stage: &Stage, face: &str, provider: &str) -> Result<Verdict> {
    let setting = Setup::new(stage, face)?;
    let mut server = setting.start(&["dapltest", "-T", "S", "-D", provider])?;
    server.wait_for("Service Point Ready")?;
    let run = |test: &str| -> Result<String> {
        let words: Vec<&str> = test.split_whitespace().collect();
        let to = ["-D", provider, "-s", WIRE_V4];
        let all = [&["dapltest", "-T"], &words[..1], &to, &words[1..]].concat();
        let output = setting.start(&all)?.success()?;
        check_no_error(&output)?;
        Ok(output)
    };
    let output = run(&format!("T -V -t 2 -w 4 -i 100 {TRANSACTION}"))?;
    expect(&output, "Stats ---- : 2 threads, 4 EPs")?;
    for kind in ["Send", "Recv", "RDMA Read", "RDMA Write"] {
        let line = output
            .lines()
            .find(|line| line.starts_with(&format!("Total {kind}")));
        if line.is_none_or(|line| line.contains(" 0.00 MB/Sec")) {
            bail!("no data was transferred: {line:?}");
        }
    }
    let output = run("T -P -i 20 client SR 256 server SR 256")?;
    // The program's clock has a resolution of 10 ms, so it may print no statistics.
    if !output.contains("Test completed successfully") {
        expect(&output, "Stats ---- : 1 threads, 1 EPs")?;
    }
    // Repeat the performance tests: their last request is a Send, whose receiver destroys its queue
    // pair immediately, so errors are sporadic.
    const PERFORMANCES: usize = 20;
    for n in 0..PERFORMANCES {
        let operation = ["RW", "RR"][n % 2];
        let how = ["b", "p"][n / 2 % 2];
        let output = run(&format!("P -m {how} -i 100 {operation} 4096 2"))?;
        expect(&output, &format!("raw: {operation}, 100, 4096, 2"))?;
    }
    let limits = ["dapltest", "-T", "L", "-D", provider, "-w", "2", "-m", "20"];
    let output = setting.start(&limits)?.success()?;
    expect_lines(&output, "Limitation Test ", 10)?;
    expect(&output, "OK - stopping now")?;
    run("Q")?;
    let output = server.success()?;
    check_no_error(&output)?;
    expect_lines(&output, "Finished performance test.  Exiting", PERFORMANCES)?;
    Ok(Verdict::passed(format!(
        "2 transactions, {PERFORMANCES} performance tests, the limits"
    )))
}

/// Fails if the output reports an error, because the exit status is always 0.
fn check_no_error(output: &str) -> Result<()> {
    let words = ["rror", "ailed", "FAIL", "bad ", "Cannot", "Warning"];
    match output
        .lines()
        .find(|line| words.iter().any(|word| line.contains(word)))
    {
        Some(line) => bail!("dapltest reports: {line}"),
        None => Ok(()),
    }
}
