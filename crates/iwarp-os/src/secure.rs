//! Detects whether the program has privileges that its user does not have. Invariant: `getauxval`
//! reads a table that never changes.

/// Returns `true` if the program has more privileges than the user who started it (setuid, file
/// capabilities). Then the program must not write to a file that an environment variable names.
pub fn environment_is_untrusted() -> bool {
    // SAFETY: the call accepts any number, and returns 0 for an unknown one.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

#[cfg(test)]
mod tests {
    /// The tests are not set-user-ID.
    #[test]
    fn ordinary_environment_is_trusted() {
        assert!(!super::environment_is_untrusted());
    }
}
