//! Buffers of twice the card's limit, used at random: what it takes beside the copies alone.

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use vramp_alloc::{Bytes, Driver, StreamId};
use vramp_core::{AddrRange, DeviceAddr};
use vramp_defer::{Access, DeferrableBuffer};
use vramp_driver::{DeviceCopy, DeviceInfo, Stream};

use super::site::{Plain, Plan, Site};
use super::{ROUNDS_LEAST, millis, ratio, size, time_is};
use crate::bench::args::Spill;
use crate::bench::{Bench, Cell, Column, median};
use crate::count::Count;

/// What the card may have by default, and what a simulated one.
const USUAL: [Bytes; 2] = [Bytes::gib(4), Bytes::mib(512)];
/// All buffers together, in cards.
const CARDS: u64 = 2;
/// A buffer by default is such a part of the card.
const PART: u64 = 64;
/// Work goes to so many streams by turns.
const STREAMS: usize = 4;
/// How much the plain copies copy whose rate is the yardstick.
const PLAIN: Bytes = Bytes::mib(256);

/// One row.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    measure: &'static str,
    /// How many of a hundred accesses write.
    writes_percent: u8,
    card_bytes: u64,
    buffer_bytes: u64,
    buffers: u64,
    accesses: u64,
    leased_bytes: u64,
    to_host_bytes: u64,
    from_host_bytes: u64,
    took_ns: u64,
    /// The longer of both directions' plain copies.
    one_way_ns: u64,
    /// Both directions' plain copies, one after the other.
    both_ways_ns: u64,
    /// The time over the longer direction alone, and over both in turn.
    of_one_way: f64,
    of_both_ways: f64,
    time_is: &'static str,
}

/// What is used how.
struct Shape {
    card: Bytes,
    buffer: Bytes,
    buffers: u64,
    accesses: u32,
    seed: u64,
}

/// Bytes a nanosecond of a plain copy.
struct Rates {
    to_host: f64,
    to_device: f64,
}

pub(super) fn measure(bench: &Bench, args: &Spill) -> Result<Vec<Row>> {
    let shape = shape(args, &bench.info)?;
    let host = shape.buffer * (shape.buffers + PART);
    let plan = Plan { piece: args.piece, limit: Some(shape.card), host };
    let mut runs = vec![args.writes];
    if args.writes > 0 {
        runs.push(0);
    }
    let run = |writes| {
        let site = Site::new(bench, &plan)?;
        let row = run(&site, &shape, writes, time_is(&bench.info))?;
        site.close()?;
        Ok(row)
    };
    runs.into_iter().map(run).collect()
}

fn shape(args: &Spill, info: &DeviceInfo) -> Result<Shape> {
    let card = args.card.unwrap_or(USUAL[usize::from(info.simulated)]);
    let page = info.limits.page;
    let usual = Bytes::new(card.count() / PART).max(page).round_down(page);
    let buffer = args.buffer.unwrap_or(usual);
    // Three of them have to fit at once, whatever whole pieces they take.
    let most = Bytes::new(card.count() / 4);
    ensure!(
        card <= info.limits.memory && (page..=most).contains(&buffer),
        "buffers of {buffer} cannot be used on {card} of a card with {}: give a --card of no more, \
         and a --buffer from {page} to {most}",
        info.limits.memory
    );
    let buffers = card.count() * CARDS / buffer.count();
    Ok(Shape { card, buffer, buffers, accesses: args.accesses, seed: args.seed })
}

fn run(site: &Site, shape: &Shape, writes: u8, time_is: &'static str) -> Result<Row> {
    let plain = Plain::new(site, PLAIN)?;
    let made = (0..shape.buffers).map(|_| site.manager.buffer(shape.buffer));
    let buffers = made.collect::<Result<Vec<_>, _>>()?;
    // All is on the host at first, and nothing has to leave that nobody wrote since.
    for buffer in &buffers {
        site.write(buffer)?;
    }
    site.manager.spill(shape.card);
    let rates = rates(&plain)?;
    let streams = (0..STREAMS).map(|_| site.new_stream()).collect::<Result<Vec<_>>>()?;
    let scratch = site.driver.alloc_memory(shape.buffer * STREAMS as u64)?;
    let before = site.stats();
    let mut leased = Bytes::ZERO;
    let mut random = fastrand::Rng::with_seed(shape.seed);
    let begun = site.driver.now_ns();
    for access in 0..shape.accesses as usize {
        let lane = access % STREAMS;
        let used = choose(&mut random, shape.buffers);
        let named: Vec<&DeferrableBuffer> = used.iter().map(|&index| &buffers[index]).collect();
        let writing = random.u8(..100) < writes;
        let space = scratch + shape.buffer * lane as u64;
        use_them(site, &named, writing, streams[lane], space)?;
        leased += shape.buffer * used.len() as u64;
    }
    for (_, queue) in &streams {
        site.driver.synchronize_stream(*queue)?;
    }
    let took_ns = site.driver.now_ns() - begun;
    let after = site.stats();
    site.driver.free_memory(scratch)?;
    plain.close()?;
    let (down, up) = (
        after.to_host_bytes - before.to_host_bytes,
        after.from_host_bytes - before.from_host_bytes,
    );
    let (down_ns, up_ns) = (down as f64 / rates.to_host, up as f64 / rates.to_device);
    Ok(Row {
        measure: "workload",
        writes_percent: writes,
        card_bytes: shape.card.count(),
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

fn rates(plain: &Plain) -> Result<Rates> {
    let of = |copy: &dyn Fn() -> Result<u64>| {
        let times = (0..ROUNDS_LEAST).map(|_| copy());
        let times = times.collect::<Result<Vec<_>>>()?;
        anyhow::Ok(PLAIN.count() as f64 / median(times.into_iter().map(|ns| ns as f64).collect()))
    };
    Ok(Rates { to_host: of(&|| plain.to_host(PLAIN))?, to_device: of(&|| plain.to_device(PLAIN))? })
}

/// One to three buffers, each of the first fifth with four chances of five.
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

/// Fills all of them, or copies each into memory beside.
fn use_them(
    site: &Site,
    buffers: &[&DeferrableBuffer],
    writing: bool,
    (stream, queue): (StreamId, Stream),
    space: DeviceAddr,
) -> Result<()> {
    let access = if writing { Access::Exclusive } else { Access::Shared };
    let named: Vec<_> = buffers.iter().map(|&buffer| (buffer, access)).collect();
    let lease = site.manager.lease(&named, stream).context("the buffers fit on the card")?;
    for AddrRange { start, len } in lease.addresses() {
        match writing {
            true => site.driver.fill(queue, AddrRange::new(start, len), 1)?,
            false => site.driver.copy(queue, DeviceCopy { from: start, to: space, len })?,
        }
    }
    Ok(())
}

pub(super) const COLUMNS: [Column<Row>; 9] = [
    ("writes", |row| Cell::Number(format!("{} %", row.writes_percent))),
    ("card", |row| size(row.card_bytes)),
    ("buffers", |row| Cell::Number(Count(row.buffers).to_string())),
    ("accesses", |row| Cell::Number(Count(row.accesses).to_string())),
    ("out", |row| size(row.to_host_bytes)),
    ("in", |row| size(row.from_host_bytes)),
    ("took ms", |row| millis(row.took_ns as f64, row.time_is)),
    ("of one way", |row| ratio(row.of_one_way)),
    ("of both ways", |row| ratio(row.of_both_ways)),
];
