//! Many graphs over one arena: its memory, over that of the largest graph.

use anyhow::Result;
use serde::Serialize;
use vramp::Bytes;
use vramp::graph::{ArenaConfig, CapturedGraph, GraphArena};

use super::Rig;
use super::program::Program;
use crate::Bench;
use crate::statistics::median;

/// Memory of graphs that share an arena.
#[derive(Clone, Debug, Serialize)]
pub struct SharingRow {
    /// `shared`.
    pub measure: &'static str,
    /// Number of graphs.
    pub graphs: u64,
    /// Blocks of all graphs.
    pub blocks: u64,
    /// Physical memory of the shared arena.
    pub backed_bytes: u64,
    /// Memory of the largest graph in an arena of its own.
    pub largest_bytes: u64,
    /// Ratio of these two.
    pub backed_over_largest: f64,
    /// Memory of all graphs, each in an arena of its own.
    pub sum_bytes: u64,
    /// Host time of one capture, the median.
    pub capture_us: f64,
}

pub(super) fn measure(bench: &Bench, graphs: u32, block: Bytes) -> Result<SharingRow> {
    let programs = Program::some(graphs, block);
    let rig = Rig::new(bench.driver()?)?;
    let longest = programs.iter().map(Program::result_len).max().unwrap_or_default();
    let result = rig.allocator().malloc(longest, rig.stream)?;
    let arena = rig.allocator().graph_arena(ArenaConfig::default())?;
    let mut captured = Vec::new();
    let mut times = Vec::new();
    for program in &programs {
        let begun = std::time::Instant::now();
        captured.push(capture(&rig, &arena, program, &result)?);
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let backed = arena.report().backed;
    let mut alone = Vec::new();
    for program in &programs {
        // Enough addresses even without reuse, and few enough that all arenas fit into the
        // device's.
        let capacity = program.result_len() + Bytes::mib(1);
        let own =
            rig.allocator().graph_arena(ArenaConfig { capacity, ..ArenaConfig::default() })?;
        alone.push(capture(&rig, &own, program, &result)?.report().taken);
    }
    let largest = alone.iter().copied().max().unwrap_or_default();
    let row = SharingRow {
        measure: "shared",
        graphs: captured.len() as u64,
        blocks: captured.iter().map(|graph| graph.report().blocks as u64).sum(),
        backed_bytes: backed.count(),
        largest_bytes: largest.count(),
        backed_over_largest: backed.count() as f64 / largest.count() as f64,
        sum_bytes: alone.into_iter().sum::<Bytes>().count(),
        capture_us: median(times),
    };
    drop((captured, arena));
    rig.allocator().free(result, rig.stream)?;
    rig.close()?;
    Ok(row)
}

/// Captures one program.
pub(super) fn capture(
    rig: &Rig,
    arena: &GraphArena,
    program: &Program,
    result: &vramp::Allocation,
) -> Result<CapturedGraph> {
    let (graph, queued) =
        rig.allocator().capture(rig.stream, arena, || program.queue(rig, result))?;
    queued?;
    Ok(graph)
}
