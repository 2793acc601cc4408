//! Kernel storage on the module when the network between two machines fails, or the server crashes.
//!
//! Server and client are two guests with a cable between them, because traffic inside one guest
//! never reaches a card. The server's disk is a file, so data that the server has acknowledged must
//! survive its crash and restart.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use xtask::process::Log;

use super::boot::Boot;
use super::script::{verdict, whole};
use crate::case::{Verdict, is_chosen};
use crate::excuses;
use crate::guest::image::Image;
use crate::guest::{Cable, Guest, Machine, Output, Running};
use crate::rows::Rows;

/// A scenario for the two machines.
struct Cut {
    name: &'static str,
    /// The server's first script.
    server: &'static str,
    /// The client's script.
    client: &'static str,
    /// The server's script after it was killed and restarted.
    again: &'static str,
    /// The server's last script.
    end: &'static str,
}

/// Lines by which the client's script makes requests to this program.
const PULL: &str = "@pull the cable";
const PUT: &str = "@put the cable back";
const KILL: &str = "@kill the server";
/// Size of the server's disk in bytes.
const DISK: u64 = 64 << 20;
/// Time limit of one cut, in seconds.
const LIMIT: u64 = 300;

/// Begins all scripts. `loaded` loads the module and adds a link for the cable. `down N` unplugs
/// the cable for N seconds under load, and `killed` kills the server under load. Connections that
/// end while the cable is unplugged may take another minute.
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
    echo '@pull the cable'
    sleep $1
    kill -0 $load
    echo '@put the cable back'
}
killed() {
    sleep 2
    kill -0 $load
    echo '@kill the server'
}
";

const CUTS: &[Cut] = &[
    Cut {
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
        again: "",
        end: "nvme-target down one; unused; rmmod iwarp_rnic",
    },
    Cut {
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
        again: "",
        end: "nvme-target down one; unused; rmmod iwarp_rnic",
    },
    Cut {
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
        again: "loaded; nvme-target up one 10.78.0.2 4420 /dev/vda",
        end: "nvme-target down one; unused; rmmod iwarp_rnic",
    },
    Cut {
        name: "NVMe over RDMA: the server is killed under load and has no target any more",
        server: "loaded; nvme-target up one 10.78.0.2 4420 /dev/vda",
        client: "loaded
            disk=$(nvme-disk connect 10.78.0.2 4420 one --reconnect-delay=1 --ctrl-loss-tmo=5)
            nvme-disk verify $disk --loops=9 & load=$!
            killed
            ! wait $load
            for i in $(seq 100); do [ -e /sys/class/nvme/nvme0 ] || break; sleep 0.1; done
            rmmod nvme_rdma
            unused
            rmmod iwarp_rnic",
        again: "loaded",
        end: "rmmod iwarp_rnic",
    },
    Cut {
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
        again: "",
        end: "nfs-server down; unused; rmmod iwarp_rnic",
    },
    Cut {
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
        again: "",
        end: "nfs-server down; unused; rmmod iwarp_rnic",
    },
    Cut {
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
        again: "loaded; nfs-server up 20049 /dev/vda",
        end: "nfs-server down; unused; rmmod iwarp_rnic",
    },
    Cut {
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
        again: "loaded; nfs-server up 20049 /dev/vda",
        end: "nfs-server down; unused; rmmod iwarp_rnic",
    },
    Cut {
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
        again: "",
        end: "iser-target down iqn.2024-01.example:target; unused; rmmod iwarp_rnic",
    },
];

/// The two machines, and what they are booted from.
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
    /// Boots both.
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

    /// Boots a server with the existing disk.
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

    /// Runs a cut, and checks the data and the messages of both ends.
    ///
    /// Fails if a command fails, data differ, a kernel complains, or a module leaves memory.
    fn cut(&mut self, cut: &Cut, log: &mut Log) -> Result<()> {
        let limit = self.boot.limit(LIMIT);
        log.line(on(&self.server, cut.server, limit)?);
        let running = self.client.start_command(&script(cut.client), limit)?;
        let out = self.attend(running, cut, limit, log)?;
        log.line(&out.text);
        if out.code != 0 {
            log.line(self.client.kernel_messages());
            bail!("client: {}", failure(&out));
        }
        log.line(on(&self.server, cut.end, limit)?);
        for guest in [&self.server, &self.client] {
            let said = guest.kernel_messages();
            log.line(&said);
            verdict(&said)?;
        }
        Ok(())
    }

    /// Carries out the client's requests until its script has ended.
    fn attend(
        &mut self,
        mut running: Running,
        cut: &Cut,
        limit: u64,
        log: &mut Log,
    ) -> Result<Output> {
        // The guest itself ends the script at its limit, unless it hangs.
        let end = Instant::now() + Duration::from_secs(limit + 30);
        let mut done = 0;
        while !running.is_over() {
            if Instant::now() > end {
                bail!("the client does not answer");
            }
            let said = running.said();
            for request in said.lines().filter(|line| line.starts_with('@')).skip(done) {
                done += 1;
                log.line(request);
                match request {
                    PULL => self.client.plug(false)?,
                    PUT => self.client.plug(true)?,
                    KILL => {
                        // The old machine must have ended before the new one uses the disk and the
                        // cable.
                        self.server.kill();
                        self.server =
                            Self::server(self.image, self.cache, self.boot, self.cable, log)?;
                        log.line(on(&self.server, cut.again, limit)?);
                    }
                    _ => bail!("an unknown request: {request}"),
                }
            }
        }
        running.wait()
    }
}

/// Boots a machine, and discards the messages of the boot.
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

/// Returns a script as the guest runs it.
fn script(lines: &str) -> String {
    whole(&format!("{PRELUDE}{lines}"))
}

/// Runs a script on the server, and returns its output.
fn on(server: &Guest, lines: &str, limit: u64) -> Result<String> {
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

/// Runs the cuts that `only` chooses.
pub(super) fn run(
    image: &Image,
    cache: &Path,
    boot: &Boot,
    only: &[String],
    rows: &mut Rows,
    log: &mut Log,
) -> Result<()> {
    let mut pair = None;
    for cut in CUTS.iter().filter(|cut| is_chosen(cut.name, only)) {
        let once = |log: &mut Log| {
            let mut both = match pair.take() {
                Some(both) => both,
                None => Pair::start(image, cache, boot, log)?,
            };
            let result = both.cut(cut, log);
            // After a failure the next cut gets new machines.
            if result.is_ok() {
                pair = Some(both);
            }
            Ok((result.map(|()| Verdict::passed("")), String::new()))
        };
        let excuse = |_: &str, error: &str| excuses::of_programs(error);
        rows.run(cut.name.to_owned(), log, once, excuse, |_| None)?;
    }
    for guest in pair.iter().flat_map(|pair| [&pair.server, &pair.client]) {
        boot.look_for_leaks(guest, log)?;
    }
    Ok(())
}
