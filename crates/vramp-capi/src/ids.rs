//! Numbers of the objects that calls name: arenas, graphs, exports, reservations, buffers, leases.
//!
//! A number is unique in the process, so that of another allocator, or of an object that ended, is unknown.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::status::{Failure, Kind};

/// Returns a number that no object of this interface had.
pub(crate) fn next_id() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

/// Returns the error for a number that names no object of a kind, which a call named `from` returns.
#[cold]
pub(crate) fn unknown(kind: Kind, what: &str, from: &str, id: u64) -> Failure {
    let text = match id {
        0 => format!("the {what} is zero: use one from {from}"),
        _ => format!(
            "{what} {id:#x} has ended, or does not belong to this allocator: use one from {from}"
        ),
    };
    Failure::new(kind, text)
}
