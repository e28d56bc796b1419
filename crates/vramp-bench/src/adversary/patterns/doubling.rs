//! Sizes that grow while every second block is freed, after Robson: no hole fits what comes next.

use anyhow::Result;

use super::super::Pattern;
use super::super::draw::{GIB, KIB, MIB};
use super::super::rig::Rig;

pub(super) fn patterns() -> Vec<Pattern> {
    let about =
        "sizes grow by a factor; each time the memory is filled, and every second block freed";
    let doubling =
        |name: &str, shape: Shape| Pattern::new(name, about, move |rig| fill(rig, shape));
    let quick = Shape { least: 256 * KIB, most: 512 * MIB, live: 8 * GIB, quarters: 8 };
    let large = Shape { least: MIB, most: GIB, live: 64 * GIB, quarters: 8 };
    vec![
        doubling("robson/8GiB/x2", quick),
        doubling("robson/8GiB/x1.75", Shape { quarters: 7, ..quick }),
        doubling("robson/64GiB/x2", large).large(),
        doubling("robson/64GiB/x1.75", Shape { quarters: 7, ..large }).large(),
    ]
}

#[derive(Clone, Copy)]
struct Shape {
    least: u64,
    most: u64,
    live: u64,
    /// The factor of growth, in quarters.
    quarters: u64,
}

fn fill(rig: &mut Rig, shape: Shape) -> Result<()> {
    let stream = rig.create_stream()?;
    let mut blocks = Vec::new();
    let mut size = shape.least;
    while size <= shape.most {
        while rig.live() + size <= shape.live {
            let Some(block) = rig.malloc(stream, size)? else { break };
            blocks.push(block);
        }
        let mut kept = Vec::with_capacity(blocks.len() / 2 + 1);
        for (index, block) in blocks.into_iter().enumerate() {
            match index % 2 {
                0 => kept.push(block),
                _ => rig.free(block)?,
            }
        }
        blocks = kept;
        size = size * shape.quarters / 4;
    }
    rig.free_all(blocks)
}
