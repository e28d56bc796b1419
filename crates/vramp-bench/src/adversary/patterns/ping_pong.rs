//! Streams that allocate and free in turn, beside memory that stays.

use anyhow::Result;
use vramp::peers::Preset;

use super::super::draw::{GIB, KIB, MIB};
use super::super::rig::Rig;
use super::super::{Goal, Pattern};

/// Blocks that the base memory has.
const BASE_BLOCKS: u64 = 100;
const PAIRS: usize = 3200;
/// Longer than a round of 64 streams, so that every other stream is busy at each request.
const LAG_NS: u64 = 1_000_000;

pub(super) fn patterns() -> Vec<Pattern> {
    let mut all = Vec::new();
    for (base, base_name) in [(200 * MIB, "200MiB"), (2 * GIB, "2GiB"), (20 * GIB, "20GiB")] {
        for (block, block_name) in [(8 * KIB, "8KiB"), (2 * MIB, "2MiB"), (20 * MIB, "20MiB")] {
            for streams in [1, 8, 64] {
                let name = format!("ping-pong/{base_name}/{streams}x{block_name}");
                all.push(pattern(name, Shape { base, block, streams, lag_ns: LAG_NS, more: 0 }));
            }
        }
    }
    for streams in [4, 32] {
        let name = format!("ping-pong/200MiB/{streams}x1MiB");
        let shape = Shape { base: 200 * MIB, block: MIB, streams, lag_ns: LAG_NS, more: 0 };
        all.push(pattern(name, shape));
    }
    for (block, block_name) in [(MIB, "1-or-2MiB"), (20 * MIB, "20-or-40MiB")] {
        let name = format!("ping-pong/idle/32x{block_name}");
        let shape = Shape { base: 200 * MIB, block, streams: 32, lag_ns: 0, more: block };
        all.push(pattern(name, shape));
    }
    for (block, block_name) in [(8 * KIB, "8KiB"), (20 * MIB, "20MiB")] {
        let name = format!("ping-pong/idle/64x{block_name}");
        let shape = Shape { base: 2 * GIB, block, streams: 64, lag_ns: 0, more: 0 };
        all.push(pattern(name, shape));
    }
    all
}

#[derive(Clone, Copy)]
struct Shape {
    base: u64,
    block: u64,
    streams: usize,
    /// Zero for no work at all.
    lag_ns: u64,
    /// By how much the blocks of every other stream are longer.
    more: u64,
}

fn pattern(name: String, shape: Shape) -> Pattern {
    let about = "streams in turn allocate, use and free one block, beside memory that stays";
    Pattern::new(name, about, move |rig| ping_pong(rig, shape))
        .goal(Goal::NoDriverCalls)
        .goal(Goal::ReservedAsLittleAs(Preset::TorchExpandable))
}

fn ping_pong(rig: &mut Rig, shape: Shape) -> Result<()> {
    let own = rig.create_stream()?;
    let streams = rig.create_streams(shape.streams)?;
    let mut base = Vec::new();
    for _ in 0..BASE_BLOCKS {
        base.extend(rig.malloc(own, shape.base / BASE_BLOCKS)?);
    }
    for pair in 0..PAIRS + PAIRS / 2 {
        if pair == PAIRS / 2 {
            rig.warmed_up()?;
        }
        let turn = pair % streams.len();
        let stream = streams[turn];
        let size = shape.block + if turn % 2 == 1 { shape.more } else { 0 };
        let Some(block) = rig.malloc(stream, size)? else { continue };
        if shape.lag_ns > 0 {
            rig.work(&block, stream, shape.lag_ns)?;
        }
        rig.free(block)?;
    }
    rig.free_all(base)
}
