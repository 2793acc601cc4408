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

/// Compiles and runs a program. Its last line must say that no check failed.
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
fn devices_look_like_iwarp_nics_or_like_roce_nics() {
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
fn a_roce_nic_connects_identifiers_without_queue_pairs_and_an_iwarp_nic_does_not() {
    for face in ["rnic", "roce"] {
        passes_as("stand_in", face);
    }
}

#[test]
fn misused_verbs_return_the_right_errors() {
    passes("misuse");
}

#[test]
fn a_misused_connection_manager_returns_the_right_errors() {
    passes("misuse_cm");
}

#[test]
fn names_and_addresses_are_looked_up_as_librdmacm_does() {
    passes("addresses");
}

#[test]
fn an_exchange_uses_every_operation() {
    passes("exchange");
}

#[test]
fn solicited_events_come_only_for_solicited_completions_and_failures() {
    passes("solicited");
}

#[test]
fn programs_of_later_releases_find_their_functions() {
    passes("recent");
}

#[test]
fn unreliable_connections_lose_what_is_not_taken_and_nothing_else() {
    for face in ["rnic", "roce"] {
        passes_as("unreliable", face);
    }
}

#[test]
fn queue_pairs_connected_by_number_keep_the_promises_of_the_verbs() {
    passes("numbered");
}

#[test]
fn peer_by_number_dies() {
    for face in ["rnic", "roce"] {
        passes_as("dies", face);
    }
}

#[test]
fn killed_peer_ends_connection() {
    for face in ["rnic", "roce"] {
        passes_as("killed", face);
    }
}

#[test]
fn ended_objects_leave_nothing() {
    passes_as("leaks", "rnic");
}

#[test]
fn ended_roce_objects_leave_nothing() {
    passes_as("leaks", "roce");
}

#[test]
fn connections_of_each_face() {
    for face in ["rnic", "roce"] {
        passes_as("connections", face);
    }
}

#[test]
fn datagrams_go_both_ways_and_to_groups() {
    passes("datagrams");
}

#[test]
fn datagrams_tell_of_their_way() {
    for face in ["rnic", "roce"] {
        passes_as("routes", face);
    }
}

#[test]
fn attributes_hold_in_second_places() {
    for face in ["rnic", "roce"] {
        passes_as("places", face);
    }
}

#[test]
fn objects_and_completions_are_what_calls_say_of_them() {
    passes("told");
}

#[test]
fn both_ends_of_a_connection_learn_what_the_other_asks() {
    for face in ["rnic", "roce"] {
        passes_as("endpoints", face);
    }
}

#[test]
fn what_ends_an_object_waits_until_its_events_are_acknowledged() {
    passes("waits");
}

#[test]
fn a_refused_call_changes_nothing_and_the_end_of_an_object_nothing_of_others() {
    passes("leftovers");
}

#[test]
fn identifiers_move_between_channels_and_failures_leave_nothing() {
    passes("moves");
}

#[test]
fn extended_reliable_connections_name_shared_receive_queues() {
    for face in ["rnic", "roce"] {
        passes_as("xrc", face);
    }
}

#[test]
fn identifiers_for_datagrams_tell_where_to_send_to() {
    for face in ["rnic", "roce"] {
        passes_as("datagram_ids", face);
    }
}

/// Injects each kind of fault as `iwarp run --fault` does.
#[test]
fn injected_faults_are_seen_as_the_verbs_say() {
    passes("faults");
}

#[test]
fn injected_faults_are_seen_as_the_connection_manager_says() {
    passes("faults_cm");
}

#[test]
fn a_process_forks_runs_programs_becomes_a_daemon_cancels_threads_and_ends() {
    passes("life");
}

#[test]
fn small_stacks_sandboxes_and_another_network_namespace_are_survived() {
    passes("surroundings");
}

#[test]
fn a_plug_in_loads_and_unloads_the_library() {
    passes("plugin");
}

#[test]
fn a_page_fault_that_never_ends_stops_one_connection_only() {
    passes("stuck");
}

/// With each kind of handler for SIGSEGV and SIGBUS, installed at different times.
#[test]
fn gone_memory_fails_the_access_only() {
    if !headers_installed() {
        return;
    }
    let folder = common::Folder::new("gone");
    let exe = compile("gone", &folder);
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
fn gone_memory_fails_system_calls() {
    if !headers_installed() {
        return;
    }
    let folder = common::Folder::new("gone-plain");
    let exe = compile("gone", &folder);
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
    let folder = common::Folder::new("gone-unguarded");
    let exe = compile("gone", &folder);
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
fn no_memory_is_an_error_and_not_the_end() {
    passes_on_both("no_memory");
}

/// Runs a program with both faces.
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
