//! How often a workload had to repair its recording.

use std::fmt;

/// Numbers of requests that a [`crate::Workload`] added or left out because its recording is
/// incomplete.
///
/// All zero for a recording that began before the first allocation and lost no event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repairs {
    /// Blocks older than the recording that it frees. They are allocated before the first event.
    pub blocks_known_from_free: u32,
    /// Blocks older than the recording that are allocated at its end. They are allocated before the
    /// first event.
    pub blocks_known_from_segments: u32,
    /// Allocations at an address in use. The block there is freed first.
    pub frees_lost: u32,
    /// Allocations at an address whose free was requested, not completed. It is completed first.
    pub completions_lost: u32,
    /// Frees that completed without a request. They are requested at the same event.
    pub requests_lost: u32,
    /// Frees of a free block. They are left out.
    pub frees_repeated: u32,
    /// Blocks allocated at the end that the recording had freed. They are left out.
    pub blocks_unexplained: u32,
}

impl Repairs {
    /// Returns true if nothing was repaired.
    pub fn is_empty(&self) -> bool {
        *self == Repairs::default()
    }

    /// Returns every count with its name, for reports.
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

impl fmt::Display for Repairs {
    /// Lists what was repaired, in words. Empty if nothing was.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts = [
            "older blocks known from their free",
            "older blocks known from the segments at the end",
            "lost frees",
            "lost completions of frees",
            "completions without a free",
            "repeated frees",
            "blocks at the end that were freed before",
        ];
        let counts = self.counts().into_iter().zip(texts).filter(|((_, count), _)| *count > 0);
        for (index, ((_, count), text)) in counts.enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{count} {text}")?;
        }
        Ok(())
    }
}
