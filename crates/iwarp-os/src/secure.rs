//! Detects privileges of the program that its caller does not have. Invariant: `getauxval` reads a
//! table that never changes.

/// Returns `true` if the environment comes from a user with fewer rights than the program (setuid,
/// file capabilities). Then no variable may name a file to write.
pub fn environment_is_untrusted() -> bool {
    // SAFETY: any number is allowed; an unknown one returns zero.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}
