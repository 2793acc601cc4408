//! Fuzz targets: functions that take any bytes and must not panic.
//!
//! A target also asserts what must be true for every input. For example, a parsed message can be
//! written and parsed again. The programs in `fuzz_targets/` pass the functions to libFuzzer, and
//! the unit tests replay the seeds.

pub mod targets;

// Modules that are private in their crate are also compiled into this crate.
#[path = "../../crates/iwarp-cli/src/ping/wire.rs"]
#[allow(dead_code, reason = "targets use a part")]
mod ping;
#[path = "../../crates/iwarp/src/cm/portmap/message.rs"]
mod portmap;
#[path = "../../crates/iwarp-rsocket/src/wire.rs"]
#[allow(dead_code, reason = "targets use a part")]
mod rsocket;
#[path = "../../crates/iwarp-cli-common/src/text.rs"]
#[allow(unreachable_pub, reason = "its own crate exports it")]
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

    /// Returns the files in a folder of this package, sorted by name.
    fn files(folder: &str) -> Vec<std::path::PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let entries = std::fs::read_dir(&folder).expect("the folder can be read");
        let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }

    #[test]
    fn every_target_has_seeds_that_pass() {
        for (name, run) in TARGETS {
            let seeds = files(&format!("seeds/{name}"));
            assert!(!seeds.is_empty(), "{name} has no seeds");
            for seed in seeds {
                run(&std::fs::read(seed).unwrap());
            }
        }
    }

    #[test]
    fn every_program_runs_its_target() {
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
