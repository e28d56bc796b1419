//! The tracked allocators of one manager, as other users of the same spaces find them.

use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};

use smallvec::SmallVec;
use vramp_alloc::Allocator;

use super::payers::PayersKey;
use crate::ledger::core::SpaceId;
use crate::ledger::shell::streams::StreamPool;

/// Returns the stream pool of a tracked allocator, made without streams at its first use.
pub(super) fn pool_of(allocator: &Arc<Allocator>, pool: &OnceLock<StreamPool>) -> StreamPool {
    pool.get_or_init(|| StreamPool::empty(Arc::clone(allocator))).clone()
}

/// All tracked allocators of one manager, the oldest first.
#[derive(Default)]
pub(crate) struct Attachments {
    allocators: RwLock<Vec<AttachedTo>>,
}

struct AttachedTo {
    space: SpaceId,
    allocator: Weak<Allocator>,
    payers: PayersKey,
    /// Goes with the tracked allocator.
    pool: Weak<OnceLock<StreamPool>>,
}

impl Attachments {
    /// Adds a new tracked allocator. O(tracked allocators).
    pub(super) fn add(
        &self,
        space: SpaceId,
        allocator: &Arc<Allocator>,
        payers: PayersKey,
        pool: &Arc<OnceLock<StreamPool>>,
    ) {
        let (allocator, pool) = (Arc::downgrade(allocator), Arc::downgrade(pool));
        let mut allocators = self.allocators.write().unwrap_or_else(PoisonError::into_inner);
        allocators.retain(|known| known.pool.strong_count() > 0);
        allocators.push(AttachedTo { space, allocator, payers, pool });
    }

    /// Returns the stream pool of the first tracked allocator of a space.
    pub(crate) fn streams(&self, space: SpaceId) -> Option<StreamPool> {
        let first = {
            let allocators = self.allocators.read().unwrap_or_else(PoisonError::into_inner);
            let mut of_space = allocators.iter().filter(|known| known.space == space);
            of_space.find_map(|known| Some((known.allocator.upgrade()?, known.pool.upgrade()?)))
        };
        first.map(|(allocator, pool)| pool_of(&allocator, &pool))
    }

    /// Returns who pays at the tracked allocators of `allocator` in a space. O(tracked allocators).
    pub(crate) fn payers(
        &self,
        space: SpaceId,
        allocator: &Arc<Allocator>,
    ) -> SmallVec<[PayersKey; 2]> {
        let is_its = |known: &&AttachedTo| {
            known.space == space && std::ptr::eq(known.allocator.as_ptr(), Arc::as_ptr(allocator))
        };
        let allocators = self.allocators.read().unwrap_or_else(PoisonError::into_inner);
        allocators.iter().filter(is_its).map(|known| known.payers).collect()
    }
}
