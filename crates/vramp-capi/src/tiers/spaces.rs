//! Spaces: the budgets of the tiers.

use vramp_tiers::{MemorySpace, SpaceId, Strategy, Tier};

use crate::abi::vramp_allocator_t;
use crate::abi::vramp_status_t;
use crate::pointers::WithSize;
use crate::session::Session;
use crate::status::{Failure, Kind, Result};
use crate::tiers::abi::*;
use crate::tiers::out_of_range;
use crate::tiers::slot::OpenTiers;
use crate::{handles, pointers};

fn tier(number: u32) -> Result<Tier> {
    match number {
        VRAMP_TIER_DEVICE => Ok(Tier::Gpu),
        VRAMP_TIER_HOST => Ok(Tier::Host),
        VRAMP_TIER_DISK => Ok(Tier::Disk),
        other => Err(out_of_range(
            "tier",
            other,
            "VRAMP_TIER_DEVICE, VRAMP_TIER_HOST or VRAMP_TIER_DISK",
        )),
    }
}

/// Returns the space as C names it.
pub(crate) fn to_c(space: SpaceId) -> vramp_space_t {
    let tier = match space.tier {
        Tier::Gpu => VRAMP_TIER_DEVICE,
        Tier::Host => VRAMP_TIER_HOST,
        Tier::Disk => VRAMP_TIER_DISK,
    };
    vramp_space_t { tier, index: space.index }
}

#[cold]
fn unknown_space(space: SpaceId) -> Failure {
    let text = format!("{space} is not in the configuration: vramp_spaces returns those that are");
    Failure::new(Kind::UnknownSpace, text)
}

impl OpenTiers {
    /// Returns a space.
    pub fn space(&self, space: vramp_space_t) -> Result<MemorySpace> {
        let id = SpaceId { tier: tier(space.tier)?, index: space.index };
        self.spaces().space(id).ok_or_else(|| unknown_space(id))
    }

    /// Returns how a space is chosen for a request.
    pub fn strategy(&self, space: vramp_space_t) -> Result<Strategy> {
        match space.index {
            VRAMP_ANY_INDEX => Ok(Strategy::AnyInTier(tier(space.tier)?)),
            _ => Ok(Strategy::Specific(self.space(space)?.id())),
        }
    }

    fn stats_of(&self, space: vramp_space_t) -> Result<vramp_space_stats_t> {
        let space = self.space(space)?;
        let census = space.census();
        let (levels, counters) = (census.levels, census.counters);
        Ok(vramp_space_stats_t {
            struct_size: size_of::<vramp_space_stats_t>() as u64,
            capacity: levels.capacity.count(),
            limit: levels.limit.count(),
            trigger: levels.trigger.count(),
            stop: levels.stop.count(),
            granule: levels.granule.count(),
            total: census.total.count(),
            peak: census.peak.count(),
            available: levels.limit.saturating_sub(census.total).count(),
            available_capacity: levels.capacity.saturating_sub(census.total).count(),
            reserved: census.reserved.count(),
            overrun: census.overrun.count(),
            orphaned: census.orphaned.count(),
            unreserved: census.unreserved.count(),
            reservations: census.reservations as u64,
            waiting: self.spaces().waiting() as u64,
            reserves: counters.reserves,
            refusals: counters.refusals,
            releases: counters.releases,
        })
    }
}

/// Returns the spaces of the tiers, the fastest tier first. `*count` receives their number; as many of
/// them are written to `spaces` as `capacity` says. `spaces` may be null if `capacity` is zero.
///
/// # Safety
/// `spaces` is null or valid for writing `capacity` structs. `count` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_spaces(
    allocator: vramp_allocator_t,
    spaces: *mut vramp_space_t,
    capacity: usize,
    count: *mut usize,
) -> vramp_status_t {
    let find = |session: &Session| {
        let tiers = session.open_tiers()?;
        let found: Vec<_> = tiers.spaces().spaces().map(|space| to_c(space.id())).collect();
        // SAFETY: required by this function's contract.
        unsafe { pointers::write_array(spaces, capacity, &found, "spaces") }?;
        Ok(found.len())
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (count, "count"), find) }
}

/// Returns the statistics of a space. Set `stats->struct_size` to `sizeof(vramp_space_stats_t)` before.
///
/// # Safety
/// `stats` is null, or its first eight bytes hold a size that is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_space_stats(
    allocator: vramp_allocator_t,
    space: vramp_space_t,
    stats: *mut vramp_space_stats_t,
) -> vramp_status_t {
    let find = |session: &Session| session.open_tiers()?.stats_of(space);
    // SAFETY: the struct begins with its size; the rest is this function's contract.
    unsafe { handles::out(allocator, WithSize(stats, "stats"), find) }
}

/// Resets the peak of a space to its present total.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_space_reset_peak(
    allocator: vramp_allocator_t,
    space: vramp_space_t,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        session.open_tiers()?.space(space)?.reset_peaks();
        Ok(())
    })
}
