//! Lists of what may leave the card, and of what may be copied ahead of need.
//!
//! 1. A change of a piece, or of its buffer, marks the piece ([`note_changed`](super::Deferrables::note_changed)).
//! 2. Before pieces are chosen, those that are marked are listed anew ([`relist`](super::Deferrables::relist)).
//!
//! What leaves together is a [`Unit`]. Units whose cost differs only by their last use are in one
//! *bucket*, the least recently used first: the cost falls with the idle time, so the first of a bucket
//! is its cheapest at any time. Lengths are rounded up to a sixteenth of the memory that a unit frees,
//! so the number of buckets does not grow with the number of buffers.
//!
//! Growth: an entry for each unit with memory on the card. A change is O(log n), and O(tenants) in a
//! group; several changes between two choices count once.

use std::collections::{BTreeMap, BTreeSet};

use super::cost::{BucketKey, Unit};
use super::{BufferId, PieceId, RangeId, Shortfall};
use vramp_core::Bytes;

/// Units of one bucket with their last uses.
pub(super) type Bucket = BTreeSet<(u64, Unit)>;

/// How a unit with memory is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listing {
    Leased,
    Pinned,
    Moving,
    Candidate { bucket: BucketKey, last_use_ns: u64 },
}

/// A listed unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub frees: Bytes,
    pub listing: Listing,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Lists {
    /// Pieces that changed since they were listed.
    pub changed: BTreeSet<PieceId>,
    /// Groups that a buffer was removed from since they were listed.
    pub changed_groups: BTreeSet<RangeId>,
    pub listed: BTreeMap<Unit, Listed>,
    pub buckets: BTreeMap<BucketKey, Bucket>,
    /// Sums of the units that cannot leave.
    pub staying: Shortfall,
    /// Dirty pieces that may be copied ahead of need, with their last uses.
    pub dirty: BTreeSet<(u64, PieceId)>,
    /// Buffers that were restored, with the ends of their cooldowns.
    pub cooling: BTreeSet<(u64, BufferId)>,
}

impl Lists {
    /// Lists a unit; `None` if it has no memory.
    pub fn set(&mut self, unit: Unit, now: Option<Listed>) {
        let before = match now {
            Some(listed) => self.listed.insert(unit, listed),
            None => self.listed.remove(&unit),
        };
        if before == now {
            return;
        }
        if let Some(Listed { frees, listing }) = before {
            match listing {
                Listing::Candidate { bucket, last_use_ns } => {
                    let units = self.buckets.get_mut(&bucket).expect("a listed unit has a bucket");
                    units.remove(&(last_use_ns, unit));
                    if units.is_empty() {
                        self.buckets.remove(&bucket);
                    }
                }
                listing => *self.sum(listing) -= frees,
            }
        }
        if let Some(Listed { frees, listing }) = now {
            match listing {
                Listing::Candidate { bucket, last_use_ns } => {
                    self.buckets.entry(bucket).or_default().insert((last_use_ns, unit));
                }
                listing => *self.sum(listing) += frees,
            }
        }
    }

    fn sum(&mut self, listing: Listing) -> &mut Bytes {
        let Shortfall { leased, pinned, moving, .. } = &mut self.staying;
        match listing {
            Listing::Leased => leased,
            Listing::Pinned => pinned,
            Listing::Moving => moving,
            Listing::Candidate { .. } => unreachable!("a candidate is in a bucket"),
        }
    }

    /// Returns the number of entries of all lists.
    pub fn len(&self) -> usize {
        let in_buckets: usize = self.buckets.values().map(BTreeSet::len).sum();
        let changed = self.changed.len() + self.changed_groups.len();
        changed + self.listed.len() + in_buckets + self.dirty.len() + self.cooling.len()
    }
}
