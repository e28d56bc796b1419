//! Work that is captured: fills and copies on a few blocks of mixed sizes.

use anyhow::{Result, anyhow, bail};
use vramp_alloc::{Allocation, Bytes};
use vramp_core::AddrRange;
use vramp_driver::DeviceCopy;

use super::Site;

/// The smallest block.
const LEAST: Bytes = Bytes::kib(64);
/// More is more than any card has.
const MOST: Bytes = Bytes::tib(1);

/// The blocks of one graph, and what is written there. Nothing outlives it but its results, in a
/// buffer from outside.
#[derive(Clone, Debug)]
pub(super) struct Program {
    sizes: Vec<Bytes>,
    /// What the bytes are drawn from.
    first: u8,
}

/// Sizes that a block can have.
pub(super) fn check(largest: Bytes) -> Result<()> {
    if largest < LEAST || largest > MOST {
        bail!("graphs have blocks from {LEAST} on: give a --block between that and {MOST}");
    }
    Ok(())
}

impl Program {
    /// So many programs with blocks of up to `largest`, the same ones each time.
    pub(super) fn some(count: u32, largest: Bytes) -> Vec<Program> {
        let mut random = fastrand::Rng::with_seed(0x6772_6170);
        let octaves = (largest.count() as f64 / LEAST.count() as f64).log2();
        let one = |_| {
            let blocks = random.usize(3..=6);
            let size = |_| {
                let size = LEAST.count() as f64 * (random.f64() * octaves).exp2();
                Bytes::new(size as u64).min(largest)
            };
            Program { sizes: (0..blocks).map(size).collect(), first: random.u8(..) }
        };
        (0..count).map(one).collect()
    }

    /// How many bytes of results there are.
    pub(super) fn result_len(&self) -> Bytes {
        self.sizes.iter().copied().sum()
    }

    /// Queues it all: in a capture, or not. Every block is filled, partly with what the one before
    /// holds, and copied to `result`. The first block lives to the end, each of the others until the
    /// next one has read it.
    pub(super) fn queue(&self, site: &Site, result: &Allocation) -> Result<()> {
        let Site { stream, queue, .. } = *site;
        let (allocator, driver) = (site.allocator(), site.driver());
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
            let over = if first.is_none() { first.replace(block) } else { last.replace(block) };
            over.map_or(Ok(()), free)?;
        }
        first.into_iter().chain(last).try_for_each(free)
    }
}

/// Three parts of what was asked for.
fn thirds(block: &Allocation) -> [AddrRange; 3] {
    let len = block.requested().count();
    [0, 1, 2].map(|third| {
        let (from, to) = (len * third / 3, len * (third + 1) / 3);
        AddrRange::new(block.addr() + Bytes::new(from), Bytes::new(to - from))
    })
}
