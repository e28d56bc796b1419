//! Work that the trace says is not over yet.
//!
//! A recording tells when the uses of a block ended, not what a clock would say on this device. So
//! the table below answers the allocator's question how far a stream has come:
//!
//! 1. A free whose uses end later holds the block's stream, and every other stream that may use it,
//!    at their epochs of that moment.
//! 2. A stream that begins to wait for others is held by everything that holds them.
//! 3. The end of the uses takes the holds away.

use std::collections::{BTreeMap, HashMap};

use vramp_alloc::StreamId;
use vramp_alloc::config::Epoch;
use vramp_alloc::inspect::Mark;

/// What holds each stream back.
#[derive(Debug, Default)]
pub(crate) struct Outstanding {
    /// For each stream, how many blocks hold each of its epochs.
    epochs: Vec<BTreeMap<Epoch, u32>>,
    /// For each block whose uses go on, the marks it holds: one for each stream at most.
    blocks: HashMap<u32, Vec<Mark>>,
}

impl Outstanding {
    /// True if nothing holds any stream.
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The epoch that the stream of `last` has reached, at most that of `last`.
    pub(crate) fn reached(&self, last: Mark) -> Epoch {
        let held = self.epochs.get(last.stream.index()).and_then(BTreeMap::first_key_value);
        held.map_or(last.epoch, |(lowest, _)| lowest.previous().min(last.epoch))
    }

    /// Uses of `block` go on at `mark`.
    pub(crate) fn hold(&mut self, block: u32, mark: Mark) {
        let marks = self.blocks.entry(block).or_default();
        let epochs = of(&mut self.epochs, mark.stream);
        match marks.iter_mut().find(|held| held.stream == mark.stream) {
            Some(held) if held.epoch <= mark.epoch => {}
            Some(held) => {
                forget(epochs, held.epoch);
                *epochs.entry(mark.epoch).or_default() += 1;
                *held = mark;
            }
            None => {
                *epochs.entry(mark.epoch).or_default() += 1;
                marks.push(mark);
            }
        }
    }

    /// Work from `mark` on waits for other streams: whatever holds them holds this one too.
    pub(crate) fn spread(&mut self, mark: Mark) {
        let epochs = of(&mut self.epochs, mark.stream);
        for marks in self.blocks.values_mut() {
            if marks.iter().all(|held| held.stream != mark.stream) {
                *epochs.entry(mark.epoch).or_default() += 1;
                marks.push(mark);
            }
        }
    }

    /// The uses of `block` are over.
    pub(crate) fn done(&mut self, block: u32) {
        for mark in self.blocks.remove(&block).unwrap_or_default() {
            forget(of(&mut self.epochs, mark.stream), mark.epoch);
        }
    }
}

fn of(epochs: &mut Vec<BTreeMap<Epoch, u32>>, stream: StreamId) -> &mut BTreeMap<Epoch, u32> {
    if epochs.len() <= stream.index() {
        epochs.resize_with(stream.index() + 1, BTreeMap::new);
    }
    &mut epochs[stream.index()]
}

fn forget(epochs: &mut BTreeMap<Epoch, u32>, epoch: Epoch) {
    if let Some(count) = epochs.get_mut(&epoch) {
        *count -= 1;
        if *count == 0 {
            epochs.remove(&epoch);
        }
    }
}

#[cfg(test)]
mod tests {
    use vramp_core::{Policy, Pool, PoolConfig};

    use super::*;

    /// A stream's first epochs, oldest first.
    fn epochs(count: usize) -> (StreamId, StreamId, Vec<Epoch>) {
        let mut pool = Pool::new(PoolConfig {
            page: vramp_alloc::Bytes::mib(2),
            span: vramp_alloc::Bytes::gib(1),
            limit: None,
            policy: Policy::Vpmm,
        })
        .unwrap();
        let (stream, other) = (pool.add_stream(), pool.add_stream());
        let epochs = (0..count).map(|_| {
            let now = pool.now(stream);
            pool.recorded(now);
            now.epoch
        });
        let epochs = epochs.collect();
        (stream, other, epochs)
    }

    #[test]
    fn a_stream_has_come_as_far_as_its_oldest_hold_allows() {
        let (stream, other, e) = epochs(4);
        let at = |epoch| Mark { stream, epoch };
        let mut table = Outstanding::default();
        assert_eq!(table.reached(at(e[3])), e[3]);
        table.hold(1, at(e[2]));
        table.hold(2, at(e[1]));
        assert_eq!(table.reached(at(e[3])), e[0]);
        assert_eq!(table.reached(Mark { stream: other, epoch: e[3] }), e[3]);
        table.done(2);
        assert_eq!(table.reached(at(e[3])), e[1]);
        table.done(1);
        assert_eq!(table.reached(at(e[3])), e[3]);
        assert!(table.is_empty());
    }

    #[test]
    fn a_stream_that_waits_is_held_by_what_holds_the_others() {
        let (stream, other, e) = epochs(4);
        let mut table = Outstanding::default();
        table.hold(1, Mark { stream: other, epoch: e[0] });
        table.spread(Mark { stream, epoch: e[2] });
        assert_eq!(table.reached(Mark { stream, epoch: e[3] }), e[1]);
        table.hold(1, Mark { stream, epoch: e[1] });
        assert_eq!(table.reached(Mark { stream, epoch: e[3] }), e[0]);
        table.done(1);
        assert_eq!(table.reached(Mark { stream, epoch: e[3] }), e[3]);
        assert!(table.is_empty());
    }
}
