//! Fuzz targets: functions that accept arbitrary bytes and must not panic.
//!
//! A target also asserts properties that hold for every input. For example, a parsed message can be
//! encoded and parsed again. The programs in `fuzz_targets/` pass the functions to libFuzzer; the
//! unit tests run them with the seeds.

pub mod targets;

// Modules that are private in their crates are compiled into this crate.
#[path = "../../crates/iwarp-cli/src/ping/wire.rs"]
#[allow(dead_code, reason = "targets use only a part")]
mod ping;
#[path = "../../crates/iwarp/src/cm/portmap/message.rs"]
mod portmap;
#[path = "../../crates/iwarp-rsocket/src/wire.rs"]
#[allow(dead_code, reason = "targets use only a part")]
mod rsocket;
#[path = "../../crates/iwarp-cli-common/src/text.rs"]
#[allow(
    unreachable_pub,
    reason = "the crate that contains the module exports it"
)]
mod text;

#[cfg(test)]
mod tests {
    use super::targets;
    use std::path::Path;

    /// The function of a target.
    type Run = fn(&[u8]);

    /// All targets.
    const TARGETS: &[(&str, Run)] = &[
        ("startup", targets::startup),
        ("fpdu", targets::fpdu),
        ("ulpdu", targets::ulpdu),
        ("engine", targets::engine),
        ("matching", targets::matching),
        ("pair", targets::pair),
        ("terminate", targets::terminate),
        ("stream", targets::stream),
        ("datagrams", targets::datagrams),
        ("rsockets", targets::rsockets),
        ("portmap", targets::portmap),
        ("ping", targets::ping),
        ("tags", targets::tags),
    ];

    /// Returns the files in a directory of this package, sorted by name.
    fn files(dir: &str) -> Vec<std::path::PathBuf> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join(dir);
        let entries = std::fs::read_dir(&dir).expect("the directory can be read");
        let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }

    #[test]
    fn all_seeds_pass() {
        for (name, run) in TARGETS {
            let seeds = files(&format!("seeds/{name}"));
            assert!(!seeds.is_empty(), "{name} has no seeds");
            for seed in seeds {
                run(&std::fs::read(seed).unwrap());
            }
        }
    }

    #[test]
    fn each_program_runs_the_target_of_its_name() {
        let programs = files("fuzz_targets");
        assert_eq!(programs.len(), TARGETS.len());
        for program in programs {
            let name = program.file_stem().unwrap().to_str().unwrap();
            assert!(TARGETS.iter().any(|target| target.0 == name), "{name}");
            let text = std::fs::read_to_string(&program).unwrap();
            assert!(text.contains(&format!("targets::{name}(data)")), "{name}");
        }
    }
}
