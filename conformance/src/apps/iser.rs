//! tgt's iSER target with libiscsi's tools and QEMU's block layer as initiators.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::checks::{expect, noise};
use super::program::Program;
use super::stage::Stage;
use crate::case::{Case, Verdict};

const TOOLS: &[&str] = &["tgt", "libiscsi-bin"];
const IMAGES: &[&str] = &["tgt", "qemu-utils", "qemu-block-extra"];
const NAME: &str = "iqn.2024-01.example:disk";
const DISK: usize = 32 << 20;
/// The disk of the conformance tests, some of which write all of it with one command. libiscsi's
/// iSER transport fails if a command takes longer than a second, so the disk is small.
const TEST_DISK: usize = 2 << 20;
/// The initiators that may log in. This version of tgt checks initiator names in addition to
/// addresses.
const INITIATORS: [&str; 5] = [
    "iqn.2007-10.com.github:sahlberg:libiscsi:iscsi-inq",
    "iqn.2007-10.com.github:sahlberg:libiscsi:iscsi-readcapacity16",
    "iqn.2007-10.com.github:sahlberg:libiscsi:iscsi-test",
    "iqn.2008-11.org.linux-kvm",
    PERF,
];
const PERF: &str = "iqn.2024-01.example:perf";

pub(super) fn cases() -> Vec<Case<Stage>> {
    vec![
        Case::new("tgtd", "iSER; sessions are freed at their end", sessions).needs(TOOLS),
        Case::new("iscsi-inq", "`iser://`", |stage| {
            inquiry(&Target::start(stage)?)
        })
        .needs(TOOLS),
        Case::new("iscsi-inq", "IPv6", |stage| {
            inquiry(&Target::start_at(stage, "[::1]", DISK)?)
        })
        .needs(TOOLS),
        Case::new("iscsi-readcapacity16", "`iser://`", capacity).needs(TOOLS),
        Case::new(
            "iscsi-perf",
            "`iser://`, 8 reads of 32 KiB at a time, in order and at random",
            perf,
        )
        .needs(TOOLS),
        Case::new(
            "iscsi-test-cu",
            "`iser://`: Read, Write, WriteSame, Verify, OrWrite, CompareAndWrite",
            tests,
        )
        .needs(TOOLS)
        .limit(240),
        Case::new(
            "qemu-img",
            "`iser://`: info, convert from and to, compare",
            images,
        )
        .needs(IMAGES),
    ]
}

struct Target<'a> {
    stage: &'a Stage,
    _daemon: Program,
    address: &'static str,
    port: u16,
    disk: PathBuf,
}

impl<'a> Target<'a> {
    fn start(stage: &'a Stage) -> Result<Self> {
        Self::start_at(stage, "127.0.0.1", DISK)
    }

    /// Starts a target on `address`, which has the syntax of a URL's host, with a disk of `size`
    /// octets.
    fn start_at(stage: &'a Stage, address: &'static str, size: usize) -> Result<Self> {
        let (port, other) = (stage.port()?, stage.port()?);
        let disk = stage.dir().join("disk.img");
        std::fs::write(&disk, noise(1, size))?;
        permit_all_users(&disk)?;
        // tgt also serves iSCSI over TCP. iSER needs another port, because our library listens on a
        // TCP port, too.
        let iser = format!("port={port},pool_sz_mb=64");
        let iscsi = format!("portal={address}:{other}");
        let daemon = stage.start_with(
            &[],
            None,
            &[("TGT_IPC_SOCKET", &ipc(stage))],
            &["tgtd", "-f", "--iser", &iser, "--iscsi", &iscsi],
        )?;
        let target = Self {
            stage,
            _daemon: daemon,
            address,
            port,
            disk,
        };
        stage.wait_for_port(port)?;
        let new = ["--op", "new", "--mode", "target", "--tid", "1", "-T", NAME];
        // tgt listens before it accepts commands, so the first command is retried.
        while target.admin(&new)?.0 != 0 {
            if stage.time_left() < Duration::from_secs(1) {
                bail!("tgtd did not accept commands in time");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let path = target.disk.display().to_string();
        let unit = ["--op", "new", "--mode", "logicalunit", "--tid", "1"];
        target.run_checked(&[&unit[..], &["--lun", "1", "-b", &path]].concat())?;
        target.run_checked(&[
            "--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL",
        ])?;
        for name in INITIATORS {
            target.run_checked(&["--op", "bind", "--mode", "target", "--tid", "1", "-Q", name])?;
        }
        Ok(target)
    }

    fn admin(&self, words: &[&str]) -> Result<(i32, String)> {
        let socket = format!("TGT_IPC_SOCKET={}", ipc(self.stage));
        let mut all = vec!["env", &socket, "tgtadm", "--lld", "iser"];
        all.extend(words);
        self.stage.start_plain(&all)?.wait()
    }

    fn run_checked(&self, words: &[&str]) -> Result<String> {
        match self.admin(words)? {
            (0, output) => Ok(output),
            (code, output) => bail!(
                "tgtadm {} exited with status {code}: {output}",
                words.join(" ")
            ),
        }
    }

    /// Returns the target's number of sessions.
    fn sessions(&self) -> Result<usize> {
        let output = self.run_checked(&["--op", "show", "--mode", "target"])?;
        expect(&output, NAME)?;
        Ok(output.lines().filter(|l| l.contains("I_T nexus: ")).count())
    }

    fn url(&self) -> String {
        format!("iser://{}:{}/{NAME}/1", self.address, self.port)
    }

    /// Runs one of libiscsi's programs on the disk and returns its output. Fails unless its exit
    /// code is 0.
    fn tool(&self, words: &[&str]) -> Result<String> {
        self.start_tool(words)?.success()
    }

    fn start_tool(&self, words: &[&str]) -> Result<Program> {
        let url = self.url();
        let mut words = words.to_vec();
        words.push(&url);
        // libiscsi 1.19 relies on zeroed heap memory. With this setting, glibc zeroes it.
        let variables = [("MALLOC_PERTURB_", "255")];
        self.stage.start_with(&[], None, &variables, &words)
    }
}

fn ipc(stage: &Stage) -> String {
    stage.dir().join("tgtd").display().to_string()
}

/// Permits all users to read and write a file, because the programs may run as another user than
/// the file's owner.
fn permit_all_users(file: &std::path::Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o666))?;
    Ok(())
}

/// Checks that tgt frees its sessions. It frees a session when it gets RDMA_CM_EVENT_TIMEWAIT_EXIT.
fn sessions(stage: &Stage) -> Result<Verdict> {
    let target = Target::start(stage)?;
    let before = target.sessions()?;
    for _ in 0..5 {
        target.tool(&["iscsi-inq"])?;
    }
    let during = target.sessions()?;
    while target.sessions()? > 0 {
        if stage.time_left() < Duration::from_secs(1) {
            bail!("tgt did not free its sessions");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    if before != 0 || during > 5 {
        bail!("{before} sessions before, {during} after 5 logins");
    }
    Ok(Verdict::passed("5 sessions freed"))
}

fn inquiry(target: &Target<'_>) -> Result<Verdict> {
    let output = target.tool(&["iscsi-inq"])?;
    expect(&output, "Peripheral Device Type:DIRECT_ACCESS")?;
    expect(&output, "Product:VIRTUAL-DISK")?;
    Ok(Verdict::passed(""))
}

fn capacity(stage: &Stage) -> Result<Verdict> {
    let output = Target::start(stage)?.tool(&["iscsi-readcapacity16"])?;
    expect(&output, &format!("Total size:{DISK}"))?;
    Ok(Verdict::passed(format!("{DISK} octets")))
}

fn perf(stage: &Stage) -> Result<Verdict> {
    let target = Target::start(stage)?;
    let mut reads = 0;
    for order in [&[][..], &["-r"]] {
        let mut words = vec!["iscsi-perf", "-i", PERF, "-t", "2", "-m", "8", "-b", "64"];
        words.extend(order);
        let output = target.tool(&words)?;
        expect(&output, "finished.")?;
        let (_, rest) = output
            .rsplit_once("iops average ")
            .context("no average in the output of iscsi-perf")?;
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        reads += 2 * number
            .parse::<u64>()
            .context("the average is not a number")?;
    }
    if reads == 0 {
        bail!("iscsi-perf read nothing");
    }
    Ok(Verdict::passed(format!("about {reads} reads")))
}

/// Runs the conformance tests of libiscsi that work with its iSER transport. The asynchronous tests
/// of the suites Read10 and Write10 do not: they post more requests than the transport's queues
/// hold. The suite iSCSI tests the framing over TCP.
fn tests(stage: &Stage) -> Result<Verdict> {
    let target = Target::start_at(stage, "127.0.0.1", TEST_DISK)?;
    let mut asserts = 0;
    for test in [
        "SCSI.Read6",
        "SCSI.Read10.Simple",
        "SCSI.Read12",
        "SCSI.Read16",
        "SCSI.Write10.Simple",
        "SCSI.Write12",
        "SCSI.Write16",
        "SCSI.WriteSame10",
        "SCSI.WriteSame16",
        "SCSI.WriteVerify10",
        "SCSI.Verify10",
        "SCSI.Verify16",
        "SCSI.OrWrite",
        "SCSI.CompareAndWrite",
    ] {
        let words = ["iscsi-test-cu", "--dataloss", "--test", test];
        let (status, output) = target.start_tool(&words)?.wait()?;
        asserts += passed_asserts(status, &output).with_context(|| test)?;
    }
    Ok(Verdict::passed(format!("{asserts} assertions")))
}

/// Returns the number of assertions in the output of `iscsi-test-cu`. Fails with the failed ones if
/// not all passed, or if the exit status is not 0. The last line of the output never shows a
/// failure, because its "return value" is that of CUnit itself.
fn passed_asserts(status: i32, output: &str) -> Result<u64> {
    let line = output.lines().find(|line| line.contains("asserts"));
    let numbers: Vec<u64> = line
        .context("no summary was printed")?
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    match numbers[..] {
        [total, ran, passed, 0] if status == 0 && total > 0 && total == ran && ran == passed => {
            Ok(total)
        }
        _ => bail!("exit status {status}: {}", failed_asserts(output)),
    }
}

/// Returns the failed tests, libiscsi's reasons, and the failed assertions.
fn failed_asserts(output: &str) -> String {
    let numbered =
        |line: &&str| line.starts_with(|c: char| c.is_ascii_digit()) && line.contains(" - ");
    let lines = output.lines().map(str::trim);
    let failed = lines.filter(|line| line.contains("FAILED") || numbered(line));
    let failed: Vec<_> = failed.collect();
    match failed.is_empty() {
        true => output.trim().lines().last().unwrap_or_default().to_owned(),
        false => failed.join("; "),
    }
}

fn images(stage: &Stage) -> Result<Verdict> {
    let target = Target::start(stage)?;
    let output = stage
        .start(&["qemu-img", "info", "-f", "raw", &target.url()])?
        .success()?;
    expect(&output, &format!("({DISK} bytes)"))?;
    // libiscsi's iSER supports 512 KiB in one command, but QEMU would use 2 MiB.
    let limited = format!(
        "driver=blkdebug,max-transfer=262144,image.driver=iser,image.transport=iser,\
         image.portal=127.0.0.1:{},image.target={NAME},image.lun=1",
        target.port
    );
    let (copy, new) = (stage.dir().join("copy.img"), stage.dir().join("new.img"));
    let shown = copy.display().to_string();
    stage
        .start(&[
            "qemu-img",
            "convert",
            "--image-opts",
            &limited,
            "-O",
            "raw",
            &shown,
        ])?
        .success()?;
    same(&copy, &noise(1, DISK))?;
    let words = ["qemu-img", "dd", "bs=128k"].map(String::from);
    let mut words = words.to_vec();
    words.extend([format!("if={}", target.url()), format!("of={shown}.2")]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    stage.start(&words)?.success()?;
    same(&stage.dir().join("copy.img.2"), &noise(1, DISK))?;
    // The other direction: write to the disk.
    std::fs::write(&new, noise(2, DISK))?;
    let shown = new.display().to_string();
    let convert = ["qemu-img", "convert", "-n", "-f", "raw", &shown];
    stage
        .start(&[&convert[..], &["--target-image-opts", &limited]].concat())?
        .success()?;
    let file = format!("driver=raw,file.filename={shown}");
    let output = stage
        .start(&["qemu-img", "compare", "--image-opts", &limited, &file])?
        .success()?;
    expect(&output, "Images are identical.")?;
    same(&target.disk, &noise(2, DISK))?;
    Ok(Verdict::passed(format!("{} MiB each way", DISK >> 20)))
}

fn same(file: &std::path::Path, wanted: &[u8]) -> Result<()> {
    if std::fs::read(file)? != wanted {
        bail!("{} does not have the expected content", file.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(test: &str, summary: &str) -> String {
        format!(
            "Suite: Read6\n  Test: Simple ...passed\n  Test: BeyondEol ...{test}\n\n\
             Run Summary:    Type  Total    Ran Passed Failed Inactive\n\
             \x20            asserts {summary}      n/a\n\n\
             Tests completed with return value: 0\n"
        )
    }

    #[test]
    fn failed_assertions_are_named() {
        let passed = output("passed", "1274   1274   1274      0");
        assert_eq!(passed_asserts(0, &passed).unwrap(), 1274);
        assert!(passed_asserts(1, &passed).is_err());
        assert!(passed_asserts(0, &output("passed", "2 1 1 0")).is_err());
        assert!(passed_asserts(0, &output("passed", "0 0 0 0")).is_err());
        assert!(passed_asserts(0, "Failed to log in").is_err());
        let asserts = "FAILED\n    1. test_read6.c:45  - CU_ASSERT_EQUAL(ret,0)";
        let error = passed_asserts(1, &output(asserts, "1274 1274 1273 1")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "exit status 1: Test: BeyondEol ...FAILED; \
             1. test_read6.c:45  - CU_ASSERT_EQUAL(ret,0)"
        );
    }
}
