//! A run of blocks and its memory.

use std::sync::Arc;

use crate::extents::Extent;
use vramp_host::{HostMemory, HostSpan};

/// A run of adjacent blocks, with the memory they lie in.
#[derive(Clone)]
pub(super) struct Part {
    pub run: Extent,
    pub memory: Arc<HostMemory>,
}

/// Returns the memory of a run.
pub(super) fn span_of(part: &Part) -> HostSpan {
    let Extent { offset, len, .. } = part.run;
    HostSpan::new(&part.memory, offset, len).expect("a run lies in its memory")
}
