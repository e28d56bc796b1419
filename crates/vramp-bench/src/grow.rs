//! Memory created for the first time.
//!
//! A new allocator allocates a total in blocks of one size. Calls and their time are those of one
//! run; times are medians over all runs.

use anyhow::Result;
use serde::Serialize;
use vramp::Bytes;
use vramp::peers::Preset;

use crate::subject::{MeteredAllocator, Subject};
use crate::{Bench, Cost, blocks_in};

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Allocators to measure, in order.
    pub presets: Vec<Preset>,
    /// Memory to allocate.
    pub total: Bytes,
    /// Size of each block.
    pub block: Bytes,
}

/// The result for one allocator.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The allocator's name.
    pub allocator: &'static str,
    /// Allocated bytes.
    pub total_bytes: u64,
    /// Size of each block.
    pub block_bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Reserved bytes after the last block.
    pub reserved_bytes: u64,
    /// Physical handles created.
    pub chunks_created: u64,
    /// Number of runs.
    pub runs: u64,
    /// Cost of one run.
    #[serde(flatten)]
    pub cost: Cost,
}

/// Measures growth on each allocator, one row for each.
///
/// # Errors
/// No or too many blocks fit into the total, or an allocator fails.
pub fn run(bench: &Bench, options: &Options) -> Result<Vec<Row>> {
    let Options { presets, total, block } = options;
    let blocks = blocks_in(*total, *block)?;
    let mut rows = Vec::new();
    for &preset in presets {
        let mut costs = Vec::new();
        let (mut reserved, mut created) = (Bytes::ZERO, 0);
        bench.repeat(presets.len(), || {
            let allocator = MeteredAllocator::new(bench.driver()?, preset, None)?;
            let stream = allocator.create_stream()?;
            let mut live = Vec::with_capacity(blocks as usize);
            costs.push(allocator.cost_of(|| {
                for _ in 0..blocks {
                    live.push(allocator.malloc(stream, *block)?);
                }
                Ok(())
            })?);
            let stats = allocator.allocator.stats()?;
            (reserved, created) = (stats.reserved, stats.chunks_created);
            live.into_iter().try_for_each(|block| allocator.free(stream, block))?;
            Ok(allocator.close()?)
        })?;
        rows.push(Row {
            allocator: preset.name(),
            total_bytes: block.count() * blocks,
            block_bytes: block.count(),
            blocks,
            reserved_bytes: reserved.count(),
            chunks_created: created,
            runs: costs.len() as u64,
            cost: Cost::median(&costs).expect("there is at least one run"),
        });
    }
    Ok(rows)
}
