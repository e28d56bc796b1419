//! Every driver call of captures, replays and lending fails once: nothing is lost, the stream is
//! out of the capture, the error has a type, and the program goes on to its end.

use crate::common::graph_rig::{GraphRig, card, range};
use vramp_alloc::graph::{
    ArenaConfig, ArenaPolicy, CaptureError, CapturedGraph, GraphArena, LaunchError, Overlap,
};
use vramp_alloc::{Allocation, Bytes, Config, Driver, StreamId};
use vramp_driver::Call;
use vramp_driver::sim::FaultPlan;
use vramp_testing::failing_calls;

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
        let rig = GraphRig::with(card(), config);
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
