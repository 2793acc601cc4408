//! Runs the distribution's programs between our module in a guest and a peer: the module itself,
//! our library on this machine, or the kernel's siw in a second guest. Each program runs in both
//! directions, over IPv4 and, if it supports IPv6, over IPv6.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;

use anyhow::{Result, bail};
use clap::ValueEnum;
use xtask::context::Context;
use xtask::process::Log;

use super::boot::Boot;
use super::ends::{Endpoint, Family, Ports};
use super::script;
use super::suite;
use crate::case::Verdict;
use crate::complaints;
use crate::excuses;
use crate::guest::host::Host;
use crate::guest::image::Image;
use crate::guest::{Cable, GUEST_TAP, GUEST_USER, Guest, Machine, Output, last_lines};
use crate::needs::{self, Suite};
use crate::programs::{self, Program};
use crate::rows::{Attempt, Rows};
use crate::siw;

/// The other end of the module's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// Both ends on the module, in one guest
    Itself,
    /// Our library on this machine, over a TAP device (needs root)
    Library,
    /// The kernel's siw in a second guest
    Siw,
}

/// The programs that `--few` runs.
const FEW: &[&str] = &[
    "rping",
    "ucmatose",
    "rstream",
    "ib_write_bw-65536",
    "ib_read_lat-64",
    "ib_send_bw-4096",
];

/// Selects the rows to run.
pub(crate) struct Selection<'a> {
    pub(crate) peers: &'a [Peer],
    /// If not empty, only rows whose titles contain one of these texts.
    pub(crate) only: &'a [String],
    /// Only [`FEW`].
    pub(crate) few: bool,
    /// Kernel storage instead of programs.
    pub(crate) storage: bool,
}

impl Selection<'_> {
    /// Returns `true` if a row runs. `name` is the program, `title` also names the ends.
    fn selects(&self, name: &str, title: &str) -> bool {
        (!self.few || FEW.contains(&name))
            && (self.only.is_empty() || self.only.iter().any(|text| title.contains(text)))
    }
}

/// A network card of a guest, its RDMA device, and its addresses.
pub(crate) struct Card {
    netdev: &'static str,
    device: &'static str,
    v4: Ipv4Addr,
    v6: Ipv6Addr,
}

const fn v6(net: u16, host: u16) -> Ipv6Addr {
    Ipv6Addr::new(net, 0, 0, 0, 0, 0, 0, host)
}

pub(crate) const USER: Card = Card {
    netdev: "user0",
    device: "iwarp0",
    v4: GUEST_USER,
    v6: v6(0xfd02, 15),
};
const TAP: Card = Card {
    netdev: "tap0",
    device: "iwarp1",
    v4: GUEST_TAP,
    v6: v6(0xfd77, 2),
};
pub(crate) const CABLE: Card = Card {
    netdev: "cable0",
    device: "iwarp2",
    v4: Ipv4Addr::new(10, 78, 0, 1),
    v6: v6(0xfd78, 1),
};
const SIW: Card = Card {
    netdev: "cable0",
    device: "siw0",
    v4: Ipv4Addr::new(10, 78, 0, 2),
    v6: v6(0xfd78, 2),
};

impl Card {
    /// Adds the RDMA device to the card.
    pub(crate) fn link(&self, guest: &Guest, kind: &str) -> Result<()> {
        let Self {
            netdev, device, v6, ..
        } = self;
        let script = format!(
            "rdma link add {device} type {kind} netdev {netdev} &&
                /usr/bin/ip -6 addr add {v6}/64 dev {netdev} nodad
            for i in $(seq 50); do [ -e /dev/infiniband/rdma_cm ] && exit 0; sleep 0.1; done
            exit 1"
        );
        guest.run_checked(&script, 60).map(drop)
    }

    pub(crate) const fn end<'a>(&self, guest: &'a Guest) -> Endpoint<'a> {
        Endpoint::Device {
            guest,
            device: self.device,
            v4: self.v4,
            v6: self.v6,
        }
    }
}

/// Boots the guests, runs the rows, and prints the table. Returns the number of failed rows.
///
/// Fails if a guest does not start, or the module leaks memory.
pub(crate) fn run(
    context: &Context,
    selection: &Selection<'_>,
    boot: &Boot,
    image: &Image,
    cache: &Path,
    log: &mut Log,
) -> Result<usize> {
    let selects = |peer| selection.peers.contains(&peer);
    let host = if selects(Peer::Library) {
        if !rustix::process::geteuid().is_root() {
            bail!("`--with library` needs root, for the TAP device");
        }
        needs::require_packages(Suite::Siw, log)?;
        Some(Host::build(context, cache, log)?)
    } else {
        None
    };
    let [first, second] = Cable::ends()?;
    let machine = Machine {
        tap: selects(Peer::Library),
        cable: selects(Peer::Siw).then_some(first),
        disk: None,
        ..boot.machine()
    };
    log.say(format!("booting Linux {}", image.release));
    let guest = Guest::start(image, cache, &machine, log)?;
    boot.forget_leaks(&guest)?;
    guest.run_checked("insmod /lib/iwarp/iwarp_rnic.ko", 60)?;
    USER.link(&guest, "iwarp")?;
    let other = if selects(Peer::Siw) {
        CABLE.link(&guest, "iwarp")?;
        Some(siw_guest(boot, image, cache, second, log)?)
    } else {
        None
    };
    if selects(Peer::Library) {
        TAP.link(&guest, "iwarp")?;
    }
    guest.kernel_messages();
    let mut matrix = Matrix {
        guest: &guest,
        boot,
        selection,
        ports: Ports::default(),
        rows: Rows::default(),
    };
    matrix.run(host.as_ref(), other.as_ref(), log)?;
    let mut failed = matrix.rows.print(log);
    drop(other);
    let guest = match host {
        Some(host) if selection.storage => {
            let selects = |title: &str| selection.selects("", title);
            let (guest, more) = siw::iser(guest, host, cache, selects, log)?;
            failed += more;
            guest
        }
        _ => guest,
    };
    script::unload(&guest, boot.limit(60))?;
    boot.check_leaks(&guest, log)?;
    Ok(failed)
}

/// Boots the second guest, and loads siw.
fn siw_guest(
    boot: &Boot,
    image: &Image,
    cache: &Path,
    second: Cable,
    log: &mut Log,
) -> Result<Guest> {
    let cache = cache.join("second");
    std::fs::create_dir_all(&cache)?;
    let machine = Machine {
        cable: Some(second),
        disk: None,
        ..boot.machine()
    };
    log.say("booting the guest with siw");
    let guest = Guest::start(image, &cache, &machine, log)?;
    guest.run_checked("insmod /lib/siw/siw.ko", 60)?;
    SIW.link(&guest, "siw")?;
    guest.kernel_messages();
    Ok(guest)
}

struct Matrix<'a> {
    guest: &'a Guest,
    boot: &'a Boot,
    selection: &'a Selection<'a>,
    ports: Ports,
    rows: Rows,
}

impl Matrix<'_> {
    /// Runs all selected rows.
    fn run(&mut self, host: Option<&Host>, siw: Option<&Guest>, log: &mut Log) -> Result<()> {
        let guest = self.guest;
        if self.selection.peers.contains(&Peer::Itself) {
            let end = USER.end(guest);
            self.run_direction(&end, &end, "module->module", None, log)?;
            self.suite(log)?;
        }
        if let (Some(host), false) = (host, self.selection.storage) {
            let (ours, library) = (TAP.end(guest), Endpoint::Library { host, guest });
            self.run_direction(&ours, &library, "module->library", None, log)?;
            self.run_direction(&library, &ours, "library->module", None, log)?;
        }
        if let Some(other) = siw {
            let (ours, theirs) = (CABLE.end(guest), SIW.end(other));
            self.run_direction(&ours, &theirs, "module->siw", siw, log)?;
            self.run_direction(&theirs, &ours, "siw->module", siw, log)?;
        }
        Ok(())
    }

    /// Runs all programs in one direction.
    fn run_direction(
        &mut self,
        client: &Endpoint<'_>,
        server: &Endpoint<'_>,
        direction: &str,
        siw: Option<&Guest>,
        log: &mut Log,
    ) -> Result<()> {
        let programs = if self.selection.storage {
            programs::storage()
        } else {
            programs::all(true)
        };
        for program in programs {
            for family in [Family::V4, Family::V6] {
                let title = format!("{} {direction} {family}", program.name);
                let supported = (family == Family::V4 || program.rules.ipv6)
                    && (siw.is_none() || program.rules.siw)
                    && (self.boot.has_rebuilt_modules() || !program.rules.needs_rebuilt_modules);
                if !supported || !self.selection.selects(&program.name, &title) {
                    continue;
                }
                let guest = self.guest;
                let (ports, limit) = (&self.ports, self.boot.limit(program.rules.limit));
                let kernel_log = self.rows.run(
                    title,
                    log,
                    |log| {
                        let result =
                            run_program(ports, client, server, &program, family, limit, log);
                        attempt(guest, siw, result.map(|(note, _)| note))
                    },
                    |_, error| excuses::known_fault(error),
                    complaints::first,
                )?;
                check_not_crashed(&kernel_log)?;
            }
        }
        Ok(())
    }

    fn suite(&mut self, log: &mut Log) -> Result<()> {
        let title = "rdma-core's own tests (pyverbs) module->module".to_owned();
        if self.selection.storage || !self.selection.selects("pyverbs", &title) {
            return Ok(());
        }
        let (guest, limit) = (self.guest, self.boot.limit(suite::LIMIT));
        let kernel_log = self.rows.run(
            title,
            log,
            |_| {
                let result = suite::run(guest, USER.device, USER.netdev, limit);
                attempt(guest, None, result)
            },
            |_, _| None,
            complaints::first,
        )?;
        check_not_crashed(&kernel_log)
    }
}

/// Fails if the guest's kernel has crashed.
fn check_not_crashed(kernel_log: &str) -> Result<()> {
    if complaints::first(kernel_log).is_some_and(|line| line.contains("BUG:")) {
        bail!("the guest's kernel has crashed");
    }
    Ok(())
}

/// Returns an attempt's result with the kernel messages of the module's guest. siw's kernel may log
/// warnings, but must not crash.
fn attempt(guest: &Guest, siw: Option<&Guest>, mut result: Result<String>) -> Result<Attempt> {
    if let Some(other) = siw {
        let siw_log = other.kernel_messages();
        if let Some(line) = complaints::fatal(&siw_log) {
            bail!("siw's kernel has crashed: {line}");
        }
        if let (Err(error), false) = (&result, siw_log.is_empty()) {
            result = Err(anyhow::anyhow!(
                "{error:#} | siw's kernel: {}",
                siw_log.trim()
            ));
        }
    }
    Ok((result.map(Verdict::Passed), guest.kernel_messages()))
}

/// Runs both ends of a program, and checks their output. Returns the note for the table, and the
/// client's output.
pub(crate) fn run_program(
    ports: &Ports,
    client: &Endpoint<'_>,
    server: &Endpoint<'_>,
    program: &Program,
    family: Family,
    limit: u64,
    log: &mut Log,
) -> Result<(String, String)> {
    client.shell(program.rules.before_client)?;
    let result = run_both_ends(ports, client, server, program, family, limit, log);
    server.shell(program.rules.after)?;
    result
}

/// Like [`run_program`], but without the scripts before and after.
fn run_both_ends(
    ports: &Ports,
    client: &Endpoint<'_>,
    server: &Endpoint<'_>,
    program: &Program,
    family: Family,
    limit: u64,
    log: &mut Log,
) -> Result<(String, String)> {
    let (port, address) = (server.port(ports)?, server.address(family));
    let mut server_process = server.start(&program.server, address, port, limit)?;
    server.listens(&mut server_process, port)?;
    let client_output = client
        .start(&program.client, address, port, limit)?
        .wait(limit)?;
    let server_output = if program.rules.server_stays {
        let text = server_process.output_so_far();
        drop(server_process);
        Output { code: 0, text }
    } else {
        // If the client failed, the server may wait for ever.
        server_process.wait(if client_output.code == 0 { limit } else { 5 })?
    };
    log.line(&server_output.text);
    log.line(&client_output.text);
    if (client_output.code, server_output.code) != (0, 0) {
        bail!(
            "exit status of the client {}: {} | of the server {}: {}",
            client_output.code,
            last_lines(&client_output.text),
            server_output.code,
            last_lines(&server_output.text),
        );
    }
    let note = program.check(&server_output, &client_output)?;
    Ok((note, client_output.text))
}
