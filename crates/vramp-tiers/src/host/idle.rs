//! Memory that is wholly free, and its return to the system.
//!
//! 1. [`Shared::put_back`] has the background thread look for idle memory, if more than the floor is pinned.
//! 2. [`Shared::age`] marks memory that is wholly free. Taking a block of it ends the mark.
//! 3. The next pass unpins what is still marked, the newest first, down to the floor.
//! 4. Memory that a device cannot unpin is quarantined: it counts as pinned, no block of it is used, and each
//!    later pass and each [`HostPool::trim`] tries again.

use super::core::growth::to_unpin;
use super::pool::HostPool;
use super::shared::{Pinned, Shared, State};
use crate::extents::BackingId;
use crate::sync::{MutexGuard, lock};
use vramp_core::Bytes;

impl HostPool {
    /// Unpins memory that is wholly free until at most `keep` is pinned, and returns the bytes
    /// unpinned. Frees shared blocks without small allocations first. Does not wait for work. Two
    /// driver calls for each device and unpinned memory.
    pub fn trim(&self, keep: Bytes) -> Bytes {
        let mut state = lock(&self.shared.state);
        let charges = self.shared.free_returned(&mut state);
        let idle = state.idle(|_| true);
        let unpinned = self.shared.release(state, &idle, keep);
        drop(charges);
        unpinned
    }

    /// Returns the bytes that stay pinned however long they are free
    /// ([`HostPoolConfig::floor`](super::HostPoolConfig::floor)).
    pub fn floor(&self) -> Bytes {
        self.shared.config.floor()
    }
}

impl Shared {
    /// Returns true if free memory may become idle: more than the floor is pinned.
    pub fn may_idle(&self, state: &State) -> bool {
        self.config.idle.is_some() && state.pinned() > self.config.floor()
    }

    /// Unpins what is wholly free and was at the last pass, and marks what has become free since. Returns true if
    /// another pass may unpin more.
    pub fn age(&self) -> bool {
        let mut state = lock(&self.state);
        let charges = self.free_returned(&mut state);
        let old = state.idle(|pinned| pinned.is_idle);
        let all = state.idle(|_| true);
        for (pool, _) in &all {
            state.pools.get_mut(pool).expect("it was listed").is_idle = true;
        }
        let (usable, keep) = (state.usable(), self.config.floor());
        let unpinned = to_unpin(&old, usable, keep).len();
        let more = to_unpin(&all, usable, keep).len() > unpinned;
        let more = more || !state.returns.is_empty();
        state.is_aging = more;
        self.release(state, &old, keep);
        drop(charges);
        more
    }

    /// Frees what no work uses any more. Returns charges, to be credited without the lock.
    fn free_returned(&self, state: &mut State) -> Vec<crate::ledger::shell::charge::Charge> {
        self.sweep(state);
        let State { blocks, slabs, .. } = state;
        slabs.end_idle(blocks)
    }

    /// Unpins memory of `idle`, and what is quarantined. Returns the bytes unpinned.
    fn release(
        &self,
        mut state: MutexGuard<'_, State>,
        idle: &[(BackingId, Bytes)],
        keep: Bytes,
    ) -> Bytes {
        let mut leaving = std::mem::take(&mut state.quarantined);
        for pool in to_unpin(idle, state.usable(), keep) {
            state.blocks.remove(pool).expect("an idle backing has no used blocks");
            leaving.extend(state.pools.remove(&pool));
        }
        let len: Bytes = leaving.iter().map(Pinned::len).sum();
        state.unpinning += len;
        drop(state);
        // Unlocked while the driver and the kernel work.
        let (mut returned, mut count, mut failed) = (Bytes::ZERO, 0, Vec::new());
        for mut pinned in leaving {
            match self.unpin(&mut pinned) {
                true => {
                    returned += pinned.len();
                    count += 1;
                }
                false => failed.push(pinned),
            }
        }
        let mut state = lock(&self.state);
        state.unpinning -= len;
        state.stats.pools_unpinned += count;
        state.stats.unpins_failed += failed.len() as u64;
        state.quarantined.append(&mut failed);
        self.changed.notify_all();
        returned
    }

    /// Unpins memory on each device that has it pinned. Returns false if one could not.
    pub fn unpin(&self, pinned: &mut Pinned) -> bool {
        for (device, buffer) in self.devices.iter().zip(&mut pinned.buffers) {
            if buffer.is_some_and(|buffer| device.free_host(buffer).is_ok()) {
                *buffer = None;
            }
        }
        pinned.buffers.iter().all(Option::is_none)
    }
}

impl State {
    /// Returns the pinned bytes whose blocks may be used. O(groups).
    pub fn usable(&self) -> Bytes {
        self.pools.values().map(Pinned::len).sum()
    }

    /// Returns the memory that is wholly free, oldest first, with its length. O(groups).
    fn idle(&self, counts: impl Fn(&Pinned) -> bool) -> Vec<(BackingId, Bytes)> {
        let of = |pool| {
            self.pools.get(&pool).filter(|pinned| counts(pinned)).map(|pinned| (pool, pinned.len()))
        };
        self.blocks.idle().filter_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::HostPoolConfig;
    use super::*;
    use crate::{ReservationManager, SpaceConfig, SpaceId};

    const MIB: Bytes = Bytes::mib(1);

    /// Returns a pool of 2 MiB at a time whose thread makes no pass within a test.
    fn pool(keep: Option<Bytes>) -> HostPool {
        let host = SpaceId::host(0);
        let spaces = ReservationManager::new([(host, SpaceConfig::host(MIB * 16))]).unwrap();
        let config = HostPoolConfig {
            blocks_per_pool: 2,
            initial_pools: 1,
            spare_blocks: 0,
            idle: Some(Duration::from_secs(3600)),
            keep,
            ..HostPoolConfig::default()
        };
        HostPool::new(&spaces.space(host).unwrap(), config, []).unwrap()
    }

    #[test]
    fn a_pass_marks_and_the_next_one_unpins_what_no_block_was_taken_of() {
        let pool = pool(Some(Bytes::ZERO));
        let six = pool.allocate(MIB * 6).unwrap();
        assert!(!pool.shared.age(), "nothing is free");
        drop(six);
        assert!(pool.shared.age());
        assert_eq!(pool.stats().blocks, 6, "the first pass only marks");
        drop(pool.allocate(MIB * 2).unwrap());
        assert!(pool.shared.age(), "what was taken meanwhile is younger");
        assert_eq!((pool.stats().blocks, pool.stats().pools_unpinned), (2, 2));
        assert!(!pool.shared.age());
        assert_eq!((pool.stats().blocks, pool.stats().pools_unpinned), (0, 3));
        assert!(!pool.shared.age());
        pool.audit().unwrap();
    }

    #[test]
    fn the_floor_is_what_the_user_keeps() {
        for (keep, left) in
            [(None, 2), (Some(Bytes::ZERO), 0), (Some(MIB * 5), 6), (Some(MIB * 100), 8)]
        {
            let pool = pool(keep);
            drop(pool.allocate(MIB * 8).unwrap());
            while pool.shared.age() {}
            assert_eq!(pool.stats().blocks, left, "{keep:?}");
        }
    }

    #[test]
    fn a_block_of_small_pieces_is_idle_once_all_are_free() {
        let pool = pool(Some(Bytes::ZERO));
        let piece = pool.allocate_small(Bytes::kib(512)).unwrap();
        while pool.shared.age() {}
        assert_eq!((pool.stats().blocks, pool.space().total()), (2, MIB));
        drop(piece);
        while pool.shared.age() {}
        assert_eq!((pool.stats().blocks, pool.space().total()), (0, Bytes::ZERO));
    }
}
