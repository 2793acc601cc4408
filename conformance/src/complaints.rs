//! Messages by which a Linux kernel reports that something is wrong.

/// Text that such messages contain.
const WORDS: &[&str] = &[
    "BUG:",
    "Oops",
    "WARNING:",
    "iwarp: panic",
    "Call Trace",
    "UBSAN:",
    "blocked for more than",
    "suspected memory leaks",
];
/// Lines at the start of a trace that are searched for [`NO_MEMORY`].
const HEAD: usize = 8;
/// The kernel's function that reports a failed allocation.
const NO_MEMORY: &str = "warn_alloc";

/// Returns the first message that reports a fault.
///
/// A failed allocation is not a fault, although the kernel prints a trace: the cases with fault
/// injection cause it.
pub(crate) fn first(said: &str) -> Option<&str> {
    let lines: Vec<&str> = said.lines().collect();
    lines.iter().enumerate().find_map(|(at, line)| {
        let wrong = WORDS.iter().any(|word| line.contains(word));
        let wanted = line.contains("Call Trace")
            && lines[at..]
                .iter()
                .take(HEAD)
                .any(|line| line.contains(NO_MEMORY));
        (wrong && !wanted).then_some(*line)
    })
}

/// Returns the message of a kernel that cannot go on. Warnings do not count.
pub(crate) fn fatal(said: &str) -> Option<&str> {
    said.lines()
        .find(|line| line.contains("BUG:") || line.contains("Oops"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_complaint_is_found() {
        assert_eq!(first("[ 1.0] iwarp_rnic: unloaded\n"), None);
        for word in [
            "BUG: KASAN: slab-out-of-bounds in rk_post_send",
            "WARNING: possible circular locking dependency detected",
            "UBSAN: shift-out-of-bounds",
            "kmemleak: 3 new suspected memory leaks",
            "Call Trace:",
            "iwarp: panic at a.rs:7",
        ] {
            let said = format!("[ 0.9] fine\n[ 1.0] {word}\n[ 1.1] fine\n");
            assert_eq!(first(&said), Some(format!("[ 1.0] {word}").as_str()));
        }
    }

    #[test]
    fn failed_allocation_is_no_fault() {
        let said = "[ 1.0] hostile: vmalloc error: size 4096\n[ 1.0] Call Trace:\n[ 1.0]  <TASK>\n\
            [ 1.0]  dump_stack_lvl+0x54\n[ 1.0]  warn_alloc+0x1a\n";
        assert_eq!(first(said), None);
        assert!(first(&format!("{said}[ 1.1] BUG: bad page\n")).is_some());
    }
}
