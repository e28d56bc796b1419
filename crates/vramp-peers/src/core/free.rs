//! Free blocks: search, split, merge, list.

use super::block::{Class, Slot, State};
use super::config::fixed::{BLOCK_ALIGN, SMALL_LIMIT};
use super::pool::TorchPool;
use super::stats::ByClass;
use vramp_core::{PoolAddr, StreamId};

impl TorchPool {
    /// Makes a block free that no stream uses any more, and merges it with its free neighbours.
    pub(crate) fn make_free(&mut self, slot: Slot) {
        let block = self.blocks.get(slot);
        let (class, len, requested) = (block.class, block.len, block.requested);
        let expandable = self.is_expandable(block);
        self.blocks.get_mut(slot).state = State::Free;
        let merged = self.merge_neighbours(slot);
        if !expandable {
            for gone in merged {
                self.stats.inactive_split.decrease(class, 1);
                self.stats.inactive_split_bytes.decrease(class, gone);
            }
            let block = self.blocks.get(slot);
            if block.is_split() {
                self.stats.inactive_split.increase(class, 1);
                self.stats.inactive_split_bytes.increase(class, block.len);
            }
        }
        self.list(slot);
        self.stats.active.decrease(class, 1);
        self.stats.active_bytes.decrease(class, len);
        self.stats.requested_bytes.decrease(class, requested);
    }

    /// Merges the neighbours in the same state, free or unmapped, into an unlisted block. Returns
    /// the lengths of the merged ones.
    pub(crate) fn merge_neighbours(&mut self, slot: Slot) -> impl Iterator<Item = u64> + use<> {
        let block = self.blocks.get(slot);
        let (state, neighbours) = (block.state, [block.prev, block.next]);
        neighbours
            .map(|neighbour| {
                let neighbour = neighbour.filter(|&slot| self.blocks.get(slot).state == state)?;
                let len = self.blocks.get(neighbour).len;
                self.unlist(neighbour);
                self.blocks.absorb(slot, neighbour);
                Some(len)
            })
            .into_iter()
            .flatten()
    }

    /// Enters a free or unmapped block in the lists of its class.
    pub(crate) fn list(&mut self, slot: Slot) {
        let block = self.blocks.get_mut(slot);
        let (class, stream, len, at) = (block.class, block.stream, block.len, block.at);
        match block.state {
            State::Free => {
                let lists = self.lists_mut(class);
                let fresh = lists.free.insert((stream, len, at, slot));
                debug_assert!(fresh, "block {slot} was listed twice");
                let searches = lists.searches;
                self.blocks.get_mut(slot).free_since = searches;
            }
            State::Unmapped => {
                self.lists_mut(class).unmapped.insert((stream, at, slot));
            }
            state => panic!("block {slot} cannot be listed: it is {state:?}"),
        }
    }

    /// Takes a block out of the lists of its class.
    pub(crate) fn unlist(&mut self, slot: Slot) {
        let block = self.blocks.get(slot);
        let (stream, len, at) = (block.stream, block.len, block.at);
        let (class, state) = (block.class, block.state);
        let lists = self.lists_mut(class);
        let listed = match state {
            State::Free => lists.free.remove(&(stream, len, at, slot)),
            State::Unmapped => lists.unmapped.remove(&(stream, at, slot)),
            _ => false,
        };
        assert!(listed, "block {slot} is {state:?} and not listed");
    }

    /// Returns the best fit for `len` bytes: the smallest free block of the stream, then the
    /// lowest.
    pub(crate) fn best_fit(&mut self, class: Class, stream: StreamId, len: u64) -> Option<Slot> {
        let counts_searches = self.collects_garbage();
        let lists = self.lists_mut(class);
        lists.searches += u64::from(counts_searches);
        let lists = self.lists(class);
        let mut fitting =
            lists.free.range((stream, len, PoolAddr::default(), 0)..).take_while(|e| e.0 == stream);
        let &(_, mut found, _, mut slot) = fitting.next()?;
        if self.config.expandable_segments {
            // A block counts with the length it can be grown to in place.
            for &(_, _, _, next) in fitting {
                if self.expanded_len(next) >= self.expanded_len(slot) {
                    break;
                }
                slot = next;
            }
            found = self.blocks.get(slot).len;
        }
        let oversize = self.config.oversize();
        let too_large = if len < oversize {
            found >= oversize
        } else {
            found >= len.saturating_add(self.config.max_non_split_rounding.count())
        };
        (!too_large).then_some(slot)
    }

    fn expanded_len(&self, slot: Slot) -> u64 {
        let block = self.blocks.get(slot);
        let next = block.next.map(|next| self.blocks.get(next));
        let behind = next.filter(|next| next.state == State::Unmapped).map_or(0, |next| next.len);
        block.len + behind
    }

    /// Returns true if the rest of a block of `len` bytes after `wanted` becomes a free block.
    pub(crate) fn splits(&self, class: Class, len: u64, wanted: u64) -> bool {
        let rest = len - wanted;
        if class == Class::Small || self.config.expandable_segments {
            rest >= BLOCK_ALIGN
        } else {
            wanted < self.config.oversize() && rest > SMALL_LIMIT
        }
    }

    /// Returns true if unused segments are released by age.
    pub(crate) fn collects_garbage(&self) -> bool {
        self.limit.is_some() && self.config.garbage_collection_threshold.is_some()
    }
}
