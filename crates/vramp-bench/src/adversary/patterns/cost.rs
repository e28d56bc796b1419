//! Requests whose cost must not grow with what lies in the pool.

use anyhow::Result;
use vramp::{Bytes, StreamId};

use super::super::draw::{GIB, KIB, MIB, log_uniform, take};
use super::super::rig::{Block, Rig};
use super::super::{Goal, Pattern};

const LAG_NS: u64 = 50_000;
/// Longer than any pattern.
const FOR_EVER_NS: u64 = 3_600_000_000_000;
/// Table entries that a hit may look at, however many there are.
const HIT: Goal = Goal::LooksAt(4.0);
/// The same where every request is a miss, or freed after one.
const MISS: Goal = Goal::LooksAt(50.0);

pub(super) fn patterns() -> Vec<Pattern> {
    let mut all = Vec::new();
    for (size, name) in [(64 * KIB, "64KiB"), (4 * MIB, "4MiB"), (256 * MIB, "256MiB")] {
        let about = "64 blocks are outstanding; the oldest is freed before the next request";
        all.push(Pattern::new(format!("ring/64x{name}"), about, move |rig| ring(rig, size)));
    }
    for (count, large) in [(1_000, false), (10_000, false), (100_000, true)] {
        let about = "hits beside free fragments of the same size class that are too small";
        let fragments = move |rig: &mut Rig| fragments(rig, count);
        all.push(
            Pattern::new(format!("cost/fragments/{count}"), about, fragments)
                .sized(large)
                .goal(HIT),
        );

        let about = "hits of 5 KiB beside free fragments of 4 KiB";
        let small = move |rig: &mut Rig| small_fragments(rig, count);
        all.push(
            Pattern::new(format!("cost/small-fragments/{count}"), about, small)
                .sized(large)
                .goal(HIT),
        );

        let about = "misses beside freed blocks that work of another stream still uses";
        let waiting = move |rig: &mut Rig| waiting(rig, count);
        all.push(
            Pattern::new(format!("cost/waiting/{count}"), about, waiting).sized(large).goal(MISS),
        );
    }
    for (count, large) in [(10_000, false), (100_000, false), (1_000_000, true)] {
        let about = "misses of growing sizes beside live small blocks";
        let live = move |rig: &mut Rig| live_small(rig, count);
        all.push(
            Pattern::new(format!("cost/live-small/{count}"), about, live).sized(large).goal(MISS),
        );
    }
    for (count, large) in [(1_000, false), (4_000, false), (16_000, true)] {
        let about = "the cache is emptied while every second block lives";
        let chunks = move |rig: &mut Rig| empty_fragments(rig, count);
        all.push(
            Pattern::new(format!("cost/empty-cache/{count}"), about, chunks)
                .sized(large)
                .goal(MISS),
        );
    }
    for (count, large) in [(100, false), (10_000, false), (100_000, false), (1_000_000, true)] {
        let about = "hits beside live blocks of the same sizes";
        let live = move |rig: &mut Rig| hits_beside_live(rig, count);
        all.push(
            Pattern::new(format!("cost/hits-live/{count}"), about, live).sized(large).goal(HIT),
        );
    }
    for (count, large) in [(16, false), (512, false), (4096, true)] {
        let about = "hits, then misses, on one of many streams, of which each holds a block";
        let streams = move |rig: &mut Rig| hits_beside_streams(rig, count);
        all.push(
            Pattern::new(format!("cost/streams/{count}"), about, streams).sized(large).goal(MISS),
        );

        let about =
            "hits, then misses, in one of many pools with a limit, of which each holds a block";
        let pools = move |rig: &mut Rig| hits_beside_pools(rig, count);
        let pools = Pattern::new(format!("cost/pools/{count}"), about, pools);
        // Room for a chunk of each pool, and for the misses.
        let limit = Bytes::mib(8192 + 4 * count as u64);
        all.push(pools.sized(large).limit(limit).goal(Goal::NoFailure).goal(MISS));
    }
    for count in [1, 64] {
        let about = "hits carved from memory that many streams freed and still use";
        let epochs = move |rig: &mut Rig| hits_in_shared_memory(rig, count);
        all.push(Pattern::new(format!("cost/unreached/{count}"), about, epochs).goal(HIT));
    }
    let about = "pairs of 512 B after a request that had to wait for the memory of another stream";
    let after = Pattern::new("cost/after-shortage", about, after_shortage);
    all.push(after.limit(Bytes::gib(2)).goal(Goal::NoDriverCalls).goal(Goal::NoFailure).goal(HIT));
    let about = "four streams replace blocks, and the cache is emptied every fifty requests";
    all.push(Pattern::new("empty-cache/loop", about, empty_loop));
    let about = "each block is used on eight streams before it is freed";
    all.push(Pattern::new("record-use/8", about, record_use));
    all
}

impl Pattern {
    fn sized(mut self, large: bool) -> Pattern {
        self.large = large;
        self
    }
}

fn ring(rig: &mut Rig, size: u64) -> Result<()> {
    const OUTSTANDING: usize = 64;
    const REQUESTS: usize = 20_000;
    let stream = rig.create_stream()?;
    let mut ring: Vec<Option<Block>> = (0..OUTSTANDING).map(|_| None).collect();
    for request in 0..REQUESTS {
        if request == REQUESTS / 4 {
            rig.warmed_up()?;
        }
        let slot = request % OUTSTANDING;
        if let Some(block) = ring[slot].take() {
            rig.free(block)?;
        }
        ring[slot] = rig.malloc(stream, size)?;
    }
    rig.free_served(ring)
}

/// Leaves `count` free fragments of `size`, each beside a live block. Returns the live ones.
fn fragment(rig: &mut Rig, stream: StreamId, count: usize, size: u64) -> Result<Vec<Block>> {
    let mut blocks = Vec::new();
    for _ in 0..2 * count {
        blocks.extend(rig.malloc(stream, size)?);
    }
    let mut kept = Vec::with_capacity(count);
    for (index, block) in blocks.into_iter().enumerate() {
        if index % 2 == 0 {
            kept.push(block);
        } else {
            rig.free(block)?;
        }
    }
    Ok(kept)
}

/// Makes requests of `size`, several outstanding, freed in random order.
fn hits(rig: &mut Rig, stream: StreamId, size: u64) -> Result<()> {
    const REQUESTS: usize = 2000;
    const OUTSTANDING: usize = 32;
    let mut blocks = Vec::new();
    for request in 0..REQUESTS + OUTSTANDING {
        if request == OUTSTANDING {
            rig.warmed_up()?;
            for _ in 0..OUTSTANDING / 2 {
                let block = take(&mut rig.rng, &mut blocks);
                rig.free_all(block)?;
            }
        }
        blocks.extend(rig.malloc(stream, size)?);
        if request >= OUTSTANDING {
            let block = take(&mut rig.rng, &mut blocks);
            rig.free_all(block)?;
        }
    }
    rig.measured()?;
    rig.free_all(blocks)
}

fn fragments(rig: &mut Rig, count: usize) -> Result<()> {
    let stream = rig.create_stream()?;
    let kept = fragment(rig, stream, count, MIB + 64 * KIB)?;
    hits(rig, stream, MIB + 512 * KIB)?;
    rig.free_all(kept)
}

fn small_fragments(rig: &mut Rig, count: usize) -> Result<()> {
    let stream = rig.create_stream()?;
    let kept = fragment(rig, stream, count, 4 * KIB)?;
    hits(rig, stream, 5 * KIB)?;
    rig.free_all(kept)
}

/// Allocates blocks that grow, so that each needs new or moved memory.
fn misses(rig: &mut Rig, stream: StreamId) -> Result<()> {
    const REQUESTS: u64 = 200;
    rig.warmed_up()?;
    let mut blocks = Vec::new();
    for request in 0..REQUESTS {
        let block = rig.malloc(stream, (4 + request % 50) * MIB)?;
        if let Some(block) = &block {
            rig.work(block, stream, LAG_NS)?;
        }
        blocks.extend(block);
    }
    rig.measured()?;
    rig.free_all(blocks)
}

fn waiting(rig: &mut Rig, count: usize) -> Result<()> {
    let streams = rig.create_streams(2)?;
    let (stream, other) = (streams[0], streams[1]);
    if let Some(block) = rig.malloc(other, 512)? {
        rig.work(&block, other, FOR_EVER_NS)?;
        rig.free(block)?;
    }
    let mut blocks = Vec::new();
    for _ in 0..count {
        blocks.extend(rig.malloc(stream, 128 * KIB)?);
    }
    for block in &blocks {
        rig.record_use(block, other)?;
    }
    rig.free_all(blocks)?;
    misses(rig, stream)
}

fn live_small(rig: &mut Rig, count: usize) -> Result<()> {
    let stream = rig.create_stream()?;
    let mut blocks = Vec::new();
    for _ in 0..count {
        let size = log_uniform(&mut rig.rng, 512, 32 * KIB);
        blocks.extend(rig.malloc(stream, size)?);
    }
    misses(rig, stream)?;
    rig.free_all(blocks)
}

/// Makes pairs of several sizes, one block at a time.
fn pairs(rig: &mut Rig, pool: usize, stream: StreamId, sizes: &[u64]) -> Result<()> {
    const REQUESTS: usize = 2000;
    for request in 0..REQUESTS {
        let size = sizes[request % sizes.len()];
        let block = rig.malloc_in(pool, stream, size)?;
        rig.free_served([block])?;
    }
    Ok(())
}

fn hits_beside_live(rig: &mut Rig, count: usize) -> Result<()> {
    const SIZES: [u64; 3] = [2 * KIB, 24 * KIB, MIB + 256 * KIB];
    let stream = rig.create_stream()?;
    let mut blocks = Vec::new();
    for index in 0..count {
        // Few of the large ones, so that a million blocks fit.
        let size = if index % 100 == 0 { SIZES[2] } else { SIZES[index % 2] };
        blocks.extend(rig.malloc(stream, size)?);
    }
    pairs(rig, 0, stream, &SIZES)?;
    rig.warmed_up()?;
    pairs(rig, 0, stream, &SIZES)?;
    rig.measured()?;
    rig.free_all(blocks)
}

fn hits_beside_streams(rig: &mut Rig, count: usize) -> Result<()> {
    let streams = rig.create_streams(count)?;
    let mut blocks = Vec::new();
    for &stream in &streams {
        blocks.extend(rig.used(stream, 64 * KIB, LAG_NS)?);
    }
    pairs(rig, 0, streams[0], &[24 * KIB, 3 * MIB])?;
    rig.warmed_up()?;
    pairs(rig, 0, streams[0], &[24 * KIB, 3 * MIB])?;
    for request in 0..100 {
        blocks.extend(rig.used(streams[0], (4 + request % 25) * MIB, LAG_NS)?);
    }
    rig.measured()?;
    rig.free_all(blocks)
}

fn hits_beside_pools(rig: &mut Rig, count: usize) -> Result<()> {
    let stream = rig.create_stream()?;
    let mut blocks = Vec::new();
    let mut last = 0;
    for number in 0..count {
        match rig.create_pool(&format!("pool {number}"))? {
            Some(pool) => {
                blocks.extend(rig.malloc_in(pool, stream, 64 * KIB)?);
                last = pool;
            }
            None => rig.give_up(1),
        }
    }
    pairs(rig, last, stream, &[24 * KIB, 3 * MIB])?;
    rig.warmed_up()?;
    pairs(rig, last, stream, &[24 * KIB, 3 * MIB])?;
    for request in 0..100 {
        blocks.extend(rig.malloc_in(last, stream, (4 + request % 25) * MIB)?);
    }
    rig.measured()?;
    rig.free_all(blocks)
}

fn hits_in_shared_memory(rig: &mut Rig, count: usize) -> Result<()> {
    let stream = rig.create_stream()?;
    let others = rig.create_streams(count)?;
    // Neighbours, freed in turn by each of the streams, which still use them.
    let mut parts = Vec::new();
    for _ in 0..512 {
        parts.extend(rig.malloc(stream, 2 * MIB)?);
    }
    for (index, part) in parts.into_iter().enumerate() {
        let other = others[index % count];
        rig.order(other, stream)?;
        rig.work(&part, other, FOR_EVER_NS)?;
        rig.free_on(part, other)?;
    }
    rig.warmed_up()?;
    for request in 0..2000 {
        let other = others[request % count];
        let block = rig.malloc(other, MIB + 512 * KIB)?;
        rig.free_served([block])?;
    }
    rig.measured()
}

fn after_shortage(rig: &mut Rig) -> Result<()> {
    let (stream, other) = (rig.create_stream()?, rig.create_stream()?);
    // Nearly all memory is freed by one stream, whose work goes on, and wanted by the other.
    let first = rig.used(stream, GIB + 512 * MIB, 1_000_000)?;
    rig.free_served([first])?;
    let second = rig.used(other, GIB + 512 * MIB, 1_000_000)?;
    rig.free_served([second])?;
    pairs(rig, 0, other, &[512])?;
    rig.warmed_up()?;
    pairs(rig, 0, other, &[512])
}

fn empty_fragments(rig: &mut Rig, count: usize) -> Result<()> {
    let stream = rig.create_stream()?;
    let kept = fragment(rig, stream, count, 4 * MIB)?;
    rig.warmed_up()?;
    rig.empty_cache(0)?;
    rig.free_all(kept)?;
    rig.empty_cache(0)
}

fn empty_loop(rig: &mut Rig) -> Result<()> {
    const REQUESTS: usize = 6000;
    let streams = rig.create_streams(4)?;
    let mut blocks = Vec::new();
    for request in 0..REQUESTS {
        if request == REQUESTS / 4 {
            rig.warmed_up()?;
        }
        if request % 50 == 0 {
            rig.empty_cache(0)?;
        }
        let stream = streams[rig.rng.usize(..4)];
        let size = log_uniform(&mut rig.rng, 64 * KIB, 64 * MIB);
        while rig.live() + size > 2 * GIB {
            let block = take(&mut rig.rng, &mut blocks);
            rig.free_all(block)?;
        }
        if let Some(block) = rig.malloc(stream, size)? {
            rig.work(&block, stream, LAG_NS)?;
            blocks.push(block);
        }
    }
    rig.free_all(blocks)
}

fn record_use(rig: &mut Rig) -> Result<()> {
    const REQUESTS: usize = 3000;
    let own = rig.create_stream()?;
    let others = rig.create_streams(8)?;
    let mut blocks = Vec::new();
    for request in 0..REQUESTS {
        if request == REQUESTS / 4 {
            rig.warmed_up()?;
        }
        let size = log_uniform(&mut rig.rng, MIB, 64 * MIB);
        while rig.live() + size > 2 * GIB {
            let block = take(&mut rig.rng, &mut blocks);
            rig.free_all(block)?;
        }
        let Some(block) = rig.malloc(own, size)? else { continue };
        rig.work(&block, own, LAG_NS)?;
        for &other in &others {
            rig.order(other, own)?;
            rig.record_use(&block, other)?;
            rig.work(&block, other, LAG_NS)?;
        }
        blocks.push(block);
    }
    rig.free_all(blocks)
}
