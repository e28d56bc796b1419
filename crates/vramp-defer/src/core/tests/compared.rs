//! Comparisons of ids, counted: what a search or a scan costs, wherever it is.

use std::cell::Cell;
use std::cmp::Ordering;
use std::hash::{Hash, Hasher};

use super::{BufferLeaseId, HolderKey, StreamKey};

thread_local!(static COMPARED: Cell<u64> = const { Cell::new(0) });

/// Counts a comparison.
pub fn count() {
    COMPARED.set(COMPARED.get() + 1);
}

/// Returns the number of comparisons of ids on this thread during `work`.
pub fn compared(work: impl FnOnce()) -> u64 {
    let before = COMPARED.get();
    work();
    COMPARED.get() - before
}

macro_rules! count_comparisons {
    ($($id:ident),*) => {$(
        impl PartialEq for $id {
            fn eq(&self, other: &$id) -> bool {
                count();
                self.0 == other.0
            }
        }

        impl Eq for $id {}

        impl Hash for $id {
            fn hash<H: Hasher>(&self, state: &mut H) {
                self.0.hash(state);
            }
        }

        impl PartialOrd for $id {
            fn partial_cmp(&self, other: &$id) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }

        impl Ord for $id {
            fn cmp(&self, other: &$id) -> Ordering {
                count();
                self.0.cmp(&other.0)
            }
        }
    )*};
}

count_comparisons!(BufferLeaseId, HolderKey, StreamKey);
