//! The arena: blocks at offsets, for one capture after the other.

use std::collections::BTreeMap;
use std::ops::Range;

use super::choose::without;
use super::errors::{
    ArenaAllocError, ArenaCaptureError, ArenaFreeError, ArenaFull, ArenaResetError,
    UnknownArenaBlock,
};
use super::order::{Frontier, Horizon, NodeId, Order, Point};
use super::plan::Layout;
use super::recording::{CaptureRecording, Digest, Life, NEVER, Obstacle, Position};
use super::space::Space;
use crate::{ArenaId, Bytes};

/// Alignment of all offsets and lengths, as CUDA guarantees for its own allocations.
const BLOCK_ALIGN: Bytes = Bytes::new(256);

/// Whether memory is reused within a capture. Both place at multiples of 256 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArenaPolicy {
    /// A bump pointer: no two blocks between two resets share an address.
    Monotone,
    /// Freed memory is reused where the captured order proves that its last use is over.
    #[default]
    Reusing,
}

/// Id of a block of an arena. Never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArenaBlockId {
    arena: ArenaId,
    number: u64,
}

impl ArenaBlockId {
    /// Returns the id with this number in this arena.
    pub fn new(arena: ArenaId, number: u64) -> ArenaBlockId {
        ArenaBlockId { arena, number }
    }

    /// The arena of the block.
    pub fn arena(self) -> ArenaId {
        self.arena
    }

    /// The plain number within the arena.
    pub fn number(self) -> u64 {
        self.number
    }
}

/// An allocated block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaBlock {
    /// Id of the block.
    pub id: ArenaBlockId,
    /// Distance from the arena's start.
    pub offset: Bytes,
    /// Length: the requested size, rounded up to 256 bytes.
    pub len: Bytes,
}

/// A freed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaFreed {
    /// The block.
    pub block: ArenaBlock,
    /// True if the running capture allocated it.
    pub of_this_capture: bool,
}

/// Bytes by state. `used`, `free` and `untouched` add up to the capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaCensus {
    /// Number of live blocks.
    pub blocks: usize,
    /// Their bytes as requested.
    pub live: Bytes,
    /// Their bytes with rounding.
    pub used: Bytes,
    /// Bytes below the high-water mark that no live block holds.
    pub free: Bytes,
    /// Bytes never used since the arena was created or reset.
    pub untouched: Bytes,
}

/// A live block.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) range: Range<u64>,
    pub(super) requested: u64,
    /// The capture that the rest is about. In a later one the block is older, and unused so far.
    pub(super) capture: u64,
    /// Work of that capture that uses it.
    pub(super) uses: Frontier,
    /// Its index among the blocks of that capture, if that capture allocated it.
    pub(super) life: Option<usize>,
}

/// The running capture.
#[derive(Clone, Debug, Default)]
pub(super) struct Capture {
    pub(super) order: Order,
    pub(super) recording: CaptureRecording,
    /// True until an allocation differs from the plan's.
    pub(super) follows: bool,
    pub(super) misses: u32,
}

/// A range of offsets for the blocks of captured graphs.
///
/// ```
/// use vramp_core::{Arena, ArenaId, ArenaPolicy, Bytes, NodeId, pack};
/// let mut arena = Arena::new(ArenaId::new(0), ArenaPolicy::Reusing, Bytes::mib(1));
/// arena.begin()?;
/// let first = arena.alloc(Bytes::kib(64), &[])?;
/// arena.add_node(NodeId(1), &[])?;
/// arena.free(first.id, &[NodeId(1)])?;
/// let second = arena.alloc(Bytes::kib(64), &[NodeId(1)])?;
/// assert_eq!(first.offset, second.offset);
/// arena.free(second.id, &[NodeId(1)])?;
/// let recording = arena.end()?;
/// assert_eq!(recording.lower_bound(), Bytes::kib(64));
/// arena.set_plan(Some(pack(&recording)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Arena {
    pub(super) id: ArenaId,
    pub(super) policy: ArenaPolicy,
    pub(super) capacity: u64,
    pub(super) space: Space,
    pub(super) held: BTreeMap<ArenaBlockId, Held>,
    /// Ids of the live blocks by offset.
    pub(super) offsets: BTreeMap<u64, ArenaBlockId>,
    pub(super) live: u64,
    /// What the live blocks take.
    pub(super) digest: Digest,
    next_number: u64,
    /// High-water mark since the arena was created or reset.
    pub(super) touched: u64,
    /// High-water mark before the last reset.
    ever_touched: u64,
    pub(super) capture: Option<Capture>,
    /// Number of captures begun; the running one is the last.
    pub(super) captures: u64,
    pub(super) plan: Option<Layout>,
}

impl Arena {
    /// Creates an arena of `capacity` bytes, rounded down to 256.
    pub fn new(id: ArenaId, policy: ArenaPolicy, capacity: Bytes) -> Arena {
        let capacity = capacity.round_down(BLOCK_ALIGN).count();
        Arena {
            id,
            policy,
            capacity,
            space: Space::new(capacity),
            held: BTreeMap::new(),
            offsets: BTreeMap::new(),
            live: 0,
            digest: Digest::default(),
            next_number: 0,
            touched: 0,
            ever_touched: 0,
            capture: None,
            captures: 0,
            plan: None,
        }
    }

    /// Id of the arena.
    pub fn id(&self) -> ArenaId {
        self.id
    }

    /// The arena's policy.
    pub fn policy(&self) -> ArenaPolicy {
        self.policy
    }

    /// Length of the arena.
    pub fn capacity(&self) -> Bytes {
        Bytes::new(self.capacity)
    }

    /// Makes the arena shorter, though not below what it ever used: graphs from before a reset still
    /// write there. Blocks and layouts stay; an
    /// offset of a layout that lies above is not used.
    pub fn shorten(&mut self, capacity: Bytes) {
        let capacity = capacity.round_down(BLOCK_ALIGN).count().max(self.highest().count());
        if capacity < self.capacity {
            self.space.take(capacity..self.capacity);
            self.capacity = capacity;
        }
    }

    /// Sets the plan that captures follow from the next one on. A monotone arena follows none.
    ///
    /// A plan is a preference: each of its offsets is used only where it is proven free.
    pub fn set_plan(&mut self, plan: Option<Layout>) {
        self.plan = plan;
        if let Some(capture) = &mut self.capture {
            capture.follows = false;
        }
    }

    /// High-water mark of the plan that the next capture follows; zero without one.
    pub fn planned_high_water(&self) -> Bytes {
        match self.policy {
            ArenaPolicy::Monotone => Bytes::ZERO,
            ArenaPolicy::Reusing => {
                self.plan.as_ref().map_or(Bytes::ZERO, |plan| plan.high_water())
            }
        }
    }

    /// Starts a capture. O(log n) for each free piece that the capture before left.
    ///
    /// # Errors
    /// A capture runs already.
    pub fn begin(&mut self) -> Result<(), ArenaCaptureError> {
        if self.capture.is_some() {
            return Err(ArenaCaptureError::Running(self.id));
        }
        if self.policy == ArenaPolicy::Reusing {
            self.space.settle();
        }
        let mut recording = CaptureRecording { before: self.digest, ..CaptureRecording::default() };
        recording.high_water = self.live_end();
        let follows = self.plan.is_some() && self.policy == ArenaPolicy::Reusing;
        self.captures += 1;
        self.capture = Some(Capture { recording, follows, ..Capture::default() });
        Ok(())
    }

    /// Ends the capture and returns its recording. Its live blocks stay until they are freed.
    /// O(blocks of the capture + free pieces).
    ///
    /// # Errors
    /// No capture runs.
    pub fn end(&mut self) -> Result<CaptureRecording, ArenaCaptureError> {
        let capture = self.capture.take().ok_or(ArenaCaptureError::NotRunning(self.id))?;
        let mut recording = capture.recording;
        recording.clocks = capture.order.into_clocks();
        // What is live now, but for the blocks of this capture, was live before it.
        let own = recording.lives.iter().filter(|life| life.until == NEVER);
        let mut own: Vec<Range<u64>> =
            own.map(|life| life.offset..life.offset + life.len).collect();
        own.sort_unstable_by_key(|range| range.start);
        let live = self.live_stretches();
        let before = live.flat_map(|stretch| {
            let first = own.partition_point(|range| range.end <= stretch.start);
            without(stretch, &own[first..])
        });
        let stays = |range| Obstacle { range, until: NEVER, last: Frontier::default() };
        recording.obstacles.extend(before.map(stays));
        recording.obstacles.sort_unstable_by_key(|fixed| fixed.range.start);
        Ok(recording)
    }

    /// Ends a capture that failed. Its live blocks stay until they are freed.
    ///
    /// # Errors
    /// No capture runs.
    pub fn abort(&mut self) -> Result<(), ArenaCaptureError> {
        self.end().map(drop)
    }

    /// True between [`Arena::begin`] and [`Arena::end`].
    pub fn is_capturing(&self) -> bool {
        self.capture.is_some()
    }

    /// True unless the running capture allocated the block: work queued outside of the capture may
    /// use it too. True for unknown blocks.
    pub fn is_from_before(&self, id: ArenaBlockId) -> bool {
        let is_own = |held: &Held| held.capture == self.captures && held.life.is_some();
        !(self.is_capturing() && self.held.get(&id).is_some_and(is_own))
    }

    /// True if a capture runs and follows its plan.
    pub fn follows_plan(&self) -> bool {
        self.capture.as_ref().is_some_and(|capture| capture.follows)
    }

    /// Adds a captured node; one that was added already stays as it is. See [`Order::add`].
    ///
    /// # Errors
    /// No capture runs, or a predecessor is unknown.
    pub fn add_node(
        &mut self,
        node: NodeId,
        predecessors: &[NodeId],
    ) -> Result<(), ArenaFreeError> {
        let capture = self.capture.as_mut().ok_or(ArenaFreeError::NotCapturing(self.id))?;
        Ok(capture.order.add(node, predecessors)?)
    }

    /// True if the node was added to the running capture.
    pub fn has_node(&self, node: NodeId) -> bool {
        self.capture.as_ref().is_some_and(|capture| capture.order.has_node(node))
    }

    /// Allocates a block at a point of a stream: the nodes on which its next node will depend, none
    /// if nothing was captured yet. Zero bytes count as one. O(free pieces).
    ///
    /// # Errors
    /// No capture runs, a node is unknown, or nothing that is free at this point is long enough.
    pub fn alloc(&mut self, len: Bytes, at: &[NodeId]) -> Result<ArenaBlock, ArenaAllocError> {
        let capture = self.capture.as_ref().ok_or(ArenaAllocError::NotCapturing(self.id))?;
        let from = capture.order.horizon(at)?;
        let point = capture.order.clocks().point(&from);
        let full = || self.full(len, point);
        let rounded =
            len.max(Bytes::new(1)).checked_round_up(BLOCK_ALIGN).ok_or_else(full)?.count();
        let (offset, step) = self.choose(capture, rounded, point).ok_or_else(full)?;
        self.note(step);
        Ok(self.carve(offset..offset + rounded, len, from))
    }

    /// Frees a block at a point of a stream: no later work of that stream uses it.
    ///
    /// # Errors
    /// No capture runs, a node is unknown, or the id names no live block.
    pub fn free(&mut self, id: ArenaBlockId, at: &[NodeId]) -> Result<ArenaFreed, ArenaFreeError> {
        let point = self.point(at)?;
        let unknown = UnknownArenaBlock { arena: self.id, id };
        let held = self.held.get_mut(&id).ok_or(unknown)?;
        held.enter(self.captures);
        let mut last = std::mem::take(&mut held.uses);
        last.join(&point);
        Ok(self.remove(id, last)?)
    }

    /// Notes that captured work of another stream, up to this point, uses a block.
    ///
    /// # Errors
    /// No capture runs, a node is unknown, or the id names no live block.
    pub fn record_use(&mut self, id: ArenaBlockId, at: &[NodeId]) -> Result<(), ArenaFreeError> {
        let point = self.point(at)?;
        let unknown = UnknownArenaBlock { arena: self.id, id };
        let held = self.held.get_mut(&id).ok_or(unknown)?;
        held.enter(self.captures);
        held.uses.join(&point);
        Ok(())
    }

    /// Records that captured work uses a block which is not known: the running capture does not reuse
    /// its memory. Does nothing without a capture.
    ///
    /// # Errors
    /// The id names no live block.
    pub fn record_unknown_use(&mut self, id: ArenaBlockId) -> Result<(), UnknownArenaBlock> {
        let unknown = UnknownArenaBlock { arena: self.id, id };
        let held = self.held.get_mut(&id).ok_or(unknown)?;
        if self.capture.is_some() {
            held.enter(self.captures);
            held.uses = Frontier::never();
        }
        Ok(())
    }

    /// Frees a block outside of any captured stream: the next capture can reuse its memory, the
    /// running one cannot.
    ///
    /// # Errors
    /// The id names no live block: nothing changes.
    pub fn free_outside(&mut self, id: ArenaBlockId) -> Result<ArenaFreed, UnknownArenaBlock> {
        self.remove(id, Frontier::never())
    }

    /// Returns the block with this id.
    ///
    /// # Errors
    /// The id names no live block.
    pub fn block(&self, id: ArenaBlockId) -> Result<ArenaBlock, UnknownArenaBlock> {
        let held = self.held.get(&id).ok_or(UnknownArenaBlock { arena: self.id, id })?;
        Ok(block(id, &held.range))
    }

    /// Resets the arena to untouched: the graphs captured over it are gone.
    ///
    /// # Errors
    /// A capture runs, or blocks are live.
    pub fn reset(&mut self) -> Result<(), ArenaResetError> {
        if self.is_capturing() {
            return Err(ArenaResetError::Capturing(self.id));
        }
        if !self.held.is_empty() {
            let (blocks, live) = (self.held.len(), Bytes::new(self.live));
            return Err(ArenaResetError::Live { arena: self.id, blocks, live });
        }
        self.space = Space::new(self.capacity);
        self.ever_touched = self.ever_touched.max(self.touched);
        self.touched = 0;
        Ok(())
    }

    /// Allocated bytes as requested.
    pub fn live(&self) -> Bytes {
        Bytes::new(self.live)
    }

    /// High-water mark since the arena was created: captured graphs use nothing above it.
    pub fn highest(&self) -> Bytes {
        Bytes::new(self.touched.max(self.ever_touched))
    }

    /// High-water mark since the arena was created or reset: memory is needed only below it.
    pub fn high_water(&self) -> Bytes {
        Bytes::new(self.touched)
    }

    /// High-water mark of the running capture, blocks live before included. Zero without one.
    #[cfg(test)]
    pub(super) fn capture_high_water(&self) -> Bytes {
        Bytes::new(self.capture.as_ref().map_or(0, |capture| capture.recording.high_water))
    }

    /// Number of live blocks.
    pub fn blocks(&self) -> usize {
        self.held.len()
    }

    /// Offsets and lengths of the ranges that live blocks take, lowest first, each up to the next free
    /// one. O(free pieces).
    pub fn live_ranges(&self) -> impl Iterator<Item = (Bytes, Bytes)> {
        let held = self.live_stretches();
        held.map(|range| (Bytes::new(range.start), Bytes::new(range.end - range.start)))
    }

    /// True if the same memory is live now as when the recording began. O(1).
    pub fn is_as_before(&self, recording: &CaptureRecording) -> bool {
        recording.before == self.digest
    }

    /// The highest end of a live block.
    fn live_end(&self) -> u64 {
        self.offsets.last_key_value().map_or(0, |(_, id)| self.held[id].range.end)
    }

    /// What lies between the free pieces.
    fn live_stretches(&self) -> impl Iterator<Item = Range<u64>> {
        let mut at = 0;
        let end = self.live_end();
        let free = self.space.stretches().chain(std::iter::once(end..end));
        let held = free.map(move |free| {
            let held = at..free.start.min(end);
            at = free.end;
            held
        });
        held.filter(|held| !held.is_empty())
    }

    fn point(&self, at: &[NodeId]) -> Result<Horizon, ArenaFreeError> {
        let capture = self.capture.as_ref().ok_or(ArenaFreeError::NotCapturing(self.id))?;
        Ok(capture.order.horizon(at)?)
    }

    /// Makes a free range a block.
    fn carve(&mut self, range: Range<u64>, requested: Bytes, from: Horizon) -> ArenaBlock {
        let capture = self.capture.as_mut().expect("blocks are carved in captures only");
        let recording = &mut capture.recording;
        let life = Some(recording.lives.len());
        let (offset, len) = (range.start, range.end - range.start);
        // The last uses of the memory are ordered before this point, but perhaps not before the point
        // of the free: a block is never free again before the point where it was allocated.
        let mut uses = Frontier::default();
        uses.join(&from);
        recording.lives.push(Life { len, offset, until: NEVER, from, last: Frontier::default() });
        recording.high_water = recording.high_water.max(range.end);
        self.touched = self.touched.max(range.end);
        self.space.take(range.clone());
        let id = ArenaBlockId { arena: self.id, number: self.next_number };
        self.next_number += 1;
        self.live += requested.count();
        self.offsets.insert(range.start, id);
        let carved = block(id, &range);
        let requested = requested.count();
        self.digest.add(&range);
        self.held.insert(id, Held { range, requested, capture: self.captures, uses, life });
        carved
    }

    /// Frees a block whose last uses are these.
    fn remove(
        &mut self,
        id: ArenaBlockId,
        last: Frontier,
    ) -> Result<ArenaFreed, UnknownArenaBlock> {
        let mut held = self.held.remove(&id).ok_or(UnknownArenaBlock { arena: self.id, id })?;
        self.offsets.remove(&held.range.start);
        self.digest.remove(&held.range);
        self.live -= held.requested;
        held.enter(self.captures);
        let mut freed = ArenaFreed { block: block(id, &held.range), of_this_capture: false };
        if let Some(capture) = &mut self.capture {
            capture.recording.close(&held, &last);
            freed.of_this_capture = held.life.is_some();
        }
        let last = match self.policy {
            ArenaPolicy::Monotone => Frontier::never(),
            ArenaPolicy::Reusing => last,
        };
        self.space.give(held.range, last);
        Ok(freed)
    }

    fn full(&self, requested: Bytes, point: Point<'_>) -> ArenaFull {
        let largest = match self.policy {
            ArenaPolicy::Monotone => Some(self.capacity - self.touched),
            ArenaPolicy::Reusing => self.space.runs(point).map(|run| run.end - run.start).max(),
        };
        ArenaFull {
            arena: self.id,
            requested,
            capacity: self.capacity(),
            high_water: self.high_water(),
            live: self.live(),
            largest_free: Bytes::new(largest.unwrap_or(0)),
        }
    }
}

impl Held {
    /// Forgets what an earlier capture did with it.
    fn enter(&mut self, capture: u64) {
        if self.capture != capture {
            (self.capture, self.uses, self.life) = (capture, Frontier::default(), None);
        }
    }
}

impl CaptureRecording {
    /// Ends a block's life.
    fn close(&mut self, held: &Held, last: &Frontier) {
        let now = self.lives.len() as Position;
        // Freed beside the captured streams, it is not proven free at any point of this capture.
        let until = if last.is_never() { NEVER } else { now };
        let last = last.clone();
        match held.life {
            Some(index) => (self.lives[index].until, self.lives[index].last) = (until, last),
            None => self.obstacles.push(Obstacle { range: held.range.clone(), until, last }),
        }
    }
}

fn block(id: ArenaBlockId, range: &Range<u64>) -> ArenaBlock {
    ArenaBlock { id, offset: Bytes::new(range.start), len: Bytes::new(range.end - range.start) }
}
