//! `vramp bench grow`: memory taken for the first time.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;
use vramp_alloc::Bytes;

use super::args::Grow;
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
    blocks: u64,
    reserved_bytes: u64,
    chunks_created: u64,
    runs: u64,
    #[serde(flatten)]
    cost: Cost,
}

pub(super) fn run(args: &Grow, out: &mut dyn Write) -> Result<()> {
    let blocks = blocks_in(args.total, args.block)?;
    let bench = Bench::open(&args.common, out)?;
    let presets = &args.common.allocator.0;
    let mut rows = Vec::new();
    for &preset in presets {
        let mut costs = Vec::new();
        let (mut reserved, mut created) = (Bytes::ZERO, 0);
        bench.repeat(presets.len(), || {
            let managed = Managed::new(bench.driver()?, preset, None)?;
            let lane = managed.new_lane()?;
            let mut held = Vec::with_capacity(blocks as usize);
            costs.push(managed.cost_of(|| {
                for _ in 0..blocks {
                    held.push(managed.take(lane, args.block)?);
                }
                Ok(())
            })?);
            let stats = managed.allocator.stats()?;
            (reserved, created) = (stats.reserved, stats.chunks_created);
            held.into_iter().try_for_each(|block| managed.give(lane, block))?;
            Ok(managed.close()?)
        })?;
        rows.push(Row {
            allocator: preset.name(),
            total_bytes: args.block.count() * blocks,
            block_bytes: args.block.count(),
            blocks,
            reserved_bytes: reserved.count(),
            chunks_created: created,
            runs: costs.len() as u64,
            cost: Cost::median(&costs).expect("there is at least one run"),
        });
    }
    bench.write(out, "grow", &rows, &COLUMNS)
}

const COLUMNS: [Column<Row>; 8] = [
    ("allocator", |row| Cell::Words(row.allocator.to_owned())),
    ("taken", |row| Cell::Number(Bytes::new(row.total_bytes).to_string())),
    ("in blocks of", |row| Cell::Number(Bytes::new(row.block_bytes).to_string())),
    ("reserved", |row| Cell::Number(Bytes::new(row.reserved_bytes).to_string())),
    ("driver calls", |row| Cell::Number(Count(row.cost.driver_calls).to_string())),
    ("driver ms", |row| Cell::Number(row.cost.driver_millis())),
    ("per GiB", |row| Cell::Number(row.cost.driver_millis_per_gib(row.total_bytes))),
    ("host ms", |row| Cell::Number(row.cost.host_millis())),
];
