//! `iwarp doctor` as a user runs it: on this machine, and with one thing broken at a time.

use crate::common::{Scratch, compile, iwarp, str, text};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A library that the loader accepts.
const LIBRARY: &str = "int one(void) { return 1; }";

/// The result: exit code, and the lines by name.
struct Report {
    code: Option<i32>,
    said: String,
    errors: String,
}

impl Report {
    fn new(output: &Output) -> Self {
        Self {
            code: output.status.code(),
            said: text(&output.stdout),
            errors: text(&output.stderr),
        }
    }

    /// Returns the line of a check, without its state, after checking the state.
    #[track_caller]
    fn line(&self, name: &str, ok: bool) -> &str {
        let start = format!("{} {name:<11} ", if ok { "OK  " } else { "FIX " });
        let line = self.said.lines().find_map(|line| line.strip_prefix(&start));
        line.unwrap_or_else(|| panic!("no {start:?} in\n{}{}", self.said, self.errors))
    }

    /// Checks that these checks fail, and no others.
    #[track_caller]
    fn fails(&self, names: &[&str]) {
        assert_eq!(
            self.code,
            Some(i32::from(!names.is_empty())),
            "{}",
            self.said
        );
        let failing = self
            .said
            .lines()
            .filter_map(|line| line.strip_prefix("FIX  "));
        let failing: Vec<_> = failing.filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(failing, names, "{}{}", self.said, self.errors);
        assert_eq!(self.said.lines().count(), 9, "{}", self.said);
    }
}

/// A folder with a library, for the check of the loader.
fn library(scratch: &Scratch) -> PathBuf {
    let library = scratch.path("libiwarp_verbs.so");
    compile(&library, LIBRARY, &["-shared", "-fPIC"]);
    library
}

fn doctor(library: &Path) -> Command {
    let mut command = iwarp(&["doctor"]);
    command.env("IWARP_LIBRARY", library);
    for name in ["LD_LIBRARY_PATH", "LD_AUDIT", "LD_PRELOAD"] {
        command.env_remove(name);
    }
    command
}

/// Runs `iwarp doctor` by another program, to whose arguments its path is added.
fn doctor_by(program: &str, arguments: &[&str], library: &Path) -> Report {
    let plain = doctor(library);
    let mut command = Command::new(program);
    command
        .args(arguments)
        .arg(plain.get_program())
        .arg("doctor");
    for (name, value) in plain.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    Report::new(&command.output().unwrap())
}

#[test]
fn healthy_machine_is_ok() {
    let scratch = Scratch::new();
    let library = library(&scratch);
    let report = Report::new(&doctor(&library).output().unwrap());
    report.fails(&[]);
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert!(report.line("kernel", true).contains(release.trim()));
    assert!(
        report
            .line("interfaces", true)
            .contains(" on lo (127.0.0.1)")
    );
    assert!(report.line("settings", true).contains("IWARP_LIBRARY="));
    assert!(
        report.line("loader", true).ends_with(str(&library)),
        "{}",
        report.said
    );
}

/// In a new network namespace, no interface is up.
#[test]
fn loopback_that_is_down_is_explained() {
    let namespace = ["--user", "--map-root-user", "--net"];
    let permitted = Command::new("unshare").args(namespace).arg("true").output();
    if !permitted.is_ok_and(|output| output.status.success()) {
        println!("skipped: no user namespaces");
        return;
    }
    let scratch = Scratch::new();
    let report = doctor_by("unshare", &namespace, &library(&scratch));
    report.fails(&["interfaces", "loopback", "connection", "statistics"]);
    assert!(
        report.line("loopback", false).contains("lo is down"),
        "{}",
        report.said
    );
    assert!(
        report
            .line("loopback", false)
            .contains("`ip link set lo up`")
    );
    // The other commands explain it, too.
    for (arguments, effect) in [
        (&["devices"][..], "there is no RDMA device"),
        (
            &["ping", "127.0.0.1", "-C", "1"],
            "127.0.0.1 cannot be reached",
        ),
    ] {
        let mut command = Command::new("unshare");
        let plain = iwarp(arguments);
        command
            .args(namespace)
            .arg(plain.get_program())
            .args(arguments);
        let output = command.env_remove("RUST_LOG").output().unwrap();
        let errors = text(&output.stderr);
        let sentence = format!("{effect}: the loopback interface lo is down; `ip link set lo up`");
        assert!(
            !output.status.success() && errors.contains(&sentence),
            "{errors}"
        );
        assert_eq!(errors.matches("is down").count(), 1, "{errors}");
    }
}

#[test]
fn excluded_devices_are_explained() {
    let scratch = Scratch::new();
    let mut command = doctor(&library(&scratch));
    let report = Report::new(&command.env("IWARP_BIND", "198.51.100.1").output().unwrap());
    report.fails(&["interfaces", "connection", "statistics"]);
    let line = report.line("interfaces", false);
    assert!(line.contains("IWARP_BIND excludes all devices"), "{line}");
    assert!(
        report
            .line("settings", true)
            .contains("IWARP_BIND=198.51.100.1")
    );
}

#[test]
fn low_limits_are_explained() {
    let scratch = Scratch::new();
    let script = "ulimit -n 100 && exec \"$@\"";
    let report = doctor_by("sh", &["-c", script, "sh"], &library(&scratch));
    report.fails(&["limits"]);
    assert!(
        report
            .line("limits", false)
            .contains("at most 100 open files")
    );
}

/// What the loader says comes with the name of the library.
#[test]
fn unacceptable_library_is_explained() {
    let scratch = Scratch::new();
    let text_file = scratch.path("text.so");
    std::fs::write(&text_file, "no library").unwrap();
    let incomplete = scratch.path("incomplete.so");
    let source = "int other(void); int one(void) { return other(); }";
    compile(&incomplete, source, &["-shared", "-fPIC"]);
    for (library, reason) in [
        (&text_file, "file too short"),
        (&incomplete, "undefined symbol: other"),
        (&scratch.path("absent"), "absent"),
    ] {
        let report = Report::new(&doctor(library).output().unwrap());
        report.fails(&["loader"]);
        let line = report.line("loader", false);
        assert!(line.contains(reason), "{line}");
    }
}

/// Starts a program with a filter that refuses `epoll_create1` and `epoll_create`, as a container
/// may.
const FILTER: &str = r#"
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_epoll_create1, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { sizeof filter / sizeof *filter, filter };

    if (argc < 2 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        return 99;
    execv(argv[1], argv + 1);
    return 98;
}
"#;

#[test]
fn refused_calls_are_explained() {
    let scratch = Scratch::new();
    let filter = scratch.path("filter");
    compile(&filter, FILTER, &[]);
    let report = doctor_by(str(&filter), &[], &library(&scratch));
    report.fails(&["seccomp", "connection", "statistics"]);
    let line = report.line("seccomp", false);
    assert!(
        line.contains("epoll and eventfd: Operation not permitted"),
        "{line}"
    );
}
