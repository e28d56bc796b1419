//! Measures transfer rates between the spaces of this machine.
//!
//! Time is that of the devices ([`Driver::now_ns`]): the clock of the card, or simulated time.
//! Links with a disk are also timed by the clock on the wall. The longest of these times counts.

use std::sync::Arc;
use std::time::Instant;

use crate::ledger::core::SpaceId;
use vramp_alloc::Driver;
use vramp_core::{AddrRange, Bytes};

use super::core::profile::{MeasuredLink, MeasuredPair, Profile, UnmeasuredLink, median, rate};
use super::error::MoveError;
use super::mover::Mover;
use super::stored::{DiskBudget, DiskCopy};
use super::wait_all::wait_all;
use crate::disk::{ChargeTo, DiskStore};
use crate::host::{HostAllocation, HostPool};

/// Options of a [`Profiler`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfilerConfig {
    /// Bytes to move at a time.
    pub sizes: Vec<Bytes>,
    /// Rounds before the timed ones.
    pub warm_up: u32,
    /// Timed rounds. Their median counts.
    pub rounds: u32,
}

impl Default for ProfilerConfig {
    /// 4 KiB, for the latency, and 1, 16, 64 and 256 MiB. Three rounds of warm-up and ten timed
    /// ones.
    fn default() -> ProfilerConfig {
        let sizes = [Bytes::kib(4)].into_iter().chain([1, 16, 64, 256].map(Bytes::mib));
        ProfilerConfig { sizes: sizes.collect(), warm_up: 3, rounds: 10 }
    }
}

/// A device, with memory that may be overwritten.
struct Gpu {
    space: SpaceId,
    mover: Mover,
    memory: AddrRange,
}

/// Measures the links between the spaces that were added.
#[derive(Default)]
pub struct Profiler {
    config: ProfilerConfig,
    gpus: Vec<Gpu>,
    disks: Vec<Arc<DiskStore>>,
}

impl Profiler {
    /// Returns a profiler without spaces.
    pub fn new(config: ProfilerConfig) -> Profiler {
        Profiler { config, ..Profiler::default() }
    }

    /// Adds a device and the host space of its mover's pool. `memory` is overwritten and bounds the
    /// sizes. No work may use it.
    pub fn gpu(mut self, space: SpaceId, mover: &Mover, memory: AddrRange) -> Profiler {
        self.gpus.push(Gpu { space, mover: mover.clone(), memory });
        self
    }

    /// Adds a disk.
    pub fn disk(mut self, store: &Arc<DiskStore>) -> Profiler {
        self.disks.push(Arc::clone(store));
        self
    }

    /// Measures each device to and from its host, alone and in both directions at once, each pair
    /// of devices, and each disk to and from devices and hosts. A link that fails is listed in
    /// [`Profile::unmeasured`] with the reason. Pins host blocks if too few are free.
    ///
    /// # Errors
    /// A device was lost.
    pub fn measure(&self) -> Result<Profile, MoveError> {
        let step = self.gpus.iter().map(|gpu| gpu.mover.config().step).max();
        let step_bytes = step.unwrap_or_default().count();
        let profile = Profile { step_bytes, rounds: self.config.rounds, ..Profile::default() };
        let mut run = Run { config: &self.config, profile };
        for gpu in &self.gpus {
            run.host_links(gpu)?;
            self.disks.iter().try_for_each(|disk| run.disk_links(gpu, disk))?;
            let others = self.gpus.iter().filter(|other| other.space != gpu.space);
            for other in others {
                run.gpu_link(gpu, other)?;
            }
        }
        for pool in self.pools() {
            self.disks.iter().try_for_each(|disk| run.host_disk_links(pool, disk))?;
        }
        Ok(run.profile)
    }

    /// Returns the pools of the movers, one for each space.
    fn pools(&self) -> Vec<&HostPool> {
        let mut pools: Vec<&HostPool> = Vec::new();
        for pool in self.gpus.iter().map(|gpu| gpu.mover.pool()) {
            if !pools.iter().any(|known| known.space() == pool.space()) {
                pools.push(pool);
            }
        }
        pools
    }
}

/// Clocks that a transfer is timed by.
struct Clocks<'a> {
    devices: Vec<(&'a Arc<dyn Driver>, u64)>,
    wall: Option<Instant>,
}

impl<'a> Clocks<'a> {
    fn of<const N: usize>(devices: [&'a Gpu; N]) -> Clocks<'a> {
        let begun = |gpu: &'a Gpu| (gpu.mover.driver(), gpu.mover.driver().now_ns());
        Clocks { devices: devices.into_iter().map(begun).collect(), wall: None }
    }

    fn and_wall(mut self) -> Clocks<'a> {
        self.wall = Some(Instant::now());
        self
    }

    fn took_ns(&self) -> u64 {
        let devices = self.devices.iter().map(|(driver, begun)| driver.now_ns() - begun);
        let wall = self.wall.map(|begun| begun.elapsed().as_nanos().try_into().unwrap_or(u64::MAX));
        devices.chain(wall).max().unwrap_or_default()
    }
}

/// A measurement in progress.
struct Run<'a> {
    config: &'a ProfilerConfig,
    profile: Profile,
}

impl Run<'_> {
    /// Measures one link at every size. `once` moves some bytes and returns the nanoseconds.
    fn link(
        &mut self,
        (from, to): (SpaceId, SpaceId),
        mut once: impl FnMut(Bytes) -> Result<u64, MoveError>,
    ) -> Result<(), MoveError> {
        for &size in &self.config.sizes {
            match self.median(|| once(size)) {
                Ok(took_ns) => {
                    let (size_bytes, bytes_per_s) = (size.count(), rate(size, took_ns));
                    let link = MeasuredLink { from, to, size_bytes, took_ns, bytes_per_s };
                    self.profile.links.push(link);
                }
                Err(error) => self.unmeasured((from, to), size, error)?,
            }
        }
        Ok(())
    }

    fn median(&self, mut once: impl FnMut() -> Result<u64, MoveError>) -> Result<u64, MoveError> {
        for _ in 0..self.config.warm_up {
            once()?;
        }
        let rounds = 0..self.config.rounds.max(1);
        Ok(median(rounds.map(|_| once()).collect::<Result<Vec<_>, _>>()?))
    }

    fn unmeasured(
        &mut self,
        (from, to): (SpaceId, SpaceId),
        size: Bytes,
        error: MoveError,
    ) -> Result<(), MoveError> {
        if error.driver_error().is_some_and(|error| error.is_device_lost()) {
            return Err(error);
        }
        let (size_bytes, reason) = (size.count(), error.to_string());
        self.profile.unmeasured.push(UnmeasuredLink { from, to, size_bytes, reason });
        Ok(())
    }

    fn host_links(&mut self, gpu: &Gpu) -> Result<(), MoveError> {
        let (mover, host) = (&gpu.mover, gpu.mover.pool().space().id());
        let mut blocks = None;
        for (from, to) in [(gpu.space, host), (host, gpu.space)] {
            self.link((from, to), |size| {
                let (range, taken) = (gpu.part(size)?, take(&mut blocks, mover.pool(), size)?);
                let clocks = Clocks::of([gpu]);
                let moving = match to == host {
                    true => mover.to_host(range, taken),
                    false => mover.to_device(range, taken),
                };
                let mut transfer = moving.start()?;
                transfer.wait()?;
                let took_ns = clocks.took_ns();
                blocks = Some(transfer.into_host());
                Ok(took_ns)
            })?;
        }
        let mut others = None;
        for &size in &self.config.sizes {
            let measured = self.median(|| {
                let (down, up) = gpu.parts(size)?;
                let down_blocks = take(&mut blocks, mover.pool(), size)?;
                let up_blocks = take(&mut others, mover.pool(), size)?;
                let clocks = Clocks::of([gpu]);
                let mut down = mover.to_host(down, down_blocks).start()?;
                let mut up = mover.to_device(up, up_blocks).start()?;
                wait_all(&mut [&mut down, &mut up])?;
                let took_ns = clocks.took_ns();
                (blocks, others) = (Some(down.into_host()), Some(up.into_host()));
                Ok(took_ns)
            });
            match measured {
                Ok(took_ns) => self.profile.both_ways.push(MeasuredPair {
                    gpu: gpu.space,
                    host,
                    size_bytes: size.count(),
                    took_ns,
                    bytes_per_s: rate(size * 2, took_ns),
                }),
                Err(error) => self.unmeasured((gpu.space, host), size, error)?,
            }
        }
        Ok(())
    }

    fn gpu_link(&mut self, gpu: &Gpu, other: &Gpu) -> Result<(), MoveError> {
        self.link((gpu.space, other.space), |size| {
            let (from, to) = (gpu.part(size)?, other.part(size)?);
            let clocks = Clocks::of([gpu, other]);
            gpu.mover.between(from, &other.mover, to)?.wait()?;
            Ok(clocks.took_ns())
        })
    }

    fn disk_links(&mut self, gpu: &Gpu, store: &Arc<DiskStore>) -> Result<(), MoveError> {
        let (mover, disk) = (&gpu.mover, store.space().id());
        let to_disk = |size| mover.to_disk(gpu.part(size)?, store, DiskBudget::Space)?.finish();
        self.link((gpu.space, disk), |size| {
            let clocks = Clocks::of([gpu]).and_wall();
            let copy = to_disk(size)?;
            let took_ns = clocks.took_ns();
            drop(copy);
            Ok(took_ns)
        })?;
        let mut kept: Option<Arc<DiskCopy>> = None;
        self.link((disk, gpu.space), |size| {
            let copy = match kept.take() {
                Some(copy) if copy.len() == size => copy,
                _ => Arc::new(to_disk(size)?),
            };
            let clocks = Clocks::of([gpu]).and_wall();
            mover.from_disk(&copy, gpu.part(size)?)?.wait()?;
            kept = Some(copy);
            Ok(clocks.took_ns())
        })
    }

    fn host_disk_links(&mut self, pool: &HostPool, store: &DiskStore) -> Result<(), MoveError> {
        let (host, disk) = (pool.space().id(), store.space().id());
        let mut blocks = None;
        self.link((host, disk), |size| {
            let taken = take(&mut blocks, pool, size)?;
            let spans = taken.spans(Bytes::ZERO, size)?;
            let clocks = Clocks::of([]).and_wall();
            let stored = store.write(&spans, ChargeTo::Space).map_err(MoveError::disk)?;
            let took_ns = clocks.took_ns();
            drop(stored);
            blocks = Some(taken);
            Ok(took_ns)
        })?;
        let mut kept = None;
        self.link((disk, host), |size| {
            let taken = take(&mut blocks, pool, size)?;
            let spans = taken.spans(Bytes::ZERO, size)?;
            let stored = match kept.take() {
                Some((known, stored)) if known == size => stored,
                _ => store.write(&spans, ChargeTo::Space).map_err(MoveError::disk)?,
            };
            let clocks = Clocks::of([]).and_wall();
            store.read(&stored, &spans).map_err(MoveError::disk)?;
            let took_ns = clocks.took_ns();
            (kept, blocks) = (Some((size, stored)), Some(taken));
            Ok(took_ns)
        })
    }
}

impl Gpu {
    fn part(&self, len: Bytes) -> Result<AddrRange, MoveError> {
        match len <= self.memory.len {
            true => Ok(AddrRange::new(self.memory.start, len)),
            false => Err(MoveError::OtherLength { from: len, to: self.memory.len }),
        }
    }

    /// Returns two adjacent ranges.
    fn parts(&self, len: Bytes) -> Result<(AddrRange, AddrRange), MoveError> {
        self.part(len * 2)?;
        let (start, len) = (self.memory.start, len);
        Ok((AddrRange::new(start, len), AddrRange::new(start + len, len)))
    }
}

/// Takes the blocks of the last round if they suffice, or allocates new ones.
fn take(
    at_hand: &mut Option<HostAllocation>,
    pool: &HostPool,
    size: Bytes,
) -> Result<HostAllocation, MoveError> {
    match at_hand.take() {
        Some(blocks) if blocks.len() >= size => Ok(blocks),
        // Freed first, because the space may not hold both.
        other => {
            drop(other);
            Ok(pool.allocate(size)?)
        }
    }
}
