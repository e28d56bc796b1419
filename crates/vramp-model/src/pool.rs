//! The state of the caching allocator, and the life of its blocks but for placing them.

use std::collections::VecDeque;

use smallvec::SmallVec;

use super::arenas::Arenas;
use super::block::{Block, Blocks, Class, Lists, Slot, State};
use super::config::TorchConfig;
use super::settle::TorchOp;
use super::stats::TorchStats;
use crate::SegmentId;
use vramp_core::Bytes;
use vramp_core::{BlockId, Epoch, Mark, PoolAddr, StreamId};
use vramp_core::{Counters, UnknownBlock};

/// A block as handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorchBlock {
    /// Names it until it is freed.
    pub id: BlockId,
    /// Where it begins, in the pool's own numbers.
    pub at: PoolAddr,
    /// How many bytes may be used: what was asked, rounded up.
    pub len: Bytes,
    /// The segment it lies in.
    pub segment: SegmentId,
    /// How far from the segment's start.
    pub offset: Bytes,
}

/// Memory of the driver's: one allocation, or one range of addresses with handles mapped into it.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub at: PoolAddr,
    /// The size of the allocation, or of the range.
    pub len: u64,
    /// What an expandable segment is mapped in.
    pub handle: Option<u64>,
}

/// A stream's progress: blocks freed while it used them wait in the order of their frees.
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    pub current: Epoch,
    /// Everything up to here is known to be over.
    pub reached: Epoch,
    /// Destroyed: its last event covers all it will ever do.
    pub ended: bool,
    pub waiting: VecDeque<(Epoch, Slot)>,
}

/// PyTorch's caching allocator. See the module's page.
#[derive(Clone, Debug)]
pub struct TorchPool {
    pub(crate) config: TorchConfig,
    /// Memory on the card, by which expandable segments are sized.
    pub(crate) card: u64,
    /// The lower of the user's limit and `per_process_memory_fraction`.
    pub(crate) limit: Option<u64>,
    pub(crate) blocks: Blocks,
    pub(crate) small: Lists,
    pub(crate) large: Lists,
    /// By id; vacant ones are used again.
    pub(crate) segments: Vec<Option<Segment>>,
    pub(crate) arenas: Arenas,
    pub(crate) streams: Vec<Progress>,
    pub(crate) reserved: u64,
    /// What the operation settled last made: the block that the attempt goes on with.
    pub(crate) fresh: Option<Slot>,
    /// What was settled for the last request or release.
    pub(crate) performed: Vec<TorchOp>,
    pub(crate) counters: Counters,
    pub(crate) stats: TorchStats,
}

impl TorchPool {
    /// An empty pool for a card with `card` bytes of memory, of which it takes `limit` at most.
    pub fn new(config: TorchConfig, card: Bytes, limit: Option<Bytes>) -> TorchPool {
        let mut pool = TorchPool {
            config,
            card: card.count(),
            limit: None,
            blocks: Blocks::default(),
            small: Lists::default(),
            large: Lists::default(),
            segments: Vec::new(),
            arenas: Arenas::default(),
            streams: Vec::new(),
            reserved: 0,
            fresh: None,
            performed: Vec::new(),
            counters: Counters::default(),
            stats: TorchStats::default(),
        };
        pool.set_limit(limit);
        pool
    }

    /// What the pool was told when it was made.
    pub fn config(&self) -> &TorchConfig {
        &self.config
    }

    /// Counts with PyTorch's own meaning.
    pub fn stats(&self) -> &TorchStats {
        &self.stats
    }

    /// What was settled for the last request that was placed, or for the last release, in order.
    pub fn performed(&self) -> &[TorchOp] {
        &self.performed
    }

    /// What happened so far. A chunk is a segment, or a handle of an expandable one.
    pub fn counters(&self) -> Counters {
        Counters { reserved: Bytes::new(self.reserved), ..self.counters }
    }

    /// Makes another stream known.
    pub fn add_stream(&mut self) -> StreamId {
        let first = Epoch::START.next();
        self.streams.push(Progress {
            current: first,
            reached: Epoch::START,
            ended: false,
            waiting: VecDeque::new(),
        });
        let number = u32::try_from(self.streams.len() - 1);
        StreamId::new(number.expect("fewer than four billion streams"))
    }

    /// The block a user holds under this id.
    pub fn block(&self, id: BlockId) -> Result<TorchBlock, UnknownBlock> {
        let block = self.blocks.used(id).ok_or(UnknownBlock { id })?;
        Ok(TorchBlock {
            id,
            at: block.at,
            len: Bytes::new(block.len),
            segment: block.segment,
            offset: Bytes::new(block.at.since(self.segment(block.segment).at)),
        })
    }

    /// Free bytes, and the largest free block.
    pub(crate) fn free_bytes(&self) -> (u64, u64) {
        let sizes = [&self.small, &self.large].map(|lists| lists.free.iter().map(|entry| entry.1));
        sizes.into_iter().flatten().fold((0, 0), |(sum, most), len| (sum + len, most.max(len)))
    }

    // --- progress ---

    /// Streams with recorded events that blocks wait for, each with the last epoch recorded.
    pub fn pending(&self) -> Vec<Mark> {
        self.marks(|stream| stream.waiting.front().is_some_and(|(e, _)| *e < stream.current))
            .map(|mark| Mark { epoch: mark.epoch.previous(), ..mark })
            .collect()
    }

    /// Streams that blocks wait for at an epoch for which no event was recorded yet.
    pub fn unrecorded(&self) -> Vec<Mark> {
        self.marks(|stream| stream.waiting.back().is_some_and(|(e, _)| *e == stream.current))
            .collect()
    }

    fn marks(&self, wanted: impl Fn(&Progress) -> bool) -> impl Iterator<Item = Mark> {
        let streams = (0..).map(StreamId::new).zip(&self.streams);
        streams
            .filter(move |(_, stream)| wanted(stream))
            .map(|(id, stream)| Mark { stream: id, epoch: stream.current })
    }

    /// The mark that an event recorded on `stream` now would have.
    pub fn now(&self, stream: StreamId) -> Mark {
        let known = &self.streams[stream.index()];
        let epoch = if known.ended { known.current.previous() } else { known.current };
        Mark { stream, epoch }
    }

    /// Tells the pool that an event was recorded for the stream's present epoch.
    pub fn recorded(&mut self, mark: Mark) {
        let stream = &mut self.streams[mark.stream.index()];
        assert_eq!(mark.epoch, stream.current, "{} records its present epoch", mark.stream);
        stream.current = stream.current.next();
    }

    /// Ends a stream for which an event was just recorded: it covers all that the stream will do.
    pub fn end_stream(&mut self, stream: StreamId) {
        self.streams[stream.index()].ended = true;
    }

    /// The most memory it takes from now on. The setting `per_process_memory_fraction` stays in
    /// force beside it.
    pub fn set_limit(&mut self, limit: Option<Bytes>) {
        let part = |fraction: f64| (self.card as f64 * fraction) as u64;
        let fraction = self.config.per_process_memory_fraction.map(part);
        self.limit = limit.map(Bytes::count).into_iter().chain(fraction).min();
    }

    /// Lets all peaks begin anew at what is held now.
    pub fn reset_peaks(&mut self) {
        self.stats.reset_peaks();
        self.counters.reserved_peak = Bytes::new(self.reserved);
        self.counters.live_peak = self.counters.live;
    }

    /// Tells the pool that the work before `mark` is over: blocks that waited for it are free.
    pub fn reached(&mut self, mark: Mark) {
        let known = &mut self.streams[mark.stream.index()];
        known.reached = known.reached.max(mark.epoch);
        loop {
            let waiting = &mut self.streams[mark.stream.index()].waiting;
            let Some(&(epoch, slot)) = waiting.front().filter(|(e, _)| *e <= mark.epoch) else {
                return;
            };
            debug_assert!(epoch <= mark.epoch);
            waiting.pop_front();
            match &mut self.blocks.get_mut(slot).state {
                State::Waiting(1) => self.make_free(slot),
                State::Waiting(marks) => *marks -= 1,
                state => panic!("block {slot} waits, but is {state:?}"),
            }
        }
    }

    // --- blocks ---

    /// Notes that `stream` uses the block too.
    pub fn record_use(&mut self, id: BlockId, stream: StreamId) -> Result<(), UnknownBlock> {
        self.block(id)?;
        let block = self.blocks.get_mut(id.slot());
        if block.stream != stream && !block.uses.contains(&stream) {
            block.uses.push(stream);
        }
        Ok(())
    }

    /// Takes a block back. Work on it must be queued on its own stream or on `stream`, or noted by
    /// [`TorchPool::record_use`]. Returns the marks it waits for: none if it is free at once. An
    /// event has to be recorded for each, followed by [`TorchPool::recorded`].
    pub fn free(
        &mut self,
        id: BlockId,
        stream: StreamId,
    ) -> Result<SmallVec<[Mark; 2]>, UnknownBlock> {
        self.record_use(id, stream)?;
        let slot = id.slot();
        let block = self.blocks.get_mut(slot);
        let (len, class, requested) = (block.len, block.class, block.requested);
        let mut uses = std::mem::take(&mut block.uses);
        let streams = &self.streams;
        uses.retain(|user| {
            let known = &streams[user.index()];
            !(known.ended && known.current.previous() <= known.reached)
        });
        self.counters.live -= Bytes::new(requested);
        self.counters.freed += 1;
        self.stats.allocation.decrease(class, 1);
        self.stats.allocated_bytes.decrease(class, len);
        if len >= self.config.oversize() {
            self.stats.oversize_allocations.decrease(1);
        }
        self.blocks.retire_id(slot);
        if uses.is_empty() {
            self.make_free(slot);
            return Ok(SmallVec::new());
        }
        let marks: SmallVec<[Mark; 2]> = uses.into_iter().map(|user| self.now(user)).collect();
        let count = u32::try_from(marks.len()).expect("fewer than four billion streams");
        self.blocks.get_mut(slot).state = State::Waiting(count);
        for mark in &marks {
            self.streams[mark.stream.index()].waiting.push_back((mark.epoch, slot));
        }
        Ok(marks)
    }

    // --- helpers ---

    pub(crate) fn lists(&self, class: Class) -> &Lists {
        match class {
            Class::Small => &self.small,
            Class::Large => &self.large,
        }
    }

    pub(crate) fn lists_mut(&mut self, class: Class) -> &mut Lists {
        match class {
            Class::Small => &mut self.small,
            Class::Large => &mut self.large,
        }
    }

    pub(crate) fn segment(&self, id: SegmentId) -> &Segment {
        self.segments[id.index()].as_ref().unwrap_or_else(|| panic!("there is no {id}"))
    }

    pub(crate) fn is_expandable(&self, block: &Block) -> bool {
        self.segment(block.segment).handle.is_some()
    }
}
