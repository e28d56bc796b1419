//! The host memory of an allocator that callers have, by address.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rustc_hash::FxHashMap;
use vramp_alloc::Bytes;
use vramp_tiers::HostPool;
use vramp_tiers::host::{HostAllocation, HostPoolError, SmallHostAllocation};

/// Host memory that the caller has.
pub(crate) enum HostBlock {
    Small(SmallHostAllocation),
    Whole(HostAllocation),
}

/// The host memory that an allocator has given out, by address.
#[derive(Default)]
pub(crate) struct HostBlocks {
    pub pool: OnceLock<HostPool>,
    blocks: Mutex<FxHashMap<usize, HostBlock>>,
}

impl HostBlocks {
    pub fn lock(&self) -> MutexGuard<'_, FxHashMap<usize, HostBlock>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostBlock {
    pub fn new(pool: &HostPool, size: u64) -> Result<HostBlock, HostPoolError> {
        let (len, block) = (Bytes::new(size), pool.block());
        Ok(match size > block.count() / 2 {
            false => HostBlock::Small(pool.allocate_small(len)?),
            true => HostBlock::Whole(pool.allocate_in_one(len)?),
        })
    }

    pub fn address(&self) -> Result<*mut u8, HostPoolError> {
        Ok(match self {
            HostBlock::Small(small) => small.span().as_ptr(),
            HostBlock::Whole(whole) => {
                let spans = whole.spans(Bytes::ZERO, whole.len())?;
                spans.first().expect("memory in one piece has a span").as_ptr()
            }
        })
    }
}
