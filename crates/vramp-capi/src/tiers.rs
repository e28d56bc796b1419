//! Tiers below an allocator: budgets, pinned memory, a disk, and buffers whose contents may leave the
//! card. One set of tiers for each allocator.
//!
//! | file | what |
//! |---|---|
//! | `slot.rs` | the tiers of an allocator, and their end |
//! | `tables.rs` | reservations, buffers and leases by id |
//! | `config.rs`, `store.rs` | how tiers are configured, and a store of the caller |
//! | `dispatch.rs` | the thread that calls observers |
//! | `spaces.rs`, `reservations.rs`, `buffers.rs`, `leases.rs`, `observing.rs` | the functions of the interface |
//! | `paying.rs` | allocations that a reservation pays for |

pub mod abi;
pub mod buffers;
mod config;
pub(crate) mod dispatch;
pub mod leases;
pub mod observing;
pub mod paying;
pub mod reservations;
pub(crate) mod slot;
pub mod spaces;
mod store;
pub(crate) mod tables;

use std::ffi::c_char;
use std::sync::{Arc, PoisonError, RwLockWriteGuard};

use vramp_alloc::device::DeviceInfo;
use vramp_defer::TiersOptions;
use vramp_tiers::config::TiersConfig;

use crate::abi::vramp_allocator_t;
use crate::abi::vramp_status_t;
use crate::session::Session;
use crate::status::{Failure, Kind, Result, status_of};
use crate::tiers::abi::{vramp_store_t, vramp_tiers_options_t};
use crate::tiers::dispatch::check_not_dispatcher;
use crate::tiers::slot::{OpenTiers, Slot, no_tiers};
use crate::tiers::store::Store;
use crate::{handles, pointers};

impl OpenTiers {
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

/// Opens tiers below an allocator, of the spaces in a configuration in TOML: `[[gpu]]` with the number of
/// its device, or none for the allocator's limit; `[[host]]`; `[[disk]]`; and `[[peer]]`, the number of another
/// card whose free memory holds contents. docs/tiers.md has the keys.
/// Pins the host's first pool. From then on requests that find too little memory spill buffers first.
///
/// An allocator has at most one set of tiers: VRAMP_ERROR_BUSY if they are open. They end with
/// vramp_tiers_close or vramp_close.
///
/// # Safety
/// `config` is null or is zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_tiers_open(
    allocator: vramp_allocator_t,
    config: *const c_char,
) -> vramp_status_t {
    status_of(|| {
        // SAFETY: required by this function's contract.
        let text = unsafe { pointers::given_text(config, "config") }?;
        open(allocator, None, |_| Ok(TiersConfig::from_toml(text)?))
    })
}

/// Opens tiers as vramp_tiers_open does, of the sizes in a struct. Where the call fails the store of the
/// struct is not released.
///
/// # Safety
/// `options` is null, or its first eight bytes hold a size that is valid for reading; its directory is
/// null or zero-terminated; its store is null, or as `options` is. The functions of the store may be called
/// from any thread with its `user` until `release` was called, and do not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_tiers_open_with(
    allocator: vramp_allocator_t,
    options: *const vramp_tiers_options_t,
) -> vramp_status_t {
    status_of(|| {
        // SAFETY: the struct begins with its size, and any bytes are valid; the rest is required by this
        // function's contract.
        let options = unsafe { pointers::read_sized(options, "options") }?;
        // SAFETY: required by this function's contract.
        let store = unsafe { config::store_of(&options) }?;
        open(allocator, store.as_ref(), |device| {
            // SAFETY: required by this function's contract.
            unsafe { config::from_options(&options, device) }
        })
    })
}

/// Opens tiers of a configuration for a device, perhaps with a store.
fn open(
    allocator: vramp_allocator_t,
    store: Option<&vramp_store_t>,
    config: impl FnOnce(&DeviceInfo) -> Result<TiersConfig>,
) -> Result<()> {
    let store = store.map(Store::open).transpose()?;
    handles::with(allocator, |session| {
        let config = config(session.allocator().driver().info())?;
        let objects = store.as_ref().map(Store::tier);
        let options = TiersOptions { objects, ..TiersOptions::default() };
        session.set_tiers(|| {
            let opened = OpenTiers::open(session, &config, &options)?;
            if let Some(store) = &store {
                store.accept();
            }
            Ok(opened)
        })
    })
}

/// Closes the tiers: ends leases at the work queued by then, destroys buffers and their contents, and
/// releases reservations, pinned memory and files. Waits for work on buffers. Calls of other threads
/// that wait for memory end with VRAMP_ERROR_CANCELLED. The allocator stays open, and its other memory
/// stays.
///
/// VRAMP_ERROR_CAPTURE while a stream captures a graph, VRAMP_ERROR_IN_USE while Python uses the tiers:
/// nothing changes then. VRAMP_ERROR_BUSY in an observer of buffers.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_tiers_close(allocator: vramp_allocator_t) -> vramp_status_t {
    handles::on(allocator, |session| session.close_tiers())
}

/// Returns the error for a number that names nothing.
#[cold]
fn out_of_range(what: &str, number: u32, use_: &str) -> Failure {
    Failure::new(Kind::Range, format!("{number} is no {what}: use {use_}"))
}
