//! Known sporadic faults of the programs under test. A case that fails because of such a fault is
//! retried.

/// Maximum number of retries.
pub(crate) const ATTEMPTS: usize = 6;

/// Texts that a client's output contains (all of them) if a fault occurred, and a description of
/// the fault.
type Fault = (&'static [&'static str], &'static str);

/// perftest's server closes its first listener before it opens the second. A client that connects
/// in between is refused.
const NOT_LISTENING: &str = "perftest's server did not listen yet for the second connection";

const FAULTS: &[Fault] = &[
    (&["Failed to resolve RDMA CM address"], NOT_LISTENING),
    (
        &["Failed to connect through RDMA CM", "Connection refused"],
        NOT_LISTENING,
    ),
    (
        &[
            "Failed to handle RDMA CM event",
            "RDMA_CM_EVENT_REJECTED; error: -111",
        ],
        NOT_LISTENING,
    ),
    // rping closes the channel while its thread still handles the last event. Newer versions of
    // rdma-core wait for the thread.
    (
        &["rdma_get_cm_event: Bad file descriptor"],
        "rping read events from a channel that it had closed",
    ),
    // At the end, perftest measures the CPU frequency with two clocks. If other processes used the
    // CPU meanwhile, it gives up, and its peer's requests are flushed.
    (
        &["Correlation coefficient r^2", "produce a report"],
        "perftest could not measure the CPU frequency",
    ),
    // libiscsi frees a connection without destroying its rdma_cm identifier. When its thread
    // receives the disconnect event, it posts a semaphore in freed memory. Newer versions have no
    // such thread.
    (
        &["qemu-img exited with status", "The futex facility returned"],
        "libiscsi used a connection that it had freed",
    ),
    // If a response arrives before the kernel has acknowledged the request, iscsiadm's
    // `__kipc_call` stores the response. `iscsi_login` and `discovery_sendtargets` then poll the
    // empty socket and ignore the stored response. Meanwhile tgt sends a NOP-In, for which ib_iser
    // posts no receive in a discovery session, so the connection ends. `iser-disk` writes this
    // line.
    (
        &["iscsiadm waited for an answer that it had already received"],
        "iscsiadm waited for an answer that it had already received",
    ),
];

/// Returns the description of the known fault that explains the programs' output.
pub(crate) fn known_fault(output: &str) -> Option<&'static str> {
    FAULTS
        .iter()
        .find(|(texts, _)| texts.iter().all(|text| output.contains(text)))
        .map(|(_, fault)| *fault)
}

/// Returns a shell script that sets `ATTEMPTS`, and defines `excused FILE`: it succeeds if FILE
/// contains the texts of a known fault.
pub(crate) fn as_shell() -> String {
    let rows: Vec<String> = FAULTS
        .iter()
        .map(|(texts, _)| {
            let found: Vec<String> = texts
                .iter()
                .map(|text| format!("grep -qF '{text}' $1"))
                .collect();
            format!("{{ {}; }}", found.join(" && "))
        })
        .collect();
    format!(
        "ATTEMPTS={ATTEMPTS}\nexcused() {{ {}; }}\n",
        rows.join(" || ")
    )
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Outputs of clients, and whether a known fault explains them.
    const OUTPUTS: &[(&str, bool)] = &[
        ("Failed to resolve RDMA CM address.\n", true),
        (
            "Failed to connect through RDMA CM.\nError: Connection refused\n",
            true,
        ),
        (
            "Failed to connect through RDMA CM.\nError: timed out\n",
            false,
        ),
        (
            "Event: RDMA_CM_EVENT_REJECTED; error: -111.\nFailed to handle RDMA CM event.\n",
            true,
        ),
        (
            "Correlation coefficient r^2: 0.53 < 0.9\nCan't produce a report\n",
            true,
        ),
        (
            "client DISCONNECT EVENT...\nrdma_get_cm_event: Bad file descriptor\n",
            true,
        ),
        (
            "qemu-img exited with status -1: The futex facility returned an error.\n",
            true,
        ),
        (
            "The futex facility returned an unexpected error code.\n",
            false,
        ),
        (
            "iscsiadm: expecting event 19, got 101, handling...\n\
             iscsiadm waited for an answer that it had already received\n",
            true,
        ),
        (
            "iscsiadm: Could not perform SendTargets discovery: internal error\n",
            false,
        ),
        ("Correlation coefficient r^2: 0.89 < 0.9\n", false),
        ("Connection refused\n", false),
        ("", false),
    ];

    #[test]
    fn only_known_faults_are_excused() {
        for (output, excused) in OUTPUTS {
            assert_eq!(known_fault(output).is_some(), *excused, "{output}");
        }
    }

    #[test]
    fn shell_function_agrees() {
        let file = std::env::temp_dir().join(format!("iwarp-excuse-{}", std::process::id()));
        for (output, excused) in OUTPUTS {
            std::fs::write(&file, output).unwrap();
            let script = format!("{}excused {}", as_shell(), file.display());
            let status = Command::new("sh").args(["-c", &script]).status().unwrap();
            assert_eq!(status.success(), *excused, "{output}");
        }
        std::fs::remove_file(file).unwrap();
    }
}
