//! Rates between spaces: each card to and from its host, its disks and other cards.

use std::sync::Arc;

use anyhow::{Context, Result};
use vramp::tiers::config::TiersConfig;
use vramp::tiers::disk::DiskConfig;
use vramp::tiers::host::HostPoolConfig;
use vramp::tiers::movers::{MoverConfig, Profile, Profiler, ProfilerConfig};
use vramp::tiers::{Bytes, DiskStore, HostPool, Mover, ReservationManager, SpaceId};
use vramp_core::AddrRange;

use super::cards::Cards;
use crate::device::Device;

/// Largest copy on a card, and on a simulated one, whose host memory is real.
const LARGEST: [Bytes; 2] = [Bytes::mib(256), Bytes::mib(64)];

/// Measures between the spaces of a configuration. Cards that are not visible are left out.
///
/// Needs pinned memory and memory of each card for two of the largest copies, and disk space for
/// one.
pub(super) fn measure(cards: &Cards, config: &TiersConfig, device: &str) -> Result<Profile> {
    let largest = LARGEST[usize::from(cards.simulated)];
    let spaces = ReservationManager::new(config.spaces())?;
    let mut profiler = Profiler::new(sizes_to(largest));
    let here = |index| cards.cards.iter().find(move |card| card.index == index);
    let gpus: Vec<_> = config.gpus.iter().filter_map(|gpu| Some((gpu, here(gpu.index)?))).collect();
    let drivers = gpus.iter().map(|(gpu, _)| {
        let name = if cards.simulated { simulated(device) } else { format!("cuda:{}", gpu.index) };
        Ok(Device::open(&name)?.fresh(false)?.driver)
    });
    let drivers: Vec<Arc<dyn vramp::Driver>> = drivers.collect::<Result<_>>()?;
    let Some(first) = config.hosts.first() else { return Ok(Profile::default()) };
    let mut memory = Vec::new();
    let mut pools: Vec<(SpaceId, HostPool)> = Vec::new();
    for ((gpu, card), driver) in gpus.iter().zip(&drivers) {
        let near = config
            .hosts
            .iter()
            .find(|host| host.node.is_some() && host.node == card.node.map(|node| node.0));
        let host = near.unwrap_or(first);
        let known = pools.iter().find(|(id, _)| *id == host.id());
        let pool = match known {
            Some((_, pool)) => pool.clone(),
            None => {
                let space = spaces.space(host.id()).context("it was configured")?;
                let config = HostPoolConfig { initial_pools: 0, spare_blocks: 0, ..host.pool() };
                let pool = HostPool::new(&space, config, drivers.iter().map(Arc::clone))?;
                pools.push((host.id(), pool.clone()));
                pool
            }
        };
        // Memory for both directions at once.
        let len = (largest * 2).min(gpu.capacity);
        let at = driver.alloc_memory(len)?;
        memory.push((Arc::clone(driver), at));
        let mover = Mover::new(Arc::clone(driver), &pool, MoverConfig::default())?;
        profiler = profiler.gpu(gpu.id(), &mover, AddrRange::new(at, len));
    }
    for disk in &config.disks {
        let space = spaces.space(disk.id()).context("it was configured")?;
        let file_size =
            DiskConfig::default().file_size.min(disk.capacity.round_down(Bytes::mib(1)));
        let how = DiskConfig { file_size, ..DiskConfig::default() };
        let store = DiskStore::open(&disk.directory, how, &space);
        let store = store.with_context(|| format!("'{}'", disk.directory.display()))?;
        profiler = profiler.disk(&Arc::new(store));
    }
    let profile = profiler.measure();
    for (driver, at) in memory {
        driver.free_memory(at)?;
    }
    Ok(profile?)
}

/// Returns the name of the simulated card that `auto` stands for.
fn simulated(device: &str) -> String {
    if device.starts_with("sim") { device.to_owned() } else { "sim".to_owned() }
}

fn sizes_to(largest: Bytes) -> ProfilerConfig {
    let mut config = ProfilerConfig::default();
    config.sizes.retain(|size| *size <= largest);
    config
}
