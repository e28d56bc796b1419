//! PyTorch's caching allocator: its settings, its state and its statistics.
//!
//! [`state`] returns the state behind the presets `torch` and `torch-expandable`.

use vramp_alloc::error::CreateError;
use vramp_alloc::{AllocError, Allocation, Allocator};

use crate::caching_pool::{CachingPool, Settings};

pub use crate::core::*;

/// Returns a copy of the state of PyTorch's allocator. `None` for other presets. O(n).
pub fn state(allocator: &Allocator) -> Option<TorchPool> {
    allocator.read_backend(|caching: &CachingPool| caching.pool.clone())
}

/// Returns the operations that the last request made in PyTorch's allocator; none for other presets.
pub fn operations(allocator: &Allocator) -> Vec<TorchOp> {
    let performed = |caching: &CachingPool| caching.pool.performed().to_vec();
    allocator.read_backend(performed).unwrap_or_default()
}

/// Gives PyTorch's allocator recorded segments, before the first request: see [`TorchPool::restore`].
/// Returns the blocks that were allocated, in order; none for other presets and for impossible segments.
/// One allocation of the driver for each segment.
///
/// # Errors
/// A driver call failed.
pub fn restore(
    allocator: &Allocator,
    segments: &[TorchSegment],
) -> Result<Vec<Option<Allocation>>, AllocError> {
    allocator.adopt_blocks(|caching: &mut CachingPool| caching.restore(segments))
}

/// Creates another pool as [`Allocator::create_pool`] does, for memory that communication libraries
/// register: NCCL's user buffers, `torch.cuda.MemPool` with `register_mem_pool`, UCX.
///
/// It is PyTorch's caching allocator with segments of one handle each. A segment keeps its memory from
/// its creation until it is freed whole, by [`Allocator::trim`] or when the card is full; it can be
/// exported, and cards with access to the allocator have access to it.
///
/// # Errors
/// As of [`Allocator::new`]; the device needs virtual memory management.
pub fn comm_pool(of: &Allocator, name: &str) -> Result<Allocator, CreateError> {
    if !of.driver().info().capabilities.virtual_memory {
        return Err(CreateError::NotSupported {
            preset: "comm pool",
            needed: "virtual memory management",
            instead: "torch",
        });
    }
    let sharing = of.config().sharing.clone();
    caching_pool_beside(of, name, true, vramp_alloc::Config { sharing, ..Default::default() })
}

/// Creates another pool as [`Allocator::create_pool`] does, each segment of which is a plain allocation of
/// the driver: for memory whose addresses go to calls that refuse mapped memory, as `cudaIpcGetMemHandle`
/// does. It is PyTorch's caching allocator: segments of 2 MiB, 20 MiB or what a request needs, which never
/// move, and are freed by a trim or when memory is short. They cannot leave the card in a sleep.
///
/// # Errors
/// As of [`Allocator::new`].
pub fn plain_pool(of: &Allocator, name: &str) -> Result<Allocator, CreateError> {
    caching_pool_beside(of, name, false, vramp_alloc::Config::default())
}

fn caching_pool_beside(
    of: &Allocator,
    name: &str,
    one_handle: bool,
    config: vramp_alloc::Config,
) -> Result<Allocator, CreateError> {
    let (progress, patience) = (of.config().progress.clone(), of.config().patience);
    let settings = Settings { name: "torch", torch: TorchConfig::default(), one_handle };
    let backend = Some(settings.backend());
    of.create_pool_of(name, vramp_alloc::Config { progress, patience, backend, ..config })
}
