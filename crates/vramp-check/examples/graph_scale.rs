//! How captures grow: host time of large captures, of planning, of many graphs in one arena, of many
//! uses in one capture, and of many arenas. On a simulated card, whose own time is part of it.
//!
//! `cargo run --release -p vramp-check --example graph_scale -- [plans] [graphs] [uses] [arenas]`

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vramp_alloc::device::sim::Simulator;
use vramp_alloc::graph::{ArenaConfig, CaptureReport, CapturedGraph, GraphArena};
use vramp_alloc::{Allocation, Allocator, Bytes, Config, Driver, StreamId};
use vramp_core::AddrRange;

type Done<T> = Result<T, Box<dyn Error>>;
type Part = (&'static str, fn() -> Done<()>);

fn main() -> Done<()> {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let parts: [Part; 4] =
        [("plans", plans), ("graphs", graphs), ("uses", uses), ("arenas", arenas)];
    for (name, part) in parts {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            part()?;
        }
    }
    Ok(())
}

/// An allocator on a simulated card, and streams.
struct Rig {
    sim: Arc<Simulator>,
    allocator: Allocator,
    streams: Vec<StreamId>,
}

impl Rig {
    fn new(streams: usize) -> Done<Rig> {
        let sim = Arc::new(Simulator::card("h200")?);
        let driver: Arc<dyn Driver> = Arc::clone(&sim) as Arc<dyn Driver>;
        let allocator = Allocator::new(driver, Config::default())?;
        let streams = (0..streams).map(|_| allocator.create_stream());
        let streams = streams.collect::<Result<_, _>>()?;
        Ok(Rig { sim, allocator, streams })
    }

    fn malloc(&self, size: Bytes, stream: StreamId) -> Done<Allocation> {
        Ok(self.allocator.malloc(size, stream)?)
    }

    fn free(&self, block: Allocation, stream: StreamId) -> Done<()> {
        self.allocator.free(block, stream).map_err(|error| format!("{error:?}").into())
    }

    /// A kernel that writes the start of a block.
    fn write(&self, block: &Allocation, stream: StreamId) -> Done<()> {
        let queue = self.allocator.stream(stream).ok_or("the stream is open")?;
        let range = AddrRange::new(block.addr(), Bytes::new(256));
        Ok(self.sim.fill(queue, range, 1)?)
    }

    fn order(&self, earlier: StreamId, later: StreamId) -> Done<()> {
        let raw = |stream| self.allocator.stream(stream).ok_or("the stream is open");
        let event = self.sim.create_event()?;
        self.sim.record(event, raw(earlier)?)?;
        self.sim.wait(raw(later)?, event)?;
        Ok(self.sim.destroy_event(event)?)
    }

    /// Captures blocks of irregular sizes and lives on all streams. Returns the time of the
    /// program, and of the capture's end.
    fn irregular(
        &self,
        arena: &GraphArena,
        blocks: usize,
    ) -> Done<(Duration, Duration, CapturedGraph)> {
        let mut random = fastrand::Rng::with_seed(1);
        let main = self.streams[0];
        let begun = Instant::now();
        let mut capture = self.allocator.begin_capture(main, arena)?;
        let first = self.malloc(Bytes::kib(4), main)?;
        self.write(&first, main)?;
        for &side in &self.streams[1..] {
            self.order(main, side)?;
        }
        let mut live: Vec<Vec<Allocation>> = self.streams.iter().map(|_| Vec::new()).collect();
        let most = (300 / self.streams.len()).max(4);
        for block in 1..blocks {
            let at = block % self.streams.len();
            let (stream, held) = (self.streams[at], &mut live[at]);
            let size = Bytes::new((1 << (9 + random.u64(0..13))) + random.u64(0..1 << 12));
            let block = self.malloc(size, stream)?;
            self.write(&block, stream)?;
            held.push(block);
            if held.len() > most {
                self.free(held.swap_remove(random.usize(0..most)), stream)?;
            }
        }
        for (blocks, &stream) in live.into_iter().zip(&self.streams) {
            for block in blocks {
                self.free(block, stream)?;
            }
            if stream != main {
                self.order(stream, main)?;
            }
        }
        self.free(first, main)?;
        let ending = Instant::now();
        let graph = capture.end()?;
        Ok((ending - begun, ending.elapsed(), graph))
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Planning, beside the same capture without.
fn plans() -> Done<()> {
    println!(
        "blocks streams capture | program ms | end ms, without planning | planned / bound, taken / bound | visits"
    );
    for streams in [1, 64] {
        for blocks in [1_000, 4_000, 20_000] {
            let rig = Rig::new(streams)?;
            let bare = rig
                .allocator
                .graph_arena(ArenaConfig { replan: false, ..ArenaConfig::default() })?;
            let (_, without, graph) = rig.irregular(&bare, blocks)?;
            drop(graph);
            let arena = rig.allocator.graph_arena(ArenaConfig::default())?;
            for capture in ["first", "second", "third"] {
                let (program, end, graph) = rig.irregular(&arena, blocks)?;
                let CaptureReport { taken, planned, lower_bound, plan_visits, .. } =
                    *graph.report();
                let over = |bytes: Bytes| bytes.count() as f64 / lower_bound.count() as f64;
                println!(
                    "{blocks:6} {streams:7} {capture:7} | {:8.2} | {:8.2} {:8.2} | {:.4} {:.4} | {plan_visits}",
                    ms(program),
                    ms(end),
                    ms(without),
                    over(planned.unwrap_or_default()),
                    over(taken)
                );
            }
        }
    }
    Ok(())
}

/// Many graphs captured into one arena.
fn graphs() -> Done<()> {
    const GRAPHS: usize = 10_000;
    println!(
        "graphs in one arena | us of a capture: median of first 100, of last 100; drops: all ms"
    );
    for (what, escapes) in [("no block escapes", false), ("one block escapes", true)] {
        let rig = Rig::new(1)?;
        let stream = rig.streams[0];
        let arena = rig.allocator.graph_arena(ArenaConfig::default())?;
        let (mut graphs, mut times) = (Vec::new(), Vec::new());
        for number in 0..GRAPHS {
            let begun = Instant::now();
            let mut capture = rig.allocator.begin_capture(stream, &arena)?;
            let scratch = rig.malloc(Bytes::kib(64 + number as u64 % 7), stream)?;
            rig.write(&scratch, stream)?;
            let output = rig.malloc(Bytes::kib(256), stream)?;
            rig.write(&output, stream)?;
            rig.free(scratch, stream)?;
            let output = match escapes {
                true => Some(output),
                false => {
                    rig.free(output, stream)?;
                    None
                }
            };
            let graph = capture.end()?;
            drop(capture);
            times.push(begun.elapsed());
            graphs.push((graph, output));
        }
        let median = |times: &[Duration]| {
            let mut times = times.to_vec();
            times.sort_unstable();
            times[times.len() / 2].as_secs_f64() * 1e6
        };
        let begun = Instant::now();
        let mut random = fastrand::Rng::with_seed(1);
        while !graphs.is_empty() {
            let (graph, output) = graphs.swap_remove(random.usize(0..graphs.len()));
            drop(graph);
            if let Some(output) = output {
                rig.free(output, stream)?;
            }
        }
        let (first, last) = (median(&times[..100]), median(&times[GRAPHS - 100..]));
        println!("{what:18} | {first:8.1} {last:8.1}; {:8.1}", ms(begun.elapsed()));
    }
    Ok(())
}

/// Uses of memory from outside, recorded in a capture.
fn uses() -> Done<()> {
    const USES: usize = 100_000;
    let rig = Rig::new(1)?;
    let stream = rig.streams[0];
    let arena = rig.allocator.graph_arena(ArenaConfig::default())?;
    let blocks: Vec<Allocation> =
        (0..USES).map(|_| rig.malloc(Bytes::new(512), stream)).collect::<Done<_>>()?;
    let mut capture = rig.allocator.begin_capture(stream, &arena)?;
    let begun = Instant::now();
    for block in &blocks {
        rig.allocator.record_use(block, stream)?;
    }
    let recorded = begun.elapsed();
    let begun = Instant::now();
    for block in blocks {
        rig.free(block, stream)?;
    }
    println!(
        "{USES} uses recorded in a capture: {:.1} ms; freed in it: {:.1} ms",
        ms(recorded),
        ms(begun.elapsed())
    );
    let begun = Instant::now();
    drop(capture.end()?);
    println!("ended and dropped: {:.1} ms", ms(begun.elapsed()));
    Ok(())
}

/// Many arenas of the default configuration, each with a graph.
fn arenas() -> Done<()> {
    const ARENAS: usize = 10_000;
    let rig = Rig::new(1)?;
    let stream = rig.streams[0];
    let mut held = Vec::new();
    let mut laps = Vec::new();
    for number in 0..ARENAS {
        let begun = Instant::now();
        let made = rig.allocator.graph_arena(ArenaConfig::default());
        let arena = match made {
            Ok(arena) => arena,
            Err(error) => {
                println!("arena {number}: {error}");
                break;
            }
        };
        let mut capture = rig.allocator.begin_capture(stream, &arena)?;
        // The memory of idle arenas serves the next one.
        let block = rig.malloc(Bytes::mib(100), stream)?;
        rig.write(&block, stream)?;
        rig.free(block, stream)?;
        held.push(capture.end()?);
        laps.push(begun.elapsed());
        if (number + 1).is_power_of_two() || number + 1 == ARENAS {
            println!("arena {:6}: {:8.1} us", number + 1, laps[number].as_secs_f64() * 1e6);
        }
    }
    let begun = Instant::now();
    drop(held);
    println!("dropped: {:.1} ms", ms(begun.elapsed()));
    Ok(())
}
