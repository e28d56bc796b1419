//! PyTorch's caching allocator: its settings, its state and its statistics.
//!
//! [`Allocator::torch_state`](crate::Allocator::torch_state) gives access to the state behind
//! the presets `torch` and `torch-expandable`.

pub use vramp_model::{
    Divisions, SegmentId, Stat, StatByPool, TorchAttempt, TorchBlock, TorchConfig,
    TorchConfigError, TorchOp, TorchPlan, TorchPool, TorchRelease, TorchSegment, TorchStats,
    TorchStep, TorchStretch,
};
