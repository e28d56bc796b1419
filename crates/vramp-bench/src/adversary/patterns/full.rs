//! Cards that are nearly full.

use anyhow::Result;
use vramp::Bytes;
use vramp::peers::Preset;

use super::super::draw::{GIB, KIB, MIB, log_uniform, take};
use super::super::rig::Rig;
use super::super::{Goal, Pattern};
use super::churn::{Churn, replace};

pub(super) fn patterns() -> Vec<Pattern> {
    let about = "one block of 78 GiB is freed, 2 MiB blocks fill the card, 1 of 64 stays; then \
                 1 GiB blocks until one fails, 80 at most";
    let scattered = |name: &str| {
        Pattern::new(name, about, scattered).goal(Goal::FailsAsRarelyAs(Preset::Vpmm, 2))
    };
    let about = "blocks of 1 to 64 MiB replace each other at random, at 95 % of the memory";
    let churn = |name: &str, memory: u64, mallocs| {
        let live = memory * 95 / 100;
        let churn = Churn { least: MIB, most: 64 * MIB, live, mallocs };
        Pattern::new(name, about, move |rig| replace(rig, churn))
            .goal(Goal::FailsAsRarelyAs(Preset::TorchExpandable, 0))
    };
    let about = "blocks of many sizes replace each other at random, close below the limit";
    let tight = |name: &str, least, most, live: u64, limit: u64, mallocs| {
        let churn = Churn { least, most, live, mallocs };
        Pattern::new(name, about, move |rig| replace(rig, churn))
            .limit(Bytes::new(limit))
            .goal(Goal::FailsAsRarelyAs(Preset::Vpmm, 0))
    };
    let about = "random sizes until a request fails, then half of all blocks are freed at random";
    let recover = Pattern::new("oom-recover", about, oom_recover).limit(Bytes::gib(8));
    let about = "1.0 and 1.5 GiB blocks replace each other at 95 % of 24 GiB";
    let two = Pattern::new("near-full/two-sizes", about, two_sizes)
        .limit(Bytes::gib(24))
        .goal(Goal::FailsAsRarelyAs(Preset::TorchExpandable, 0));
    let about = "eight streams in turn take two thirds of the memory, and free it";
    let hogs = Pattern::new("near-full/hogs", about, hogs)
        .limit(Bytes::gib(12))
        .goal(Goal::FailsAsRarelyAs(Preset::TorchExpandable, 0));
    vec![
        scattered("scattered/card-80GiB").card(Bytes::gib(80)),
        scattered("scattered/limit-80GiB").limit(Bytes::gib(80)),
        churn("near-full/limit-8GiB", 8 * GIB, 5_000).limit(Bytes::gib(8)),
        churn("near-full/card-8GiB", 8 * GIB, 5_000).card(Bytes::gib(8)),
        churn("near-full/limit-64GiB", 64 * GIB, 20_000).limit(Bytes::gib(64)).large(),
        tight("near-full/512B-256MiB", 512, 256 * MIB, 8 * GIB, 8 * GIB * 105 / 100, 5_000),
        tight("near-full/4MiB-256MiB", 4 * MIB, 256 * MIB, 8 * GIB, 8 * GIB * 105 / 100, 5_000),
        tight("near-full/2MiB-1GiB", 2 * MIB, GIB, 80 * GIB * 97 / 100, 80 * GIB, 5_000),
        two,
        hogs,
        recover,
    ]
}

fn scattered(rig: &mut Rig) -> Result<()> {
    const WANTED: u64 = 80;
    let stream = rig.create_stream()?;
    if let Some(block) = rig.malloc(stream, 78 * GIB)? {
        rig.free(block)?;
    }
    let mut small = Vec::new();
    for _ in 0..78 * GIB / (2 * MIB) {
        small.extend(rig.malloc(stream, 2 * MIB)?);
    }
    let mut kept = Vec::new();
    for (index, block) in small.into_iter().enumerate() {
        if index % 64 == 0 {
            kept.push(block);
        } else {
            rig.free(block)?;
        }
    }
    rig.warmed_up()?;
    for served in 0..WANTED {
        match rig.malloc(stream, GIB)? {
            Some(block) => kept.push(block),
            None => {
                rig.give_up(WANTED - served - 1);
                break;
            }
        }
    }
    rig.free_all(kept)
}

fn two_sizes(rig: &mut Rig) -> Result<()> {
    const REQUESTS: usize = 3000;
    let stream = rig.create_stream()?;
    let mut sizes = rig.rng.fork();
    let mut blocks = Vec::new();
    for request in 0..REQUESTS {
        if request == REQUESTS / 4 {
            rig.warmed_up()?;
        }
        let size = if sizes.bool() { GIB } else { GIB + 512 * MIB };
        while rig.live() + size > 24 * GIB * 95 / 100 {
            let Some(block) = take(&mut rig.rng, &mut blocks) else { break };
            rig.free(block)?;
        }
        if let Some(block) = rig.malloc(stream, size)? {
            rig.work(&block, stream, 100_000)?;
            blocks.push(block);
        }
    }
    rig.free_all(blocks)
}

fn hogs(rig: &mut Rig) -> Result<()> {
    const TURNS: usize = 80;
    let streams = rig.create_streams(8)?;
    for turn in 0..TURNS {
        if turn == TURNS / 4 {
            rig.warmed_up()?;
        }
        let stream = streams[turn % streams.len()];
        let mut blocks = Vec::new();
        while rig.live() < 8 * GIB {
            let size = log_uniform(&mut rig.rng, 4 * MIB, 512 * MIB);
            let Some(block) = rig.malloc(stream, size)? else { break };
            rig.work(&block, stream, 50_000)?;
            blocks.push(block);
        }
        rig.free_all(blocks)?;
    }
    Ok(())
}

fn oom_recover(rig: &mut Rig) -> Result<()> {
    const ROUNDS: usize = 40;
    let stream = rig.create_stream()?;
    let mut blocks = Vec::new();
    for round in 0..ROUNDS {
        if round == ROUNDS / 4 {
            rig.warmed_up()?;
        }
        // Up to 97 % of the limit: an allocator that fails before wastes memory.
        while rig.live() < 8 * GIB * 97 / 100 {
            let size = log_uniform(&mut rig.rng, 256 * KIB, 128 * MIB);
            let Some(block) = rig.malloc(stream, size)? else { break };
            rig.work(&block, stream, 50_000)?;
            blocks.push(block);
        }
        for _ in 0..blocks.len() / 2 {
            let Some(block) = take(&mut rig.rng, &mut blocks) else { break };
            rig.free(block)?;
        }
    }
    rig.free_all(blocks)
}
