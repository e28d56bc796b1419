//! Every driver call fails once: afterwards the audit holds, the card holds what the pool says it
//! holds, and the program goes on to its end. The programs are a made one, the beginning of a
//! recorded one, and one of captures, replays and lending: there the stream is out of the capture, and the
//! error has a type.

use std::collections::BTreeMap;

use vramp_alloc::graph::{
    ArenaConfig, ArenaPolicy, CaptureError, CapturedGraph, GraphArena, LaunchError, Overlap,
};
use vramp_alloc::{Allocation, Bytes, Config, Driver, StreamId};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator, SimulatorBuilder};
use vramp_peers::Preset;
use vramp_testing::failing_calls;
use vramp_trace::{ReadLimits, Request, Workload, read_trace};

use crate::common::graph_rig::{GraphRig, card as graph_card, range};
use crate::common::{Random, Rig};

const STEPS: u64 = 2000;

/// Two thousand requests of all sizes on three streams: mallocs, frees on the own and on another
/// stream, uses on other streams, trims. Failures are counted and survived.
fn program(rig: &Rig, audit: bool) -> u64 {
    let mut random = Random(7);
    let streams: Vec<StreamId> = std::iter::once(rig.stream)
        .chain((0..2).filter_map(|_| rig.allocator.create_stream().ok()))
        .collect();
    let mut held: Vec<(Allocation, StreamId)> = Vec::new();
    let mut failed = 0;
    for _ in 0..STEPS {
        let stream = streams[random.below(streams.len() as u64) as usize];
        let result = match random.below(20) {
            0 => rig.allocator.trim(Bytes::mib(random.below(200))).map_err(drop),
            1..=9 if !held.is_empty() => {
                let (block, own) = held.swap_remove(random.below(held.len() as u64) as usize);
                let on = if random.below(4) == 0 { stream } else { own };
                rig.allocator.free(block, on).map(drop).map_err(drop)
            }
            10 if !held.is_empty() => {
                let (block, _) = &held[random.below(held.len() as u64) as usize];
                rig.allocator.record_use(block, stream).map_err(drop)
            }
            _ => {
                let size = 1 << random.below(28);
                let size = Bytes::new(size + random.below(size));
                match rig.allocator.malloc(size, stream) {
                    Ok(block) => {
                        held.push((block, stream));
                        Ok(())
                    }
                    Err(error) => {
                        assert!(!error.to_string().is_empty());
                        Err(())
                    }
                }
            }
        };
        failed += look_at(rig, audit, result);
    }
    finish(rig, held);
    failed
}

/// Checks everything after a failure, or after each step if asked to. Counts failures.
fn look_at(rig: &Rig, audit: bool, result: Result<(), ()>) -> u64 {
    if result.is_err() {
        rig.allocator.audit().expect("a failure keeps every invariant");
        rig.assert_accounts_agree();
    } else if audit {
        rig.allocator.audit().expect("every step keeps every invariant");
    }
    u64::from(result.is_err())
}

fn finish(rig: &Rig, held: impl IntoIterator<Item = (Allocation, StreamId)>) {
    for (block, stream) in held {
        // A failed record leaves the block free all the same.
        let _ = rig.allocator.free(block, stream);
    }
    rig.allocator.audit().expect("the end keeps every invariant");
    rig.assert_accounts_agree();
}

/// The first requests of a recorded job on two streams.
fn recorded() -> Workload {
    // Seen from the crate, and from the folder that travels to a machine with a card.
    let folders = ["tests/data", "traces"].map(std::path::Path::new);
    let folder = folders.into_iter().find(|folder| folder.exists()).expect("there are traces");
    let path = folder.join("resnet_multires_stacks.pickle.gz");
    let trace = read_trace(path, &ReadLimits::default()).expect("the example is there");
    let mut workload = Workload::from_trace(&trace, 0);
    workload.requests.truncate(2000);
    workload
}

/// The recorded requests; a block whose uses outlive its free is used by every stream. Failures
/// are counted and survived: a block that could not be had is not freed either.
fn replay(workload: &Workload, rig: &Rig, audit: bool) -> u64 {
    let more = (1..workload.streams.len()).filter_map(|_| rig.allocator.create_stream().ok());
    let streams: Vec<StreamId> = std::iter::once(rig.stream).chain(more).collect();
    let mut held: BTreeMap<u32, (Allocation, StreamId)> = BTreeMap::new();
    let mut failed = 0;
    for (index, &request) in workload.requests.iter().enumerate() {
        let result = match request {
            Request::Alloc { block, size, stream } => {
                // A stream that could not be made is the first one.
                let stream = *streams.get(stream as usize).unwrap_or(&rig.stream);
                let allocation = rig.allocator.malloc(size, stream);
                let kept = |allocation| assert!(held.insert(block, (allocation, stream)).is_none());
                allocation.map(kept).map_err(drop)
            }
            Request::Free { block } => {
                held.remove(&block).map_or(Ok(()), |(allocation, stream)| {
                    if workload.requests.get(index + 1) != Some(&Request::FreeCompleted { block }) {
                        for &user in &streams {
                            rig.allocator.record_use(&allocation, user).expect("the block is held");
                        }
                    }
                    rig.allocator.free(allocation, stream).map(drop).map_err(drop)
                })
            }
            Request::FreeCompleted { .. } | Request::Oom { .. } => Ok(()),
        };
        failed += look_at(rig, audit, result);
    }
    finish(rig, held.into_values());
    failed
}

/// A program on a rig, with an audit after every step if asked to: how many steps failed.
type Program<'a> = &'a dyn Fn(&Rig, bool) -> u64;

fn card() -> SimulatorBuilder {
    Simulator::builder().memory(Bytes::gib(1))
}

/// One run without failures, then one for each of a sample of its calls, which fails: out of memory, not
/// supported, an invalid value in turn.
fn fail_each_call(card: fn() -> SimulatorBuilder, preset: Preset, program: Program) {
    let whole = Rig::on(card(), preset.config());
    let before = whole.sim.calls();
    program(&whole, true);
    let calls = whole.sim.calls() - before;
    whole.close();
    for (turn, n) in vramp_testing::failing_calls(calls).enumerate() {
        let rig = Rig::on(card(), preset.config());
        rig.sim.set_faults(FaultPlan::nth(n).with_code([2, 801, 1][turn % 3]));
        program(&rig, false);
        rig.sim.set_faults(FaultPlan::none());
        rig.close();
    }
}

#[test]
fn the_default_preset_survives_a_failure_of_each_call() {
    fail_each_call(card, Preset::Vramp, &program);
}

#[test]
fn vpmm_survives_a_failure_of_each_call() {
    fail_each_call(card, Preset::Vpmm, &program);
}

#[test]
fn the_drivers_pool_survives_a_failure_of_each_call() {
    fail_each_call(card, Preset::StreamOrdered, &program);
}

#[test]
fn a_recorded_job_survives_a_failure_of_each_call_on_every_preset() {
    let workload = recorded();
    for preset in [Preset::Vramp, Preset::Vpmm, Preset::StreamOrdered] {
        fail_each_call(Simulator::builder, preset, &|rig, audit| {
            let failed = replay(&workload, rig, audit);
            let chunks = |pool: &vramp_core::Pool| {
                pool.counters().chunks_created - pool.counters().chunks_released
            };
            let chunks = rig.allocator.pool_state().as_ref().map(chunks).unwrap_or_default();
            assert_eq!(rig.sim.live().handles as u64, chunks, "a handle for each chunk");
            failed
        });
    }
}

#[test]
fn pytorchs_allocator_survives_a_failure_of_each_call() {
    fail_each_call(card, Preset::Torch, &program);
    fail_each_call(card, Preset::TorchExpandable, &program);
}

#[test]
fn each_kind_of_call_may_fail_for_good() {
    let used = [
        Call::Reserve,
        Call::Create,
        Call::Release,
        Call::Map,
        Call::Unmap,
        Call::SetAccess,
        Call::CreateEvent,
        Call::Record,
        Call::Query,
        Call::Wait,
        Call::MallocAsync,
        Call::FreeAsync,
        Call::AllocMemory,
        Call::FreeMemory,
        Call::SynchronizeStream,
    ];
    for preset in Preset::ALL {
        for call in used {
            for code in [2, 1] {
                let rig = Rig::on(card(), preset.config());
                rig.sim.set_faults(FaultPlan::from_nth_of(call, 5).with_code(code));
                program(&rig, false);
                rig.sim.set_faults(FaultPlan::none());
            }
        }
    }
}

const MIB: Bytes = Bytes::mib(1);

/// Objects that leak in the driver because a destroying call failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Lost {
    graphs: usize,
    execs: usize,
}

/// A capture with a fork and a join, memory from before and blocks that escape; replays on two
/// streams; pressure that takes the idle arena's memory, and replays that bring it back.
struct Scenario {
    rig: GraphRig,
    graphs: Vec<CapturedGraph>,
    /// Blocks of the first capture, and what the graph leaves in them.
    escaped: Vec<(Allocation, u8)>,
}

impl Scenario {
    fn new(policy: ArenaPolicy) -> (Scenario, GraphArena) {
        let config = Config { limit: Some(MIB * 96), ..Config::default() };
        let rig = GraphRig::with(graph_card(), config);
        let overlap = Overlap::Order;
        let capacity = MIB * 64;
        let arena =
            rig.arena_of(ArenaConfig { policy, capacity, overlap, ..ArenaConfig::default() });
        (Scenario { rig, graphs: Vec::new(), escaped: Vec::new() }, arena)
    }

    /// Failures are survived; each is checked on the spot.
    fn run(&mut self, arena: &GraphArena) {
        for round in 0..2 {
            self.capture(arena, round);
            self.replay(true);
            self.pressure();
            self.replay(round == 0);
        }
    }

    fn capture(&mut self, arena: &GraphArena, round: u8) {
        let GraphRig { base, a, b } = &self.rig;
        let (a, b) = (*a, *b);
        let mut before = base.allocator.malloc(MIB * 4, a).ok();
        let mut escaped = None;
        let captured = base.allocator.capture(a, arena, || {
            let malloc = |size, stream| base.allocator.malloc(size, stream).ok();
            let first = malloc(MIB * 20, a);
            self.step(a, first.as_ref(), 1);
            fork(&self.rig, a, b);
            let second = malloc(MIB * 3, b);
            self.step(b, second.as_ref(), 2);
            fork(&self.rig, b, a);
            for block in [first, second, before.take()].into_iter().flatten() {
                // A failure leaves it free all the same.
                let _ = base.allocator.free(block, a);
            }
            let third = malloc(MIB * 18, a);
            self.step(a, third.as_ref(), 3 + round);
            escaped = third;
        });
        match captured {
            Ok((graph, ())) => self.graphs.push(graph),
            Err(error) => {
                let typed = matches!(
                    error,
                    CaptureError::Begin(_) | CaptureError::Invalidated(_) | CaptureError::Alloc(_)
                );
                assert!(typed && !error.to_string().is_empty(), "{error}");
            }
        }
        // Where the capture did not begin.
        if let Some(block) = before {
            let _ = base.allocator.free(block, a);
        }
        if let Some(block) = escaped {
            self.escaped.push((block, 3 + round));
        }
        self.look();
    }

    /// The fill itself may be what fails.
    fn step(&self, stream: StreamId, block: Option<&Allocation>, byte: u8) {
        if let Some(block) = block {
            let _ = self.rig.base.sim.fill(self.rig.raw(stream), range(block), byte);
        }
    }

    fn replay(&mut self, in_turn: bool) {
        let GraphRig { a, b, .. } = self.rig;
        for graph in &self.graphs {
            for stream in if in_turn { [a, b] } else { [b, a] } {
                match graph.launch(stream) {
                    Ok(lease) => drop(lease),
                    Err(error) => {
                        let typed = matches!(error, LaunchError::Driver(_) | LaunchError::Alloc(_));
                        assert!(typed && !error.to_string().is_empty(), "{error}");
                    }
                }
                self.look();
            }
        }
        for stream in [a, b] {
            let _ = self.rig.base.sim.synchronize_stream(self.rig.raw(stream));
        }
    }

    /// Blocks that need the idle arena's memory. They may be had or not.
    fn pressure(&self) {
        let GraphRig { base, b, .. } = &self.rig;
        let blocks: Vec<Allocation> =
            (0..11).map_while(|_| base.allocator.malloc(MIB * 8, *b).ok()).collect();
        for block in &blocks {
            self.step(*b, Some(block), 9);
        }
        self.look();
        for block in blocks {
            let _ = base.allocator.free(block, *b);
        }
        self.look();
    }

    fn look(&self) {
        let GraphRig { base, a, b } = &self.rig;
        base.allocator.audit().expect("a failure keeps every invariant");
        assert_eq!(base.sim.hazards(), []);
        assert_eq!(base.sim.device_loss(), None);
        assert_eq!(base.sim.live().captures, 0);
        let faults_gone = [a, b].map(|stream| {
            let raw = self.rig.raw(*stream);
            // The question itself may be what fails.
            base.sim.is_capturing(raw).or_else(|_| base.sim.is_capturing(raw))
        });
        assert!(faults_gone.iter().all(|captures| matches!(captures, Ok(false))));
    }

    /// Without failures everything works again, and everything comes back.
    fn finish(mut self, arena: GraphArena) -> Lost {
        self.rig.base.sim.set_faults(FaultPlan::none());
        self.rig.audit();
        self.replay(true);
        // Memory that could neither be used nor given back is counted there.
        let census = self.rig.base.census();
        if (census.quarantined_memory + census.quarantined_addresses).is_zero() {
            for graph in &self.graphs {
                drop(graph.launch(self.rig.a).expect("nothing fails any more"));
            }
            self.rig.assert_serves();
        }
        let Scenario { rig, graphs, escaped } = self;
        for (block, _) in escaped {
            rig.free(block, rig.a);
        }
        rig.audit();
        assert_eq!(arena.report().blocks, 0, "no block of the arena is lost");
        drop((graphs, arena));
        for stream in [rig.a, rig.b] {
            rig.sync(stream);
        }
        let live = rig.base.allocator.stats().expect("no call fails").live;
        assert_eq!(live, Bytes::ZERO, "no block is lost");
        rig.base.allocator.close().expect("nothing is in the way");
        let live = rig.base.sim.live();
        assert_eq!((live.handles, live.mappings, live.reservations), (0, 0, 0));
        assert_eq!((live.device_bytes, live.streams, live.captures), (Bytes::ZERO, 0, 0));
        assert!(live.events <= 1, "an event that could not be destroyed");
        Lost { graphs: live.graphs, execs: live.graph_execs }
    }
}

/// A fork or a join whose calls may fail.
fn fork(rig: &GraphRig, from: StreamId, to: StreamId) {
    let sim = &rig.base.sim;
    let Ok(event) = sim.create_event() else { return };
    if sim.record(event, rig.raw(from)).is_ok() {
        let _ = sim.wait(rig.raw(to), event);
    }
    let _ = sim.destroy_event(event).or_else(|_| sim.destroy_event(event));
}

fn run(policy: ArenaPolicy, plan: FaultPlan) -> (Lost, u64) {
    let (mut scenario, arena) = Scenario::new(policy);
    let before = scenario.rig.base.sim.calls();
    scenario.rig.base.sim.set_faults(plan);
    scenario.run(&arena);
    let calls = scenario.rig.base.sim.calls() - before;
    (scenario.finish(arena), calls)
}

const POLICIES: [ArenaPolicy; 2] = [ArenaPolicy::Reusing, ArenaPolicy::Monotone];

#[test]
fn captures_replays_and_lending_survive_a_failure_of_each_call() {
    for policy in POLICIES {
        let (lost, calls) = run(policy, FaultPlan::none());
        assert_eq!(lost, Lost::default());
        assert!(calls > 200, "{calls}");
        for (turn, n) in failing_calls(calls).enumerate() {
            let code = [2, 801, 1][turn % 3];
            let (lost, _) = run(policy, FaultPlan::nth(n).with_code(code));
            // Objects whose destruction failed leak in the driver.
            assert!(lost.graphs + lost.execs <= 1, "call {n}, code {code}: {lost:?}");
        }
    }
}

#[test]
fn each_kind_of_call_may_fail_for_good_amid_captures() {
    for policy in POLICIES {
        for call in Call::ALL {
            // Without these calls no capture ends and nothing is returned.
            if matches!(
                call,
                Call::EndCapture | Call::DestroyGraph | Call::DestroyGraphExec | Call::DestroyEvent
            ) {
                continue;
            }
            for from in [1, 3, 7] {
                println!("{policy:?} {call:?} from {from}");
                let plan = FaultPlan::from_nth_of(call, from).with_code(1);
                let (mut scenario, arena) = Scenario::new(policy);
                scenario.rig.base.sim.set_faults(plan);
                if call == Call::IsCapturing {
                    // The test asks, too.
                    scenario.capture_only(&arena);
                } else {
                    scenario.run(&arena);
                }
                scenario.finish(arena);
            }
        }
    }
}

impl Scenario {
    /// One capture that is not looked at.
    fn capture_only(&mut self, arena: &GraphArena) {
        let GraphRig { base, a, .. } = &self.rig;
        let captured = base.allocator.capture(*a, arena, || {
            let block = base.allocator.malloc(MIB, *a).ok();
            if let Some(block) = block {
                let _ = base.allocator.free(block, *a);
            }
        });
        if let Ok((graph, ())) = captured {
            let _ = graph.launch(*a);
        }
    }
}
