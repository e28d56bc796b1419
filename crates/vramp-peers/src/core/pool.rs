//! The state of the caching allocator, and the life of its blocks except their placement.

use std::collections::{BTreeSet, VecDeque};

use smallvec::SmallVec;

use super::addresses::DriverAddresses;
use super::block::SegmentId;
use super::block::{Block, Blocks, Class, Lists, Slot, State};
use super::config::TorchConfig;
use super::settle::TorchOp;
use super::stats::ByClass;
use super::stats::TorchStats;
use vramp_core::Bytes;
use vramp_core::{BlockId, Epoch, Mark, PoolAddr, StreamId, StreamTable};
use vramp_core::{Counters, UnknownBlock};

/// An allocated block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorchBlock {
    /// Id, valid until it is freed.
    pub id: BlockId,
    /// Start, in the pool's own numbers.
    pub at: PoolAddr,
    /// Usable bytes: those requested, rounded up.
    pub len: Bytes,
    /// Segment that it lies in.
    pub segment: SegmentId,
    /// Distance from the segment's start.
    pub offset: Bytes,
}

/// A segment: one allocation of the driver, or one range of addresses with handles mapped into it.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub at: PoolAddr,
    /// The size of the allocation, or of the range.
    pub len: u64,
    /// Handle size of an expandable segment.
    pub handle: Option<u64>,
}

/// Progress of a stream. Blocks freed while the stream used them wait in the order of their frees.
#[derive(Clone, Debug)]
pub(crate) struct Progress {
    pub current: Epoch,
    /// Everything up to here is known to be over.
    pub reached: Epoch,
    /// Destroyed: its last event covers all of its work.
    pub ended: bool,
    pub waiting: VecDeque<(Epoch, Slot)>,
}

impl Progress {
    /// True once the stream ended and its work is over.
    fn is_done(&self) -> bool {
        self.ended && self.current.previous() <= self.reached
    }
}

/// PyTorch's caching allocator. See the [crate's page](crate).
#[derive(Clone)]
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
    pub(crate) addresses: DriverAddresses,
    /// Those that have not ended, or whose work may run.
    pub(crate) streams: StreamTable<Progress>,
    /// Those that freed blocks wait for.
    pub(crate) awaited: BTreeSet<StreamId>,
    pub(crate) reserved: u64,
    /// The block that the last settled operation created: the attempt goes on with it.
    pub(crate) fresh: Option<Slot>,
    /// Operations settled for the last request or release.
    pub(crate) performed: Vec<TorchOp>,
    pub(crate) counters: Counters,
    pub(crate) stats: TorchStats,
}

impl TorchPool {
    /// Creates an empty pool for a card with `card` bytes of memory, of which it reserves at most
    /// `limit`.
    pub fn new(config: TorchConfig, card: Bytes, limit: Option<Bytes>) -> TorchPool {
        let mut pool = TorchPool {
            config,
            card: card.count(),
            limit: None,
            blocks: Blocks::default(),
            small: Lists::default(),
            large: Lists::default(),
            segments: Vec::new(),
            addresses: DriverAddresses::default(),
            streams: StreamTable::default(),
            awaited: BTreeSet::new(),
            reserved: 0,
            fresh: None,
            performed: Vec::new(),
            counters: Counters::default(),
            stats: TorchStats::default(),
        };
        pool.set_limit(limit);
        pool
    }

    /// Returns the configuration.
    pub fn config(&self) -> &TorchConfig {
        &self.config
    }

    /// Returns the counts with PyTorch's meaning.
    pub fn stats(&self) -> &TorchStats {
        &self.stats
    }

    /// Returns the operations settled for the last request or release, in order.
    pub fn performed(&self) -> &[TorchOp] {
        &self.performed
    }

    /// Returns the counts so far. A chunk is a segment, or a handle of an expandable one.
    pub fn counters(&self) -> Counters {
        Counters { reserved: Bytes::new(self.reserved), ..self.counters }
    }

    /// Adds a stream, with the next id.
    pub fn add_stream(&mut self) -> StreamId {
        let id = self.streams.next_id();
        self.add_stream_as(id);
        id
    }

    /// Adds the stream that has this id in another pool. Ids below it that this pool does not know are
    /// those of streams that ended, whose work is over.
    pub fn add_stream_as(&mut self, id: StreamId) {
        let (current, reached) = (Epoch::START.next(), Epoch::START);
        let first = Progress { current, reached, ended: false, waiting: VecDeque::new() };
        self.streams.insert(id, first);
    }

    /// Makes all ids below this number known: those that were not added are of streams that ended, whose
    /// work is over.
    pub fn skip_streams(&mut self, ids: usize) {
        self.streams.skip_to(ids);
    }

    /// Returns the allocated block with this id.
    ///
    /// # Errors
    /// No allocated block has this id.
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

    /// Returns the free bytes, and the length of the largest free block.
    pub(crate) fn free_bytes(&self) -> (u64, u64) {
        let sizes = [&self.small, &self.large].map(|lists| lists.free.iter().map(|entry| entry.1));
        sizes.into_iter().flatten().fold((0, 0), |(sum, most), len| (sum + len, most.max(len)))
    }

    // --- progress ---

    /// Returns the streams with recorded events that blocks wait for, each with the last epoch
    /// recorded.
    pub fn pending(&self) -> Vec<Mark> {
        self.marks(|stream| stream.waiting.front().is_some_and(|(e, _)| *e < stream.current))
            .map(|mark| Mark { epoch: mark.epoch.previous(), ..mark })
            .collect()
    }

    /// Returns the streams that blocks wait for at an epoch for which no event was recorded yet.
    pub fn unrecorded(&self) -> Vec<Mark> {
        self.marks(|stream| stream.waiting.back().is_some_and(|(e, _)| *e == stream.current))
            .collect()
    }

    fn marks(&self, wanted: impl Fn(&Progress) -> bool) -> impl Iterator<Item = Mark> {
        let known = self.awaited.iter().filter_map(|&id| Some((id, self.streams.get(id)?)));
        known
            .filter(move |(_, stream)| wanted(stream))
            .map(|(id, stream)| Mark { stream: id, epoch: stream.current })
    }

    /// Returns the mark that an event recorded on `stream` now would have.
    pub fn now(&self, stream: StreamId) -> Mark {
        let epoch = match self.streams.get(stream) {
            Some(known) if known.ended => known.current.previous(),
            Some(known) => known.current,
            // Its work is over.
            None => Epoch::START,
        };
        Mark { stream, epoch }
    }

    /// Records that an event was recorded for the stream's present epoch.
    ///
    /// # Panics
    /// If `mark` is of another epoch.
    pub fn recorded(&mut self, mark: Mark) {
        let stream = self.streams.get_mut(mark.stream).expect("a stream that records is there");
        assert_eq!(mark.epoch, stream.current, "{} records its present epoch", mark.stream);
        stream.current = stream.current.next();
    }

    /// Ends a stream for which an event was just recorded: it covers all of the stream's work.
    pub fn end_stream(&mut self, stream: StreamId) {
        if let Some(known) = self.streams.get_mut(stream) {
            known.ended = true;
        }
        self.leave_if_done(stream);
    }

    /// Removes an ended stream whose work is over.
    fn leave_if_done(&mut self, stream: StreamId) {
        if self.streams.get(stream).is_some_and(Progress::is_done) {
            self.streams.remove(stream);
        }
    }

    /// Sets the limit from now on. The setting `per_process_memory_fraction` stays in force beside
    /// it.
    pub fn set_limit(&mut self, limit: Option<Bytes>) {
        let part = |fraction: f64| (self.card as f64 * fraction) as u64;
        let fraction = self.config.per_process_memory_fraction.map(part);
        self.limit = limit.map(Bytes::count).into_iter().chain(fraction).min();
    }

    /// Resets all peaks to the current values.
    pub fn reset_peaks(&mut self) {
        self.stats.reset_peaks();
        self.counters.reserved_peak = Bytes::new(self.reserved);
        self.counters.live_peak = self.counters.live;
    }

    /// Records that the work before `mark` is over: blocks that waited for it become free.
    pub fn reached(&mut self, mark: Mark) {
        let Some(known) = self.streams.get_mut(mark.stream) else { return };
        known.reached = known.reached.max(mark.epoch);
        let over = known.waiting.partition_point(|(epoch, _)| *epoch <= mark.epoch);
        let over: Vec<Slot> = known.waiting.drain(..over).map(|(_, slot)| slot).collect();
        if known.waiting.is_empty() {
            self.awaited.remove(&mark.stream);
        }
        self.leave_if_done(mark.stream);
        for slot in over {
            match &mut self.blocks.get_mut(slot).state {
                State::Waiting(1) => self.make_free(slot),
                State::Waiting(marks) => *marks -= 1,
                state => panic!("block {slot} waits, but is {state:?}"),
            }
        }
    }

    // --- blocks ---

    /// Records that `stream` uses the block too.
    ///
    /// # Errors
    /// No allocated block has this id.
    pub fn record_use(&mut self, id: BlockId, stream: StreamId) -> Result<(), UnknownBlock> {
        self.block(id)?;
        let block = self.blocks.get_mut(id.slot());
        if block.stream != stream
            && let Err(place) = block.uses.binary_search(&stream)
        {
            block.uses.insert(place, stream);
        }
        Ok(())
    }

    /// Frees a block. Work on it must be queued on its own stream or on `stream`, or be recorded
    /// with [`TorchPool::record_use`]. Returns the marks that the block waits for; none if it is
    /// free at once. The caller records an event for each, then calls [`TorchPool::recorded`].
    ///
    /// # Errors
    /// No allocated block has this id.
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
            // One that left ended, and its work is over.
            streams.get(*user).is_some_and(|known| !known.is_done())
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
            let user = self.streams.get_mut(mark.stream).expect("its work may run");
            user.waiting.push_back((mark.epoch, slot));
            self.awaited.insert(mark.stream);
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
