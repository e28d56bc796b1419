//! Reads a spilled buffer in host memory, at the address it has on the card, and checks the bytes.
//!
//! `cargo run -p vramp-defer --example read_in_place [DEVICE]`: by default DEVICE is `sim`, a small
//! simulated card; `auto` is the card.

use std::process::ExitCode;
use std::sync::Arc;

use vramp_alloc::{Allocator, Config, Driver};
use vramp_core::AddrRange;
use vramp_defer::{Access, SpillConfig, SpillManager, SpillParts};
use vramp_driver::sim::{Contents, Simulator};
use vramp_driver::{DeviceCopy, HostSlice};
use vramp_tiers::host::HostPoolConfig;
use vramp_tiers::movers::MoverConfig;
use vramp_tiers::{Bytes, HostPool, Mover, ReservationManager, SpaceConfig, SpaceId};

const PATTERN: u8 = 0x6B;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "sim".to_owned());
    let device = vramp_alloc::open(&name)?;
    let simulated = device.info().simulated;
    let driver: Arc<dyn Driver> = match simulated {
        true => {
            Arc::new(Simulator::builder().memory(Bytes::gib(1)).contents(Contents::Stored).build())
        }
        false => device,
    };
    let len = Bytes::mib(if simulated { 64 } else { 1024 });

    let host = SpaceId::host(0);
    let spaces = ReservationManager::new([(host, SpaceConfig::host(Bytes::gib(4)))])?;
    let space = spaces.space(host).expect("it was configured");
    let pool = HostPool::new(&space, HostPoolConfig::default(), [Arc::clone(&driver)])?;
    let mover = Mover::new(Arc::clone(&driver), &pool, MoverConfig::default())?;
    let allocator = Arc::new(Allocator::new(Arc::clone(&driver), Config::default())?);
    let parts = SpillParts {
        allocator: Arc::clone(&allocator),
        mover,
        disk: None,
        budget: None,
        peers: vec![],
    };
    let manager = SpillManager::new(parts, SpillConfig { promote_after: 5, ..Default::default() })?;
    let stream = allocator.create_stream()?;
    let queue = allocator.stream(stream).expect("it was made just now");

    let buffer = manager.buffer(len)?;
    buffer.readable_while_spilled()?;
    driver.fill(queue, buffer.lease(Access::Exclusive, stream)?.address(0), PATTERN)?;
    driver.synchronize_stream(queue)?;
    println!("{} left the card", manager.spill(len).freed);

    let into = allocator.malloc(len, stream)?;
    let window = driver.alloc_host(Bytes::mib(1))?;
    for round in 0..8 {
        driver.fill(queue, AddrRange::new(into.addr(), len), round)?;
        driver.synchronize_stream(queue)?;
        let begun = driver.now_ns();
        let lease = buffer.read_in_place(stream)?;
        driver.copy(queue, DeviceCopy { from: lease.address(0).start, to: into.addr(), len })?;
        drop(lease);
        driver.synchronize_stream(queue)?;
        let took = driver.now_ns() - begun;
        let mut bytes = vec![0; 1 << 20];
        for at in (0..len.count()).step_by(bytes.len() * 7) {
            let to = HostSlice { buffer: window, offset: Bytes::ZERO, len: Bytes::mib(1) };
            driver.copy_to_host(queue, into.addr() + Bytes::new(at), to)?;
            driver.synchronize_stream(queue)?;
            driver.read_host(window, Bytes::ZERO, &mut bytes)?;
            if bytes.iter().any(|byte| *byte != PATTERN) {
                return Err(format!("a wrong byte behind {at} in round {round}").into());
            }
        }
        let place = if buffer.is_resident() { "on the card" } else { "on the host" };
        println!("read {:.1} GB/s, {place}", len.count() as f64 / took.max(1) as f64);
    }
    println!(
        "{} reads in place, {} promotions",
        manager.stats().reads_in_place,
        manager.stats().promotions
    );
    driver.free_host(window)?;
    allocator.free(into, stream)?;
    manager.audit()?;
    Ok(())
}
