//! Threads: as one thread would see them, in an order drawn from the seed, and real ones.

use anyhow::Result;
use vramp::Allocation;

use super::super::Pattern;
use super::super::draw::{GIB, MIB, log_uniform, take};
use super::super::rig::{Block, Rig, Thread};

const LAG_NS: u64 = 100_000;
const HELD: u64 = 4 * GIB;

pub(super) fn patterns() -> Vec<Pattern> {
    let about = "threads with a stream each, as one thread in an order drawn from the seed; each \
                 replaces blocks of 2 to 32 MiB";
    let interleaved = |threads: usize| {
        let name = format!("threads/interleaved/{threads}");
        Pattern::new(name, about, move |rig| interleaved(rig, threads))
    };
    let about = "real threads with a stream each; each replaces blocks of 2 to 32 MiB";
    let real = |threads: u64| {
        let name = format!("threads/real/{threads}");
        Pattern::new(name, about, move |rig| {
            rig.on_threads(threads, |thread| replace(thread, HELD / threads))
        })
        .threads()
    };
    vec![interleaved(2), interleaved(16), real(2), real(8)]
}

fn interleaved(rig: &mut Rig, threads: usize) -> Result<()> {
    const REQUESTS: usize = 12_000;
    let streams = rig.create_streams(threads)?;
    let mut held: Vec<(u64, Vec<Block>)> = streams.iter().map(|_| (0, Vec::new())).collect();
    for request in 0..REQUESTS {
        if request == REQUESTS / 4 {
            rig.warmed_up()?;
        }
        let index = rig.rng.usize(..threads);
        let size = log_uniform(&mut rig.rng, 2 * MIB, 32 * MIB);
        let (bytes, blocks) = &mut held[index];
        while *bytes + size > HELD / threads as u64 {
            let Some(block) = take(&mut rig.rng, blocks) else { break };
            *bytes -= block.size();
            rig.free(block)?;
        }
        if let Some(block) = rig.malloc(streams[index], size)? {
            rig.work(&block, streams[index], LAG_NS)?;
            *bytes += size;
            blocks.push(block);
        }
    }
    held.into_iter().flat_map(|(_, blocks)| blocks).try_for_each(|block| rig.free(block))
}

fn replace(thread: &mut Thread<'_>, live: u64) -> Result<()> {
    const REQUESTS: usize = 4000;
    let (mut bytes, mut blocks) = (0, Vec::<Allocation>::new());
    for _ in 0..REQUESTS {
        let size = log_uniform(&mut thread.rng, 2 * MIB, 32 * MIB);
        while bytes + size > live {
            let Some(block) = take(&mut thread.rng, &mut blocks) else { break };
            bytes -= block.requested().count();
            thread.free(block)?;
        }
        if let Some(block) = thread.malloc(size)? {
            bytes += size;
            blocks.push(block);
        }
    }
    blocks.into_iter().try_for_each(|block| thread.free(block))
}
