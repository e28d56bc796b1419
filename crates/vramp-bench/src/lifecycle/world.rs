//! Performs operations, and keeps what a well-behaved user knows: who works on which memory, what
//! depends on what, and which calls are to be refused.
//!
//! The rules that the user keeps are those of the allocator's documentation and of
//! `docs/life-cycles.md`. An operation that would break one is changed so that it keeps it (work
//! is ordered after earlier work, uses are recorded), or does nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use vramp::graph::CaptureMode;
use vramp::{Bytes, DeviceAddr, Driver, DriverError, Preset};
use vramp_core::AddrRange;
use vramp_driver::sim::{Gate, Kernel, LiveObjects, Simulator};
use vramp_driver::wrapper::Wrapped;
use vramp_driver::{Call, Event, GraphExec, HostBuffer, HostSlice, Stream};

use super::op::Op;
use super::subject::{
    ArenaChoice, Outcome, Planned, PoolEnd, Reaction, Refused, Subject, Way, Why,
};
use super::tap::Tap;

/// What a program found, in words.
pub type Finding = String;

/// Result of an operation: false if it did nothing.
type Done = Result<bool, Finding>;

/// Objects by name, in order of creation.
#[derive(Debug)]
pub(super) struct Named<T>(pub Vec<(u64, T)>);

impl<T> Default for Named<T> {
    fn default() -> Named<T> {
        Named(Vec::new())
    }
}

impl<T> Named<T> {
    pub fn get(&self, name: u64) -> Option<&T> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, object)| object)
    }

    pub fn get_mut(&mut self, name: u64) -> Option<&mut T> {
        self.0.iter_mut().find(|(known, _)| *known == name).map(|(_, object)| object)
    }

    pub fn has(&self, name: u64) -> bool {
        self.get(name).is_some()
    }

    pub fn add(&mut self, name: u64, object: T) {
        self.0.push((name, object));
    }

    pub fn take(&mut self, name: u64) -> Option<T> {
        let at = self.0.iter().position(|(known, _)| *known == name)?;
        Some(self.0.swap_remove(at).1)
    }

    pub fn names(&self) -> Vec<u64> {
        self.0.iter().map(|(name, _)| *name).collect()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// A stream that has work on some memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct User {
    pub stream: u64,
    pub worked: bool,
    pub writes: bool,
    pub recorded: bool,
}

#[derive(Debug)]
pub(super) struct StreamState {
    pub raw: Stream,
    /// True if the program destroys it.
    adopted: bool,
    /// Recorded on it before it was destroyed.
    pub end: Option<Event>,
    /// True if only the driver's destruction failed, which can be tried again.
    half_destroyed: bool,
    /// The capture that it is part of, and an event from before.
    pub capture: Option<(u64, Event)>,
}

impl StreamState {
    pub fn is_open(&self) -> bool {
        self.end.is_none()
    }
}

/// Where a block comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum From {
    Pool,
    /// Allocated in this capture, which is under way.
    Capture(u64),
    /// Allocated in a capture of this arena that is over. The graph is none if it failed.
    Graph(u64, Option<u64>),
}

#[derive(Debug)]
pub(super) struct Block {
    pub pool: u64,
    pub range: AddrRange,
    pub from: From,
    pub users: Vec<User>,
    pub byte: Option<u8>,
}

#[derive(Debug)]
pub(super) struct Arena {
    pub pool: u64,
    mode: CaptureMode,
    /// The last launches and reads, once graphs are launched without leases.
    users: Vec<u64>,
    unguarded: bool,
    pub dropped: bool,
}

#[derive(Debug)]
pub(super) struct Capture {
    pub pool: u64,
    pub arena: u64,
    pub origin: u64,
    pub streams: Vec<u64>,
    pub attached: bool,
    mode: CaptureMode,
    pub invalid: bool,
    /// Captured work by block.
    users: Named<Vec<User>>,
    /// Streams with work on blocks from outside that were freed inside.
    before: Vec<u64>,
    /// The last byte that captured fills leave, by block.
    fills: Vec<(u64, u8)>,
}

#[derive(Debug)]
pub(super) struct Graph {
    pub pool: u64,
    pub arena: u64,
    /// Blocks from outside that it uses.
    uses: Vec<u64>,
    before: Vec<u64>,
    fills: Vec<(u64, u8)>,
    /// Of a capture that was attached.
    pub exec: Option<GraphExec>,
    pub attached: bool,
    /// A block that it uses was freed.
    pub dead: bool,
}

#[derive(Debug)]
pub(super) struct Lease {
    pub graph: u64,
    pub arena: u64,
    pub stream: u64,
}

#[derive(Debug)]
pub(super) struct Range {
    pub pool: u64,
    pub range: AddrRange,
    pub backed: bool,
    pub hosted: Bytes,
    users: Vec<User>,
}

/// Bytes that were copied to the host, to be compared.
#[derive(Debug)]
struct Look {
    slot: u64,
    byte: u8,
    done: Event,
    block: u64,
}

const SLOTS: u64 = 64;
const SLOT: u64 = 32;
/// Where the reads of a card copy to, behind the slots. Several may write there at once: the bytes
/// are never read.
const SCRATCH: Bytes = Bytes::new(SLOTS * SLOT);

/// Counts of objects and of their ends.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Operations that did something, by kind; see [`Op::WORDS`].
    pub done: Vec<u64>,
    /// Operations whose objects did not exist or that a rule forbids.
    pub skipped: u64,
    /// Requests refused for want of memory.
    pub out_of_memory: u64,
    /// Calls that were refused as documented.
    pub refused: u64,
    /// Injected failures that a call met.
    pub faults: u64,
    /// Blocks whose bytes were compared.
    pub looks: u64,
    /// Planned panics that unwound.
    pub panics: u64,
    /// Pools that ended with objects, work or captures.
    pub ended_in_use: u64,
}

/// The state of a program.
pub struct World {
    pub(super) subject: Box<dyn Subject>,
    pub(super) device: Arc<dyn Driver>,
    pub(super) sim: Option<Arc<Simulator>>,
    pub(super) tap: Arc<Wrapped<Tap>>,
    pub(super) preset: Preset,
    /// True if bytes are stored and compared.
    stores: bool,
    pub(super) pools: Named<()>,
    pub(super) streams: Named<StreamState>,
    pub(super) blocks: Named<Block>,
    pub(super) arenas: Named<Arena>,
    pub(super) captures: Named<Capture>,
    pub(super) graphs: Named<Graph>,
    pub(super) leases: Named<Lease>,
    pub(super) ranges: Named<Range>,
    pub(super) observers: Named<u64>,
    gates: Vec<Gate>,
    looks: Vec<Look>,
    slots: Vec<u64>,
    buffer: HostBuffer,
    /// Events of ended streams.
    events: Vec<Event>,
    /// True once something stays behind legitimately: a panic lost a block, a pool was dropped
    /// while a stream captured.
    leaks: bool,
    pub(super) counts: Counts,
    steps: u64,
    fired: usize,
    /// Objects of the device before the program.
    before: LiveObjects,
}

fn words(error: DriverError) -> Finding {
    format!("the program's own call failed: {error}")
}

pub(super) fn mode_of(number: u64) -> CaptureMode {
    CaptureMode::ALL[number as usize % CaptureMode::ALL.len()]
}

fn way_of(number: u64) -> Way {
    match number {
        1 => Way::Elsewhere,
        2 => Way::Panic,
        _ => Way::Here,
    }
}

impl World {
    /// Returns the state before a program.
    ///
    /// # Errors
    /// A driver call of the program failed.
    pub(super) fn new(
        subject: Box<dyn Subject>,
        device: Arc<dyn Driver>,
        sim: Option<Arc<Simulator>>,
        tap: Arc<Wrapped<Tap>>,
        preset: Preset,
        stores: bool,
    ) -> Result<World, Finding> {
        let before = sim.as_ref().map(|sim| sim.live()).unwrap_or_default();
        let buffer = device.alloc_host(SCRATCH + Bytes::new(SLOT)).map_err(words)?;
        Ok(World {
            subject,
            device,
            sim,
            tap,
            preset,
            stores,
            pools: Named::default(),
            streams: Named::default(),
            blocks: Named::default(),
            arenas: Named::default(),
            captures: Named::default(),
            graphs: Named::default(),
            leases: Named::default(),
            ranges: Named::default(),
            observers: Named::default(),
            gates: Vec::new(),
            looks: Vec::new(),
            slots: (0..SLOTS).collect(),
            buffer,
            events: Vec::new(),
            leaks: false,
            counts: Counts { done: vec![0; Op::WORDS.len()], ..Counts::default() },
            steps: 0,
            fired: 0,
            before,
        })
    }

    /// Performs an operation and checks what holds after it.
    ///
    /// # Errors
    /// A promise was broken.
    pub(super) fn step(&mut self, op: &Op) -> Result<(), Finding> {
        self.steps += 1;
        self.fired = self.tap.fired();
        let performed = catch_unwind(AssertUnwindSafe(|| self.perform(op)));
        let done = match performed {
            Ok(done) => done?,
            Err(panic) if panic.is::<Planned>() => {
                self.counts.panics += 1;
                // A block that was allocated when the callback panicked is lost; one that was freed
                // is free.
                self.leaks = true;
                if let Op::Free { block, .. } = op {
                    self.forget_block(*block);
                }
                true
            }
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&s| s.to_owned()));
                return Err(format!("a panic: {}", text.unwrap_or_default()));
            }
        };
        match done {
            true => self.counts.done[op.kind()] += 1,
            false => self.counts.skipped += 1,
        }
        self.counts.faults += (self.tap.fired() - self.fired) as u64;
        self.check(self.steps.is_multiple_of(16))
    }

    fn check(&mut self, audits: bool) -> Result<(), Finding> {
        if let Some(sim) = &self.sim {
            if sim.hazards_found() > 0 {
                let hazards = sim.hazards();
                return Err(format!("hazard: {}", hazards[0]));
            }
            if let Some(loss) = sim.device_loss() {
                return Err(format!("the device is lost: {}", loss.explanation));
            }
        }
        if audits {
            for pool in self.pools.names() {
                if let Err(Refused { text, .. }) = self.subject.audit(pool) {
                    return Err(format!("audit of pool {pool}: {text}"));
                }
            }
        }
        Ok(())
    }

    /// Returns true if a failure was injected during this operation.
    fn is_faulty(&self) -> bool {
        self.tap.fired() > self.fired
    }

    /// Returns the result of a call; `None` if it was refused as it may be.
    fn allow<T>(&mut self, result: Outcome<T>, allowed: &[Why]) -> Result<Option<T>, Finding> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(refused) => {
                self.refused(&refused, allowed)?;
                Ok(None)
            }
        }
    }

    fn refused(&mut self, refused: &Refused, allowed: &[Why]) -> Result<(), Finding> {
        let Refused { why, text } = refused;
        if self.is_faulty() && !matches!(why, Why::Broken | Why::Hang) {
            return Ok(());
        }
        match why {
            Why::OutOfMemory if allowed.contains(why) => self.counts.out_of_memory += 1,
            why if allowed.contains(why) => self.counts.refused += 1,
            why => return Err(format!("refused without a reason ({why:?}): {text}")),
        }
        Ok(())
    }

    /// Checks that a call was refused for one of these reasons.
    fn expect<T>(&mut self, result: Outcome<T>, expected: &[Why]) -> Done {
        match result {
            Ok(_) if self.is_faulty() => Ok(true),
            Ok(_) => Err(format!("accepted, although it is to be refused ({expected:?})")),
            Err(refused) => self.refused(&refused, expected).map(|()| true),
        }
    }

    fn perform(&mut self, op: &Op) -> Done {
        match *op {
            Op::Open { pool } => self.open(pool),
            Op::EndPool { pool, way } => self.end_pool(pool, way),
            Op::Create { pool, stream } => self.create(pool, stream, false),
            Op::Adopt { pool, stream } => self.create(pool, stream, true),
            Op::Destroy { pool, stream } => self.destroy(pool, stream),
            Op::Malloc { pool, stream, size, block } => {
                self.malloc(pool, stream, size, block, false)
            }
            Op::Tagged { pool, stream, size, block } => {
                self.malloc(pool, stream, size, block, true)
            }
            Op::Work { block, stream, kind, ns } => self.work(block, stream, kind, ns),
            Op::Use { block, stream } => self.record_use(block, stream),
            Op::Free { block, stream, way } => self.free(block, stream, way),
            Op::Look { block, stream } => self.look(block, stream),
            Op::Sync {} => self.sync(),
            Op::Gates {} => Ok(self.open_gates()),
            Op::Advance { ns } => {
                let Some(sim) = &self.sim else { return Ok(false) };
                sim.advance(ns);
                Ok(true)
            }
            Op::Trim { pool, to } => self.trim(pool, to),
            Op::Limit { pool, bytes } => {
                if !self.pools.has(pool) || self.has_strict_capture() {
                    return Ok(false);
                }
                let limit = (bytes > 0).then(|| Bytes::new(bytes));
                let set = self.subject.set_limit(pool, limit);
                self.allow(set, &[]).map(|_| true)
            }
            Op::Arena { pool, arena, monotone, order, mode } => {
                self.arena(pool, arena, (monotone, order, mode))
            }
            Op::DropArena { arena, way } => self.drop_arena(arena, way),
            Op::Reset { arena } => {
                let Some(Arena { pool, dropped: false, .. }) = self.arenas.get(arena) else {
                    return Ok(false);
                };
                if !self.pools.has(*pool) {
                    return Ok(false);
                }
                let reset = self.subject.reset(arena);
                self.allow(reset, &[Why::Busy]).map(|_| true)
            }
            Op::Begin { arena, stream, capture } => self.begin(arena, stream, capture, None),
            Op::Attach { arena, stream, capture, mode } => {
                self.begin(arena, stream, capture, Some(mode_of(mode)))
            }
            Op::Fork { capture, from, stream } => self.fork(capture, from, stream),
            Op::End { capture, way, graph } => self.end(capture, way, graph),
            Op::Discard { capture, way } => self.discard(capture, way_of(way)),
            Op::Invalidate { capture } => self.invalidate(capture),
            Op::Launch { graph, stream, lease } => self.launch(graph, stream, lease),
            Op::Read { lease, block, stream, ns } => self.read(lease, block, stream, ns),
            Op::EndLease { lease, way } => {
                if self.leases.take(lease).is_none() {
                    return Ok(false);
                }
                let ended = self.subject.end_lease(lease, way_of(way));
                self.allow(ended, &[]).map(|_| true)
            }
            Op::DropGraph { graph, way } => self.drop_graph(graph, way),
            Op::Range { pool, range, len } => {
                if !self.pools.has(pool) {
                    return Ok(false);
                }
                let made = self.subject.range(pool, range, Bytes::new(len));
                if self.preset != Preset::Vramp {
                    return self.expect(made, &[Why::NotSupported]);
                }
                if let Some(addresses) = self.allow(made, &[Why::OutOfMemory])? {
                    let state = Range {
                        pool,
                        range: addresses,
                        backed: false,
                        hosted: Bytes::ZERO,
                        users: Vec::new(),
                    };
                    self.ranges.add(range, state);
                }
                Ok(true)
            }
            Op::Back { range, stream } => self.back(range, stream),
            Op::WorkRange { range, stream, kind, ns } => self.work_range(range, stream, kind, ns),
            Op::Lend { range } => self.lend(range),
            Op::Host { range, len } => self.host(range, len),
            Op::Unhost { range } => self.unhost(range),
            Op::DropRange { range, way } => self.drop_range(range, way),
            Op::Observe { pool, observer, kind, stream } => {
                if !self.pools.has(pool) || !self.streams.has(stream) {
                    return Ok(false);
                }
                let how = [
                    Reaction::Count,
                    Reaction::Allocate,
                    Reaction::Trim,
                    Reaction::Unregister,
                    Reaction::Panic,
                ][kind as usize % 5];
                let observed = self.subject.observe(pool, observer, how, stream);
                if self.allow(observed, &[Why::NotSupported])?.is_some() {
                    self.observers.add(observer, pool);
                }
                Ok(true)
            }
            Op::Handle { pool, observer, kind, block, stream } => {
                self.handle(pool, observer, kind, block, stream)
            }
            Op::Unobserve { observer } => {
                if self.observers.take(observer).is_none_or(|pool| !self.pools.has(pool)) {
                    return Ok(false);
                }
                let removed = self.subject.unobserve(observer);
                self.allow(removed, &[]).map(|_| true)
            }
            Op::Fault { call, nth, code } => {
                let call = Call::ALL[call as usize % Call::ALL.len()];
                self.tap.fail(call, nth, code as i32);
                Ok(true)
            }
            Op::NoFault {} => {
                self.tap.cancel();
                Ok(true)
            }
            Op::Misuse { kind, pool, object } => self.misuse(kind, pool, object),
        }
    }

    // --- pools ---

    fn open(&mut self, pool: u64) -> Done {
        let opened = self.subject.open(pool);
        if self.allow(opened, &[])?.is_some() {
            self.pools.add(pool, ());
        }
        Ok(true)
    }

    fn end_pool(&mut self, pool: u64, way: u64) -> Done {
        if !self.pools.has(pool) {
            return Ok(false);
        }
        // Closing waits for the work, which a closed gate would hold for ever.
        self.open_gates();
        let in_use = self.captures.len() > 0
            || self.blocks.0.iter().any(|(_, block)| block.pool == pool)
            || self.leases.len() > 0;
        self.counts.ended_in_use += u64::from(in_use);
        let ended = self.subject.end_pool(pool, way);
        // Captures that the pool began end with it, or with the attempt. The handles stay.
        let mut captures = false;
        for at in 0..self.captures.len() {
            let (name, Capture { pool: of, origin, streams, .. }) = &self.captures.0[at];
            let captured = self.capture_of(*origin) == Some(*name);
            let goes_on = captured && self.raw(*origin).is_some_and(|raw| self.captures_now(raw));
            captures |= goes_on;
            if captured && !goes_on && *of == pool {
                self.release(streams.clone());
            }
        }
        match ended {
            // Memory that a capture may use stays mapped until the device goes.
            PoolEnd::Done => self.leaks |= captures || self.is_faulty(),
            PoolEnd::Refused(refused) if captures || self.is_faulty() => {
                self.refused(&refused, &[Why::Capturing])?;
                return Ok(true);
            }
            PoolEnd::Refused(refused) => {
                return Err(format!("the pool cannot be closed: {}", refused.text));
            }
            PoolEnd::Failed(refused) => self.refused(&refused, &[])?,
        }
        self.pools.take(pool);
        self.observers.0.retain(|(_, of)| *of != pool);
        self.blocks.0.retain(|(_, block)| block.pool != pool);
        for (_, graph) in &mut self.graphs.0 {
            graph.dead |= graph.pool == pool && graph.attached;
        }
        if self.pools.len() == 0 {
            self.end_group()?;
        }
        Ok(true)
    }

    /// Ends what a group leaves when its last pool is gone.
    fn end_group(&mut self) -> Result<(), Finding> {
        for capture in self.captures.names() {
            self.discard(capture, Way::Here)?;
        }
        for (_, state) in std::mem::take(&mut self.streams.0) {
            if let Some(end) = state.end {
                self.events.push(end);
            } else if state.adopted {
                self.device.destroy_stream(state.raw).map_err(words)?;
            }
        }
        self.blocks.0.clear();
        Ok(())
    }

    // --- streams ---

    fn create(&mut self, pool: u64, stream: u64, adopts: bool) -> Done {
        if !self.pools.has(pool) {
            return Ok(false);
        }
        let made = match adopts {
            true => self.subject.adopt_stream(pool, stream),
            false => self.subject.create_stream(pool, stream).map(|raw| (raw, false)),
        };
        if let Some((raw, adopted)) = self.allow(made, &[])? {
            self.streams.add(
                stream,
                StreamState { raw, adopted, end: None, half_destroyed: false, capture: None },
            );
        }
        Ok(true)
    }

    fn destroy(&mut self, pool: u64, stream: u64) -> Done {
        let Some(state) = self.streams.get(stream) else { return Ok(false) };
        if !self.pools.has(pool) {
            return Ok(false);
        }
        if state.capture.is_some() {
            let destroyed = self.subject.destroy_stream(pool, stream);
            return self.expect(destroyed, &[Why::Capturing]);
        }
        if state.half_destroyed {
            let destroyed = self.subject.destroy_stream(pool, stream);
            if self.allow(destroyed, &[])?.is_some() {
                let state = self.streams.get_mut(stream).expect("it was found above");
                state.half_destroyed = false;
            }
            return Ok(true);
        }
        if !state.is_open() {
            let destroyed = self.subject.destroy_stream(pool, stream);
            return self.expect(destroyed, &[Why::UnknownStream]);
        }
        let raw = state.raw;
        let end = self.device.create_event().map_err(words)?;
        self.device.record(end, raw).map_err(words)?;
        // Uses of a range can be recorded only while the stream is open. Of every second stream
        // those of blocks are recorded too; the others are freed on the ended stream.
        for range in self.ranges.names() {
            self.record_range_uses(range, Some(stream))?;
        }
        if stream.is_multiple_of(2) {
            for block in self.blocks.names() {
                self.record_uses(block, Some(stream))?;
            }
        }
        let destroyed = self.subject.destroy_stream(pool, stream);
        if self.allow(destroyed, &[])?.is_none() {
            if self.tap.last_fired() == Some(Call::DestroyStream) {
                let state = self.streams.get_mut(stream).expect("it was found above");
                (state.end, state.half_destroyed) = (Some(end), true);
                return Ok(true);
            }
            // It is as before, and can be destroyed again.
            self.device.destroy_event(end).map_err(words)?;
            return Ok(true);
        }
        let state = self.streams.get_mut(stream).expect("it was found above");
        state.end = Some(end);
        if state.adopted {
            self.device.destroy_stream(raw).map_err(words)?;
        }
        Ok(true)
    }

    fn raw(&self, stream: u64) -> Option<Stream> {
        self.streams.get(stream).filter(|state| state.is_open()).map(|state| state.raw)
    }

    /// Returns the driver's stream if work queued on it runs, and is not captured.
    fn runs(&self, stream: u64) -> Option<Stream> {
        let state = self.streams.get(stream)?;
        (state.is_open() && state.capture.is_none()).then_some(state.raw)
    }

    fn capture_of(&self, stream: u64) -> Option<u64> {
        self.streams.get(stream)?.capture.map(|(capture, _)| capture)
    }

    fn has_strict_capture(&self) -> bool {
        self.captures.0.iter().any(|(_, capture)| capture.mode != CaptureMode::Relaxed)
    }

    /// Orders later work on `later`, which runs, after the work on `earlier` that ran.
    fn order(&self, earlier: u64, later: u64) -> Result<(), Finding> {
        let (Some(state), Some(raw)) = (self.streams.get(earlier), self.runs(later)) else {
            return Ok(());
        };
        if earlier == later {
            return Ok(());
        }
        let recorded = state.end.or(state.capture.map(|(_, before)| before));
        match recorded {
            Some(event) => self.device.wait(raw, event).map_err(words),
            None => self.wait(state.raw, raw),
        }
    }

    fn wait(&self, earlier: Stream, later: Stream) -> Result<(), Finding> {
        let event = self.device.create_event().map_err(words)?;
        self.device.record(event, earlier).map_err(words)?;
        self.device.wait(later, event).map_err(words)?;
        self.device.destroy_event(event).map_err(words)
    }

    /// Orders later captured work on `later` after that on `earlier`, of the same capture.
    fn order_captured(&self, earlier: u64, later: u64) -> Result<(), Finding> {
        match (self.raw(earlier), self.raw(later)) {
            (Some(from), Some(to)) if from != to => self.wait(from, to),
            _ => Ok(()),
        }
    }

    // --- blocks ---

    fn malloc(&mut self, pool: u64, stream: u64, size: u64, block: u64, tagged: bool) -> Done {
        let Some(state) = self.streams.get(stream) else { return Ok(false) };
        if !self.pools.has(pool) {
            return Ok(false);
        }
        let (open, capture) = (state.is_open(), self.capture_of(stream));
        let invalid = capture.and_then(|capture| self.captures.get(capture));
        let invalid = invalid.is_some_and(|capture| capture.invalid);
        let placed = self.subject.malloc((pool, stream), Bytes::new(size), block, tagged);
        if !open {
            return self.expect(placed, &[Why::UnknownStream]);
        }
        let allowed: &[Why] = match (capture, invalid) {
            (_, true) => &[Why::Capturing, Why::OutOfMemory],
            (Some(_), _) => &[Why::OutOfMemory, Why::Arena],
            (None, _) => &[Why::OutOfMemory],
        };
        let Some(range) = self.allow(placed, allowed)? else { return Ok(true) };
        if range.len < Bytes::new(size.max(1)) {
            return Err(format!("{} instead of {size} B", range.len));
        }
        if let Some((other, state)) =
            self.blocks.0.iter().find(|(_, other)| overlaps(other.range, range))
        {
            return Err(format!("{range} overlaps block {other} at {}", state.range));
        }
        let of_capture = capture.filter(|capture| {
            self.captures.get(*capture).is_some_and(|capture| capture.pool == pool)
        });
        let from = of_capture.map_or(From::Pool, From::Capture);
        let first = User { stream, worked: false, writes: true, recorded: false };
        if let From::Capture(capture) = from {
            let capture = self.captures.get_mut(capture).expect("it was found above");
            capture.users.add(block, vec![first]);
        }
        let users = if from == From::Pool { vec![first] } else { Vec::new() };
        self.blocks.add(block, Block { pool, range, from, users, byte: None });
        Ok(true)
    }

    fn work(&mut self, block: u64, stream: u64, kind: u64, ns: u64) -> Done {
        let (Some(state), Some(raw)) = (self.blocks.get(block), self.raw(stream)) else {
            return Ok(false);
        };
        let (range, writes, fills) = (state.range, kind != 0, self.fills(kind));
        let Some(capture) = self.capture_of(stream) else {
            if state.from != From::Pool {
                return Ok(false);
            }
            let users = &self.blocks.get(block).expect("it was found above").users;
            let after = later_than(users, writes);
            for user in after {
                self.order(user, stream)?;
            }
            self.queue(raw, range, kind, ns, byte_of(block, ns))?;
            let state = self.blocks.get_mut(block).expect("it was found above");
            note(&mut state.users, stream, writes);
            if fills {
                state.byte = Some(byte_of(block, ns));
            }
            return Ok(true);
        };
        let capturing = self.captures.get(capture).expect("its streams refer to it");
        let usable = match state.from {
            From::Pool => state.pool == capturing.pool && !self.is_kept_elsewhere(block, capture),
            From::Capture(of) => of == capture,
            From::Graph(arena, graph) => arena == capturing.arena && graph.is_some(),
        };
        if !usable || capturing.invalid || kind == 3 {
            return Ok(false);
        }
        let after = match capturing.users.get(block) {
            Some(users) => later_than(users, writes),
            None => Vec::new(),
        };
        for user in after {
            self.order_captured(user, stream)?;
        }
        self.queue(raw, range, kind, ns.min(4096), byte_of(block, ns))?;
        let capturing = self.captures.get_mut(capture).expect("it was found above");
        if !capturing.users.has(block) {
            capturing.users.add(block, Vec::new());
        }
        let users = capturing.users.get_mut(block).expect("it was added above");
        note(users, stream, writes);
        if fills {
            capturing.fills.retain(|(filled, _)| *filled != block);
            capturing.fills.push((block, byte_of(block, ns)));
        }
        Ok(true)
    }

    /// Returns true if another capture under way uses the block.
    fn is_kept_elsewhere(&self, block: u64, capture: u64) -> bool {
        self.captures.0.iter().any(|(name, other)| *name != capture && other.users.has(block))
    }

    /// Returns true if work of this kind leaves bytes that are known. The simulator's kernels change
    /// no bytes. A card has no kernels here: what writes is a fill, what reads is a copy.
    fn fills(&self, kind: u64) -> bool {
        kind == 2 || kind != 0 && self.sim.is_none()
    }

    fn queue(
        &mut self,
        raw: Stream,
        range: AddrRange,
        kind: u64,
        ns: u64,
        byte: u8,
    ) -> Result<(), Finding> {
        let Some(sim) = self.sim.clone() else {
            if self.fills(kind) {
                return self.device.fill(raw, range, byte).map_err(words);
            }
            let len = range.len.min(Bytes::new(SLOT));
            let to = HostSlice { buffer: self.buffer, offset: SCRATCH, len };
            return self.device.copy_to_host(raw, range.start, to).map_err(words);
        };
        match kind {
            2 => self.device.fill(raw, range, byte).map_err(words),
            3 if self.has_gates() => {
                let gate = match self.gates.last() {
                    Some(&gate) if ns.is_multiple_of(2) => gate,
                    _ => {
                        self.gates.push(sim.gate());
                        self.gates[self.gates.len() - 1]
                    }
                };
                let kernel = Kernel::new("gated").writing(range).lasting(ns).until(gate);
                sim.launch(raw, kernel).map_err(words)
            }
            0 => sim.launch(raw, Kernel::new("read").reading(range).lasting(ns)).map_err(words),
            _ => sim.launch(raw, Kernel::new("write").writing(range).lasting(ns)).map_err(words),
        }
    }

    /// Returns true if the driver's own pool keeps some memory after a trim, as it does on a card.
    fn card_keeps_memory(&self) -> bool {
        matches!(self.preset, Preset::Vpmm | Preset::StreamOrdered) && self.sim.is_none()
    }

    /// Returns true if no call of the preset waits for work, so that a closed gate hangs nothing.
    fn has_gates(&self) -> bool {
        matches!(self.preset, Preset::Vramp | Preset::Vpmm) && self.sim.is_some()
    }

    fn record_use(&mut self, block: u64, stream: u64) -> Done {
        let Some(state) = self.blocks.get(block) else { return Ok(false) };
        let Some(user) = self.streams.get(stream) else { return Ok(false) };
        if !user.is_open() {
            let recorded = self.subject.record_use(block, stream);
            return self.expect(recorded, &[Why::UnknownStream]);
        }
        let runs = self.runs(stream).is_some();
        if !runs || state.from != From::Pool {
            return Ok(false);
        }
        let recorded = self.subject.record_use(block, stream);
        if self.allow(recorded, &[])?.is_some() {
            let state = self.blocks.get_mut(block).expect("it was found above");
            for user in state.users.iter_mut().filter(|user| user.stream == stream) {
                user.recorded = true;
            }
        }
        Ok(true)
    }

    /// Records the uses of a block that were not: all, or those of one stream.
    fn record_uses(&mut self, block: u64, of: Option<u64>) -> Result<(), Finding> {
        let Some(state) = self.blocks.get(block) else { return Ok(()) };
        let wanted = |user: &&User| {
            user.worked && !user.recorded && of.is_none_or(|stream| stream == user.stream)
        };
        let users: Vec<u64> = state.users.iter().filter(wanted).map(|user| user.stream).collect();
        for stream in users {
            if self.runs(stream).is_some() {
                self.record_use(block, stream)?;
            }
        }
        Ok(())
    }

    fn free(&mut self, block: u64, stream: u64, way: u64) -> Done {
        let (Some(state), Some(on)) = (self.blocks.get(block), self.streams.get(stream)) else {
            return Ok(false);
        };
        if !self.pools.has(state.pool) {
            return Ok(false);
        }
        let (capture, is_open) = (self.capture_of(stream), on.is_open());
        let used_in: Vec<u64> = self
            .captures
            .0
            .iter()
            .filter(|(_, capture)| capture.users.has(block))
            .map(|(name, _)| *name)
            .collect();
        if used_in.iter().any(|used| Some(*used) != capture) {
            return Ok(false);
        }
        if let Some(capture) = capture {
            if self.captures.get(capture).is_some_and(|found| found.invalid) {
                return Ok(false);
            }
            if !self.free_captured(block, stream, capture, way)? {
                return Ok(false);
            }
        } else if state.from == From::Pool
            && !self.settle_uses(block, stream, way == 1 && is_open)?
        {
            return Ok(false);
        }
        let freed = self.subject.free(block, stream, way_of(u64::from(way == 2)));
        match freed {
            Ok(()) => {}
            Err((refused, still_ours)) => {
                self.refused(&refused, &[])?;
                // The driver's pool may still have a block that it did not free.
                self.leaks = true;
                if still_ours {
                    return Ok(true);
                }
            }
        }
        self.forget_block(block);
        Ok(true)
    }

    /// Notes that a block is not the program's any more.
    fn forget_block(&mut self, block: u64) {
        self.blocks.take(block);
        for (_, graph) in &mut self.graphs.0 {
            graph.dead |= graph.uses.contains(&block);
        }
    }

    /// Records or orders the work on a block of a pool, before it is freed on `stream`. Returns
    /// false if that is not possible.
    fn settle_uses(&mut self, block: u64, stream: u64, orders: bool) -> Done {
        let state = self.blocks.get(block).expect("the caller found it");
        let users: Vec<User> = state.users.clone();
        let open = |user: &User| users_work(user, stream);
        for user in users.iter().filter(|user| open(user)) {
            if orders && self.runs(stream).is_some() {
                self.order(user.stream, stream)?;
            } else if self.runs(user.stream).is_some() {
                self.record_use(block, user.stream)?;
                if self.is_faulty() {
                    return Ok(false);
                }
            } else if self.runs(stream).is_some() {
                self.order(user.stream, stream)?;
            } else {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Prepares a free in a capture. Returns false if the rules forbid it.
    fn free_captured(&mut self, block: u64, stream: u64, capture: u64, way: u64) -> Done {
        let state = self.blocks.get(block).expect("the caller found it");
        let capturing = self.captures.get(capture).expect("its streams refer to it");
        match state.from {
            From::Capture(of) if of != capture => return Ok(false),
            // Memory of another pool is not this capture's to keep.
            From::Pool if state.pool != capturing.pool => return Ok(false),
            From::Graph(..) if state.pool != capturing.pool => return Ok(false),
            _ => {}
        }
        let before: Vec<User> = state.users.clone();
        let users = capturing.users.get(block).cloned().unwrap_or_default();
        for user in users.iter().filter(|user| user.worked && user.stream != stream) {
            if way == 1 {
                self.order_captured(user.stream, stream)?;
            } else {
                let recorded = self.subject.record_use(block, user.stream);
                self.allow(recorded, &[])?;
            }
        }
        for user in before.iter().filter(|user| user.worked) {
            if !user.recorded && user.stream != stream {
                let in_capture = self.capture_of(user.stream).is_some();
                let open = self.streams.get(user.stream).is_some_and(StreamState::is_open);
                if !open || in_capture {
                    return Ok(false);
                }
                let recorded = self.subject.record_use(block, user.stream);
                self.allow(recorded, &[])?;
            }
        }
        let capturing = self.captures.get_mut(capture).expect("it was found above");
        capturing.before.extend(before.iter().map(|user| user.stream));
        capturing.users.take(block);
        capturing.fills.retain(|(filled, _)| *filled != block);
        Ok(true)
    }

    fn look(&mut self, block: u64, stream: u64) -> Done {
        let (Some(state), Some(raw)) = (self.blocks.get(block), self.runs(stream)) else {
            return Ok(false);
        };
        let (range, Some(byte), From::Pool) = (state.range, state.byte, state.from) else {
            return Ok(false);
        };
        if !self.stores || range.len < Bytes::new(SLOT) {
            return Ok(false);
        }
        let Some(slot) = self.slots.pop() else { return Ok(false) };
        for user in later_than(&state.users, false) {
            self.order(user, stream)?;
        }
        let half = Bytes::new(SLOT / 2);
        let end = range.start + (range.len - half);
        for (from, offset) in [(range.start, slot * SLOT), (end, slot * SLOT + SLOT / 2)] {
            let to = HostSlice { buffer: self.buffer, offset: Bytes::new(offset), len: half };
            self.device.copy_to_host(raw, from, to).map_err(words)?;
        }
        let done = self.device.create_event().map_err(words)?;
        self.device.record(done, raw).map_err(words)?;
        self.looks.push(Look { slot, byte, done, block });
        let state = self.blocks.get_mut(block).expect("it was found above");
        note(&mut state.users, stream, false);
        self.counts.looks += 1;
        Ok(true)
    }

    fn sync(&mut self) -> Done {
        if self.has_strict_capture() {
            return Ok(false);
        }
        self.open_gates();
        for (_, state) in &self.streams.0 {
            if let Some(end) = state.end {
                self.device.synchronize_event(end).map_err(words)?;
            } else if state.capture.is_none() {
                self.device.synchronize_stream(state.raw).map_err(words)?;
            }
        }
        let synced: Vec<u64> = self
            .streams
            .0
            .iter()
            .filter(|(_, state)| state.capture.is_none())
            .map(|(name, _)| *name)
            .collect();
        for (_, block) in &mut self.blocks.0 {
            block.users.retain(|user| !synced.contains(&user.stream));
        }
        for (_, range) in &mut self.ranges.0 {
            range.users.retain(|user| !synced.contains(&user.stream));
        }
        self.compare()?;
        Ok(true)
    }

    fn compare(&mut self) -> Result<(), Finding> {
        for look in std::mem::take(&mut self.looks) {
            self.device.synchronize_event(look.done).map_err(words)?;
            self.device.destroy_event(look.done).map_err(words)?;
            let mut bytes = [0; SLOT as usize];
            let offset = Bytes::new(look.slot * SLOT);
            self.device.read_host(self.buffer, offset, &mut bytes).map_err(words)?;
            self.slots.push(look.slot);
            if let Some(wrong) = bytes.iter().find(|byte| **byte != look.byte) {
                let Look { block, byte, .. } = look;
                return Err(format!("block {block} holds {wrong} where {byte} was written"));
            }
        }
        Ok(())
    }

    fn open_gates(&mut self) -> bool {
        let Some(sim) = &self.sim else { return false };
        self.gates.drain(..).map(|gate| sim.open(gate)).count() > 0
    }

    fn trim(&mut self, pool: u64, to: u64) -> Done {
        if !self.pools.has(pool) || self.has_strict_capture() && self.preset.is_torch() {
            return Ok(false);
        }
        let trimmed = self.subject.trim(pool, Bytes::new(to));
        self.allow(trimmed, &[]).map(|_| true)
    }

    // --- callbacks ---

    fn handle(&mut self, pool: u64, observer: u64, kind: u64, block: u64, stream: u64) -> Done {
        if !self.pools.has(pool) || self.runs(stream).is_none() || !self.subject.has_ranges() {
            return Ok(false);
        }
        let mut stash = Vec::new();
        let found = self.blocks.get(block);
        if let Some(Block { pool: of, from: From::Pool, .. }) = found
            && *of == pool
            && kind == 1
            && self.captures.len() == 0
        {
            if !self.settle_uses(block, stream, false)? {
                return Ok(false);
            }
            stash.push(block);
            self.forget_block(block);
        }
        let how = match kind {
            2 => Reaction::Trim,
            3 => Reaction::Panic,
            _ => Reaction::Count,
        };
        let handled = self.subject.handle((pool, observer), how, &stash, stream);
        if self.allow(handled, &[])?.is_some() {
            self.observers.add(observer, pool);
        }
        Ok(true)
    }

    // --- arenas, captures, graphs ---

    fn arena(&mut self, pool: u64, arena: u64, (monotone, order, mode): (u64, u64, u64)) -> Done {
        if !self.pools.has(pool) {
            return Ok(false);
        }
        let mode = mode_of(mode);
        let choice = ArenaChoice { monotone: monotone == 1, order: order == 1, mode };
        let made = self.subject.arena(pool, arena, choice);
        if self.preset != Preset::Vramp {
            return self.expect(made, &[Why::NotSupported]);
        }
        if self.allow(made, &[Why::OutOfMemory])?.is_some() {
            let state = Arena { pool, mode, users: Vec::new(), unguarded: false, dropped: false };
            self.arenas.add(arena, state);
        }
        Ok(true)
    }

    fn drop_arena(&mut self, arena: u64, way: u64) -> Done {
        match self.arenas.get_mut(arena) {
            Some(state) if !state.dropped => state.dropped = true,
            _ => return Ok(false),
        }
        let dropped = self.subject.drop_arena(arena, way_of(way));
        self.allow(dropped, &[]).map(|_| true)
    }

    /// Records an event before the stream captures, for the work that ran on it.
    fn enter(&mut self, stream: u64, capture: u64, before: Event) {
        if let Some(state) = self.streams.get_mut(stream) {
            state.capture = Some((capture, before));
        }
    }

    fn begin(
        &mut self,
        arena: u64,
        stream: u64,
        capture: u64,
        attach: Option<CaptureMode>,
    ) -> Done {
        let (Some(state), Some(on)) = (self.arenas.get(arena), self.streams.get(stream)) else {
            return Ok(false);
        };
        let (pool, mode) = (state.pool, attach.unwrap_or(state.mode));
        let closed = !self.pools.has(pool);
        if state.dropped || closed {
            return Ok(false);
        }
        let busy = self.captures.0.iter().any(|(_, capture)| capture.arena == arena);
        if busy || !on.is_open() || on.capture.is_some() {
            if attach.is_some() {
                return Ok(false);
            }
            let expected: &[Why] = match (busy, on.is_open()) {
                (true, true) => &[Why::Busy],
                (true, false) => &[Why::Busy, Why::UnknownStream],
                (false, false) => &[Why::UnknownStream],
                // The memory may be too short before the driver refuses.
                (false, true) => &[Why::Capturing, Why::Driver, Why::OutOfMemory],
            };
            let begun = self.subject.begin(arena, stream, capture);
            return self.expect(begun, expected);
        }
        let raw = on.raw;
        let before = self.device.create_event().map_err(words)?;
        self.device.record(before, raw).map_err(words)?;
        let begun = match attach {
            None => self.subject.begin(arena, stream, capture),
            Some(mode) => {
                self.device.begin_capture(raw, mode).map_err(words)?;
                self.subject.attach(arena, stream, capture)
            }
        };
        if self.allow(begun, &[Why::OutOfMemory, Why::Arena])?.is_none() {
            if attach.is_some() {
                let graph = self.device.end_capture(raw).map_err(words)?;
                self.device.destroy_graph(graph).map_err(words)?;
            }
            self.device.destroy_event(before).map_err(words)?;
            return Ok(true);
        }
        self.enter(stream, capture, before);
        if let (Some(_), Some(arena)) = (attach, self.arenas.get_mut(arena)) {
            arena.unguarded = true;
        }
        let state = Capture {
            pool,
            arena,
            origin: stream,
            streams: vec![stream],
            attached: attach.is_some(),
            mode,
            invalid: false,
            users: Named::default(),
            before: Vec::new(),
            fills: Vec::new(),
        };
        self.captures.add(capture, state);
        Ok(true)
    }

    fn fork(&mut self, capture: u64, from: u64, stream: u64) -> Done {
        let Some(state) = self.captures.get(capture) else { return Ok(false) };
        let Some(raw) = self.runs(stream) else { return Ok(false) };
        let goes_on = self.capture_of(from) == Some(capture);
        if state.invalid || !goes_on {
            return Ok(false);
        }
        let before = self.device.create_event().map_err(words)?;
        self.device.record(before, raw).map_err(words)?;
        self.order_captured(from, stream)?;
        self.enter(stream, capture, before);
        let state = self.captures.get_mut(capture).expect("it was found above");
        state.streams.push(stream);
        Ok(true)
    }

    /// Ends the capture of its streams for the program.
    fn leave(&mut self, capture: u64) -> Result<Option<Capture>, Finding> {
        let Some(state) = self.captures.take(capture) else { return Ok(None) };
        let own = |stream: &u64| self.capture_of(*stream) == Some(capture);
        let streams = state.streams.iter().copied().filter(own).collect();
        self.release(streams);
        Ok(Some(state))
    }

    /// Notes that streams are part of no capture any more.
    fn release(&mut self, streams: Vec<u64>) {
        for stream in streams {
            if let Some(stream) = self.streams.get_mut(stream)
                && let Some((_, before)) = stream.capture.take()
            {
                self.events.push(before);
            }
        }
    }

    fn captures_now(&self, raw: Stream) -> bool {
        self.device.is_capturing(raw).unwrap_or(false)
    }

    /// Gives the blocks of a capture that is over to its graph.
    fn escape(&mut self, capture: u64, arena: u64, graph: Option<u64>) {
        for (_, block) in &mut self.blocks.0 {
            if block.from == From::Capture(capture) {
                block.from = From::Graph(arena, graph);
            }
        }
    }

    fn end(&mut self, capture: u64, way: u64, graph: u64) -> Done {
        let Some(state) = self.captures.get(capture) else { return Ok(false) };
        let (origin, arena, pool) = (state.origin, state.arena, state.pool);
        let (attached, mode, mut invalid) = (state.attached, state.mode, state.invalid);
        let closed = !self.pools.has(pool);
        let others: Vec<u64> = state.streams[1..].to_vec();
        // Closing its pool ended it, or tried to.
        if closed || self.capture_of(origin) != Some(capture) {
            if attached {
                return self.discard(capture, Way::Here);
            }
            let ended = self.subject.end(capture, graph, Way::Here);
            // A pool that was dropped may have left the driver's capture open.
            if self.capture_of(origin) == Some(capture)
                && let Some(raw) = self.raw(origin)
            {
                self.end_left(raw)?;
            }
            self.leave(capture)?;
            self.escape(capture, arena, None);
            return self.expect(ended, &[Why::Over, Why::Invalidated, Why::Closed]);
        }
        if way == 2 && mode != CaptureMode::Relaxed && !attached {
            let ended = self.subject.end(capture, graph, Way::Elsewhere);
            return self.expect(ended, &[Why::OtherThread]);
        }
        // A forked stream without work of its own need not be joined.
        let unjoined = way == 1 && !others.is_empty();
        if unjoined {
            invalid = true;
        } else if !invalid {
            for other in &others {
                self.order_captured(*other, origin)?;
            }
        }
        let raw = self.raw(origin).expect("a capturing stream cannot be destroyed");
        let mut exec = None;
        let ended = if attached {
            let driver_graph = self.device.end_capture(raw);
            let detached = self.subject.detach(capture, graph);
            match driver_graph {
                Ok(driver_graph) if detached.is_ok() => {
                    exec = Some(self.device.instantiate(driver_graph).map_err(words)?);
                    self.device.destroy_graph(driver_graph).map_err(words)?;
                    detached
                }
                Ok(driver_graph) => {
                    self.device.destroy_graph(driver_graph).map_err(words)?;
                    detached
                }
                Err(_) if invalid => {
                    // The hold is dropped, for there is no graph.
                    let dropped = self.subject.drop_graph(graph, Way::Here);
                    detached
                        .and(dropped)
                        .and(Err(Refused { why: Why::Invalidated, text: String::new() }))
                }
                Err(error) => return Err(words(error)),
            }
        } else {
            self.subject.end(capture, graph, way_of(u64::from(way == 2)))
        };
        let ok = match (ended, invalid) {
            (Ok(()), true) if self.is_faulty() || unjoined => true,
            (Ok(()), true) => return Err("an invalidated capture made a graph".to_owned()),
            (ended, true) => {
                self.expect(ended, &[Why::Invalidated])?;
                false
            }
            (ended, false) => self.allow(ended, &[])?.is_some(),
        };
        self.end_left(raw)?;
        let Some(state) = self.leave(capture)? else { return Ok(true) };
        self.escape(capture, arena, ok.then_some(graph));
        if ok {
            let outside = |block: &u64| {
                let from = self.blocks.get(*block).map(|block| block.from);
                from == Some(From::Pool)
            };
            let uses: Vec<u64> = state.users.names().into_iter().filter(outside).collect();
            let Capture { mut before, fills, origin, .. } = state;
            // Its memory is ready in the order of the stream that the arena was attached on.
            if attached && !before.contains(&origin) {
                before.push(origin);
            }
            let state = Graph { pool, arena, uses, before, fills, exec, attached, dead: false };
            self.graphs.add(graph, state);
        }
        Ok(true)
    }

    /// Ends the driver's capture of a stream if the subject could not.
    fn end_left(&self, raw: Stream) -> Result<(), Finding> {
        if self.device.is_capturing(raw).map_err(words)?
            && let Ok(graph) = self.device.end_capture(raw)
        {
            self.device.destroy_graph(graph).map_err(words)?;
        }
        Ok(())
    }

    fn discard(&mut self, capture: u64, way: Way) -> Done {
        let Some(state) = self.captures.get(capture) else { return Ok(false) };
        let (origin, arena) = (state.origin, state.arena);
        let raw = self.raw(origin);
        let discarded = self.subject.discard(capture, way);
        self.allow(discarded, &[])?;
        // The stream is gone with its group if the pool was dropped.
        if let Some(raw) = raw
            && self.capture_of(origin) == Some(capture)
            && self.captures_now(raw)
            && let Ok(graph) = self.device.end_capture(raw)
        {
            self.device.destroy_graph(graph).map_err(words)?;
        }
        self.leave(capture)?;
        self.escape(capture, arena, None);
        Ok(true)
    }

    fn invalidate(&mut self, capture: u64) -> Done {
        let Some(state) = self.captures.get(capture) else { return Ok(false) };
        if state.mode == CaptureMode::Relaxed {
            return Ok(false);
        }
        let event = self.device.create_event().map_err(words)?;
        let origin = self.raw(state.origin);
        if let Some((_, running)) =
            self.streams.0.iter().find(|(_, state)| state.is_open() && state.capture.is_none())
        {
            self.device.record(event, running.raw).map_err(words)?;
        }
        let queried = self.device.query(event);
        self.device.destroy_event(event).map_err(words)?;
        let _ = (queried, origin);
        let broken: Vec<u64> = self
            .captures
            .0
            .iter()
            .filter(|(_, capture)| {
                self.raw(capture.origin).is_none_or(|raw| self.device.capture_info(raw).is_err())
            })
            .map(|(name, _)| *name)
            .collect();
        for (name, capture) in &mut self.captures.0 {
            capture.invalid |= broken.contains(name);
        }
        Ok(!broken.is_empty())
    }

    fn launch(&mut self, graph: u64, stream: u64, lease: u64) -> Done {
        let (Some(state), Some(on)) = (self.graphs.get(graph), self.streams.get(stream)) else {
            return Ok(false);
        };
        let (arena, pool, attached) = (state.arena, state.pool, state.attached);
        let (exec, dead) = (state.exec, state.dead);
        if !self.pools.has(pool) {
            if attached {
                return Ok(false);
            }
            let launched = self.subject.launch(graph, stream, lease);
            return self.expect(launched, &[Why::Closed]);
        }
        if dead {
            return Ok(false);
        }
        if !on.is_open() || on.capture.is_some() {
            if attached {
                return Ok(false);
            }
            let why = if on.is_open() { Why::Capturing } else { Why::UnknownStream };
            let launched = self.subject.launch(graph, stream, lease);
            return self.expect(launched, &[why]);
        }
        let raw = on.raw;
        let (uses, before) = (state.uses.clone(), state.before.clone());
        let fills = state.fills.clone();
        for block in &uses {
            let users = self.blocks.get(*block).map(|block| later_than(&block.users, true));
            for user in users.unwrap_or_default() {
                self.order(user, stream)?;
            }
        }
        for user in before {
            self.order(user, stream)?;
        }
        let shared = self.arenas.get(arena);
        let unguarded = shared.is_some_and(|arena| arena.unguarded);
        if unguarded {
            for user in shared.map(|arena| arena.users.clone()).unwrap_or_default() {
                self.order(user, stream)?;
            }
        }
        if attached {
            let Some(exec) = exec else { return Ok(false) };
            self.device.launch_graph(exec, raw).map_err(words)?;
        } else {
            let launched = self.subject.launch(graph, stream, lease);
            // No stream can wait for what ran on another one before it began to capture.
            let captures = self.streams.0.iter().any(|(_, state)| state.capture.is_some());
            let busy = [Why::Busy, Why::OutOfMemory, Why::Capturing];
            let busy = if captures { &busy[..] } else { &busy[..2] };
            if self.allow(launched, busy)?.is_none() {
                return Ok(true);
            }
            self.leases.add(lease, Lease { graph, arena, stream });
        }
        for block in uses {
            if let Some(block) = self.blocks.get_mut(block) {
                note(&mut block.users, stream, true);
            }
        }
        for (block, byte) in fills {
            if let Some(block) = self.blocks.get_mut(block) {
                block.byte = Some(byte);
            }
        }
        if let Some(arena) = self.arenas.get_mut(arena) {
            arena.users = vec![stream];
        }
        Ok(true)
    }

    fn read(&mut self, lease: u64, block: u64, stream: u64, ns: u64) -> Done {
        let (Some(held), Some(state), Some(raw)) =
            (self.leases.get(lease), self.blocks.get(block), self.runs(stream))
        else {
            return Ok(false);
        };
        let (of, arena, range) = (held.stream, held.arena, state.range);
        // A stream that was destroyed, or captures, does not order what comes after the lease.
        if state.from != From::Graph(arena, Some(held.graph)) || !self.pools.has(state.pool) {
            return Ok(false);
        }
        if self.runs(of).is_none() || self.graphs.get(held.graph).is_none() {
            return Ok(false);
        }
        self.order(of, stream)?;
        // No lease orders launches that the allocator does not make.
        let shared = self.arenas.get(arena).filter(|arena| arena.unguarded);
        for user in shared.map(|arena| arena.users.clone()).unwrap_or_default() {
            self.order(user, stream)?;
        }
        self.queue(raw, range, 0, ns, 0)?;
        if of != stream {
            let recorded = self.subject.record_use(block, stream);
            self.allow(recorded, &[])?;
        }
        if let Some(arena) = self.arenas.get_mut(arena) {
            arena.users.push(stream);
        }
        Ok(true)
    }

    fn drop_graph(&mut self, graph: u64, way: u64) -> Done {
        let Some(state) = self.graphs.take(graph) else { return Ok(false) };
        if let (Some(exec), true) = (state.exec, graph.is_multiple_of(2)) {
            self.device.destroy_graph_exec(exec).map_err(words)?;
        }
        let dropped = self.subject.drop_graph(graph, way_of(way));
        self.allow(dropped, &[])?;
        if let (Some(exec), false) = (state.exec, graph.is_multiple_of(2)) {
            self.device.destroy_graph_exec(exec).map_err(words)?;
        }
        for (_, block) in &mut self.blocks.0 {
            if block.from == From::Graph(state.arena, Some(graph)) {
                block.from = From::Graph(state.arena, None);
            }
        }
        Ok(true)
    }

    // --- stable ranges ---

    fn back(&mut self, range: u64, stream: u64) -> Done {
        let (Some(state), Some(on)) = (self.ranges.get(range), self.streams.get(stream)) else {
            return Ok(false);
        };
        let (closed, open) = (!self.pools.has(state.pool), on.is_open());
        let (hosted, capturing) = (state.hosted > Bytes::ZERO, on.capture.is_some());
        if capturing || (self.pools.len() == 0) {
            return Ok(false);
        }
        let backed = self.subject.back(range, stream);
        if closed {
            return self.expect(backed, &[Why::Closed]);
        }
        if !open {
            return self.expect(backed, &[Why::UnknownStream]);
        }
        if hosted {
            return self.expect(backed, &[Why::Occupied]);
        }
        if self.allow(backed, &[Why::OutOfMemory])?.is_some() {
            let state = self.ranges.get_mut(range).expect("it was found above");
            if !state.backed {
                state.users.push(User { stream, worked: true, writes: true, recorded: false });
            }
            state.backed = true;
        }
        Ok(true)
    }

    fn work_range(&mut self, range: u64, stream: u64, kind: u64, ns: u64) -> Done {
        let (Some(state), Some(raw)) = (self.ranges.get(range), self.runs(stream)) else {
            return Ok(false);
        };
        if !self.pools.has(state.pool) {
            return Ok(false);
        }
        let part = match (state.backed, state.hosted) {
            (true, Bytes::ZERO) => state.range,
            (false, hosted) if hosted > Bytes::ZERO => AddrRange::new(state.range.start, hosted),
            _ => return Ok(false),
        };
        for user in later_than(&state.users, kind != 0) {
            self.order(user, stream)?;
        }
        self.queue(raw, part, kind, ns, byte_of(range, ns))?;
        let state = self.ranges.get_mut(range).expect("it was found above");
        note(&mut state.users, stream, kind != 0);
        Ok(true)
    }

    /// Waits until the host has seen the work on a range complete. Returns false if a capture
    /// forbids it.
    fn see_range(&mut self, range: u64) -> Done {
        if self.has_strict_capture() {
            return Ok(false);
        }
        self.open_gates();
        let Some(state) = self.ranges.get(range) else { return Ok(false) };
        for user in &state.users {
            let Some(stream) = self.streams.get(user.stream) else { continue };
            let recorded = stream.end.or(stream.capture.map(|(_, before)| before));
            match recorded {
                Some(event) => self.device.synchronize_event(event).map_err(words)?,
                None => self.device.synchronize_stream(stream.raw).map_err(words)?,
            }
        }
        let state = self.ranges.get_mut(range).expect("it was found above");
        state.users.clear();
        Ok(true)
    }

    fn lend(&mut self, range: u64) -> Done {
        let pool = self.ranges.get(range).map(|state| state.pool);
        if pool.is_none_or(|pool| !self.pools.has(pool)) || !self.see_range(range)? {
            return Ok(false);
        }
        let lent = self.subject.lend(range);
        self.allow(lent, &[])?;
        if let Some(state) = self.ranges.get_mut(range) {
            state.backed = false;
        }
        Ok(true)
    }

    fn host(&mut self, range: u64, len: u64) -> Done {
        let Some(state) = self.ranges.get(range) else { return Ok(false) };
        let len = Bytes::new(len).min(state.range.len);
        if !self.pools.has(state.pool) || state.hosted > Bytes::ZERO {
            return Ok(false);
        }
        let mapped = self.subject.host(range, len);
        if self.allow(mapped, &[Why::Occupied, Why::NotSupported])?.is_some() {
            let state = self.ranges.get_mut(range).expect("it was found above");
            if state.backed {
                return Err("host memory was mapped over memory in use".to_owned());
            }
            state.hosted = len;
        }
        Ok(true)
    }

    fn unhost(&mut self, range: u64) -> Done {
        let Some(state) = self.ranges.get(range) else { return Ok(false) };
        let hosted = state.hosted;
        if hosted.is_zero() || !self.pools.has(state.pool) || !self.see_range(range)? {
            return Ok(false);
        }
        let unmapped = self.subject.unhost(range, hosted);
        if self.allow(unmapped, &[])?.is_some() {
            let state = self.ranges.get_mut(range).expect("it was found above");
            state.hosted = Bytes::ZERO;
        }
        Ok(true)
    }

    fn record_range_uses(&mut self, range: u64, of: Option<u64>) -> Result<(), Finding> {
        let Some(state) = self.ranges.get_mut(range) else { return Ok(()) };
        let mut users = Vec::new();
        for user in &mut state.users {
            if user.worked && !user.recorded && of.is_none_or(|stream| stream == user.stream) {
                user.recorded = true;
                users.push(user.stream);
            }
        }
        for stream in users {
            let used = self.subject.use_range(range, stream);
            self.allow(used, &[])?;
        }
        Ok(())
    }

    fn drop_range(&mut self, range: u64, way: u64) -> Done {
        let Some(state) = self.ranges.get(range) else { return Ok(false) };
        if self.pools.has(state.pool) {
            if state.users.iter().any(|user| self.capture_of(user.stream).is_some()) {
                return Ok(false);
            }
            self.record_range_uses(range, None)?;
        }
        self.ranges.take(range);
        let dropped = self.subject.drop_range(range, way_of(way));
        self.allow(dropped, &[]).map(|_| true)
    }

    // --- mistakes ---

    fn misuse(&mut self, kind: u64, pool: u64, object: u64) -> Done {
        if !self.pools.has(pool) {
            return Ok(false);
        }
        let never = u64::MAX;
        match kind {
            0 => {
                let placed = self.subject.malloc((pool, never), Bytes::kib(4), object, false);
                self.expect(placed, &[Why::UnknownStream])
            }
            1 => {
                let destroyed = self.subject.destroy_stream(pool, never);
                self.expect(destroyed, &[Why::UnknownStream])
            }
            2 => {
                if !self.blocks.has(object) {
                    return Ok(false);
                }
                match self.subject.free(object, never, Way::Here) {
                    Err((Refused { why: Why::UnknownStream, .. }, true)) => Ok(true),
                    Err((Refused { why, text }, still)) => {
                        Err(format!("{why:?} ({text}), still the caller's: {still}"))
                    }
                    Ok(()) => Err("freed on a stream that never was".to_owned()),
                }
            }
            3 => {
                if !self.blocks.has(object) {
                    return Ok(false);
                }
                let recorded = self.subject.record_use(object, never);
                self.expect(recorded, &[Why::UnknownStream])
            }
            _ => {
                // More than any card has.
                let Some((stream, _)) = self.streams.0.iter().find(|(_, state)| state.is_open())
                else {
                    return Ok(false);
                };
                let stream = *stream;
                if self.capture_of(stream).is_some() {
                    return Ok(false);
                }
                let size = Bytes::gib(1 << 20);
                let placed = self.subject.malloc((pool, stream), size, object, false);
                self.expect(placed, &[Why::OutOfMemory])
            }
        }
    }

    // --- the end ---

    /// Ends everything, and checks that nothing is left.
    ///
    /// # Errors
    /// A promise was broken.
    pub(super) fn finish(&mut self) -> Result<(), Finding> {
        let finished = catch_unwind(AssertUnwindSafe(|| self.end_all()));
        finished.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
            Err(format!("at the end, a panic: {}", text.unwrap_or_default()))
        })
    }

    fn end_all(&mut self) -> Result<(), Finding> {
        self.tap.cancel();
        self.fired = self.tap.fired();
        self.open_gates();
        for observer in self.observers.names() {
            self.perform(&Op::Unobserve { observer })?;
        }
        for capture in self.captures.names() {
            self.discard(capture, Way::Here)?;
        }
        for lease in self.leases.names() {
            self.perform(&Op::EndLease { lease, way: 0 })?;
        }
        for graph in self.graphs.names() {
            self.drop_graph(graph, 0)?;
        }
        for range in self.ranges.names() {
            self.drop_range(range, 0)?;
        }
        for arena in self.arenas.names() {
            self.drop_arena(arena, 0)?;
        }
        self.check(true)?;
        self.free_all()?;
        self.check(true)?;
        let lost = self.leaks || self.tap.lost_something();
        self.sync()?;
        self.check(true)?;
        for pool in self.pools.names() {
            let trimmed = self.subject.trim(pool, Bytes::ZERO);
            self.allow(trimmed, &[])?;
        }
        for pool in self.pools.names() {
            let usage = self.subject.usage(pool);
            if let Some((live, reserved)) = self.allow(usage, &[])?
                && !lost
                && self.blocks.len() == 0
                && (!live.is_zero() || !reserved.is_zero() && !self.card_keeps_memory())
            {
                return Err(format!(
                    "all is freed and trimmed, and pool {pool} has {live} live, {reserved} reserved"
                ));
            }
        }
        for pool in self.pools.names() {
            self.end_pool(pool, 0)?;
            self.check(true)?;
        }
        self.subject.drop_all();
        self.check(false)?;
        self.compare()?;
        for event in self.events.drain(..) {
            self.device.destroy_event(event).map_err(words)?;
        }
        match self.device.free_host(self.buffer) {
            // A graph that stays behind copies to it.
            Err(_) if lost => {}
            freed => freed.map_err(words)?,
        }
        if let Some(sim) = &self.sim
            && !lost
        {
            let live = sim.live();
            if live != self.before {
                return Err(format!("left on the device: {live:?}"));
            }
        }
        Ok(())
    }

    fn free_all(&mut self) -> Result<(), Finding> {
        for block in self.blocks.names() {
            let Some(state) = self.blocks.get(block) else { continue };
            // On a stream that may free it: one that used it last, or any that is open.
            let own = state.users.iter().find(|user| user.worked && !user.recorded);
            let own = own.map(|user| user.stream);
            let any = self.streams.0.iter().find(|(_, stream)| stream.is_open());
            let any = any.or(self.streams.0.first()).map(|(name, _)| *name);
            let Some(stream) = any.or(own) else { continue };
            if !self.free(block, stream, 0)?
                && let Some(own) = own
            {
                self.free(block, own, 0)?;
            }
        }
        Ok(())
    }
}

/// Returns true if work of another stream than `stream` is neither recorded nor over.
fn users_work(user: &User, stream: u64) -> bool {
    user.worked && !user.recorded && user.stream != stream
}

/// Returns the streams that later work on the memory is ordered after.
fn later_than(users: &[User], writes: bool) -> Vec<u64> {
    users.iter().filter(|user| writes || user.writes).map(|user| user.stream).collect()
}

/// Notes work of a stream, which was ordered after the users it conflicts with.
fn note(users: &mut Vec<User>, stream: u64, writes: bool) {
    if writes {
        users.clear();
    }
    match users.iter_mut().find(|user| user.stream == stream) {
        Some(user) => {
            user.worked = true;
            user.recorded = false;
        }
        None => users.push(User { stream, worked: true, writes, recorded: false }),
    }
}

fn overlaps(one: AddrRange, other: AddrRange) -> bool {
    let end = |range: AddrRange| range.start.number() + range.len.count();
    let start = |range: AddrRange| DeviceAddr::number(range.start);
    start(one) < end(other) && start(other) < end(one)
}

fn byte_of(name: u64, ns: u64) -> u8 {
    (name.wrapping_mul(31) ^ ns).wrapping_add(1) as u8
}
