//! Which blocks of equal length are free, in a number of pools that changes.
//!
//! 1. [`Blocks::add_pool`] takes in a row of free blocks.
//! 2. [`Blocks::allocate`] takes as few runs of neighbours as it can, so that what is copied is
//!    copied in few pieces: the shortest run that holds all, else the longest ones.
//! 3. [`Blocks::free`] returns runs; neighbours become one run again.
//! 4. [`Blocks::remove_pool`] takes out a pool that is wholly free.
//!
//! Deliberately absent: what a block is, and where. Ties go to the pool with the lowest number, so
//! that pools with high numbers become free and can be given back.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::Inconsistency;

/// A pool of blocks, numbered in the order in which pools came. Numbers are not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u32);

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pool {}", self.0)
    }
}

/// Neighbouring blocks of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// Whose blocks.
    pub pool: PoolId,
    /// The first of them, counted from zero.
    pub first: u32,
    /// How many.
    pub count: u32,
}

/// A run that is not allocated as it is told. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("blocks {} to {} of {} are not all allocated", .0.first, .0.first + .0.count, .0.pool)]
pub struct NotAllocated(pub Run);

/// The free blocks of all pools. O(log runs) for each run taken or returned.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    pools: BTreeMap<PoolId, u32>,
    next: u32,
    /// Free runs by place, and the same by length: no two of them touch.
    by_place: BTreeMap<(PoolId, u32), u32>,
    by_length: BTreeSet<(u32, PoolId, u32)>,
    free: u64,
    total: u64,
}

impl Blocks {
    /// Takes in `blocks` free blocks.
    pub fn add_pool(&mut self, blocks: u32) -> PoolId {
        let pool = PoolId(self.next);
        self.next += 1;
        self.pools.insert(pool, blocks);
        self.total += u64::from(blocks);
        if blocks > 0 {
            self.insert(Run { pool, first: 0, count: blocks });
        }
        pool
    }

    /// Takes out a pool. False, and nothing changes, if some of it is allocated or it is unknown.
    pub fn remove_pool(&mut self, pool: PoolId) -> bool {
        let Some(&blocks) = self.pools.get(&pool) else { return false };
        if blocks > 0 {
            if self.by_place.get(&(pool, 0)) != Some(&blocks) {
                return false;
            }
            self.remove(Run { pool, first: 0, count: blocks });
        }
        self.pools.remove(&pool);
        self.total -= u64::from(blocks);
        true
    }

    /// Takes `count` blocks, or none if there are not so many.
    pub fn allocate(&mut self, count: u32) -> Option<Vec<Run>> {
        if u64::from(count) > self.free {
            return None;
        }
        let mut taken = Vec::new();
        let mut left = count;
        while left > 0 {
            let found = self.shortest_of(left).or_else(|| self.longest());
            let run = found.expect("free blocks lie in free runs");
            self.remove(run);
            let count = run.count.min(left);
            if run.count > count {
                self.insert(Run {
                    first: run.first + count,
                    count: run.count - count,
                    pool: run.pool,
                });
            }
            taken.push(Run { count, ..run });
            left -= count;
        }
        Some(taken)
    }

    /// The shortest run of `count` blocks or more, of those the first in place.
    fn shortest_of(&self, count: u32) -> Option<Run> {
        let &(count, pool, first) = self.by_length.range((count, PoolId(0), 0)..).next()?;
        Some(Run { pool, first, count })
    }

    /// The longest run, of those the first in place.
    fn longest(&self) -> Option<Run> {
        let &(longest, ..) = self.by_length.last()?;
        self.shortest_of(longest)
    }

    /// Returns blocks.
    ///
    /// # Errors
    /// Some of them are free, or do not exist.
    pub fn free(&mut self, run: Run) -> Result<(), NotAllocated> {
        let end = run.first.checked_add(run.count).ok_or(NotAllocated(run))?;
        let blocks = *self.pools.get(&run.pool).ok_or(NotAllocated(run))?;
        if end > blocks || run.count == 0 {
            return Err(NotAllocated(run));
        }
        let before = self.by_place.range(..=(run.pool, run.first)).next_back();
        let before = before.map(|(&(pool, first), &count)| Run { pool, first, count });
        let before = before.filter(|before| before.pool == run.pool);
        let after = self.by_place.range((run.pool, run.first)..).next();
        let after = after.map(|(&(pool, first), &count)| Run { pool, first, count });
        let after = after.filter(|after| after.pool == run.pool);
        let overlaps = before.is_some_and(|before| before.first + before.count > run.first)
            || after.is_some_and(|after| after.first < end);
        if overlaps {
            return Err(NotAllocated(run));
        }
        let mut merged = run;
        if let Some(before) = before.filter(|before| before.first + before.count == run.first) {
            self.remove(before);
            merged = Run { first: before.first, count: before.count + merged.count, ..merged };
        }
        if let Some(after) = after.filter(|after| after.first == end) {
            self.remove(after);
            merged.count += after.count;
        }
        self.insert(merged);
        Ok(())
    }

    /// How many blocks are free.
    pub fn free_blocks(&self) -> u64 {
        self.free
    }

    /// How many there are.
    pub fn total_blocks(&self) -> u64 {
        self.total
    }

    /// Pools that are wholly free, with their blocks, the newest first.
    pub fn idle_pools(&self) -> impl Iterator<Item = (PoolId, u32)> {
        let whole = |&(&pool, &blocks): &(&PoolId, &u32)| {
            blocks == 0 || self.by_place.get(&(pool, 0)) == Some(&blocks)
        };
        self.pools.iter().rev().filter(whole).map(|(&pool, &blocks)| (pool, blocks))
    }

    /// Checks what must always hold.
    ///
    /// # Errors
    /// What does not.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        let bad = |what: String| Err(Inconsistency { what });
        let mut last: Option<Run> = None;
        for (&(pool, first), &count) in &self.by_place {
            let blocks = self.pools.get(&pool).copied().unwrap_or(0);
            if count == 0 || first + count > blocks {
                return bad(format!("{count} free blocks from {first} on in {pool} of {blocks}"));
            }
            if last.is_some_and(|run| run.pool == pool && run.first + run.count >= first) {
                return bad(format!("free runs of {pool} touch at block {first}"));
            }
            last = Some(Run { pool, first, count });
        }
        let by_length: BTreeSet<_> =
            self.by_place.iter().map(|(&key, &n)| key_of(key, n)).collect();
        if by_length != self.by_length {
            return bad("the runs by length are not the runs by place".to_owned());
        }
        let free: u64 = self.by_place.values().copied().map(u64::from).sum();
        let total: u64 = self.pools.values().copied().map(u64::from).sum();
        if (free, total) != (self.free, self.total) {
            return bad(format!("{free} of {total} free, {} of {} counted", self.free, self.total));
        }
        Ok(())
    }

    fn insert(&mut self, run: Run) {
        self.by_place.insert((run.pool, run.first), run.count);
        self.by_length.insert(key_of((run.pool, run.first), run.count));
        self.free += u64::from(run.count);
    }

    fn remove(&mut self, run: Run) {
        self.by_place.remove(&(run.pool, run.first));
        self.by_length.remove(&key_of((run.pool, run.first), run.count));
        self.free -= u64::from(run.count);
    }
}

/// The shortest first, and of one length the first in place.
fn key_of((pool, first): (PoolId, u32), count: u32) -> (u32, PoolId, u32) {
    (count, pool, first)
}
