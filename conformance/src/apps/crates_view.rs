//! How published crates see our devices.

/// The kind of NIC that our devices present to programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Face {
    Rnic,
    Roce,
}

impl Face {
    /// Returns the name that `iwarp run --as` takes.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rnic => "rnic",
            Self::Roce => "roce",
        }
    }
}

/// The options with which programs see our devices.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    pub(super) face: Face,
    /// The address or interface to which the devices are limited.
    pub(super) bind: Option<&'static str>,
}

impl View {
    /// Returns the options of `iwarp run`.
    pub(super) fn options(self) -> Vec<&'static str> {
        let mut options = vec!["--as", self.face.name()];
        options.extend(
            self.bind
                .map(|address| ["--bind", address])
                .iter()
                .flatten(),
        );
        options
    }
}
