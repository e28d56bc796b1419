//! The captured work: fills and copies on a few blocks of mixed sizes.

use anyhow::{Result, anyhow, bail};
use vramp::{Allocation, Bytes};
use vramp_core::AddrRange;
use vramp_driver::DeviceCopy;

use super::Rig;

/// Smallest block.
const BLOCK_MIN: Bytes = Bytes::kib(64);
/// Larger than any card.
const BLOCK_MAX: Bytes = Bytes::tib(1);

/// The blocks of one graph and what is written there. Only its results, in a buffer outside the
/// arena, outlive it.
#[derive(Clone, Debug)]
pub(super) struct Program {
    sizes: Vec<Bytes>,
    /// Byte of the first fill; later fills count on from it.
    first: u8,
}

/// Checks the largest block of a graph.
pub(super) fn check(largest: Bytes) -> Result<()> {
    if largest < BLOCK_MIN || largest > BLOCK_MAX {
        bail!("graphs have blocks from {BLOCK_MIN} on: give a block between that and {BLOCK_MAX}");
    }
    Ok(())
}

impl Program {
    /// Returns `count` programs with blocks of up to `largest`. The same arguments give the same
    /// programs.
    pub(super) fn some(count: u32, largest: Bytes) -> Vec<Program> {
        let mut random = fastrand::Rng::with_seed(0x6772_6170);
        let octaves = (largest.count() as f64 / BLOCK_MIN.count() as f64).log2();
        let one = |_| {
            let blocks = random.usize(3..=6);
            let size = |_| {
                let size = BLOCK_MIN.count() as f64 * (random.f64() * octaves).exp2();
                Bytes::new(size as u64).min(largest)
            };
            Program { sizes: (0..blocks).map(size).collect(), first: random.u8(..) }
        };
        (0..count).map(one).collect()
    }

    /// Returns the length of the results.
    pub(super) fn result_len(&self) -> Bytes {
        self.sizes.iter().copied().sum()
    }

    /// Queues all work, in a capture or not. Every block is filled, partly with a copy of the one
    /// before, and copied to `result`. The first block lives to the end, each of the others until
    /// the next one has read it.
    pub(super) fn queue(&self, rig: &Rig, result: &Allocation) -> Result<()> {
        let Rig { stream, queue, .. } = *rig;
        let (allocator, driver) = (rig.allocator(), rig.driver());
        let free = |block| allocator.free(block, stream).map_err(|error| anyhow!("{error}"));
        let mut first: Option<Allocation> = None;
        let mut last: Option<Allocation> = None;
        let mut at = result.addr();
        let mut byte = self.first;
        for &size in &self.sizes {
            let block = allocator.malloc(size, stream)?;
            for part in thirds(&block) {
                driver.fill(queue, part, byte)?;
                byte = byte.wrapping_add(37);
            }
            if let Some(before) = last.as_ref().or(first.as_ref()) {
                let len = Bytes::new(size.min(before.requested()).count() / 2);
                driver.copy(queue, DeviceCopy { from: before.addr(), to: block.addr(), len })?;
            }
            driver.copy(queue, DeviceCopy { from: block.addr(), to: at, len: size })?;
            at = at + size;
            let previous = if first.is_none() { first.replace(block) } else { last.replace(block) };
            previous.map_or(Ok(()), free)?;
        }
        first.into_iter().chain(last).try_for_each(free)
    }
}

/// Returns three parts of the requested length.
fn thirds(block: &Allocation) -> [AddrRange; 3] {
    let len = block.requested().count();
    [0, 1, 2].map(|third| {
        let (from, to) = (len * third / 3, len * (third + 1) / 3);
        AddrRange::new(block.addr() + Bytes::new(from), Bytes::new(to - from))
    })
}
