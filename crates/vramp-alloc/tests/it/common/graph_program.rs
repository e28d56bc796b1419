//! A random program of captures, forks, joins, allocations and frees, replays, ordinary memory
//! under pressure, and letting go, that always keeps the rules of a well-behaved user. Whatever the
//! happens-before checker or a look at the bytes finds is the allocator's fault, or the device's.
use std::sync::Arc;

use vramp_alloc::graph::{
    ArenaConfig, ArenaPolicy, CapturedGraph, GraphArena, LaunchError, Overlap, ReplayLease,
};
use vramp_alloc::{Allocation, Allocator, Bytes, Config, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Kernel, Simulator};
use vramp_driver::{DeviceCopy, Stream};

use super::random::Random;

/// What was done. Every count is of calls that went well.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    pub steps: u64,
    pub captures: u64,
    pub replays: u64,
    pub refused: u64,
    pub mallocs: u64,
    pub looks: u64,
}

/// A block outside of arenas, and who worked on it last.
struct Held {
    block: Allocation,
    last: StreamId,
}

/// A block within a capture: the stream whose captured work used it last.
struct Inner {
    block: Allocation,
    last: usize,
}

/// A graph, and what each replay leaves in its result.
struct Known {
    graph: CapturedGraph,
    /// Outside of arenas. Freed with the graph.
    result: Allocation,
    byte: u8,
    /// In the arena: what the graph writes first, for others to read under the lease.
    escaped: Option<Allocation>,
    /// Stream that replayed it last, if one did since its result was last read.
    replayed: Option<StreamId>,
}

pub struct Program {
    pub sim: Arc<Simulator>,
    pub allocator: Allocator,
    pub summary: Summary,
    random: Random,
    streams: Vec<StreamId>,
    arenas: Vec<GraphArena>,
    graphs: Vec<Known>,
    held: Vec<Held>,
    leases: Vec<ReplayLease>,
    stores_bytes: bool,
    /// Reads of results on other streams are not recorded.
    pub careless: bool,
    /// Plan a layout after each capture. Slow: a planner that reaches no bound uses its budget up.
    pub replan: bool,
}

/// Why the program ended early.
pub type Finding = String;

/// What all memory together may be.
const LIMIT: Bytes = Bytes::mib(48);

impl Program {
    /// `driver` is the simulator, or a device before it.
    pub fn new(
        sim: Arc<Simulator>,
        driver: Arc<dyn Driver>,
        seed: u64,
        stores_bytes: bool,
    ) -> Program {
        let config = Config { limit: Some(LIMIT), ..Config::default() };
        let allocator = Allocator::new(driver, config).expect("the configuration is possible");
        let streams =
            (0..4).map(|_| allocator.create_stream().expect("a stream can be made")).collect();
        Program {
            sim,
            allocator,
            summary: Summary::default(),
            random: Random(seed),
            streams,
            arenas: Vec::new(),
            graphs: Vec::new(),
            held: Vec::new(),
            leases: Vec::new(),
            stores_bytes,
            careless: false,
            replan: false,
        }
    }

    /// Runs until so many steps are done, a captured one counted as one.
    pub fn run(&mut self, steps: u64) -> Result<(), Finding> {
        while self.summary.steps < steps {
            self.summary.steps += 1;
            match self.random.below(100) {
                0..6 => self.capture()?,
                6..34 => self.replay(),
                34..54 => self.malloc(),
                54..66 => self.work(),
                66..80 => self.free(),
                80..84 => self.end_leases(),
                84..88 => self.drop_graph()?,
                88..90 => self.drop_arena(),
                90..94 => self.look_at_result()?,
                94..98 => self.sim.advance(1 << self.random.below(20)),
                _ => {
                    let to = Bytes::mib(self.random.below(48));
                    self.allocator.trim(to).map_err(|error| error.to_string())?;
                }
            }
            self.check()?;
        }
        Ok(())
    }

    /// Lets go of everything, and looks once more.
    pub fn finish(mut self) -> Result<Summary, Finding> {
        self.leases.clear();
        while !self.graphs.is_empty() {
            self.drop_graph()?;
        }
        while !self.held.is_empty() {
            self.free();
        }
        self.arenas.clear();
        self.check()?;
        let live = self.allocator.stats().map_err(|error| error.to_string())?.live;
        if live != Bytes::ZERO {
            return Err(format!("{live} are lost"));
        }
        self.allocator.close().map_err(|error| error.to_string())?;
        let live = self.sim.live();
        if live != vramp_driver::sim::LiveObjects::default() {
            return Err(format!("left on the device: {live:?}"));
        }
        Ok(self.summary)
    }

    fn check(&self) -> Result<(), Finding> {
        if let Some(hazard) = self.sim.hazards().first() {
            return Err(hazard.to_string());
        }
        if let Some(fault) = self.sim.device_loss() {
            return Err(fault.explanation);
        }
        if self.summary.steps.is_multiple_of(16) {
            self.allocator.audit().map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    // --- captures ---

    fn pick_arena(&mut self) -> GraphArena {
        if self.arenas.len() < 3 {
            let monotone = self.random.below(4) == 0;
            let (policy, capacity) = match monotone {
                true => (ArenaPolicy::Monotone, Bytes::mib(12)),
                false => (ArenaPolicy::Reusing, Bytes::gib(1)),
            };
            let overlap = if self.random.below(2) == 0 { Overlap::Order } else { Overlap::Refuse };
            let replan = self.replan;
            let config =
                ArenaConfig { policy, capacity, overlap, replan, ..ArenaConfig::default() };
            self.arenas.push(self.allocator.graph_arena(config).expect("there are addresses"));
        }
        self.random.pick(&self.arenas).clone()
    }

    /// A capture on two or three streams whose last work copies one byte to a result outside.
    fn capture(&mut self) -> Result<(), Finding> {
        if self.graphs.len() >= 6 {
            return Ok(());
        }
        let arena = self.pick_arena();
        // A monotone arena ends where its capacity does.
        let _ = arena.reset();
        let origin = self.random.below(self.streams.len() as u64) as usize;
        let streams: Vec<StreamId> =
            (0..3).map(|n| self.streams[(origin + n) % self.streams.len()]).collect();
        let Ok(result) = self.allocator.malloc(Bytes::kib(256), streams[0]) else {
            self.free();
            return Ok(());
        };
        // From before, and perhaps freed inside.
        let before = self.allocator.malloc(Bytes::kib(512), streams[0]).ok();
        let byte = 1 + self.random.below(255) as u8;
        let steps = 2 + self.random.below(40);
        let random = Random(self.random.next());
        let mut body = Body {
            sim: &self.sim,
            allocator: &self.allocator,
            random,
            streams: &streams,
            drawn_in: vec![true, false, false],
            ordered: vec![
                vec![true, false, false],
                vec![false, true, false],
                vec![false, false, true],
            ],
            blocks: Vec::new(),
            before,
            escaped: None,
        };
        let captured =
            self.allocator.capture(streams[0], &arena, || body.run(steps, &result, byte));
        let (before, escaped) = (body.before.take(), body.escaped.take());
        if let Some(block) = before {
            self.held.push(Held { block, last: streams[0] });
        }
        let done = self.summary.steps + steps;
        match captured {
            Ok((graph, Ok(()))) => {
                self.summary.captures += 1;
                self.graphs.push(Known { graph, result, byte, escaped, replayed: None });
            }
            Ok((_, Err(finding))) => return Err(finding),
            Err(vramp_alloc::graph::CaptureError::Alloc(error)) if error.is_out_of_memory() => {
                self.summary.refused += 1;
                self.held.push(Held { block: result, last: streams[0] });
            }
            Err(error) => return Err(error.to_string()),
        }
        self.summary.steps = done;
        Ok(())
    }

    fn replay(&mut self) {
        if self.graphs.is_empty() {
            return;
        }
        let index = self.random.below(self.graphs.len() as u64) as usize;
        let stream = *self.random.pick(&self.streams);
        // Memory from before the capture was made on its stream: the first replay comes behind
        // that. The others are the leases' to order.
        let Known { graph, replayed, result, .. } = &self.graphs[index];
        if replayed.is_none() {
            self.order(result.stream(), stream);
        }
        match graph.launch(stream) {
            Ok(lease) => {
                let reader = *self.random.pick(&self.streams);
                if let Some(escaped) = &self.graphs[index].escaped {
                    self.order(stream, reader);
                    let kernel = Kernel::new("reader").reading(range(escaped)).lasting(1 << 24);
                    self.sim.launch(self.raw(reader), kernel).expect("the stream takes work");
                    if !self.careless {
                        self.allocator.record_use(escaped, reader).expect("it is ours");
                    }
                }
                self.graphs[index].replayed = Some(stream);
                self.summary.replays += 1;
                if self.random.below(3) == 0 {
                    self.leases.push(lease);
                }
            }
            Err(LaunchError::Busy(_)) => self.summary.refused += 1,
            Err(LaunchError::Alloc(error)) if error.is_out_of_memory() => self.summary.refused += 1,
            Err(error) => panic!("{error}"),
        }
    }

    fn end_leases(&mut self) {
        while !self.leases.is_empty() && self.random.below(4) > 0 {
            let index = self.random.below(self.leases.len() as u64) as usize;
            drop(self.leases.swap_remove(index));
        }
    }

    fn look_at_result(&mut self) -> Result<(), Finding> {
        if self.graphs.is_empty() || !self.stores_bytes {
            return Ok(());
        }
        let index = self.random.below(self.graphs.len() as u64) as usize;
        self.look(index)
    }

    fn look(&mut self, index: usize) -> Result<(), Finding> {
        let Known { replayed, result, byte, .. } = &self.graphs[index];
        let (Some(stream), true) = (replayed, self.stores_bytes) else { return Ok(()) };
        // Others may lie before it in the order of the device.
        let synchronized = self.sim.synchronize_stream(self.raw(*stream));
        synchronized.map_err(|error| error.to_string())?;
        let bytes = self.sim.peek(range(result)).ok_or("the result can be touched")?;
        if let Some(wrong) = bytes.iter().find(|found| *found != byte) {
            return Err(format!("a replay left {wrong} where {byte} was due"));
        }
        self.summary.looks += 1;
        Ok(())
    }

    fn drop_graph(&mut self) -> Result<(), Finding> {
        if self.graphs.is_empty() {
            return Ok(());
        }
        let index = self.random.below(self.graphs.len() as u64) as usize;
        self.look(index)?;
        let Known { graph, result, replayed, escaped, .. } = self.graphs.swap_remove(index);
        if let Some(block) = escaped {
            self.free_block(block, replayed.unwrap_or(result.stream()));
        }
        let last = replayed.unwrap_or(result.stream());
        drop(graph);
        self.held.push(Held { block: result, last });
        Ok(())
    }

    fn drop_arena(&mut self) {
        if self.arenas.len() > 1 {
            let index = self.random.below(self.arenas.len() as u64) as usize;
            drop(self.arenas.swap_remove(index));
        }
    }

    // --- ordinary memory ---

    fn malloc(&mut self) {
        let stream = *self.random.pick(&self.streams);
        let size = Bytes::new(1 + self.random.below(12 << 20));
        match self.allocator.malloc(size, stream) {
            Ok(block) => {
                self.summary.mallocs += 1;
                let kernel = Kernel::new("first").writing(range(&block));
                let kernel = kernel.lasting(1 << self.random.below(20));
                self.sim.launch(self.raw(stream), kernel).expect("the stream takes work");
                self.held.push(Held { block, last: stream });
            }
            Err(error) => {
                assert!(error.is_out_of_memory(), "{error}");
                self.summary.refused += 1;
                self.free();
                self.free();
            }
        }
    }

    fn work(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let index = self.random.below(self.held.len() as u64) as usize;
        let stream = *self.random.pick(&self.streams);
        let Held { block, last } = &self.held[index];
        self.order(*last, stream);
        let kernel = Kernel::new("work").writing(range(block));
        let kernel = kernel.lasting(1 << self.random.below(20));
        self.sim.launch(self.raw(stream), kernel).expect("the stream takes work");
        self.held[index].last = stream;
    }

    fn free(&mut self) {
        if self.held.is_empty() {
            return;
        }
        let index = self.random.below(self.held.len() as u64) as usize;
        let Held { block, last } = self.held.swap_remove(index);
        self.free_block(block, last);
    }

    /// On any stream; work on another one is noted.
    fn free_block(&mut self, block: Allocation, last: StreamId) {
        let stream = *self.random.pick(&self.streams);
        if stream != last {
            self.allocator.record_use(&block, last).expect("it is ours");
        }
        self.allocator.free(block, stream).expect("it is ours");
    }

    fn order(&self, earlier: StreamId, later: StreamId) {
        order(&self.sim, self.raw(earlier), self.raw(later));
    }

    fn raw(&self, stream: StreamId) -> Stream {
        self.allocator.stream(stream).expect("it is open")
    }
}

/// What a capture does.
struct Body<'a> {
    sim: &'a Simulator,
    allocator: &'a Allocator,
    random: Random,
    streams: &'a [StreamId],
    drawn_in: Vec<bool>,
    /// Whether all work of the second stream so far is ordered before what comes on the first.
    ordered: Vec<Vec<bool>>,
    blocks: Vec<Inner>,
    before: Option<Allocation>,
    escaped: Option<Allocation>,
}

impl Body<'_> {
    fn run(&mut self, steps: u64, result: &Allocation, byte: u8) -> Result<(), Finding> {
        // The first block is handed on to the last step.
        let Ok(mut carried) = self.allocator.malloc(result.len(), self.streams[0]) else {
            let filled = self.sim.fill(self.raw(0), range(result), byte);
            return filled.map_err(|error| error.to_string());
        };
        self.sim.fill(self.raw(0), range(&carried), byte).map_err(|error| error.to_string())?;
        self.worked(0);
        if self.random.below(2) == 0
            && let Ok(block) = self.allocator.malloc(Bytes::kib(512), self.streams[0])
        {
            self.launch(0, Kernel::new("output").writing(range(&block)));
            self.escaped = Some(block);
        }
        for _ in 0..steps {
            let on = self.pick_stream();
            match self.random.below(100) {
                0..30 => self.malloc(on),
                30..50 => self.work(on),
                50..75 => self.free(on),
                75..85 => self.order(on),
                85..90 => {
                    if let Some(block) = self.before.take_if(|_| self.random.below(2) == 0) {
                        self.launch(0, Kernel::new("before").reading(range(&block)));
                        self.allocator.free(block, self.streams[0]).expect("it is ours");
                    }
                }
                _ => {
                    // The byte moves on to another block.
                    if let Ok(next) = self.allocator.malloc(result.len(), self.streams[0]) {
                        let len = carried.len();
                        let copy = DeviceCopy { from: carried.addr(), to: next.addr(), len };
                        self.sim.copy(self.raw(0), copy).map_err(|error| error.to_string())?;
                        self.worked(0);
                        let old = std::mem::replace(&mut carried, next);
                        self.allocator.free(old, self.streams[0]).expect("it is ours");
                    }
                }
            }
        }
        let len = result.len();
        let copy = DeviceCopy { from: carried.addr(), to: result.addr(), len };
        self.sim.copy(self.raw(0), copy).map_err(|error| error.to_string())?;
        self.allocator.free(carried, self.streams[0]).expect("it is ours");
        for other in 1..self.streams.len() {
            if self.drawn_in[other] {
                self.join(other, 0);
            }
        }
        while let Some(Inner { block, .. }) = self.blocks.pop() {
            self.allocator.free(block, self.streams[0]).expect("it is ours");
        }
        Ok(())
    }

    fn pick_stream(&mut self) -> usize {
        let drawn_in: Vec<usize> = (0..self.streams.len()).filter(|&n| self.drawn_in[n]).collect();
        *self.random.pick(&drawn_in)
    }

    fn malloc(&mut self, on: usize) {
        let size = Bytes::new(1 + self.random.below(3 << 20));
        if let Ok(block) = self.allocator.malloc(size, self.streams[on]) {
            self.launch(on, Kernel::new("captured first").writing(range(&block)).lasting(1 << 12));
            self.blocks.push(Inner { block, last: on });
        }
    }

    fn work(&mut self, on: usize) {
        if self.blocks.is_empty() {
            return;
        }
        let index = self.random.below(self.blocks.len() as u64) as usize;
        let last = self.blocks[index].last;
        if !self.ordered[on][last] {
            self.join(last, on);
        }
        let kernel = Kernel::new("captured").writing(range(&self.blocks[index].block));
        self.launch(on, kernel.lasting(1 << 12));
        self.blocks[index].last = on;
    }

    /// On any stream; where its last work is not ordered before, that use is noted.
    fn free(&mut self, on: usize) {
        if self.blocks.is_empty() {
            return;
        }
        let index = self.random.below(self.blocks.len() as u64) as usize;
        let Inner { block, last } = self.blocks.swap_remove(index);
        if !self.ordered[on][last] {
            self.allocator.record_use(&block, self.streams[last]).expect("it is ours");
        }
        self.allocator.free(block, self.streams[on]).expect("it is ours");
    }

    /// A fork or a join with any other stream of the three.
    fn order(&mut self, from: usize) {
        let to = self.random.below(self.streams.len() as u64) as usize;
        if to != from {
            self.join(from, to);
        }
    }

    fn join(&mut self, from: usize, to: usize) {
        order(self.sim, self.raw(from), self.raw(to));
        self.drawn_in[to] = true;
        self.ordered[to][from] = true;
        for other in 0..self.streams.len() {
            // Whatever is ordered before `from` as it stands is ordered before `to` now.
            if self.ordered[from][other] {
                self.ordered[to][other] = true;
            }
        }
    }

    /// Records new work on a stream: no stream is ordered behind it yet.
    fn worked(&mut self, on: usize) {
        for other in 0..self.streams.len() {
            self.ordered[other][on] = other == on;
        }
    }

    fn launch(&mut self, on: usize, kernel: Kernel) {
        self.sim.launch(self.raw(on), kernel).expect("the capture goes on");
        self.worked(on);
    }

    fn raw(&self, on: usize) -> Stream {
        self.allocator.stream(self.streams[on]).expect("it is open")
    }
}

fn range(block: &Allocation) -> AddrRange {
    AddrRange::new(block.addr(), block.len())
}

fn order(sim: &Simulator, earlier: Stream, later: Stream) {
    if earlier != later {
        let event = sim.create_event().expect("an event can be made");
        sim.record(event, earlier).expect("the stream takes work");
        sim.wait(later, event).expect("the stream takes work");
        sim.destroy_event(event).expect("it is there");
    }
}
