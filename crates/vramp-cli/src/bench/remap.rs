//! `vramp bench remap`: fragmented memory turned into one block.

use std::io::Write;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use vramp_alloc::{Bytes, Preset};

use super::args::Remap;
use super::cost::Cost;
use super::subject::{Managed, Subject};
use super::{Bench, Cell, Column, blocks_in};
use crate::count::Count;

/// One row.
#[derive(Debug, Serialize)]
struct Row {
    allocator: &'static str,
    total_bytes: u64,
    block_bytes: u64,
    made_bytes: u64,
    grown_bytes: u64,
    chunks_moved: u64,
    moved_bytes: u64,
    runs: u64,
    #[serde(flatten)]
    cost: Cost,
}

/// What one run came to, beside its cost.
#[derive(Default)]
struct Moved {
    chunks: u64,
    bytes: Bytes,
    grown: Bytes,
}

pub(super) fn run(args: &Remap, out: &mut dyn Write) -> Result<()> {
    let pairs = blocks_in(args.total, args.block)? / 2;
    if pairs == 0 {
        bail!("one block cannot be fragmented: give a larger --total or a smaller --block");
    }
    let bench = Bench::open(&args.common, out)?;
    // PyTorch's allocators move nothing: what is in pieces stays so, and the block does not fit.
    let presets = args.common.allocator.0.iter().copied().filter(|preset| !preset.is_torch());
    let presets: Vec<_> = presets.collect();
    if presets.is_empty() {
        bail!("PyTorch's allocators move no memory: use vramp_alloc, vpmm or stream-ordered");
    }
    let mut rows = Vec::new();
    for &preset in &presets {
        let (mut costs, mut moved) = (Vec::new(), Moved::default());
        bench.repeat(presets.len(), || {
            let (cost, one) = once(&bench, preset, args.block, pairs)?;
            costs.push(cost);
            moved = one;
            Ok(())
        })?;
        rows.push(Row {
            allocator: preset.name(),
            total_bytes: (args.block * 2 * pairs).count(),
            block_bytes: args.block.count(),
            made_bytes: (args.block * pairs).count(),
            grown_bytes: moved.grown.count(),
            chunks_moved: moved.chunks,
            moved_bytes: moved.bytes.count(),
            runs: costs.len() as u64,
            cost: Cost::median(&costs).expect("there is at least one run"),
        });
    }
    bench.write(out, "remap", &rows, &COLUMNS)
}

/// Fragments a new allocator's memory and times the request for one block.
fn once(bench: &Bench, preset: Preset, block: Bytes, pairs: u64) -> Result<(Cost, Moved)> {
    let driver = bench.driver()?;
    let page = driver.info().limits.page;
    let rounded = block.checked_round_up(page).context("a block is larger than any memory")?;
    let limit = match preset {
        Preset::StreamOrdered => None,
        _ => rounded.count().checked_mul(2 * pairs).map(Bytes::new),
    };
    let managed = Managed::new(driver, preset, limit)?;
    let lane = managed.new_lane()?;
    let mut kept = Vec::new();
    let mut freed = Vec::new();
    for _ in 0..pairs {
        kept.push(managed.take(lane, block)?);
        freed.push(managed.take(lane, block)?);
    }
    freed.into_iter().try_for_each(|block| managed.give(lane, block))?;
    let before = managed.allocator.stats()?;
    let cost = managed.cost_of(|| {
        kept.push(managed.take(lane, block * pairs)?);
        Ok(())
    })?;
    let after = managed.allocator.stats()?;
    kept.into_iter().try_for_each(|block| managed.give(lane, block))?;
    managed.close()?;
    let moved = Moved {
        chunks: after.chunks_moved - before.chunks_moved,
        bytes: after.moved - before.moved,
        grown: after.reserved.saturating_sub(before.reserved),
    };
    Ok((cost, moved))
}

const COLUMNS: [Column<Row>; 9] = [
    ("allocator", |row| Cell::Words(row.allocator.to_owned())),
    ("one block of", |row| Cell::Number(Bytes::new(row.made_bytes).to_string())),
    ("from pieces of", |row| Cell::Number(Bytes::new(row.block_bytes).to_string())),
    ("chunks moved", |row| Cell::Number(Count(row.chunks_moved).to_string())),
    ("grown by", |row| Cell::Number(Bytes::new(row.grown_bytes).to_string())),
    ("driver calls", |row| Cell::Number(Count(row.cost.driver_calls).to_string())),
    ("driver ms", |row| Cell::Number(row.cost.driver_millis())),
    ("per GiB", |row| Cell::Number(row.cost.driver_millis_per_gib(row.made_bytes))),
    ("host ms", |row| Cell::Number(row.cost.host_millis())),
];
