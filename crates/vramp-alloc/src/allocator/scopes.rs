//! Parts of a program: scopes, which have peaks of their own, and tags, named groups of allocations.

use vramp_core::Bytes;

use crate::Allocator;
use crate::error::{TagUsage, Unusable};
use crate::scopes::{ScopeId, ScopePeaks};
use crate::shared::Inner;

/// # Peaks of a part of the program
impl Allocator {
    /// Begins a scope. No driver call.
    ///
    /// # Errors
    /// The allocator is unusable.
    pub fn begin_scope(&self) -> Result<ScopeId, Unusable> {
        Unusable::check_fork()?;
        let mut inner = self.shared().lock_anyway();
        let now = self.note_scopes(&mut inner);
        Ok(inner.scopes.begin(now))
    }

    /// Returns the peaks since a scope began. `None` if it has ended. No driver call.
    ///
    /// # Errors
    /// The allocator is unusable.
    pub fn scope_peaks(&self, scope: ScopeId) -> Result<Option<ScopePeaks>, Unusable> {
        Unusable::check_fork()?;
        let mut inner = self.shared().lock_anyway();
        self.note_scopes(&mut inner);
        Ok(inner.scopes.peaks(scope))
    }

    /// Ends a scope and returns its peaks. `None` if it has ended. No driver call.
    ///
    /// # Errors
    /// The allocator is unusable.
    pub fn end_scope(&self, scope: ScopeId) -> Result<Option<ScopePeaks>, Unusable> {
        Unusable::check_fork()?;
        let mut inner = self.shared().lock_anyway();
        self.note_scopes(&mut inner);
        let peaks = inner.scopes.peaks(scope);
        inner.scopes.end(scope);
        Ok(peaks)
    }

    /// Enters the peaks since the last call into the open scopes. Returns the current values.
    fn note_scopes(&self, inner: &mut Inner) -> ScopePeaks {
        let Inner { base, tallies, scopes, manager, .. } = inner;
        let (peak, now) = base.live.restart_stretch(tallies.iter().map(|tally| &tally.bytes));
        let reserved = manager.reserved();
        let reserved_peak = self.shared().restart_reserved_peak(reserved);
        scopes.note(ScopePeaks { live: peak, reserved: reserved_peak.max(reserved) });
        ScopePeaks { live: now, reserved }
    }
}

/// Id of a tag, from [`Allocator::tag`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TagId(pub(super) u16);

/// # Tags
impl Allocator {
    /// Returns the tag of this name, and creates it if it is new. There are at most 65,535 tags:
    /// the last one serves all further names.
    pub fn tag(&self, name: &str) -> TagId {
        let mut inner = self.shared.lock_anyway();
        let known = inner.tags.iter().position(|tag| tag.name == name);
        let index = known.unwrap_or_else(|| {
            if inner.tags.len() < usize::from(u16::MAX) {
                inner.tags.push(TagUsage {
                    name: name.to_owned(),
                    live: Bytes::ZERO,
                    peak: Bytes::ZERO,
                    blocks: 0,
                });
            }
            inner.tags.len() - 1
        });
        TagId(index as u16 + 1)
    }
}
