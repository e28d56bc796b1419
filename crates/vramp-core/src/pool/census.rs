//! Where every byte is: by address and by physical memory, each adding up.

use std::collections::BTreeMap;
use std::fmt;

use crate::Bytes;
use crate::ids::{PoolAddr, StreamId};
use crate::pool::ops::Range;
use crate::pool::regions::Kind;
use crate::pool::streams::IDLE;
use crate::pool::view::View;

/// Bytes by state. See `docs/background/states.md` for what each state means.
///
/// Two sums hold, and the audit checks them:
/// `addresses = holes + retired + hosted + quarantined_addresses + mapped` and
/// `mapped = used + at_hand + slab_free + free + waiting + arenas + lent`, which is also the sum of
/// the usable chunks: `reserved = mapped + quarantined_memory`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Reserved addresses.
    pub addresses: Bytes,
    /// Addresses with nothing mapped.
    pub holes: Bytes,
    /// Addresses of old mappings.
    pub retired: Bytes,
    /// Addresses where memory is mapped that is not the pool's.
    pub hosted: Bytes,
    /// Addresses that could not be unmapped.
    pub quarantined_addresses: Bytes,
    /// Addresses that are the home of a chunk.
    pub mapped: Bytes,
    /// Allocated bytes, rounding included.
    pub used: Bytes,
    /// Freed blocks that a thread keeps for its next request.
    pub at_hand: Bytes,
    /// Allocated bytes as requested: part of `used`.
    pub requested: Bytes,
    /// Free, reusable by its owner at once.
    pub free: Bytes,
    /// Free within slabs.
    pub slab_free: Bytes,
    /// Freed, waiting for other streams' work.
    pub waiting: Bytes,
    /// In graph arenas.
    pub arenas: Bytes,
    /// In idle graph arenas: builds may move it away.
    pub lent: Bytes,
    /// Physical memory.
    pub reserved: Bytes,
    /// Physical memory that a failed driver call left unusable.
    pub quarantined_memory: Bytes,
}

/// What failed driver calls left unusable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quarantined {
    /// Physical memory. It counts as reserved.
    pub memory: Bytes,
    /// Addresses. The memory mapped there is another part of the pool, or in `memory`.
    pub addresses: Bytes,
}

impl Quarantined {
    /// Returns true if nothing is unusable.
    pub fn is_empty(&self) -> bool {
        *self == Quarantined::default()
    }
}

/// Memory of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The stream.
    pub stream: StreamId,
    /// Bytes in blocks placed for it, slabs of its heap included.
    pub used: Bytes,
    /// Free memory that it used last.
    pub free: Bytes,
    /// Freed, waiting for other streams.
    pub waiting: Bytes,
}

/// Contiguous memory in use or free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Address of the first byte.
    pub at: PoolAddr,
    /// Length in bytes.
    pub len: Bytes,
    /// Its parts in address order.
    pub parts: Vec<StretchPart>,
}

/// A region of a stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StretchPart {
    /// Address of the first byte.
    pub at: PoolAddr,
    /// Length in bytes.
    pub len: Bytes,
    /// Requested bytes of a block.
    pub requested: Bytes,
    /// Stream that uses it, or used it last.
    pub stream: StreamId,
    /// Present use.
    pub kind: PartKind,
}

/// Present use of a part of a stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// An allocated block.
    Block,
    /// A slab: [`StreamHeap::parts`](crate::StreamHeap::parts) has what is in it.
    Slab,
    /// Free.
    Free,
    /// Freed, waiting for other streams.
    Waiting,
    /// A graph arena's memory.
    Arena,
}

impl View<'_> {
    pub(crate) fn census(self) -> Census {
        let mut census = Census::default();
        for (_, region) in self.regions.iter() {
            let len = region.len;
            census.addresses += len;
            match &region.kind {
                Kind::Hole | Kind::Gap { .. } => census.holes += len,
                Kind::Retired { .. } => census.retired += len,
                Kind::Hosted { .. } => census.hosted += len,
                Kind::Quarantined { .. } => census.quarantined_addresses += len,
                Kind::Free(free) if free.lent_by.is_some() => census.lent += len,
                Kind::Free(_) => census.free += len,
                Kind::Arena { .. } => census.arenas += len,
                Kind::Waiting { .. } => census.waiting += len,
                Kind::Used(used) if used.slab => census.slab_free += len,
                Kind::Used(used) => {
                    census.used += len;
                    census.requested += used.requested;
                }
            }
        }
        census.mapped = census.used + census.slab_free + census.free + census.waiting;
        census.mapped += census.arenas + census.lent;
        for (_, chunk) in self.chunks.iter() {
            census.reserved += chunk.len;
            if chunk.home.is_none() {
                census.quarantined_memory += chunk.len;
            }
        }
        census
    }

    pub(crate) fn mapped_ranges(self) -> Vec<Range> {
        let mut ranges: Vec<Range> = Vec::new();
        for (_, region) in self.regions.iter().filter(|(_, region)| region.kind.is_mapped()) {
            Range::new(region.at, region.len).append(&mut ranges);
        }
        ranges
    }

    /// Mapped ranges except those that a failed driver call left in an unknown state.
    pub(crate) fn accessible_ranges(self) -> Vec<Range> {
        let mut ranges: Vec<Range> = Vec::new();
        for (_, region) in self.regions.iter() {
            if region.kind.is_mapped() && !matches!(region.kind, Kind::Quarantined { .. }) {
                Range::new(region.at, region.len).append(&mut ranges);
            }
        }
        ranges
    }

    /// Ranges whose contents matter: blocks, slabs, and memory of arenas.
    pub(crate) fn contents(self) -> Vec<Range> {
        let mut ranges: Vec<Range> = Vec::new();
        for (_, region) in self.regions.iter() {
            if matches!(region.kind, Kind::Used(_) | Kind::Arena { .. }) {
                Range::new(region.at, region.len).append(&mut ranges);
            }
        }
        ranges
    }

    pub(crate) fn shares(self) -> Vec<Share> {
        let none =
            |stream| Share { stream, used: Bytes::ZERO, free: Bytes::ZERO, waiting: Bytes::ZERO };
        let present = self.streams.iter().map(|(stream, _)| (stream, none(stream)));
        let mut shares: BTreeMap<StreamId, Share> = present.collect();
        for (_, region) in self.regions.iter() {
            let len = region.len;
            match &region.kind {
                Kind::Used(used) => {
                    shares.entry(used.stream).or_insert(none(used.stream)).used += len
                }
                // Idle memory is no stream's.
                Kind::Free(free) if free.owner == IDLE => {}
                Kind::Free(free) => {
                    shares.entry(free.owner).or_insert(none(free.owner)).free += len
                }
                Kind::Waiting { owner, .. } => {
                    shares.entry(*owner).or_insert(none(*owner)).waiting += len
                }
                Kind::Arena { stream, .. } => {
                    shares.entry(*stream).or_insert(none(*stream)).used += len
                }
                Kind::Gap { .. }
                | Kind::Hole
                | Kind::Retired { .. }
                | Kind::Hosted { .. }
                | Kind::Quarantined { .. } => {}
            }
        }
        shares.into_values().collect()
    }

    pub(crate) fn stretches(self) -> Vec<Stretch> {
        let mut stretches: Vec<Stretch> = Vec::new();
        for (_, region) in self.regions.iter() {
            let (stream, requested, kind) = match &region.kind {
                Kind::Used(used) if used.slab => (used.stream, Bytes::ZERO, PartKind::Slab),
                Kind::Used(used) => (used.stream, used.requested, PartKind::Block),
                // Idle memory is no stream's: it is shown as the first one's.
                Kind::Free(free) if free.owner == IDLE => {
                    (StreamId::new(0), Bytes::ZERO, PartKind::Free)
                }
                Kind::Free(free) => (free.owner, Bytes::ZERO, PartKind::Free),
                Kind::Waiting { owner, .. } => (*owner, Bytes::ZERO, PartKind::Waiting),
                Kind::Arena { stream, .. } => (*stream, Bytes::ZERO, PartKind::Arena),
                Kind::Gap { .. }
                | Kind::Hole
                | Kind::Retired { .. }
                | Kind::Hosted { .. }
                | Kind::Quarantined { .. } => continue,
            };
            let (at, len) = (region.at, region.len);
            let part = StretchPart { at, len, requested, stream, kind };
            match stretches.last_mut() {
                Some(last) if last.at + last.len == at => {
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
