//! The tiers of an allocator while they are open, and the end of them.
//!
//! 1. `vramp_tiers_open` puts [`OpenTiers`] into the slot of the allocator.
//! 2. A call takes a reference, so what it uses lives until it returns, and holds no lock meanwhile.
//! 3. `vramp_tiers_close` and `vramp_close` end the leases of C programs and cancel requests for
//!    reservations and leases, so no other call waits for long. Then they take the tiers out of the slot, and the
//!    last reference ends buffers and reservations.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};
use std::time::Duration;

use vramp_alloc::Bytes;
use vramp_defer::{Deadline, SpillManager, Tiers, TiersOptions};
use vramp_tiers::config::TiersConfig;
use vramp_tiers::tracked::Policies;
use vramp_tiers::{CancelToken, ReservationManager, TrackedAllocator};

use crate::regions::HostLoan;
use crate::session::Session;
use crate::status::{Failure, Kind, Result};
use crate::tiers::dispatch::{Dispatch, check_not_dispatcher};
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
pub(crate) struct TiersSlot(RwLock<Slot>);

#[derive(Default)]
enum Slot {
    #[default]
    Closed,
    /// A thread opens them, without the lock: opening may call observers.
    Opening,
    Open(Arc<OpenTiers>),
}

impl OpenTiers {
    fn new(tiers: Tiers, piece: Bytes, host: Option<HostLoan>) -> OpenTiers {
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

    /// Opens the tiers of an allocator.
    pub fn open(
        session: &Session,
        config: &TiersConfig,
        options: &TiersOptions,
    ) -> Result<OpenTiers> {
        let options = TiersOptions { others: session.others(config), ..options.clone() };
        let tiers = options.on(Arc::clone(session.shared_allocator()), config)?;
        let host = session.lend_host_memory(&tiers);
        Ok(OpenTiers::new(tiers, options.spill.piece, host))
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
    fn end_waits(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.waits().cancel();
        self.manager().cancel_waits();
        let mut tables = self.tables();
        let leases = std::mem::take(&mut tables.leases);
        let locks = std::mem::take(&mut tables.locks);
        drop(tables);
        drop((leases, locks));
    }

    fn allow_waits(&self) {
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
fn no_tiers() -> Failure {
    let text = "the allocator has no tiers: open them with vramp_tiers_open";
    Failure::new(Kind::NoTiers, text)
}

impl Session {
    /// Returns the tiers.
    pub(crate) fn open_tiers(&self) -> Result<Arc<OpenTiers>> {
        self.tiers_if_open().ok_or_else(no_tiers)
    }

    /// Returns the tiers; `None` if there are none.
    pub(crate) fn tiers_if_open(&self) -> Option<Arc<OpenTiers>> {
        match &*self.tiers.0.read().unwrap_or_else(PoisonError::into_inner) {
            Slot::Open(tiers) => Some(Arc::clone(tiers)),
            Slot::Opening | Slot::Closed => None,
        }
    }

    fn slot(&self) -> RwLockWriteGuard<'_, Slot> {
        self.tiers.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the tiers.
    pub(crate) fn set_tiers(&self, open: impl FnOnce() -> Result<OpenTiers>) -> Result<()> {
        let mut slot = self.slot();
        if !matches!(*slot, Slot::Closed) {
            let text = "the tiers of the allocator are open already: use them, or close them first";
            return Err(Failure::new(Kind::Busy, text));
        }
        *slot = Slot::Opening;
        drop(slot);
        // Also after a panic.
        let mut opened = Opening { session: self, then: Slot::Closed };
        opened.then = Slot::Open(Arc::new(open()?));
        Ok(())
    }

    /// Returns an error if the tiers cannot be closed now.
    pub(crate) fn check_tiers_closable(&self) -> Result<()> {
        check_not_dispatcher()?;
        if self.tiers_if_open().is_none() {
            return Ok(());
        }
        if self.allocator().any_captures()? {
            let text = "a stream captures a graph, which may use buffers: end the capture first";
            return Err(Failure::new(Kind::Capture, text));
        }
        Ok(())
    }

    /// Ends the waits of other calls, so that a close need not wait until their deadlines.
    pub(crate) fn end_waits(&self) {
        if let Some(tiers) = self.tiers_if_open() {
            tiers.end_waits();
        }
    }

    /// Ends the tiers, if there are any: no call is in progress on the allocator.
    pub(crate) fn end_tiers(&self) -> Result<()> {
        let ended = self.check_tiers_closable().and_then(|()| self.take_tiers());
        if let (Err(_), Some(tiers)) = (&ended, self.tiers_if_open()) {
            tiers.allow_waits();
        }
        ended
    }

    /// Closes the tiers, while other calls may be in progress. Their objects end with the last call.
    pub(crate) fn close_tiers(&self) -> Result<()> {
        let tiers = self.open_tiers()?;
        self.check_tiers_closable()?;
        tiers.end_waits();
        let taken = self.take_tiers();
        if taken.is_err() {
            tiers.allow_waits();
        }
        taken
    }

    /// Takes the tiers out of the slot. The last reference ends them.
    fn take_tiers(&self) -> Result<()> {
        let mut slot = self.slot();
        match std::mem::take(&mut *slot) {
            Slot::Opening => {
                *slot = Slot::Opening;
                Err(no_tiers())
            }
            taken => {
                drop(slot);
                if let Slot::Open(tiers) = &taken {
                    // Observers see no event of the end.
                    tiers.dispatch.stop();
                }
                drop(taken);
                Ok(())
            }
        }
    }
}

/// Ends the opening of tiers.
struct Opening<'a> {
    session: &'a Session,
    then: Slot,
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        *self.session.slot() = std::mem::take(&mut self.then);
    }
}
