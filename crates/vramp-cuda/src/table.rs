//! Tables from ids to raw objects of the driver.
//!
//! An id is a generational key, so a stale one is refused here and never reaches the driver. A raw
//! object is destroyed only while no other call uses it: calls hold it in an [`Arc`], the destroying
//! call holds a [`Claim`], and a claim is granted only when no other call holds the object.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slotmap::{DefaultKey, Key, KeyData, SlotMap};

/// A pointer that only the driver dereferences.
#[derive(Debug)]
pub(crate) struct Opaque<T>(pub(crate) *mut T);

// SAFETY: libcuda may be called from any thread with any of its handles, and nothing else reads
// through the pointer.
unsafe impl<T> Send for Opaque<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Opaque<T> {}

/// Why an id is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("unknown or destroyed")]
    Unknown,
    #[error("in use by a concurrent call")]
    InUse,
}

/// Objects of one type by id. The lock is never held during a driver call.
pub(crate) struct Table<T> {
    /// `None` while a claim holds the object.
    slots: Mutex<SlotMap<DefaultKey, Option<Arc<T>>>>,
}

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table { slots: Mutex::default() }
    }
}

impl<T> Table<T> {
    /// Inserts an object and returns its id.
    pub(crate) fn insert(&self, object: T) -> u64 {
        self.lock().insert(Some(Arc::new(object))).data().as_ffi()
    }

    /// Returns the object for one call.
    pub(crate) fn get(&self, id: u64) -> Result<Arc<T>, Refusal> {
        match self.lock().get(key(id)) {
            Some(Some(object)) => Ok(Arc::clone(object)),
            Some(None) => Err(Refusal::InUse),
            None => Err(Refusal::Unknown),
        }
    }

    /// Claims the object, to destroy it.
    pub(crate) fn claim(&self, id: u64) -> Result<Claim<'_, T>, Refusal> {
        let mut slots = self.lock();
        let slot = slots.get_mut(key(id)).ok_or(Refusal::Unknown)?;
        match slot.take() {
            Some(object) if Arc::strong_count(&object) == 1 => {
                Ok(Claim { table: self, id, object: Some(object) })
            }
            used => {
                *slot = used;
                Err(Refusal::InUse)
            }
        }
    }

    /// Removes and returns every object, in slot order.
    pub(crate) fn drain(&mut self) -> Vec<Arc<T>> {
        let slots = self.slots.get_mut().unwrap_or_else(PoisonError::into_inner);
        slots.drain().filter_map(|(_, object)| object).collect()
    }

    fn lock(&self) -> MutexGuard<'_, SlotMap<DefaultKey, Option<Arc<T>>>> {
        // Nothing panics while holding the lock, so the content is consistent.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(id: u64) -> DefaultKey {
    KeyData::from_ffi(id).into()
}

/// Exclusive access to an object. Dropping it without [`Claim::destroyed`] restores the object under
/// its id.
pub(crate) struct Claim<'a, T> {
    table: &'a Table<T>,
    id: u64,
    object: Option<Arc<T>>,
}

impl<T> Claim<'_, T> {
    /// Returns the object.
    pub(crate) fn object(&self) -> &T {
        self.object.as_ref().expect("a claim holds its object until it ends")
    }

    /// Removes the id after the driver destroyed the object.
    pub(crate) fn destroyed(mut self) {
        self.object = None;
        self.table.lock().remove(key(self.id));
    }
}

impl<T> Drop for Claim<'_, T> {
    fn drop(&mut self) {
        if let Some(object) = self.object.take()
            && let Some(slot) = self.table.lock().get_mut(key(self.id))
        {
            *slot = Some(object);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_stale_once_its_object_is_destroyed_and_stays_so() {
        let table = Table::default();
        let first = table.insert("a");
        table.claim(first).unwrap().destroyed();
        let second = table.insert("b");
        assert_ne!(first, second);
        assert_eq!(table.get(first).unwrap_err(), Refusal::Unknown);
        assert_eq!(*table.get(second).unwrap(), "b");
    }

    #[test]
    fn a_claim_that_ends_without_destruction_leaves_the_id_good() {
        let table = Table::default();
        let id = table.insert(7);
        let claim = table.claim(id).unwrap();
        assert_eq!(table.get(id).unwrap_err(), Refusal::InUse);
        drop(claim);
        assert_eq!(*table.get(id).unwrap(), 7);
    }

    #[test]
    fn an_object_in_use_cannot_be_claimed() {
        let table = Table::default();
        let id = table.insert(7);
        let used = table.get(id).unwrap();
        assert_eq!(table.claim(id).err(), Some(Refusal::InUse));
        drop(used);
        assert!(table.claim(id).is_ok());
    }

    #[test]
    fn any_number_is_a_safe_id() {
        let table: Table<u8> = Table::default();
        for id in [0, 1, u64::MAX, 1 << 32, 0x1_0000_0001] {
            assert_eq!(table.get(id).unwrap_err(), Refusal::Unknown);
        }
    }
}
