//! Blocks of random sizes that replace each other at random.

use anyhow::Result;
use vramp::StreamId;

use super::super::draw::{GIB, KIB, MIB, log_uniform, take};
use super::super::rig::Rig;
use super::super::{Goal, Pattern};

const LAG_NS: u64 = 50_000;

/// Sizes, and how many bytes of them are live.
#[derive(Clone, Copy)]
pub(super) struct Churn {
    pub least: u64,
    pub most: u64,
    pub live: u64,
    /// Requests after the warm-up.
    pub mallocs: usize,
}

pub(super) fn patterns() -> Vec<Pattern> {
    let about = "blocks of log-uniform sizes replace each other at random on one stream";
    let ratio = |name: &str, least, most, live, mallocs| {
        let churn = Churn { least, most, live, mallocs };
        Pattern::new(name, about, move |rig| replace(rig, churn)).goal(Goal::Ratio(1.06))
    };
    let known = |name: &str, (least, most), known: usize, used: usize| {
        let churn = Churn { least, most, live: 300 * MIB, mallocs: 20_000 };
        let about = "small blocks replace each other at random; other streams exist, and use nothing or \
                     have a part";
        Pattern::new(name, about, move |rig| {
            let streams = rig.create_streams(known)?;
            replace_on(rig, &streams[..used], churn)
        })
        .goal(Goal::Ratio(1.20))
    };
    vec![
        known("ratio/512B-1MiB/1-of-16-streams", (512, MIB), 16, 1),
        known("ratio/512B-1MiB/2-of-2-streams", (512, MIB), 2, 2),
        known("ratio/512B-1MiB/16-of-16-streams", (512, MIB), 16, 16),
        known("ratio/2MiB-4MiB/16-of-16-streams", (2 * MIB, 4 * MIB), 16, 16),
        ratio("ratio/1MiB-8MiB", MIB, 8 * MIB, 8 * GIB, 20_000),
        ratio("ratio/512B-4MiB", 512, 4 * MIB, 4 * GIB, 40_000),
        ratio("ratio/512B-256MiB", 512, 256 * MIB, 16 * GIB, 10_000),
        ratio("ratio/64KiB-32MiB", 64 * KIB, 32 * MIB, 8 * GIB, 20_000),
    ]
}

/// Allocates up to `churn.live`, then keeps it there.
pub(super) fn replace(rig: &mut Rig, churn: Churn) -> Result<()> {
    let stream = rig.create_stream()?;
    replace_on(rig, &[stream], churn)
}

/// The same on several streams in turn.
fn replace_on(rig: &mut Rig, streams: &[StreamId], churn: Churn) -> Result<()> {
    // The same sizes for every allocator, whatever fails.
    let mut sizes = rig.rng.fork();
    let mut blocks = Vec::new();
    let mut left = churn.mallocs;
    let mut filled = false;
    while left > 0 {
        let size = log_uniform(&mut sizes, churn.least, churn.most);
        while rig.live() + size > churn.live {
            if !filled {
                filled = true;
                rig.warmed_up()?;
            }
            let Some(block) = take(&mut rig.rng, &mut blocks) else { break };
            rig.free(block)?;
        }
        left -= usize::from(filled);
        let stream = streams[left % streams.len()];
        if let Some(block) = rig.malloc(stream, size)? {
            rig.work(&block, stream, LAG_NS)?;
            blocks.push(block);
        }
    }
    rig.free_all(blocks)
}
