//! Graph arenas on a device: which capture a request belongs to, who may replay, what is lent.
//!
//! The core's [`Arena`] places blocks at offsets, its pool keeps memory behind them. Here the two
//! meet the driver: captured nodes are read off the stream, memory is backed before a block is
//! handed out and before a replay, and idle arenas lend when the pool runs short. All of it happens
//! behind the allocator's lock.

use std::collections::BTreeMap;

use vramp_core::{
    Arena, ArenaBlockId, ArenaId, ArenaPolicy, Attempt, Bytes, DeviceAddr, Layout, LeaseId, Leases,
    Mark, NodeId, Overlap, Recording, StreamId,
};
use vramp_driver::{
    CaptureInfo, CaptureMode, Driver, DriverError, ErrorKind, Graph, GraphNode, Stream,
};

use crate::allocation::{Allocation, Owner};
use crate::exec::is_full;
use crate::manager::Found;
use crate::virtual_pool::{Refusal, Served, VirtualPool};

/// While a capture grows an arena, memory is taken ahead by this part of what it has.
const AHEAD: u64 = 32;

/// So often arenas are looked at that may be idle in a moment: some tens of microseconds.
const POLLS_MOST: u32 = 64;

/// All arenas of a pool.
#[derive(Default)]
pub(crate) struct Arenas {
    by_id: BTreeMap<ArenaId, ArenaState>,
}

/// One arena and who uses it.
pub(crate) struct ArenaState {
    pub arena: Arena,
    pub leases: Leases,
    capturing: Option<Capturing>,
    /// The capture that the next one is planned by.
    planned: Option<Recording>,
    /// Graphs that somebody else launches, unseen, may use it at any time: it never lends.
    unguarded: bool,
    /// Its owner is gone: it goes with its last block.
    abandoned: bool,
}

/// A capture under way.
struct Capturing {
    /// The driver's number of it.
    number: u64,
    /// Where it began.
    stream: StreamId,
    /// It was begun here, and ends here.
    own: bool,
    /// Up to where memory is behind the arena.
    backed: Bytes,
    /// Memory of others that was freed on the capture's streams: its nodes may use it.
    kept: Vec<Allocation>,
    /// Where memory of others is whose use was noted on the capture's streams.
    noted: Vec<DeviceAddr>,
}

/// What came of a capture.
pub(crate) struct Captured {
    pub graph: Result<Graph, DriverError>,
    pub recording: Recording,
    pub kept: Vec<Allocation>,
}

/// Why a capture is not served.
pub(crate) enum NotAttached {
    /// The stream is part of none.
    NoCapture,
    /// An arena serves it already.
    Served,
    Refused(Refusal),
}

impl From<Refusal> for NotAttached {
    fn from(refusal: Refusal) -> NotAttached {
        NotAttached::Refused(refusal)
    }
}

/// Why a replay was not launched.
pub(crate) enum NoLease {
    Busy(vramp_core::ArenaBusy),
    Refused(Refusal),
}

impl From<DriverError> for NoLease {
    fn from(error: DriverError) -> NoLease {
        NoLease::Refused(Refusal::Driver(error))
    }
}

impl ArenaState {
    /// Also while a capture that is about to begin gets its memory.
    pub(crate) fn is_capturing(&self) -> bool {
        self.arena.is_capturing()
    }
}

impl Arenas {
    pub(crate) fn get(&self, id: ArenaId) -> &ArenaState {
        self.by_id.get(&id).unwrap_or_else(|| panic!("{id} is gone while somebody holds it"))
    }

    pub(crate) fn get_mut(&mut self, id: ArenaId) -> &mut ArenaState {
        self.by_id.get_mut(&id).unwrap_or_else(|| panic!("{id} is gone while somebody holds it"))
    }

    /// True if the arena holds the block.
    pub(crate) fn knows(&self, block: ArenaBlockId) -> bool {
        self.by_id.get(&block.arena()).is_some_and(|state| state.arena.block(block).is_ok())
    }

    /// The arena that serves the capture with this number.
    fn serving(&self, number: u64) -> Option<ArenaId> {
        let serves = |state: &ArenaState| {
            state.capturing.as_ref().is_some_and(|capturing| capturing.number == number)
        };
        self.iter().find(|(_, state)| serves(state)).map(|(id, _)| id)
    }

    fn any_capture(&self) -> bool {
        self.by_id.values().any(ArenaState::is_capturing)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ArenaId, &ArenaState)> {
        self.by_id.iter().map(|(&id, state)| (id, state))
    }
}

impl VirtualPool {
    /// Sets addresses aside. One driver call at most.
    pub(crate) fn add_arena(
        &mut self,
        policy: ArenaPolicy,
        capacity: Bytes,
    ) -> Result<ArenaId, DriverError> {
        let mut tidied = false;
        loop {
            match self.pool.add_arena(capacity) {
                Ok(id) => {
                    let state = ArenaState {
                        arena: Arena::new(id, policy, self.pool.arena_range(id).len),
                        leases: Leases::default(),
                        capturing: None,
                        planned: None,
                        unguarded: false,
                        abandoned: false,
                    };
                    self.arenas.by_id.insert(id, state);
                    return Ok(id);
                }
                Err(plan) => match self.exec.perform(&mut self.pool, plan) {
                    Ok(()) => {}
                    // Memory of former arenas may lie between the free addresses.
                    Err(error) if is_full(&error) && !tidied => {
                        tidied = true;
                        self.trim(Bytes::ZERO)?;
                    }
                    Err(error) => return Err(error),
                },
            }
        }
    }

    /// The owner of an arena is gone. Blocks that are still held keep it.
    pub(crate) fn abandon_arena(&mut self, id: ArenaId) {
        self.arenas.get_mut(id).abandoned = true;
        self.remove_if_abandoned(id);
    }

    fn remove_if_abandoned(&mut self, id: ArenaId) {
        let state = self.arenas.get(id);
        if state.abandoned && state.arena.census().blocks == 0 && !state.is_capturing() {
            let marks: Vec<Mark> = state.leases.unfinished().collect();
            self.arenas.by_id.remove(&id);
            self.pool.remove_arena(id, &marks);
        }
    }

    // --- captures ---

    /// Begins a capture of `stream` into an arena. A monotone arena gets all its memory first.
    pub(crate) fn begin_arena_capture(
        &mut self,
        id: ArenaId,
        stream: StreamId,
        mode: CaptureMode,
    ) -> Result<(), Refusal> {
        let upto = self.prepare_capture(id, stream)?;
        let raw = self.exec.stream(stream);
        let begun = self.exec.driver.begin_capture(raw, mode).and_then(|()| {
            match self.exec.driver.capture_info(raw) {
                Ok(Some(CaptureInfo { capture, .. })) => Ok(capture),
                told => {
                    // Whatever it is, it is not left behind.
                    let ended = self.end_driver_capture(stream);
                    let ended = ended.and_then(|graph| self.exec.driver.destroy_graph(graph));
                    Err(told.err().or(ended.err()).expect("a stream that captures says so"))
                }
            }
        });
        match begun {
            Ok(number) => {
                self.serve_capture(id, stream, number, upto, true);
                Ok(())
            }
            Err(error) => {
                self.arenas.get_mut(id).arena.abort().expect("it was prepared above");
                Err(Refusal::Driver(error))
            }
        }
    }

    /// Serves the capture that `stream` is part of, which somebody else began, ends and replays.
    /// Returns its number.
    pub(crate) fn attach_arena(
        &mut self,
        id: ArenaId,
        stream: StreamId,
    ) -> Result<u64, NotAttached> {
        let raw = self.exec.stream(stream);
        let told = self.exec.driver.capture_info(raw).map_err(Refusal::Driver)?;
        let number = told.ok_or(NotAttached::NoCapture)?.capture;
        if self.arenas.serving(number).is_some() {
            return Err(NotAttached::Served);
        }
        let upto = self.prepare_capture(id, stream)?;
        self.serve_capture(id, stream, number, upto, false);
        self.arenas.get_mut(id).unguarded = true;
        Ok(number)
    }

    /// The memory that an arena has before its capture asks for any; from here on it lends nothing,
    /// not to itself either. Returns up to where.
    fn prepare_capture(&mut self, id: ArenaId, stream: StreamId) -> Result<Bytes, Refusal> {
        let arena = &mut self.arenas.get_mut(id).arena;
        let upto = match arena.policy() {
            ArenaPolicy::Monotone => arena.capacity(),
            ArenaPolicy::Reusing => arena.planned_high_water(),
        };
        arena.begin().expect("its owner begins one capture at a time");
        match self.back(id, upto, stream) {
            Ok(()) => Ok(upto),
            Err(refusal) => {
                self.arenas.get_mut(id).arena.abort().expect("it was begun above");
                Err(refusal)
            }
        }
    }

    /// The capture of this number is the arena's from now on; `own` if it began it.
    fn serve_capture(
        &mut self,
        id: ArenaId,
        stream: StreamId,
        number: u64,
        backed: Bytes,
        own: bool,
    ) {
        let state = self.arenas.get_mut(id);
        let (kept, noted) = (Vec::new(), Vec::new());
        state.capturing = Some(Capturing { number, stream, own, backed, kept, noted });
        self.pool.hold(stream, true);
    }

    /// Ends a stream's capture on the device. A call that failed by itself is made once more: no
    /// stream stays in a capture for it.
    pub(crate) fn end_driver_capture(&self, stream: StreamId) -> Result<Graph, DriverError> {
        let raw = self.exec.stream(stream);
        match self.exec.driver.end_capture(raw) {
            Err(_) if self.still_captures(stream) => self.exec.driver.end_capture(raw),
            ended => ended,
        }
    }

    pub(crate) fn still_captures(&self, stream: StreamId) -> bool {
        self.exec.driver.is_capturing(self.exec.stream(stream)).unwrap_or(false)
    }

    /// Ends all captures, which come to nothing.
    pub(crate) fn end_captures(&mut self) {
        let capturing = |(_, state): (ArenaId, &ArenaState)| {
            state.capturing.as_ref().filter(|capturing| capturing.own).map(|own| own.stream)
        };
        let streams: Vec<StreamId> = self.arenas.iter().filter_map(capturing).collect();
        for stream in streams {
            if let Ok(graph) = self.end_driver_capture(stream) {
                let _ = self.exec.driver.destroy_graph(graph);
            }
        }
    }

    /// Takes note that a capture that [`VirtualPool::begin_arena_capture`] began has ended.
    pub(crate) fn end_arena_capture(
        &mut self,
        id: ArenaId,
        stream: StreamId,
        graph: Result<Graph, DriverError>,
    ) -> Captured {
        let state = self.arenas.get_mut(id);
        let recording = state.arena.end().expect("a capture ends once");
        let capturing = state.capturing.take().expect("a capture ends once");
        if graph.is_ok() {
            self.make_whole(id, stream);
        }
        self.after_capture(id);
        Captured { graph, recording, kept: capturing.kept }
    }

    /// Serves a capture no more that [`VirtualPool::attach_arena`] served, over or not.
    /// Returns what it asked for, and what is kept for its graph.
    pub(crate) fn detach_arena(&mut self, id: ArenaId) -> (Recording, Vec<Allocation>) {
        let state = self.arenas.get_mut(id);
        let recording = state.arena.end().expect("a capture is detached once");
        let capturing = state.capturing.take().expect("a capture is detached once");
        self.after_capture(id);
        (recording, capturing.kept)
    }

    fn after_capture(&mut self, id: ArenaId) {
        // What was drawn in is out of the capture too; where asking fails, it is asked again.
        let _ = self.note_captures();
        self.remove_if_abandoned(id);
    }

    /// Notes that graphs on any stream may have used the arena up to now. Returns the streams.
    pub(crate) fn used_anywhere(&mut self, id: ArenaId) -> Vec<StreamId> {
        let streams = (0..self.exec.streams.len() as u32).map(StreamId::new);
        let open: Vec<StreamId> = streams.filter(|&stream| self.pool.is_open(stream)).collect();
        for &stream in &open {
            let mark = self.pool.now(stream);
            self.arenas.get_mut(id).leases.note_use(mark);
        }
        open
    }

    /// The arena whose capture `raw` is part of, and the nodes its next work will depend on.
    pub(crate) fn capture_of(
        &self,
        raw: Stream,
    ) -> Result<Option<(ArenaId, Vec<GraphNode>)>, DriverError> {
        if !self.arenas.any_capture() {
            return Ok(None);
        }
        let Some(CaptureInfo { capture, tips }) = self.exec.driver.capture_info(raw)? else {
            return Ok(None);
        };
        Ok(self.arenas.serving(capture).map(|id| (id, tips)))
    }

    /// A block of the capture that `stream` is part of. Memory is taken where it lacks.
    pub(crate) fn malloc_in_arena(
        &mut self,
        id: ArenaId,
        tips: &[GraphNode],
        size: Bytes,
        stream: StreamId,
    ) -> Result<Found, Refusal> {
        let at = self.learn_nodes(id, tips).map_err(Refusal::Driver)?;
        let state = self.arenas.get_mut(id);
        let block = state.arena.alloc(size, &at).map_err(Refusal::Arena)?;
        let end = block.offset + block.len;
        let backed = state.capturing.as_ref().map_or(Bytes::ZERO, |capturing| capturing.backed);
        let hit = end <= backed;
        if !hit {
            let page = self.pool.config().page.count();
            let ahead = (end.count() / AHEAD).next_multiple_of(page).max(page);
            let most = self.arenas.get(id).arena.capacity();
            let wanted = (end + Bytes::new(ahead)).min(most);
            let served = self.back(id, wanted, stream).map(|()| wanted);
            // Where that is too much, what is needed will do.
            match served.or_else(|_| self.back(id, end, stream).map(|()| end)) {
                Ok(upto) => {
                    let capturing = &mut self.arenas.get_mut(id).capturing;
                    capturing.as_mut().expect("the stream is part of it").backed = upto;
                }
                Err(refusal) => {
                    let freed = self.arenas.get_mut(id).arena.free(block.id, &at);
                    freed.expect("the block was made above");
                    return Err(refusal);
                }
            }
        }
        let addr = self.exec.addr(self.pool.arena_range(id).at) + block.offset;
        Ok(Found { addr, len: block.len, owner: Owner::of_arena(block.id), hit })
    }

    /// Takes a block of an arena back: in its capture where `stream` is part of that, else as one
    /// that escaped, used by what is queued on `stream`.
    pub(crate) fn free_in_arena(
        &mut self,
        block: ArenaBlockId,
        stream: StreamId,
    ) -> Result<(), DriverError> {
        let id = block.arena();
        // A capture that was spoilt says so to whoever ends it.
        let captured = self.capture_of(self.exec.stream(stream)).unwrap_or_default();
        let known = "the allocator looked the block up";
        match captured.filter(|(arena, _)| *arena == id) {
            Some((_, tips)) => match self.learn_nodes(id, &tips) {
                Ok(at) => {
                    self.arenas.get_mut(id).arena.free(block, &at).expect(known);
                }
                // Where its last use is not known it serves this capture no more.
                Err(error) => {
                    self.arenas.get_mut(id).arena.free_outside(block).expect(known);
                    return Err(error);
                }
            },
            None => {
                let mark = self.pool.now(stream);
                let state = self.arenas.get_mut(id);
                state.arena.free_outside(block).expect(known);
                state.leases.note_use(mark);
                self.remove_if_abandoned(id);
            }
        }
        Ok(())
    }

    /// Notes that work queued on `stream` so far uses the block.
    pub(crate) fn note_use_in_arena(&mut self, block: ArenaBlockId, stream: StreamId) {
        let id = block.arena();
        let captured = self.capture_of(self.exec.stream(stream)).unwrap_or_default();
        let known = "the allocator looked the block up";
        if let Some((_, tips)) = captured.filter(|(arena, _)| *arena == id)
            && let Ok(at) = self.learn_nodes(id, &tips)
        {
            self.arenas.get_mut(id).arena.record_use(block, &at).expect(known);
            return;
        }
        let mark = self.pool.now(stream);
        self.arenas.get_mut(id).leases.note_use(mark);
    }

    /// The arena whose capture keeps what is freed on `stream` although it is not its own.
    pub(crate) fn keeper_of(&self, allocation: &Allocation, stream: StreamId) -> Option<ArenaId> {
        let own = match allocation.owner {
            Owner::Arena { arena, .. } => Some(arena),
            _ => None,
        };
        let others =
            |(id, state): &(ArenaId, &ArenaState)| state.capturing.is_some() && Some(*id) != own;
        let (first, _) = self.arenas.iter().find(others)?;
        let noted = |(_, state): &(ArenaId, &ArenaState)| {
            state
                .capturing
                .as_ref()
                .is_some_and(|capturing| capturing.noted.contains(&allocation.addr))
        };
        if let Some((id, _)) = self.arenas.iter().filter(others).find(noted) {
            return Some(id);
        }
        match self.capture_of(self.exec.stream(stream)) {
            Ok(captured) => captured.map(|(id, _)| id).filter(|&id| Some(id) != own),
            // A spoilt capture makes no graph.
            Err(error) if error.kind == ErrorKind::Capturing => None,
            // Nobody knows: kept too long is better than freed too soon.
            Err(_) => Some(first),
        }
    }

    /// Notes that a capture which `stream` is part of uses memory of others: freed meanwhile, on
    /// whatever stream, it is kept.
    pub(crate) fn note_use_in_capture(&mut self, allocation: &Allocation, stream: StreamId) {
        if let Some(id) = self.keeper_of(allocation, stream)
            && let Some(capturing) = &mut self.arenas.get_mut(id).capturing
        {
            capturing.noted.push(allocation.addr);
        }
    }

    /// Keeps memory that is not the arena's for the graph that a capture makes.
    pub(crate) fn keep_for_graph(&mut self, id: ArenaId, allocation: Allocation) {
        let capturing = self.arenas.get_mut(id).capturing.as_mut();
        capturing.expect("the stream is part of it").kept.push(allocation);
    }

    /// Tells the arena every captured node up to `tips`. Each node is read once.
    fn learn_nodes(&mut self, id: ArenaId, tips: &[GraphNode]) -> Result<Vec<NodeId>, DriverError> {
        let driver = &self.exec.driver;
        let arena = &mut self.arenas.get_mut(id).arena;
        let name = |node: &GraphNode| NodeId(node.number());
        // Depth first, and a node after those it depends on.
        let mut path: Vec<(GraphNode, Option<Vec<GraphNode>>)> =
            tips.iter().map(|&tip| (tip, None)).collect();
        while let Some((node, before)) = path.pop() {
            if arena.knows(name(&node)) {
                continue;
            }
            match before {
                Some(before) => {
                    let before: Vec<NodeId> = before.iter().map(name).collect();
                    arena.add_node(name(&node), &before).expect("those before are told first");
                }
                None => {
                    let before = driver.node_dependencies(node)?;
                    path.push((node, Some(before.clone())));
                    path.extend(before.into_iter().map(|node| (node, None)));
                }
            }
        }
        Ok(tips.iter().map(name).collect())
    }

    // --- memory ---

    /// Memory behind the first `upto` bytes of an arena. Nothing is asked for nothing.
    pub(crate) fn back(
        &mut self,
        id: ArenaId,
        upto: Bytes,
        stream: StreamId,
    ) -> Result<(), Refusal> {
        if upto.is_zero() {
            return Ok(());
        }
        let mut served = self.serve(&mut Attempt::back(id, upto, stream));
        if let Err(Refusal::Short(..)) = served {
            // Free chunks may fit no gap of the arena. Those that are idle can be cut anew.
            self.note_captures().and_then(|_| self.find_idle()).map_err(Refusal::Driver)?;
            served = self.serve(&mut Attempt::back(id, upto, stream));
        }
        match served? {
            Served::Backed => Ok(()),
            _ => unreachable!("memory for an arena was asked for"),
        }
    }

    /// Makes an arena that grew bit by bit of few large chunks, and of no more than it needs:
    /// bringing a chunk back costs the same at any size. Only while it is idle; what is live stays.
    fn make_whole(&mut self, id: ArenaId, stream: StreamId) {
        let upto = self.arenas.get(id).arena.high_water();
        if !self.pool.is_ill_cut(id, upto) || !self.may_lend(id) || !self.is_over(id) {
            return;
        }
        self.lend(id);
        while let Some(plan) = self.pool.release_lent(id) {
            if self.exec.perform(&mut self.pool, plan).is_err() {
                break;
            }
        }
        // If it fails, the replay asks again and tells.
        let _ = self.back(id, upto, stream);
    }

    /// Lets every arena lend that nobody uses. Returns how much is lent now that was not. An event
    /// record and a query for each stream that used one.
    pub(crate) fn lend_idle(&mut self) -> Result<Bytes, DriverError> {
        let backed = |id: ArenaId| !self.pool.arena_memory(id).backed.is_zero();
        let ids = self.arenas.iter().map(|(id, _)| id);
        let candidates: Vec<ArenaId> = ids.filter(|&id| self.may_lend(id) && backed(id)).collect();
        if candidates.is_empty() {
            return Ok(Bytes::ZERO);
        }
        for &id in &candidates {
            let marks = self.marks_of(id);
            self.record_all(&marks)?;
        }
        // An event that was recorded just now on an idle stream is reached in a moment.
        for _ in 0..POLLS_MOST {
            self.poll()?;
            let learnt = self.pool.pending().next().is_none() || self.pool.holds_any();
            if learnt || candidates.iter().all(|&id| self.is_over(id)) {
                break;
            }
        }
        let mut lent = Bytes::ZERO;
        for id in candidates {
            if self.is_over(id) {
                lent += self.lend(id);
            }
        }
        Ok(lent)
    }

    /// Lends what no live block touches.
    fn lend(&mut self, id: ArenaId) -> Bytes {
        let live: Vec<(Bytes, Bytes)> = self.arenas.get(id).arena.live_ranges().collect();
        self.pool.lend(id, &live)
    }

    /// True if nobody holds the arena: it may lend once its work is over.
    fn may_lend(&self, id: ArenaId) -> bool {
        let state = self.arenas.get(id);
        !state.unguarded && !state.is_capturing() && state.leases.holder().is_none()
    }

    /// True if nobody has a lease and all work that touched the arena is known to be over.
    fn is_over(&self, id: ArenaId) -> bool {
        let leases = &self.arenas.get(id).leases;
        leases.is_idle(|mark| self.pool.is_over(mark)) && self.pool.arena_inherited(id).is_empty()
    }

    /// All work that may still touch an arena's memory.
    fn marks_of(&self, id: ArenaId) -> Vec<Mark> {
        let mut marks = self.pool.arena_inherited(id);
        marks.extend(self.arenas.get(id).leases.unfinished());
        marks
    }

    /// Records events where none covers a mark, but on streams that capture.
    fn record_all(&mut self, marks: &[Mark]) -> Result<(), DriverError> {
        for &mark in marks {
            if mark == self.pool.now(mark.stream)
                && self.pool.is_open(mark.stream)
                && !self.exec.driver.is_capturing(self.exec.stream(mark.stream))?
            {
                self.exec.record(mark)?;
                self.pool.recorded(mark);
            }
        }
        Ok(())
    }

    // --- replays ---

    /// Takes a lease for a replay on `stream` that needs the first `upto` bytes, brings the memory
    /// there, and orders the stream behind whatever may still use it.
    pub(crate) fn take_lease(
        &mut self,
        id: ArenaId,
        upto: Bytes,
        stream: StreamId,
        overlap: Overlap,
    ) -> Result<LeaseId, NoLease> {
        let others = |marks: Vec<Mark>| -> Vec<Mark> {
            marks.into_iter().filter(|mark| mark.stream != stream).collect()
        };
        let unfinished = others(self.arenas.get(id).leases.unfinished().collect());
        if !unfinished.is_empty() {
            self.record_all(&unfinished)?;
            self.poll()?;
        }
        let VirtualPool { pool, arenas, .. } = self;
        let leases = &mut arenas.get_mut(id).leases;
        leases.forget(|mark| pool.is_over(mark));
        let ordered = |mark: Mark| pool.is_ordered(stream, mark);
        let taken = leases.take(stream, overlap, ordered).map_err(NoLease::Busy)?;
        let ready = self.back(id, upto, stream).and_then(|()| {
            let mut waits = others(self.pool.arena_inherited(id));
            waits.extend(taken.waits);
            self.order_behind(stream, &waits).map_err(Refusal::Driver)
        });
        match ready {
            Ok(()) => Ok(taken.lease),
            Err(refusal) => {
                let cancelled = self.arenas.get_mut(id).leases.cancel(taken.lease);
                cancelled.expect("the lease was taken above");
                Err(NoLease::Refused(refusal))
            }
        }
    }

    /// Lets later work on `stream` run after the work before `marks`.
    fn order_behind(&mut self, stream: StreamId, marks: &[Mark]) -> Result<(), DriverError> {
        self.record_all(marks)?;
        for &mark in marks {
            if self.pool.is_ordered(stream, mark) {
                continue;
            }
            if let Some(event) = self.exec.events.covering(mark) {
                self.exec.driver.wait(self.exec.stream(stream), event)?;
            }
            self.pool.waits(stream, mark);
        }
        Ok(())
    }

    /// Ends a lease: what is queued on its stream so far uses the arena.
    pub(crate) fn end_lease(&mut self, id: ArenaId, lease: LeaseId, stream: StreamId) {
        let mark = self.pool.now(stream);
        let ended = self.arenas.get_mut(id).leases.end(lease, mark);
        ended.expect("a lease is held until it is dropped");
    }

    /// The layout that the next capture of the same shape follows, among the blocks that were live
    /// when `recording` began.
    pub(crate) fn set_plan(&mut self, id: ArenaId, layout: Layout, recording: Recording) {
        let state = self.arenas.get_mut(id);
        state.arena.set_plan(Some(layout));
        state.planned = Some(recording);
    }

    /// What to plan anew, because other blocks are live by now than the plan goes around.
    pub(crate) fn outdated_plan(&self, id: ArenaId) -> Option<Recording> {
        let state = self.arenas.get(id);
        let recording = state.planned.as_ref()?;
        let live = || state.arena.live_ranges();
        (!live().eq(recording.before())).then(|| recording.among(live()))
    }
}
