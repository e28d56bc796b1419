//! Fragmented memory remapped into one block.
//!
//! A new allocator, limited to a total, fills it with blocks of one size and frees every other one.
//! The measured request is one block of half the total.

use anyhow::{Context, Result, bail};
use serde::Serialize;
use vramp::Bytes;
use vramp::peers::Preset;

use crate::subject::{MeteredAllocator, Subject};
use crate::{Bench, Cost, blocks_in};

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Allocators to measure, in order. PyTorch's are left out: they move no memory.
    pub presets: Vec<Preset>,
    /// Memory to fragment.
    pub total: Bytes,
    /// Size of each block.
    pub block: Bytes,
}

/// The result for one allocator.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The allocator's name.
    pub allocator: &'static str,
    /// Bytes allocated before every other block was freed.
    pub total_bytes: u64,
    /// Size of each block.
    pub block_bytes: u64,
    /// Size of the one block that was requested.
    pub made_bytes: u64,
    /// Growth of the reserved bytes by that request.
    pub grown_bytes: u64,
    /// Physical handles moved to other addresses.
    pub chunks_moved: u64,
    /// Bytes in those handles.
    pub moved_bytes: u64,
    /// Number of runs.
    pub runs: u64,
    /// Cost of the request.
    #[serde(flatten)]
    pub cost: Cost,
}

/// Memory that one request moved and created.
#[derive(Default)]
struct Moved {
    chunks: u64,
    bytes: Bytes,
    grown: Bytes,
}

/// Measures remapping on each allocator, one row for each.
///
/// # Errors
/// Fewer than two or too many blocks fit into the total, no allocator can remap, or one fails.
pub fn run(bench: &Bench, options: &Options) -> Result<Vec<Row>> {
    let Options { presets, total, block } = options;
    let pairs = blocks_in(*total, *block)? / 2;
    if pairs == 0 {
        bail!("one block cannot be fragmented: give a larger total or a smaller block");
    }
    let presets = presets.iter().copied().filter(|preset| !preset.is_torch());
    let presets: Vec<_> = presets.collect();
    if presets.is_empty() {
        bail!("PyTorch's allocators do not remap memory: use vramp, vpmm or stream-ordered");
    }
    let mut rows = Vec::new();
    for &preset in &presets {
        let (mut costs, mut moved) = (Vec::new(), Moved::default());
        bench.repeat(presets.len(), || {
            let (cost, one) = once(bench, preset, *block, pairs)?;
            costs.push(cost);
            moved = one;
            Ok(())
        })?;
        rows.push(Row {
            allocator: preset.name(),
            total_bytes: (*block * 2 * pairs).count(),
            block_bytes: block.count(),
            made_bytes: (*block * pairs).count(),
            grown_bytes: moved.grown.count(),
            chunks_moved: moved.chunks,
            moved_bytes: moved.bytes.count(),
            runs: costs.len() as u64,
            cost: Cost::median(&costs).expect("there is at least one run"),
        });
    }
    Ok(rows)
}

/// Fragments a new allocator's memory and returns the cost of the request for one block.
fn once(bench: &Bench, preset: Preset, block: Bytes, pairs: u64) -> Result<(Cost, Moved)> {
    let driver = bench.driver()?;
    let page = driver.info().limits.page;
    let rounded = block.checked_round_up(page).context("a block is larger than any memory")?;
    let limit = match preset {
        // The driver's pool cannot move memory and so has to grow.
        Preset::StreamOrdered => None,
        _ => rounded.count().checked_mul(2 * pairs).map(Bytes::new),
    };
    let allocator = MeteredAllocator::new(driver, preset, limit)?;
    let stream = allocator.create_stream()?;
    let mut kept = Vec::new();
    let mut freed = Vec::new();
    for _ in 0..pairs {
        kept.push(allocator.malloc(stream, block)?);
        freed.push(allocator.malloc(stream, block)?);
    }
    freed.into_iter().try_for_each(|block| allocator.free(stream, block))?;
    let before = allocator.allocator.stats()?;
    let cost = allocator.cost_of(|| {
        kept.push(allocator.malloc(stream, block * pairs)?);
        Ok(())
    })?;
    let after = allocator.allocator.stats()?;
    kept.into_iter().try_for_each(|block| allocator.free(stream, block))?;
    allocator.close()?;
    let moved = Moved {
        chunks: after.chunks_moved - before.chunks_moved,
        bytes: after.moved - before.moved,
        grown: after.reserved.saturating_sub(before.reserved),
    };
    Ok((cost, moved))
}
