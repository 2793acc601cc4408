//! Finds out whether the program has privileges that its caller does not have. Invariant: `getauxval` reads a table that never
//! changes.

/// Returns `true` if the environment comes from somebody with fewer rights than the program (setuid, file capabilities). Then no
/// variable of it may name a file to write.
pub fn environment_is_untrusted() -> bool {
    // SAFETY: any number may be asked for; an unknown one gives zero.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}
