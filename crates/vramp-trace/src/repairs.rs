//! What a recording left out, and how often.

/// How often a [`crate::Workload`] had to fill in or leave out something of its recording.
///
/// All zero for a recording that began before the first allocation and lost nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repairs {
    /// Blocks whose allocation came before the recording began, known from their free: allocated
    /// before the first event.
    pub blocks_known_from_free: u32,
    /// Blocks still held at the end whose allocation came before the recording began: allocated
    /// before the first event.
    pub blocks_known_from_segments: u32,
    /// An allocation at an address still in use: the block that was there is freed first.
    pub frees_lost: u32,
    /// An allocation at an address whose free was requested but never completed: completed first.
    pub completions_lost: u32,
    /// A free completed that was never requested: requested at the same event.
    pub requests_lost: u32,
    /// A free of a block that was free already: left out.
    pub frees_repeated: u32,
    /// A block held at the end that the recording had freed: left out.
    pub blocks_unexplained: u32,
}

impl Repairs {
    /// True if nothing was repaired.
    pub fn is_empty(&self) -> bool {
        *self == Repairs::default()
    }

    /// Every count with its name, for reports.
    pub fn counts(&self) -> [(&'static str, u32); 7] {
        [
            ("blocks_known_from_free", self.blocks_known_from_free),
            ("blocks_known_from_segments", self.blocks_known_from_segments),
            ("frees_lost", self.frees_lost),
            ("completions_lost", self.completions_lost),
            ("requests_lost", self.requests_lost),
            ("frees_repeated", self.frees_repeated),
            ("blocks_unexplained", self.blocks_unexplained),
        ]
    }
}
