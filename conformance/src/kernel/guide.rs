//! Runs the commands of `docs/storage.md` unmodified, in two guests connected by a virtual cable.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use xtask::process::Log;

use super::boot::Boot;
use crate::complaints;
use crate::guest::image::Image;
use crate::guest::{Cable, Guest, Machine};

const GUIDE: &str = include_str!("../../../docs/storage.md");
pub(crate) const NAME: &str = "the commands of the guide to storage";
/// Time limit of one block of commands, in seconds.
const LIMIT: u64 = 180;

/// Prepares a machine as the guide assumes: an address, a card named `eth0`, configfs, and an NVMe
/// host name.
const PREPARE_MACHINE: &str = "ip addr add ADDRESS/24 dev cable0
/usr/bin/ip link property add dev cable0 altname eth0
modprobe configfs
grep -q ' configfs ' /proc/mounts || mount -t configfs configfs /sys/kernel/config
nvme-disk host";

/// A section of the guide, with scripts: `before` prepares the server, `use_it` tests the result on
/// the client, and `end` shuts the server down.
struct Section {
    heading: &'static str,
    before: &'static str,
    use_it: &'static str,
    end: &'static str,
    /// The section needs modules that Debian omits and that we do not build for all kernels.
    needs_rebuilt_modules: bool,
}

const SECTIONS: [Section; 5] = [
    Section {
        heading: "NVMe over RDMA in ten commands",
        before: "modprobe brd rd_nr=1 rd_size=32768",
        use_it: "for i in $(seq 100); do [ -b /dev/nvme0n1 ] && break; sleep 0.1; done
            nvme-disk verify /dev/nvme0n1; nvme disconnect -n disk; rmmod nvme_rdma iwarp_rnic",
        end: "nvme-target down disk; rmmod iwarp_rnic",
        needs_rebuilt_modules: false,
    },
    Section {
        heading: "NVMe with a secret",
        before: "modprobe iwarp_rnic; rdma link add iwarp0 type iwarp netdev eth0
            nvme-target up disk 192.0.2.1 4420 32",
        use_it: "nvme-disk verify /dev/nvme0n1; nvme disconnect -n disk
            refused nvme connect -t rdma -a 192.0.2.1 -s 4420 -n disk
            rmmod nvme_rdma iwarp_rnic",
        end: "nvme-target down disk; rmmod iwarp_rnic",
        needs_rebuilt_modules: false,
    },
    Section {
        heading: "NFS over RDMA in eight commands",
        before: "nfs-server daemons",
        use_it: "grep ' /mnt nfs4 .*vers=4.2.*proto=rdma' /proc/mounts
            nfs-disk tree; nfs-disk unmount; rmmod iwarp_rnic",
        end: "nfs-server down; rmmod rpcrdma iwarp_rnic",
        needs_rebuilt_modules: false,
    },
    Section {
        heading: "SMB Direct in eight commands",
        before: "mkdir -p /etc/ksmbd /srv; mount -t tmpfs tmpfs /srv",
        use_it: "smb-disk direct; nfs-disk tree; smb-disk unmount; rmmod iwarp_rnic",
        end: "smb-server down; rmmod iwarp_rnic",
        needs_rebuilt_modules: true,
    },
    Section {
        heading: "rnbd in five commands",
        before: "modprobe brd rd_nr=1 rd_size=32768",
        use_it: "nvme-disk verify /dev/rnbd0; rnbd-disk unmap; rmmod iwarp_rnic",
        end: "rnbd-server down; rmmod iwarp_rnic",
        needs_rebuilt_modules: true,
    },
];

/// The machine on which a block of commands runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MachineRole {
    Server,
    Client,
}

/// Returns the command blocks of a section, in order.
fn blocks(text: &str, heading: &str) -> Result<Vec<(MachineRole, String)>> {
    let (_, rest) = text
        .split_once(&format!("\n## {heading}\n"))
        .with_context(|| format!("the guide has no section {heading}"))?;
    let section = rest.split("\n## ").next().unwrap_or_default();
    let mut blocks = Vec::new();
    let mut role = None;
    let mut block: Option<String> = None;
    for line in section.lines() {
        match &mut block {
            Some(commands) if line == "```" => {
                blocks.push((
                    role.context("no line before the block says on which machine it runs")?,
                    commands.clone(),
                ));
                block = None;
            }
            Some(commands) => *commands += &format!("{line}\n"),
            None if line == "```sh" => block = Some(String::new()),
            None if line.starts_with("On the server") => role = Some(MachineRole::Server),
            None if line.starts_with("On the client") => role = Some(MachineRole::Client),
            None => {}
        }
    }
    Ok(blocks)
}

/// Boots two guests, and runs each section.
///
/// Fails if a command fails, data differ, or a kernel complains.
pub(crate) fn run(image: &Image, cache: &Path, boot: &Boot, log: &mut Log) -> Result<()> {
    let [first, second] = Cable::ends()?;
    let start = |end: &str, cable, address: &str, log: &mut Log| -> Result<Guest> {
        let cache = cache.join(end);
        std::fs::create_dir_all(&cache)?;
        let machine = Machine {
            cable: Some(cable),
            ..boot.machine()
        };
        let guest = Guest::start(image, &cache, &machine, log)?;
        guest.run_checked(&PREPARE_MACHINE.replace("ADDRESS", address), LIMIT)?;
        guest.kernel_messages();
        Ok(guest)
    };
    let server = start("server", first, "192.0.2.1", log)?;
    let client = start("client", second, "192.0.2.2", log)?;
    let limit = boot.limit(LIMIT);
    for section in SECTIONS
        .iter()
        .filter(|section| boot.has_rebuilt_modules() || !section.needs_rebuilt_modules)
    {
        server.run_checked(section.before, limit)?;
        for (role, commands) in blocks(GUIDE, section.heading)? {
            let guest = match role {
                MachineRole::Server => &server,
                MachineRole::Client => &client,
            };
            guest.run_checked(&format!("set -ex\n{commands}"), limit)?;
        }
        let use_it = format!("set -ex; . refused\n{}", section.use_it);
        let output = client.run_checked(&use_it, limit)?;
        log.line(&output);
        server.run_checked(&format!("set -ex\n{}", section.end), limit)?;
        for guest in [&server, &client] {
            let output = guest.kernel_messages();
            log.line(&output);
            if let Some(line) = complaints::first(&output) {
                bail!("{}: {line}", section.heading);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_give_right_number_of_commands() {
        for (section, commands) in SECTIONS.iter().zip([10, 7, 8, 8, 5]) {
            let blocks = blocks(GUIDE, section.heading).unwrap();
            let role: Vec<MachineRole> = blocks.iter().map(|(role, _)| *role).collect();
            assert_eq!(role, [MachineRole::Server, MachineRole::Client]);
            // Indented lines continue a command.
            let begins = |line: &&str| !line.starts_with(' ') && *line != "done";
            let lines = blocks.iter().flat_map(|(_, text)| text.lines());
            assert_eq!(
                lines.filter(begins).count(),
                commands,
                "{}",
                section.heading
            );
        }
    }

    #[test]
    fn each_block_names_its_machine() {
        assert!(blocks("\n## A\n```sh\nls\n```\n", "A").is_err());
        assert!(blocks("", "A").is_err());
        let text = "\n## A\nOn the client, now:\n```sh\nls\n```\n## B\n```sh\nrm\n```\n";
        assert_eq!(
            blocks(text, "A").unwrap(),
            [(MachineRole::Client, "ls\n".to_owned())]
        );
    }
}
