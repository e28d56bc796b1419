//! Memory that keeps its place while a graph of a pool exists.
//!
//! A communication library registers the memory that the collectives of a captured graph use, and accesses it
//! physically until the graph is destroyed. Memory of the graph's pool is a live segment, which never moves. But
//! a tensor from before the capture may be freed before the graph is destroyed, and its memory could be mapped
//! elsewhere. So what is live when a capture begins is pinned until PyTorch has released the pool.
//!
//! Regions that say so ([`RegionOptions::graph_pins`](vramp_tiers::regions::RegionOptions)) are left out: the
//! weights of an engine sleep while its graphs wait for them.
//!
//! Growth: a begin is O(n log n) in the live blocks, with a pin for each stretch of blocks without a gap. Further
//! captures into the pool add stretches that are not pinned for it yet. Each stretch is looked up in the regions
//! that are left out.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

use vramp_alloc::sharing::{PinError, PinnedRange};
use vramp_tiers::regions::Region;

use super::pools::PoolId;
use super::{TORCH, Torch};
use crate::abi::vramp_status_t;
use crate::pointers::write_out;
use crate::status::{Failure, Kind, Result, check_fork, status_of};

/// Pinned ranges of each pool, by first address and length.
type Ranges = BTreeMap<(u64, u64), PinnedRange>;

/// What graphs pin, of all devices.
pub(super) struct Pins(Mutex<BTreeMap<(c_int, PoolId), Ranges>>);

impl Pins {
    pub(super) const fn new() -> Pins {
        Pins(Mutex::new(BTreeMap::new()))
    }
}

impl Torch {
    /// Pins what is live on a device for the graphs of a pool. Presets that move nothing have no pins.
    pub(super) fn pin_live(&self, device: c_int, pool: PoolId) -> Result<()> {
        let Some(session) = self.opened_on(device)? else { return Ok(()) };
        let without_pins = session.regions_without_pins();
        let stretches = session.live_stretches();
        let mut pins = self.pins.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ranges = pins.entry((device, pool)).or_default();
        for stretch in stretches {
            let key = (stretch.start.number(), stretch.len.count());
            let has = |region: &Arc<Region>| region.allocator().has_addresses(stretch);
            if ranges.contains_key(&key) || without_pins.iter().any(has) {
                continue;
            }
            match session.in_any_pool(|pool| pool.pin_range(stretch)) {
                Ok(pinned) => drop(ranges.insert(key, pinned)),
                // Freed meanwhile, or a block of the driver's pool, which stays where it is while it is live.
                Err(PinError::NotOwned { .. }) => {}
                Err(PinError::NotSupported { .. }) => break,
                Err(PinError::Unusable(why)) => return Err(why.into()),
                Err(other) => {
                    return Err(Failure::new(Kind::Inconsistent, other.to_string()));
                }
            }
        }
        Ok(())
    }

    /// Ends the pins of a pool. Nothing if it has none.
    pub(super) fn unpin(&self, device: c_int, pool: PoolId) -> Result<()> {
        check_fork()?;
        let removed =
            self.pins.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&(device, pool));
        // Takes the lock of the allocator.
        drop(removed);
        Ok(())
    }
}

/// Returns the option `graph_pins`: 0 for `off`, 1 for `on`, 2 for `auto`.
///
/// # Safety
/// `mode` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_graph_pins(mode: *mut c_int) -> vramp_status_t {
    let find = || Ok(TORCH.read_settings()?.graph_pins as c_int);
    // SAFETY: required by this function's contract.
    unsafe { write_out((mode, "mode"), find) }
}

/// Keeps the memory of all live blocks of a device at its addresses, also after they are freed, until
/// vramp_torch_unpin is called for the pool. No driver call.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_pin_live(
    device: c_int,
    pool_first: u64,
    pool_second: u64,
) -> vramp_status_t {
    status_of(|| TORCH.pin_live(device, (pool_first, pool_second)))
}

/// Ends what vramp_torch_pin_live began for a pool.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_unpin(
    device: c_int,
    pool_first: u64,
    pool_second: u64,
) -> vramp_status_t {
    status_of(|| TORCH.unpin(device, (pool_first, pool_second)))
}

#[cfg(test)]
mod tests {
    use vramp_alloc::Bytes;

    use super::*;
    use crate::torch::Settings;

    fn torch(conf: &str) -> Torch {
        let torch = Torch::new();
        torch.settings.set(Settings::of("sim", conf)).unwrap();
        torch
    }

    fn malloc(torch: &Torch, size: u64) -> u64 {
        // SAFETY: on the simulator any value is a stream.
        unsafe { torch.malloc_block(size, 0, std::ptr::null_mut()) }.unwrap().address
    }

    #[test]
    fn what_is_live_at_a_capture_keeps_its_memory_until_the_pool_is_released() {
        let torch = torch("");
        let blocks: Vec<u64> = (1..40).map(|number| malloc(&torch, number << 18)).collect();
        torch.pin_live(0, (0, 1)).unwrap();
        let allocator = torch.session(0).unwrap().allocator();
        let (pinned, bytes) = allocator.pinned();
        assert!(pinned > 0);
        torch.pin_live(0, (0, 1)).unwrap();
        assert_eq!(allocator.pinned(), (pinned, bytes), "the same stretches are pinned once");
        for addr in blocks {
            torch.free_block(addr).unwrap();
        }
        allocator.trim(Bytes::ZERO).unwrap();
        assert!(allocator.stats().unwrap().reserved >= bytes);
        torch.unpin(0, (0, 1)).unwrap();
        torch.unpin(0, (0, 1)).unwrap();
        assert_eq!(allocator.pinned(), (0, Bytes::ZERO));
        allocator.trim(Bytes::ZERO).unwrap();
        assert_eq!(allocator.stats().unwrap().reserved, Bytes::ZERO);
    }

    #[test]
    fn blocks_without_a_gap_are_one_stretch() {
        let torch = torch("");
        for _ in 0..1000 {
            malloc(&torch, 2 << 20);
        }
        let stretches = torch.session(0).unwrap().live_stretches();
        assert!(stretches.len() < 100, "{}", stretches.len());
        let sum: Bytes = stretches.iter().map(|stretch| stretch.len).sum();
        assert_eq!(sum, Bytes::mib(2000));
    }

    #[test]
    fn a_preset_that_moves_nothing_needs_no_pins() {
        let torch = torch("preset=torch");
        malloc(&torch, 1 << 20);
        torch.pin_live(0, (0, 1)).unwrap();
        torch.unpin(0, (0, 1)).unwrap();
    }
}
