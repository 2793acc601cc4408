//! The known failures of published crates' tests, from `crates.txt`.

use super::crates_view::Face;

const TEXT: &str = include_str!("crates.txt");

pub(super) struct Known {
    /// Its file, or the crate's name for unit tests, and its name.
    pub(super) test: &'static str,
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

/// Returns the known failures of a crate with this kind of NIC.
pub(super) fn known(name: &str, face: Face) -> Vec<Known> {
    rows()
        .filter_map(cells)
        .filter(|[of, faces, ..]| *of == name && faces.split(' ').any(|f| f == face.name()))
        .map(|[_, _, test, says, _]| Known { test, says })
        .collect()
}
