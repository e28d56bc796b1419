//! Transfers between tiers: every byte, in order, and nothing left in flight.

mod disk;
mod transfers;

use crate::common::faulty;
use std::sync::Arc;

use crate::common::blocks::{BLOCKS, MIB, space};
use vramp_alloc::Driver;
use vramp_core::{AddrRange, DeviceAddr};
use vramp_driver::sim::{Contents, FaultPlan, Kernel, LiveObjects, LoggedCall, Simulator};
use vramp_driver::{Call, CaptureMode, MemoryProperties, Stream};
use vramp_tiers::host::{HostAllocation, HostPoolConfig, HostPoolError};
use vramp_tiers::movers::{
    CopyDependency, MoveError, MoverConfig, Transfer, TransferProgress, wait_all,
};
use vramp_tiers::{Bytes, CancelToken, HostPool, Mover, ReservationManager, SpaceConfig, SpaceId};

/// The shortest steps.
const SMALL: MoverConfig =
    MoverConfig { step: Bytes::mib(4), steps_in_flight: 4, staging_pieces: 4 };

struct Bench {
    device: Arc<Simulator>,
    pool: HostPool,
    mover: Mover,
}

fn simulator() -> Arc<Simulator> {
    let builder = Simulator::builder().memory(Bytes::gib(1)).contents(Contents::Stored);
    Arc::new(builder.checked().logged(100_000).build())
}

fn pool(devices: &[&Arc<Simulator>]) -> HostPool {
    let devices = devices.iter().map(|&device| driver(device));
    HostPool::new(&space(Bytes::gib(1)), BLOCKS, devices).unwrap()
}

fn driver(device: &Arc<Simulator>) -> Arc<dyn Driver> {
    device.clone()
}

fn bench_with(config: MoverConfig) -> Bench {
    let device = simulator();
    let pool = pool(&[&device]);
    let mover = Mover::new(driver(&device), &pool, config).unwrap();
    Bench { device, pool, mover }
}

fn bench() -> Bench {
    bench_with(SMALL)
}

/// Mapped memory of whole pages.
fn memory(device: &Simulator, len: Bytes) -> AddrRange {
    let len = len.checked_round_up(device.info().limits.page).unwrap();
    let range = AddrRange::new(device.reserve(len, device.info().limits.page).unwrap(), len);
    let handle = device.create(len, MemoryProperties::DEVICE).unwrap();
    device.map(range.start, handle).unwrap();
    device.set_access(range, &[]).unwrap();
    device.release(handle).unwrap();
    range
}

/// Pseudorandom bytes.
fn pattern(len: Bytes, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len.count() as usize];
    random.fill(&mut bytes);
    bytes
}

fn blocks(pool: &HostPool, offset: Bytes, bytes: &[u8]) -> HostAllocation {
    let mut blocks = pool.allocate(offset + Bytes::new(bytes.len() as u64)).unwrap();
    blocks.write(offset, bytes).unwrap();
    blocks
}

fn read(blocks: &HostAllocation, offset: Bytes, len: Bytes) -> Vec<u8> {
    let mut bytes = vec![0; len.count() as usize];
    blocks.read(offset, &mut bytes).unwrap();
    bytes
}

/// Writes pseudorandom bytes to device memory and returns them.
fn put(bench: &Bench, range: AddrRange, seed: u64) -> Vec<u8> {
    let bytes = pattern(range.len, seed);
    let host = blocks(&bench.pool, Bytes::ZERO, &bytes);
    bench.mover.to_device(range, host).start().unwrap().wait().unwrap();
    bytes
}

fn part(range: AddrRange, offset: u64, len: u64) -> AddrRange {
    AddrRange::new(range.start + Bytes::new(offset), Bytes::new(len))
}

fn no_hazards(device: &Simulator) {
    assert_eq!(device.hazards(), [], "accesses without order");
    assert_eq!(device.device_loss(), None);
}

/// Counts calls that wait for more than one stream.
fn waits_for_the_device(log: &[LoggedCall]) -> usize {
    let waits = [Call::FreeMemory, Call::AllocMemory];
    log.iter().filter(|logged| waits.contains(&logged.call)).count()
}
