//! Performs operations, and keeps what a well-behaved user knows: who works on which memory, what
//! depends on what, and which calls are to be refused.
//!
//! The rules that the user keeps are those of the allocator's documentation and of
//! `docs/background/life-cycles.md`. An operation that would break one is changed so that it keeps it (work
//! is ordered after earlier work, uses are recorded), or does nothing.

mod blocks;
mod caches;
mod captures;
mod end;
mod model;
mod pools;
mod ranges;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use vramp::graph::CaptureMode;
use vramp::peers::Preset;
use vramp::{Bytes, DeviceAddr, Driver, DriverError};
use vramp_core::AddrRange;
use vramp_driver::sim::{Gate, LiveObjects, Simulator};
use vramp_driver::wrapper::Wrapped;
use vramp_driver::{Call, Event, HostBuffer};

use super::op::Op;
use super::subject::{Outcome, Planned, Reaction, Refused, Subject, Way, Why};
use super::tap::{Ground, Tap};

use model::{Arena, Block, Cache, Capture, Graph, Lease, Look, Range, StreamState};
pub(super) use model::{From, Named};

/// What a program found, in words.
pub type Finding = String;

/// Result of an operation: false if it did nothing.
type Done = Result<bool, Finding>;

/// The pool that programs of several threads share. It ends after them.
pub(super) const SHARED: u64 = 0;

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
    device: Arc<dyn Driver>,
    sim: Option<Arc<Simulator>>,
    tap: Arc<Wrapped<Tap>>,
    preset: Preset,
    /// True if bytes are stored and compared.
    stores: bool,
    /// True if programs of other threads use the pool [`SHARED`] and its streams too.
    shared: bool,
    pub(super) pools: Named<()>,
    pub(super) streams: Named<StreamState>,
    pub(super) blocks: Named<Block>,
    pub(super) arenas: Named<Arena>,
    pub(super) captures: Named<Capture>,
    pub(super) graphs: Named<Graph>,
    pub(super) leases: Named<Lease>,
    pub(super) ranges: Named<Range>,
    pub(super) caches: Named<Cache>,
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
        ground: Ground,
        preset: Preset,
    ) -> Result<World, Finding> {
        let Ground { device, sim, tap, stores } = ground;
        let before = sim.as_ref().map(|sim| sim.live()).unwrap_or_default();
        let buffer = device.alloc_host(SCRATCH + Bytes::new(SLOT)).map_err(words)?;
        Ok(World {
            subject,
            device,
            sim,
            tap,
            preset,
            stores,
            shared: false,
            pools: Named::default(),
            streams: Named::default(),
            blocks: Named::default(),
            arenas: Named::default(),
            captures: Named::default(),
            graphs: Named::default(),
            leases: Named::default(),
            ranges: Named::default(),
            caches: Named::default(),
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

    /// Returns the state before a program whose subject has the pool [`SHARED`].
    ///
    /// # Errors
    /// As of [`World::new`].
    pub(super) fn sharing(
        subject: Box<dyn Subject>,
        ground: Ground,
        preset: Preset,
    ) -> Result<World, Finding> {
        let mut world = World::new(subject, ground, preset)?;
        world.shared = true;
        world.pools.add(SHARED, ());
        Ok(world)
    }

    /// Returns true if the preset has arenas and ranges.
    pub(super) fn has_graphs(&self) -> bool {
        self.preset == Preset::Vramp
    }

    /// Returns true if something stays behind legitimately.
    pub(super) fn leaks(&self) -> bool {
        self.leaks || self.blocks.len() > 0
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
            self.check_caches()?;
        }
        Ok(())
    }

    /// Returns the mode of this number. The global one forbids calls to other threads.
    fn mode_of(&self, number: u64) -> CaptureMode {
        match CaptureMode::ALL[number as usize % CaptureMode::ALL.len()] {
            CaptureMode::Global if self.shared => CaptureMode::ThreadLocal,
            mode => mode,
        }
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
        let is_reported = |allowed: &Why| self.subject.reported(*allowed) == *why;
        let is_allowed = allowed.contains(why) || allowed.iter().any(is_reported);
        match why {
            Why::OutOfMemory if is_allowed => self.counts.out_of_memory += 1,
            _ if is_allowed => self.counts.refused += 1,
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
        if !self.subject.can(op) {
            return Ok(false);
        }
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
                self.begin(arena, stream, capture, Some(self.mode_of(mode)))
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
            Op::Cache { pool, cache, pages, shape } => self.cache(pool, cache, pages, shape),
            Op::Commit { cache, stream, pages } => self.commit(cache, stream, pages),
            Op::Take { cache, stream, count } => self.take(cache, stream, count),
            Op::WorkCache { cache, stream, pages, kind, ns } => {
                self.work_cache(cache, stream, pages, (kind, ns))
            }
            Op::Park { cache, stream, pages, way } => self.park(cache, stream, pages, way),
            Op::Release { cache, keep } => self.release_cache(cache, keep),
            Op::DropCache { cache, way } => self.drop_cache(cache, way),
            Op::Observe { pool, observer, kind, stream } => {
                let own = !self.shared || pool != SHARED;
                if !self.pools.has(pool) || !self.streams.has(stream) || !own {
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
            Op::Fault { call, nth, code, times } => {
                let call = Call::ALL.get(call as usize).copied();
                self.tap.fail(call, nth, code as i32, times);
                Ok(true)
            }
            Op::NoFault {} => {
                self.tap.cancel();
                Ok(true)
            }
            Op::Misuse { kind, pool, object } => self.misuse(kind, pool, object),
        }
    }

    fn handle(&mut self, pool: u64, observer: u64, kind: u64, block: u64, stream: u64) -> Done {
        let own = !self.shared || pool != SHARED;
        if !self.pools.has(pool) || !own || self.runs(stream).is_none() {
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
}

fn overlaps(one: AddrRange, other: AddrRange) -> bool {
    let end = |range: AddrRange| range.start.number() + range.len.count();
    let start = |range: AddrRange| DeviceAddr::number(range.start);
    start(one) < end(other) && start(other) < end(one)
}

fn byte_of(name: u64, ns: u64) -> u8 {
    (name.wrapping_mul(31) ^ ns).wrapping_add(1) as u8
}
