//! More data than the card may hold: buffers that are evicted to pinned host memory while no lease
//! holds them.
//!
//! `cargo run -p vramp --example spill_manager [DEVICE]`: DEVICE is `sim` by default, a simulated
//! H200; `auto` is the card.

use std::sync::Arc;
use std::time::Duration;

use vramp::defer::{
    Access, Deadline, LeaseRefused, SpillConfig, SpillError, SpillManager, SpillParts,
};
use vramp::tiers::host::HostPoolConfig;
use vramp::tiers::movers::MoverConfig;
use vramp::tiers::{HostPool, Mover, ReservationManager, SpaceConfig, SpaceId};
use vramp::{Allocator, Bytes, Config};

fn main() -> Result<(), vramp::Error> {
    // A card of which 256 MiB may be used, and 1 GiB of pinned host memory.
    let name = std::env::args().nth(1).unwrap_or_else(|| "sim".to_owned());
    let device = vramp::open(&name)?;
    let config = Config { limit: Some(Bytes::mib(256)), ..Config::default() };
    let allocator = Arc::new(Allocator::new(Arc::clone(&device), config)?);
    let host = SpaceId::host(0);
    let spaces = ReservationManager::new([(host, SpaceConfig::host(Bytes::gib(1)))])?;
    let space = spaces.space(host).expect("the space was configured above");
    let pool = HostPool::new(&space, HostPoolConfig::default(), [Arc::clone(&device)])?;
    let mover = Mover::new(device, &pool, MoverConfig::default())?;
    let parts = SpillParts {
        allocator: Arc::clone(&allocator),
        mover,
        disk: None,
        budget: None,
        peers: vec![],
    };
    let manager = SpillManager::new(parts, SpillConfig::default())?;

    // Four times 128 MiB. A lease restores what a kernel needs and evicts what no lease holds.
    let stream = allocator.create_stream()?;
    let buffers: Vec<_> =
        (0..4).map(|_| manager.buffer(Bytes::mib(128))).collect::<Result<_, _>>()?;
    for buffer in &buffers {
        let lease = manager.lease(&[(buffer, Access::Exclusive)], stream)?;
        println!("launch a kernel that writes {}", lease.address(0));
    }
    let pair = [(&buffers[0], Access::Shared), (&buffers[1], Access::Exclusive)];
    let lease = manager.lease(&pair, stream)?;
    println!("{} evicted, {} restored", evicted(&manager), restored(&manager));

    // Both leased buffers fill the card: a third one waits until its deadline.
    let third = [(&buffers[2], Access::Shared)];
    match manager.lease_on(&third, &[stream], Deadline::from(Duration::from_millis(10))) {
        Err(SpillError::Refused(LeaseRefused::Full { .. }) | SpillError::NoMemory { .. }) => {
            println!("no memory for a third buffer while two are leased");
        }
        Err(other) => return Err(other.into()),
        Ok(_) => unreachable!("three buffers of 128 MiB fitted into 256 MiB"),
    }
    drop(lease);
    drop(manager.lease(&third, stream)?);
    println!("{} evicted, {} restored", evicted(&manager), restored(&manager));
    Ok(())
}

fn evicted(manager: &SpillManager) -> Bytes {
    Bytes::new(manager.stats().to_host_bytes)
}

fn restored(manager: &SpillManager) -> Bytes {
    Bytes::new(manager.stats().from_host_bytes)
}
