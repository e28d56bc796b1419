//! Attached reservations, as other users of the same space find them.

use std::sync::{Arc, PoisonError, RwLock, Weak};

use smallvec::SmallVec;
use vramp_alloc::{Allocator, StreamId};
use vramp_core::Bytes;

use super::Table;
use crate::ledger::core::SpaceId;
use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::streams::StreamPool;

/// Returns the stream pool of a tracked allocator, made without streams at its first use.
pub(super) fn pool_of(allocator: &Arc<Allocator>, table: &RwLock<Table>) -> StreamPool {
    let mut table = table.write().unwrap_or_else(PoisonError::into_inner);
    table.pool.get_or_insert_with(|| StreamPool::empty(Arc::clone(allocator))).clone()
}

/// The tables of attached reservations of all tracked allocators of one manager.
#[derive(Default)]
pub(crate) struct Attachments {
    tables: RwLock<Vec<AttachedTo>>,
}

struct AttachedTo {
    space: SpaceId,
    allocator: Weak<Allocator>,
    table: Weak<RwLock<Table>>,
}

impl Attachments {
    /// Adds the table of a new tracked allocator. It goes with its allocator. O(tracked allocators).
    pub(super) fn add(
        &self,
        space: SpaceId,
        allocator: &Arc<Allocator>,
        table: &Arc<RwLock<Table>>,
    ) {
        let (allocator, table) = (Arc::downgrade(allocator), Arc::downgrade(table));
        let mut tables = self.tables.write().unwrap_or_else(PoisonError::into_inner);
        tables.retain(|known| known.table.strong_count() > 0);
        tables.push(AttachedTo { space, allocator, table });
    }

    /// Returns the stream pool of the first tracked allocator of a space.
    pub(crate) fn streams(&self, space: SpaceId) -> Option<StreamPool> {
        let first = {
            let tables = self.tables.read().unwrap_or_else(PoisonError::into_inner);
            let mut of_space = tables.iter().filter(|known| known.space == space);
            of_space.find_map(|known| Some((known.allocator.upgrade()?, known.table.upgrade()?)))
        };
        first.map(|(allocator, table)| pool_of(&allocator, &table))
    }

    /// Charges as much of `max` as is unused to the reservation attached to this thread, or to the
    /// first of the streams that has one with unused bytes. O(tracked allocators).
    pub(crate) fn charge(
        &self,
        space: SpaceId,
        allocator: &Arc<Allocator>,
        streams: &[StreamId],
        max: Bytes,
    ) -> Option<Charge> {
        let is_its = |known: &&AttachedTo| {
            known.space == space && std::ptr::eq(known.allocator.as_ptr(), Arc::as_ptr(allocator))
        };
        let tables: SmallVec<[Arc<RwLock<Table>>; 2]> = {
            let tables = self.tables.read().unwrap_or_else(PoisonError::into_inner);
            tables.iter().filter(is_its).filter_map(|known| known.table.upgrade()).collect()
        };
        tables.iter().find_map(|table| {
            let table = table.read().unwrap_or_else(PoisonError::into_inner);
            let charge = |attached: &super::Attached| attached.reservation.charge_up_to(max);
            table.of_this_thread().and_then(charge).or_else(|| {
                streams.iter().find_map(|&stream| table.of_stream(stream).and_then(charge))
            })
        })
    }
}
