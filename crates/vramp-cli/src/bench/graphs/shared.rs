//! Many graphs over one arena: what it holds, over what the largest of them takes.

use anyhow::Result;
use serde::Serialize;
use vramp_alloc::Bytes;
use vramp_alloc::graph::{ArenaConfig, CapturedGraph, GraphArena};

use super::Site;
use super::program::Program;
use crate::bench::{Bench, Cell, Column, median};

/// One row.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    measure: &'static str,
    graphs: u64,
    blocks: u64,
    /// Memory behind the arena.
    backed_bytes: u64,
    /// What the largest graph takes in an arena of its own.
    largest_bytes: u64,
    backed_over_largest: f64,
    /// What all take together, each in an arena of its own.
    sum_bytes: u64,
    /// Host time of one capture, the median.
    capture_us: f64,
}

pub(super) fn measure(bench: &Bench, graphs: u32, block: Bytes) -> Result<Row> {
    let programs = Program::some(graphs, block);
    let site = Site::new(bench.driver()?)?;
    let longest = programs.iter().map(Program::result_len).max().unwrap_or_default();
    let result = site.allocator().malloc(longest, site.stream)?;
    let arena = site.allocator().graph_arena(ArenaConfig::default())?;
    let mut captured = Vec::new();
    let mut times = Vec::new();
    for program in &programs {
        let begun = std::time::Instant::now();
        captured.push(capture(&site, &arena, program, &result)?);
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let backed = arena.report().backed;
    let mut alone = Vec::new();
    for program in &programs {
        // Without reuse it would take this much: addresses enough, and not so many that they run out.
        let capacity = program.result_len() + Bytes::mib(1);
        let own =
            site.allocator().graph_arena(ArenaConfig { capacity, ..ArenaConfig::default() })?;
        alone.push(capture(&site, &own, program, &result)?.report().taken);
    }
    let largest = alone.iter().copied().max().unwrap_or_default();
    let row = Row {
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
    site.allocator().free(result, site.stream)?;
    site.close()?;
    Ok(row)
}

/// The graph of one program.
pub(super) fn capture(
    site: &Site,
    arena: &GraphArena,
    program: &Program,
    result: &vramp_alloc::Allocation,
) -> Result<CapturedGraph> {
    let (graph, queued) =
        site.allocator().capture(site.stream, arena, || program.queue(site, result))?;
    queued?;
    Ok(graph)
}

pub(super) const COLUMNS: [Column<Row>; 6] = [
    ("graphs", |row| Cell::Number(row.graphs.to_string())),
    ("each alone, in all", |row| Cell::Number(Bytes::new(row.sum_bytes).to_string())),
    ("the largest", |row| Cell::Number(Bytes::new(row.largest_bytes).to_string())),
    ("arena", |row| Cell::Number(Bytes::new(row.backed_bytes).to_string())),
    ("of the largest", |row| Cell::Number(format!("{:.3}", row.backed_over_largest))),
    ("us a capture", |row| Cell::Number(format!("{:.1}", row.capture_us))),
];
