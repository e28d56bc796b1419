//! Replays compared with the same calls without a graph.

use anyhow::Result;
use serde::Serialize;
use vramp::Bytes;
use vramp::graph::ArenaConfig;
use vramp_core::AddrRange;
use vramp_driver::{HostBuffer, HostSlice};

use super::Rig;
use super::program::Program;
use super::sharing::capture;
use crate::Bench;

/// Largest block that a simulator compares in reasonable time.
const BLOCK_MAX_SIMULATED: Bytes = Bytes::mib(1);

/// How replays compare with the same calls without a graph.
#[derive(Clone, Debug, Serialize)]
pub struct ReplayRow {
    /// `same`.
    pub measure: &'static str,
    /// Number of graphs.
    pub graphs: u64,
    /// Number of replays.
    pub replays: u64,
    /// Bytes compared.
    pub compared_bytes: u64,
    /// Bytes that differ.
    pub differing_bytes: u64,
    /// Unordered accesses found; `None` on a card.
    pub hazards: Option<u64>,
}

pub(super) fn measure(bench: &Bench, graphs: u32, block: Bytes) -> Result<ReplayRow> {
    let block = if bench.info().simulated { block.min(BLOCK_MAX_SIMULATED) } else { block };
    let programs = Program::some(graphs, block);
    let fresh = bench.device.with_contents()?;
    let rig = Rig::new(fresh.driver)?;
    let longest = programs.iter().map(Program::result_len).max().unwrap_or_default();
    let result = rig.allocator().malloc(longest, rig.stream)?;
    let host = rig.driver().alloc_host(longest)?;
    let arena = rig.allocator().graph_arena(ArenaConfig::default())?;
    let captured: Vec<_> = programs
        .iter()
        .map(|program| capture(&rig, &arena, program, &result))
        .collect::<Result<_>>()?;
    let mut order: Vec<usize> = (0..programs.len()).collect();
    fastrand::Rng::with_seed(0x6f72_6465).shuffle(&mut order);
    let (mut compared, mut differing) = (0, 0);
    for index in order {
        let program = &programs[index];
        let range = AddrRange::new(result.addr(), program.result_len());
        rig.driver().fill(rig.queue, range, 0xEE)?;
        program.queue(&rig, &result)?;
        let expected = read(&rig, range, host)?;
        // Overwritten, so that the bytes of the calls cannot pass for the graph's.
        rig.driver().fill(rig.queue, range, 0x11)?;
        let lease = captured[index].launch(rig.stream)?;
        let found = read(&rig, range, host)?;
        drop(lease);
        compared += found.len() as u64;
        differing += expected.iter().zip(&found).filter(|(a, b)| a != b).count() as u64;
    }
    let hazards = fresh.simulator.map(|simulator| simulator.hazards_found());
    let graphs = captured.len() as u64;
    drop((captured, arena));
    rig.driver().free_host(host)?;
    rig.allocator().free(result, rig.stream)?;
    rig.close()?;
    Ok(ReplayRow {
        measure: "same",
        graphs,
        replays: graphs,
        compared_bytes: compared,
        differing_bytes: differing,
        hazards,
    })
}

/// Returns the contents of `range` after all queued work.
fn read(rig: &Rig, range: AddrRange, buffer: HostBuffer) -> Result<Vec<u8>> {
    let to = HostSlice { buffer, offset: Bytes::ZERO, len: range.len };
    rig.driver().copy_to_host(rig.queue, range.start, to)?;
    rig.synchronize()?;
    let mut bytes = vec![0; range.len.count() as usize];
    rig.driver().read_host(buffer, Bytes::ZERO, &mut bytes)?;
    Ok(bytes)
}
