//! Replays beside the same calls without a graph: are the results the same?

use anyhow::Result;
use serde::Serialize;
use vramp_alloc::Bytes;
use vramp_alloc::graph::ArenaConfig;
use vramp_core::AddrRange;
use vramp_driver::{HostBuffer, HostSlice};

use super::Site;
use super::program::Program;
use super::shared::capture;
use crate::bench::{Bench, Cell, Column};
use crate::count::Count;

/// What the simulator compares in reasonable time.
const LARGEST_SIMULATED: Bytes = Bytes::mib(1);

/// One row.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    measure: &'static str,
    graphs: u64,
    replays: u64,
    compared_bytes: u64,
    pub(super) differing_bytes: u64,
    /// Accesses without order, where the device tells.
    hazards: Option<u64>,
}

pub(super) fn measure(bench: &Bench, graphs: u32, block: Bytes) -> Result<Row> {
    let block = if bench.info.simulated { block.min(LARGEST_SIMULATED) } else { block };
    let programs = Program::some(graphs, block);
    let fresh = bench.device.with_contents()?;
    let site = Site::new(fresh.driver)?;
    let longest = programs.iter().map(Program::result_len).max().unwrap_or_default();
    let result = site.allocator().malloc(longest, site.stream)?;
    let host = site.driver().alloc_host(longest)?;
    let arena = site.allocator().graph_arena(ArenaConfig::default())?;
    let captured: Vec<_> = programs
        .iter()
        .map(|program| capture(&site, &arena, program, &result))
        .collect::<Result<_>>()?;
    let mut order: Vec<usize> = (0..programs.len()).collect();
    fastrand::Rng::with_seed(0x6f72_6465).shuffle(&mut order);
    let (mut compared, mut differing) = (0, 0);
    for index in order {
        let program = &programs[index];
        let range = AddrRange::new(result.addr(), program.result_len());
        site.driver().fill(site.queue, range, 0xEE)?;
        program.queue(&site, &result)?;
        let expected = read(&site, range, host)?;
        // What the calls wrote must not be taken for the graph's.
        site.driver().fill(site.queue, range, 0x11)?;
        let lease = captured[index].launch(site.stream)?;
        let found = read(&site, range, host)?;
        drop(lease);
        compared += found.len() as u64;
        differing += expected.iter().zip(&found).filter(|(a, b)| a != b).count() as u64;
    }
    let hazards = fresh.simulator.map(|simulator| simulator.hazards_found());
    let graphs = captured.len() as u64;
    drop((captured, arena));
    site.driver().free_host(host)?;
    site.allocator().free(result, site.stream)?;
    site.close()?;
    Ok(Row {
        measure: "same",
        graphs,
        replays: graphs,
        compared_bytes: compared,
        differing_bytes: differing,
        hazards,
    })
}

/// What is in memory once all that is queued is done.
fn read(site: &Site, range: AddrRange, buffer: HostBuffer) -> Result<Vec<u8>> {
    let to = HostSlice { buffer, offset: Bytes::ZERO, len: range.len };
    site.driver().copy_to_host(site.queue, range.start, to)?;
    site.finish()?;
    let mut bytes = vec![0; range.len.count() as usize];
    site.driver().read_host(buffer, Bytes::ZERO, &mut bytes)?;
    Ok(bytes)
}

pub(super) const COLUMNS: [Column<Row>; 4] = [
    ("replays", |row| Cell::Number(Count(row.replays).to_string())),
    ("compared", |row| Cell::Number(Bytes::new(row.compared_bytes).to_string())),
    ("bytes that differ", |row| Cell::Number(Count(row.differing_bytes).to_string())),
    ("accesses without order", |row| {
        Cell::Number(row.hazards.map_or_else(|| "-".to_owned(), |found| Count(found).to_string()))
    }),
];
