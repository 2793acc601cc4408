//! C programs of `tests/c`, compiled with Debian's headers and run on the built library.

use crate::common;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns `true` if Debian's headers are installed. Panics if `IWARP_REQUIRE_RDMA_TOOLS` is set
/// and they are missing.
fn headers_installed() -> bool {
    let found = ["infiniband/verbs.h", "rdma/rdma_cma.h"]
        .iter()
        .all(|h| Path::new("/usr/include").join(h).exists());
    assert!(
        found || std::env::var_os("IWARP_REQUIRE_RDMA_TOOLS").is_none(),
        "libibverbs-dev and librdmacm-dev are required"
    );
    if !found {
        eprintln!("skipped: needs libibverbs-dev and librdmacm-dev");
    }
    found
}

fn compile(name: &str, folder: &common::Folder) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{name}.c"));
    let exe = folder.0.join(name);
    let status = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-pthread", "-g", "-o"])
        .arg(&exe)
        // `plugin` loads the library itself.
        .arg("-Wl,--as-needed")
        .arg(&source)
        .arg("-L")
        .arg(&folder.0)
        .args(["-l:libibverbs.so.1", "-l:librdmacm.so.1"])
        .status()
        .expect("a C compiler must be installed; Rust needs it to link, too");
    assert!(status.success(), "{} does not compile", source.display());
    exe
}

fn passes(name: &str) {
    passes_as(name, "rnic");
}

/// Compiles and runs a program with this face of the devices, which is also its argument. Returns
/// its standard error, or `None` if the headers are missing.
fn passes_as(name: &str, face: &str) -> Option<String> {
    if !headers_installed() {
        return None;
    }
    let folder = common::Folder::new(&format!("{name}-{face}"));
    let exe = compile(name, &folder);
    Some(runs_as(&exe, &folder, face, &[]))
}

/// Runs a compiled program with this face and further arguments. Its last line must say that no
/// check failed. Returns its standard error.
fn runs_as(exe: &Path, folder: &common::Folder, face: &str, more: &[&str]) -> String {
    let mut program = Command::new(exe);
    program
        .arg(face)
        .args(more)
        .env("IWARP_AS", face)
        .env("LD_LIBRARY_PATH", &folder.0);
    common::passes(&mut program)
}

/// The shell writes more than a pipe holds, and its child keeps both pipes open.
#[test]
fn hung_program_is_killed_and_named() {
    let script = "sleep 1000 & head -c 100000 /dev/zero | tr '\\0' x; wait";
    let hung = std::panic::catch_unwind(|| {
        let limit = std::time::Duration::from_millis(300);
        common::passes_within(limit, Command::new("sh").args(["-c", script]))
    });
    let said = hung.unwrap_err().downcast::<String>().unwrap();
    assert!(
        said.starts_with("sh did not end within 300ms\nxxx"),
        "{said}"
    );
}

/// With each face, the programs repeatedly do what programs for the other face do. They get one
/// hint.
#[test]
fn devices_show_either_face() {
    for (face, other) in [("rnic", "roce"), ("roce", "rnic")] {
        let Some(said) = passes_as("face", face) else {
            return;
        };
        let hints: Vec<&str> = said.lines().filter(|l| l.contains("IWARP_AS")).collect();
        let [hint] = hints[..] else {
            panic!("{face}: {said}");
        };
        assert!(hint.contains(&format!("--as {other}")), "{hint}");
    }
}

#[test]
fn only_roce_connects_without_queue_pair() {
    for face in ["rnic", "roce"] {
        passes_as("no_queue_pair", face);
    }
}

#[test]
fn misused_verbs_return_errors() {
    passes("misuse");
}

#[test]
fn misused_cm_returns_errors() {
    passes("misuse_cm");
}

#[test]
fn addresses_resolve_as_in_librdmacm() {
    passes("addresses");
}

#[test]
fn exchange_with_every_operation() {
    passes("exchange");
}

#[test]
fn solicited_and_failed_completions_notify() {
    passes("solicited");
}

#[test]
fn later_headers_find_their_functions() {
    passes("later_headers");
}

#[test]
fn unreliable_connections_lose_unreceived_only() {
    for face in ["rnic", "roce"] {
        passes_as("unreliable", face);
    }
}

#[test]
fn connections_by_number_follow_verbs() {
    passes("connected_by_number");
}

#[test]
fn peer_by_number_dies() {
    for face in ["rnic", "roce"] {
        passes_as("peer_dies", face);
    }
}

#[test]
fn killed_peer_ends_connection() {
    for face in ["rnic", "roce"] {
        passes_as("peer_killed", face);
    }
}

#[test]
fn destroyed_objects_leak_nothing() {
    passes_as("leaks", "rnic");
}

#[test]
fn destroyed_roce_objects_leak_nothing() {
    passes_as("leaks", "roce");
}

#[test]
fn connections_with_each_face() {
    for face in ["rnic", "roce"] {
        passes_as("connections", face);
    }
}

#[test]
fn datagrams_reach_peers_and_groups() {
    passes("datagrams");
}

#[test]
fn datagrams_report_their_path() {
    for face in ["rnic", "roce"] {
        passes_as("datagram_paths", face);
    }
}

#[test]
fn changed_attributes_take_effect() {
    for face in ["rnic", "roce"] {
        passes_as("attribute_changes", face);
    }
}

#[test]
fn reported_values_match_objects() {
    passes("reported_values");
}

#[test]
fn endpoints_receive_peer_parameters() {
    for face in ["rnic", "roce"] {
        passes_as("endpoints", face);
    }
}

#[test]
fn destroy_waits_for_acknowledgements() {
    passes("unacknowledged");
}

#[test]
fn failed_calls_have_no_side_effects() {
    passes("side_effects");
}

#[test]
fn identifiers_migrate_between_channels() {
    passes("migrate");
}

#[test]
fn xrc_names_shared_receive_queues() {
    for face in ["rnic", "roce"] {
        passes_as("xrc", face);
    }
}

#[test]
fn datagram_ids_report_destinations() {
    for face in ["rnic", "roce"] {
        passes_as("datagram_ids", face);
    }
}

/// Injects each kind of fault as `iwarp run --fault` does.
#[test]
fn injected_faults_reach_verbs() {
    passes("faults");
}

#[test]
fn injected_faults_reach_cm() {
    passes("faults_cm");
}

#[test]
fn library_survives_process_events() {
    passes("process_life");
}

#[test]
fn library_survives_unusual_environments() {
    passes("environment");
}

#[test]
fn plugin_loads_and_unloads_library() {
    passes("plugin");
}

#[test]
fn hanging_page_fault_stops_one_connection() {
    passes("page_fault_hangs");
}

/// With each kind of handler for SIGSEGV and SIGBUS, installed at different times.
#[test]
fn unmapped_memory_fails_the_access_only() {
    if !headers_installed() {
        return;
    }
    let folder = common::Folder::new("unmapped");
    let exe = compile("unmapped", &folder);
    for face in ["rnic", "roce"] {
        for handlers in [
            "none",
            "before",
            "before-info",
            "before-stack",
            "before-info-stack-node",
            "before-info-once",
            "after",
            "after-info",
            "after-stack",
            "after-info-stack-node",
            "after-once",
            "chain",
            "blocked",
            "ignored",
        ] {
            runs_as(&exe, &folder, face, &[handlers]);
        }
    }
}

/// Without CRC, only the kernel reads the payload that is sent.
#[test]
fn unmapped_memory_fails_system_calls() {
    if !headers_installed() {
        return;
    }
    let folder = common::Folder::new("unmapped-plain");
    let exe = compile("unmapped", &folder);
    for face in ["rnic", "roce"] {
        for (name, value) in [
            ("IWARP_CRC", "off"),
            ("IWARP_SNAPSHOT", "off"),
            ("IWARP_MARKERS", "on"),
        ] {
            let mut program = Command::new(&exe);
            program
                .args([face, "none"])
                .env("IWARP_AS", face)
                .env(name, value)
                .env("LD_LIBRARY_PATH", &folder.0);
            common::passes(&mut program);
        }
    }
}

/// Without the handler, the first access to unmapped memory ends the process.
#[test]
fn memory_guard_can_be_turned_off() {
    use std::os::unix::process::ExitStatusExt;

    if !headers_installed() {
        return;
    }
    let folder = common::Folder::new("unmapped-unguarded");
    let exe = compile("unmapped", &folder);
    let status = Command::new(&exe)
        .args(["rnic", "none"])
        .env("IWARP_MEMORY_GUARD", "off")
        .env("LD_LIBRARY_PATH", &folder.0)
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(11), "SIGSEGV");
}

#[test]
fn polling_frees_queue_slots() {
    passes_on_both("slots");
}

#[test]
fn invalid_state_changes_are_refused() {
    passes_on_both("states");
}

#[test]
fn limits_and_errors_match_kernel_drivers() {
    passes_on_both("limits");
}

/// Wrong calls for which this library's error differs from siw's, and the error. See
/// `docs/errno.md`.
const UNLIKE_SIW: &[(&str, &str)] = &[
    ("ibv_modify_srq with a limit above the new depth", "EINVAL"),
    (
        "ibv_create_qp with a completion queue of another context",
        "EINVAL",
    ),
    (
        "ibv_create_qp with a shared receive queue and sizes above all limits",
        "0",
    ),
    ("ibv_modify_qp of RESET to RTR", "EINVAL"),
    ("ibv_modify_qp of a peer in RTS", "EINVAL"),
    ("ibv_post_send into a full queue", "ENOMEM"),
    ("ibv_post_send with opcode 100", "EINVAL"),
    ("ibv_post_send of an inline Read", "EINVAL"),
    ("ibv_post_send with too much inline data", "EINVAL"),
    ("ibv_post_send in RESET", "EINVAL"),
    ("ibv_post_send with too many elements", "EINVAL"),
    ("ibv_post_recv with too many elements", "EINVAL"),
    ("ibv_post_srq_recv with too many elements", "EINVAL"),
    ("ibv_post_recv into a full queue", "ENOMEM"),
    ("ibv_post_recv with a shared receive queue", "EINVAL"),
];

/// The recording was written by the same program on Linux's siw.
#[test]
fn wrong_calls_return_recorded_errors() {
    if !headers_installed() {
        return;
    }
    let recorded: Vec<(&str, &str)> = include_str!("../c/errnos-siw.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once(": "))
        .collect();
    let wanted: Vec<(&str, &str)> = recorded
        .iter()
        .map(|row| {
            *UNLIKE_SIW
                .iter()
                .find(|(call, _)| *call == row.0)
                .unwrap_or(row)
        })
        .collect();
    let differences = recorded.iter().zip(&wanted).filter(|(a, b)| a != b);
    assert_eq!(differences.count(), UNLIKE_SIW.len());
    let folder = common::Folder::new("errnos");
    let exe = compile("errnos", &folder);
    let said = runs_as(&exe, &folder, "rnic", &["127.0.0.1"]);
    let returned: Vec<(&str, &str)> = said
        .lines()
        .filter(|line| line.starts_with("ibv_"))
        .filter_map(|line| line.split_once(": "))
        .collect();
    assert_eq!(returned, wanted);
}

#[test]
fn out_of_memory_is_survived() {
    passes_on_both("no_memory");
}

fn passes_on_both(name: &str) {
    for face in ["rnic", "roce"] {
        passes_as(name, face);
    }
}

#[test]
fn peer_uses_null_region() {
    passes_on_both("null_region");
}

#[test]
fn flush_waits_for_placement() {
    passes_on_both("flush");
}

#[test]
fn completion_counters_count() {
    passes_on_both("counters");
}

#[test]
fn dmabuf_is_mapped() {
    passes_on_both("dmabuf");
}
