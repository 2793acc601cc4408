//! iproute2's `rdma` under `iwarp run` shows our devices and the resources of processes.

use crate::common;
use crate::common::{Scratch, installed, iwarp, serve_as, str, text};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A folder with an empty library, which `rdma` does not load, and with the preload library.
struct Fixture(Scratch);

impl Fixture {
    /// Returns `None` if there is no `rdma`.
    fn new() -> Option<Self> {
        if !installed("rdma") {
            return None;
        }
        let fixture = Self(Scratch::new());
        std::fs::write(fixture.0.path("libiwarp_verbs.so"), b"").unwrap();
        let test = std::env::current_exe().unwrap();
        let deps = test.parent().unwrap();
        let name = "libiwarp_paths.so";
        let built = [deps.join(name), deps.parent().unwrap().join(name)];
        let built = built.iter().find(|path| path.exists());
        let built = built.expect("cargo builds the library for its integration tests");
        std::os::unix::fs::symlink(built, fixture.0.path(name)).unwrap();
        Some(fixture)
    }

    /// Returns a command that sees one device, and only the statistics of this test's processes.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = iwarp(arguments);
        command
            .env("IWARP_LIBRARY", self.0.path("libiwarp_verbs.so"))
            .env("IWARP_BIND", "127.0.0.1")
            .env("IWARP_STAT", self.0.sub("stat"))
            .env_remove("LD_AUDIT")
            .env_remove("LD_PRELOAD");
        command
    }

    /// Runs a program under `iwarp run` and returns its output.
    fn output_of(&self, words: &[&str]) -> String {
        let out = self
            .command(&[&["run", "--"], words].concat())
            .output()
            .unwrap();
        let said = text(&out.stdout);
        let error = text(&out.stderr);
        assert!(
            out.status.success() && error.is_empty(),
            "{words:?}: {said}{error}"
        );
        said
    }

    fn json(&self, words: &[&str]) -> Value {
        let said = self.output_of(words);
        serde_json::from_str(&said).unwrap_or_else(|error| panic!("{words:?}: {error}: {said}"))
    }
}

fn path_of_rdma() -> PathBuf {
    let folders = std::env::var_os("PATH").unwrap();
    let all: Vec<_> = std::env::split_paths(&folders).collect();
    all.iter()
        .map(|folder| folder.join("rdma"))
        .find(|path| path.is_file())
        .unwrap()
}

#[test]
fn links_and_devices_are_shown() {
    let Some(fixture) = Fixture::new() else {
        return;
    };
    let link = fixture.json(&["rdma", "link", "show", "-j"]);
    assert_eq!(link.as_array().unwrap().len(), 1);
    for (name, wanted) in [
        ("ifname", "iwarp0"),
        ("state", "ACTIVE"),
        ("physical_state", "LINK_UP"),
        ("netdev", "lo"),
    ] {
        assert_eq!(link[0][name], wanted, "{link}");
    }
    assert_eq!(link[0]["port"], 1);
    let device = fixture.json(&["rdma", "-j", "-d", "dev"]);
    assert_eq!(device[0]["node_type"], "rnic", "{device}");
    assert_eq!(device[0]["node_guid"].as_str().unwrap().len(), 19);
    let one = fixture.output_of(&["rdma", "link", "show", "iwarp0/1"]);
    assert_eq!(
        one,
        "link iwarp0/1 state ACTIVE physical_state LINK_UP netdev lo \n"
    );
    let roce = fixture.json(&["env", "IWARP_AS=roce", "rdma", "-j", "dev"]);
    assert_eq!(roce[0]["node_type"], "ca", "{roce}");
}

#[test]
fn children_see_devices_by_any_path() {
    let Some(fixture) = Fixture::new() else {
        return;
    };
    let path = path_of_rdma();
    let wanted = fixture.output_of(&["rdma", "link"]);
    assert!(wanted.starts_with("link iwarp0/1 "), "{wanted}");
    for script in [
        "$0 link",
        "LD_LIBRARY_PATH=/nonexistent $0 link",
        "cd /; LD_PRELOAD= $0 link",
        "sh -c \"$0 link\"; true",
    ] {
        assert_eq!(
            fixture.output_of(&["sh", "-c", script, str(&path)]),
            wanted,
            "{script}"
        );
    }
    // Other programs do not get the preload library.
    assert_eq!(fixture.output_of(&["sh", "-c", "echo $LD_PRELOAD"]), "\n");
}

#[test]
fn wrong_requests_fail_with_messages() {
    let Some(fixture) = Fixture::new() else {
        return;
    };
    for (words, wanted) in [
        (&["rdma", "dev", "show", "nosuch"][..], "nosuch"),
        (
            &["rdma", "link", "add", "x", "type", "siw", "netdev", "lo"],
            "not supported",
        ),
    ] {
        let out = fixture
            .command(&[&["run", "--"], words].concat())
            .output()
            .unwrap();
        let error = text(&out.stderr);
        assert!(
            !out.status.success() && error.contains(wanted),
            "{words:?}: {error}"
        );
    }
}

#[test]
fn connected_processes_have_resources() {
    let Some(fixture) = Fixture::new() else {
        return;
    };
    let none = fixture.json(&["rdma", "-j", "resource", "show"]);
    assert_eq!(
        (&none[0]["qp"], &none[0]["cm_id"]),
        (&0.into(), &0.into()),
        "{none}"
    );
    let (server, at) = serve_as(fixture.command(&["ping", "serve", "-a", "127.0.0.1", "-p", "0"]));
    let port = at.port().to_string();
    let client = fixture
        .command(&["ping", "127.0.0.1", "-p", &port])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let client = common::Running(client);
    let end = Instant::now() + Duration::from_secs(60);
    let pairs = loop {
        let pairs = fixture.json(&["rdma", "-j", "resource", "show", "qp"]);
        let all = pairs.as_array().unwrap();
        if all.len() == 2 && all.iter().all(|qp| qp["state"] == "RTS") {
            break pairs;
        }
        assert!(Instant::now() < end, "{pairs}");
    };
    let mut processes: Vec<_> = [0, 1].map(|at| pairs[at]["pid"].as_u64().unwrap()).into();
    processes.sort_unstable();
    let mut wanted: Vec<_> = [&server, &client].map(|one| u64::from(one.0.id())).into();
    wanted.sort_unstable();
    assert_eq!(processes, wanted);
    let identifiers = fixture.json(&["rdma", "-j", "resource", "show", "cm_id"]);
    assert_eq!(identifiers.as_array().unwrap().len(), 2);
    let text_of = |at: usize, name: &str| identifiers[at][name].as_str().unwrap().to_owned();
    assert_eq!(text_of(0, "src-addr"), text_of(1, "dst-addr"));
    assert!(text_of(0, "src-addr").starts_with("127.0.0.1:"));
    let domains = fixture.json(&["rdma", "-j", "resource", "show", "pd"]);
    assert_eq!(domains.as_array().unwrap().len(), 2, "{domains}");
    let summary = fixture.json(&["rdma", "-j", "resource", "show"]);
    assert_eq!(
        (&summary[0]["qp"], &summary[0]["cm_id"]),
        (&2.into(), &2.into())
    );
    let number = pairs[0]["lqpn"].to_string();
    let one = fixture.json(&["rdma", "-j", "resource", "show", "qp", "lqpn", &number]);
    assert_eq!(one.as_array().unwrap().len(), 1, "{one}");
}
