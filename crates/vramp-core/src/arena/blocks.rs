//! The arena: blocks at offsets, of captures one after the other.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::errors::{
    ArenaAllocError, ArenaCaptureError, ArenaFreeError, ArenaFull, ArenaResetError,
    UnknownArenaBlock,
};
use super::order::{Frontier, Horizon, NodeId, Order};
use super::plan::Layout;
use super::recording::{Life, NEVER, Obstacle, Position, Recording};
use super::space::Space;
use crate::{Bytes, Inconsistency};

/// What all offsets and lengths are multiples of, in bytes: what CUDA promises of its own
/// allocations.
const GRAIN: Bytes = Bytes::new(256);

/// So often a capture may leave its plan for single blocks before it leaves it for good.
const MISSES_MOST: u32 = 64;

/// The name of an arena, chosen by whoever makes it: ids of blocks miss in any other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArenaId(pub u32);

impl fmt::Display for ArenaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "arena {}", self.0)
    }
}

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
struct Held {
    range: Range<u64>,
    requested: u64,
    /// Captured work of this capture that uses it.
    uses: Frontier,
    record: Record,
}

/// Where the recording of the present capture has a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Record {
    Life(usize),
    Obstacle(usize),
    /// Between captures there is none.
    None,
}

/// The capture that runs.
#[derive(Clone, Debug, Default)]
struct Capture {
    order: Order,
    recording: Recording,
    /// True until an allocation differs from the plan's.
    follows: bool,
    misses: u32,
}

/// A range of offsets for the blocks of captured graphs.
///
/// ```
/// use vramp_core::{Arena, ArenaId, ArenaPolicy, Bytes, NodeId, pack};
/// let mut arena = Arena::new(ArenaId(0), ArenaPolicy::Reusing, Bytes::mib(1));
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
    id: ArenaId,
    policy: ArenaPolicy,
    capacity: u64,
    space: Space,
    held: BTreeMap<ArenaBlockId, Held>,
    /// The same by offset.
    offsets: BTreeMap<u64, ArenaBlockId>,
    live: u64,
    next_number: u64,
    /// Up to where it was used since it was made or reset.
    touched: u64,
    capture: Option<Capture>,
    plan: Option<Arc<Layout>>,
}

impl Arena {
    /// An arena of `capacity` bytes, rounded down to 256.
    pub fn new(id: ArenaId, policy: ArenaPolicy, capacity: Bytes) -> Arena {
        let capacity = capacity.round_down(GRAIN).count();
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
        self.plan = plan.map(Arc::new);
        if let Some(capture) = &mut self.capture {
            capture.follows = false;
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
        Ok(capture.recording)
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
        let rounded = len.max(Bytes::new(1)).checked_round_up(GRAIN);
        let full = || self.full(len, &from);
        let rounded = rounded.map(Bytes::count).ok_or_else(full)?;
        let offset = match self.planned(rounded, &from) {
            Planned::At(offset) => Some(offset),
            Planned::Missed => self.search_beside_plan(rounded, &from),
            Planned::Departed => self.search(rounded, &from, &[]),
        };
        let offset = offset.ok_or_else(full)?;
        self.note_plan(offset, rounded, &from);
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

    /// Bytes by state, added up from scratch. O(live blocks).
    pub fn census(&self) -> ArenaCensus {
        let used = self.held.values().map(|held| held.range.end - held.range.start).sum::<u64>();
        ArenaCensus {
            blocks: self.held.len(),
            live: Bytes::new(self.held.values().map(|held| held.requested).sum()),
            used: Bytes::new(used),
            free: Bytes::new(self.touched - used),
            untouched: Bytes::new(self.capacity - self.touched),
        }
    }

    /// Checks every invariant. O(n log n): for tests.
    ///
    /// # Errors
    /// The first that does not hold.
    pub fn audit(&self) -> Result<(), Inconsistency> {
        let checks = [self.stretches_lie_end_to_end(), self.tables_agree(), self.sums_agree()];
        let checked: Result<(), String> = checks.into_iter().collect();
        checked.map_err(|what| Inconsistency { what: format!("{}: {what}", self.id) })
    }

    fn point(&self, at: &[NodeId]) -> Result<Horizon, ArenaFreeError> {
        let capture = self.capture.as_ref().ok_or(ArenaFreeError::NotCapturing(self.id))?;
        Ok(capture.order.horizon(at)?)
    }

    /// What the plan says of the next block.
    fn planned(&self, len: u64, from: &Horizon) -> Planned {
        let Some((capture, plan)) = self.capture.as_ref().zip(self.plan.as_ref()) else {
            return Planned::Departed;
        };
        let spot = plan.blocks.get(capture.recording.lives.len());
        let same =
            |spot: &&super::plan::PlannedBlock| spot.len == len && spot.chains == from.chains();
        match spot.filter(same).filter(|_| capture.follows) {
            None => Planned::Departed,
            Some(spot) if self.is_usable(spot.offset, len, from) => Planned::At(spot.offset),
            Some(_) => Planned::Missed,
        }
    }

    fn is_usable(&self, offset: u64, len: u64, from: &Horizon) -> bool {
        let end = offset.checked_add(len).filter(|&end| end <= self.capacity);
        end.is_some_and(|end| self.space.is_usable(offset..end, from))
    }

    /// An offset for a block whose planned one is not free, where possible away from the blocks
    /// that the plan has during its life.
    fn search_beside_plan(&self, len: u64, from: &Horizon) -> Option<u64> {
        let (capture, plan) = self.capture.as_ref().zip(self.plan.as_ref())?;
        let index = capture.recording.lives.len();
        let until = (plan.blocks[index].until as usize).min(plan.blocks.len());
        let mut avoid: Vec<Range<u64>> = plan.blocks[index + 1..until]
            .iter()
            .map(|spot| spot.offset..spot.offset + spot.len)
            .collect();
        avoid.sort_unstable_by_key(|range| range.start);
        let ceiling = plan.high_water.max(capture.recording.high_water);
        let beside = self.search(len, from, &avoid).filter(|offset| offset + len <= ceiling);
        beside.or_else(|| self.search(len, from, &[]))
    }

    /// Notes whether the block was the plan's.
    fn note_plan(&mut self, offset: u64, len: u64, from: &Horizon) {
        let planned = self.planned(len, from);
        let Some(capture) = &mut self.capture else { return };
        match planned {
            Planned::At(wanted) if wanted == offset => {}
            Planned::At(_) | Planned::Missed => {
                capture.misses += 1;
                capture.follows &= capture.misses <= MISSES_MOST;
            }
            Planned::Departed => capture.follows = false,
        }
    }

    /// The policy's offset for a block. Reusing takes the first fit: on recorded training steps it
    /// stays lower than best fit, whose exact fits near the top keep the top in use.
    fn search(&self, len: u64, from: &Horizon, avoid: &[Range<u64>]) -> Option<u64> {
        if self.policy == ArenaPolicy::Monotone {
            return (self.touched.checked_add(len)? <= self.capacity).then_some(self.touched);
        }
        let runs = self.space.runs(from).flat_map(|run| without(run, avoid));
        runs.into_iter().find(|run| run.end - run.start >= len).map(|run| run.start)
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

    fn full(&self, requested: Bytes, from: &Horizon) -> ArenaFull {
        let largest = match self.policy {
            ArenaPolicy::Monotone => Some(self.capacity - self.touched),
            ArenaPolicy::Reusing => self.space.runs(from).map(|run| run.end - run.start).max(),
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

    fn stretches_lie_end_to_end(&self) -> Result<(), String> {
        let held = self.held.values().map(|held| held.range.clone());
        let mut all: Vec<Range<u64>> = self.space.stretches().chain(held).collect();
        all.sort_unstable_by_key(|range| range.start);
        let mut at = 0;
        for range in all {
            if range.start != at || range.is_empty() {
                return Err(format!("{range:?} does not follow what ends at {at}"));
            }
            at = range.end;
        }
        match (at == self.capacity, self.space.unmerged()) {
            (false, _) => Err(format!("blocks and free pieces end at {at}")),
            (true, Some(start)) => Err(format!("the free piece at {start} is not merged")),
            (true, None) => Ok(()),
        }
    }

    fn tables_agree(&self) -> Result<(), String> {
        for (id, held) in &self.held {
            if self.offsets.get(&held.range.start) != Some(id) {
                return Err(format!("{id:?} is not listed at its offset {}", held.range.start));
            }
            let recorded = self.capture.as_ref().map_or(held.record == Record::None, |capture| {
                capture.recording.has(held.record, &held.range)
            });
            if !recorded {
                return Err(format!("{id:?} is not recorded as it is"));
            }
        }
        match self.offsets.len() == self.held.len() {
            true => Ok(()),
            false => Err(format!("{} offsets for {} blocks", self.offsets.len(), self.held.len())),
        }
    }

    fn sums_agree(&self) -> Result<(), String> {
        let live: u64 = self.held.values().map(|held| held.requested).sum();
        let end = self.held.values().map(|held| held.range.end).max().unwrap_or(0);
        match (live == self.live, end <= self.touched && self.touched <= self.capacity) {
            (false, _) => Err(format!("{live} bytes are live, {} are counted", self.live)),
            (true, false) => Err(format!("a block ends at {end}, above {}", self.touched)),
            (true, true) => Ok(()),
        }
    }
}

/// What a plan says of the next block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Planned {
    /// Put it here: proven free.
    At(u64),
    /// The capture is as planned, but the place is not free.
    Missed,
    /// There is no plan, or it was of another capture.
    Departed,
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

    fn has(&self, record: Record, range: &Range<u64>) -> bool {
        match record {
            Record::Life(index) => self.lives.get(index).is_some_and(|life| {
                life.until == NEVER && *range == (life.offset..life.offset + life.len)
            }),
            Record::Obstacle(index) => self
                .obstacles
                .get(index)
                .is_some_and(|fixed| fixed.until == NEVER && fixed.range == *range),
            Record::None => false,
        }
    }
}

fn block(id: ArenaBlockId, range: &Range<u64>) -> ArenaBlock {
    ArenaBlock { id, offset: Bytes::new(range.start), len: Bytes::new(range.end - range.start) }
}

/// What is left of a run beside some ranges, which are in the order of their starts.
fn without(run: Range<u64>, avoid: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut rest = Vec::new();
    let mut at = run.start;
    for range in avoid.iter().filter(|range| range.end > run.start && range.start < run.end) {
        if range.start > at {
            rest.push(at..range.start);
        }
        at = at.max(range.end);
    }
    if at < run.end {
        rest.push(at..run.end);
    }
    rest
}
