//! Known faults of the programs that run, which happen by chance. What failed because of one is run
//! again.

/// How often that is done.
pub(crate) const ATTEMPTS: usize = 6;

/// What clients say because of a fault: all texts of a row.
type Fault = (&'static [&'static str], &'static str);

/// perftest's server closes its first listener before it opens the second. On a slow machine its
/// client may connect in between.
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
    // The end closes the channel while a thread still looks at the last event. Newer versions of
    // rdma-core wait for that thread.
    (
        &["rdma_get_cm_event: Bad file descriptor"],
        "rping asked for events on a channel that it had closed",
    ),
    // It compares two clocks in the end. Where other processes take the processor meanwhile it
    // gives up, and its peer's queue is flushed.
    (
        &["Correlation coefficient r^2", "produce a report"],
        "perftest could not find out how fast the processor is",
    ),
    // It frees a connection that it has not destroyed at the connection manager. Its thread may
    // then hear of the end, and posts a semaphore in memory that the C library has filled anew.
    // Newer versions have no such thread.
    (
        &["qemu-img ended with", "The futex facility returned"],
        "libiscsi told a connection of its end that it had freed",
    ),
    // An answer that comes before the kernel has acknowledged the request is kept by iscsiadm's
    // `__kipc_call`. Then `iscsi_login` and `discovery_sendtargets` poll the socket, where nothing
    // is left, and do not look for what is kept. Meanwhile tgt sends a NOP-In, for which ib_iser
    // has no receive in a discovery session, so the connection ends. `iser-disk` writes this line.
    (
        &["iscsiadm waited for an answer that it had already"],
        "iscsiadm waited for an answer that it had already",
    ),
];

/// The fault of the programs that made them fail, if it is one, from what they wrote.
pub(crate) fn of_programs(said: &str) -> Option<&'static str> {
    FAULTS
        .iter()
        .find(|(texts, _)| texts.iter().all(|text| said.contains(text)))
        .map(|(_, fault)| *fault)
}

/// A function `excused FILE` for shell scripts, which is [`of_programs`] for what is in a file.
/// `ATTEMPTS` goes with it.
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

    /// What clients wrote, and whether it is excused.
    const SAID: &[(&str, bool)] = &[
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
            "qemu-img ended with -1: The futex facility returned an unexpected error code.\n",
            true,
        ),
        (
            "The futex facility returned an unexpected error code.\n",
            false,
        ),
        (
            "iscsiadm: expecting event 19, got 101, handling...\niscsiadm waited for an answer that it had already\n",
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
    fn only_what_programs_say_of_their_own_faults_is_excused() {
        for (said, excused) in SAID {
            assert_eq!(of_programs(said).is_some(), *excused, "{said}");
        }
    }

    #[test]
    fn the_shell_has_the_same_rule() {
        let file = std::env::temp_dir().join(format!("iwarp-excuse-{}", std::process::id()));
        for (said, excused) in SAID {
            std::fs::write(&file, said).unwrap();
            let script = format!("{}excused {}", as_shell(), file.display());
            let status = Command::new("sh").args(["-c", &script]).status().unwrap();
            assert_eq!(status.success(), *excused, "{said}");
        }
        std::fs::remove_file(file).unwrap();
    }
}
