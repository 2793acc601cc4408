//! Kernel storage on the module while the network between two machines is cut, or the server
//! crashes.
//!
//! Server and client are two guests with a virtual cable between them, because traffic inside one
//! guest never passes a network card. The server's disk is a file of this machine, so data that the
//! server has acknowledged must survive a crash of the server.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use xtask::process::Log;

use super::boot::Boot;
use super::script::{check_messages, full_script};
use crate::case::{Verdict, is_chosen};
use crate::excuses;
use crate::guest::image::Image;
use crate::guest::{Cable, Guest, Machine, Output, Running};
use crate::rows::Rows;

/// A scenario for the two machines.
struct Scenario {
    name: &'static str,
    /// The server's first script.
    server: &'static str,
    /// The client's script.
    client: &'static str,
    /// The server's script after the server was killed and booted again.
    restarted: &'static str,
    /// The server's last script.
    end: &'static str,
}

/// Lines that the client's script prints to request actions from this program.
const UNPLUG: &str = "@unplug the cable";
const PLUG: &str = "@plug the cable in";
const KILL: &str = "@kill the server";
/// Size of the server's disk in bytes.
const DISK: u64 = 64 << 20;
/// Time limit of one scenario, in seconds.
const LIMIT: u64 = 300;

/// The first lines of each script. `loaded` loads the module and adds a link for the cable. `down
/// N` requests that the cable be unplugged for N seconds, and `killed` that the server be killed,
/// both while `$load` is running. `TRIES` allows for connections that end while the cable is
/// unplugged, which may take another minute.
const PRELUDE: &str = "
TRIES=700
loaded() {
    modprobe virtio_blk
    insmod $MODULE
    rdma link add iwarp0 type iwarp netdev cable0
}
down() {
    sleep 2
    kill -0 $load
    echo '@unplug the cable'
    sleep $1
    kill -0 $load
    echo '@plug the cable in'
}
killed() {
    sleep 2
    kill -0 $load
    echo '@kill the server'
}
";

const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "NVMe over RDMA: the network is down for 5 s under load",
        server: "loaded; nvme-target up one 10.78.0.2 4420 /dev/vda",
        client: "loaded
            disk=$(nvme-disk connect 10.78.0.2 4420 one --reconnect-delay=1)
            nvme-disk verify $disk --loops=2 & load=$!
            down 5
            wait $load
            nvme-disk state live
            nvme-disk disconnect
            unused
            rmmod iwarp_rnic",
        restarted: "",
        end: "nvme-target down one; unused; rmmod iwarp_rnic",
    },
    Scenario {
        name: "NVMe over RDMA: the network is down for 60 s under load",
        server: "loaded; nvme-target up one 10.78.0.2 4420 /dev/vda",
        client: "loaded
            disk=$(nvme-disk connect 10.78.0.2 4420 one --reconnect-delay=1)
            nvme-disk verify $disk --loops=2 & load=$!
            (sleep 50; nvme-disk state connecting) & state=$!
            down 60
            wait $state
            wait $load
            nvme-disk state live
            nvme-disk disconnect
            unused
            rmmod iwarp_rnic",
        restarted: "",
        end: "nvme-target down one; unused; rmmod iwarp_rnic",
    },
    Scenario {
        name: "NVMe over RDMA: the server is killed under load and comes back with its disk",
        server: "loaded; nvme-target up one 10.78.0.2 4420 /dev/vda",
        client: "loaded
            disk=$(nvme-disk connect 10.78.0.2 4420 one --reconnect-delay=1)
            nvme-disk verify $disk --loops=2 & load=$!
            killed
            nvme-disk state connecting
            wait $load
            nvme-disk state live
            nvme-disk disconnect
            unused
            rmmod iwarp_rnic",
        restarted: "loaded; nvme-target up one 10.78.0.2 4420 /dev/vda",
        end: "nvme-target down one; unused; rmmod iwarp_rnic",
    },
    Scenario {
        name: "NVMe over RDMA: the server is killed under load and has no target any more",
        server: "loaded; nvme-target up one 10.78.0.2 4420 /dev/vda",
        client: "loaded
            disk=$(nvme-disk connect 10.78.0.2 4420 one --reconnect-delay=1 --ctrl-loss-tmo=5)
            nvme-disk verify $disk --loops=9 & load=$!
            killed
            refused wait $load
            for i in $(seq 100); do [ -e /sys/class/nvme/nvme0 ] || break; sleep 0.1; done
            rmmod nvme_rdma
            unused
            rmmod iwarp_rnic",
        restarted: "loaded",
        end: "rmmod iwarp_rnic",
    },
    Scenario {
        name: "NFS 4.2 over RDMA: the network is down for 5 s under load",
        server: "loaded; mkfs.ext4 -q -F /dev/vda; nfs-server up 20049 /dev/vda",
        client: "loaded
            nfs-disk mount 10.78.0.2 20049 4.2
            nfs-disk tree & load=$!
            down 5
            wait $load
            nfs-disk unmount
            unused
            rmmod iwarp_rnic",
        restarted: "",
        end: "nfs-server down; unused; rmmod iwarp_rnic",
    },
    Scenario {
        name: "NFS 3 over RDMA: the network is down for 60 s under load",
        server: "loaded; mkfs.ext4 -q -F /dev/vda; nfs-server up 20049 /dev/vda",
        client: "loaded
            nfs-disk mount 10.78.0.2 20049 3
            nfs-disk tree & load=$!
            down 60
            wait $load
            nfs-disk unmount
            unused
            rmmod iwarp_rnic",
        restarted: "",
        end: "nfs-server down; unused; rmmod iwarp_rnic",
    },
    Scenario {
        name: "NFS 3 over RDMA: the server is killed under load and comes back with its disk",
        server: "loaded; mkfs.ext4 -q -F /dev/vda; nfs-server up 20049 /dev/vda",
        client: "loaded
            nfs-disk mount 10.78.0.2 20049 3
            nfs-disk tree & load=$!
            killed
            wait $load
            nfs-disk unmount
            unused
            rmmod iwarp_rnic",
        restarted: "loaded; nfs-server up 20049 /dev/vda",
        end: "nfs-server down; unused; rmmod iwarp_rnic",
    },
    Scenario {
        name: "NFS 4.2 over RDMA: the server is killed under load and comes back with its disk",
        server: "loaded; mkfs.ext4 -q -F /dev/vda; nfs-server up 20049 /dev/vda",
        client: "loaded
            nfs-disk mount 10.78.0.2 20049 4.2
            nfs-disk tree & load=$!
            killed
            wait $load
            nfs-disk unmount
            unused
            rmmod iwarp_rnic",
        restarted: "loaded; nfs-server up 20049 /dev/vda",
        end: "nfs-server down; unused; rmmod iwarp_rnic",
    },
    Scenario {
        name: "iSER: the network is down for 60 s under load",
        server: "loaded; iser-target up iqn.2024-01.example:target 10.78.0.2 3260 96",
        client: "loaded
            iser-disk daemon & daemon=$!
            iser-disk discover 10.78.0.2 3260
            disk=$(iser-disk login | sed -n 's/^disk //p')
            (for i in 1 2 3; do iser-disk fill $disk; done) & load=$!
            down 60
            wait $load
            iser-disk check $disk
            iser-disk logout
            iser-disk forget
            kill -9 $daemon
            wait $daemon || true
            unused
            rmmod iwarp_rnic",
        restarted: "",
        end: "iser-target down iqn.2024-01.example:target; unused; rmmod iwarp_rnic",
    },
];

/// The two machines, and the parameters to boot them.
struct Pair<'a> {
    image: &'a Image,
    cache: &'a Path,
    boot: &'a Boot,
    /// The server's end of the cable.
    cable: Cable,
    server: Guest,
    client: Guest,
}

impl<'a> Pair<'a> {
    /// Boots both machines.
    fn start(image: &'a Image, cache: &'a Path, boot: &'a Boot, log: &mut Log) -> Result<Self> {
        let [end, cable] = Cable::ends()?;
        let machine = Machine {
            cable: Some(end),
            ..boot.machine()
        };
        let client = guest(image, &cache.join("cut-client"), boot, &machine, log)?;
        let server = Self::server(image, cache, boot, cable, log)?;
        Ok(Self {
            image,
            cache,
            boot,
            cable,
            server,
            client,
        })
    }

    /// Boots a server. Uses the disk of the previous server if there is one.
    fn server(
        image: &Image,
        cache: &Path,
        boot: &Boot,
        cable: Cable,
        log: &mut Log,
    ) -> Result<Guest> {
        let disk = cache.join("server.disk");
        File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&disk)?
            .set_len(DISK)?;
        let machine = Machine {
            cable: Some(cable),
            disk: Some(disk),
            ..boot.machine()
        };
        guest(image, &cache.join("cut-server"), boot, &machine, log)
    }

    /// Runs a scenario, and checks the data and the kernel messages of both machines.
    ///
    /// Fails if a command fails, data differ, a kernel reports a fault, or a module leaks memory.
    fn scenario(&mut self, scenario: &Scenario, log: &mut Log) -> Result<()> {
        let limit = self.boot.limit(LIMIT);
        log.line(run_on_server(&self.server, scenario.server, limit)?);
        let running = self.client.start_command(&script(scenario.client), limit)?;
        let out = self.execute_requests(running, scenario, limit, log)?;
        log.line(&out.text);
        if out.code != 0 {
            log.line(self.client.kernel_messages());
            bail!("client: {}", failure(&out));
        }
        log.line(run_on_server(&self.server, scenario.end, limit)?);
        for guest in [&self.server, &self.client] {
            let output = guest.kernel_messages();
            log.line(&output);
            check_messages(&output)?;
        }
        Ok(())
    }

    /// Executes the requests of the client's script until the script ends.
    fn execute_requests(
        &mut self,
        mut running: Running,
        scenario: &Scenario,
        limit: u64,
        log: &mut Log,
    ) -> Result<Output> {
        // The guest's agent kills the script at its time limit, unless the guest hangs.
        let deadline = Instant::now() + Duration::from_secs(limit + 30);
        let mut executed = 0;
        while !running.is_over() {
            if Instant::now() > deadline {
                bail!("the client's guest does not respond");
            }
            let output = running.output_so_far();
            for request in output
                .lines()
                .filter(|line| line.starts_with('@'))
                .skip(executed)
            {
                executed += 1;
                log.line(request);
                match request {
                    UNPLUG => self.client.plug(false)?,
                    PLUG => self.client.plug(true)?,
                    KILL => {
                        // The old machine must be gone before a new one uses the same disk and
                        // cable.
                        self.server.kill();
                        self.server =
                            Self::server(self.image, self.cache, self.boot, self.cable, log)?;
                        log.line(run_on_server(&self.server, scenario.restarted, limit)?);
                    }
                    _ => bail!("unknown request of the client's script: {request}"),
                }
            }
        }
        running.wait()
    }
}

/// Boots a machine, and discards the kernel messages of the boot.
fn guest(
    image: &Image,
    cache: &Path,
    boot: &Boot,
    machine: &Machine,
    log: &mut Log,
) -> Result<Guest> {
    std::fs::create_dir_all(cache)?;
    let guest = Guest::start(image, cache, machine, log)?;
    boot.forget_leaks(&guest)?;
    guest.kernel_messages();
    Ok(guest)
}

/// Returns the whole script that the guest runs, with the preludes.
fn script(lines: &str) -> String {
    full_script(&format!("{PRELUDE}{lines}"))
}

/// Runs a script on the server, and returns its output.
fn run_on_server(server: &Guest, lines: &str, limit: u64) -> Result<String> {
    let out = server.run(&script(lines), limit)?;
    if out.code != 0 {
        bail!("server: {}", failure(&out));
    }
    Ok(out.text)
}

/// Describes how a script failed.
fn failure(out: &Output) -> String {
    let last = out.text.lines().last().unwrap_or_default();
    format!("exit {}: {last}", out.code)
}

/// Runs the scenarios that `only` selects.
pub(super) fn run(
    image: &Image,
    cache: &Path,
    boot: &Boot,
    only: &[String],
    rows: &mut Rows,
    log: &mut Log,
) -> Result<()> {
    let mut pair = None;
    for scenario in SCENARIOS
        .iter()
        .filter(|scenario| is_chosen(scenario.name, only))
    {
        let once = |log: &mut Log| {
            let mut both = match pair.take() {
                Some(both) => both,
                None => Pair::start(image, cache, boot, log)?,
            };
            let result = both.scenario(scenario, log);
            // After a failure, the next scenario gets new machines.
            if result.is_ok() {
                pair = Some(both);
            }
            Ok((result.map(|()| Verdict::passed("")), String::new()))
        };
        let excuse = |_: &str, error: &str| excuses::known_fault(error);
        rows.run(scenario.name.to_owned(), log, once, excuse, |_| None)?;
    }
    for guest in pair.iter().flat_map(|pair| [&pair.server, &pair.client]) {
        boot.check_leaks(guest, log)?;
    }
    Ok(())
}
