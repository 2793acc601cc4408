//! Runs the guest: QEMU, its networks, and shell commands inside.
//!
//! Kills only processes that this program has started, by their ids, and deletes only namespaces
//! whose names contain its process id.

pub(crate) mod archive;
mod constants;
pub(crate) mod debian;
pub(crate) mod host;
pub(crate) mod image;
pub(crate) mod kernel_files;
pub(crate) mod omitted;
pub(crate) mod python;

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use xtask::process::Log;

use image::{Image, sbin};

/// Time limit of the boot of an emulated guest on a busy machine.
const BOOT_LIMIT: Duration = Duration::from_secs(300);

/// Time limit for a started server to listen.
pub(crate) const LISTEN_LIMIT: Duration = Duration::from_secs(30);

/// On a busy host the emulated timer is late, so the kernel's timer check would panic. The kernel
/// would also distrust the cycle counter, and use a clock whose reads take microseconds.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 loglevel=4 panic=-1 no_timer_check tsc=reliable \
                                rdinit=/init net.ifnames=0";

/// The guest's addresses.
pub(crate) const GUEST_USER: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
pub(crate) const GUEST_TAP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// The guest's address for this machine's 127.0.0.1.
const HOST_USER: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
pub(crate) const HOST_TAP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
pub(crate) const HOST_TAP_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1);

/// Ports on which the guest may listen. In the user-mode network, QEMU forwards a free port of this
/// machine to each.
pub(crate) const GUEST_PORTS: std::ops::Range<u16> = 7100..7116;

/// The network between the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Net {
    /// QEMU's user-mode network. QEMU terminates TCP on both sides, so segments are not preserved.
    User,
    /// A TAP device in a network namespace: TCP from end to end, MSS 1460, no offloads.
    Tap,
}

impl Net {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Tap => "tap",
        }
    }
}

/// One end of a cable between two guests. Each frame is a datagram between the QEMUs. A TCP
/// connection could stop in the middle of a frame when an end disappears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cable {
    /// The last byte of the card's MAC address: 4 for the first end, 5 for the second.
    card: u8,
    /// UDP ports on this machine: this end's, and the other end's.
    ports: [u16; 2],
}

impl Cable {
    /// Returns both ends of a new cable.
    pub(crate) fn ends() -> Result<[Self; 2]> {
        let bind = || UdpSocket::bind((Ipv4Addr::LOCALHOST, 0));
        let (first, second) = (bind()?, bind()?);
        let (first, second) = (first.local_addr()?.port(), second.local_addr()?.port());
        Ok([
            Self {
                card: 4,
                ports: [first, second],
            },
            Self {
                card: 5,
                ports: [second, first],
            },
        ])
    }

    /// Returns QEMU's options for a card at this end.
    fn options(self) -> [String; 4] {
        let [here, there] = self.ports;
        [
            "-netdev".to_owned(),
            format!("socket,id=cable,udp=127.0.0.1:{there},localaddr=127.0.0.1:{here}"),
            "-device".to_owned(),
            card("cable", self.card),
        ]
    }
}

/// The configuration of a guest.
pub(crate) struct Machine {
    /// Adds the TAP device. Needs root.
    pub(crate) tap: bool,
    /// Adds a card that is connected to another guest.
    pub(crate) cable: Option<Cable>,
    /// Adds this file as the disk `/dev/vda`. It keeps the guest's writes when QEMU is killed.
    pub(crate) disk: Option<PathBuf>,
    /// Records the packets of the user-mode network.
    pub(crate) record: bool,
    /// The value of QEMU's option `-cpu`.
    pub(crate) cpu: &'static str,
    /// Further kernel arguments.
    pub(crate) arguments: String,
}

impl Machine {
    /// Returns QEMU's command line without the networks.
    fn command(&self, image: &Image, console: &Path) -> Command {
        let mut command = tied("qemu-system-x86_64");
        command
            .args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-display", "none", "-machine", "q35"])
            .args([
                "-accel",
                "tcg,thread=multi",
                "-cpu",
                self.cpu,
                "-smp",
                "2",
                "-m",
                "1536",
            ])
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&image.initramfs)
            .args(["-append", &format!("{KERNEL_ARGUMENTS} {}", self.arguments)])
            .args([
                "-chardev",
                &format!("file,id=console,path={}", console.display()),
            ])
            .args(["-serial", "chardev:console"])
            .args(["-device", "virtio-rng-pci"]);
        command
    }

    /// Adds the options of the optional devices.
    fn add_options(&self, command: &mut Command, device: &str, cache: &Path) {
        if self.tap {
            // Without offloads, each packet of the device is one TCP segment.
            let plain = "csum=off,gso=off,guest_csum=off,guest_tso4=off,guest_tso6=off,\
                         host_tso4=off,host_tso6=off";
            command.args([
                "-netdev",
                &format!("tap,id=tap,ifname={device},script=no,downscript=no"),
                "-device",
                &format!("{},{plain}", card("tap", 3)),
            ]);
        }
        if let Some(cable) = self.cable {
            command.args(cable.options());
        }
        if let Some(disk) = &self.disk {
            command.args([
                "-drive",
                &format!("if=none,id=disk,format=raw,file={}", disk.display()),
                "-device",
                "virtio-blk-pci,drive=disk",
            ]);
        }
        if self.record {
            let file = cache.join("user-network.pcap");
            command.args([
                "-object",
                &format!("filter-dump,id=dump,netdev=user,file={}", file.display()),
            ]);
        }
    }
}

/// A running guest. Dropping it kills QEMU.
pub(crate) struct Guest {
    qemu: Child,
    agent: SocketAddr,
    monitor: SocketAddr,
    forwards: Vec<(u16, u16)>,
    namespace: Option<String>,
}

impl Guest {
    /// Starts the guest and waits until it accepts commands.
    pub(crate) fn start(
        image: &Image,
        cache: &Path,
        machine: &Machine,
        log: &mut Log,
    ) -> Result<Self> {
        let console = cache.join("console.log");
        let mut ports = free_ports(GUEST_PORTS.len() + 2)?.into_iter();
        let mut here = || -> Result<SocketAddr> {
            let port = ports.next().context("no port")?;
            Ok((Ipv4Addr::LOCALHOST, port).into())
        };
        let (agent, monitor) = (here()?, here()?);
        let forwards: Vec<_> = GUEST_PORTS.zip(ports).collect();
        let user = forwards.iter().fold(
            "user,id=user,ipv6=off,net=10.0.2.0/24,host=10.0.2.2".to_owned(),
            |text, (guest, here)| {
                format!("{text},hostfwd=tcp:127.0.0.1:{here}-{GUEST_USER}:{guest}")
            },
        );
        let id = std::process::id();
        let device = format!("iwtap{id}");
        remove_stale_namespaces();
        let mut command = machine.command(image, &console);
        command
            .args(["-monitor", &format!("tcp:{monitor},server=on,wait=off")])
            .args(["-netdev", &user, "-device", &card("user", 1)])
            .args([
                "-netdev",
                &format!(
                    "user,id=ctl,ipv6=off,restrict=on,net=10.0.3.0/24,\
                     hostfwd=tcp:{agent}-10.0.3.15:22"
                ),
                "-device",
                &card("ctl", 2),
            ]);
        machine.add_options(&mut command, &device, cache);
        let out = File::create(cache.join("qemu.log"))?;
        let qemu = command
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()
            .context("cannot start qemu-system-x86_64")?;
        let mut guest = Self {
            qemu,
            agent,
            monitor,
            forwards,
            namespace: None,
        };
        if machine.tap {
            guest.tap(&format!("iwarp{id}"), &device, log)?;
        }
        guest.wait(&console)?;
        Ok(guest)
    }

    /// Waits until QEMU has created the TAP device, and moves it into a network namespace.
    fn tap(&mut self, namespace: &str, device: &str, log: &mut Log) -> Result<()> {
        let start = Instant::now();
        while !Path::new("/sys/class/net").join(device).exists() {
            if start.elapsed() > Duration::from_secs(20) || self.qemu.try_wait()?.is_some() {
                bail!("QEMU made no TAP device");
            }
            thread::sleep(Duration::from_millis(50));
        }
        log.run(ip().args(["netns", "add", namespace]))?;
        self.namespace = Some(namespace.to_owned());
        log.run(ip().args(["link", "set", device, "netns", namespace]))?;
        log.run(ip().args([
            "-n",
            namespace,
            "addr",
            "add",
            &format!("{HOST_TAP}/24"),
            "dev",
            device,
        ]))?;
        log.run(ip().args(["-n", namespace, "link", "set", device, "up"]))?;
        log.run(ip().args([
            "-n",
            namespace,
            "addr",
            "add",
            &format!("{HOST_TAP_V6}/64"),
            "dev",
            device,
            "nodad",
        ]))?;
        log.run(ip().args(["-n", namespace, "link", "set", "lo", "up"]))
    }

    fn wait(&mut self, console: &Path) -> Result<()> {
        let start = Instant::now();
        loop {
            if let Ok(out) = self.run("true", 20)
                && out.code == 0
            {
                return Ok(());
            }
            if let Some(status) = self.qemu.try_wait()? {
                bail!(
                    "QEMU has ended: {status}; see {}",
                    console.with_file_name("qemu.log").display()
                );
            }
            if start.elapsed() > BOOT_LIMIT {
                bail!("the guest does not answer; see {}", console.display());
            }
            thread::sleep(Duration::from_millis(300));
        }
    }

    /// Runs a shell command in the guest for at most `limit` seconds.
    pub(crate) fn run(&self, command: &str, limit: u64) -> Result<Output> {
        self.start_command(command, limit)?.wait()
    }

    /// Runs a shell command, and fails if it fails.
    pub(crate) fn must(&self, command: &str, limit: u64) -> Result<String> {
        let out = self.run(command, limit)?;
        if out.code != 0 {
            bail!(
                "in the guest: {command}: exit {}: {}",
                out.code,
                out.text.trim()
            );
        }
        Ok(out.text)
    }

    /// Starts a shell command in the guest. Dropping the value kills the command.
    pub(crate) fn start_command(&self, command: &str, limit: u64) -> Result<Running> {
        let mut stream = TcpStream::connect_timeout(&self.agent, Duration::from_secs(10))?;
        stream.write_all(format!("{limit} {}\n{command}", command.len()).as_bytes())?;
        stream.set_read_timeout(Some(Duration::from_secs(limit + 30)))?;
        Ok(Running {
            stream,
            seen: Vec::new(),
        })
    }

    /// Waits until a program in the guest listens.
    pub(crate) fn listens(&self, port: u16, server: &mut Running) -> Result<()> {
        let command = format!(
            "for i in $(seq 200); do
            grep -q ':{port:04X} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6 && exit 0
            usleep 50000
            done; exit 1"
        );
        if self.run(&command, LISTEN_LIMIT.as_secs())?.code != 0 {
            bail!("the guest's server does not listen: {}", server.said());
        }
        Ok(())
    }

    /// Returns the namespace of the TAP device.
    pub(crate) fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
    }

    /// Returns the address at which programs on this machine reach a port of the guest. Fails if
    /// the port is not forwarded.
    pub(crate) fn reach(&self, net: Net, port: u16) -> Result<SocketAddr> {
        match net {
            Net::Tap => Ok((GUEST_TAP, port).into()),
            Net::User => {
                let found = self.forwards.iter().find(|(guest, _)| *guest == port);
                let (_, here) = found.with_context(|| format!("port {port} is not forwarded"))?;
                Ok((Ipv4Addr::LOCALHOST, *here).into())
            }
        }
    }

    /// Returns the guest's own address.
    pub(crate) const fn address(net: Net) -> Ipv4Addr {
        match net {
            Net::User => GUEST_USER,
            Net::Tap => GUEST_TAP,
        }
    }

    /// Returns the address on which programs of this machine listen, and the guest's address for
    /// it.
    pub(crate) const fn host(net: Net) -> (Ipv4Addr, Ipv4Addr) {
        match net {
            Net::User => (Ipv4Addr::LOCALHOST, HOST_USER),
            Net::Tap => (HOST_TAP, HOST_TAP),
        }
    }

    /// Reloads siw with these module parameters, or the unmodified driver if there are none.
    pub(crate) fn load_siw(&self, parameters: &str) -> Result<()> {
        self.must(&format!("siw-load {parameters}"), 60).map(drop)
    }

    /// Returns the messages of the guest's kernel since the last call.
    pub(crate) fn kernel_messages(&self) -> String {
        self.run("dmesg -c", 20)
            .map(|out| out.text)
            .unwrap_or_default()
    }
}

impl Guest {
    /// Plugs the cable in, or unplugs it.
    pub(crate) fn plug(&self, is_in: bool) -> Result<()> {
        let word = if is_in { "on" } else { "off" };
        let mut stream = TcpStream::connect_timeout(&self.monitor, Duration::from_secs(10))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut prompts = BufReader::new(stream.try_clone()?);
        // QEMU prints a prompt before the command, echoes the command, and prints a prompt after
        // it.
        for command in [Some(format!("set_link cable {word}\n")), None] {
            prompts.read_until(b')', &mut Vec::new())?;
            stream.write_all(command.unwrap_or_default().as_bytes())?;
        }
        Ok(())
    }

    /// Kills QEMU. The guest cannot be used afterwards.
    pub(crate) fn kill(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // The kernel removes the TAP device when QEMU ends.
        self.kill();
        if let Some(namespace) = &self.namespace {
            let _ = ip().args(["netns", "del", namespace]).status();
        }
    }
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct Output {
    /// Exit status; 124 if the command was killed at its time limit.
    pub(crate) code: i32,
    /// Its output.
    pub(crate) text: String,
}

/// A running command in the guest. Dropping it kills the command.
pub(crate) struct Running {
    stream: TcpStream,
    seen: Vec<u8>,
}

impl Running {
    /// Waits until the command exits.
    pub(crate) fn wait(self) -> Result<Output> {
        self.finish(None)
    }

    /// Waits at most `seconds` for the command to exit. After that, kills it and returns status
    /// 124.
    pub(crate) fn wait_at_most(self, seconds: u64) -> Result<Output> {
        self.finish(Some(Instant::now() + Duration::from_secs(seconds)))
    }

    fn finish(mut self, end: Option<Instant>) -> Result<Output> {
        if end.is_some() {
            self.stream
                .set_read_timeout(Some(Duration::from_millis(200)))?;
        }
        loop {
            match self.more() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => match end {
                    Some(end) if Instant::now() < end => {}
                    Some(_) => {
                        return Ok(Output {
                            code: 124,
                            text: String::from_utf8_lossy(&self.seen).into_owned(),
                        });
                    }
                    None => return Err(error),
                },
            }
        }
        let at = self
            .seen
            .iter()
            .rposition(|octet| *octet == 0)
            .context("the guest's answer has no end")?;
        let code = std::str::from_utf8(&self.seen[at + 1..])?.parse()?;
        self.seen.truncate(at);
        Ok(Output {
            code,
            text: String::from_utf8_lossy(&self.seen).into_owned(),
        })
    }

    /// Returns the output so far. Waits at most 0.3 s for more.
    pub(crate) fn said(&mut self) -> String {
        let _ = self
            .stream
            .set_read_timeout(Some(Duration::from_millis(300)));
        while matches!(self.more(), Ok(true)) {}
        String::from_utf8_lossy(&self.seen).trim().to_owned()
    }

    /// Returns `true` if [`said`](Self::said) has read the command's exit status.
    pub(crate) fn is_over(&self) -> bool {
        self.seen.contains(&0)
    }

    fn more(&mut self) -> Result<bool> {
        let mut buffer = [0; 4096];
        let n = self
            .stream
            .read(&mut buffer)
            .context("the guest does not answer")?;
        self.seen.extend_from_slice(&buffer[..n]);
        Ok(n > 0)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The guest's agent kills the command when the connection closes.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Returns a command that the kernel kills when this program exits or is killed.
pub(crate) fn tied(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Deletes namespaces of killed runs, whose names contain the id of a process that no longer
/// exists.
fn remove_stale_namespaces() {
    let Ok(out) = ip().args(["netns", "list"]).output() else {
        return;
    };
    for line in String::from_utf8_lossy(&out.stdout).lines() {
        let name = line.split_whitespace().next().unwrap_or_default();
        let id = name
            .strip_prefix("iwarp")
            .and_then(|id| id.parse::<u32>().ok());
        if id.is_some_and(|id| !Path::new("/proc").join(id.to_string()).exists()) {
            let _ = ip().args(["netns", "del", name]).status();
        }
    }
}

/// Returns QEMU's options for a network card. The guest identifies it by `number`, the last byte of
/// its MAC address.
fn card(net: &str, number: u8) -> String {
    format!("virtio-net-pci,netdev={net},mac=52:54:00:69:77:{number:02x},romfile=")
}

fn ip() -> Command {
    Command::new(sbin("ip"))
}

/// Returns ports of 127.0.0.1 that are free now.
fn free_ports(count: usize) -> Result<Vec<u16>> {
    let listeners: Vec<_> = (0..count)
        .map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
        .collect::<std::io::Result<_>>()?;
    listeners
        .iter()
        .map(|listener| Ok(listener.local_addr()?.port()))
        .collect()
}

/// Returns the last lines of an output as one line.
pub(crate) fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| {
            !line.is_empty()
                && !line.starts_with("---")
                && !line.starts_with("GID")
                && !line.contains(" : ")
                && !line.contains("address: LID")
        })
        .collect();
    lines[lines.len().saturating_sub(14)..].join(" / ")
}

/// Replaces `{addr}` and `{port}`.
pub(crate) fn fill(words: &str, address: impl ToString, port: u16) -> String {
    words
        .replace("{addr}", &address.to_string())
        .replace("{port}", &port.to_string())
}
