//! Where every byte is: by address and by physical memory, each adding up.

use std::fmt;

use crate::Bytes;
use crate::plan::Range;
use crate::pool::Pool;
use crate::region::Kind;

/// Bytes by state. See `docs/states.md` for what each state means.
///
/// Two sums hold, and the audit checks them:
/// `addresses = holes + retired + quarantined_addresses + mapped` and
/// `mapped = used + at_hand + slab_free + free + waiting`, which is also what the chunks in use add up to:
/// `reserved = mapped + quarantined_memory`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Addresses reserved.
    pub addresses: Bytes,
    /// Addresses with nothing mapped.
    pub holes: Bytes,
    /// Addresses of old mappings.
    pub retired: Bytes,
    /// Addresses that could not be unmapped.
    pub quarantined_addresses: Bytes,
    /// Addresses that are some chunk's home.
    pub mapped: Bytes,
    /// In users' hands, rounding included.
    pub used: Bytes,
    /// Freed a moment ago and kept by their threads, who may take them again at once.
    pub at_hand: Bytes,
    /// What users asked for: part of `used`, as it was when the memory was placed.
    pub requested: Bytes,
    /// Free, reusable by its owner at once.
    pub free: Bytes,
    /// Free within slabs.
    pub slab_free: Bytes,
    /// Freed, waiting for other streams' work.
    pub waiting: Bytes,
    /// Physical memory.
    pub reserved: Bytes,
    /// Physical memory that a failed driver call left unusable.
    pub quarantined_memory: Bytes,
}

impl Pool {
    /// Adds up every region and chunk, slabs as if they were free: their heaps know better
    /// ([`StreamHeap::count_into`](crate::StreamHeap::count_into)). O(n).
    pub fn census(&self) -> Census {
        let mut census = Census::default();
        for (_, region) in self.regions.iter() {
            let len = Bytes::new(region.len);
            census.addresses += len;
            match &region.kind {
                Kind::Hole => census.holes += len,
                Kind::Retired { .. } => census.retired += len,
                Kind::Quarantined => census.quarantined_addresses += len,
                Kind::Free(_) => census.free += len,
                Kind::Waiting { .. } => census.waiting += len,
                Kind::Used(used) if used.slab => census.slab_free += len,
                Kind::Used(used) => {
                    census.used += len;
                    census.requested += Bytes::new(used.requested);
                }
            }
        }
        census.mapped = census.used + census.slab_free + census.free + census.waiting;
        for (_, chunk) in self.chunks.iter() {
            let len = Bytes::new(chunk.len);
            census.reserved += len;
            if chunk.home.is_none() {
                census.quarantined_memory += len;
            }
        }
        census
    }
}

impl Pool {
    /// Everything that is mapped, homes and retired mappings alike: one range for each stretch.
    pub fn mapped_ranges(&self) -> Vec<Range> {
        let mut ranges: Vec<Range> = Vec::new();
        for (_, region) in self.regions.iter().filter(|(_, region)| region.kind != Kind::Hole) {
            match ranges.last_mut() {
                Some(last) if last.at.plus(last.len.count()) == region.at => {
                    last.len += Bytes::new(region.len);
                }
                _ => ranges.push(Range { at: region.at, len: Bytes::new(region.len) }),
            }
        }
        ranges
    }
}

impl fmt::Display for Census {
    /// A column that adds up.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("used", self.used),
            ("at hand", self.at_hand),
            ("free", self.free),
            ("free in slabs", self.slab_free),
            ("waiting", self.waiting),
            ("= mapped", self.mapped),
            ("quarantined", self.quarantined_memory),
            ("= reserved", self.reserved),
            ("addresses", self.addresses),
            ("  holes", self.holes),
            ("  retired", self.retired),
            ("  quarantined", self.quarantined_addresses),
        ];
        for (name, bytes) in rows {
            writeln!(f, "{name:<14} {:>12}", bytes.to_string())?;
        }
        Ok(())
    }
}
