//! How much memory is pinned next, and what is unpinned.

use vramp_core::Bytes;

use crate::extents::BackingId;

/// Bytes of a pool that growth depends on.
#[derive(Clone, Copy, Debug)]
pub(in crate::host) struct Held {
    /// Pinned bytes.
    pub pinned: Bytes,
    /// Free bytes, and returned bytes that work still uses.
    pub free: Bytes,
    /// Most bytes that may be pinned.
    pub most: Bytes,
}

impl Held {
    /// Returns the length to pin next: `wanted`, or less where the capacity ends. Zero if the pool
    /// is full.
    pub fn next_len(self, wanted: Bytes) -> Bytes {
        wanted.min(self.most - self.pinned)
    }

    /// Returns true if less than `spare` is free and more may be pinned.
    pub fn is_low(self, spare: Bytes) -> bool {
        self.free < spare && self.pinned < self.most
    }
}

/// Chooses what to unpin of `idle`, the newest first, so that at least `keep` of `pinned` stays.
/// `idle` is in order of age, because blocks are allocated from the oldest.
pub(in crate::host) fn to_unpin(
    idle: &[(BackingId, Bytes)],
    mut pinned: Bytes,
    keep: Bytes,
) -> Vec<BackingId> {
    let mut chosen = Vec::new();
    for &(id, len) in idle.iter().rev() {
        if pinned >= keep + len {
            pinned -= len;
            chosen.push(id);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: fn(u64) -> Bytes = Bytes::mib;

    #[test]
    fn the_next_length_is_what_is_wanted_or_what_the_capacity_allows() {
        for (pinned, expected) in [(0, 4), (6, 4), (8, 2), (10, 0)] {
            let held = Held { pinned: MIB(pinned), free: MIB(0), most: MIB(10) };
            assert_eq!(held.next_len(MIB(4)), MIB(expected), "{pinned} MiB pinned");
        }
    }

    #[test]
    fn a_pool_is_low_below_its_spare_bytes_unless_it_is_full() {
        for (free, pinned, low) in [(2, 4, false), (1, 4, true), (1, 10, false)] {
            let held = Held { pinned: MIB(pinned), free: MIB(free), most: MIB(10) };
            assert_eq!(held.is_low(MIB(2)), low, "{free} of {pinned} MiB free");
        }
        let held = Held { pinned: MIB(0), free: MIB(0), most: MIB(10) };
        assert!(!held.is_low(MIB(0)), "without spare blocks a pool grows on demand");
    }

    #[test]
    fn the_newest_go_first_and_what_is_kept_is_never_undercut() {
        let idle = [(BackingId(0), MIB(4)), (BackingId(2), MIB(4)), (BackingId(5), MIB(2))];
        let chosen = |pinned, keep| {
            let ids = to_unpin(&idle, MIB(pinned), MIB(keep));
            ids.into_iter().map(|id| id.0).collect::<Vec<_>>()
        };
        assert_eq!(chosen(14, 0), [5, 2, 0]);
        assert_eq!(chosen(14, 8), [5, 2]);
        assert_eq!(chosen(14, 11), [5]);
        assert_eq!(chosen(14, 14), [0; 0]);
        assert_eq!(chosen(2, 0), [5], "a longer one would undercut");
    }
}
