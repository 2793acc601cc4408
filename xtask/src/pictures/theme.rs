//! The colours of the pictures, for light and dark pages. They are those of GitHub's pages.

/// Colours as SVG writes them.
pub(super) struct Theme {
    /// The part of the file name.
    pub(super) name: &'static str,
    pub(super) background: &'static str,
    pub(super) ink: &'static str,
    pub(super) faint: &'static str,
    pub(super) fill: &'static str,
    pub(super) line: &'static str,
    pub(super) accent: &'static str,
    pub(super) accent_fill: &'static str,
}

pub(super) const THEMES: [Theme; 2] = [
    Theme {
        name: "light",
        background: "#ffffff",
        ink: "#1f2328",
        faint: "#59636e",
        fill: "#f6f8fa",
        line: "#d1d9e0",
        accent: "#0969da",
        accent_fill: "#ddf4ff",
    },
    Theme {
        name: "dark",
        background: "#0d1117",
        ink: "#f0f6fc",
        faint: "#9198a1",
        fill: "#151b23",
        line: "#3d444d",
        accent: "#4493f8",
        accent_fill: "#121d2f",
    },
];
