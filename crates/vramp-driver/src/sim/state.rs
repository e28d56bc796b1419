//! The simulated device behind its lock: what every call goes through, and work being carried out.

use std::collections::HashMap;
use std::ops::Range;

use vramp_core::{AddrRange, Bytes, DeviceAddr};

use super::bytes::Backing;
use super::bytes::Content;
use super::cost::{CostTable, Rates};
use super::fault::{FaultPlan, Faults};
use super::hazard::{Body, Checker, Hazard, Part, Stamp};
use super::host::HostBuffers;
use super::log::{Log, LoggedCall};
use super::memory::Memory;
use super::pool::{POOL_BASE, Pool};
use super::refusal::{Outcome, Refusal};
use super::streams::{Effect, Gate, Kernel, Point, Step, Streams, Work};
use super::{Fault, LiveObjects};
use crate::{Call, Capabilities, DriverError, Limits, Result, Stream};

/// How much is moved at once when bytes are copied.
const COPY_STEP: u64 = 1 << 20;

#[derive(Clone, Debug)]
pub(super) struct Config {
    pub backing: Backing,
    pub seed: u64,
    pub checker: bool,
    pub log_capacity: usize,
    pub faults: FaultPlan,
    pub costs: CostTable,
}

#[derive(Debug)]
pub(super) struct State {
    pub now_ns: u64,
    pub costs: CostTable,
    pub memory: Memory,
    pub streams: Streams,
    pub host: HostBuffers,
    pub pool: Pool,
    pub log: Log,
    pub calls: [u64; Call::ALL.len()],
    pub checker: Option<Checker>,
    /// The last record of each event; `None` inside if never recorded.
    pub events: HashMap<u64, Option<Point>>,
    pub events_made: u64,
    capabilities: Capabilities,
    backing: Backing,
    pool_content: Content,
    faults: Faults,
    seed: u64,
    /// The call before the one under way.
    previous: Option<Call>,
    lost: Option<Fault>,
}

impl State {
    pub fn new(limits: Limits, space: Bytes, capabilities: Capabilities, config: Config) -> State {
        State {
            now_ns: 0,
            memory: Memory::new(limits.page, limits.memory, space),
            streams: Streams::default(),
            host: HostBuffers::default(),
            pool: Pool::new(config.costs.pool().granule),
            log: Log::keeping(config.log_capacity),
            calls: [0; Call::ALL.len()],
            checker: config.checker.then(Checker::default),
            events: HashMap::new(),
            events_made: 0,
            capabilities,
            backing: config.backing,
            pool_content: Content::default(),
            faults: Faults::new(config.faults, config.seed),
            seed: config.seed,
            previous: None,
            lost: None,
            costs: config.costs,
        }
    }

    // --- calls ---

    /// Everything a driver call goes through: counted, failed on purpose or because the device is
    /// lost, carried out, logged. A refused call takes no time.
    pub fn call<T>(
        &mut self,
        mut entry: LoggedCall,
        body: impl FnOnce(&mut State) -> Outcome<T>,
    ) -> Result<T> {
        let call = entry.call;
        self.calls[call as usize] += 1;
        let result = self.admit(call).and_then(|()| {
            body(self).map_err(|refusal| {
                // A device lost by this very call says so instead.
                self.lost_error(call)
                    .unwrap_or_else(|| DriverError::from_code(call, refusal.code, refusal.detail))
            })
        });
        self.previous = Some(call);
        entry.error = result.as_ref().err().map(|error| error.code);
        self.log.push(entry);
        result
    }

    fn admit(&mut self, call: Call) -> Result<()> {
        let injected = self.faults.next(call);
        if self.lost.is_none() {
            if let Some(error) = injected {
                if error.is_device_lost() {
                    self.lost =
                        Some(Fault { code: error.code, explanation: error.detail.to_string() });
                }
                return Err(error);
            }
            self.run_until(self.now_ns);
        }
        match self.lost_error(call) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn lost_error(&self, call: Call) -> Option<DriverError> {
        let lost = self.lost.as_ref()?;
        Some(DriverError::from_code(call, lost.code, format!("device lost: {}", lost.explanation)))
    }

    /// Charges what a call on one handle costs.
    pub fn spend_on_handle(&mut self, call: Call, len: Bytes) {
        self.now_ns += self.costs.handle_ns(call, len, self.previous == Some(call));
    }

    /// Charges what the call costs whatever its arguments.
    pub fn spend(&mut self, call: Call) {
        self.now_ns += self.costs.fixed_ns(call);
    }

    pub fn need(&self, has: impl Fn(&Capabilities) -> bool, what: &str) -> Outcome<()> {
        if has(&self.capabilities) { Ok(()) } else { Err(Refusal::not_supported(what)) }
    }

    pub fn set_faults(&mut self, plan: FaultPlan) {
        self.faults = Faults::new(plan, self.seed);
    }

    // --- time ---

    /// Carries out all work that is over by `until_ns`, in order of virtual time.
    pub fn run_until(&mut self, until_ns: u64) {
        if self.streams.quiet_until(until_ns) {
            return;
        }
        while let Some((due_ns, stream)) =
            self.streams.next_due().filter(|(due, _)| *due <= until_ns)
        {
            self.step(stream, due_ns);
            if self.lost.is_some() {
                return;
            }
        }
    }

    /// Lets the host wait until `point` is done.
    pub fn run_to(&mut self, point: Point) -> Outcome<()> {
        while !self.streams.is_done(point) {
            let Some((due_ns, stream)) = self.streams.next_due() else {
                return Err(Refusal {
                    code: 600,
                    detail: format!("this would wait for ever: {}", self.streams.describe_stuck()),
                });
            };
            self.step(stream, due_ns);
            self.now_ns = self.now_ns.max(due_ns);
            if let Some(lost) = &self.lost {
                return Err(Refusal { code: lost.code, detail: lost.explanation.clone() });
            }
        }
        Ok(())
    }

    pub fn advance(&mut self, ns: u64) {
        self.now_ns = self.now_ns.saturating_add(ns);
        if self.lost.is_none() {
            self.run_until(self.now_ns);
        }
    }

    pub fn open(&mut self, gate: Gate) -> bool {
        self.streams.open(gate, self.now_ns)
    }

    fn step(&mut self, stream: usize, due_ns: u64) {
        match self.streams.step(stream, due_ns) {
            Step::Started => self.start(stream),
            Step::Done(work) => self.carry_out(&work),
            Step::Passed => {}
        }
    }

    // --- work ---

    pub fn launch(&mut self, stream: Stream, kernel: Kernel) -> Result<()> {
        // Not a call of the trait; its errors name the call that queues work most like it.
        let fail =
            |refusal: Refusal| DriverError::from_code(Call::Fill, refusal.code, refusal.detail);
        if let Some(error) = self.lost_error(Call::Fill) {
            return Err(error);
        }
        self.run_until(self.now_ns);
        if let Some(gate) = kernel.until
            && !self.streams.has_gate(gate)
        {
            return Err(fail(Refusal::unknown("gate", gate.0 as u64)));
        }
        self.spend(Call::Fill);
        self.queue(stream, kernel, Effect::Nothing).map_err(fail)
    }

    /// Queues work on `stream`.
    pub fn queue(&mut self, stream: Stream, kernel: Kernel, effect: Effect) -> Outcome<()> {
        let index = self.streams.index(stream)?;
        let mut work = Work { kernel, effect, doomed: None, unchecked: None };
        work.doomed = self.freed_pool_memory(&work);
        if let Some(checker) = &mut self.checker {
            let stamp = checker.step(stream);
            // Memory may still be mapped before the work starts: then it is looked at again.
            if !self.check_order(&work, &stamp) {
                work.unchecked = Some(stamp);
            }
        }
        self.streams.push(index, work, self.now_ns);
        Ok(())
    }

    /// The pool's memory lives in stream order, so whether work may touch it is known at once.
    fn freed_pool_memory(&self, work: &Work) -> Option<(DeviceAddr, &'static str)> {
        ranges(work).find_map(|(range, _)| {
            let start = range.start.number();
            (start >= POOL_BASE && !self.pool.is_live(start, range.len.count()))
                .then_some((range.start, "not allocated from the stream-ordered pool"))
        })
    }

    /// Looks whether the first work of a stream may touch what it touches.
    fn start(&mut self, stream: usize) {
        let Some(work) = self.streams.running(stream) else { return };
        let unchecked = work.unchecked.take();
        let work = &*work;
        let mut wrong = work.doomed;
        for (range, _) in ranges(work) {
            if range.start.number() < POOL_BASE && wrong.is_none() {
                wrong = self.memory.pieces(range, |_| {}).err().map(|bad| (bad.at, bad.why));
            }
        }
        if let Some((at, why)) = wrong {
            let explanation =
                format!("`{}` on stream {} touched {at}, {why}", work.kernel.name, stream + 1);
            self.lost = Some(Fault { code: 700, explanation });
            return;
        }
        if let Some(stamp) = unchecked {
            let work = Work {
                kernel: work.kernel.clone(),
                effect: work.effect,
                doomed: None,
                unchecked: None,
            };
            self.check_order(&work, &stamp);
        }
    }

    /// Shows all accesses of `work` to the checker. False if some memory cannot be touched now.
    fn check_order(&mut self, work: &Work, stamp: &Stamp) -> bool {
        let Some(checker) = &mut self.checker else { return true };
        let mut parts = Vec::new();
        for (range, writes) in ranges(work) {
            if range.start.number() >= POOL_BASE {
                let offset = range.start.number() - POOL_BASE;
                let len = range.len.count();
                parts.push((Part { body: Body::Pool, offset, len, range, writes }, None));
                continue;
            }
            let touched = self.memory.pieces(range, |piece| {
                let body = Body::Handle(piece.physical);
                let part = Part { body, offset: piece.offset, len: piece.len, range, writes };
                parts.push((part, Some(piece.mapping)));
            });
            if touched.is_err() {
                return false;
            }
        }
        if let Some(part) = host_part(&work.effect) {
            parts.push((part, None));
        }
        checker.access(stamp, &work.kernel.name, &parts);
        true
    }

    /// Does to memory what finished work does.
    fn carry_out(&mut self, work: &Work) {
        match work.effect {
            Effect::Nothing => {}
            Effect::Fill { range, byte } => self.in_steps(range.len, |state, done, len| {
                state.fill(range.start + Bytes::new(done), len, byte);
            }),
            Effect::Copy { from, to } => self.in_steps(from.len, |state, done, len| {
                let bytes = state.read(from.start + Bytes::new(done), len);
                state.write(to + Bytes::new(done), &bytes);
            }),
            Effect::ToDevice { buffer, offset, to } => self.in_steps(to.len, |state, done, len| {
                let mut bytes = vec![0; len];
                if let Some(content) = state.host.content(buffer) {
                    content.read(offset.count() + done, &mut bytes);
                }
                state.write(to.start + Bytes::new(done), &bytes);
            }),
            Effect::ToHost { from, buffer, offset } => {
                self.in_steps(from.len, |state, done, len| {
                    let bytes = state.read(from.start + Bytes::new(done), len);
                    if let Some(content) = state.host.content_mut(buffer) {
                        content.write(offset.count() + done, &bytes);
                    }
                })
            }
        }
    }

    /// Calls `step` with place and length of every part of `len` bytes, if bytes are kept at all.
    fn in_steps(&mut self, len: Bytes, mut step: impl FnMut(&mut State, u64, usize)) {
        if self.backing == Backing::Phantom {
            return;
        }
        let mut done = 0;
        while done < len.count() {
            let part = (len.count() - done).min(COPY_STEP);
            step(self, done, part as usize);
            done += part;
        }
    }

    // --- bytes ---

    pub fn peek(&self, range: AddrRange) -> Option<Vec<u8>> {
        let touchable = match range.start.number().checked_sub(POOL_BASE) {
            Some(_) => self.pool.is_live(range.start.number(), range.len.count()),
            None => self.memory.pieces(range, |_| {}).is_ok(),
        };
        (self.backing == Backing::Stored && touchable)
            .then(|| self.read(range.start, range.len.count() as usize))
    }

    fn read(&self, at: DeviceAddr, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        if let Some(offset) = at.number().checked_sub(POOL_BASE) {
            self.pool_content.read(offset, &mut bytes);
            return bytes;
        }
        let mut done = 0;
        let range = AddrRange::new(at, Bytes::new(len as u64));
        let read = self.memory.pieces(range, |piece| {
            let end = done + piece.len as usize;
            self.memory.content(piece.physical).read(piece.offset, &mut bytes[done..end]);
            done = end;
        });
        assert_eq!(read, Ok(()), "work that started may touch its memory until it is done");
        bytes
    }

    fn write(&mut self, at: DeviceAddr, bytes: &[u8]) {
        self.contents(at, bytes.len(), |content, offset, part| content.write(offset, &bytes[part]));
    }

    fn fill(&mut self, at: DeviceAddr, len: usize, byte: u8) {
        self.contents(at, len, |content, offset, part| content.fill(offset, part.len(), byte));
    }

    /// Calls `change` for every content that `len` bytes from `at` on run through: with the offset
    /// in the content and the part of the bytes.
    fn contents(
        &mut self,
        at: DeviceAddr,
        len: usize,
        mut change: impl FnMut(&mut Content, u64, Range<usize>),
    ) {
        if let Some(offset) = at.number().checked_sub(POOL_BASE) {
            change(&mut self.pool_content, offset, 0..len);
            return;
        }
        let mut pieces = Vec::new();
        let range = AddrRange::new(at, Bytes::new(len as u64));
        let found = self.memory.pieces(range, |piece| pieces.push(piece));
        assert_eq!(found, Ok(()), "work that started may touch its memory until it is done");
        let mut done = 0;
        for piece in pieces {
            let end = done + piece.len as usize;
            change(self.memory.content_mut(piece.physical), piece.offset, done..end);
            done = end;
        }
    }

    // --- taking memory away ---

    /// Unmaps `range`, losing the device if work still touches it.
    pub fn unmap(&mut self, range: AddrRange) -> Outcome<()> {
        let handles = self.memory.whole_mappings(range)?;
        if let Some(checker) = &mut self.checker {
            for mapping in self.memory.mappings_in(range) {
                checker.unmap(mapping, range);
            }
        }
        if let Some((stream, work)) =
            self.streams.find_pending(|work| work.touches(range).is_some())
        {
            let touched = work.touches(range).expect("it was found by this");
            let explanation = format!(
                "{range} was unmapped while `{}` on stream {} still touches {touched}",
                work.kernel.name,
                stream.number()
            );
            self.lost = Some(Fault { code: 700, explanation });
            return Err(Refusal { code: 700, detail: String::new() });
        }
        self.memory.unmap(range);
        self.forget_dead();
        self.now_ns += self.costs.range_ns(Call::Unmap, &handles);
        Ok(())
    }

    pub fn forget_dead(&mut self) {
        let dead = self.memory.take_dead();
        match &mut self.checker {
            Some(checker) => dead.for_each(|number| checker.forget_body(Body::Handle(number))),
            None => drop(dead),
        }
    }

    /// What synchronising does to the device's own pool.
    pub fn trim_pool_to_threshold(&mut self) {
        let given_back = self.pool.trim(Bytes::new(self.pool.threshold));
        self.memory.refund(given_back);
    }

    // --- looking in ---

    pub fn fault(&self) -> Option<Fault> {
        self.lost.clone()
    }

    pub fn hazards(&self) -> Vec<Hazard> {
        self.checker.as_ref().map_or_else(Vec::new, |checker| checker.hazards().to_vec())
    }

    pub fn hazards_found(&self) -> u64 {
        self.checker.as_ref().map_or(0, Checker::hazards_found)
    }

    pub fn live(&self) -> LiveObjects {
        LiveObjects {
            reservations: self.memory.reservations(),
            reserved_addresses: self.memory.reserved_addresses(),
            handles: self.memory.handles(),
            handles_released_but_mapped: self.memory.handles_released_but_mapped(),
            mappings: self.memory.mappings(),
            device_bytes: self.memory.used(),
            streams: self.streams.living(),
            events: self.events.len(),
            host_buffers: self.host.living(),
            host_bytes: self.host.held(),
            pool_allocations: self.pool.allocations(),
            pool_bytes: Bytes::new(self.pool.used),
        }
    }

    pub fn rates(&self) -> Rates {
        self.costs.rates()
    }
}

/// The ranges of device memory that work touches, and whether it writes them.
fn ranges(work: &Work) -> impl Iterator<Item = (AddrRange, bool)> + '_ {
    let reads = work.kernel.reads.iter().map(|range| (*range, false));
    reads.chain(work.kernel.writes.iter().map(|range| (*range, true)))
}

/// The part of pinned host memory that work touches.
fn host_part(effect: &Effect) -> Option<Part> {
    let (buffer, offset, len, writes) = match *effect {
        Effect::ToDevice { buffer, offset, to } => (buffer, offset, to.len, false),
        Effect::ToHost { from, buffer, offset } => (buffer, offset, from.len, true),
        Effect::Nothing | Effect::Fill { .. } | Effect::Copy { .. } => return None,
    };
    Some(host_buffer_part(buffer, offset, len, writes))
}

/// A part of pinned host memory; the range names offsets.
pub(super) fn host_buffer_part(buffer: u64, offset: Bytes, len: Bytes, writes: bool) -> Part {
    Part {
        body: Body::HostBuffer(buffer),
        offset: offset.count(),
        len: len.count(),
        range: AddrRange::new(DeviceAddr::new(offset.count()), len),
        writes,
    }
}
