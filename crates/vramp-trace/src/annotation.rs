//! Ranges that the program marked while it was recorded.

/// Begin or end of a range that the program marked, such as a step or a module (PyTorch's
/// `external_annotations`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// Whether the range begins or ends here.
    pub stage: Stage,
    /// Name of the range.
    pub name: Box<str>,
    /// The device's ordinal, if recorded.
    pub device: Option<u16>,
    /// Wall-clock time in microseconds since 1970.
    pub time_us: u64,
}

/// What an [`Annotation`] marks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A range begins.
    Start,
    /// The innermost open range of this name ends.
    End,
    /// Any other stage, by its recorded name.
    Other(Box<str>),
}

impl Stage {
    /// Returns the name that PyTorch writes.
    pub fn name(&self) -> &str {
        match self {
            Stage::Start => "START",
            Stage::End => "END",
            Stage::Other(name) => name,
        }
    }

    /// Returns the stage with this name.
    pub fn from_name(name: &str) -> Stage {
        match name {
            "START" => Stage::Start,
            "END" => Stage::End,
            other => Stage::Other(other.into()),
        }
    }
}
