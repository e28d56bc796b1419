//! The configuration of tiers from a struct of the caller.

use std::path::PathBuf;

use vramp_alloc::Bytes;
use vramp_alloc::device::DeviceInfo;
use vramp_tiers::config::{
    DiskSpaceConfig, GpuSpaceConfig, HostSpaceConfig, PeerConfig, SpaceLevels, TiersConfig,
};
use vramp_tiers::space::Level;

use crate::pointers;
use crate::status::{Failure, Kind, Result};
use crate::tiers::abi::{vramp_store_t, vramp_tiers_options_t};

/// Reads the store of a caller. `None` if there is none.
///
/// # Safety
/// The store is null, or its first eight bytes hold a size that is valid for reading.
pub(crate) unsafe fn store_of(options: &vramp_tiers_options_t) -> Result<Option<vramp_store_t>> {
    if options.store.is_null() {
        return Ok(None);
    }
    if !options.disk_directory.is_null() || options.disk_bytes > 0 {
        let text = "disk_directory and store exclude each other: set one of them, and for a store its \
                    own capacity";
        return Err(Failure::new(Kind::Option, text));
    }
    // SAFETY: the struct begins with its size, and any bytes are valid, as null is no function; the rest
    // is this function's contract.
    unsafe { pointers::read_sized(options.store, "store") }.map(Some)
}

/// Makes a configuration from the struct of a caller, for a device.
///
/// # Safety
/// The directory is null or zero-terminated.
pub(crate) unsafe fn from_options(
    options: &vramp_tiers_options_t,
    info: &DeviceInfo,
) -> Result<TiersConfig> {
    // SAFETY: this function's contract is the same.
    let directory = unsafe { pointers::text(options.disk_directory, "disk_directory") }?;
    let (has_directory, disk) = (!directory.is_empty(), Bytes::new(options.disk_bytes));
    if has_directory == disk.is_zero() {
        let text = "disk_directory and disk_bytes belong together: set both, or neither";
        return Err(Failure::new(Kind::Option, text));
    }
    let levels = SpaceLevels::default();
    let device = Bytes::new(options.device_bytes);
    // The caller's amount is a limit already.
    let all = SpaceLevels { limit: Some(Level::Fraction(1.0)), ..levels };
    let gpu = (!device.is_zero()).then(|| GpuSpaceConfig::new(info.ordinal, device, all));
    let mut host = HostSpaceConfig::new(0, None, Bytes::new(options.host_bytes), levels);
    host = host.pinned_in_parts();
    let disks =
        has_directory.then(|| DiskSpaceConfig::new(0, PathBuf::from(directory), disk, levels));
    let limit = Bytes::new(options.peer_bytes);
    let peers = info.peers.iter().filter(|_| !limit.is_zero());
    let config = TiersConfig {
        gpus: gpu.into_iter().collect(),
        hosts: vec![host],
        disks: disks.into_iter().collect(),
        peers: peers.map(|&peer| PeerConfig::new(peer, limit)).collect(),
        ..TiersConfig::default()
    };
    config.check()?;
    Ok(config)
}
