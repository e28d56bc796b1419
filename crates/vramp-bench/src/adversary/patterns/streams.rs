//! Many streams, at once or one after the other.

use anyhow::Result;

use super::super::Pattern;
use super::super::draw::{KIB, MIB, log_uniform};
use super::super::rig::Rig;

const LAG_NS: u64 = 100_000;

pub(super) fn patterns() -> Vec<Pattern> {
    let about = "each request is of a stream drawn at random, and frees what the stream had before";
    let open = |count: usize| {
        Pattern::new(format!("streams/open/{count}"), about, move |rig| many(rig, count))
    };
    let about = "each request has a stream of its own: created, used for three blocks, destroyed";
    let ended = |count: usize| {
        Pattern::new(format!("streams/ended/{count}"), about, move |rig| ended(rig, count))
    };
    vec![
        open(64),
        open(512),
        open(4096).large(),
        ended(1000),
        ended(10_000).large(),
        ended(100_000).large(),
    ]
}

fn many(rig: &mut Rig, count: usize) -> Result<()> {
    let streams = rig.create_streams(count)?;
    let mut held: Vec<_> = (0..count).map(|_| None).collect();
    for request in 0..count * 3 + 10_000 {
        if request == count * 3 {
            rig.warmed_up()?;
        }
        let index = rig.rng.usize(..count);
        if let Some(block) = held[index].take() {
            rig.free(block)?;
        }
        let size = log_uniform(&mut rig.rng, 64 * KIB, 4 * MIB);
        held[index] = rig.malloc(streams[index], size)?;
        if let Some(block) = &held[index] {
            rig.work(block, streams[index], LAG_NS)?;
        }
    }
    rig.free_served(held)
}

fn ended(rig: &mut Rig, count: usize) -> Result<()> {
    for request in 0..count {
        if request == count / 4 {
            rig.warmed_up()?;
        }
        let stream = rig.create_stream()?;
        let mut blocks = Vec::new();
        for _ in 0..3 {
            let size = log_uniform(&mut rig.rng, 16 * KIB, 16 * MIB);
            blocks.extend(rig.malloc(stream, size)?);
        }
        for block in &blocks {
            rig.work(block, stream, LAG_NS)?;
        }
        rig.free_all(blocks)?;
        rig.destroy_stream(stream)?;
    }
    Ok(())
}
