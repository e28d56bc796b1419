//! Rates of spills to the free memory of other cards, beside one plain copy over the same link.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use vramp::defer::{DeferrableBuffer, PeerPart};
use vramp::tiers::peer::PeerStoreConfig;
use vramp::tiers::space::Level;
use vramp::tiers::{PeerStore, ReservationManager, SpaceConfig, SpaceId};
use vramp::{Bytes, Driver};
use vramp_core::{AddrRange, DeviceAddr};
use vramp_driver::{DeviceCopy, Handle, MemoryLocation, MemoryProperties, Stream};

use super::rig::{Rig, RigConfig};
use super::{Options, ROUNDS_MIN};
use crate::statistics::median;
use crate::{Bench, TimeSource};

/// The rates between the card and one other card.
#[derive(Clone, Debug, Serialize)]
pub struct PeerRow {
    /// `peer`.
    pub measure: &'static str,
    /// Ordinal of the other card.
    pub peer: u32,
    /// Length of the buffer.
    pub size_bytes: u64,
    /// Bytes evicted or restored at once.
    pub piece_bytes: u64,
    /// True if the memory of the other card was taken ahead; false if spills take it.
    pub ahead: bool,
    /// Number of rounds.
    pub rounds: u64,
    /// Rate of a plain copy to the other card.
    pub plain_to_peer_bytes_per_s: f64,
    /// Rate of the eviction of a dirty buffer.
    pub spill_bytes_per_s: f64,
    /// Ratio of that rate to the plain copy's.
    pub spill_of_plain: f64,
    /// Rate of a plain copy from the other card.
    pub plain_from_peer_bytes_per_s: f64,
    /// Rate of the restore.
    pub restore_bytes_per_s: f64,
    /// Ratio of that rate to the plain copy's.
    pub restore_of_plain: f64,
    /// Source of the times.
    pub time_is: TimeSource,
}

/// Times of one round, in nanoseconds.
struct Round {
    plain_out: f64,
    spill: f64,
    plain_in: f64,
    restore: f64,
}

/// Returns an empty list for a card without peers.
pub(super) fn measure(
    bench: &Bench,
    options: &Options,
    duration: Duration,
) -> Result<Vec<PeerRow>> {
    let count = bench.info().peers.len() * options.sizes.len() * 2;
    let mut rows = Vec::new();
    for at in 1..=bench.info().peers.len() {
        for &size in &options.sizes {
            for ahead in [false, true] {
                let share = duration / count as u32;
                rows.push(measure_one(bench, options.piece, at, size, ahead, share)?);
            }
        }
    }
    Ok(rows)
}

fn measure_one(
    bench: &Bench,
    piece: Bytes,
    at: usize,
    size: Bytes,
    ahead: bool,
    duration: Duration,
) -> Result<PeerRow> {
    let mut cards = bench.device().fresh_with_peers()?;
    let other = cards.swap_remove(at);
    let driver = cards.swap_remove(0);
    let ordinal = other.info().ordinal;
    let gpu = SpaceId::gpu(ordinal);
    let capacity = other.info().limits.memory;
    let space = SpaceConfig { limit: Level::Fraction(1.0), ..SpaceConfig::gpu(capacity) };
    let spaces = ReservationManager::new([(gpu, space)])?;
    let space = spaces.space(gpu).context("it was configured")?;
    let config = RigConfig { piece, limit: None, pinned: Bytes::mib(128) };
    let rig = Rig::on(driver, &config, |driver| {
        let page = driver.info().limits.page;
        let chunk = piece.checked_round_up(page).context("the piece is larger than any card")?;
        let limit = size + chunk * 4;
        let ahead = if ahead { limit } else { Bytes::ZERO };
        let config = PeerStoreConfig { limit, chunk, ahead, ..PeerStoreConfig::default() };
        let store = PeerStore::new(driver, ordinal, &space, config)?;
        Ok(vec![PeerPart { store, allocator: None }])
    })?;
    let plain = PlainPeerCopies::new(&rig, ordinal, size)?;
    let buffer = rig.manager.buffer(size)?;
    let begun = Instant::now();
    // The first round is for warming up.
    round(&rig, &plain, &buffer)?;
    let mut rounds = Vec::new();
    while rounds.len() < ROUNDS_MIN || begun.elapsed() < duration {
        rounds.push(round(&rig, &plain, &buffer)?);
    }
    let stats = rig.stats();
    ensure!(stats.to_host_bytes == 0, "card {ordinal} had no memory for {size}");
    drop(buffer);
    plain.close()?;
    rig.close()?;
    let middle = |of: fn(&Round) -> f64| median(rounds.iter().map(of).collect());
    let rate = |of| size.count() as f64 * 1e9 / middle(of);
    Ok(PeerRow {
        measure: "peer",
        peer: ordinal,
        size_bytes: size.count(),
        piece_bytes: piece.count(),
        ahead,
        rounds: rounds.len() as u64,
        plain_to_peer_bytes_per_s: rate(|round| round.plain_out),
        spill_bytes_per_s: rate(|round| round.spill),
        spill_of_plain: middle(|round| round.plain_out / round.spill),
        plain_from_peer_bytes_per_s: rate(|round| round.plain_in),
        restore_bytes_per_s: rate(|round| round.restore),
        restore_of_plain: middle(|round| round.plain_in / round.restore),
        time_is: bench.time_source(),
    })
}

fn round(rig: &Rig, plain: &PlainPeerCopies, buffer: &DeferrableBuffer) -> Result<Round> {
    rig.write(buffer)?;
    let plain_out = plain.out()? as f64;
    let spill = rig.spill(buffer)? as f64;
    let plain_in = plain.back()? as f64;
    let restore = rig.restore(buffer)? as f64;
    Ok(Round { plain_out, spill, plain_in, restore })
}

/// Plain copies between memory of the two cards, on one stream.
struct PlainPeerCopies {
    driver: Arc<dyn Driver>,
    memory: DeviceAddr,
    there: AddrRange,
    handle: Handle,
    queue: Stream,
}

impl PlainPeerCopies {
    fn new(rig: &Rig, ordinal: u32, len: Bytes) -> Result<PlainPeerCopies> {
        let driver = Arc::clone(&rig.driver);
        let page = driver.info().limits.page;
        let whole = len.checked_round_up(page).context("the length is larger than any card")?;
        let memory = driver.alloc_memory(whole)?;
        let there = AddrRange::new(driver.reserve(whole, page)?, whole);
        let handle = driver.create(whole, MemoryProperties::at(MemoryLocation::Peer(ordinal)))?;
        driver.map(there.start, handle)?;
        driver.set_access(there, &[])?;
        let queue = driver.create_stream()?;
        Ok(PlainPeerCopies { driver, memory, there, handle, queue })
    }

    fn out(&self) -> Result<u64> {
        self.timed(self.memory, self.there.start)
    }

    fn back(&self) -> Result<u64> {
        self.timed(self.there.start, self.memory)
    }

    /// Returns the time until the host sees the completion.
    fn timed(&self, from: DeviceAddr, to: DeviceAddr) -> Result<u64> {
        let begun = self.driver.now_ns();
        self.driver.copy(self.queue, DeviceCopy { from, to, len: self.there.len })?;
        self.driver.synchronize_stream(self.queue)?;
        Ok(self.driver.now_ns() - begun)
    }

    fn close(self) -> Result<()> {
        let PlainPeerCopies { driver, memory, there, handle, queue } = self;
        driver.destroy_stream(queue)?;
        driver.unmap(there)?;
        driver.release(handle)?;
        driver.free_addresses(there)?;
        Ok(driver.free_memory(memory)?)
    }
}
