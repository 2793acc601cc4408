//! The rules for Rust source files and for all text files.

use super::code::code_only;
use super::{Finding, Severity};

/// A file with more lines is an error.
const LINES_MAX: usize = 900;
/// A file with more lines is a warning.
const LINES_WARN: usize = 600;
/// How many lines above an `unsafe` block its SAFETY comment may begin. The comment may have
/// several lines.
const SAFETY_REACH: usize = 10;

/// Marks of unfinished work. They are split into two literals, because otherwise this file would
/// violate its own rule.
const UNFINISHED_WORDS: &[&str] = &[
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
];
const UNFINISHED_MACROS: &[&str] = &[concat!("todo", "!"), concat!("unimplemented", "!")];

/// Names of the wall clock. An administrator or the network may set it, which would break timers
/// that use it.
const WALL_CLOCK: &[&str] = &["SystemTime", "UNIX_EPOCH", "CLOCK_REALTIME", "Realtime"];
/// The libraries. They must not use the wall clock.
const MONOTONIC_ONLY: &[&str] = &[
    "crates/iwarp-proto/src/",
    "crates/iwarp-rnic/src/",
    "crates/iwarp/src/",
    "crates/iwarp-verbs/src/",
    "crates/iwarp-rsocket/src/",
    "crates/iwarp-rspreload/src/",
];
/// The exceptions. These files only report the time: in captured packets, and in completions if
/// the program asks for it.
const SHOWS_TIME: &[&str] = &[
    "crates/iwarp/src/capture/output.rs",
    "crates/iwarp-verbs/src/cq/extended.rs",
];

/// The libraries that are part of programs that may fork. If a static lock is held at the time of
/// a fork, it stays held forever in the child.
const FORK_SAFE: &[&str] = &[
    "crates/iwarp/src/",
    "crates/iwarp-verbs/src/",
    "crates/iwarp-rsocket/src/",
    "crates/iwarp-rspreload/src/",
    "crates/iwarp-paths/src/",
];
/// Types that a thread may have locked at the time of a fork.
const LOCKS: &[&str] = &["Mutex", "RwLock", "Once", "OnceLock", "LazyLock"];

/// Prefixes of paths that exist on one person's machine only. Examples use `/home/`, which is
/// allowed.
const MACHINE_PATHS: &[&str] = &[concat!("/ro", "ot/"), concat!("/Us", "ers/")];

/// The files and folders that may contain `unsafe`, from `unsafe-modules.txt`.
pub(crate) struct UnsafeModules {
    paths: Vec<String>,
}

impl UnsafeModules {
    /// Parses the table.
    ///
    /// # Errors
    /// If a line has no reason. The text names the line.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut paths = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            match line.split_once(char::is_whitespace) {
                Some((path, _reason)) => paths.push(path.to_owned()),
                None => return Err(format!("line {}: {line} has no reason", at + 1)),
            }
        }
        Ok(Self { paths })
    }

    fn allows(&self, file: &str) -> bool {
        self.paths
            .iter()
            .any(|path| file == path || (path.ends_with('/') && file.starts_with(path)))
    }
}

/// Checks the rules for one `.rs` file.
pub(crate) fn rust(file: &str, text: &str, modules: &UnsafeModules) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |line: usize, text: String| {
        findings.push(Finding {
            severity: Severity::Error,
            place: format!("{file}:{line}"),
            text,
        });
    };
    if !text
        .lines()
        .next()
        .is_some_and(|line| line.starts_with("//!"))
    {
        add(
            1,
            "the file does not start with a `//!` comment about its purpose".into(),
        );
    }
    for (at, line) in text.lines().enumerate() {
        for word in UNFINISHED_WORDS {
            if has_word(line, word) {
                add(at + 1, format!("{word}: finish it, or open an issue"));
            }
        }
    }
    let code = code_only(text);
    let raw: Vec<&str> = text.lines().collect();
    for (at, line) in code.lines().enumerate() {
        for name in UNFINISHED_MACROS {
            if line.contains(name) {
                add(at + 1, format!("{name} is not an implementation"));
            }
        }
        if reads_wall_clock(file, line) {
            add(
                at + 1,
                "the wall clock may be set: use the monotonic clock".into(),
            );
        }
        if is_static_lock(file, line) && !is_test(file, &code, at) {
            add(
                at + 1,
                "a fork may leave the lock held in the child: use `ProcessLock`, or none".into(),
            );
        }
        if !has_word(line, "unsafe") {
            continue;
        }
        if !modules.allows(file) {
            add(
                at + 1,
                "`unsafe` is allowed only in the modules of xtask/unsafe-modules.txt".into(),
            );
        }
        if needs_reason(&code, at) && !has_reason(&raw, &code, at) {
            add(
                at + 1,
                "no SAFETY: comment above this line states why it is sound".into(),
            );
        }
    }
    findings.extend(length(file, raw.len()));
    findings
}

/// Returns `true` if the line declares a static lock in a library that must be safe to fork.
fn is_static_lock(file: &str, line: &str) -> bool {
    let code = line.trim_start();
    let code = code.split_once(") ").map_or(code, |(visible, rest)| {
        if visible.starts_with("pub(") {
            rest
        } else {
            code
        }
    });
    let is_static = code.trim_start_matches("pub ").starts_with("static ");
    let declared = code.split_once('=').map_or(code, |(type_of, _)| type_of);
    FORK_SAFE.iter().any(|library| file.starts_with(library))
        && is_static
        && LOCKS.iter().any(|lock| has_word(declared, lock))
}

/// Returns `true` if a line belongs to tests or to the fuzzer. Tests are at the end of a file or in
/// a separate file.
fn is_test(file: &str, code: &str, line: usize) -> bool {
    ["tests.rs", "testing.rs", "fuzzing.rs"]
        .into_iter()
        .any(|suffix| file.ends_with(suffix))
        || code.lines().take(line).any(|line| line == "#[cfg(test)]")
}

/// Returns `true` if the line names the wall clock in a file that must not use it.
fn reads_wall_clock(file: &str, line: &str) -> bool {
    MONOTONIC_ONLY.iter().any(|folder| file.starts_with(folder))
        && !SHOWS_TIME.contains(&file)
        && WALL_CLOCK.iter().any(|name| has_word(line, name))
}

fn length(file: &str, lines: usize) -> Option<Finding> {
    let (severity, limit) = match lines {
        _ if lines > LINES_MAX => (Severity::Error, LINES_MAX),
        _ if lines > LINES_WARN => (Severity::Warning, LINES_WARN),
        _ => return None,
    };
    let text = format!("{lines} lines are more than {limit}: split the file");
    Some(Finding {
        severity,
        place: file.to_owned(),
        text,
    })
}

/// Returns `true` if the line has an `unsafe` block or `unsafe impl`, which need a SAFETY comment.
/// Functions and traits need a `# Safety` section instead, which clippy checks.
fn needs_reason(code: &str, line: usize) -> bool {
    let rest: String = code
        .lines()
        .skip(line)
        .take(2)
        .collect::<Vec<_>>()
        .join(" ");
    rest.match_indices("unsafe").any(|(at, word)| {
        let after = rest[at + word.len()..].trim_start();
        after.starts_with('{') || after.starts_with("impl")
    }) && has_word(code.lines().nth(line).unwrap_or_default(), "unsafe")
}

/// Returns `true` if a SAFETY comment is at most [`SAFETY_REACH`] lines above the line, and no
/// other `unsafe` block is between them.
fn has_reason(raw: &[&str], code: &str, line: usize) -> bool {
    let from = line.saturating_sub(SAFETY_REACH);
    for at in (from..=line).rev() {
        if raw[at].contains("SAFETY:") {
            return true;
        }
        if at < line && needs_reason(code, at) {
            return false;
        }
    }
    false
}

/// Checks the rules for every text file.
pub(crate) fn any_text(file: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (at, line) in text.lines().enumerate() {
        for path in MACHINE_PATHS {
            if line.contains(path) {
                let text = format!("{path} is a path of one machine");
                let place = format!("{file}:{}", at + 1);
                findings.push(Finding {
                    severity: Severity::Error,
                    place,
                    text,
                });
            }
        }
    }
    findings
}

/// Returns `true` if the line contains `word` as a whole word.
fn has_word(line: &str, word: &str) -> bool {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    line.match_indices(word).any(|(at, _)| {
        !part(line[..at].chars().next_back()) && !part(line[at + word.len()..].chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Vec<String> {
        let modules = UnsafeModules::parse("# why\nok.rs  because\nok/  because too\n").unwrap();
        rust("ok.rs", text, &modules)
            .into_iter()
            .map(|finding| finding.text)
            .collect()
    }

    #[test]
    fn clean_file_has_no_findings() {
        assert_eq!(check("//! Head.\nfn f() {}\n"), Vec::<String>::new());
    }

    #[test]
    fn missing_head_comment_is_found() {
        assert!(check("fn f() {}\n")[0].contains("//!"));
        assert!(check("")[0].contains("//!"));
    }

    #[test]
    fn unfinished_code_is_found() {
        for word in UNFINISHED_WORDS {
            assert_eq!(check(&format!("//! Head.\n// {word}: later\n")).len(), 1);
            assert_eq!(check(&format!("//! Head.\n// a{word}b\n")).len(), 0);
        }
        for name in UNFINISHED_MACROS {
            assert_eq!(
                check(&format!("//! Head.\nfn f() {{ {name}() }}\n")).len(),
                1
            );
            assert_eq!(check(&format!("//! Head.\n// says {name}\n")).len(), 0);
        }
    }

    #[test]
    fn libraries_avoid_wall_clock() {
        let modules = UnsafeModules::parse("").unwrap();
        let findings = |file: &str, code: &str| {
            let text = format!("//! Head.\n{code}\n");
            rust(file, &text, &modules).len()
        };
        for code in [
            "use std::time::SystemTime;",
            "now(libc::CLOCK_REALTIME)",
            "ClockId::Realtime",
        ] {
            assert_eq!(findings("crates/iwarp/src/conn/machine_timer.rs", code), 1);
            assert_eq!(findings(SHOWS_TIME[0], code), 0);
            assert_eq!(findings("crates/iwarp-cli/src/text.rs", code), 0);
        }
        let monotonic = "now(libc::CLOCK_MONOTONIC); // not CLOCK_REALTIME";
        assert_eq!(
            findings("crates/iwarp/src/conn/machine_timer.rs", monotonic),
            0
        );
    }

    #[test]
    fn libraries_have_no_static_locks() {
        let modules = UnsafeModules::parse("").unwrap();
        let findings = |file: &str, code: &str| {
            let text = format!("//! Head.\n{code}\n");
            rust(file, &text, &modules).len()
        };
        for code in [
            "static A: Mutex<u8> = Mutex::new(0);",
            "pub(crate) static A: parking_lot::RwLock<u8> = RwLock::new(0);",
            "    static A: Once = Once::new();",
            "static A: OnceLock<Vec<u8>> =",
        ] {
            assert_eq!(findings("crates/iwarp/src/conn/pool.rs", code), 1, "{code}");
            assert_eq!(findings("crates/iwarp-cli/src/text.rs", code), 0, "{code}");
            assert_eq!(findings("crates/iwarp/src/conn/pool_tests.rs", code), 0);
            let tested = format!("#[cfg(test)]\n{code}");
            assert_eq!(findings("crates/iwarp/src/conn/pool.rs", &tested), 0);
        }
        for code in [
            "static A: ProcessLock<u8> = ProcessLock::new(0);",
            "fn f(lock: &'static Mutex<u8>) {}",
            "static A: AtomicU8 = AtomicU8::new(0);",
        ] {
            assert_eq!(findings("crates/iwarp/src/conn/pool.rs", code), 0, "{code}");
        }
    }

    #[test]
    fn unsafe_needs_nearby_safety_comment() {
        assert!(check("//! Head.\nfn f() { unsafe { g() } }\n")[0].contains("SAFETY"));
        assert!(check("//! Head.\nunsafe impl Send for A {}\n")[0].contains("SAFETY"));
        assert!(check("//! Head.\nlet a = unsafe\n{ g() };\n")[0].contains("SAFETY"));
        assert!(check("//! Head.\n// SAFETY: g is fine\nlet a = unsafe { g() };\n").is_empty());
        assert!(check("//! Head.\nunsafe fn f() {}\n").is_empty());
        assert!(check("//! Head.\n// unsafe { in a comment }\nlet a = \"unsafe {\";\n").is_empty());
        let shared =
            "//! Head.\n// SAFETY: fine\nlet a = unsafe { g() };\nlet b = unsafe { h() };\n";
        assert_eq!(check(shared).len(), 1);
        let far = "\n".repeat(SAFETY_REACH);
        assert_eq!(
            check(&format!(
                "//! Head.\n// SAFETY: far\n{far}unsafe {{ g() }}\n"
            ))
            .len(),
            1
        );
    }

    #[test]
    fn unsafe_outside_listed_modules_is_found() {
        let modules = UnsafeModules::parse("ok/  because\n").unwrap();
        let text = "//! Head.\nunsafe fn f() {}\n";
        assert_eq!(rust("ok/a.rs", text, &modules).len(), 0);
        assert_eq!(rust("okay.rs", text, &modules).len(), 1);
        assert!(rust("okay.rs", "//! Head.\n#![forbid(unsafe_code)]\n", &modules).is_empty());
        assert!(UnsafeModules::parse("path-only\n").is_err());
    }

    #[test]
    fn long_files_warn_then_fail() {
        assert!(length("a", LINES_WARN).is_none());
        assert_eq!(
            length("a", LINES_WARN + 1).unwrap().severity,
            Severity::Warning
        );
        assert_eq!(
            length("a", LINES_MAX + 1).unwrap().severity,
            Severity::Error
        );
    }

    #[test]
    fn machine_paths_are_found() {
        for path in MACHINE_PATHS {
            assert_eq!(any_text("a.md", &format!("x\nsee {path}y\n")).len(), 1);
        }
        assert!(any_text("a.md", "see docs/a.md\n").is_empty());
    }
}
