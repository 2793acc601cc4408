//! The tests of published crates that do not pass, from `crates.txt`: a row for each, with what the
//! test says and why.

use super::crates_view::Face;

const TEXT: &str = include_str!("crates.txt");

/// A test that fails.
pub(super) struct Known {
    /// Its file (of a crate's own unit tests the crate's name) and name.
    pub(super) test: &'static str,
    /// A part of its output.
    pub(super) says: &'static str,
}

/// A row of the text: the crate, the faces, the test, a part of its output, and the reason.
pub(super) fn cells(line: &'static str) -> Option<[&'static str; 5]> {
    let parts: Vec<_> = line.split(" | ").collect();
    parts.try_into().ok()
}

/// Returns the rows, without comments.
pub(super) fn rows() -> impl Iterator<Item = &'static str> {
    TEXT.lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Returns the tests of a crate that fail in a face.
pub(super) fn known(name: &str, face: Face) -> Vec<Known> {
    rows()
        .filter_map(cells)
        .filter(|[of, faces, ..]| *of == name && faces.split(' ').any(|f| f == face.name()))
        .map(|[_, _, test, says, _]| Known { test, says })
        .collect()
}
