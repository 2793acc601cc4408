//! The table of rooms: for each room of a crate, the rooms that it may name.

use std::collections::{BTreeMap, BTreeSet};

/// The rooms that each room names, each with an example of a path that names it.
pub(super) type Arrows = BTreeMap<String, BTreeMap<String, String>>;

/// The rooms of a crate.
pub(crate) struct Section {
    pub(super) name: String,
    pub(super) rooms: BTreeMap<String, BTreeSet<String>>,
}

/// The whole table.
pub(crate) struct Table {
    pub(super) sections: Vec<Section>,
}

impl Table {
    /// Parses the table: lines `[crate]`, each followed by the rows `room: rooms` of this crate.
    /// The errors name the line.
    ///
    /// # Errors
    /// - If a row is before the first crate.
    /// - If a row has no colon.
    /// - If a room of a crate has two rows.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut sections: Vec<Section> = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let error = |what: &str| format!("line {}: {what}", at + 1);
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                sections.push(Section {
                    name: name.to_owned(),
                    rooms: BTreeMap::new(),
                });
                continue;
            }
            let section = sections.last_mut().ok_or_else(|| error("no crate"))?;
            let (room, to) = line.split_once(':').ok_or_else(|| error("no colon"))?;
            let to = to.split_whitespace().map(str::to_owned).collect();
            if section.rooms.insert(room.to_owned(), to).is_some() {
                return Err(error("the second row of this room"));
            }
        }
        Ok(Self { sections })
    }

    pub(super) fn section(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.name == name)
    }
}

impl Section {
    /// Returns a cycle, if there is one. Its first and last room are the same.
    pub(super) fn cycle(&self) -> Option<Vec<&str>> {
        let mut done = BTreeSet::new();
        let mut path = Vec::new();
        self.rooms
            .keys()
            .find_map(|room| self.cycle_from(room, &mut path, &mut done))
    }

    fn cycle_from<'a>(
        &'a self,
        room: &'a str,
        path: &mut Vec<&'a str>,
        done: &mut BTreeSet<&'a str>,
    ) -> Option<Vec<&'a str>> {
        if let Some(start) = path.iter().position(|at| *at == room) {
            let mut cycle = path[start..].to_vec();
            cycle.push(room);
            return Some(cycle);
        }
        if !done.insert(room) {
            return None;
        }
        path.push(room);
        let to = self.rooms.get(room).into_iter().flatten();
        let cycle = to
            .into_iter()
            .find_map(|to| self.cycle_from(to, path, done));
        path.pop();
        cycle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycle(rows: &str) -> Option<String> {
        let table = Table::parse(&format!("[x]\n{rows}")).unwrap();
        table.sections[0].cycle().map(|cycle| cycle.join(" "))
    }

    #[test]
    fn cycles_are_found() {
        assert_eq!(cycle("a: b c\nb: d\nc: d\nd:"), None);
        assert_eq!(cycle("a: b\nb: c\nc: d\nd: b").as_deref(), Some("b c d b"));
        assert_eq!(cycle("a: a").as_deref(), Some("a a"));
    }

    #[test]
    fn errors_name_the_line() {
        let error = |text| Table::parse(text).err();
        assert_eq!(error("# text\n\n[x]\na: b\nb:"), None);
        assert_eq!(error("a: b").as_deref(), Some("line 1: no crate"));
        assert_eq!(error("[x]\na b").as_deref(), Some("line 2: no colon"));
        let twice = Some("line 3: the second row of this room");
        assert_eq!(error("[x]\na: b\na: c").as_deref(), twice);
    }
}
