//! Where every byte is: by address and by physical memory, each adding up.

use std::fmt;

use crate::Bytes;
use crate::ids::{PoolAddr, StreamId};
use crate::pool::plan::Range;
use crate::pool::regions::Kind;
use crate::pool::state::Pool;

/// Bytes by state. See `docs/states.md` for what each state means.
///
/// Two sums hold, and the audit checks them:
/// `addresses = holes + retired + hosted + quarantined_addresses + mapped` and
/// `mapped = used + at_hand + slab_free + free + waiting + arenas + lent`, which is also what the chunks in use add up to:
/// `reserved = mapped + quarantined_memory`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Addresses reserved.
    pub addresses: Bytes,
    /// Addresses with nothing mapped.
    pub holes: Bytes,
    /// Addresses of old mappings.
    pub retired: Bytes,
    /// Addresses with memory behind them that is not the pool's.
    pub hosted: Bytes,
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
    /// In graph arenas.
    pub arenas: Bytes,
    /// In graph arenas that nobody uses at present: anybody may take it away.
    pub lent: Bytes,
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
                Kind::Hole | Kind::Gap { .. } => census.holes += len,
                Kind::Retired { .. } => census.retired += len,
                Kind::Hosted { .. } => census.hosted += len,
                Kind::Quarantined => census.quarantined_addresses += len,
                Kind::Free(free) if free.lent_by.is_some() => census.lent += len,
                Kind::Free(_) => census.free += len,
                Kind::Arena { .. } => census.arenas += len,
                Kind::Waiting { .. } => census.waiting += len,
                Kind::Used(used) if used.slab => census.slab_free += len,
                Kind::Used(used) => {
                    census.used += len;
                    census.requested += Bytes::new(used.requested);
                }
            }
        }
        census.mapped = census.used + census.slab_free + census.free + census.waiting;
        census.mapped += census.arenas + census.lent;
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
        for (_, region) in self.regions.iter().filter(|(_, region)| region.kind.is_mapped()) {
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

/// What one stream has of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Whose.
    pub stream: StreamId,
    /// In blocks made for it, slabs of its heap included.
    pub used: Bytes,
    /// Free memory that it used last.
    pub free: Bytes,
    /// Freed, waiting for other streams.
    pub waiting: Bytes,
}

/// Memory side by side that chunks back without a gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Where it begins.
    pub at: PoolAddr,
    /// How much it is.
    pub len: Bytes,
    /// Its parts in address order.
    pub parts: Vec<StretchPart>,
}

/// A region of a stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StretchPart {
    /// Where it begins.
    pub at: PoolAddr,
    /// How much it is.
    pub len: Bytes,
    /// What was asked for, for a block.
    pub requested: Bytes,
    /// Whose it is, or was last.
    pub stream: StreamId,
    /// What it is used for.
    pub kind: PartKind,
}

/// What a part of a stretch is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// A block in a user's hands.
    Block,
    /// A slab: its heap knows what is in it ([`StreamHeap::parts`](crate::StreamHeap::parts)).
    Slab,
    /// Free.
    Free,
    /// Freed, waiting for other streams.
    Waiting,
    /// A graph arena's: it knows what is in it.
    Arena,
}

impl Pool {
    /// What each stream has. O(n).
    pub fn shares(&self) -> Vec<Share> {
        let none =
            |stream| Share { stream, used: Bytes::ZERO, free: Bytes::ZERO, waiting: Bytes::ZERO };
        let mut shares: Vec<Share> = self.streams.ids().map(none).collect();
        for (_, region) in self.regions.iter() {
            let len = Bytes::new(region.len);
            match &region.kind {
                Kind::Used(used) => shares[used.stream.index()].used += len,
                Kind::Free(free) => shares[free.owner.index()].free += len,
                Kind::Waiting { owner, .. } => shares[owner.index()].waiting += len,
                Kind::Arena { stream, .. } => shares[stream.index()].used += len,
                Kind::Gap { .. }
                | Kind::Hole
                | Kind::Retired { .. }
                | Kind::Hosted { .. }
                | Kind::Quarantined => {}
            }
        }
        shares
    }

    /// All memory in use or free, by address. O(n).
    pub fn stretches(&self) -> Vec<Stretch> {
        let mut stretches: Vec<Stretch> = Vec::new();
        for (_, region) in self.regions.iter() {
            let (stream, requested, kind) = match &region.kind {
                Kind::Used(used) if used.slab => (used.stream, 0, PartKind::Slab),
                Kind::Used(used) => (used.stream, used.requested, PartKind::Block),
                Kind::Free(free) => (free.owner, 0, PartKind::Free),
                Kind::Waiting { owner, .. } => (*owner, 0, PartKind::Waiting),
                Kind::Arena { stream, .. } => (*stream, 0, PartKind::Arena),
                Kind::Gap { .. }
                | Kind::Hole
                | Kind::Retired { .. }
                | Kind::Hosted { .. }
                | Kind::Quarantined => {
                    continue;
                }
            };
            let (at, len) = (region.at, Bytes::new(region.len));
            let part = StretchPart { at, len, requested: Bytes::new(requested), stream, kind };
            match stretches.last_mut() {
                Some(last) if last.at.plus(last.len.count()) == at => {
                    last.len += len;
                    last.parts.push(part);
                }
                _ => stretches.push(Stretch { at, len, parts: vec![part] }),
            }
        }
        stretches
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
            ("arenas", self.arenas),
            ("lent by arenas", self.lent),
            ("= mapped", self.mapped),
            ("quarantined", self.quarantined_memory),
            ("= reserved", self.reserved),
            ("addresses", self.addresses),
            ("  holes", self.holes),
            ("  retired", self.retired),
            ("  hosted", self.hosted),
            ("  quarantined", self.quarantined_addresses),
        ];
        for (name, bytes) in rows {
            writeln!(f, "{name:<14} {:>12}", bytes.to_string())?;
        }
        Ok(())
    }
}
