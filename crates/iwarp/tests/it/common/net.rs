//! A network of two hosts for tests. Each test re-executes itself in a new network namespace, with
//! one thread in a second namespace and a `veth` pair between the two. The kernel removes them when
//! the test's process ends. If namespaces are not permitted, the tests are skipped; with
//! `IWARP_REQUIRE_NAMESPACES=1` they fail.

use super::Watchdog;
use super::alone::path_of;
use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;
use std::sync::mpsc::{Sender, channel};

pub const NEAR: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 7, 1));
pub const FAR: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 7, 2));
/// Environment variable that is set in the re-executed test.
const INSIDE: &str = "IWARP_TEST_OUTAGE_INSIDE";

/// Two connected network namespaces. The calling thread is in the near namespace, a helper thread
/// in the far one.
pub struct Net {
    /// Work for the thread in the far namespace.
    far: Sender<Box<dyn FnOnce() + Send>>,
}

/// Runs the command `ip` in the namespace of this thread.
pub fn ip(args: &str) {
    let out = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(out.status.success(), "ip {args}: {out:?}");
}

impl Net {
    fn new() -> Self {
        let (far, work) = channel::<Box<dyn FnOnce() + Send>>();
        let (tell, place) = channel();
        std::thread::spawn(move || {
            // SAFETY: the call affects only this thread's network namespace.
            let status = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
            let thread = std::fs::read_link("/proc/thread-self").unwrap();
            tell.send(format!("/proc/{}/ns/net", thread.display()))
                .unwrap();
            work.into_iter().for_each(|job| job());
        });
        let place = place.recv().unwrap();
        ip(&format!(
            "link add near type veth peer name far netns {place}"
        ));
        ip(&format!("addr add {NEAR}/24 dev near"));
        ip("link set lo up");
        ip("link set near up");
        let net = Self { far };
        net.at_far(|| {
            ip(&format!("addr add {FAR}/24 dev far"));
            ip("link set far up");
        });
        net
    }

    /// Runs `job` in the far namespace and returns its result. Sockets and devices that it opens
    /// belong to that namespace.
    pub fn at_far<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> R {
        let (tell, result) = channel();
        let job = move || tell.send(job()).unwrap();
        self.far.send(Box::new(job)).unwrap();
        result.recv().unwrap()
    }

    /// Runs `during` while the link is down.
    pub fn outage<R>(&self, during: impl FnOnce() -> R) -> R {
        ip("link set near down");
        let result = during();
        ip("link set near up");
        result
    }
}

/// Returns a command that runs its arguments in a new network namespace. For users other than root,
/// it also creates a user namespace, because only root may create network namespaces.
fn namespace() -> Command {
    let mut command = Command::new("unshare");
    command.arg("--net");
    // SAFETY: the call has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        command.args(["--user", "--map-root-user"]);
    }
    let paths = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    command.env("PATH", paths);
    command
}

/// Runs `body`, the body of the test `name`, in new namespaces.
#[track_caller]
pub fn inside(name: &str, body: impl FnOnce(&Net)) {
    if std::env::var_os(INSIDE).is_some() {
        let _guard = Watchdog::new();
        return body(&Net::new());
    }
    // The probe checks each permission that the test needs.
    let probe =
        "ip link add near type veth peer name far && ip link set near up && unshare --net true";
    let out = namespace().args(["sh", "-c", probe]).output();
    let obstacle = match out {
        Ok(out) if out.status.success() => None,
        Ok(out) => Some(String::from_utf8_lossy(&out.stderr).trim().to_owned()),
        Err(e) => Some(format!("unshare: {e}")),
    };
    if let Some(reason) = obstacle {
        let required = std::env::var_os("IWARP_REQUIRE_NAMESPACES").is_some_and(|v| v == "1");
        assert!(!required, "no network namespaces: {reason}");
        println!("skipped: no network namespaces: {reason}");
        return;
    }
    let out = namespace()
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", &path_of(name)])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    let err = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{text}{err}");
    assert!(text.contains("1 passed"), "{text}{err}");
}
