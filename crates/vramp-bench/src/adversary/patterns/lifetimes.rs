//! Blocks whose lifetimes and sizes are related as no allocator would like.

use std::collections::BTreeMap;

use anyhow::Result;

use super::super::Pattern;
use super::super::draw::{GIB, KIB, MIB, log_uniform, take};
use super::super::rig::{Block, Rig};

const LAG_NS: u64 = 50_000;

pub(super) fn patterns() -> Vec<Pattern> {
    vec![
        Pattern::new(
            "sawtooth",
            "memory grows to 8 GiB and is freed to the last block, in order, in reverse or at random",
            sawtooth,
        ),
        Pattern::new(
            "phases",
            "4 GiB of small blocks, of which every tenth stays, then 8 GiB of large blocks, and again",
            phases,
        ),
        Pattern::new(
            "pinned",
            "one of ten blocks is small and stays for ever, among 8 GiB of large ones",
            pinned,
        ),
        Pattern::new(
            "zipf",
            "lifetimes after Zipf: most blocks end soon, a few live a thousand times as long",
            zipf,
        ),
        Pattern::new(
            "alternating",
            "two sizes that do not divide each other take turns; one of twenty blocks stays",
            alternating,
        ),
        Pattern::new(
            "just-above",
            "sizes one byte above a power of two, which rounding makes as large as can be",
            just_above,
        ),
    ]
}

fn sawtooth(rig: &mut Rig) -> Result<()> {
    const TEETH: usize = 12;
    let stream = rig.create_stream()?;
    let mut blocks = Vec::new();
    for tooth in 0..TEETH {
        if tooth == TEETH / 4 {
            rig.warmed_up()?;
        }
        while rig.live() < 8 * GIB {
            let size = log_uniform(&mut rig.rng, 64 * KIB, 64 * MIB);
            blocks.extend(rig.used(stream, size, LAG_NS)?);
        }
        match tooth % 3 {
            0 => {}
            1 => blocks.reverse(),
            _ => rig.rng.shuffle(&mut blocks),
        }
        rig.free_all(blocks.drain(..))?;
    }
    Ok(())
}

fn phases(rig: &mut Rig) -> Result<()> {
    const ROUNDS: usize = 8;
    let stream = rig.create_stream()?;
    for round in 0..ROUNDS {
        if round == ROUNDS / 4 {
            rig.warmed_up()?;
        }
        let mut small = Vec::new();
        while rig.live() < 4 * GIB {
            let size = log_uniform(&mut rig.rng, 4 * KIB, 8 * MIB);
            small.extend(rig.used(stream, size, LAG_NS)?);
        }
        let mut kept = Vec::new();
        for (index, block) in small.into_iter().enumerate() {
            if index % 10 == 0 {
                kept.push(block);
            } else {
                rig.free(block)?;
            }
        }
        let mut large = Vec::new();
        while rig.live() < 8 * GIB {
            let size = log_uniform(&mut rig.rng, 64 * MIB, 512 * MIB);
            large.extend(rig.used(stream, size, LAG_NS)?);
        }
        rig.free_all(large)?;
        rig.free_all(kept)?;
    }
    Ok(())
}

fn pinned(rig: &mut Rig) -> Result<()> {
    const BLOCKS: usize = 6000;
    let stream = rig.create_stream()?;
    let (mut large, mut small) = (Vec::new(), Vec::new());
    for block in 0..BLOCKS {
        if block == BLOCKS / 4 {
            rig.warmed_up()?;
        }
        if block % 10 == 0 {
            let size = log_uniform(&mut rig.rng, 4 * KIB, 4 * MIB);
            small.extend(rig.used(stream, size, LAG_NS)?);
            continue;
        }
        let size = log_uniform(&mut rig.rng, 16 * MIB, 256 * MIB);
        while rig.live() + size > 8 * GIB {
            let Some(block) = take(&mut rig.rng, &mut large) else { break };
            rig.free(block)?;
        }
        large.extend(rig.used(stream, size, LAG_NS)?);
    }
    rig.free_all(large)?;
    rig.free_all(small)
}

fn zipf(rig: &mut Rig) -> Result<()> {
    const BLOCKS: u64 = 30_000;
    const SHORTEST: f64 = 20.0;
    const LONGEST: f64 = 20_000.0;
    let stream = rig.create_stream()?;
    let mut ends: BTreeMap<u64, Vec<Block>> = BTreeMap::new();
    for now in 0..BLOCKS {
        if now == BLOCKS / 4 {
            rig.warmed_up()?;
        }
        for block in ends.remove(&now).unwrap_or_default() {
            rig.free(block)?;
        }
        let size = log_uniform(&mut rig.rng, 4 * KIB, 64 * MIB);
        // The chance of a lifetime above t falls as 1/t.
        let lifetime = (SHORTEST / rig.rng.f64().max(SHORTEST / LONGEST)) as u64;
        if let Some(block) = rig.used(stream, size, LAG_NS)? {
            ends.entry(now + lifetime).or_default().push(block);
        }
    }
    rig.free_all(ends.into_values().flatten())
}

fn alternating(rig: &mut Rig) -> Result<()> {
    const ROUNDS: usize = 24;
    const SIZES: [u64; 2] = [3 * MIB, 7 * MIB + 512 * KIB];
    let stream = rig.create_stream()?;
    let (mut kept, mut blocks) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        if round == ROUNDS / 4 {
            rig.warmed_up()?;
        }
        while rig.live() < 4 * GIB {
            blocks.extend(rig.used(stream, SIZES[round % 2], LAG_NS)?);
        }
        for (index, block) in blocks.drain(..).enumerate() {
            if index % 20 == round % 20 {
                kept.push(block);
            } else {
                rig.free(block)?;
            }
        }
        // What stays is at most a quarter.
        while kept.len() > 240 {
            let Some(block) = take(&mut rig.rng, &mut kept) else { break };
            rig.free(block)?;
        }
    }
    rig.free_all(kept)
}

fn just_above(rig: &mut Rig) -> Result<()> {
    const BLOCKS: usize = 8000;
    let stream = rig.create_stream()?;
    let mut blocks = Vec::new();
    for block in 0..BLOCKS {
        if block == BLOCKS / 4 {
            rig.warmed_up()?;
        }
        let size = (1 << rig.rng.u32(9..=27)) + 1;
        while rig.live() + size > 4 * GIB {
            let Some(block) = take(&mut rig.rng, &mut blocks) else { break };
            rig.free(block)?;
        }
        blocks.extend(rig.used(stream, size, LAG_NS)?);
    }
    rig.free_all(blocks)
}
