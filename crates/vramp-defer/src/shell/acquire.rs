//! Leases of which some buffers stay where they are, below the card, and are read there.
//!
//! Each buffer of a set is decided about on its own: what can be read where it is stays, what cannot
//! comes to the card, under one lease, all or nothing. Whoever scans many columns and builds one
//! table wants just that: the table on the card, beside columns that need not fit there.

use std::sync::Arc;
use std::time::Instant;

use crate::planner::{Access, BufferId, GrantedLease};
use vramp_alloc::{Driver, StreamId};
use vramp_driver::Stream;

use super::buffer_handle::DeferrableBuffer;
use super::lease_set::LeaseSet;
use super::spill_error::SpillError;
use super::state::{Shared, State};
use vramp_tiers::Deadline;

/// Which buffers of a lease may stay where they are, if they can be read there.
#[derive(Clone, Copy)]
pub(super) enum InPlaceMode<'a> {
    /// None.
    Nowhere,
    /// All that are only read, but these: they should be on the card by now.
    AllBut(&'a [BufferId]),
}

impl Shared {
    /// Leases a set in which what is read and readable where it is stays there. What was read there
    /// often comes to the card, if it can without waiting.
    pub(super) fn lease_in_place(
        self: &Arc<Shared>,
        wanted: &[(&DeferrableBuffer, Access)],
        streams: &[StreamId],
        deadline: Deadline,
    ) -> Result<LeaseSet, SpillError> {
        let hot = self.hot(wanted);
        if !hot.is_empty() {
            let now = Deadline::from(Instant::now());
            match self.lease(wanted, streams, now, InPlaceMode::AllBut(&hot)) {
                // There is no room for them, so they are read where they are.
                Err(
                    SpillError::Refused(_) | SpillError::NoMemory { .. } | SpillError::NoBudget(_),
                ) => {}
                leased => return leased,
            }
        }
        self.lease(wanted, streams, deadline, InPlaceMode::AllBut(&[]))
    }

    /// The buffers that were read in place so often that they should be on the card.
    fn hot(&self, wanted: &[(&DeferrableBuffer, Access)]) -> Vec<BufferId> {
        let state = self.lock();
        let buffers = wanted.iter().map(|(buffer, _)| buffer.owner.id);
        buffers.filter(|&id| state.core.is_hot(id)).collect()
    }

    /// Lets the streams come behind the work that had the memory before of what stays on the card.
    pub(super) fn order_after_memory(
        &self,
        granted: &GrantedLease,
        streams: &[Stream],
    ) -> Result<(), SpillError> {
        for &buffer in &granted.in_place {
            let state = self.lock();
            let range = state.core.extent(buffer)?.range;
            let behind = state.homes[&range].behind.and_then(|token| state.events.of(token));
            drop(state);
            let Some(event) = behind else { continue };
            streams.iter().try_for_each(|&stream| self.driver.wait(stream, event))?;
            if streams.is_empty() {
                self.driver.synchronize_event(event)?;
            }
        }
        Ok(())
    }
}

impl State {
    /// The buffers of a lease that may stay, because all that is spilled of them is mapped.
    pub fn in_place_allowed(
        &self,
        wanted: &[(BufferId, Access)],
        stay: InPlaceMode<'_>,
    ) -> Vec<BufferId> {
        let InPlaceMode::AllBut(hot) = stay else { return Vec::new() };
        let wanted = wanted.iter().map(|&(id, _)| id);
        wanted.filter(|id| !hot.contains(id) && self.is_mapped(*id)).collect()
    }

    /// Counts what a lease reads in place, and what it brought because that was done so often.
    pub fn note_reads(&mut self, granted: &GrantedLease, hot: &[BufferId]) {
        self.stats.reads_in_place += granted.in_place.len() as u64;
        let came = |id: &&BufferId| granted.restores.iter().any(|fill| fill.piece.buffer == **id);
        self.stats.promotions += hot.iter().filter(came).count() as u64;
    }
}
