//! Known failures of the tests of published crates, from `crates.txt`.

use super::crates_view::Face;

const TEXT: &str = include_str!("crates.txt");

pub(super) struct Known {
    /// `FILE::NAME` of an integration test, or `CRATE::NAME` of a unit test.
    pub(super) test: &'static str,
    pub(super) says: &'static str,
}

/// Splits a row into crate, faces, test, a part of the test's output, and the reason.
pub(super) fn cells(line: &'static str) -> Option<[&'static str; 5]> {
    let parts: Vec<_> = line.split(" | ").collect();
    parts.try_into().ok()
}

/// Returns the rows of `crates.txt`, without comments.
pub(super) fn rows() -> impl Iterator<Item = &'static str> {
    TEXT.lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// Returns the known failures of a crate with this kind of NIC.
pub(super) fn known(name: &str, face: Face) -> Vec<Known> {
    rows()
        .filter_map(cells)
        .filter(|[crate_name, faces, ..]| {
            *crate_name == name && faces.split(' ').any(|f| f == face.name())
        })
        .map(|[_, _, test, says, _]| Known { test, says })
        .collect()
}
