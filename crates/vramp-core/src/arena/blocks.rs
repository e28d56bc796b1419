//! The arena: blocks at offsets, of captures one after the other.

use std::collections::BTreeMap;
use std::ops::Range;

use super::errors::{
    ArenaAllocError, ArenaCaptureError, ArenaFreeError, ArenaFull, ArenaResetError,
    UnknownArenaBlock,
};
use super::order::{Frontier, Horizon, NodeId, Order, Point};
use super::plan::Layout;
use super::recording::{Life, NEVER, Obstacle, Position, Recording};
use super::space::Space;
use crate::{ArenaId, Bytes};

/// What all offsets and lengths are multiples of, in bytes: what CUDA promises of its own
/// allocations.
const BLOCK_ALIGN: Bytes = Bytes::new(256);

/// Whether memory serves twice within a capture. Both place at multiples of 256 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArenaPolicy {
    /// A pointer that only goes up: no two blocks between two resets share an address.
    Monotone,
    /// Freed memory serves again where the captured order proves that its last use is over.
    #[default]
    Reusing,
}

/// Names one block until it is freed; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArenaBlockId {
    arena: ArenaId,
    number: u64,
}

impl ArenaBlockId {
    /// The id with this number in this arena.
    pub fn new(arena: ArenaId, number: u64) -> ArenaBlockId {
        ArenaBlockId { arena, number }
    }

    /// Whose block it is.
    pub fn arena(self) -> ArenaId {
        self.arena
    }

    /// Its plain number in its arena.
    pub fn number(self) -> u64 {
        self.number
    }
}

/// A block that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaBlock {
    /// Its name.
    pub id: ArenaBlockId,
    /// Where it starts.
    pub offset: Bytes,
    /// How long it is: what was asked for, rounded up to 256 bytes.
    pub len: Bytes,
}

/// A block that was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaFreed {
    /// Which.
    pub block: ArenaBlock,
    /// True if the capture that runs at present made it.
    pub of_this_capture: bool,
}

/// Bytes by state. What is used, free and untouched is the capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaCensus {
    /// How many blocks are live.
    pub blocks: usize,
    /// What their users asked for.
    pub live: Bytes,
    /// The same with rounding.
    pub used: Bytes,
    /// Below the high-water mark and of no live block.
    pub free: Bytes,
    /// Never used since the arena was made or reset.
    pub untouched: Bytes,
}

/// A live block.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) range: Range<u64>,
    pub(super) requested: u64,
    /// Captured work of this capture that uses it.
    pub(super) uses: Frontier,
    pub(super) record: Record,
}

/// Where the recording of the present capture has a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Record {
    Life(usize),
    Obstacle(usize),
    /// Between captures there is none.
    None,
}

/// The capture that runs.
#[derive(Clone, Debug, Default)]
pub(super) struct Capture {
    pub(super) order: Order,
    pub(super) recording: Recording,
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
    /// The same by offset.
    pub(super) offsets: BTreeMap<u64, ArenaBlockId>,
    pub(super) live: u64,
    next_number: u64,
    /// Up to where it was used since it was made or reset.
    pub(super) touched: u64,
    pub(super) capture: Option<Capture>,
    pub(super) plan: Option<Layout>,
}

impl Arena {
    /// An arena of `capacity` bytes, rounded down to 256.
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
            next_number: 0,
            touched: 0,
            capture: None,
            plan: None,
        }
    }

    /// Its name.
    pub fn id(&self) -> ArenaId {
        self.id
    }

    /// Its policy.
    pub fn policy(&self) -> ArenaPolicy {
        self.policy
    }

    /// How long it is.
    pub fn capacity(&self) -> Bytes {
        Bytes::new(self.capacity)
    }

    /// What captures follow from the next one on, or no plan. A monotone arena follows none.
    ///
    /// A plan is a wish: each of its offsets is used only where it is proven free.
    pub fn set_plan(&mut self, plan: Option<Layout>) {
        self.plan = plan;
        if let Some(capture) = &mut self.capture {
            capture.follows = false;
        }
    }

    /// Up to where the plan that the next capture follows needs memory; nothing without one.
    pub fn planned_high_water(&self) -> Bytes {
        match self.policy {
            ArenaPolicy::Monotone => Bytes::ZERO,
            ArenaPolicy::Reusing => {
                self.plan.as_ref().map_or(Bytes::ZERO, |plan| plan.high_water())
            }
        }
    }

    /// Starts a capture. O(free pieces + live blocks).
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
        let mut recording = Recording::default();
        for held in self.held.values_mut() {
            held.record = Record::Obstacle(recording.obstacles.len());
            let (range, last) = (held.range.clone(), Frontier::default());
            recording.obstacles.push(Obstacle { range, until: NEVER, last });
        }
        recording.high_water = recording.obstacle_end();
        let follows = self.plan.is_some() && self.policy == ArenaPolicy::Reusing;
        self.capture = Some(Capture { recording, follows, ..Capture::default() });
        Ok(())
    }

    /// Ends the capture and tells what it asked for. Its live blocks stay until they are freed.
    ///
    /// # Errors
    /// No capture runs.
    pub fn end(&mut self) -> Result<Recording, ArenaCaptureError> {
        let capture = self.capture.take().ok_or(ArenaCaptureError::NotRunning(self.id))?;
        for held in self.held.values_mut() {
            held.record = Record::None;
            held.uses = Frontier::default();
        }
        Ok(Recording { clocks: capture.order.into_clocks(), ..capture.recording })
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

    /// True if the capture has not departed from its plan for good.
    pub fn follows_plan(&self) -> bool {
        self.capture.as_ref().is_some_and(|capture| capture.follows)
    }

    /// Tells a captured node; one that is known stays as it is. See [`Order::add`].
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

    /// True if the running capture knows the node.
    pub fn knows(&self, node: NodeId) -> bool {
        self.capture.as_ref().is_some_and(|capture| capture.order.knows(node))
    }

    /// Hands out a block at a point of a stream: the nodes that its next node will depend on, none
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

    /// Frees a block at a point of a stream: from there on it is not used by that stream.
    ///
    /// # Errors
    /// No capture runs, a node is unknown, or the id names no live block.
    pub fn free(&mut self, id: ArenaBlockId, at: &[NodeId]) -> Result<ArenaFreed, ArenaFreeError> {
        let point = self.point(at)?;
        let unknown = UnknownArenaBlock { arena: self.id, id };
        let mut last = self.held.get(&id).ok_or(unknown)?.uses.clone();
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
        self.held.get_mut(&id).ok_or(unknown)?.uses.join(&point);
        Ok(())
    }

    /// Frees a block outside of any captured stream: its memory serves the next capture, not the
    /// one that runs.
    ///
    /// # Errors
    /// The id names no live block: nothing changes.
    pub fn free_outside(&mut self, id: ArenaBlockId) -> Result<ArenaFreed, UnknownArenaBlock> {
        self.remove(id, Frontier::never())
    }

    /// The block with this id.
    ///
    /// # Errors
    /// The id names no live block.
    pub fn block(&self, id: ArenaBlockId) -> Result<ArenaBlock, UnknownArenaBlock> {
        let held = self.held.get(&id).ok_or(UnknownArenaBlock { arena: self.id, id })?;
        Ok(block(id, &held.range))
    }

    /// Makes all of it untouched again: the graphs captured over it are gone.
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
        self.touched = 0;
        Ok(())
    }

    /// What users asked for and hold.
    pub fn live(&self) -> Bytes {
        Bytes::new(self.live)
    }

    /// Up to where it was used since it was made or reset: memory is needed below, none above.
    pub fn high_water(&self) -> Bytes {
        Bytes::new(self.touched)
    }

    /// Up to where the running capture uses it, with what was live before. Zero without one.
    pub fn capture_high_water(&self) -> Bytes {
        Bytes::new(self.capture.as_ref().map_or(0, |capture| capture.recording.high_water))
    }

    /// Offset and length of each live block, lowest first.
    pub fn live_ranges(&self) -> impl Iterator<Item = (Bytes, Bytes)> {
        let held = self.offsets.values().map(|id| &self.held[id].range);
        held.map(|range| (Bytes::new(range.start), Bytes::new(range.end - range.start)))
    }

    /// Offset and length of each stretch without a live block, lowest first, from `from` up to the
    /// capacity.
    pub fn free_ranges(&self, from: Bytes) -> impl Iterator<Item = (Bytes, Bytes)> {
        let mut at = from.count();
        let ends = [(self.capacity, self.capacity)];
        let held = self.offsets.values().map(|id| &self.held[id].range);
        held.map(|range| (range.start, range.end)).chain(ends).filter_map(move |(start, end)| {
            let free = at..start;
            at = at.max(end);
            (!free.is_empty()).then(|| (Bytes::new(free.start), Bytes::new(free.end - free.start)))
        })
    }

    fn point(&self, at: &[NodeId]) -> Result<Horizon, ArenaFreeError> {
        let capture = self.capture.as_ref().ok_or(ArenaFreeError::NotCapturing(self.id))?;
        Ok(capture.order.horizon(at)?)
    }

    /// Makes a free stretch a block.
    fn carve(&mut self, range: Range<u64>, requested: Bytes, from: Horizon) -> ArenaBlock {
        let capture = self.capture.as_mut().expect("blocks are carved in captures only");
        let recording = &mut capture.recording;
        let record = Record::Life(recording.lives.len());
        let (offset, len) = (range.start, range.end - range.start);
        // Whoever had the memory before is ordered before this point, but perhaps not before the
        // point of the free: a block is never free again before the point it was taken at.
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
        self.held.insert(id, Held { range, requested, uses, record });
        carved
    }

    /// Takes a block from its user; its last uses are known.
    fn remove(
        &mut self,
        id: ArenaBlockId,
        last: Frontier,
    ) -> Result<ArenaFreed, UnknownArenaBlock> {
        let held = self.held.remove(&id).ok_or(UnknownArenaBlock { arena: self.id, id })?;
        self.offsets.remove(&held.range.start);
        self.live -= held.requested;
        if let Some(capture) = &mut self.capture {
            capture.recording.close(held.record, &last);
        }
        let freed = ArenaFreed {
            block: block(id, &held.range),
            of_this_capture: matches!(held.record, Record::Life(_)),
        };
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

impl Recording {
    /// A block's life ends here.
    fn close(&mut self, record: Record, last: &Frontier) {
        let now = self.lives.len() as Position;
        // Freed beside the captured streams, it is not proven free at any point of this capture.
        let until = if last.is_never() { NEVER } else { now };
        let last = last.clone();
        match record {
            Record::Life(index) => {
                (self.lives[index].until, self.lives[index].last) = (until, last)
            }
            Record::Obstacle(index) => {
                (self.obstacles[index].until, self.obstacles[index].last) = (until, last);
            }
            Record::None => {}
        }
    }
}

fn block(id: ArenaBlockId, range: &Range<u64>) -> ArenaBlock {
    ArenaBlock { id, offset: Bytes::new(range.start), len: Bytes::new(range.end - range.start) }
}
