//! Runs guests: QEMU, the guest's networks, and shell commands in the guest.
//!
//! It kills only processes that this program started, by id, and deletes only network namespaces
//! whose names contain its process id or that of a process that no longer exists.

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

/// Time limit for booting a guest on a busy machine.
const BOOT_LIMIT: Duration = Duration::from_secs(300);

/// Time limit for a server to start listening.
pub(crate) const LISTEN_LIMIT: Duration = Duration::from_secs(30);

/// On a busy host the emulated timer is late. Without `no_timer_check`, the kernel would panic;
/// without `tsc=reliable`, it would not trust the TSC, and use a clock whose reads take
/// microseconds.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 loglevel=4 panic=-1 no_timer_check tsc=reliable \
                                rdinit=/init net.ifnames=0";

/// The guest's address in the user-mode network.
pub(crate) const GUEST_USER: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
pub(crate) const GUEST_TAP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// The address by which the guest reaches 127.0.0.1 of this machine.
const HOST_USER: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
pub(crate) const HOST_TAP: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
pub(crate) const HOST_TAP_V6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1);

/// Ports on which the guest may listen. In the user-mode network, QEMU forwards a free port of this
/// machine to each.
pub(crate) const GUEST_PORTS: std::ops::Range<u16> = 7100..7116;

/// The network between the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Net {
    /// QEMU's user-mode network. QEMU terminates TCP, so segment boundaries are not preserved.
    User,
    /// A TAP device in a network namespace: end-to-end TCP, MSS 1460, no offloads.
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

/// One end of a virtual cable between two guests. The QEMU processes exchange each frame in a UDP
/// datagram. With TCP, the stream could stop in the middle of a frame when a guest is killed.
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
        let [own, peer] = self.ports;
        [
            "-netdev".to_owned(),
            format!("socket,id=cable,udp=127.0.0.1:{peer},localaddr=127.0.0.1:{own}"),
            "-device".to_owned(),
            card("cable", self.card),
        ]
    }
}

/// What the guest's clock measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Clock {
    /// The time of this machine. The guest has two processors.
    Wall,
    /// The instructions that the guest has executed. It has one processor.
    Instructions,
}

impl Clock {
    /// Returns QEMU's options for the processors.
    const fn options(self) -> &'static [&'static str] {
        match self {
            Self::Wall => &["-accel", "tcg,thread=multi", "-smp", "2"],
            // Two nanoseconds per instruction, and no waiting while the guest is idle.
            Self::Instructions => &[
                "-accel",
                "tcg,thread=single",
                "-smp",
                "1",
                "-icount",
                "shift=1,sleep=off",
            ],
        }
    }
}

/// The configuration of a guest.
pub(crate) struct Machine {
    pub(crate) clock: Clock,
    /// Adds the TAP device, which needs root.
    pub(crate) tap: bool,
    /// Adds a card that is connected to another guest.
    pub(crate) cable: Option<Cable>,
    /// Adds this file as the disk `/dev/vda`. The guest's writes survive a kill of QEMU.
    pub(crate) disk: Option<PathBuf>,
    /// Records the packets of the user-mode network.
    pub(crate) record: bool,
    /// The value of QEMU's option `-cpu`.
    pub(crate) cpu: &'static str,
    /// Further kernel arguments.
    pub(crate) arguments: String,
}

impl Machine {
    /// Returns QEMU's command line without networks and disk.
    fn command(&self, image: &Image, console: &Path) -> Command {
        let mut command = killed_with_parent("qemu-system-x86_64");
        command
            .args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-display", "none", "-machine", "q35"])
            .args(self.clock.options())
            .args(["-cpu", self.cpu, "-m", "1536"])
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

    /// Adds the options for TAP device, cable, disk and recording.
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
            let port = ports.next().context("too few free ports")?;
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
        guest.wait_until_up(&console)?;
        Ok(guest)
    }

    /// Waits until QEMU has created the TAP device, and moves it into a network namespace.
    fn tap(&mut self, namespace: &str, device: &str, log: &mut Log) -> Result<()> {
        let start = Instant::now();
        while !Path::new("/sys/class/net").join(device).exists() {
            if start.elapsed() > Duration::from_secs(20) || self.qemu.try_wait()?.is_some() {
                bail!("QEMU did not create the TAP device");
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

    fn wait_until_up(&mut self, console: &Path) -> Result<()> {
        let start = Instant::now();
        loop {
            if let Ok(out) = self.run("true", 20)
                && out.code == 0
            {
                return Ok(());
            }
            if let Some(status) = self.qemu.try_wait()? {
                bail!(
                    "QEMU exited: {status}; see {}",
                    console.with_file_name("qemu.log").display()
                );
            }
            if start.elapsed() > BOOT_LIMIT {
                bail!("the guest did not boot in time; see {}", console.display());
            }
            thread::sleep(Duration::from_millis(300));
        }
    }

    /// Runs a shell command in the guest for at most `limit` seconds.
    pub(crate) fn run(&self, command: &str, limit: u64) -> Result<Output> {
        self.start_command(command, limit)?.wait()
    }

    /// Runs a shell command and returns its output. Fails if the command fails.
    pub(crate) fn run_checked(&self, command: &str, limit: u64) -> Result<String> {
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

    /// Waits until a server in the guest listens on `port`.
    pub(crate) fn listens(&self, port: u16, server: &mut Running) -> Result<()> {
        let command = format!(
            "for i in $(seq 200); do
            grep -q ':{port:04X} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6 && exit 0
            usleep 50000
            done; exit 1"
        );
        if self.run(&command, LISTEN_LIMIT.as_secs())?.code != 0 {
            bail!(
                "the server in the guest does not listen; its output: {}",
                server.output_so_far()
            );
        }
        Ok(())
    }

    /// Returns the namespace of the TAP device.
    pub(crate) fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
    }

    /// Returns the address to which programs on this machine connect to reach a port of the guest.
    /// Fails if the port is not forwarded.
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

    /// Returns the address on which servers of this machine listen, and the address by which the
    /// guest reaches it.
    pub(crate) const fn host(net: Net) -> (Ipv4Addr, Ipv4Addr) {
        match net {
            Net::User => (Ipv4Addr::LOCALHOST, HOST_USER),
            Net::Tap => (HOST_TAP, HOST_TAP),
        }
    }

    /// Reloads siw with these module parameters, or the unmodified driver if `parameters` is empty.
    pub(crate) fn load_siw(&self, parameters: &str) -> Result<()> {
        self.run_checked(&format!("siw-load {parameters}"), 60)
            .map(drop)
    }

    /// Returns the kernel's messages since the last call.
    pub(crate) fn kernel_messages(&self) -> String {
        self.run("dmesg -c", 20)
            .map(|out| out.text)
            .unwrap_or_default()
    }
}

impl Guest {
    /// Plugs the cable in or unplugs it.
    pub(crate) fn plug(&self, plugged: bool) -> Result<()> {
        let word = if plugged { "on" } else { "off" };
        let mut stream = TcpStream::connect_timeout(&self.monitor, Duration::from_secs(10))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut prompts = BufReader::new(stream.try_clone()?);
        // QEMU prints a prompt, which ends with `)`, before and after each command.
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
    /// Standard output and standard error.
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
        self.wait_until(None)
    }

    /// Waits at most `seconds` for the command to exit. After that, kills it and returns status
    /// 124.
    pub(crate) fn wait_at_most(self, seconds: u64) -> Result<Output> {
        self.wait_until(Some(Instant::now() + Duration::from_secs(seconds)))
    }

    fn wait_until(mut self, deadline: Option<Instant>) -> Result<Output> {
        if deadline.is_some() {
            self.stream
                .set_read_timeout(Some(Duration::from_millis(200)))?;
        }
        loop {
            match self.receive() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => match deadline {
                    Some(deadline) if Instant::now() < deadline => {}
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
        let status_start = self
            .seen
            .iter()
            .rposition(|octet| *octet == 0)
            .context("the agent sent no exit status")?;
        let code = std::str::from_utf8(&self.seen[status_start + 1..])?.parse()?;
        self.seen.truncate(status_start);
        Ok(Output {
            code,
            text: String::from_utf8_lossy(&self.seen).into_owned(),
        })
    }

    /// Returns the output so far, including what arrives within 0.3 s.
    pub(crate) fn output_so_far(&mut self) -> String {
        let _ = self
            .stream
            .set_read_timeout(Some(Duration::from_millis(300)));
        while matches!(self.receive(), Ok(true)) {}
        String::from_utf8_lossy(&self.seen).trim().to_owned()
    }

    /// Returns `true` if the exit status of the command has been received.
    pub(crate) fn is_over(&self) -> bool {
        self.seen.contains(&0)
    }

    fn receive(&mut self) -> Result<bool> {
        let mut buffer = [0; 4096];
        let n = self
            .stream
            .read(&mut buffer)
            .context("the guest's agent does not respond")?;
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

/// Returns a command whose process is killed when this program exits or is killed.
pub(crate) fn killed_with_parent(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Deletes namespaces that killed runs left behind: their names contain the id of a process that no
/// longer exists.
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

/// Returns ports of 127.0.0.1 that are currently free.
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

/// Replaces `{addr}` and `{port}` in a command line.
pub(crate) fn fill(words: &str, address: impl ToString, port: u16) -> String {
    words
        .replace("{addr}", &address.to_string())
        .replace("{port}", &port.to_string())
}
