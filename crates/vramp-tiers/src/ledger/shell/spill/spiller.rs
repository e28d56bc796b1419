//! What a program registers to have memory freed, and what it is asked for.

use vramp_core::Bytes;

use crate::ledger::core::{Priority, SpaceId};

/// Argument of a spiller: the bytes to free.
pub struct SpillRequest<'a> {
    pub(super) space: SpaceId,
    pub(super) bytes: Bytes,
    pub(super) attempt: u32,
    /// Returns what the waiter's claim lacks; `None` for spilling on demand.
    pub(super) left: Option<&'a (dyn Fn() -> Bytes + Sync)>,
}

impl SpillRequest<'_> {
    /// Returns the space to spill from.
    pub fn space(&self) -> SpaceId {
        self.space
    }

    /// Returns the bytes that were missing when the spiller was called.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Returns the attempt number for this waiter, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Returns the bytes that are missing now, for use between steps: fewer than before once memory
    /// came back from any side, and zero once the waiter is out of the queue. For spilling on
    /// demand always [`bytes`](SpillRequest::bytes). One lock, O(claims).
    pub fn left(&self) -> Bytes {
        self.left.map_or(self.bytes, |left| left())
    }
}

/// Moves data out of a space when memory there runs short.
///
/// Called by the thread that needs the memory, by several threads at once, and with no lock held. A
/// panic is caught, counted, and taken for zero bytes. Any closure of the same form is a spiller.
pub trait Spiller: Send + Sync {
    /// Frees at least the requested bytes and at most one step more, or what there is. Returns the
    /// freed bytes: all of them have come back to the space by then. A spiller that can free more
    /// later calls [`SpillerRegistration::notify_spillable`](super::SpillerRegistration::notify_spillable).
    fn spill(&self, request: &SpillRequest<'_>) -> Bytes;
}

impl<F: Fn(&SpillRequest<'_>) -> Bytes + Send + Sync> Spiller for F {
    fn spill(&self, request: &SpillRequest<'_>) -> Bytes {
        self(request)
    }
}

/// A registered spiller.
pub(crate) struct Registered {
    pub(super) space: SpaceId,
    pub(super) priority: Priority,
    pub(super) spiller: Box<dyn Spiller>,
}

impl Registered {
    pub fn space(&self) -> SpaceId {
        self.space
    }
}
