//! The message of `iwarp run` if the libraries are not installed, as after `cargo install`.

use std::path::Path;

/// Returns the message for a command at `exe`, with the commands to type for this version.
pub(super) fn advice(exe: &Path) -> String {
    let repository = env!("CARGO_PKG_REPOSITORY");
    let version = env!("CARGO_PKG_VERSION");
    // `iwarp run` searches `lib/iwarp` beside `bin`, so suggest the prefix of this command.
    let own_prefix = exe
        .parent()
        .filter(|dir| dir.ends_with("bin"))
        .and_then(Path::parent);
    let prefix = own_prefix.map_or_else(
        || "~/.local".to_owned(),
        |dir| quoted(&dir.display().to_string()),
    );
    let last_step = match own_prefix {
        Some(_) => String::new(),
        None => "\nThen start ~/.local/bin/iwarp.".to_owned(),
    };
    format!(
        "the libraries for RDMA programs (libibverbs.so.1, librdmacm.so.1, librspreload.so, \
         libiwarp_paths.so) are not installed.\n\
         `cargo install` installs the command alone, because Cargo cannot install libraries. \
         To add them:\n\
         \n  git clone --branch v{version} {repository}\n  cd iwarp\n  \
         cargo xtask install --prefix {prefix}\n\
         \nAll files of a release contain them, too: {repository}/releases. If you have built \
         them already, set IWARP_LIBRARY to the path of libiwarp_verbs.so.{last_step}"
    )
}

fn quoted(path: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@%,:=".contains(c);
    if path.chars().all(plain) {
        return path.to_owned();
    }
    format!("'{}'", path.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_is_that_of_the_command() {
        let text = advice(Path::new("/home/ann/.cargo/bin/iwarp"));
        assert!(text.contains("cargo xtask install --prefix /home/ann/.cargo\n"));
        let text = advice(Path::new("/home/it's ann/bin/iwarp"));
        assert!(
            text.contains(r"--prefix '/home/it'\''s ann'"),
            "not quoted for the shell: {text}"
        );
    }

    #[test]
    fn command_outside_bin_gets_default_prefix() {
        let text = advice(Path::new("/opt/iwarp"));
        assert!(text.contains("--prefix ~/.local\n") && text.contains("~/.local/bin/iwarp"));
    }
}
