//! Blocks that one stream makes and another one uses.

use std::collections::VecDeque;

use anyhow::Result;
use vramp::peers::Preset;

use super::super::draw::{GIB, MIB, log_uniform, take};
use super::super::rig::{Block, Rig};
use super::super::{Goal, Pattern};

const LAG_NS: u64 = 200_000;

pub(super) fn patterns() -> Vec<Pattern> {
    vec![
        Pattern::new(
            "hand-off/etl",
            "six streams each filter and split a table; the parts are joined on other streams, \
             which record their use; results stay in a cache",
            etl,
        ),
        Pattern::new(
            "hand-off/loader",
            "a loader's stream fills batches that four streams use; each is freed three steps later",
            loader,
        ),
        Pattern::new(
            "hand-off/foreign-free",
            "blocks of a producer's stream are freed on a consumer's stream, in random order",
            foreign_free,
        ),
        Pattern::new(
            "hand-off/fork-join",
            "each step forks to eight streams with blocks of their own and of the step, and joins",
            fork_join,
        ),
        Pattern::new(
            "hand-off/slow-stream",
            "fifteen streams in turn make requests; one of ten blocks is used on a stream that is busy with \
             a kernel of a minute",
            slow_stream,
        )
        .goal(Goal::ReservedAsLittleAs(Preset::Torch)),
        Pattern::new(
            "mixed/8",
            "eight streams: blocks of 512 B to 128 MiB, some used or freed on another stream",
            |rig| mixed(rig, 8),
        ),
        Pattern::new(
            "mixed/64",
            "64 streams: blocks of 512 B to 128 MiB, some used or freed on another stream",
            |rig| mixed(rig, 64),
        ),
    ]
}

fn etl(rig: &mut Rig) -> Result<()> {
    const THREADS: usize = 6;
    const STEPS: usize = 48;
    const CACHED: usize = 40;
    let streams = rig.create_streams(THREADS)?;
    let mut boxes: Vec<Vec<Block>> = (0..THREADS).map(|_| Vec::new()).collect();
    let mut cache: Vec<Block> = Vec::new();
    for step in 0..STEPS {
        if step == STEPS / 4 {
            rig.warmed_up()?;
        }
        // The threads' requests interleave: each request is of a thread drawn at random.
        for sender in shuffled(rig, THREADS) {
            let stream = streams[sender];
            let rows = log_uniform(&mut rig.rng, 200_000, 25_000_000);
            let (keys, values) =
                (rig.used(stream, 4 * rows, LAG_NS)?, rig.used(stream, 4 * rows, LAG_NS)?);
            let mask = rig.used(stream, rows, LAG_NS)?;
            let chosen = rows * rig.rng.u64(20..95) / 100;
            let kept = [4, 4].map(|bytes| bytes * chosen);
            let kept = [rig.used(stream, kept[0], LAG_NS)?, rig.used(stream, kept[1], LAG_NS)?];
            rig.free_served([keys, values, mask])?;
            let part = rig.used(stream, 8 * chosen, LAG_NS)?;
            let sorted =
                [rig.used(stream, 4 * chosen, LAG_NS)?, rig.used(stream, 8 * chosen, LAG_NS)?];
            let scratch = rig.used(stream, 12 * chosen, LAG_NS)?;
            rig.free_served([scratch])?;
            for (receiver, parts) in boxes.iter_mut().enumerate() {
                let share = chosen / THREADS as u64 + (receiver as u64 * 997) % 4096;
                parts.extend(rig.used(stream, 4 * share, LAG_NS)?);
                parts.extend(rig.used(stream, 4 * share, LAG_NS)?);
            }
            rig.free_served(kept.into_iter().chain([part]).chain(sorted))?;
        }
        for receiver in shuffled(rig, THREADS) {
            let stream = streams[receiver];
            let parts = std::mem::take(&mut boxes[receiver]);
            let rows = parts.iter().map(Block::size).sum::<u64>() / 8;
            for part in &parts {
                rig.order(stream, part.stream())?;
                rig.record_use(part, stream)?;
            }
            let joined = [rig.used(stream, 4 * rows, LAG_NS)?, rig.used(stream, 4 * rows, LAG_NS)?];
            rig.free_all(parts)?;
            let sorted = [rig.used(stream, 4 * rows, LAG_NS)?, rig.used(stream, 8 * rows, LAG_NS)?];
            let scratch = rig.used(stream, 16 * rows, LAG_NS)?;
            rig.free_served([scratch])?;
            let groups = rows.min(1 << 20) * rig.rng.u64(30..100) / 100;
            let (unique, inverse) =
                (rig.used(stream, 4 * groups, LAG_NS)?, rig.used(stream, 8 * rows, LAG_NS)?);
            let sums = rig.used(stream, 4 * groups, LAG_NS)?;
            rig.free_served(joined.into_iter().chain(sorted).chain([inverse]))?;
            if rig.rng.bool() {
                cache.extend([unique, sums].into_iter().flatten());
            } else {
                rig.free_served([unique, sums])?;
                cache.extend(rig.used(stream, 4096, LAG_NS)?);
            }
            while cache.len() > CACHED {
                let oldest = take(&mut rig.rng, &mut cache);
                rig.free_served([oldest])?;
            }
        }
    }
    rig.free_served(cache.into_iter().map(Some))
}

fn shuffled(rig: &mut Rig, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    rig.rng.shuffle(&mut order);
    order
}

fn loader(rig: &mut Rig) -> Result<()> {
    const STEPS: usize = 1000;
    const AHEAD: usize = 3;
    let loader = rig.create_stream()?;
    let streams = rig.create_streams(4)?;
    let mut weights = Vec::new();
    for &stream in &streams {
        weights.push(rig.used(stream, GIB, LAG_NS)?);
    }
    let mut batches = VecDeque::new();
    for step in 0..STEPS {
        if step == STEPS / 4 {
            rig.warmed_up()?;
        }
        let size = log_uniform(&mut rig.rng, 4 * MIB, 64 * MIB);
        let Some(batch) = rig.used(loader, size, LAG_NS)? else { continue };
        for &stream in &streams {
            rig.order(stream, loader)?;
            rig.record_use(&batch, stream)?;
            let activations =
                [rig.used(stream, 3 * size, LAG_NS)?, rig.used(stream, size / 2, LAG_NS)?];
            rig.work(&batch, stream, LAG_NS)?;
            rig.free_served(activations)?;
        }
        batches.push_back(batch);
        if batches.len() > AHEAD {
            rig.free_served([batches.pop_front()])?;
        }
    }
    rig.free_served(batches.into_iter().map(Some))?;
    rig.free_served(weights)
}

fn foreign_free(rig: &mut Rig) -> Result<()> {
    const BLOCKS: usize = 10_000;
    const QUEUED: usize = 32;
    let (producer, consumer) = (rig.create_stream()?, rig.create_stream()?);
    let mut queue = Vec::new();
    for block in 0..BLOCKS {
        if block == BLOCKS / 4 {
            rig.warmed_up()?;
        }
        let size = log_uniform(&mut rig.rng, 64 << 10, 32 * MIB);
        queue.extend(rig.used(producer, size, LAG_NS)?);
        let keep = rig.rng.usize(..QUEUED);
        while queue.len() > keep {
            let Some(block) = take(&mut rig.rng, &mut queue) else { break };
            rig.order(consumer, producer)?;
            rig.work(&block, consumer, LAG_NS)?;
            rig.free_on(block, consumer)?;
        }
    }
    rig.free_served(queue.into_iter().map(Some))
}

fn fork_join(rig: &mut Rig) -> Result<()> {
    const STEPS: usize = 300;
    let own = rig.create_stream()?;
    let streams = rig.create_streams(8)?;
    for step in 0..STEPS {
        if step == STEPS / 4 {
            rig.warmed_up()?;
        }
        let size = log_uniform(&mut rig.rng, MIB, 64 * MIB);
        let input = rig.used(own, size, LAG_NS)?;
        let mut results = Vec::new();
        for &stream in &streams {
            rig.order(stream, own)?;
            if let Some(input) = &input {
                rig.record_use(input, stream)?;
                rig.work(input, stream, LAG_NS)?;
            }
            let scratch = rig.used(stream, 2 * size, LAG_NS)?;
            results.extend(rig.used(stream, size / 8, LAG_NS)?);
            rig.free_served([scratch])?;
        }
        rig.free_served([input])?;
        let joined = rig.used(own, size, LAG_NS)?;
        for result in results {
            rig.order(own, result.stream())?;
            rig.record_use(&result, own)?;
            rig.work(&result, own, LAG_NS)?;
            rig.free(result)?;
        }
        rig.free_served([joined])?;
    }
    Ok(())
}

fn slow_stream(rig: &mut Rig) -> Result<()> {
    const REQUESTS: usize = 4000;
    const OUTSTANDING: usize = 40;
    const MINUTE_NS: u64 = 60_000_000_000;
    let (slow, streams) = (rig.create_stream()?, rig.create_streams(15)?);
    let flag = rig.used(slow, 512, MINUTE_NS)?;
    let mut blocks = VecDeque::new();
    for request in 0..REQUESTS {
        if request == REQUESTS / 4 {
            rig.warmed_up()?;
        }
        let size = log_uniform(&mut rig.rng, 512, 64 * MIB);
        let Some(block) = rig.used(streams[request % 15], size, 20_000)? else { continue };
        if request % 10 == 0 {
            rig.record_use(&block, slow)?;
        }
        blocks.push_back(block);
        if blocks.len() > OUTSTANDING {
            rig.free_served([blocks.pop_front()])?;
        }
        rig.pass(20_000);
    }
    rig.measured()?;
    rig.free_all(blocks)?;
    rig.free_served([flag])
}

fn mixed(rig: &mut Rig, count: usize) -> Result<()> {
    const REQUESTS: usize = 12_000;
    let streams = rig.create_streams(count)?;
    let mut blocks = Vec::new();
    for request in 0..REQUESTS {
        if request == REQUESTS / 4 {
            rig.warmed_up()?;
        }
        let stream = streams[rig.rng.usize(..count)];
        let other = streams[rig.rng.usize(..count)];
        let size = log_uniform(&mut rig.rng, 512, 128 * MIB);
        while rig.live() + size > 8 * GIB {
            let Some(block) = take(&mut rig.rng, &mut blocks) else { break };
            rig.free(block)?;
        }
        let Some(block) = rig.used(stream, size, LAG_NS)? else { continue };
        match rig.rng.u8(..8) {
            0 => {
                rig.order(other, stream)?;
                rig.record_use(&block, other)?;
                rig.work(&block, other, LAG_NS)?;
                blocks.push(block);
            }
            1 => {
                rig.order(other, stream)?;
                rig.work(&block, other, LAG_NS)?;
                rig.free_on(block, other)?;
            }
            2..=4 => rig.free(block)?,
            _ => blocks.push(block),
        }
    }
    rig.free_all(blocks)
}
