//! State of the simulated device: the steps common to all calls, virtual time, and unmapping.

use std::collections::HashMap;

use vramp_core::{AddrRange, Bytes};

use super::bytes::Content;
use super::bytes::Contents;
use super::capture::{Captures, Recorded};
use super::cost::{CostTable, Rates};
use super::fault::{FaultPlan, Faults};
use super::graph::Graphs;
use super::hazard::{Body, Checker, Hazard};
use super::host::HostBuffers;
use super::log::{Log, LoggedCall};
use super::memory::Memory;
use super::pool::Pool;
use super::refusal::{Outcome, Refusal};
use super::streams::{Gate, Point, Step, Streams};
use super::{DeviceLoss, LiveObjects};
use crate::{Call, Capabilities, DriverError, DriverResult, Stream};

#[derive(Clone, Debug)]
pub(super) struct Config {
    pub contents: Contents,
    pub seed: u64,
    pub checker: bool,
    pub log_capacity: usize,
    pub faults: FaultPlan,
    pub costs: CostTable,
}

#[derive(Debug)]
pub(super) struct State {
    pub now_ns: u64,
    /// When each direction of the bus is free: to the host, to the card.
    pub bus_free_ns: [u64; 2],
    pub costs: CostTable,
    pub memory: Memory,
    pub streams: Streams,
    pub host: HostBuffers,
    pub pool: Pool,
    pub log: Log,
    pub calls: [u64; Call::ALL.len()],
    pub checker: Option<Checker>,
    /// Last record of each event.
    pub events: HashMap<u64, Recorded>,
    pub events_made: u64,
    pub captures: Captures,
    pub graphs: Graphs,
    capabilities: Capabilities,
    pub contents: Contents,
    pub pool_content: Content,
    faults: Faults,
    seed: u64,
    /// Kind of the call before the current one.
    previous: Option<Call>,
    pub lost: Option<DeviceLoss>,
}

impl State {
    pub fn new(memory: Memory, capabilities: Capabilities, config: Config) -> State {
        State {
            now_ns: 0,
            bus_free_ns: [0; 2],
            memory,
            streams: Streams::default(),
            host: HostBuffers::default(),
            pool: Pool::new(config.costs.pool().granule),
            log: Log::keeping(config.log_capacity),
            calls: [0; Call::ALL.len()],
            checker: config.checker.then(Checker::default),
            events: HashMap::new(),
            events_made: 0,
            captures: Captures::default(),
            graphs: Graphs::default(),
            capabilities,
            contents: config.contents,
            pool_content: Content::default(),
            faults: Faults::new(config.faults, config.seed),
            seed: config.seed,
            previous: None,
            lost: None,
            costs: config.costs,
        }
    }

    // --- calls ---

    /// Runs a driver call: counts it, fails it if a fault is injected or the device is lost, carries
    /// it out and logs it. A refused call takes no time.
    pub fn call<T>(
        &mut self,
        mut entry: LoggedCall,
        body: impl FnOnce(&mut State) -> Outcome<T>,
    ) -> DriverResult<T> {
        let call = entry.call;
        self.calls[call as usize] += 1;
        let result = self.admit(call).and_then(|()| {
            body(self).map_err(|refusal| {
                // A call that loses the device reports the loss.
                self.lost_error(call)
                    .unwrap_or_else(|| DriverError::from_code(call, refusal.code, refusal.detail))
            })
        });
        self.previous = Some(call);
        entry.error = result.as_ref().err().map(|error| error.code);
        self.log.push(entry);
        result
    }

    fn admit(&mut self, call: Call) -> DriverResult<()> {
        let injected = self.faults.next(call);
        if self.lost.is_none() {
            if let Some(error) = injected {
                if error.is_device_lost() {
                    self.lost = Some(DeviceLoss {
                        code: error.code,
                        explanation: error.detail.to_string(),
                    });
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

    pub fn lost_error(&self, call: Call) -> Option<DriverError> {
        let lost = self.lost.as_ref()?;
        Some(DriverError::from_code(call, lost.code, format!("device lost: {}", lost.explanation)))
    }

    /// Charges the cost of a call on one handle.
    pub fn spend_on_handle(&mut self, call: Call, len: Bytes) {
        self.now_ns += self.costs.handle_ns(call, len, self.previous == Some(call));
    }

    /// Charges the fixed cost of a call.
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

    /// Carries out all work that is complete by `until_ns`, in order of virtual time.
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

    /// Blocks the host until `point` is done.
    pub fn run_to(&mut self, point: Point) -> Outcome<()> {
        while !self.streams.is_done(point) {
            let Some((due_ns, stream)) = self.streams.next_due() else {
                return Err(Refusal {
                    code: 600,
                    detail: format!("deadlock: {}", self.streams.describe_stuck()),
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

    /// Blocks the host until the work of all streams is complete.
    pub fn wait_for_everything(&mut self) -> Outcome<()> {
        for stream in 0..self.streams.made() {
            self.run_to(self.streams.end_of(stream))?;
            if let Some(checker) = &mut self.checker {
                checker.host_observed_stream(Stream::from_number(stream as u64 + 1));
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

    // --- unmapping ---

    /// Unmaps `range`. Loses the device if work in flight accesses it.
    pub fn unmap(&mut self, range: AddrRange) -> Outcome<()> {
        let handles = self.memory.whole_mappings(range)?;
        if let Some(checker) = &mut self.checker {
            for mapping in self.memory.mappings_in(range) {
                checker.unmap(mapping, range);
            }
        }
        if let Some((stream, work)) =
            self.streams.find_pending(|work| work.accesses(range).is_some())
        {
            let accessed = work.accesses(range).expect("it was found by this");
            let explanation = format!(
                "{range} was unmapped while `{}` on stream {} still accesses {accessed}",
                work.kernel.name,
                stream.number()
            );
            self.lost = Some(DeviceLoss { code: 700, explanation });
            return Err(Refusal { code: 700, detail: String::new() });
        }
        self.memory.unmap(range)?;
        self.forget_destroyed();
        self.now_ns += self.costs.range_ns(Call::Unmap, &handles);
        Ok(())
    }

    pub fn forget_destroyed(&mut self) {
        let destroyed = self.memory.take_destroyed();
        match &mut self.checker {
            Some(checker) => destroyed.for_each(|number| checker.remove_body(Body::Handle(number))),
            None => drop(destroyed),
        }
    }

    /// Trims the device's own pool to its release threshold, as synchronising does.
    pub fn trim_pool_to_threshold(&mut self) {
        let freed = self.pool.trim(Bytes::new(self.pool.threshold));
        self.memory.refund(freed);
    }

    // --- diagnostics ---

    pub fn device_loss(&self) -> Option<DeviceLoss> {
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
            streams: self.streams.live(),
            events: self.events.len(),
            captures: self.captures.count(),
            graphs: self.graphs.graphs(),
            graph_execs: self.graphs.execs(),
            host_buffers: self.host.live(),
            host_bytes: self.host.held(),
            allocations: self.memory.allocations(),
            pool_allocations: self.pool.allocations(),
            pool_bytes: Bytes::new(self.pool.used),
        }
    }

    pub fn rates(&self) -> Rates {
        self.costs.rates()
    }
}
