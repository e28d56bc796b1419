//! Uses of freed blocks that, by the trace, have not ended yet.
//!
//! A recording has the end of the uses of each block, and no times of this device. So this table
//! decides which epoch of a stream is complete:
//!
//! 1. A free whose uses end later holds back the block's stream, and every other stream that may
//!    use the block, at their current epochs.
//! 2. A stream that begins to wait for others is held back by all that holds them back.
//! 3. The end of the uses removes the holds.
//!
//! Each change is written to the table that the allocator reads.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use vramp::StreamId;
use vramp::config::{Epoch, ExternalProgress};
use vramp::inspect::Mark;

/// The uses that hold each stream back.
#[derive(Debug, Default)]
pub(crate) struct PendingUses {
    /// For each stream, the number of blocks that hold each of its epochs.
    epochs: Vec<BTreeMap<Epoch, u32>>,
    /// For each block with pending uses, the marks it holds.
    blocks: HashMap<u32, Held>,
    /// The blocks with pending uses, in the order in which they came.
    order: BTreeMap<u64, u32>,
    next: u64,
    /// For each stream, the number from which on blocks may not hold it. All earlier ones do.
    held_from: Vec<u64>,
    /// The latest complete epoch of each stream.
    progress: Arc<ExternalProgress>,
}

/// The marks of one block: at most one for each stream.
#[derive(Debug)]
struct Held {
    /// Its place in [`PendingUses::order`].
    number: u64,
    marks: Vec<Mark>,
}

impl PendingUses {
    /// Returns an empty table that writes to `progress`.
    pub(crate) fn new(progress: Arc<ExternalProgress>) -> PendingUses {
        PendingUses { progress, ..PendingUses::default() }
    }

    /// Returns true if no stream is held back.
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Writes the latest complete epoch of a stream: the one before the lowest that is held.
    fn publish(&self, stream: StreamId) {
        let held = self.epochs.get(stream.index()).and_then(BTreeMap::first_key_value);
        self.progress.set(stream, held.map(|(lowest, _)| lowest.previous()));
    }

    /// Holds the stream of `mark` back at its epoch until the uses of `block` end.
    pub(crate) fn hold(&mut self, block: u32, mark: Mark) {
        let held = self.blocks.entry(block).or_insert_with(|| {
            let number = self.next;
            self.next += 1;
            self.order.insert(number, block);
            Held { number, marks: Vec::new() }
        });
        let marks = &mut held.marks;
        let epochs = epochs_of(&mut self.epochs, mark.stream);
        match marks.iter_mut().find(|held| held.stream == mark.stream) {
            Some(held) if held.epoch <= mark.epoch => {}
            Some(held) => {
                remove(epochs, held.epoch);
                *epochs.entry(mark.epoch).or_default() += 1;
                *held = mark;
            }
            None => {
                *epochs.entry(mark.epoch).or_default() += 1;
                marks.push(mark);
            }
        }
        self.publish(mark.stream);
    }

    /// Holds the stream of `mark` back by all pending uses, as work from `mark` on waits for other
    /// streams. O(log n) for each block that came since the last call for the stream.
    pub(crate) fn hold_by_all(&mut self, mark: Mark) {
        let epochs = epochs_of(&mut self.epochs, mark.stream);
        let stream = mark.stream.index();
        if self.held_from.len() <= stream {
            self.held_from.resize(stream + 1, 0);
        }
        let from = std::mem::replace(&mut self.held_from[stream], self.next);
        for block in self.order.range(from..).map(|(_, block)| block) {
            let Some(Held { marks, .. }) = self.blocks.get_mut(block) else { continue };
            if marks.iter().all(|held| held.stream != mark.stream) {
                *epochs.entry(mark.epoch).or_default() += 1;
                marks.push(mark);
            }
        }
        self.publish(mark.stream);
    }

    /// Ends the uses of `block`.
    pub(crate) fn end(&mut self, block: u32) {
        let Some(held) = self.blocks.remove(&block) else { return };
        self.order.remove(&held.number);
        for mark in held.marks {
            remove(epochs_of(&mut self.epochs, mark.stream), mark.epoch);
            self.publish(mark.stream);
        }
    }
}

fn epochs_of(
    epochs: &mut Vec<BTreeMap<Epoch, u32>>,
    stream: StreamId,
) -> &mut BTreeMap<Epoch, u32> {
    if epochs.len() <= stream.index() {
        epochs.resize_with(stream.index() + 1, BTreeMap::new);
    }
    &mut epochs[stream.index()]
}

fn remove(epochs: &mut BTreeMap<Epoch, u32>, epoch: Epoch) {
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

    /// Returns two streams and the first epochs of the first one, oldest first.
    fn epochs(count: usize) -> (StreamId, StreamId, Vec<Epoch>) {
        let mut pool = Pool::new(PoolConfig {
            page: vramp::Bytes::mib(2),
            span: vramp::Bytes::gib(1),
            first_span: vramp::Bytes::gib(1),
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
    fn a_stream_is_complete_up_to_its_oldest_hold() {
        let (stream, other, e) = epochs(4);
        let at = |epoch| Mark { stream, epoch };
        let mut table = PendingUses::default();
        assert_eq!(table.progress.reached(at(e[3])), e[3]);
        table.hold(1, at(e[2]));
        table.hold(2, at(e[1]));
        assert_eq!(table.progress.reached(at(e[3])), e[0]);
        assert_eq!(table.progress.reached(Mark { stream: other, epoch: e[3] }), e[3]);
        table.end(2);
        assert_eq!(table.progress.reached(at(e[3])), e[1]);
        table.end(1);
        assert_eq!(table.progress.reached(at(e[3])), e[3]);
        assert!(table.is_empty());
    }

    #[test]
    fn a_waiting_stream_is_held_back_like_the_others() {
        let (stream, other, e) = epochs(4);
        let mut table = PendingUses::default();
        table.hold(1, Mark { stream: other, epoch: e[0] });
        table.hold_by_all(Mark { stream, epoch: e[2] });
        assert_eq!(table.progress.reached(Mark { stream, epoch: e[3] }), e[1]);
        table.hold(1, Mark { stream, epoch: e[1] });
        assert_eq!(table.progress.reached(Mark { stream, epoch: e[3] }), e[0]);
        table.end(1);
        assert_eq!(table.progress.reached(Mark { stream, epoch: e[3] }), e[3]);
        assert!(table.is_empty());
    }
}
