//! Compiles the C programs of `tests/c` with Debian's headers, and runs them with the built
//! library.

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
        // `plugin` loads the library at run time.
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

fn run_program(name: &str) {
    run_with_face(name, "rnic");
}

/// Compiles and runs a program with a face of the devices, which is also the program's argument.
/// Returns the program's standard error, or `None` if the headers are missing.
fn run_with_face(name: &str, face: &str) -> Option<String> {
    if !headers_installed() {
        return None;
    }
    let folder = common::Folder::new(&format!("{name}-{face}"));
    let exe = compile(name, &folder);
    Some(run_compiled(&exe, &folder, face, &[]))
}

/// Runs a compiled program with a face and further arguments. Returns its standard error. Panics
/// unless the last line of its output reports that no check failed.
fn run_compiled(exe: &Path, folder: &common::Folder, face: &str, extra_args: &[&str]) -> String {
    let mut program = Command::new(exe);
    program
        .arg(face)
        .args(extra_args)
        .env("IWARP_AS", face)
        .env("LD_LIBRARY_PATH", &folder.0);
    common::run_checks(&mut program)
}

/// The shell writes more than fits into a pipe, and its child process keeps both pipes open.
#[test]
fn hung_program_is_killed_and_named() {
    let script = "sleep 1000 & head -c 100000 /dev/zero | tr '\\0' x; wait";
    let hung = std::panic::catch_unwind(|| {
        let limit = std::time::Duration::from_millis(300);
        common::run_checks_within(limit, Command::new("sh").args(["-c", script]))
    });
    let output = hung.unwrap_err().downcast::<String>().unwrap();
    assert!(
        output.starts_with("sh did not end within 300ms\nxxx"),
        "{output}"
    );
}

/// The program uses the devices as if they had the other face, several times. The library logs a
/// single hint.
#[test]
fn devices_show_either_face() {
    for (face, other) in [("rnic", "roce"), ("roce", "rnic")] {
        let Some(output) = run_with_face("face", face) else {
            return;
        };
        let hints: Vec<&str> = output.lines().filter(|l| l.contains("IWARP_AS")).collect();
        let [hint] = hints[..] else {
            panic!("{face}: {output}");
        };
        assert!(hint.contains(&format!("--as {other}")), "{hint}");
    }
}

#[test]
fn only_roce_connects_without_queue_pair() {
    for face in ["rnic", "roce"] {
        run_with_face("no_queue_pair", face);
    }
}

#[test]
fn misused_verbs_return_errors() {
    run_program("misuse");
}

#[test]
fn misused_cm_returns_errors() {
    run_program("misuse_cm");
}

#[test]
fn addresses_resolve_as_in_librdmacm() {
    run_program("addresses");
}

#[test]
fn exchange_with_every_operation() {
    run_program("exchange");
}

#[test]
fn solicited_and_failed_completions_notify() {
    run_program("solicited");
}

#[test]
fn later_headers_work() {
    run_program("later_headers");
}

#[test]
fn unreliable_connections_lose_messages_without_receive() {
    for face in ["rnic", "roce"] {
        run_with_face("unreliable", face);
    }
}

#[test]
fn connections_by_number_follow_verbs() {
    run_program("connected_by_number");
}

#[test]
fn peer_death_ends_connection_by_number() {
    for face in ["rnic", "roce"] {
        run_with_face("peer_dies", face);
    }
}

#[test]
fn killed_peer_ends_connection() {
    for face in ["rnic", "roce"] {
        run_with_face("peer_killed", face);
    }
}

#[test]
fn destroyed_objects_leak_nothing() {
    run_with_face("leaks", "rnic");
}

#[test]
fn destroyed_roce_objects_leak_nothing() {
    run_with_face("leaks", "roce");
}

#[test]
fn connections_behave_with_each_face() {
    for face in ["rnic", "roce"] {
        run_with_face("connections", face);
    }
}

#[test]
fn datagrams_reach_peers_and_groups() {
    run_program("datagrams");
}

#[test]
fn datagrams_report_their_path() {
    for face in ["rnic", "roce"] {
        run_with_face("datagram_paths", face);
    }
}

#[test]
fn changed_attributes_take_effect() {
    for face in ["rnic", "roce"] {
        run_with_face("attribute_changes", face);
    }
}

#[test]
fn reported_values_match_objects() {
    run_program("reported_values");
}

#[test]
fn endpoints_receive_peer_parameters() {
    for face in ["rnic", "roce"] {
        run_with_face("endpoints", face);
    }
}

#[test]
fn destroy_waits_for_acknowledgements() {
    run_program("unacknowledged");
}

#[test]
fn failed_calls_have_no_side_effects() {
    run_program("side_effects");
}

#[test]
fn identifiers_migrate_between_channels() {
    run_program("migrate");
}

#[test]
fn xrc_reaches_shared_receive_queues() {
    for face in ["rnic", "roce"] {
        run_with_face("xrc", face);
    }
}

#[test]
fn datagram_ids_report_destinations() {
    for face in ["rnic", "roce"] {
        run_with_face("datagram_ids", face);
    }
}

/// Injects each kind of fault as `iwarp run --fault` does.
#[test]
fn injected_faults_reach_verbs() {
    run_program("faults");
}

#[test]
fn injected_faults_reach_cm() {
    run_program("faults_cm");
}

#[test]
fn library_survives_process_events() {
    run_program("process_life");
}

#[test]
fn library_survives_unusual_environments() {
    run_program("environment");
}

#[test]
fn plugin_loads_and_unloads_library() {
    run_program("plugin");
}

#[test]
fn hanging_page_fault_stops_one_connection() {
    run_program("page_fault_hangs");
}

/// Programs may install their own handlers for SIGSEGV and SIGBUS, before or after the library.
#[test]
fn unmapped_memory_fails_only_its_access() {
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
            run_compiled(&exe, &folder, face, &[handlers]);
        }
    }
}

/// These settings select the code that reads the payload. Without CRC, only the kernel reads it.
#[test]
fn unmapped_memory_fails_with_each_setting() {
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
            common::run_checks(&mut program);
        }
    }
}

/// Without the library's handler, the first access to unmapped memory ends the process.
#[test]
fn disabled_memory_guard_ends_process() {
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
    run_with_both_faces("slots");
}

#[test]
fn invalid_state_changes_are_refused() {
    run_with_both_faces("states");
}

#[test]
fn limits_and_errors_match_kernel_drivers() {
    run_with_both_faces("limits");
}

/// Wrong calls for which this library returns another error than siw, and that error. See
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

/// `errnos-siw.txt` contains the output of this program on Linux's siw.
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
    let expected: Vec<(&str, &str)> = recorded
        .iter()
        .map(|row| {
            *UNLIKE_SIW
                .iter()
                .find(|(call, _)| *call == row.0)
                .unwrap_or(row)
        })
        .collect();
    let differences = recorded.iter().zip(&expected).filter(|(a, b)| a != b);
    assert_eq!(differences.count(), UNLIKE_SIW.len());
    let folder = common::Folder::new("errnos");
    let exe = compile("errnos", &folder);
    let output = run_compiled(&exe, &folder, "rnic", &["127.0.0.1"]);
    let returned: Vec<(&str, &str)> = output
        .lines()
        .filter(|line| line.starts_with("ibv_"))
        .filter_map(|line| line.split_once(": "))
        .collect();
    assert_eq!(returned, expected);
}

#[test]
fn library_survives_out_of_memory() {
    run_with_both_faces("no_memory");
}

fn run_with_both_faces(name: &str) {
    for face in ["rnic", "roce"] {
        run_with_face(name, face);
    }
}

#[test]
fn peer_uses_null_region() {
    run_with_both_faces("null_region");
}

#[test]
fn flush_waits_for_placement() {
    run_with_both_faces("flush");
}

#[test]
fn completion_counters_count_operations() {
    run_with_both_faces("counters");
}

#[test]
fn dmabuf_regions_work() {
    run_with_both_faces("dmabuf");
}
