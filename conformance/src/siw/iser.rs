//! Disks over iSER: the kernel's initiator (`ib_iser` on siw) at tgt on our library, and libiscsi's programs on our library at the
//! kernel's target (`ib_isert` on siw). Its guest's part are the scripts `iser-disk` and `iser-target`.
//!
//! libiscsi's `iscsi-test-cu` is not among them: it frees connections that it has not given back to the connection manager.
//! tgt leaves their end to the initiator; the kernel's target ends them, and the program then writes to freed memory.

use std::fs::File;
use std::io::Read;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::cases::{Case, NETS, Settings, We};
use super::guest::{Guest, Net};
use super::host::Program;
use super::image::sbin;
use super::lab::{LISTEN_LIMIT, Lab};

/// For a step that moves some ten megabytes in an emulated machine.
const LIMIT: u64 = 180;

const DISK_NAME: &str = "iqn.2024-01.example:disk";
/// As `/etc/iscsi/initiatorname.iscsi` in the guest has it.
pub(super) const GUEST_NAME: &str = "iqn.2024-01.example:guest";
const TARGET_NAME: &str = "iqn.2024-01.example:target";
const PERF_NAME: &str = "iqn.2024-01.example:perf";

/// Where tgt listens in the namespace of the TAP device. It takes ports from 32768 for negative numbers.
const PORT: u16 = 3260;

/// For tgt to notice that nobody is logged in.
const SESSION_LIMIT: Duration = Duration::from_secs(60);

/// Size of tgt's disk: a file system with 28 MiB of files.
const DISK: u64 = 96 << 20;
/// Size of the kernel's disk, in MiB.
const TARGET_MIB: usize = 32;

const NO_CRC: Settings = &[("IWARP_CRC", "off")];

/// What is done at the kernel's target.
type AtTarget = fn(&Lab, &Case, &Target) -> Result<String>;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // The guest is told tgt's address by tgt, so this needs a network on which both have the same idea of it.
    for (name, settings) in [("iser-tgt", &[][..]), ("iser-tgt-no-crc", NO_CRC)] {
        cases.push(Case {
            name: name.to_owned(),
            driver: "",
            settings,
            net: Net::Tap,
            we: We::Serve,
            run: Box::new(kernel_initiator),
        });
    }
    for net in NETS {
        let programs: [(&str, AtTarget); 3] = [
            ("iser-lio-inquiry", inquiry),
            ("iser-lio-perf", perf),
            ("iser-lio-qemu-img", images),
        ];
        for (name, run) in programs {
            cases.push(Case {
                name: name.to_owned(),
                driver: "",
                // siw cannot read a CRC that is split over segments, and QEMU's network cuts as it likes.
                settings: if net == Net::User { NO_CRC } else { &[] },
                net,
                we: We::Connect,
                run: Box::new(move |lab, case| Target::with(lab, case, run)),
            });
        }
    }
    cases
}

/// A directory of one case. It is gone with the value.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Result<Self> {
        // A short path: tgt's socket is in it.
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
    fn start(lab: &Lab, case: &Case) -> Result<Self> {
        let dir = Dir::new()?;
        File::create(dir.file("disk"))?.set_len(DISK)?;
        let (address, _) = Guest::host(case.net);
        let mut daemon = daemon(lab, case, &dir, address)?;
        daemon.listens(PORT, LISTEN_LIMIT)?;
        let tgt = Self { daemon, dir };
        #[rustfmt::skip]
        let new = ["--op", "new", "--mode", "target", "--tid", "1", "-T", DISK_NAME];
        // It listens before it takes commands.
        let start = Instant::now();
        while let Err(error) = tgt.admin(&new) {
            if start.elapsed() > LISTEN_LIMIT {
                return Err(error);
            }
            thread::sleep(Duration::from_millis(100));
        }
        let disk = tgt.dir.file("disk");
        #[rustfmt::skip]
        tgt.admin(&["--op", "new", "--mode", "logicalunit", "--tid", "1", "--lun", "1", "-b", &disk])?;
        for who in [["-I", "ALL"], ["-Q", GUEST_NAME]] {
            let bind = ["--op", "bind", "--mode", "target", "--tid", "1"];
            tgt.admin(&[&bind[..], &who].concat())?;
        }
        Ok(tgt)
    }

    fn admin(&self, words: &[&str]) -> Result<String> {
        succeeds(
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

fn daemon(lab: &Lab, case: &Case, dir: &Dir, address: Ipv4Addr) -> Result<Program> {
    let socket = dir.file("tgtd");
    let mut settings = case.settings.to_vec();
    settings.push(("TGT_IPC_SOCKET", &socket));
    let iser = format!("port={PORT},pool_sz_mb=64");
    // Ordinary iSCSI is always there, too, and needs a port of its own.
    let iscsi = format!("portal={address}:{}", PORT + 1);
    let words = ["tgtd", "-f", "--iser", &iser, "--iscsi", &iscsi];
    lab.on_our_library(case, &words, &settings)
}

/// Discovery, a file system, files; everything once more after a new login; and a look at the disk from this side.
fn kernel_initiator(lab: &Lab, case: &Case) -> Result<String> {
    let mut tgt = Tgt::start(lab, case)?;
    let result = login_and_use(lab, case, &tgt);
    let result = result.with_context(|| format!("tgtd: {}", tail(tgt.daemon.said())));
    tgt.daemon.kill();
    result
}

fn login_and_use(lab: &Lab, case: &Case, tgt: &Tgt) -> Result<String> {
    let guest = &lab.guest;
    let (_, address) = Guest::host(case.net);
    // It is killed when this value goes.
    let daemon = guest.start_command("exec iser-disk daemon", 5 * LIMIT)?;
    let found = guest.must(&format!("iser-disk discover {address} {}", PORT), LIMIT)?;
    expect(&found, &format!("{address}:{},1 {DISK_NAME}", PORT))?;
    let disk = login(guest)?;
    let sums = guest.must(&format!("iser-disk fill {disk}"), LIMIT)?;
    guest.must("iser-disk logout", LIMIT)?;
    let disk = login(guest)?;
    let checked = guest.must(&format!("iser-disk check {disk}"), LIMIT)?;
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
    guest.must("iser-disk logout", LIMIT)?;
    // tgt frees a session when the wait after its connection is over, which our connection manager tells.
    let start = Instant::now();
    while tgt.sessions()? > 0 {
        if start.elapsed() > SESSION_LIMIT {
            bail!("tgt still has sessions");
        }
        thread::sleep(Duration::from_millis(200));
    }
    guest.must("iser-disk forget", LIMIT)?;
    drop(daemon);
    quiet(guest)?;

    // What the guest has written is in the file, and is a file system.
    let image = tgt.dir.file("disk");
    succeeds(Command::new(sbin("e2fsck")).args(["-f", "-n", &image]))?;
    let copy = tgt.dir.file("noise");
    succeeds(Command::new(sbin("debugfs")).args(["-R", &format!("dump /noise {copy}"), &image]))?;
    let sum = checksum(Path::new(&copy))?;
    expect(&sums, &format!("{sum}  noise"))?;
    Ok(format!("{files} files, the same in tgt's disk"))
}

/// Returns the name of the disk in the guest.
fn login(guest: &Guest) -> Result<String> {
    let said = guest.must("iser-disk login", LIMIT)?;
    expect(&said, "iser: [")?;
    let disk = said.lines().find_map(|line| line.strip_prefix("disk "));
    Ok(disk.context("no disk")?.to_owned())
}

/// The guest's kernel had nothing to complain about its disk. The messages stay for the log.
fn quiet(guest: &Guest) -> Result<()> {
    let said = guest.must("dmesg", 20)?;
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

/// The kernel's target in the guest, with one disk of noise.
struct Target {
    /// Host and port, from here.
    portal: String,
}

impl Target {
    fn with(lab: &Lab, case: &Case, run: AtTarget) -> Result<String> {
        let port = lab.next_port();
        let address = Guest::address(case.net);
        let up = format!("iser-target up {TARGET_NAME} {address} {port} {TARGET_MIB}");
        lab.guest.must(&up, LIMIT)?;
        let target = Self {
            portal: lab.guest.reach(case.net, port)?.to_string(),
        };
        let result = run(lab, case, &target);
        let down = lab
            .guest
            .must(&format!("iser-target down {TARGET_NAME}"), LIMIT);
        let note = result?;
        down?;
        Ok(note)
    }

    fn url(&self) -> String {
        format!("iser://{}/{TARGET_NAME}/0", self.portal)
    }

    /// QEMU's name for the disk. libiscsi's iSER takes at most 512 KiB for one command and does not say so; QEMU would ask for 2 MiB.
    fn image(&self) -> String {
        format!(
            "driver=blkdebug,max-transfer=262144,image.driver=iser,image.transport=iser,image.portal={},\
             image.target={TARGET_NAME},image.lun=0",
            self.portal
        )
    }
}

/// A program of this machine on our library, which has to succeed.
fn tool(lab: &Lab, case: &Case, words: &[&str]) -> Result<String> {
    let mut settings = case.settings.to_vec();
    // libiscsi 1.19 counts on fresh memory of the heap to be zero, which this makes of it.
    settings.push(("MALLOC_PERTURB_", "255"));
    let out = lab.on_our_library(case, words, &settings)?.wait(LIMIT)?;
    if out.code != 0 {
        bail!("{} ended with {}: {}", words[0], out.code, tail(&out.text));
    }
    Ok(out.text)
}

fn inquiry(lab: &Lab, case: &Case, target: &Target) -> Result<String> {
    let said = tool(lab, case, &["iscsi-inq", &target.url()])?;
    expect(&said, "Vendor:LIO-ORG")?;
    let said = tool(lab, case, &["iscsi-readcapacity16", &target.url()])?;
    expect(&said, &format!("Total size:{}\n", TARGET_MIB << 20))?;
    Ok(String::new())
}

fn perf(lab: &Lab, case: &Case, target: &Target) -> Result<String> {
    let mut notes = Vec::new();
    for (name, order) in [("in order", &[][..]), ("at random", &["-r"])] {
        let url = target.url();
        #[rustfmt::skip]
        let words = [&["iscsi-perf", "-i", PERF_NAME, "-t", "2", "-m", "8", "-b", "64"], order, &[&url]].concat();
        let said = tool(lab, case, &words)?;
        expect(&said, "finished.")?;
        let (_, rest) = said.rsplit_once("iops average ").context("no average")?;
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let number: u64 = number.parse().context("the average is no number")?;
        if number == 0 {
            bail!("nothing was read {name}");
        }
        notes.push(format!("{number} reads/s {name}"));
    }
    Ok(notes.join(", "))
}

fn images(lab: &Lab, case: &Case, target: &Target) -> Result<String> {
    let dir = Dir::new()?;
    let (copy, new) = (dir.file("copy"), dir.file("new"));
    let there = || -> Result<String> {
        let said = lab.guest.must("sha256sum </tmp/iser-target", LIMIT)?;
        Ok(said
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned())
    };
    let image = target.image();
    #[rustfmt::skip]
    tool(lab, case, &["qemu-img", "convert", "--image-opts", &image, "-O", "raw", &copy])?;
    same("read", &checksum(Path::new(&copy))?, &there()?)?;
    noise(Path::new(&new), TARGET_MIB << 20)?;
    #[rustfmt::skip]
    tool(lab, case, &["qemu-img", "convert", "-n", "-f", "raw", &new, "--target-image-opts", &image])?;
    same("written", &checksum(Path::new(&new))?, &there()?)?;
    let file = format!("driver=raw,file.filename={new}");
    #[rustfmt::skip]
    let said = tool(lab, case, &["qemu-img", "compare", "--image-opts", &image, &file])?;
    expect(&said, "Images are identical.")?;
    Ok(format!("{TARGET_MIB} MiB each way"))
}

fn same(what: &str, here: &str, there: &str) -> Result<()> {
    if here != there {
        bail!("what was {what} is something else: {here} here, {there} in the guest");
    }
    Ok(())
}

fn expect(said: &str, words: &str) -> Result<()> {
    if !said.contains(words) {
        bail!("no {words:?} in: {}", tail(said));
    }
    Ok(())
}

/// The end of an output, in one line.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.trim().lines().collect();
    lines[lines.len().saturating_sub(6)..].join(" / ")
}

fn succeeds(command: &mut Command) -> Result<String> {
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
    let said = succeeds(Command::new("sha256sum").arg(file))?;
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
