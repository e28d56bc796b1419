//! Scopes: peaks of parts of a program.

use crate::Allocator;
use crate::error::Unusable;
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
