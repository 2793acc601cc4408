//! Ceph with all traffic over RDMA: a monitor, a manager, and two OSDs. The first OSD stores
//! objects in memory, the second in a file.
//!
//! The pool stores two copies of each object. The contents are checked three times: after clients
//! wrote them, after an OSD was killed and restarted under load, and from the restarted OSD alone.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;

use super::checks::noise;
use super::program::Program;
use super::stage::{Stage, WIRE_V4};
use crate::case::{Case, Verdict};

const NEEDS: &[&str] = &["ceph-mon", "ceph-mgr", "ceph-osd", "ceph-common"];
const LIMIT_S: u64 = 400;
const POOL: &str = "pool";
/// Sizes in bytes of the object and the image that are stored and compared.
const OBJECT_BYTES: usize = (16 << 20) + 4097;
const IMAGE_BYTES: usize = 32 << 20;
/// Number of attempts for a command of `ceph`. Ceph refuses a command that is sent before the
/// monitors' map has arrived.
const TRIES: usize = 5;
/// Maximum number and interval of the checks whether the daemons have released the resources of
/// closed connections.
const RELEASE_POLLS: usize = 120;
const RELEASE_INTERVAL: Duration = Duration::from_millis(500);
/// If less time than this is left, the case fails with a report of the unreleased resources.
const LEFT_FOR_REPORT: Duration = Duration::from_secs(20);
/// Descriptors of one connection: two sockets and an eventfd.
const DESCRIPTORS_EACH: u64 = 3;

/// The kind of NIC that programs see: options of `iwarp run`, and Ceph's configuration for it.
struct Face {
    run: &'static [&'static str],
    options: &'static str,
}

const RNIC: Face = Face {
    run: &["--bind", WIRE_V4],
    options: "ms_async_rdma_type = iwarp\nms_async_rdma_cm = true\n\
              ms_async_rdma_support_srq = false\n",
};
const ROCE: Face = Face {
    run: &["--as", "roce", "--bind", WIRE_V4],
    options: "",
};

pub(super) fn cases() -> Vec<Case<Stage>> {
    [
        (
            "4 daemons: put and get, rbd, an OSD killed and restarted under load",
            &RNIC,
        ),
        ("`--as roce`, the same", &ROCE),
    ]
    .into_iter()
    .map(|(what, face)| {
        Case::new("ceph", what, move |stage| check(stage, face))
            .needs(NEEDS)
            .wire()
            .long()
            .limit(LIMIT_S)
    })
    .collect()
}

fn check(stage: &Stage, face: &'static Face) -> Result<Verdict> {
    let mut cluster = Cluster::create(stage, face)?;
    let contents = Contents::create(stage)?;
    // Before the first measurement, run a client once, so that the OSDs connect to each other.
    cluster.put_and_get(&contents)?;
    let before = cluster.resource_usage()?;
    cluster.put_and_get(&contents)?;
    cluster.import_and_export(&contents)?;
    cluster.expect_released(&before)?;
    let received_bytes = cluster.bytes_received("ceph-osd")?;
    let min_bytes = 2 * (2 * OBJECT_BYTES + IMAGE_BYTES);
    ensure!(
        received_bytes >= min_bytes as u64,
        "the OSDs received {received_bytes} bytes over RDMA"
    );
    cluster.restart_under_load()?;
    cluster.expect_connected(&before)?;
    cluster.read_from_restarted(&contents)?;
    Ok(Verdict::passed(format!(
        "{} MiB received",
        received_bytes >> 20
    )))
}

/// The files that are stored in the cluster and compared.
struct Contents {
    object: Vec<u8>,
    image: Vec<u8>,
}

impl Contents {
    fn create(stage: &Stage) -> Result<Self> {
        let contents = Self {
            object: noise(1, OBJECT_BYTES),
            image: noise(2, IMAGE_BYTES),
        };
        std::fs::write(stage.dir().join("object"), &contents.object)?;
        std::fs::write(stage.dir().join("image"), &contents.image)?;
        Ok(contents)
    }
}

/// Resources that a daemon uses for its connections.
#[derive(Debug, Clone, Copy)]
struct ResourceUsage {
    queue_pairs: u64,
    /// Queue pairs without a connection.
    unconnected: usize,
    completion_queues: u64,
    descriptors: u64,
}

impl ResourceUsage {
    fn exceeds(self, other: Self) -> bool {
        self.queue_pairs > other.queue_pairs
            || self.completion_queues > other.completion_queues
            || self.descriptors > other.descriptors
    }

    /// Returns `true` if the usage is higher than additional connections explain.
    fn leaks(self, other: Self) -> bool {
        let further = self.queue_pairs.saturating_sub(other.queue_pairs);
        self.unconnected > 0
            || self.completion_queues > other.completion_queues
            || self.descriptors > other.descriptors + further * DESCRIPTORS_EACH
    }
}

struct Cluster<'a> {
    stage: &'a Stage,
    face: &'static Face,
    osds: Vec<Program>,
    _others: Vec<Program>,
}

impl<'a> Cluster<'a> {
    /// Creates the cluster with its pool, and waits until it is clean.
    fn create(stage: &'a Stage, face: &'static Face) -> Result<Self> {
        let id = uuid()?;
        std::fs::write(
            stage.dir().join("ceph.conf"),
            configuration(stage, face, &id),
        )?;
        for folder in ["mon", "mgr", "osd0", "osd1"] {
            stage.start_plain(&["mkdir", folder])?.success()?;
        }
        let address = format!("v1:{WIRE_V4}:6789");
        stage
            .start_plain(&[
                "monmaptool",
                "--create",
                "--fsid",
                &id,
                "--addv",
                "a",
                &address,
                "monmap",
            ])?
            .success()?;
        let mut cluster = Self {
            stage,
            face,
            osds: Vec::new(),
            _others: Vec::new(),
        };
        cluster
            .run(&["ceph-mon", "-i", "a", "--mkfs", "--monmap", "monmap"])?
            .success()?;
        let monitor = cluster.daemon("ceph-mon", "a")?;
        stage.wait_for_port(6789)?;
        cluster._others.push(monitor);
        let manager = cluster.daemon("ceph-mgr", "a")?;
        cluster._others.push(manager);
        for number in ["0", "1"] {
            let osd = cluster.create_osd(number)?;
            cluster.osds.push(osd);
        }
        cluster.ceph(&["osd", "pool", "create", POOL, "16", "16"])?;
        cluster.ceph(&["osd", "pool", "application", "enable", POOL, "rbd"])?;
        cluster.wait_until_clean()?;
        Ok(cluster)
    }

    fn create_osd(&self, number: &str) -> Result<Program> {
        let id = uuid()?;
        let name = format!("osd.{number}");
        let host = format!("host=host{number}");
        self.ceph(&["osd", "new", &id])?;
        self.ceph(&["osd", "crush", "add", &name, "1.0", "root=default", &host])?;
        self.run(&["ceph-osd", "-i", number, "--mkfs", "--osd-uuid", &id])?
            .success()?;
        self.daemon("ceph-osd", number)
    }

    fn daemon(&self, program: &str, id: &str) -> Result<Program> {
        // With `--no-mon-config`, a daemon never sends a command before it knows the cluster's ID.
        self.run(&[program, "-i", id, "-f", "--no-mon-config"])
    }

    /// Starts one of Ceph's programs with the cluster's configuration.
    fn run(&self, words: &[&str]) -> Result<Program> {
        let words = [&words[..1], &["-c", "ceph.conf"], &words[1..]].concat();
        self.stage.start_with(self.face.run, None, &[], &words)
    }

    fn ceph(&self, words: &[&str]) -> Result<String> {
        let words = [&["ceph"], words].concat();
        let mut last = None;
        for _ in 0..TRIES {
            match self.run(&words)?.success() {
                Ok(output) => return Ok(output),
                Err(error) => last = Some(error),
            }
        }
        Err(last.context("the command was not run")?)
    }

    /// Waits until the condition holds for the cluster's state.
    fn wait_until(&self, what: &str, condition: impl Fn(&Value) -> bool) -> Result<()> {
        loop {
            let output = self.ceph(&["status", "--format=json"])?;
            if document(&output).is_ok_and(|state| condition(&state)) {
                return Ok(());
            }
            if self.stage.time_left().is_zero() {
                bail!("time-out: {what}: {output}");
            }
            thread::sleep(Duration::from_millis(300));
        }
    }

    fn wait_until_clean(&self) -> Result<()> {
        self.wait_until("the cluster is not clean", |state| {
            let map = &state["pgmap"];
            let first = &map["pgs_by_state"][0];
            state["osdmap"]["num_up_osds"] == 2
                && first["state_name"] == "active+clean"
                && first["count"] == map["num_pgs"]
        })
    }

    fn wait_until_one_is_down(&self) -> Result<()> {
        self.wait_until("no OSD is down", |state| {
            state["osdmap"]["num_up_osds"] == 1
        })
    }

    fn rados(&self, words: &[&str]) -> Result<Program> {
        self.run(&[&["rados", "-p", POOL], words].concat())
    }

    fn put_and_get(&self, contents: &Contents) -> Result<()> {
        self.rados(&["put", "object", "object"])?.success()?;
        self.get(contents)
    }

    fn get(&self, contents: &Contents) -> Result<()> {
        self.rados(&["get", "object", "object.copy"])?.success()?;
        self.compare("object.copy", &contents.object)
    }

    fn import_and_export(&self, contents: &Contents) -> Result<()> {
        let name = format!("{POOL}/image");
        self.run(&["rbd", "import", "--no-progress", "image", &name])?
            .success()?;
        self.export(contents)
    }

    fn export(&self, contents: &Contents) -> Result<()> {
        let name = format!("{POOL}/image");
        let _ = std::fs::remove_file(self.stage.dir().join("image.copy"));
        self.run(&["rbd", "export", "--no-progress", &name, "image.copy"])?
            .success()?;
        self.compare("image.copy", &contents.image)
    }

    fn compare(&self, name: &str, wanted: &[u8]) -> Result<()> {
        let found = std::fs::read(self.stage.dir().join(name))?;
        ensure!(found == wanted, "{name} differs from what was stored");
        Ok(())
    }

    /// Kills the OSD that stores objects in a file while a client writes, restarts it, and waits
    /// until it has recovered.
    fn restart_under_load(&mut self) -> Result<()> {
        #[rustfmt::skip]
        let load = [
            "bench", "30", "write", "-b", "4096", "-O", "1048576", "-t", "2", "--no-cleanup",
            "--run-name", "load",
        ];
        let mut load = self.rados(&load)?;
        load.wait_for("\n    2 ")?;
        drop(self.osds.pop());
        self.wait_until_one_is_down()?;
        self.osds.push(self.daemon("ceph-osd", "1")?);
        ensure!(
            load.poll()?.is_none(),
            "the load ended before the OSD was restarted"
        );
        load.success()?;
        self.wait_until_clean()
    }

    /// Kills the OSD that was not restarted, and reads all objects from the other OSD.
    fn read_from_restarted(&mut self, contents: &Contents) -> Result<()> {
        drop(self.osds.remove(0));
        self.wait_until_one_is_down()?;
        self.get(contents)?;
        self.export(contents)?;
        // `bench seq` compares each object with the data that the load wrote.
        let read = ["bench", "60", "seq", "-t", "4", "--run-name", "load"];
        self.rados(&read)?.success()?;
        Ok(())
    }

    /// Returns the name and the statistics of each of the cluster's daemons.
    fn statistics(&self) -> Result<Vec<(String, Value)>> {
        let command = self.stage.command_path();
        let output = self
            .stage
            .start_plain(&[&command, "stat", "--json"])?
            .success()?;
        let document = document(&output)?;
        let processes = document["processes"].as_array().context("no processes")?;
        Ok(processes
            .iter()
            .filter_map(|process| {
                let command = process["statistics"]["process"]["command"].as_str()?;
                Some((daemon_name(command)?, process.clone()))
            })
            .collect())
    }

    fn resource_usage(&self) -> Result<BTreeMap<String, ResourceUsage>> {
        let mut all = BTreeMap::new();
        for (name, process) in self.statistics()? {
            let folder = format!("/proc/{}/fd", process["pid"]);
            // The daemon may have exited in the meantime.
            let (code, listed) = self.stage.start_plain(&["ls", &folder])?.wait()?;
            if code == 0 {
                let resource_usage = ResourceUsage {
                    queue_pairs: device_sum(&process, "/queue_pairs"),
                    unconnected: unconnected(&process),
                    completion_queues: device_sum(&process, "/completion_queues"),
                    descriptors: listed.lines().count() as u64,
                };
                all.insert(name, resource_usage);
            }
        }
        ensure!(all.len() == 4, "only {} daemons are running", all.len());
        Ok(all)
    }

    /// Waits until no daemon uses more resources than before the clients connected.
    fn expect_released(&self, before: &BTreeMap<String, ResourceUsage>) -> Result<()> {
        self.wait_while(before, ResourceUsage::exceeds)
    }

    /// Waits until no daemon holds objects of closed connections. After a restart, the daemons may
    /// have other connections to each other than before.
    fn expect_connected(&self, before: &BTreeMap<String, ResourceUsage>) -> Result<()> {
        self.wait_while(before, ResourceUsage::leaks)
    }

    fn wait_while(
        &self,
        before: &BTreeMap<String, ResourceUsage>,
        holds_too_much: impl Fn(ResourceUsage, ResourceUsage) -> bool,
    ) -> Result<()> {
        for _ in 0..RELEASE_POLLS {
            let now = self.resource_usage()?;
            let more = now.iter().find(|(name, resource_usage)| {
                let earlier = before.get(name.as_str());
                earlier.is_none_or(|earlier| holds_too_much(**resource_usage, *earlier))
            });
            let Some((name, resource_usage)) = more else {
                return Ok(());
            };
            if self.stage.time_left() < LEFT_FOR_REPORT {
                bail!(
                    "{name} holds {resource_usage:?}, at first {:?}",
                    before.get(name)
                );
            }
            thread::sleep(RELEASE_INTERVAL);
        }
        bail!("the daemons did not release the resources of closed connections")
    }

    /// Returns the bytes that all processes of a daemon's program received over RDMA.
    fn bytes_received(&self, program: &str) -> Result<u64> {
        let all = self.statistics()?;
        let sums = all
            .iter()
            .filter(|(name, _)| name.starts_with(program))
            .map(|(_, process)| device_sum(process, "/counters/rx_payload"));
        Ok(sums.sum())
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        // Kill the OSDs first: they would wait for the monitor if it were gone.
        for osd in &self.osds {
            osd.signal(Signal::KILL);
        }
    }
}

/// Returns the first JSON document in a program's output. There may be warnings before and after
/// it.
fn document(output: &str) -> Result<Value> {
    let start = output.find('{').context("no JSON document")?;
    let mut documents = serde_json::Deserializer::from_str(&output[start..]).into_iter();
    Ok(documents.next().context("no JSON document")??)
}

/// Returns the name of a daemon, for example `ceph-osd 1`, from its command line.
fn daemon_name(command: &str) -> Option<String> {
    let mut words = command.split(' ');
    let program = words.next()?;
    let id = words.skip_while(|word| *word != "-i").nth(1)?;
    program
        .starts_with("ceph-")
        .then(|| format!("{program} {id}"))
}

/// Returns the sum of a number over all devices of a process.
fn device_sum(process: &Value, pointer: &str) -> u64 {
    let devices = process["statistics"]["devices"].as_array();
    let numbers = devices
        .into_iter()
        .flatten()
        .filter_map(|device| device.pointer(pointer)?.as_u64());
    numbers.sum()
}

/// Returns the number of a process's queue pairs whose connection is closed or was never
/// established.
fn unconnected(process: &Value) -> usize {
    let all = process["statistics"]["queue_pairs"].as_array();
    all.into_iter()
        .flatten()
        .filter(|qp| qp["connection"].is_null() || !qp["end"].is_null())
        .count()
}

fn uuid() -> Result<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/uuid")?;
    Ok(text.trim().to_owned())
}

fn configuration(stage: &Stage, face: &Face, id: &str) -> String {
    let dir = stage.dir().display();
    let mut text = format!(
        "[global]\nfsid = {id}\nmon_host = v1:{WIRE_V4}:6789\n\
         public_addr = {WIRE_V4}\ncluster_addr = {WIRE_V4}\n"
    );
    // Keep all files in the case's directory, and messages in the case's log.
    let _ = write!(
        text,
        "run_dir = {dir}\nadmin_socket = {dir}/$name.$pid.asok\nmon_data = {dir}/mon\n\
         mgr_data = {dir}/mgr\nosd_data = {dir}/osd$id\npid_file =\nlog_file =\n\
         log_to_stderr = true\ndebug_rocksdb = 0\nmon_cluster_log_file = {dir}/cluster.log\n"
    );
    text.push_str(
        "auth_cluster_required = none\nauth_service_required = none\n\
         auth_client_required = none\nms_bind_msgr2 = false\n",
    );
    // Allow both copies on this machine, one copy while an OSD is down, and one OSD to report the
    // other as down.
    text.push_str(
        "osd_pool_default_size = 2\nosd_pool_default_min_size = 1\n\
         osd_crush_chooseleaf_type = 0\nosd_crush_update_on_start = false\n\
         mon_osd_min_down_reporters = 1\nosd_heartbeat_interval = 2\nosd_heartbeat_grace = 10\n\
         osd_recovery_sleep_hdd = 0\nmon_data_avail_warn = 2\nmon_data_avail_crit = 1\n",
    );
    text.push_str(
        "memstore_device_bytes = 4294967296\nbluestore_block_size = 4294967296\n\
         osd_objectstore = memstore\n",
    );
    text.push_str(
        "ms_type = async+rdma\nms_async_rdma_device_name = iwarp0\n\
         ms_async_rdma_receive_queue_len = 256\n",
    );
    text.push_str(face.options);
    text.push_str("[osd.1]\nosd_objectstore = bluestore\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_around_json_are_skipped() {
        let output = "iwarp: 2 processes did not answer\n{\"a\": [1]}\nwarning: late\n";
        assert_eq!(document(output).unwrap()["a"][0], 1);
        assert!(document("").is_err() && document("{\"a\": ").is_err());
    }

    #[test]
    fn daemon_names_come_from_command_line() {
        let osd = daemon_name("ceph-osd -c ceph.conf -i 1 -f --no-mon-config");
        assert_eq!(osd.as_deref(), Some("ceph-osd 1"));
        assert_eq!(daemon_name("rados -c ceph.conf -i 1"), None);
        assert_eq!(daemon_name("ceph-mon -c ceph.conf"), None);
    }

    #[test]
    fn sums_and_compares_resource_usage() {
        let process = serde_json::json!({"statistics": {"devices": [
            {"queue_pairs": 2, "counters": {"rx_payload": 5}},
            {"queue_pairs": 3, "counters": {"rx_payload": 7}},
        ]}});
        assert_eq!(device_sum(&process, "/queue_pairs"), 5);
        assert_eq!(device_sum(&process, "/counters/rx_payload"), 12);
        let resource_usage = |queue_pairs, descriptors| ResourceUsage {
            queue_pairs,
            unconnected: 0,
            completion_queues: 1,
            descriptors,
        };
        let one = resource_usage(1, 9);
        assert!(
            resource_usage(2, 9).exceeds(one)
                && resource_usage(1, 10).exceeds(one)
                && !one.exceeds(one)
        );
        assert!(
            resource_usage(1, 10).leaks(one)
                && resource_usage(2, 13).leaks(one)
                && !resource_usage(2, 12).leaks(one)
        );
        let ended = ResourceUsage {
            unconnected: 1,
            ..one
        };
        assert!(ended.leaks(one) && !one.leaks(one));
    }

    #[test]
    fn counts_unconnected_queue_pairs() {
        let process = serde_json::json!({"statistics": {"queue_pairs": [
            {"connection": {"peer": "10.0.0.1:1"}, "end": null},
            {"connection": {"peer": "10.0.0.1:2"}, "end": "the peer has closed it"},
            {"connection": null, "end": null},
        ]}});
        assert_eq!(unconnected(&process), 2);
    }
}
