//! Fuzz targets: functions that take any octets and must not panic.
//!
//! A target also asserts what must be true for every input. For example, a parsed message can be written and parsed again.
//! The same functions are run by `src/main.rs` on the stable toolchain, guided by coverage if `cargo xtask fuzz` has built it, and by
//! libFuzzer (`fuzz_targets/`).

pub mod targets;

// What is private in its crate is compiled into this one, too.
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

use iwarp_fuzz_engine::{Suite, Target};

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
        name: "matching",
        run: targets::matching,
        len_max: 2048,
    },
    Target {
        name: "pair",
        run: targets::pair,
        len_max: 1024,
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
    Target {
        name: "rsockets",
        run: targets::rsockets,
        len_max: 64,
    },
    Target {
        name: "portmap",
        run: targets::portmap,
        len_max: 80,
    },
    Target {
        name: "ping",
        run: targets::ping,
        len_max: 128,
    },
    Target {
        name: "tags",
        run: targets::tags,
        len_max: 48,
    },
];

/// The targets with their seeds.
pub const SUITE: Suite = Suite {
    targets: TARGETS,
    seeds: concat!(env!("CARGO_MANIFEST_DIR"), "/seeds"),
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_seeds_that_pass() {
        for target in TARGETS {
            for data in iwarp_fuzz_engine::seeds(&SUITE, target).unwrap() {
                (target.run)(&data);
            }
        }
    }

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
