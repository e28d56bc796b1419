//! The tiers of an allocator while they are open, and the end of them.
//!
//! 1. `vramp_tiers_open` puts [`OpenTiers`] into the slot of the allocator.
//! 2. A call takes a reference, so what it uses lives until it returns, and holds no lock meanwhile.
//! 3. `vramp_tiers_close` and `vramp_close` end the leases of C programs and cancel requests for
//!    reservations and leases, so no other call waits for long. Then they take the tiers out of the slot, and the
//!    last reference ends buffers and reservations.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use vramp_alloc::Bytes;
use vramp_defer::{Deadline, SpillManager, Tiers};
use vramp_tiers::tracked::Policies;
use vramp_tiers::{CancelToken, ReservationManager, TrackedAllocator};

use crate::regions::HostLoan;
use crate::status::{Failure, Kind};
use crate::tiers::dispatch::Dispatch;
use crate::tiers::tables::Tables;

/// The tiers of one allocator, with the objects that C programs made in them.
pub(crate) struct OpenTiers {
    /// The regions' use of the host memory.
    _host: Option<HostLoan>,
    /// Dropped first: leases, buffers and reservations.
    tables: Mutex<Tables>,
    /// Reservations attached to streams.
    pub tracked: TrackedAllocator,
    tiers: Tiers,
    pub dispatch: Dispatch,
    /// Length of a piece, the unit of moves.
    pub piece: Bytes,
    /// Ends the waits in progress when the tiers are closed.
    waits: Mutex<CancelToken>,
    /// A lease that is granted from now on ends at once: no program could end it.
    is_ending: AtomicBool,
}

/// Place for the tiers of an allocator.
#[derive(Default)]
pub(crate) struct TiersSlot(pub RwLock<Slot>);

#[derive(Default)]
pub(crate) enum Slot {
    #[default]
    Closed,
    /// A thread opens them, without the lock: opening may call observers.
    Opening,
    Open(Arc<OpenTiers>),
}

impl OpenTiers {
    pub fn new(tiers: Tiers, piece: Bytes, host: Option<HostLoan>) -> OpenTiers {
        let allocator = Arc::clone(tiers.allocator());
        OpenTiers {
            _host: host,
            tables: Mutex::default(),
            dispatch: Dispatch::new(),
            tracked: TrackedAllocator::new(allocator, tiers.gpu_space(), Policies::default()),
            tiers,
            piece,
            waits: Mutex::default(),
            is_ending: AtomicBool::new(false),
        }
    }

    pub fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    pub fn manager(&self) -> &SpillManager {
        self.tiers.manager()
    }

    pub fn spaces(&self) -> &ReservationManager {
        self.tiers.reservations()
    }

    /// Returns the token that ends waits when the tiers are closed.
    pub fn waits(&self) -> CancelToken {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns true while the tiers are being closed.
    pub fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Ends the waits in progress, and those that begin until [`OpenTiers::allow_waits`]: requests in the
    /// queue of a space and requests for leases are cancelled, and leases end.
    pub fn end_waits(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.waits().cancel();
        self.manager().cancel_waits();
        let mut tables = self.tables();
        let leases = std::mem::take(&mut tables.leases);
        let locks = std::mem::take(&mut tables.locks);
        drop(tables);
        drop((leases, locks));
    }

    pub fn allow_waits(&self) {
        *self.waits.lock().unwrap_or_else(PoisonError::into_inner) = CancelToken::new();
        self.manager().allow_waits();
        self.is_ending.store(false, Ordering::Release);
    }
}

/// Returns the end of a wait for `timeout_ns` nanoseconds.
pub(crate) fn deadline(timeout_ns: u64) -> Deadline {
    match timeout_ns {
        u64::MAX => Deadline::NEVER,
        timeout_ns => Deadline::from(Duration::from_nanos(timeout_ns)),
    }
}

#[cold]
pub(crate) fn no_tiers() -> Failure {
    let text = "the allocator has no tiers: open them with vramp_tiers_open";
    Failure::new(Kind::NoTiers, text)
}
