//! Access of other cards to an allocator's memory.
//!
//! Nothing is paid until a card is granted access: then every mapping of the group's pools is granted in
//! one driver call for each stretch of mapped addresses, and each later set-access grants both cards in
//! the same call. The driver takes about 45 us for each handle that is granted later, and each later
//! set-access and unmap takes twice as long.
//!
//! Growth: a grant makes a driver call for each stretch of mapped addresses, however many handles lie
//! there. Stretches end at holes, so there are at most as many as blocks.

use std::sync::Arc;

use vramp_core::{AddrRange, Bytes};
use vramp_driver::{Driver, DriverError};

use crate::Allocator;
use crate::error::Unusable;
use crate::manager::Manager;
use crate::shared::Shared;

/// What a change of access cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessChange {
    /// Driver calls.
    pub calls: u64,
    /// Bytes that were mapped and changed.
    pub bytes: Bytes,
}

/// Error of [`Allocator::grant_access`] and [`Allocator::revoke_access`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The device has no link to this one.
    #[error("device {ordinal} is no peer of {device}: its peers are {peers:?}")]
    NoPeer {
        /// Ordinal that was given.
        ordinal: u32,
        /// Name of the allocator's device.
        device: String,
        /// Its peers.
        peers: Vec<u32>,
    },
    /// The configuration excludes this card.
    #[error("the setting `peers` excludes device {ordinal}: list it, or use `on-demand`")]
    Excluded {
        /// Ordinal that was given.
        ordinal: u32,
    },
    /// The memory manager has no mappings whose access could be changed.
    #[error(
        "the preset '{preset}' maps no memory by itself: use 'vramp', 'vpmm' or 'torch-expandable'"
    )]
    NotSupported {
        /// Name of the preset.
        preset: &'static str,
    },
    /// A driver call failed. Access is as before the call.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}

/// Whether access is granted or taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Grant,
    Revoke,
}

impl Change {
    fn inverse(self) -> Change {
        match self {
            Change::Grant => Change::Revoke,
            Change::Revoke => Change::Grant,
        }
    }
}

/// # Access of other cards
impl Allocator {
    /// Grants the card with this ordinal access to all memory of this allocator and of the pools created
    /// from it, now and later. Idempotent. One driver call for each stretch of mapped addresses, about
    /// 45 us for each handle, while other requests of the pool wait; memory mapped later is granted in the call
    /// that is made anyway.
    ///
    /// # Errors
    /// It is no peer, the configuration excludes it, or a driver call failed. Access is as before.
    pub fn grant_access(&self, ordinal: u32) -> Result<AccessChange, AccessError> {
        self.change_access(ordinal, Change::Grant)
    }

    /// Takes back the access of the card with this ordinal. Idempotent. Costs as
    /// [`Allocator::grant_access`]; later unmaps cost as before the grant.
    ///
    /// All work of that card on the memory must be complete, and seen to be.
    ///
    /// # Errors
    /// A driver call failed. Access is as before.
    pub fn revoke_access(&self, ordinal: u32) -> Result<AccessChange, AccessError> {
        self.change_access(ordinal, Change::Revoke)
    }

    fn change_access(&self, ordinal: u32, change: Change) -> Result<AccessChange, AccessError> {
        Unusable::check_fork()?;
        let info = self.driver().info();
        if !info.peers.contains(&ordinal) {
            let (device, peers) = (info.id.clone(), info.peers.clone());
            return Err(AccessError::NoPeer { ordinal, device, peers });
        }
        if change == Change::Grant && !self.sharing_config().peers.allows(ordinal) {
            return Err(AccessError::Excluded { ordinal });
        }
        let shared = self.shared();
        // No pool is added meanwhile that would not know of the change.
        let mut known = shared.group.peers();
        let mut done: Vec<Arc<Shared>> = Vec::new();
        let mut cost = AccessChange::default();
        for member in shared.group.members() {
            let Some(mut inner) = member.lock_open()? else { continue };
            match inner.manager.change_access(&*member.driver, ordinal, change) {
                Ok(change) => {
                    cost.calls += change.calls;
                    cost.bytes += change.bytes;
                }
                Err(error) => {
                    drop(inner);
                    for member in done {
                        undo(&member, ordinal, change.inverse());
                    }
                    return Err(error);
                }
            }
            drop(inner);
            done.push(member);
        }
        known.retain(|&peer| peer != ordinal);
        if change == Change::Grant {
            known.push(ordinal);
            known.sort_unstable();
        }
        Ok(cost)
    }
}

/// Reverses a change in one pool. A failure leaves a card with access that nothing needs, or takes it
/// only from memory that is mapped later.
fn undo(member: &Shared, ordinal: u32, inverse: Change) {
    if let Ok(Some(mut inner)) = member.lock_open() {
        let _ = inner.manager.change_access(&*member.driver, ordinal, inverse);
    }
}

impl Manager {
    fn change_access(
        &mut self,
        driver: &dyn Driver,
        ordinal: u32,
        change: Change,
    ) -> Result<AccessChange, AccessError> {
        match self {
            Manager::Virtual { pool, .. } => {
                let ranges = pool.exec.mapped(pool.pool.accessible_ranges());
                let ranges = ranges.into_iter().map(|range| pool.exec.range(range)).collect();
                change_ranges(driver, ranges, &mut pool.exec.access.peers, ordinal, change)
            }
            Manager::Backend(backend) => {
                let preset = backend.name();
                let ranges = backend.mapped_ranges().zip(backend.access_mut());
                let (ranges, access) = ranges.ok_or(AccessError::NotSupported { preset })?;
                change_ranges(driver, ranges, &mut access.peers, ordinal, change)
            }
        }
    }
}

/// Changes the access of one card to all ranges, or to none.
fn change_ranges(
    driver: &dyn Driver,
    ranges: Vec<AddrRange>,
    peers: &mut Vec<u32>,
    ordinal: u32,
    change: Change,
) -> Result<AccessChange, AccessError> {
    if peers.contains(&ordinal) == (change == Change::Grant) {
        return Ok(AccessChange::default());
    }
    let call = |range: AddrRange, change: Change| match change {
        Change::Grant => driver.set_access(range, &[ordinal]),
        Change::Revoke => driver.revoke_access(range, &[ordinal]),
    };
    let mut cost = AccessChange::default();
    for (index, &range) in ranges.iter().enumerate() {
        if let Err(error) = call(range, change) {
            for &range in ranges[..index].iter().rev() {
                // Where this fails, the card has access that nothing needs, or lacks access that it had.
                let _ = call(range, change.inverse());
            }
            return Err(error.into());
        }
        cost.calls += 1;
        cost.bytes += range.len;
    }
    match change {
        Change::Grant => {
            peers.push(ordinal);
            peers.sort_unstable();
        }
        Change::Revoke => peers.retain(|&peer| peer != ordinal),
    }
    Ok(cost)
}
