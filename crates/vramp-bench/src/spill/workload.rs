//! Buffers of twice the card's limit, accessed at random: the time over that of the copies alone.

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use vramp::defer::{Access, DeferrableBuffer};
use vramp::{Bytes, Driver, StreamId};
use vramp_core::{AddrRange, DeviceAddr};
use vramp_driver::{DeviceCopy, DeviceInfo, Stream};

use super::rig::{PlainCopies, Rig, RigConfig};
use super::{Options, ROUNDS_MIN};
use crate::statistics::median;
use crate::{Bench, TimeSource};

/// Default limit of a card and of a simulated one.
const USUAL_LIMIT: [Bytes; 2] = [Bytes::gib(4), Bytes::mib(512)];
/// Length of all buffers, in limits.
const OVERCOMMIT: u64 = 2;
/// Buffers that fit within the limit, by default.
const BUFFERS_IN_LIMIT: u64 = 64;
/// Streams that the accesses use in turn.
const STREAMS: usize = 4;
/// Length of the plain copies whose rate is the yardstick.
const PLAIN_COPY: Bytes = Bytes::mib(256);

/// The result for one share of writes.
#[derive(Clone, Debug, Serialize)]
pub struct WorkloadRow {
    /// `workload`.
    pub measure: &'static str,
    /// Percentage of accesses that write.
    pub writes_percent: u8,
    /// Memory limit on the card.
    pub card_bytes: u64,
    /// Length of each buffer.
    pub buffer_bytes: u64,
    /// Number of buffers.
    pub buffers: u64,
    /// Number of accesses.
    pub accesses: u64,
    /// Bytes leased by all accesses.
    pub leased_bytes: u64,
    /// Bytes evicted to the host.
    pub to_host_bytes: u64,
    /// Bytes restored from the host.
    pub from_host_bytes: u64,
    /// Time of all accesses.
    pub took_ns: u64,
    /// Time of plain copies of the evicted or of the restored bytes, whichever is longer.
    pub one_way_ns: u64,
    /// Time of plain copies of both, one after the other.
    pub both_ways_ns: u64,
    /// `took_ns` over `one_way_ns`.
    pub of_one_way: f64,
    /// `took_ns` over `both_ways_ns`.
    pub of_both_ways: f64,
    /// Source of the times.
    pub time_is: TimeSource,
}

/// The workload's buffers and accesses.
struct Shape {
    limit: Bytes,
    buffer: Bytes,
    buffers: u64,
    accesses: u32,
    seed: u64,
}

/// Rates of plain copies, in bytes per nanosecond.
struct Rates {
    to_host: f64,
    to_device: f64,
}

pub(super) fn measure(bench: &Bench, options: &Options) -> Result<Vec<WorkloadRow>> {
    let shape = shape(options, bench.info())?;
    let pinned = shape.buffer * (shape.buffers + BUFFERS_IN_LIMIT);
    let config = RigConfig { piece: options.piece, limit: Some(shape.limit), pinned };
    let mut runs = vec![options.writes];
    if options.writes > 0 {
        runs.push(0);
    }
    let run = |writes| {
        let rig = Rig::new(bench, &config)?;
        let row = run(&rig, &shape, writes, bench.time_source())?;
        rig.close()?;
        Ok(row)
    };
    runs.into_iter().map(run).collect()
}

fn shape(options: &Options, info: &DeviceInfo) -> Result<Shape> {
    let limit = options.card.unwrap_or(USUAL_LIMIT[usize::from(info.simulated)]);
    let page = info.limits.page;
    let usual = Bytes::new(limit.count() / BUFFERS_IN_LIMIT).max(page).round_down(page);
    let buffer = options.buffer.unwrap_or(usual);
    // Three of them have to fit at once, each rounded up to whole pieces.
    let most = Bytes::new(limit.count() / 4);
    ensure!(
        limit <= info.limits.memory && (page..=most).contains(&buffer),
        "buffers of {buffer} cannot be used on {limit} of a card with {}: give a card limit of no \
         more, and a buffer from {page} to {most}",
        info.limits.memory
    );
    let buffers = limit.count() * OVERCOMMIT / buffer.count();
    Ok(Shape { limit, buffer, buffers, accesses: options.accesses, seed: options.seed })
}

fn run(rig: &Rig, shape: &Shape, writes_percent: u8, time_is: TimeSource) -> Result<WorkloadRow> {
    let plain = PlainCopies::new(rig, PLAIN_COPY)?;
    let made = (0..shape.buffers).map(|_| rig.manager.buffer(shape.buffer));
    let buffers = made.collect::<Result<Vec<_>, _>>()?;
    // All buffers begin evicted and clean.
    for buffer in &buffers {
        rig.write(buffer)?;
    }
    rig.manager.spill(shape.limit);
    let rates = rates(&plain)?;
    let streams = (0..STREAMS).map(|_| rig.new_stream()).collect::<Result<Vec<_>>>()?;
    let scratch = rig.driver.alloc_memory(shape.buffer * STREAMS as u64)?;
    let before = rig.stats();
    let mut leased = Bytes::ZERO;
    let mut random = fastrand::Rng::with_seed(shape.seed);
    let begun = rig.driver.now_ns();
    for index in 0..shape.accesses as usize {
        let nth = index % STREAMS;
        let chosen = choose(&mut random, shape.buffers);
        let named: Vec<&DeferrableBuffer> = chosen.iter().map(|&index| &buffers[index]).collect();
        let writes = random.u8(..100) < writes_percent;
        let scratch = scratch + shape.buffer * nth as u64;
        access(rig, &named, writes, streams[nth], scratch)?;
        leased += shape.buffer * chosen.len() as u64;
    }
    for (_, queue) in &streams {
        rig.driver.synchronize_stream(*queue)?;
    }
    let took_ns = rig.driver.now_ns() - begun;
    let after = rig.stats();
    rig.driver.free_memory(scratch)?;
    plain.close()?;
    let (down, up) = (
        after.to_host_bytes - before.to_host_bytes,
        after.from_host_bytes - before.from_host_bytes,
    );
    let (down_ns, up_ns) = (down as f64 / rates.to_host, up as f64 / rates.to_device);
    Ok(WorkloadRow {
        measure: "workload",
        writes_percent,
        card_bytes: shape.limit.count(),
        buffer_bytes: shape.buffer.count(),
        buffers: shape.buffers,
        accesses: shape.accesses.into(),
        leased_bytes: leased.count(),
        to_host_bytes: down,
        from_host_bytes: up,
        took_ns,
        one_way_ns: down_ns.max(up_ns) as u64,
        both_ways_ns: (down_ns + up_ns) as u64,
        of_one_way: took_ns as f64 / down_ns.max(up_ns),
        of_both_ways: took_ns as f64 / (down_ns + up_ns),
        time_is,
    })
}

fn rates(plain: &PlainCopies) -> Result<Rates> {
    let of = |copy: &dyn Fn() -> Result<u64>| {
        let times = (0..ROUNDS_MIN).map(|_| copy());
        let times = times.collect::<Result<Vec<_>>>()?;
        anyhow::Ok(
            PLAIN_COPY.count() as f64 / median(times.into_iter().map(|ns| ns as f64).collect()),
        )
    };
    Ok(Rates {
        to_host: of(&|| plain.to_host(PLAIN_COPY))?,
        to_device: of(&|| plain.to_device(PLAIN_COPY))?,
    })
}

/// Chooses one to three buffers, each from the first fifth with a probability of four fifths.
fn choose(random: &mut fastrand::Rng, buffers: u64) -> Vec<usize> {
    let buffers = buffers as usize;
    let hot = (buffers / 5).max(1);
    let mut chosen = Vec::new();
    for _ in 0..random.usize(1..=3) {
        let index = match random.u8(..5) {
            0 => random.usize(hot..buffers),
            _ => random.usize(..hot),
        };
        if !chosen.contains(&index) {
            chosen.push(index);
        }
    }
    chosen
}

/// Leases the buffers and fills all of them, or copies each to `scratch`.
fn access(
    rig: &Rig,
    buffers: &[&DeferrableBuffer],
    writes: bool,
    (stream, queue): (StreamId, Stream),
    scratch: DeviceAddr,
) -> Result<()> {
    let access = if writes { Access::Exclusive } else { Access::Shared };
    let named: Vec<_> = buffers.iter().map(|&buffer| (buffer, access)).collect();
    let lease = rig.manager.lease(&named, stream).context("the buffers fit on the card")?;
    for AddrRange { start, len } in lease.addresses() {
        match writes {
            true => rig.driver.fill(queue, AddrRange::new(start, len), 1)?,
            false => rig.driver.copy(queue, DeviceCopy { from: start, to: scratch, len })?,
        }
    }
    Ok(())
}
