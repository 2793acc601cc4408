//! Checks the dependencies between the rooms of each crate against the table `xtask/rooms.txt`.
//!
//! A room is a top-level module of a crate, with all modules inside of it. Room A has an arrow to
//! room B if code of A, without its tests, has a path that resolves to an item of B. Re-exports and
//! imports are followed to the module that defines the item. The root of a crate is no room: it may
//! name every room, and a path to one of its re-exports resolves to the room of the item.

mod modules;
mod table;
mod tokens;

use std::collections::BTreeMap;

use super::{Finding, Severity};
use modules::Modules;
pub(crate) use table::Table;
use table::{Arrows, Section};

/// The table of rooms.
pub(crate) const FILE: &str = "xtask/rooms.txt";

/// The modules of `conformance` and of each crate below `crates/`.
#[derive(Default)]
pub(crate) struct Crates {
    modules: BTreeMap<String, Modules>,
}

impl Crates {
    /// Adds a source file. Files of other crates, and tests, are ignored.
    pub(crate) fn add(&mut self, file: &str, text: &str) {
        let parts: Vec<&str> = file.split('/').collect();
        let (name, path) = match parts[..] {
            ["crates", name, "src", ref path @ ..] => (format!("crates/{name}"), path),
            ["conformance", "src", ref path @ ..] => ("conformance".to_owned(), path),
            _ => return,
        };
        self.modules.entry(name).or_default().add(path, text);
    }

    /// Returns all rooms and what they name, in the format of the table. Each room is below those
    /// that it names.
    pub(crate) fn print(&self) -> String {
        let mut text = String::new();
        for (name, modules) in &self.modules {
            text.push_str(&format!("[{name}]\n"));
            let mut remaining = modules.arrows();
            while let Some(room) = lowest(&remaining) {
                let to: Vec<String> = remaining
                    .remove(&room)
                    .into_iter()
                    .flatten()
                    .map(|(to, _)| to)
                    .collect();
                text.push_str(format!("{room}: {}", to.join(" ")).trim_end());
                text.push('\n');
            }
            text.push('\n');
        }
        text
    }

    /// Returns a finding for each arrow that the table does not allow, for each unused permission,
    /// and for each other difference.
    pub(crate) fn compare(&self, table: &Table) -> Vec<Finding> {
        let mut texts = Vec::new();
        for (name, modules) in &self.modules {
            match table.section(name) {
                None => texts.push(format!("{name} has no section")),
                Some(section) => differences(section, &modules.arrows(), &mut texts),
            }
        }
        for section in &table.sections {
            let name = &section.name;
            if !self.modules.contains_key(name) {
                texts.push(format!("there is no {name}"));
            }
            if let Some(cycle) = section.cycle() {
                let cycle = cycle.join(" -> ");
                texts.push(format!("{name}: the table has a cycle: {cycle}"));
            }
        }
        let finding = |text| Finding {
            severity: Severity::Error,
            place: FILE.to_owned(),
            text,
        };
        texts.into_iter().map(finding).collect()
    }
}

/// Returns the first room that names none of the other remaining rooms. If there is none, because
/// of a cycle, returns the first room.
fn lowest(remaining: &Arrows) -> Option<String> {
    let lowest = remaining
        .iter()
        .find(|(_, to)| to.keys().all(|to| !remaining.contains_key(to)));
    lowest
        .or(remaining.first_key_value())
        .map(|(room, _)| room.clone())
}

/// Compares the arrows of a crate with its section.
fn differences(section: &Section, arrows: &Arrows, texts: &mut Vec<String>) {
    let name = &section.name;
    for (room, to) in arrows {
        let Some(allowed) = section.rooms.get(room) else {
            texts.push(format!("{name}: the room {room} has no row"));
            continue;
        };
        for (other, path) in to {
            if !allowed.contains(other) {
                texts.push(format!("{name}: {room} must not name {other}: {path}"));
            }
        }
        for other in allowed.iter().filter(|other| !to.contains_key(*other)) {
            texts.push(format!("{name}: {room} does not name {other}"));
        }
    }
    for room in section.rooms.keys() {
        if !arrows.contains_key(room) {
            texts.push(format!("{name}: there is no room {room}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCES: &[(&str, &str)] = &[
        ("lib.rs", "mod low; mod high; pub use low::Low;"),
        ("low/mod.rs", "mod inner; pub(crate) use inner::Low;"),
        ("low/inner.rs", "pub(crate) struct Low;"),
        ("high.rs", "use crate::Low;"),
    ];

    fn findings(sources: &[(&str, &str)], table: &str) -> Vec<String> {
        let mut crates = Crates::default();
        for (file, text) in sources {
            crates.add(&format!("crates/x/src/{file}"), text);
        }
        let table = Table::parse(table).unwrap();
        let texts = crates.compare(&table).into_iter();
        texts.map(|finding| finding.text).collect()
    }

    /// Returns the sources with the file `file` replaced by `text`.
    fn with<'a>(file: &'a str, text: &'a str) -> Vec<(&'a str, &'a str)> {
        let mut sources: Vec<_> = SOURCES.to_vec();
        sources.retain(|(known, _)| *known != file);
        sources.push((file, text));
        sources
    }

    const TABLE: &str = "[crates/x]\nlow:\nhigh: low\n";

    #[test]
    fn exact_table_passes() {
        assert_eq!(findings(SOURCES, TABLE), [""; 0]);
    }

    #[test]
    fn arrow_upwards_is_found() {
        let sources = with("low/inner.rs", "fn f() { crate::high::f() }");
        let found = findings(&sources, TABLE);
        let arrow = "crates/x: low must not name high: crate::high::f in low/inner";
        assert!(found.contains(&arrow.to_owned()), "{found:?}");
    }

    #[test]
    fn unused_permission_is_found() {
        let found = findings(&with("high.rs", ""), TABLE);
        assert_eq!(found, ["crates/x: high does not name low"]);
    }

    #[test]
    fn room_without_row_is_found() {
        let found = findings(SOURCES, "[crates/x]\nhigh: low\n");
        assert_eq!(found, ["crates/x: the room low has no row"]);
    }

    #[test]
    fn row_without_room_is_found() {
        let found = findings(SOURCES, "[crates/x]\nlow:\nhigh: low\nold:\n");
        assert_eq!(found, ["crates/x: there is no room old"]);
    }

    #[test]
    fn cycle_in_table_is_found() {
        let sources = with("low/inner.rs", "use crate::high::f; pub(crate) struct Low;");
        let found = findings(&sources, "[crates/x]\nlow: high\nhigh: low\n");
        assert_eq!(
            found,
            ["crates/x: the table has a cycle: high -> low -> high"]
        );
    }

    #[test]
    fn crate_without_section_is_found() {
        assert_eq!(findings(SOURCES, ""), ["crates/x has no section"]);
        let found = findings(SOURCES, "[crates/x]\nlow:\nhigh: low\n[crates/y]\n");
        assert_eq!(found, ["there is no crates/y"]);
    }

    #[test]
    fn printed_rooms_are_a_table() {
        let mut crates = Crates::default();
        for (file, text) in SOURCES {
            crates.add(&format!("crates/x/src/{file}"), text);
        }
        assert_eq!(crates.print(), "[crates/x]\nlow:\nhigh: low\n\n");
    }

    #[test]
    fn conformance_has_rooms() {
        let mut crates = Crates::default();
        for file in [
            "conformance/src/low.rs",
            "conformance/guest/init",
            "fuzz/src/x.rs",
        ] {
            crates.add(file, "");
        }
        assert_eq!(crates.print(), "[conformance]\nlow:\n\n");
    }
}
