//! State of a simulated machine: the steps common to all calls, virtual time, and unmapping.

use std::collections::{BTreeMap, HashMap};

use vramp_core::{AddrRange, Bytes};

use super::bytes::{Content, Contents};
use super::captures::{Captures, Graphs, Recorded};
use super::clock::Body;
use super::cost::{CostTable, Rates};
use super::devices::DeviceSet;
use super::fault::{FaultPlan, Faults};
use super::hazard::{Checker, Hazard};
use super::host::{HostBuffers, Registered};
use super::log::{Log, LoggedCall};
use super::memory::Memory;
use super::pool::Pool;
use super::refusal::{DeviceLoss, LiveObjects, Outcome, Refusal};
use super::streams::{Gate, Point, Step, Streams, Work};
use crate::{Call, Capabilities, DriverError, DriverResult, Stream};

#[derive(Clone, Debug)]
pub(super) struct Config {
    pub contents: Contents,
    pub seed: u64,
    pub checker: bool,
    pub log_capacity: usize,
    pub faults: FaultPlan,
    pub costs: CostTable,
    pub fabric_permitted: bool,
}

/// All devices of a machine, with one host clock, one address space and one race detector.
#[derive(Debug)]
pub(super) struct State {
    pub now_ns: u64,
    pub costs: CostTable,
    pub memory: Memory,
    pub streams: Streams,
    pub host: HostBuffers,
    pub checker: Option<Checker>,
    /// Device and last record of each event.
    pub events: HashMap<u64, (usize, Recorded)>,
    pub events_made: u64,
    pub captures: Captures,
    pub graphs: Graphs,
    pub contents: Contents,
    pub registered: Registered,
    pub devices: Vec<DeviceState>,
    /// Device of the current call. Work of others may run during it.
    pub current: usize,
    /// When the link from one card to another is free.
    pub link_free_ns: BTreeMap<(usize, usize), u64>,
    /// True if fabric handles can be created.
    pub fabric_permitted: bool,
    seed: u64,
}

/// What belongs to one device alone.
#[derive(Debug)]
pub(super) struct DeviceState {
    /// When each direction of the bus is free: to the host, to the card.
    pub bus_free_ns: [u64; 2],
    pub pool: Pool,
    pub pool_content: Content,
    pub log: Log,
    pub calls: [u64; Call::ALL.len()],
    pub peers: DeviceSet,
    capabilities: Capabilities,
    faults: Faults,
    /// Kind of the call before the current one.
    previous: Option<Call>,
    pub lost: Option<DeviceLoss>,
}

impl State {
    /// Returns a machine with one device for each set of peers.
    pub fn new(
        memory: Memory,
        peers: &[DeviceSet],
        capabilities: Capabilities,
        config: Config,
    ) -> State {
        let granule = config.costs.pool().granule;
        let devices = peers.iter().enumerate().map(|(ordinal, peers)| DeviceState {
            bus_free_ns: [0; 2],
            pool: Pool::new(ordinal, granule),
            pool_content: Content::default(),
            log: Log::keeping(config.log_capacity),
            calls: [0; Call::ALL.len()],
            peers: *peers,
            capabilities,
            faults: Faults::new(config.faults.clone(), seed_of(config.seed, ordinal)),
            previous: None,
            lost: None,
        });
        State {
            now_ns: 0,
            memory,
            streams: Streams::new(config.checker),
            host: HostBuffers::default(),
            checker: config.checker.then(Checker::default),
            events: HashMap::new(),
            events_made: 0,
            captures: Captures::default(),
            graphs: Graphs::default(),
            contents: config.contents,
            registered: Registered::default(),
            devices: devices.collect(),
            current: 0,
            link_free_ns: BTreeMap::new(),
            fabric_permitted: config.fabric_permitted,
            seed: config.seed,
            costs: config.costs,
        }
    }

    /// Returns the state of the current call's device.
    pub fn own(&self) -> &DeviceState {
        &self.devices[self.current]
    }

    /// Returns the state of the current call's device.
    pub fn own_mut(&mut self) -> &mut DeviceState {
        &mut self.devices[self.current]
    }

    /// Loses a device: its work never completes, and its calls fail.
    pub fn lose(&mut self, device: usize, loss: DeviceLoss) {
        self.streams.stop(device);
        self.devices[device].lost.get_or_insert(loss);
    }

    // --- calls ---

    /// Runs a driver call of a device: counts it, fails it if a fault is injected or the device is
    /// lost, carries it out and logs it. A refused call takes no time.
    pub fn call<T>(
        &mut self,
        device: usize,
        mut entry: LoggedCall,
        body: impl FnOnce(&mut State) -> Outcome<T>,
    ) -> DriverResult<T> {
        let call = entry.call;
        self.current = device;
        self.own_mut().calls[call as usize] += 1;
        let result = self.admit(call).and_then(|()| {
            body(self).map_err(|refusal| {
                // A call that loses the device reports the loss.
                self.lost_error(call)
                    .unwrap_or_else(|| DriverError::from_code(call, refusal.code, refusal.detail))
            })
        });
        entry.error = result.as_ref().err().map(|error| error.code);
        let own = self.own_mut();
        own.previous = Some(call);
        own.log.push(entry);
        result
    }

    fn admit(&mut self, call: Call) -> DriverResult<()> {
        let own = self.own_mut();
        let injected = own.faults.next(call);
        if own.lost.is_none() {
            if let Some(error) = injected {
                if error.is_device_lost() {
                    let explanation = error.detail.to_string();
                    self.lose(self.current, DeviceLoss { code: error.code, explanation });
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
        let lost = self.own().lost.as_ref()?;
        Some(DriverError::from_code(call, lost.code, format!("device lost: {}", lost.explanation)))
    }

    /// Charges the cost of a call on one handle.
    pub fn spend_on_handle(&mut self, call: Call, len: Bytes) {
        self.now_ns += self.costs.handle_ns(call, len, self.own().previous == Some(call));
    }

    /// Charges the fixed cost of a call.
    pub fn spend(&mut self, call: Call) {
        self.now_ns += self.costs.fixed_ns(call);
    }

    pub fn need(&self, has: impl Fn(&Capabilities) -> bool, what: &str) -> Outcome<()> {
        if has(&self.own().capabilities) { Ok(()) } else { Err(Refusal::not_supported(what)) }
    }

    pub fn set_faults(&mut self, device: usize, plan: FaultPlan) {
        self.devices[device].faults = Faults::new(plan, seed_of(self.seed, device));
    }

    // --- time ---

    /// Carries out all work that is complete by `until_ns`, in order of virtual time.
    pub fn run_until(&mut self, until_ns: u64) {
        while let Some((due_ns, stream)) =
            self.streams.next_due().filter(|(due, _)| *due <= until_ns)
        {
            self.step(stream, due_ns);
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
            if let Some(lost) = &self.own().lost {
                return Err(Refusal { code: lost.code, detail: lost.explanation.clone() });
            }
        }
        Ok(())
    }

    /// Blocks the host until the work of all streams of the device is complete.
    pub fn wait_for_everything(&mut self) -> Outcome<()> {
        for stream in self.streams.of_device(self.current) {
            self.run_to(self.streams.end_of(stream))?;
            if let Some(checker) = &mut self.checker {
                checker.host_observed_stream(Stream::from_number(stream as u64 + 1));
            }
        }
        Ok(())
    }

    pub fn advance(&mut self, ns: u64) {
        self.now_ns = self.now_ns.saturating_add(ns);
        self.run_until(self.now_ns);
    }

    pub fn open(&mut self, gate: Gate) -> bool {
        self.streams.open(gate, self.now_ns)
    }

    fn step(&mut self, stream: usize, due_ns: u64) {
        match self.streams.step(stream, due_ns) {
            Step::Started(work) => self.start(stream, due_ns, work),
            Step::Done(work) => self.carry_out(&work),
            Step::Passed => {}
        }
    }

    // --- unmapping ---

    /// Unmaps `range`. Loses every device whose work in flight accesses it.
    pub fn unmap(&mut self, range: AddrRange) -> Outcome<()> {
        let whole = self.memory.whole_mappings(self.current, range)?;
        if let Some(checker) = &mut self.checker {
            for (mapping, _) in self.memory.mappings_in(range) {
                checker.unmap(mapping, range);
            }
        }
        self.report_unmapped(range);
        self.lose_users(DeviceSet::ALL, range, "unmapped");
        if self.own().lost.is_some() {
            return Err(Refusal { code: 700, detail: String::new() });
        }
        self.memory.unmap(range)?;
        self.forget_destroyed();
        self.now_ns += self.costs.range_ns(Call::Unmap, &whole.handles)
            + self.costs.unmap_peers_ns(whole.peer_grants)
            + self.costs.rdma_ns(Call::Unmap, whole.rdma);
        Ok(())
    }

    /// Loses each of `devices` that has work in flight that accesses `range`.
    pub fn lose_users(&mut self, devices: DeviceSet, range: AddrRange, what: &str) {
        let uses = |work: &Work| work.accesses(range).is_some();
        while let Some((stream, work)) = self.streams.find_pending(devices, uses) {
            let accessed = work.accesses(range).expect("it was found by this");
            let explanation = format!(
                "{range} was {what} while `{}` on stream {} still accesses {accessed}",
                work.kernel.name,
                stream.number()
            );
            let device = self.streams.device(stream.number() as usize - 1);
            self.lose(device, DeviceLoss { code: 700, explanation });
        }
    }

    /// Takes the access to `range` from `peers`. Loses each of them whose work in flight accesses it.
    pub fn revoke(&mut self, range: AddrRange, peers: DeviceSet) -> Outcome<()> {
        let whole = self.memory.whole_mappings(self.current, range)?;
        if let Some(checker) = &mut self.checker {
            let streams = &self.streams;
            let of_peers =
                |stream: Stream| peers.contains(streams.device(stream.number() as usize - 1));
            for (mapping, _) in self.memory.mappings_in(range) {
                checker.revoke(mapping, range, of_peers);
            }
        }
        self.lose_users(peers, range, "revoked");
        self.memory.revoke_access(range, peers);
        self.spend(Call::RevokeAccess);
        // The fixed cost covers the first pair of a mapping and a peer.
        let pairs = whole.handles.len() * peers.len();
        self.now_ns += self.costs.set_access_peers_ns(pairs.saturating_sub(1));
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
        let pool = &mut self.devices[self.current].pool;
        let freed = pool.trim(Bytes::new(pool.threshold));
        self.memory.refund(self.current, freed);
    }

    // --- diagnostics ---

    pub fn hazards(&self) -> Vec<Hazard> {
        self.checker.as_ref().map_or_else(Vec::new, |checker| checker.hazards().to_vec())
    }

    pub fn hazards_found(&self) -> u64 {
        self.checker.as_ref().map_or(0, Checker::hazards_found)
    }

    pub fn live(&mut self, device: usize) -> LiveObjects {
        let pool = &self.devices[device].pool;
        let (pool_allocations, pool_bytes) = (pool.allocations(), Bytes::new(pool.used));
        let memory = &mut self.memory;
        LiveObjects {
            // First, because it notices closed descriptors.
            device_bytes: memory.used(device),
            reservations: memory.reservations(device),
            reserved_addresses: memory.reserved_addresses(device),
            handles: memory.handles(device),
            handles_released_but_mapped: memory.handles_released_but_mapped(device),
            handles_released_but_exported: memory.kept_by_exports(device),
            mappings: memory.mappings(device),
            streams: self.streams.live(device),
            events: self.events.values().filter(|(owner, _)| *owner == device).count(),
            captures: self.captures.count(device),
            graphs: self.graphs.graphs(device),
            graph_execs: self.graphs.execs(device),
            host_buffers: self.host.live(device),
            host_bytes: self.host.held(device),
            allocations: memory.allocations(device),
            adoptions: memory.adoptions(device),
            pool_allocations,
            pool_bytes,
        }
    }

    pub fn rates(&self) -> Rates {
        self.costs.rates()
    }
}

/// Returns the seed of a device's random faults.
fn seed_of(seed: u64, device: usize) -> u64 {
    seed.wrapping_add(device as u64)
}
