//! Fuzz targets: functions that take any octets and must not panic.
//!
//! A target also asserts what must be true for every input. For example, a parsed message can be written and parsed again.
//! The same functions are run by `src/main.rs` on the stable toolchain and by libFuzzer (`fuzz_targets/`).

pub mod mutate;
pub mod targets;

/// A fuzz target and its name.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The name on the command line, and of the directory in `seeds/`.
    pub name: &'static str,
    /// The function. It panics when it finds a bug.
    pub run: fn(&[u8]),
    /// The longest useful input, in octets.
    pub len_max: usize,
}

/// All targets. A new one needs a function in [`targets`], a row here, an entry point in `fuzz_targets/`, and a seed.
pub const TARGETS: &[Target] = &[
    Target {
        name: "startup",
        run: targets::startup,
        len_max: 1024,
    },
    Target {
        name: "fpdu",
        run: targets::fpdu,
        len_max: 4096,
    },
    Target {
        name: "ulpdu",
        run: targets::ulpdu,
        len_max: 512,
    },
    Target {
        name: "engine",
        run: targets::engine,
        len_max: 2048,
    },
    Target {
        name: "terminate",
        run: targets::terminate,
        len_max: 128,
    },
    Target {
        name: "stream",
        run: targets::stream,
        len_max: 4096,
    },
    Target {
        name: "datagrams",
        run: targets::datagrams,
        len_max: 512,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_an_entry_point_for_libfuzzer() {
        let manifest = include_str!("../Cargo.toml");
        for Target { name, .. } in TARGETS {
            let path = format!("fuzz_targets/{name}.rs");
            assert!(
                manifest.contains(&format!("path = \"{path}\"")),
                "{name} has no [[bin]]"
            );
            let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
            let text = std::fs::read_to_string(source).unwrap();
            assert!(
                text.contains(&format!("targets::{name}(data)")),
                "{name} is not called"
            );
        }
    }
}
