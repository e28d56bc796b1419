//! The memory limit, and returning free memory to the card.

use vramp_core::Bytes;

use super::Allocator;
use crate::error::{AllocError, Unusable};
use crate::observe::Event;
use crate::shared::Inner;

/// # Limits, and returning memory to the card
impl Allocator {
    /// Returns the most physical memory that this allocator and its pools may reserve together.
    pub fn limit(&self) -> Option<Bytes> {
        self.shared.group.limit()
    }

    /// Returns the bytes that this allocator and its pools can create now: what is free on the card, and at
    /// most what is left of the limit. Zero if the driver does not say. One driver call, no lock.
    pub fn room(&self) -> Bytes {
        let free = self.driver().memory_info().map_or(Bytes::ZERO, |memory| memory.free);
        let left = |limit: Bytes| limit.saturating_sub(self.shared.group.reserved());
        self.limit().map_or(free, |limit| free.min(left(limit)))
    }

    /// Changes the limit. Idle memory above it is returned to the card at once. Memory in use
    /// stays, and nothing more is reserved until the allocator is below the limit.
    ///
    /// # Errors
    /// A driver call failed. The limit holds all the same.
    pub fn set_limit(&self, limit: Option<Bytes>) -> Result<(), AllocError> {
        self.set_growth_limit(limit)?;
        match limit {
            Some(limit) => self.trim(limit),
            None => Ok(()),
        }
    }

    /// Changes the limit and releases nothing: idle memory above it goes on to serve requests, as in
    /// PyTorch's allocator.
    ///
    /// # Errors
    /// As of [`Allocator::set_limit`].
    pub fn set_growth_limit(&self, limit: Option<Bytes>) -> Result<(), AllocError> {
        Unusable::check_fork()?;
        self.shared.group.set_limit(limit);
        for member in self.shared.group.members() {
            let Some(mut inner) = member.lock_open()? else { continue };
            inner.manager.set_limit(limit, None);
        }
        Ok(())
    }

    /// Sets the limit to a fraction of the card's memory, as PyTorch's
    /// `set_per_process_memory_fraction` does.
    ///
    /// # Errors
    /// [`AllocError::Fraction`] unless it is from 0 to 1.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<(), AllocError> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(AllocError::Fraction(fraction));
        }
        let memory = self.shared.driver.info().limits.memory.count();
        self.set_growth_limit(Some(Bytes::new((memory as f64 * fraction) as u64)))
    }

    /// Returns idle memory to the card until no more than `to` is reserved, or nothing more is
    /// idle. Never waits for work.
    ///
    /// # Errors
    /// A driver call failed. What was returned before it stays returned.
    pub fn trim(&self, to: Bytes) -> Result<(), AllocError> {
        let mut inner = self.shared.lock_asleep()?;
        self.shared.refresh(&mut inner);
        let before = inner.manager.reserved();
        let trimmed = inner.manager.trim(to);
        let after = inner.manager.reserved();
        self.shared.note_reserved(&inner);
        drop(inner);
        if after < before && self.shared.observers.is_observed() {
            self.shared.observers.notify(&Event::Shrunk { bytes: before - after });
        }
        Ok(trimmed?)
    }

    /// Returns all idle memory to the card, as `torch.cuda.empty_cache` does. Unlike PyTorch's
    /// allocator it also returns memory that shares a segment with a live block.
    ///
    /// # Errors
    /// As of [`Allocator::trim`].
    pub fn empty_cache(&self) -> Result<(), AllocError> {
        self.trim(Bytes::ZERO)
    }

    /// Waits on the host for queued work that uses freed memory of this pool, so that a trim can
    /// release that memory. Returns true if some work was found to be over. No lock is held during the
    /// wait. Work of streams that capture graphs is not waited for.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn wait_for_freed_memory(&self) -> Result<bool, AllocError> {
        Unusable::check_fork()?;
        self.shared.wait_until_idle()
    }

    /// Returns idle memory above the garbage collection threshold.
    pub(super) fn collect_garbage(&self, inner: &mut Inner) {
        let Some(threshold) = self.config.garbage_collection_threshold else { return };
        let whole = self.shared.group.limit().unwrap_or(self.shared.driver.info().limits.memory);
        let keep = Bytes::new((whole.count() as f64 * threshold) as u64);
        if inner.manager.reserved() > keep {
            // The request itself was served. The next trim finds what a failed one left.
            let _ = inner.manager.trim(keep);
        }
    }
}
