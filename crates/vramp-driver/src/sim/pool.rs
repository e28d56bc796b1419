//! Model of the driver's own stream-ordered pool. The source of the real one is not public; the model
//! follows its documentation and measurements.
//!
//! - Addresses: best fit among free blocks, split at multiples of 512 bytes, coalesced with their
//!   neighbours. Blocks that are ready for the allocating stream are preferred; otherwise the pool
//!   makes the stream wait.
//! - Physical memory: the allocated bytes in whole granules, and what the threshold keeps. The real
//!   pool reserved 1.01 to 1.09 times the allocated bytes on five recorded workloads with an
//!   unlimited threshold, so it must remap pages. The model remaps without overhead, and so reserves
//!   slightly less.
//! - Costs: a hit costs as measured. An address range that was not mapped before costs the growth of
//!   as many granules.

use std::collections::{BTreeMap, BTreeSet};

use vramp_core::{Bytes, DeviceAddr};

use super::refusal::{Outcome, Refusal};
use super::streams::Point;

/// First address of the first device's pool, above all that can be reserved. Each further device has
/// as many addresses behind it.
pub(super) const POOL_BASE: u64 = 1 << 56;

/// Returns the device whose pool an address belongs to, if any, and the distance from its first one.
pub(super) fn pool_of(at: u64) -> Option<(usize, u64)> {
    let device = (at / POOL_BASE).checked_sub(1)?;
    Some((device as usize, at % POOL_BASE))
}

/// Sizes are rounded up to a multiple of this.
const CUT: u64 = 512;

/// Number of free blocks of a fitting size that are checked for readiness.
const BLOCKS_TRIED: usize = 64;

#[derive(Debug)]
pub(super) struct Pool {
    pub granule: u64,
    /// Reserved bytes.
    pub reserved: u64,
    pub reserved_peak: u64,
    pub used: u64,
    /// Release threshold.
    pub threshold: u64,
    live: BTreeMap<u64, u64>,
    free: BTreeMap<u64, FreeBlock>,
    free_by_len: BTreeSet<(u64, u64)>,
    top: u64,
}

#[derive(Clone, Debug)]
struct FreeBlock {
    len: u64,
    /// Last use on each stream.
    after: Vec<Point>,
}

/// A block that an allocation returns.
#[derive(Debug)]
pub(super) struct Grant {
    pub at: DeviceAddr,
    pub len: Bytes,
    /// Points that the allocating stream must wait for.
    pub waits: Vec<Point>,
    /// Granules of addresses that are newly mapped.
    pub granules_mapped: u64,
    /// Physical memory that the pool reserved for it.
    pub grown: Bytes,
}

impl Pool {
    /// Returns the pool of the device with this ordinal.
    pub fn new(ordinal: usize, granule: Bytes) -> Pool {
        Pool {
            granule: granule.count(),
            reserved: 0,
            reserved_peak: 0,
            used: 0,
            threshold: 0,
            live: BTreeMap::new(),
            free: BTreeMap::new(),
            free_by_len: BTreeSet::new(),
            top: POOL_BASE * (ordinal as u64 + 1),
        }
    }

    /// Allocates a block of at least `len` bytes, with `card_free` bytes free on the card.
    pub fn malloc(
        &mut self,
        len: Bytes,
        stream: usize,
        card_free: Bytes,
        is_done: impl Fn(Point) -> bool,
    ) -> Outcome<Grant> {
        let len = match len.checked_round_up(Bytes::new(CUT)) {
            Some(len) if !len.is_zero() && len.count() < 1 << 48 => len.count(),
            _ => return Err(Refusal::invalid(format!("{len} is not a valid size"))),
        };
        let needed = self.used + len;
        let grown = needed.saturating_sub(self.reserved).next_multiple_of(self.granule);
        if grown > card_free.count() {
            return Err(Refusal::out_of_memory(format!(
                "{} requested from the stream-ordered pool ({} reserved, {} used); {card_free} free",
                Bytes::new(len),
                Bytes::new(self.reserved),
                Bytes::new(self.used)
            )));
        }
        let mut granules_mapped = grown / self.granule;
        let (at, waits) = match self.take_free(len, stream, &is_done) {
            Some(found) => found,
            None => {
                let at = self.top;
                self.top += len;
                granules_mapped = granules_mapped.max(len.div_ceil(self.granule));
                (at, Vec::new())
            }
        };
        self.live.insert(at, len);
        self.used += len;
        self.reserved += grown;
        self.reserved_peak = self.reserved_peak.max(self.reserved);
        Ok(Grant {
            at: DeviceAddr::new(at),
            len: Bytes::new(len),
            waits,
            granules_mapped,
            grown: Bytes::new(grown),
        })
    }

    /// Frees a block, which may be reused after `after`. Returns its length.
    pub fn free(&mut self, at: DeviceAddr, after: Point) -> Outcome<Bytes> {
        let start = at.number();
        let Some(len) = self.live.remove(&start) else {
            return Err(Refusal::invalid(format!(
                "{at} is not the start of an allocation from the pool"
            )));
        };
        self.used -= len;
        let mut block = FreeBlock { len, after: vec![after] };
        let mut first = start;
        if let Some((&before, neighbour)) = self.free.range(..start).next_back()
            && before + neighbour.len == start
        {
            first = before;
            block = merged(self.remove_free(before), block);
        }
        if self.free.contains_key(&(start + len)) {
            block = merged(block, self.remove_free(start + len));
        }
        self.insert_free(first, block);
        Ok(Bytes::new(len))
    }

    /// Trims reserved memory to `keep` or to what is allocated. Returns the bytes freed.
    pub fn trim(&mut self, keep: Bytes) -> Bytes {
        let needed = self.used.next_multiple_of(self.granule);
        let kept = self.reserved.min(needed.max(keep.count() / self.granule * self.granule));
        let freed = self.reserved - kept;
        self.reserved = kept;
        Bytes::new(freed)
    }

    /// Returns true if the whole range lies in one allocated block.
    pub fn is_live(&self, start: u64, len: u64) -> bool {
        self.live
            .range(..=start)
            .next_back()
            .is_some_and(|(at, held)| start.checked_add(len).is_some_and(|end| end <= at + held))
    }

    pub fn allocations(&self) -> usize {
        self.live.len()
    }

    fn take_free(
        &mut self,
        len: u64,
        stream: usize,
        is_done: &impl Fn(Point) -> bool,
    ) -> Option<(u64, Vec<Point>)> {
        let ready = |point: &Point| point.stream == stream || is_done(*point);
        let fitting = || self.free_by_len.range((len, 0)..);
        let at = fitting()
            .take(BLOCKS_TRIED)
            .find(|(_, at)| self.free[at].after.iter().all(ready))
            .or_else(|| fitting().next())?
            .1;
        let block = self.remove_free(at);
        let waits = block.after.iter().filter(|point| !ready(point)).copied().collect();
        if block.len > len {
            let rest = FreeBlock { len: block.len - len, after: block.after };
            self.insert_free(at + len, rest);
        }
        Some((at, waits))
    }

    fn insert_free(&mut self, at: u64, block: FreeBlock) {
        self.free_by_len.insert((block.len, at));
        self.free.insert(at, block);
    }

    fn remove_free(&mut self, at: u64) -> FreeBlock {
        let block = self.free.remove(&at).expect("the caller found the block");
        self.free_by_len.remove(&(block.len, at));
        block
    }
}

fn merged(mut first: FreeBlock, second: FreeBlock) -> FreeBlock {
    first.len += second.len;
    for point in second.after {
        match first.after.iter_mut().find(|known| known.stream == point.stream) {
            Some(known) => known.position = known.position.max(point.position),
            None => first.after.push(point),
        }
    }
    first
}
