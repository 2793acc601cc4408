//! Runs the image and the Kubernetes manifests in podman's containers, and validates the manifests.
//!
//! podman has no daemon, and applies what a cluster's runtime applies: the default seccomp profile,
//! a read-only root, a user without a name, no capabilities. Its storage is in the target folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use xtask::context::{Context, find_program};
use xtask::process::Log;

use super::Release;
use super::check::{PACKAGES, scripts};
use super::image;
use super::tools::Tools;
use crate::roots;

/// The folder with the manifests.
const MANIFESTS: &str = "packaging/kubernetes";
/// The image with the RDMA programs that the manifests name.
const PROGRAMS: &str = "localhost/rdma-programs:1";
/// The Debian release of that image.
const SUITE: &str = "bookworm";
/// The name of the container with a server.
const SERVER: &str = "iwarp-server";

/// Runs image and manifests.
///
/// # Errors
/// If a manifest does not have the form that Kubernetes requires, or if a program fails.
pub(super) fn run(
    context: &Context,
    log: &mut Log,
    tools: &Tools,
    release: &Release,
) -> Result<()> {
    validate(context, log, tools)?;
    if find_program("podman").is_none() {
        log.say("podman is not installed, so image and manifests were not run");
        return Ok(());
    }
    let podman = Podman::create(context.target.join("dist-podman"))?;
    let result = podman.run_all(context, log, tools, release);
    let removed = podman.remove(log);
    result.and(removed)
}

/// Checks the manifests against Kubernetes' schemas.
fn validate(context: &Context, log: &mut Log, tools: &Tools) -> Result<()> {
    let dir = context.root.join(MANIFESTS);
    log.run(
        tools
            .python()
            .args(["-m", "pip", "install", "--quiet", "--requirement"])
            .arg(dir.join("requirements.txt")),
    )?;
    let mut command = tools.program("kubernetes-validate");
    command.arg("--strict");
    let mut count = 0;
    for entry in fs::read_dir(&dir)? {
        let file = entry?.path();
        if file.extension().is_some_and(|end| end == "yaml") {
            command.arg(file);
            count += 1;
        }
    }
    log.run(&mut command)?;
    log.say(format!("{count} manifests are valid"));
    Ok(())
}

/// podman with its own storage.
struct Podman {
    dir: PathBuf,
}

impl Podman {
    fn create(dir: PathBuf) -> Result<Self> {
        fs::create_dir_all(&dir)?;
        // crun does not support machines with both versions of cgroups. The limits must not exceed
        // those of this process.
        let runtime = match find_program("runc") {
            Some(_) => "runtime = \"runc\"\n",
            None => "",
        };
        let text = format!(
            "[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=4096:4096\"]\n\
             [engine]\ncgroup_manager = \"cgroupfs\"\n{runtime}"
        );
        fs::write(dir.join("containers.conf"), text)?;
        let storage = format!(
            "[storage]\ndriver = \"vfs\"\ngraphroot = \"{0}/root\"\nrunroot = \"{0}/run\"\n",
            dir.display()
        );
        fs::write(dir.join("storage.conf"), storage)?;
        Ok(Self { dir })
    }

    /// Makes a command use this storage.
    fn configure<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command
            .env("CONTAINERS_CONF", self.dir.join("containers.conf"))
            .env("CONTAINERS_STORAGE_CONF", self.dir.join("storage.conf"))
    }

    fn podman(&self, log: &mut Log, args: &[&str]) -> Result<String> {
        let mut command = Command::new("podman");
        log.run_and_read(self.configure(command.args(args)))
    }

    fn run_all(
        &self,
        context: &Context,
        log: &mut Log,
        tools: &Tools,
        release: &Release,
    ) -> Result<()> {
        let archive = image::file(release);
        let archive = archive.to_str().context("the target folder's path")?;
        self.podman(log, &["load", "--quiet", "--input", archive])?;
        let image = format!("{}:{}", image::NAME, release.version);
        self.two_processes(log, &image)?;
        log.say("the image runs, and two of its processes talk to each other");
        self.import_programs(context, log)?;
        let mut pods = tools.python();
        pods.arg(scripts(context).join("kubernetes.py"))
            .arg(context.root.join(MANIFESTS))
            .arg(image);
        println!("{}", log.run_and_read(self.configure(&mut pods))?);
        log.say("the pods of the manifests run with their restrictions");
        Ok(())
    }

    /// Runs a server and a client in containers with a common network.
    fn two_processes(&self, log: &mut Log, image: &str) -> Result<()> {
        let restricted = ["--read-only", "--cap-drop=all", "--user=12345:12345"];
        let run = |log: &mut Log, options: &[&str], command: &[&str]| {
            let args = [&["run"], options, &restricted, &[image], command].concat();
            self.podman(log, &args)
        };
        let devices = run(log, &["--rm", "--network=none"], &["devices"])?;
        log.line(devices);
        run(
            log,
            &["--detach", "--network=none", "--name", SERVER],
            &["ping", "serve"],
        )?;
        let network = format!("--network=container:{SERVER}");
        let client = ["ping", "127.0.0.1", "-C", "3"];
        let mut result = run(log, &["--rm", &network], &client);
        // The server may not listen yet.
        for _ in 0..20 {
            if result.is_ok() {
                break;
            }
            result = run(log, &["--rm", &network], &client);
        }
        self.podman(log, &["rm", "--force", "--time=0", SERVER])?;
        result.map(|_| ())
    }

    /// Creates the image with the RDMA programs from a Debian root with the same packages.
    fn import_programs(&self, context: &Context, log: &mut Log) -> Result<()> {
        let kind = roots::Kind {
            suite: SUITE,
            foreign: None,
            packages: PACKAGES,
        };
        let root = roots::base(log, &context.target.join("dist-roots"), &kind)?;
        let archive = self.dir.join("programs.tar");
        log.run(
            Command::new("tar")
                .args(["--exclude=./var/cache", "--exclude=./var/lib/apt", "-cf"])
                .arg(&archive)
                .arg("-C")
                .arg(root)
                .arg("."),
        )?;
        let file = archive.to_str().context("the target folder's path")?;
        // As in the images of distributions.
        let path = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        self.podman(
            log,
            &["import", "--quiet", "--change", path, file, PROGRAMS],
        )?;
        fs::remove_file(archive)?;
        Ok(())
    }

    /// Removes all containers and images.
    fn remove(self, log: &mut Log) -> Result<()> {
        self.podman(log, &["rm", "--all", "--force", "--time=0"])?;
        self.podman(log, &["rmi", "--all", "--force"])?;
        remove_folder(&self.dir)
    }
}

fn remove_folder(dir: &Path) -> Result<()> {
    fs::remove_dir_all(dir).with_context(|| format!("removing {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_name_image_of_this_version() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("..")
            .join(MANIFESTS);
        let wanted = format!("image: {}:{}", image::NAME, env!("CARGO_PKG_VERSION"));
        for name in ["devices.yaml", "bandwidth.yaml"] {
            let text = fs::read_to_string(dir.join(name)).unwrap();
            let images: Vec<&str> = text
                .lines()
                .map(str::trim)
                .filter(|line| line.contains(image::NAME))
                .collect();
            assert!(!images.is_empty(), "{name}");
            assert!(
                images.iter().all(|line| *line == wanted),
                "{name}: {images:?}"
            );
        }
    }
}
