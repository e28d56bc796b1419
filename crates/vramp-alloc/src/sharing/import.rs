//! Memory of another process, mapped here as one range.
//!
//! 1. [`Allocator::import`] reserves addresses, imports the handles that an export described, maps them
//!    side by side and makes them accessible.
//! 2. Work uses [`Imported::range`]. [`Imported::record_use`] notes on which streams.
//! 3. [`Imported::close`], or dropping it, waits for that work on the host, then unmaps and releases
//!    everything. It does not depend on the allocator, which may be closed before.
//!
//! The mapping outlives the exporter: its process may end, or free the block. Imported memory is the
//! exporter's on the card: no limit here counts it.
//!
//! Growth: one reservation for each import, and a handle for each of the exporter's.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use vramp_core::{AddrRange, Bytes, DeviceAddr, StreamId};
use vramp_driver::{Driver, DriverError, ExportedHandle, Handle};
use vramp_host::fork::is_forked;

use crate::Allocator;
use crate::error::{Unusable, UseError};
use crate::shared::Shared;
use crate::sharing::export::Description;

/// Memory of another process. Dropping it closes it.
#[must_use = "the memory is unmapped when this is dropped"]
pub struct Imported {
    shared: Arc<Shared>,
    mapping: Option<Mapping>,
    /// The exporter's block.
    range: AddrRange,
    uses: Mutex<BTreeSet<StreamId>>,
}

/// Handles that are mapped side by side, in addresses of their own.
pub(super) struct Mapping {
    pub(super) whole: AddrRange,
    pub(super) handles: Vec<Handle>,
    pub(super) mapped: Bytes,
}

/// Error of [`Allocator::import`] and [`Imported::close`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError<E: std::error::Error + 'static = std::convert::Infallible> {
    /// The description is impossible: a block beyond its handles, or lengths that are no whole pages.
    #[error("the description of the exported memory is impossible: {0}")]
    Description(String),
    /// The handle of this number could not be fetched.
    #[error("handle {index} of the exported memory did not arrive: {error}")]
    Fetch {
        /// Number of the handle.
        index: usize,
        /// Error of the caller's function.
        #[source]
        error: E,
    },
    /// A driver call failed. Nothing is imported.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// No call can succeed any more.
    #[error(transparent)]
    Unusable(#[from] Unusable),
}

/// # Import from other processes
impl Allocator {
    /// Imports memory that [`Export`](super::Export) describes. `fetch` returns the handle of each
    /// number in turn; it is closed before the next is fetched, so one descriptor is open at a time. One
    /// import and one map for each handle, 34 us together, and two calls more.
    ///
    /// Cards that have access to this allocator's memory get access to it, too.
    ///
    /// # Errors
    /// Nothing is imported, and no descriptor is left open.
    pub fn import<E: std::error::Error + 'static>(
        &self,
        description: &Description,
        mut fetch: impl FnMut(usize) -> Result<ExportedHandle, E>,
    ) -> Result<Imported, ImportError<E>> {
        Unusable::check_fork()?;
        let driver = self.driver();
        let page = driver.info().limits.page;
        if !description.is_possible() {
            let Description { offset, len, handles } = description;
            let what = format!("{len} from {offset} on in {} handles", handles.len());
            return Err(ImportError::Description(what));
        }
        if let Some(odd) = description.handles.iter().find(|len| !len.is_multiple_of(page)) {
            return Err(ImportError::Description(format!(
                "a handle of {odd} with pages of {page}"
            )));
        }
        let mut mapping = Mapping::reserve(&**driver, description.mapped(), None)?;
        let mut map_all = || -> Result<(), ImportError<E>> {
            for (index, &len) in description.handles.iter().enumerate() {
                let exported = fetch(index).map_err(|error| ImportError::Fetch { index, error })?;
                mapping.map(&**driver, driver.import(&exported, len)?, len)?;
            }
            // Not locked earlier: `fetch` may wait long for another process.
            let peers = self.shared().group.peers();
            Ok(driver.set_access(mapping.whole, &peers)?)
        };
        if let Err(error) = map_all() {
            // What cannot be undone stays until the device is dropped.
            let _ = mapping.release(&**driver);
            return Err(error);
        }
        let start = mapping.whole.start + description.offset;
        Ok(Imported::new(self, mapping, AddrRange::new(start, description.len)))
    }
}

impl Mapping {
    /// Reserves addresses, `at` a place if it is free. One or two driver calls.
    pub(super) fn reserve(
        driver: &dyn Driver,
        len: Bytes,
        at: Option<DeviceAddr>,
    ) -> Result<Mapping, DriverError> {
        let page = driver.info().limits.page;
        let wanted = at.map(|at| AddrRange::new(at, len));
        let wanted = wanted.filter(|range| range.start.number().is_multiple_of(page.count()));
        let whole = match wanted {
            Some(range) if driver.reserve_at(range)? => range,
            _ => AddrRange::new(driver.reserve(len, page)?, len),
        };
        Ok(Mapping { whole, handles: Vec::new(), mapped: Bytes::ZERO })
    }

    /// Maps a handle behind those before, without access. It is the mapping's also after an error.
    pub(super) fn map(
        &mut self,
        driver: &dyn Driver,
        handle: Handle,
        len: Bytes,
    ) -> Result<AddrRange, DriverError> {
        self.handles.push(handle);
        let range = AddrRange::new(self.whole.start + self.mapped, len);
        driver.map(range.start, handle)?;
        self.mapped += len;
        Ok(range)
    }

    /// Unmaps and releases the last handle, so that `mapped` bytes are left, after a failure. What cannot be undone
    /// is with the rest.
    pub(super) fn undo_to(&mut self, driver: &dyn Driver, mapped: Bytes) {
        let range = AddrRange::new(self.whole.start + mapped, self.mapped - mapped);
        if !range.len.is_zero() {
            if driver.unmap(range).is_err() {
                return;
            }
            self.mapped = mapped;
        }
        if let Some(handle) = self.handles.pop() {
            // A handle that cannot be released stays until the device is dropped.
            let _ = driver.release(handle);
        }
    }

    /// Unmaps and releases everything. Goes on after a failure and returns the first one.
    pub(super) fn release(&mut self, driver: &dyn Driver) -> Result<(), DriverError> {
        let mut first = Ok(());
        if !self.mapped.is_zero() {
            first = driver.unmap(AddrRange::new(self.whole.start, self.mapped));
        }
        for handle in self.handles.drain(..) {
            first = first.and(driver.release(handle));
        }
        first.and(driver.free_addresses(self.whole))
    }
}

impl Imported {
    pub(super) fn new(allocator: &Allocator, mapping: Mapping, range: AddrRange) -> Imported {
        let (shared, uses) = (Arc::clone(allocator.shared()), Mutex::default());
        Imported { shared, mapping: Some(mapping), range, uses }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(super) fn mapping(&self) -> &Mapping {
        self.mapping.as_ref().expect("it is closed when it is dropped")
    }

    pub(super) fn mapping_mut(&mut self) -> &mut Mapping {
        self.mapping.as_mut().expect("it is closed when it is dropped")
    }

    /// Returns it as memory of which this range is in use.
    pub(super) fn with_range(mut self, range: AddrRange) -> Imported {
        self.range = range;
        self
    }

    /// Returns the addresses of the exporter's block here.
    pub fn range(&self) -> AddrRange {
        self.range
    }

    /// Notes that work queued on `stream`, so far and from now on, uses the memory: closing waits for
    /// it. Work that is queued on a stream of the caller's own after the allocator was closed is not waited
    /// for. No driver call.
    ///
    /// # Errors
    /// The stream is not one of the allocator's, or was destroyed.
    pub fn record_use(&self, stream: StreamId) -> Result<(), UseError> {
        if self.shared.group.work_of(stream).is_none() {
            return Err(UseError::UnknownStream(stream));
        }
        self.uses.lock().unwrap_or_else(PoisonError::into_inner).insert(stream);
        Ok(())
    }

    /// Grants a card access to the memory, which is imported already. Idempotent. One driver call.
    ///
    /// # Errors
    /// The driver call failed.
    pub fn grant_access(&self, ordinal: u32) -> Result<(), DriverError> {
        self.shared.driver.set_access(self.mapping().whole, &[ordinal])
    }

    /// Waits on the host for the noted work, then unmaps the memory and releases the handles. No lock is
    /// held during the wait.
    ///
    /// # Errors
    /// The wait failed, as while a noted stream captures, and the memory stays mapped until the device is
    /// dropped; or a driver call failed, and what could be released is.
    pub fn close(mut self) -> Result<(), DriverError> {
        self.end()
    }

    /// Waits on the host for work that was queued on the noted streams so far. No lock is held meanwhile.
    ///
    /// # Errors
    /// The wait failed, as while a noted stream captures.
    pub fn wait_for_uses(&self) -> Result<(), DriverError> {
        let uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for stream in uses {
            if let Some(end) = self.shared.group.end_of_work(stream, &self.shared.driver)? {
                end.synchronize()?;
            }
        }
        Ok(())
    }

    pub(super) fn end(&mut self) -> Result<(), DriverError> {
        if self.mapping.is_none() {
            return Ok(());
        }
        let waited = self.wait_for_uses();
        let Some(mut mapping) = self.mapping.take() else { return Ok(()) };
        // After a failure work may still use it: it stays mapped until the device is dropped.
        waited?;
        mapping.release(&*self.shared.driver)
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        if is_forked() {
            // Dropping the device would make calls, and take locks that no thread releases.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        // A drop cannot report a failure; `close` does.
        let _ = self.end();
    }
}

impl std::fmt::Debug for Imported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of another process", self.range)
    }
}
