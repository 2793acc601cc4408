//! QEMU's live migration over RDMA. The guest runs a BIOS of 64 KiB that increments a counter and
//! writes it to one page after another, so that pages change while QEMU sends them. Another part of
//! the guest's memory is filled in advance and does not change.

use std::io::{BufRead as _, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::checks::noise;
use super::program::{POLL_INTERVAL, Program};
use super::stage::Stage;
use crate::case::{Case, Verdict};

pub(super) fn cases() -> Vec<Case<Stage>> {
    let case = |what, pin| {
        Case::new("qemu-system-x86_64", what, move |stage| migrate(stage, pin))
            .needs(&["qemu-system-x86"])
    };
    vec![
        // QEMU refuses IPv6 unless the device is InfiniBand.
        case("migration over `rdma:`", false),
        case("migration with rdma-pin-all", true),
    ]
}

const MEMORY_MIB: usize = 64;
/// Address and length of the memory that is filled in advance.
const FILLED: (usize, usize) = (16 << 20, 32 << 20);
/// Address and length of conventional memory.
const LOW: (usize, usize) = (0, 640 << 10);
/// Address of the counter.
const COUNTER: usize = 0x7e00;
/// Address of the first page and number of the pages to which the guest writes the counter.
const PAGES: (usize, usize) = (0x2_0000, 64);

/// The guest's program, which runs in real mode.
///
/// Without hardware virtualization, QEMU detects writes only when it creates or marks a TLB entry.
/// On a busy machine it misses some entries at the start of a migration, and never sends data
/// written through them, even over `tcp:` (1 of 89 migrations). So the guest invalidates the
/// entries before each write.
#[rustfmt::skip]
const CODE: &[u8] = &[
    0x31, 0xc0,                         //        xor ax, ax
    0x8e, 0xd8,                         //        mov ds, ax
    0x0f, 0x01, 0x3e, 0x00, 0x7e,       // again: invlpg [0x7e00]
    0x66, 0xff, 0x06, 0x00, 0x7e,       //        inc dword [0x7e00]
    0xa1, 0x00, 0x7e,                   //        mov ax, [0x7e00]
    0x83, 0xe0, 0x3f,                   //        and ax, 63
    0x88, 0xc4,                         //        mov ah, al
    0xb0, 0x00,                         //        mov al, 0
    0x05, 0x00, 0x20,                   //        add ax, 0x2000
    0x8e, 0xc0,                         //        mov es, ax
    0x26, 0x0f, 0x01, 0x3e, 0x00, 0x00, //        invlpg [es:0]
    0x66, 0xa1, 0x00, 0x7e,             //        mov eax, [0x7e00]
    0x26, 0x66, 0xa3, 0x00, 0x00,       //        mov [es:0], eax
    0xeb, 0xd6,                         //        jmp again
];

/// Returns the BIOS image: the program, and a jump to it at the reset vector.
fn bios() -> Vec<u8> {
    const START: usize = 0xe000;
    const RESET: usize = 0xfff0;
    let mut image = vec![0u8; 1 << 16];
    image[START..START + CODE.len()].copy_from_slice(CODE);
    let distance = (START as i32 - (RESET as i32 + 3)) as i16;
    image[RESET] = 0xe9;
    image[RESET + 1..RESET + 3].copy_from_slice(&distance.to_le_bytes());
    image
}

struct Guest<'a> {
    stage: &'a Stage,
    name: &'static str,
    program: Program,
    monitor: BufReader<UnixStream>,
}

impl<'a> Guest<'a> {
    fn start(stage: &'a Stage, name: &'static str, more: &[&str]) -> Result<Self> {
        let memory = format!("{MEMORY_MIB}");
        let monitor = format!("unix:{name}.sock,server=on,wait=off");
        #[rustfmt::skip]
        let mut words = vec![
            "qemu-system-x86_64", "-accel", "tcg", "-m", &memory, "-display", "none", "-nodefaults",
            "-bios", "bios.bin", "-qmp", &monitor,
        ];
        words.extend(more);
        let mut program = stage.start(&words)?;
        let path = stage.dir().join(format!("{name}.sock"));
        let stream = loop {
            if let Ok(stream) = UnixStream::connect(&path) {
                break stream;
            }
            if let Some(status) = program.poll()? {
                bail!("QEMU exited ({status}): {}", program.output_so_far());
            }
            if stage.time_left().is_zero() {
                bail!("QEMU did not open its monitor socket");
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        stream.set_read_timeout(Some(stage.time_left().max(Duration::from_secs(1))))?;
        let mut guest = Self {
            stage,
            name,
            program,
            monitor: BufReader::new(stream),
        };
        guest.line()?;
        guest.command("qmp_capabilities", &json!({}))?;
        Ok(guest)
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.monitor
            .read_line(&mut line)
            .with_context(|| format!("{}: no reply from QEMU", self.name))?;
        if line.is_empty() {
            let describe_exit = self.describe_exit()?;
            bail!("{}: {describe_exit}", self.name);
        }
        Ok(serde_json::from_str(&line)?)
    }

    fn command(&mut self, name: &str, arguments: &Value) -> Result<Value> {
        let request = json!({ "execute": name, "arguments": arguments });
        if let Err(error) = send(self.monitor.get_mut(), &request) {
            let describe_exit = self.describe_exit()?;
            bail!("{}: {name}: {error}; {describe_exit}", self.name);
        }
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                bail!("{}: {name}: {error}", self.name);
            }
            // A line without `return` or `error` is an event.
            if answer.get("return").is_some() {
                return Ok(answer["return"].take());
            }
        }
    }

    /// Describes how QEMU exited after it closed its monitor. Waits for the process, because it may
    /// exit a little later.
    fn describe_exit(&mut self) -> Result<String> {
        const PATIENCE: Duration = Duration::from_secs(5);
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.program.poll()? {
                break status.to_string();
            }
            if start.elapsed() > PATIENCE {
                break "still running, but the monitor is closed".into();
            }
            std::thread::sleep(POLL_INTERVAL);
        };
        Ok(format!("QEMU: {status}: {}", self.program.output_so_far()))
    }

    fn query_field(&mut self, name: &str, field: &str) -> Result<String> {
        let answer = self.command(name, &json!({}))?;
        Ok(answer[field].as_str().unwrap_or_default().to_owned())
    }

    fn memory(&mut self, (at, len): (usize, usize)) -> Result<Vec<u8>> {
        let file = self.stage.dir().join(format!("{}.memory", self.name));
        let arguments = json!({ "val": at, "size": len, "filename": file });
        self.command("pmemsave", &arguments)?;
        let found = std::fs::read(&file)?;
        if found.len() != len {
            bail!(
                "QEMU saved {} bytes of memory instead of {len}",
                found.len()
            );
        }
        Ok(found)
    }

    fn counter(&mut self) -> Result<u32> {
        Ok(word(&self.memory((COUNTER, 4))?, 0))
    }

    fn pin_all(&mut self) -> Result<()> {
        let arguments =
            json!({ "capabilities": [{ "capability": "rdma-pin-all", "state": true }] });
        self.command("migrate-set-capabilities", &arguments)?;
        Ok(())
    }

    fn wait_until_counting(&mut self) -> Result<u32> {
        let first = self.counter()?;
        loop {
            let now = self.counter()?;
            if now != first {
                return Ok(now);
            }
            if self.stage.time_left().is_zero() {
                bail!("{}: the guest's counter does not change", self.name);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Writes a request with one system call. QEMU executes a request when it reads the closing brace,
/// and closes the socket after `quit`, so a separate write of the newline could fail.
fn send(monitor: &mut impl Write, request: &Value) -> std::io::Result<()> {
    monitor.write_all(format!("{request}\n").as_bytes())
}

fn word(octets: &[u8], at: usize) -> u32 {
    octets
        .get(at..at + 4)
        .and_then(|w| w.try_into().ok())
        .map_or(0, u32::from_le_bytes)
}

/// Returns a description of the pages that differ, or `None` if all are equal. It shows the first
/// differing word of each page: an old counter means that the page was not sent again, any other
/// value that it was corrupted.
fn differences(source: &[u8], destination: &[u8]) -> Option<String> {
    const PAGE: usize = 4096;
    const NAMED: usize = 8;
    let pages = source.len() / PAGE;
    let differs = |page: &usize| {
        let octets = page * PAGE..(page + 1) * PAGE;
        source.get(octets.clone()) != destination.get(octets)
    };
    let different: Vec<usize> = (0..pages).filter(differs).collect();
    let describe = |page: &usize| {
        let mut words = (page * PAGE..(page + 1) * PAGE).step_by(4);
        let at = words.find(|&at| word(source, at) != word(destination, at));
        let at = at.unwrap_or(page * PAGE);
        let (sent, received) = (word(source, at), word(destination, at));
        format!("{at:#x} contains {received:#x} instead of {sent:#x}")
    };
    let named: Vec<String> = different.iter().take(NAMED).map(describe).collect();
    let count = word(source, COUNTER);
    (!different.is_empty()).then(|| {
        format!(
            "{} of {pages} pages differ, at a count of {count:#x}: {}",
            different.len(),
            named.join(", ")
        )
    })
}

fn migrate(stage: &Stage, pin: bool) -> Result<Verdict> {
    let filling = noise(3, FILLED.1);
    std::fs::write(stage.dir().join("bios.bin"), bios())?;
    std::fs::write(stage.dir().join("filling.bin"), &filling)?;
    let loader = format!("loader,file=filling.bin,addr={:#x},force-raw=on", FILLED.0);
    let uri = format!("rdma:127.0.0.1:{}", stage.port()?);
    let mut from = Guest::start(stage, "from", &["-device", &loader])?;
    // With -S the guest stays stopped after the migration, so that the memory of source and
    // destination can be compared.
    let mut to = Guest::start(stage, "to", &["-S", "-incoming", "defer"])?;
    if pin {
        from.pin_all()?;
        to.pin_all()?;
    }
    to.command("migrate-incoming", &json!({ "uri": uri }))?;
    from.wait_until_counting()?;
    let fast = json!({ "max-bandwidth": 1u64 << 32 });
    from.command("migrate-set-parameters", &fast)?;
    from.command("migrate", &json!({ "uri": uri }))?;
    for guest in [&mut from, &mut to] {
        loop {
            match guest.query_field("query-migrate", "status")?.as_str() {
                "completed" => break,
                "failed" | "cancelled" => {
                    bail!(
                        "{}: migration failed: {}",
                        guest.name,
                        guest.program.output_so_far()
                    )
                }
                status if stage.time_left().is_zero() => {
                    bail!("{}: migration is {status}", guest.name)
                }
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }
    let status = from.query_field("query-status", "status")?;
    if status != "postmigrate" {
        bail!("the source's status is {status} after the migration");
    }
    // Compare the filled memory, and then all memory that the guest may have written to.
    if to.memory(FILLED)? != filling {
        bail!("the memory that was filled in advance was not migrated correctly");
    }
    let (low, left) = (to.memory(LOW)?, from.memory(LOW)?);
    if let Some(differences) = differences(&left, &low) {
        bail!("memory that changed during the migration was not migrated correctly: {differences}");
    }
    let count = word(&low, COUNTER);
    for page in 0..PAGES.1 {
        let left = word(&low, PAGES.0 + page * 4096);
        if left as usize % PAGES.1 != page || count.wrapping_sub(left) > PAGES.1 as u32 {
            bail!("page {page} contains {left} while the counter is {count}");
        }
    }
    to.command("cont", &json!({}))?;
    let status = to.query_field("query-status", "status")?;
    if status != "running" {
        bail!("the destination's status is {status}");
    }
    let after = to.wait_until_counting()?;
    for mut guest in [from, to] {
        guest.command("quit", &json!({}))?;
        guest.program.success()?;
    }
    Ok(Verdict::passed(format!(
        "migrated at count {count}, continued to {after}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_is_one_write() {
        struct Counter(Vec<Vec<u8>>);
        impl Write for Counter {
            fn write(&mut self, octets: &[u8]) -> std::io::Result<usize> {
                self.0.push(octets.to_vec());
                Ok(octets.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let mut monitor = Counter(Vec::new());
        send(&mut monitor, &json!({ "execute": "quit" })).unwrap();
        assert_eq!(monitor.0, [b"{\"execute\":\"quit\"}\n".to_vec()]);
    }

    #[test]
    fn differences_are_named() {
        let source = vec![7u8; LOW.1];
        assert_eq!(differences(&source, &source), None);
        let mut destination = source.clone();
        destination[0x2_0002] = 8;
        let output = differences(&source, &destination).unwrap();
        assert!(output.contains("1 of 160 pages"), "{output}");
        assert!(
            output.contains("0x20000 contains 0x7080707 instead of 0x7070707"),
            "{output}"
        );
    }

    #[test]
    fn jumps_have_right_targets() {
        let loop_start = 4;
        let [.., opcode, distance] = CODE else {
            unreachable!("it has a jump")
        };
        assert_eq!(*opcode, 0xeb);
        let end = CODE.len() as i32;
        assert_eq!(end + i32::from(*distance as i8), loop_start);
        let image = bios();
        let jump = i16::from_le_bytes([image[0xfff1], image[0xfff2]]);
        assert_eq!(0xfff3 + i32::from(jump), 0xe000);
        assert_eq!(&image[0xe000..0xe000 + CODE.len()], CODE);
    }
}
