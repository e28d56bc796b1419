//! Releasing unused memory: by age, by size, or all of it.

use std::collections::VecDeque;

use super::block::{Class, Slot, State};
use super::pool::TorchPool;
use super::settle::{Target, TorchOp, TorchPlan};
use vramp_core::Bytes;
use vramp_core::{Mark, PoolAddr, StreamId};

/// Free blocks whose memory is to be released, in order.
pub(crate) type Victims = VecDeque<Slot>;

/// A release of all unused memory under way: PyTorch's `empty_cache`.
#[derive(Clone, Debug)]
pub struct TorchRelease {
    keep: u64,
    victims: Victims,
}

impl TorchPool {
    /// Begins a release of unused memory until no more than `keep` is reserved. The caller first
    /// waits for [`TorchPool::waited_for`], so that freed blocks are free.
    pub fn release(&mut self, keep: Bytes) -> TorchRelease {
        self.performed.clear();
        TorchRelease { keep: keep.count(), victims: self.all_unused() }
    }

    /// Returns the next plan of a release: perform and settle it, then call again. `None` at the
    /// end.
    pub fn next_release(&self, release: &mut TorchRelease) -> Option<TorchPlan> {
        // An empty range of addresses has no memory, and is freed in any case.
        if let Some(plan) = self.empty_range() {
            return Some(plan);
        }
        if self.reserved <= release.keep {
            return None;
        }
        self.next_victim(&mut release.victims)
    }

    /// Returns the marks that freed blocks wait for, on every stream.
    pub fn waited_for(&self) -> Vec<Mark> {
        let last = |(id, stream): (StreamId, &super::pool::Progress)| {
            stream.waiting.back().map(|&(epoch, _)| Mark { stream: id, epoch })
        };
        self.streams.iter().filter_map(last).collect()
    }

    /// Returns the plan for the next victim that can be released.
    pub(crate) fn next_victim(&self, victims: &mut Victims) -> Option<TorchPlan> {
        loop {
            let slot = victims.pop_front()?;
            if let Some(plan) = self.release_block(slot) {
                return Some(plan);
            }
        }
    }

    /// Returns the plan that releases a free block's memory; `None` if it covers no whole handle.
    fn release_block(&self, slot: Slot) -> Option<TorchPlan> {
        let block = self.blocks.get(slot);
        let segment = self.segment(block.segment);
        let id = block.segment;
        let op = match segment.handle {
            None => TorchOp::Free { segment: id, len: Bytes::new(segment.len) },
            Some(handle) => {
                let start = block.at.since(segment.at);
                let first = start.next_multiple_of(handle);
                let end = (start + block.len) / handle * handle;
                if first >= end {
                    return None;
                }
                TorchOp::Unmap {
                    segment: id,
                    stream: block.stream,
                    offset: Bytes::new(first),
                    len: Bytes::new(end - first),
                    handle: Bytes::new(handle),
                }
            }
        };
        Some(TorchPlan { op, target: Target::Block(slot) })
    }

    /// Returns the plan that frees an expandable segment with nothing mapped, if there is one.
    pub(crate) fn empty_range(&self) -> Option<TorchPlan> {
        let lists = [&self.large, &self.small];
        let unmapped = lists.into_iter().flat_map(|lists| &lists.unmapped);
        let alone =
            |&&(_, _, slot): &&(StreamId, PoolAddr, Slot)| !self.blocks.get(slot).is_split();
        let &(_, _, slot) = unmapped.into_iter().find(alone)?;
        let segment = self.blocks.get(slot).segment;
        let len = Bytes::new(self.segment(segment).len);
        Some(TorchPlan { op: TorchOp::FreeAddresses { segment, len }, target: Target::Block(slot) })
    }

    /// Returns every free block that can be released: large ones first, each class in its order.
    pub(crate) fn all_unused(&self) -> Victims {
        let of = |class| self.lists(class).free.iter().map(|&(_, _, _, slot)| slot);
        Class::ALL.into_iter().flat_map(of).filter(|&slot| self.is_whole(slot)).collect()
    }

    /// Returns true if it is a segment of its own, or part of an expandable one.
    fn is_whole(&self, slot: Slot) -> bool {
        let block = self.blocks.get(slot);
        !block.is_split() || self.is_expandable(block)
    }

    /// Returns oversize blocks of the stream that make room for `len` bytes: the smallest one that
    /// is large enough, or several from the largest on. False if they do not suffice; they are
    /// released even then, as in PyTorch.
    pub(crate) fn oversize_victims(
        &self,
        class: Class,
        stream: StreamId,
        len: u64,
    ) -> (Victims, bool) {
        let oversize = self.config.oversize();
        if self.config.max_split_size.is_none() {
            return (Victims::new(), false);
        }
        let needed = len.max(oversize);
        let free = &self.lists(class).free;
        let of_stream = |entry: &&(StreamId, u64, PoolAddr, Slot)| entry.0 == stream;
        let enough =
            free.range((stream, needed, PoolAddr::default(), 0)..).next().filter(of_stream);
        match enough {
            Some(&(_, _, _, slot)) if !self.is_expandable(self.blocks.get(slot)) => {
                return (Victims::from([slot]), true);
            }
            _ => {}
        }
        let (mut victims, mut released) = (Victims::new(), 0u64);
        let smaller = free.range(..(stream, needed, PoolAddr::default(), 0)).rev();
        for &(_, len, _, slot) in smaller.take_while(|e| e.0 == stream && e.1 >= oversize) {
            if released >= needed {
                break;
            }
            if !self.is_expandable(self.blocks.get(slot)) {
                released += len;
                victims.push_back(slot);
            }
        }
        (victims, released >= needed)
    }

    /// Returns the segments to release because the pool has reserved more than the threshold: those
    /// unused for longer than the average, and again, until it has not.
    pub(crate) fn garbage(&self) -> Victims {
        let mut victims = Victims::new();
        let (Some(limit), Some(threshold)) = (self.limit, self.config.garbage_collection_threshold)
        else {
            return victims;
        };
        let threshold = (limit as f64 * threshold) as u64;
        let Some(target) = self.reserved.checked_sub(threshold).filter(|&target| target > 0) else {
            return victims;
        };
        let age = |slot| self.large.searches - self.blocks.get(slot).free_since;
        let listed = self.large.free.iter().map(|&(_, _, _, slot)| slot);
        let mut left: Vec<Slot> = listed
            .filter(|&slot| {
                let block = self.blocks.get(slot);
                !block.is_split() && !self.is_expandable(block)
            })
            .collect();
        let mut reclaimed = 0;
        while reclaimed < target && !left.is_empty() {
            let ages: u64 = left.iter().map(|&slot| age(slot)).sum();
            // Not below the average, in whole numbers.
            let (old, young): (Vec<Slot>, Vec<Slot>) =
                left.iter().partition(|&&slot| age(slot) * left.len() as u64 >= ages);
            reclaimed += old.iter().map(|&slot| self.blocks.get(slot).len).sum::<u64>();
            victims.extend(old);
            left = young;
        }
        debug_assert!(victims.iter().all(|&slot| self.blocks.get(slot).state == State::Free));
        victims
    }
}
