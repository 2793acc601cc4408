//! The message of `iwarp run` if the command has no libraries, as after `cargo install`. It says
//! how to get them.

use std::path::Path;

/// Returns the message for a command whose own file is `exe`. It has the lines to type, for the
/// version of this command.
pub(super) fn advice(exe: &Path) -> String {
    let repository = env!("CARGO_PKG_REPOSITORY");
    let version = env!("CARGO_PKG_VERSION");
    // `iwarp run` looks for libraries in `lib/iwarp` beside `bin`, so the prefix of this command is
    // the best place.
    let beside = exe
        .parent()
        .filter(|dir| dir.ends_with("bin"))
        .and_then(Path::parent);
    let prefix = beside.map_or_else(
        || "~/.local".to_owned(),
        |dir| quoted(&dir.display().to_string()),
    );
    let then = match beside {
        Some(_) => String::new(),
        None => "\nThen start ~/.local/bin/iwarp.".to_owned(),
    };
    format!(
        "the libraries for RDMA programs (libibverbs.so.1, librdmacm.so.1, librspreload.so, libiwarp_paths.so) are not installed.\n\
         `cargo install` installs the command alone, because Cargo cannot install libraries. To add them:\n\
         \n  git clone --branch v{version} {repository}\n  cd iwarp\n  cargo xtask install --prefix {prefix}\n\
         \nThe Debian package `iwarp` contains them, too. If you have built them already, set \
         IWARP_LIBRARY to the path of libiwarp_verbs.so.{then}"
    )
}

/// Quotes a path for a shell, if it needs quotes.
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
    fn the_prefix_is_that_of_the_command() {
        let text = advice(Path::new("/home/ann/.cargo/bin/iwarp"));
        assert!(text.contains("cargo xtask install --prefix /home/ann/.cargo\n"));
        let text = advice(Path::new("/home/it's ann/bin/iwarp"));
        assert!(
            text.contains(r"--prefix '/home/it'\''s ann'"),
            "the shell takes {text}"
        );
    }

    #[test]
    fn a_command_outside_of_bin_is_replaced_by_another() {
        let text = advice(Path::new("/opt/iwarp"));
        assert!(text.contains("--prefix ~/.local\n") && text.contains("~/.local/bin/iwarp"));
    }
}
