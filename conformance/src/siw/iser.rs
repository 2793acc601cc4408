//! Disks over iSER. tgt on our library serves the kernel's initiator (`ib_iser` on siw), and the
//! kernel's target (`ib_isert` on siw) serves libiscsi's programs on our library. The scripts
//! `iser-disk` and `iser-target` run in the guest.
//!
//! libiscsi's `iscsi-test-cu` is not used: it frees connections without destroying their rdma_cm
//! identifiers, and writes to freed memory when the kernel's target disconnects.

use std::fs::File;
use std::io::Read;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::lab::{Lab, NETS, OurRole, Settings, Setup};
use crate::case::Case;
use crate::guest::host::Program;
use crate::guest::image::{GUEST_NAME, sbin};
use crate::guest::{Guest, LISTEN_LIMIT, Net};

/// Time limit of a step that transfers tens of megabytes, in seconds.
const LIMIT: u64 = 180;

const DISK_NAME: &str = "iqn.2024-01.example:disk";
const TARGET_NAME: &str = "iqn.2024-01.example:target";
const PERF_NAME: &str = "iqn.2024-01.example:perf";

/// tgt's port. tgt treats ports from 32768 on as negative numbers.
const PORT: u16 = 3260;

/// Time limit for tgt to free its sessions after a logout.
const SESSION_LIMIT: Duration = Duration::from_secs(60);

/// Size of tgt's disk in bytes. It has room for a file system with 28 MiB of files.
const DISK: u64 = 96 << 20;
/// Size of the kernel's disk, in MiB.
const TARGET_MIB: usize = 32;

const NO_CRC: Settings = &[("IWARP_CRC", "off")];

/// A test against the kernel's target. Returns the note for the table.
type TargetTest = fn(&Lab, &Setup, &Target) -> Result<String>;

pub(super) fn cases() -> Vec<Case<Lab>> {
    let mut cases = Vec::new();
    // During discovery, tgt sends its own address, which the guest can reach only over the TAP
    // network.
    for (name, settings) in [("iser-tgt", &[][..]), ("iser-tgt-no-crc", NO_CRC)] {
        let setup = Setup {
            name: name.to_owned(),
            driver: "",
            settings,
            net: Net::Tap,
            we: OurRole::Serve,
        };
        cases.push(setup.case(kernel_initiator));
    }
    for net in NETS {
        let programs: [(&str, TargetTest); 3] = [
            ("iser-lio-inquiry", inquiry),
            ("iser-lio-perf", perf),
            ("iser-lio-qemu-img", images),
        ];
        for (name, run) in programs {
            let setup = Setup {
                name: name.to_owned(),
                driver: "",
                // siw cannot read a CRC that is split across segments, and the user-mode network
                // re-segments the stream.
                settings: if net == Net::User { NO_CRC } else { &[] },
                net,
                we: OurRole::Connect,
            };
            cases.push(setup.case(move |lab, setup| Target::with(lab, setup, run)));
        }
    }
    cases
}

/// A temporary directory. Dropping the value removes it.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Result<Self> {
        // tgt's Unix socket is in this directory, and socket paths are limited to 107 bytes.
        let path = std::env::temp_dir().join(format!("iwarp-iser-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// tgt's daemon on our library, with one disk.
struct Tgt {
    daemon: Program,
    dir: Dir,
}

impl Tgt {
    fn start(lab: &Lab, setup: &Setup) -> Result<Self> {
        let dir = Dir::new()?;
        File::create(dir.file("disk"))?.set_len(DISK)?;
        let (address, _) = Guest::host(setup.net);
        let mut daemon = daemon(lab, setup, &dir, address)?;
        daemon.listens(PORT, LISTEN_LIMIT)?;
        let tgt = Self { daemon, dir };
        #[rustfmt::skip]
        let new = ["--op", "new", "--mode", "target", "--tid", "1", "-T", DISK_NAME];
        // tgt listens before it accepts commands, so the first command is retried.
        let start = Instant::now();
        while let Err(error) = tgt.admin(&new) {
            if start.elapsed() > LISTEN_LIMIT {
                return Err(error);
            }
            thread::sleep(Duration::from_millis(100));
        }
        let disk = tgt.dir.file("disk");
        let unit = ["--op", "new", "--mode", "logicalunit", "--tid", "1"];
        tgt.admin(&[&unit[..], &["--lun", "1", "-b", &disk]].concat())?;
        for who in [["-I", "ALL"], ["-Q", GUEST_NAME]] {
            let bind = ["--op", "bind", "--mode", "target", "--tid", "1"];
            tgt.admin(&[&bind[..], &who].concat())?;
        }
        Ok(tgt)
    }

    fn admin(&self, words: &[&str]) -> Result<String> {
        run_successfully(
            Command::new(sbin("tgtadm"))
                .env("TGT_IPC_SOCKET", self.dir.file("tgtd"))
                .args(["--lld", "iser"])
                .args(words),
        )
    }

    fn sessions(&self) -> Result<usize> {
        let said = self.admin(&["--op", "show", "--mode", "target"])?;
        expect(&said, DISK_NAME)?;
        Ok(said.matches("I_T nexus: ").count())
    }
}

fn daemon(lab: &Lab, setup: &Setup, dir: &Dir, address: Ipv4Addr) -> Result<Program> {
    let socket = dir.file("tgtd");
    let mut settings = setup.settings.to_vec();
    settings.push(("TGT_IPC_SOCKET", &socket));
    let iser = format!("port={PORT},pool_sz_mb=64");
    // tgt always serves iSCSI over TCP as well, which needs another port.
    let iscsi = format!("portal={address}:{}", PORT + 1);
    let words = ["tgtd", "-f", "--iser", &iser, "--iscsi", &iscsi];
    lab.on_our_library(setup, &words, &settings)
}

/// The guest logs in to tgt's disk, creates a file system and files, and verifies them after a new
/// login. Then this machine checks the file that contains the disk.
fn kernel_initiator(lab: &Lab, setup: &Setup) -> Result<String> {
    let mut tgt = Tgt::start(lab, setup)?;
    let result = login_and_use(lab, setup, &tgt);
    let result = result.with_context(|| format!("tgtd: {}", tail(tgt.daemon.output_so_far())));
    tgt.daemon.kill();
    result
}

fn login_and_use(lab: &Lab, setup: &Setup, tgt: &Tgt) -> Result<String> {
    let guest = &lab.guest;
    let (_, address) = Guest::host(setup.net);
    // Dropping the value kills the daemon.
    let daemon = guest.start_command("exec iser-disk daemon", 5 * LIMIT)?;
    let found = guest.run_checked(&format!("iser-disk discover {address} {}", PORT), LIMIT)?;
    expect(&found, &format!("{address}:{},1 {DISK_NAME}", PORT))?;
    let disk = login(guest)?;
    let sums = guest.run_checked(&format!("iser-disk fill {disk}"), LIMIT)?;
    guest.run_checked("iser-disk logout", LIMIT)?;
    let disk = login(guest)?;
    let checked = guest.run_checked(&format!("iser-disk check {disk}"), LIMIT)?;
    let files = sums.lines().count();
    if files < 2
        || checked
            .lines()
            .filter(|line| line.ends_with(": OK"))
            .count()
            != files
    {
        bail!("{checked}");
    }
    guest.run_checked("iser-disk logout", LIMIT)?;
    // tgt frees a session when it gets the event RDMA_CM_EVENT_TIMEWAIT_EXIT.
    let start = Instant::now();
    while tgt.sessions()? > 0 {
        if start.elapsed() > SESSION_LIMIT {
            bail!("tgt did not free its sessions after the logout");
        }
        thread::sleep(Duration::from_millis(200));
    }
    guest.run_checked("iser-disk forget", LIMIT)?;
    drop(daemon);
    check_no_disk_errors(guest)?;

    // tgt's disk must contain a valid file system with the guest's files.
    let image = tgt.dir.file("disk");
    run_successfully(Command::new(sbin("e2fsck")).args(["-f", "-n", &image]))?;
    let copy = tgt.dir.file("noise");
    run_successfully(Command::new(sbin("debugfs")).args([
        "-R",
        &format!("dump /noise {copy}"),
        &image,
    ]))?;
    let sum = checksum(Path::new(&copy))?;
    expect(&sums, &format!("{sum}  noise"))?;
    Ok(format!("{files} files, the same in tgt's disk"))
}

/// Logs in, and returns the disk's name in the guest.
fn login(guest: &Guest) -> Result<String> {
    let said = guest.run_checked("iser-disk login", LIMIT)?;
    expect(&said, "iser: [")?;
    let disk = said.lines().find_map(|line| line.strip_prefix("disk "));
    Ok(disk.context("no disk")?.to_owned())
}

/// Fails if the guest's kernel reported disk errors. Does not consume the kernel messages.
fn check_no_disk_errors(guest: &Guest) -> Result<()> {
    let said = guest.run_checked("dmesg", 20)?;
    for words in [
        "I/O error",
        "iser: ",
        "detected conn error",
        "EXT4-fs error",
    ] {
        if let Some(line) = said.lines().find(|line| line.contains(words)) {
            bail!("the guest's kernel: {line}");
        }
    }
    Ok(())
}

/// The kernel's target in the guest, with one disk of random data.
struct Target {
    /// The address and port at which this machine reaches the target.
    portal: String,
}

impl Target {
    fn with(lab: &Lab, setup: &Setup, run: TargetTest) -> Result<String> {
        let port = lab.next_port();
        let address = Guest::address(setup.net);
        let up = format!("iser-target up {TARGET_NAME} {address} {port} {TARGET_MIB}");
        lab.guest.run_checked(&up, LIMIT)?;
        let target = Self {
            portal: lab.guest.reach(setup.net, port)?.to_string(),
        };
        let result = run(lab, setup, &target);
        let down = lab
            .guest
            .run_checked(&format!("iser-target down {TARGET_NAME}"), LIMIT);
        let note = result?;
        down?;
        Ok(note)
    }

    fn url(&self) -> String {
        format!("iser://{}/{TARGET_NAME}/0", self.portal)
    }

    /// Returns QEMU's options for the disk. They limit commands to 256 KiB: QEMU would use 2 MiB,
    /// but libiscsi's iSER supports at most 512 KiB.
    fn image(&self) -> String {
        format!(
            "driver=blkdebug,max-transfer=262144,image.driver=iser,image.transport=iser,\
             image.portal={},image.target={TARGET_NAME},image.lun=0",
            self.portal
        )
    }
}

/// Runs a program on our library and returns its output. Fails unless the exit code is 0.
fn tool(lab: &Lab, setup: &Setup, words: &[&str]) -> Result<String> {
    let mut settings = setup.settings.to_vec();
    // libiscsi 1.19 relies on zeroed heap memory. With this setting, glibc zeroes it.
    settings.push(("MALLOC_PERTURB_", "255"));
    let out = lab.on_our_library(setup, words, &settings)?.wait(LIMIT)?;
    if out.code != 0 {
        bail!(
            "{} exited with status {}: {}",
            words[0],
            out.code,
            tail(&out.text)
        );
    }
    Ok(out.text)
}

fn inquiry(lab: &Lab, setup: &Setup, target: &Target) -> Result<String> {
    let said = tool(lab, setup, &["iscsi-inq", &target.url()])?;
    expect(&said, "Vendor:LIO-ORG")?;
    let said = tool(lab, setup, &["iscsi-readcapacity16", &target.url()])?;
    expect(&said, &format!("Total size:{}\n", TARGET_MIB << 20))?;
    Ok(String::new())
}

fn perf(lab: &Lab, setup: &Setup, target: &Target) -> Result<String> {
    let mut notes = Vec::new();
    for (name, order) in [("in order", &[][..]), ("at random", &["-r"])] {
        let url = target.url();
        let common = [
            "iscsi-perf",
            "-i",
            PERF_NAME,
            "-t",
            "2",
            "-m",
            "8",
            "-b",
            "64",
        ];
        let words = [&common[..], order, &[&url]].concat();
        let said = tool(lab, setup, &words)?;
        expect(&said, "finished.")?;
        let (_, rest) = said
            .rsplit_once("iops average ")
            .context("no average in the output of iscsi-perf")?;
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let number: u64 = number.parse().context("the average is not a number")?;
        if number == 0 {
            bail!("iscsi-perf read nothing ({name})");
        }
        notes.push(format!("{number} reads/s {name}"));
    }
    Ok(notes.join(", "))
}

fn images(lab: &Lab, setup: &Setup, target: &Target) -> Result<String> {
    let dir = Dir::new()?;
    let (copy, new) = (dir.file("copy"), dir.file("new"));
    let target_checksum = || -> Result<String> {
        let said = lab
            .guest
            .run_checked("sha256sum </tmp/iser-target", LIMIT)?;
        Ok(said
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned())
    };
    let image = target.image();
    #[rustfmt::skip]
    tool(lab, setup, &["qemu-img", "convert", "--image-opts", &image, "-O", "raw", &copy])?;
    same("read", &checksum(Path::new(&copy))?, &target_checksum()?)?;
    noise(Path::new(&new), TARGET_MIB << 20)?;
    let convert = ["qemu-img", "convert", "-n", "-f", "raw", &new];
    tool(
        lab,
        setup,
        &[&convert[..], &["--target-image-opts", &image]].concat(),
    )?;
    same("written", &checksum(Path::new(&new))?, &target_checksum()?)?;
    let file = format!("driver=raw,file.filename={new}");
    #[rustfmt::skip]
    let said = tool(lab, setup, &["qemu-img", "compare", "--image-opts", &image, &file])?;
    expect(&said, "Images are identical.")?;
    Ok(format!("{TARGET_MIB} MiB each way"))
}

fn same(what: &str, host_sum: &str, guest_sum: &str) -> Result<()> {
    if host_sum != guest_sum {
        bail!(
            "the data that was {what} differs: SHA-256 {host_sum} here, {guest_sum} in the guest"
        );
    }
    Ok(())
}

fn expect(said: &str, words: &str) -> Result<()> {
    if !said.contains(words) {
        bail!("no {words:?} in the output: {}", tail(said));
    }
    Ok(())
}

/// Returns the last lines of an output as one line.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.trim().lines().collect();
    lines[lines.len().saturating_sub(6)..].join(" / ")
}

fn run_successfully(command: &mut Command) -> Result<String> {
    let out = command
        .output()
        .with_context(|| format!("cannot start {command:?}"))?;
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    if !out.status.success() {
        let errors = String::from_utf8_lossy(&out.stderr);
        bail!("{command:?}: {}: {said} {errors}", out.status);
    }
    Ok(said)
}

fn checksum(file: &Path) -> Result<String> {
    let said = run_successfully(Command::new("sha256sum").arg(file))?;
    Ok(said
        .split_whitespace()
        .next()
        .unwrap_or_default()
        .to_owned())
}

fn noise(file: &Path, len: usize) -> Result<()> {
    let mut from = File::open("/dev/urandom")?.take(len as u64);
    std::io::copy(&mut from, &mut File::create(file)?)?;
    Ok(())
}
