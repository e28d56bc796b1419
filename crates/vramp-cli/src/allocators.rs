//! The allocators that a command line names.

use vramp::peers::{Preset, UnknownPreset};

/// The allocators in one value of `--allocator`, which may be given several times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocators(Vec<Preset>);

/// Returns the allocators of all values in the order given, each once.
pub(crate) fn presets(values: &[Allocators]) -> Vec<Preset> {
    let mut presets = Vec::new();
    for &preset in values.iter().flat_map(|allocators| &allocators.0) {
        if !presets.contains(&preset) {
            presets.push(preset);
        }
    }
    presets
}

pub(crate) fn parse_allocators(names: &str) -> Result<Allocators, UnknownAllocator> {
    match names {
        "all" => Ok(Allocators(Preset::ALL.to_vec())),
        names => Ok(Allocators(names.split(',').map(str::parse).collect::<Result<_, _>>()?)),
    }
}

#[derive(Debug)]
pub(crate) struct UnknownAllocator(UnknownPreset);

impl From<UnknownPreset> for UnknownAllocator {
    fn from(error: UnknownPreset) -> UnknownAllocator {
        UnknownAllocator(error)
    }
}

impl std::error::Error for UnknownAllocator {}

impl std::fmt::Display for UnknownAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, or all", self.0)
    }
}
