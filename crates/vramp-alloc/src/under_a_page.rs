//! A backend for requests under a page beside the pool of pages, as VPMM has the driver's pool.
//!
//! 1. Both have one limit: each may reserve what the other one leaves of it.
//! 2. If one is short, the other one returns idle memory to the card, and the request is tried again.
//! 3. Every malloc unmaps old mappings whose work is over; the page pool does so for its own.
//!
//! With a limit each request queries the backend's usage once more. A request that is short costs a
//! trim of the other pool.
//!
//! Deliberately absent: where memory lies (`virtual_pool.rs`, and the backend).

use vramp_core::{Bytes, Shortage, StreamId};
use vramp_driver::{DriverError, DriverResult, PoolUsage, Stream};

use crate::allocation::Found;
use crate::backend::Backend;
use crate::virtual_pool::{Refusal, VirtualPool};

/// A backend beside the pool of pages.
pub(crate) struct UnderAPage {
    pub backend: Box<dyn Backend>,
    /// Limit of both pools together.
    limit: Option<Bytes>,
    /// Physical memory outside of both that counts against it.
    elsewhere: Bytes,
    /// Highest sum of what both had reserved just before one of them released memory.
    reserved_peak: Bytes,
}

impl UnderAPage {
    pub(crate) fn new(backend: Box<dyn Backend>, limit: Option<Bytes>) -> UnderAPage {
        UnderAPage { backend, limit, elsewhere: Bytes::ZERO, reserved_peak: Bytes::ZERO }
    }

    /// Returns what the backend has reserved and used. One driver call.
    fn usage(&self) -> DriverResult<PoolUsage> {
        Ok(self.backend.driver_usage()?.unwrap_or_default())
    }

    /// Allocates from the pool that serves requests of this size.
    pub(crate) fn malloc(
        &mut self,
        pages: &mut VirtualPool,
        size: Bytes,
        stream: StreamId,
        raw: Stream,
        contended: bool,
    ) -> Result<Found, Refusal> {
        if size >= pages.pool.config().page {
            return self.malloc_pages(pages, size, stream, contended);
        }
        pages.sweep_retired().map_err(Refusal::Driver)?;
        let mut outcome = self.malloc_small(pages, size, stream, raw);
        // First as much as the backend needs, then all there is.
        let step = pages.exec.driver.info().limits.pool_step;
        for enough in [size.max(step), Bytes::MAX] {
            if !matches!(outcome, Err(Refusal::Short(..))) {
                break;
            }
            let before = pages.pool.counters().reserved;
            self.note_peak(before, self.usage().map_err(Refusal::Driver)?.reserved);
            pages.trim(before.saturating_sub(enough)).map_err(Refusal::Driver)?;
            if pages.pool.counters().reserved == before {
                break;
            }
            outcome = self.malloc_small(pages, size, stream, raw);
        }
        outcome.map_err(|refusal| self.with_both(refusal, known_usage(pages)))
    }

    fn malloc_small(
        &mut self,
        pages: &VirtualPool,
        size: Bytes,
        stream: StreamId,
        raw: Stream,
    ) -> Result<Found, Refusal> {
        let beside = self.elsewhere + pages.pool.counters().reserved;
        self.backend.set_limit(self.limit.map(|limit| limit.saturating_sub(beside)));
        let outcome = self.backend.malloc(size, stream, raw);
        // What the backend had reserved before it trimmed itself for this request.
        self.note_peak(pages.pool.counters().reserved, self.backend.counters().reserved_peak);
        self.backend.reset_peaks();
        Ok(outcome?.into())
    }

    fn malloc_pages(
        &mut self,
        pages: &mut VirtualPool,
        size: Bytes,
        stream: StreamId,
        contended: bool,
    ) -> Result<Found, Refusal> {
        self.share_limit(pages).map_err(Refusal::Driver)?;
        let outcome = pages.find(size, stream, contended);
        let Err(refusal @ Refusal::Short(..)) = outcome else { return outcome };
        let before = self.usage().map_err(Refusal::Driver)?;
        self.note_peak(pages.pool.counters().reserved, before.reserved);
        self.backend.trim(Bytes::ZERO).map_err(Refusal::Driver)?;
        let after = self.usage().map_err(Refusal::Driver)?;
        if after.reserved == before.reserved {
            return Err(self.with_both(refusal, after));
        }
        self.share_limit(pages).map_err(Refusal::Driver)?;
        let again = pages.find(size, stream, contended);
        again.map_err(|refusal| self.with_both(refusal, after))
    }

    /// Reserves pages ahead of demand, within the limit of both. False if that forbids it.
    pub(crate) fn prefill(
        &self,
        pages: &mut VirtualPool,
        len: Bytes,
        stream: StreamId,
    ) -> Result<bool, DriverError> {
        self.share_limit(pages)?;
        pages.prefill(len, stream)
    }

    /// Sets the limit of both pools, and how much of it others have reserved.
    pub(crate) fn set_limit(&mut self, limit: Option<Bytes>, elsewhere: Bytes) {
        (self.limit, self.elsewhere) = (limit, elsewhere);
    }

    /// Returns the most that both pools had reserved at one time, from what they have now. Each only
    /// grows between two releases, so the sum is highest just before one.
    pub(crate) fn peak(&self, pages: Bytes, driver: Bytes) -> Bytes {
        self.reserved_peak.max(pages + driver)
    }

    fn note_peak(&mut self, pages: Bytes, driver: Bytes) {
        self.reserved_peak = self.peak(pages, driver);
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.reserved_peak = Bytes::ZERO;
    }

    /// Passes the page pool its part of the limit. One driver call if there is one.
    fn share_limit(&self, pages: &mut VirtualPool) -> Result<(), DriverError> {
        let beside = match self.limit {
            Some(_) => self.elsewhere + self.usage()?.reserved,
            None => Bytes::ZERO,
        };
        pages.pool.set_limit(self.limit, Some(beside));
        Ok(())
    }

    /// Returns idle memory to the card until both together have reserved `to`, or nothing more is
    /// idle: pages last.
    pub(crate) fn trim(&mut self, pages: &mut VirtualPool, to: Bytes) -> Result<(), DriverError> {
        let reserved = pages.pool.counters().reserved;
        self.note_peak(reserved, self.usage()?.reserved);
        self.backend.trim(to.saturating_sub(reserved))?;
        pages.trim(to.saturating_sub(self.usage()?.reserved))
    }

    /// Adds the other pool's memory to a shortage, and the limit that both have.
    fn with_both(&self, refusal: Refusal, other: PoolUsage) -> Refusal {
        let Refusal::Short(shortage, call) = refusal else { return refusal };
        let PoolUsage { reserved, used, .. } = other;
        let limit = shortage.limit.and(self.limit);
        let whole = Shortage {
            reserved: shortage.reserved + reserved,
            used: shortage.used + used,
            free: shortage.free + reserved.saturating_sub(used),
            limit,
            ..*shortage
        };
        Refusal::Short(Box::new(whole), call)
    }
}

/// What the page pool has reserved, in the form of the driver's pool.
fn known_usage(pages: &VirtualPool) -> PoolUsage {
    let (census, counters) = (pages.census(), pages.pool.counters());
    let used = counters.reserved.saturating_sub(census.free + census.waiting);
    PoolUsage { reserved: counters.reserved, reserved_peak: counters.reserved_peak, used }
}
