//! Finds fault reports in a Linux kernel's log.

/// Texts that fault reports contain.
const FAULT_TEXTS: &[&str] = &[
    "BUG:",
    "Oops",
    "WARNING:",
    "iwarp: panic",
    "Call Trace",
    "UBSAN:",
    "blocked for more than",
    "suspected memory leaks",
];
/// Number of lines from the start of a call trace that are searched for [`NO_MEMORY`].
const TRACE_LINES: usize = 8;
/// The kernel function that logs failed allocations. It is in the call trace of such a report.
const NO_MEMORY: &str = "warn_alloc";

/// Returns the first log line that reports a fault. A failed allocation does not count, although
/// the kernel logs a call trace: cases with fault injection cause them.
pub(crate) fn first(log: &str) -> Option<&str> {
    let lines: Vec<&str> = log.lines().collect();
    lines.iter().enumerate().find_map(|(i, line)| {
        let is_fault = FAULT_TEXTS.iter().any(|word| line.contains(word));
        let is_failed_allocation = line.contains("Call Trace")
            && lines[i..]
                .iter()
                .take(TRACE_LINES)
                .any(|line| line.contains(NO_MEMORY));
        (is_fault && !is_failed_allocation).then_some(*line)
    })
}

/// Returns the log line of a fault after which the kernel cannot be used. Warnings do not count.
pub(crate) fn fatal(log: &str) -> Option<&str> {
    log.lines()
        .find(|line| line.contains("BUG:") || line.contains("Oops"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_each_fault_text() {
        assert_eq!(first("[ 1.0] iwarp_rnic: unloaded\n"), None);
        for word in [
            "BUG: KASAN: slab-out-of-bounds in rk_post_send",
            "WARNING: possible circular locking dependency detected",
            "UBSAN: shift-out-of-bounds",
            "kmemleak: 3 new suspected memory leaks",
            "Call Trace:",
            "iwarp: panic at a.rs:7",
        ] {
            let log = format!("[ 0.9] fine\n[ 1.0] {word}\n[ 1.1] fine\n");
            assert_eq!(first(&log), Some(format!("[ 1.0] {word}").as_str()));
        }
    }

    #[test]
    fn failed_allocation_is_no_fault() {
        let log = "[ 1.0] hostile: vmalloc error: size 4096\n[ 1.0] Call Trace:\n[ 1.0]  <TASK>\n\
            [ 1.0]  dump_stack_lvl+0x54\n[ 1.0]  warn_alloc+0x1a\n";
        assert_eq!(first(log), None);
        assert!(first(&format!("{log}[ 1.1] BUG: bad page\n")).is_some());
    }
}
