//! Pools of objects that are expensive to make.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

pub(in crate::disk) struct ObjectPool<T> {
    kept: Mutex<Vec<T>>,
    /// Most objects that are kept.
    most: usize,
}

impl<T> ObjectPool<T> {
    pub fn with_capacity(most: usize) -> ObjectPool<T> {
        ObjectPool { kept: Mutex::default(), most }
    }

    /// Takes an object that fits, or makes one.
    ///
    /// # Errors
    /// `make` failed.
    pub fn take<E>(
        self: &Arc<ObjectPool<T>>,
        fits: impl Fn(&T) -> bool,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Pooled<T>, E> {
        let kept = {
            let mut kept = self.lock();
            kept.iter().position(fits).map(|at| kept.remove(at))
        };
        let item = kept.map_or_else(make, Ok)?;
        Ok(Pooled { item: Some(item), pool: Arc::clone(self) })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<T>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops all objects that are not in use.
    pub fn clear(&self) {
        drop(std::mem::take(&mut *self.lock()));
    }

    fn put_back(&self, item: T) {
        let mut kept = self.lock();
        // The one returned first goes.
        let oldest = (kept.len() == self.most).then(|| kept.remove(0));
        kept.push(item);
        drop(kept);
        drop(oldest);
    }
}

/// An object of a pool. Dropping it returns the object.
pub(in crate::disk) struct Pooled<T> {
    item: Option<T>,
    pool: Arc<ObjectPool<T>>,
}

const TAKEN: &str = "only drop takes the object";

impl<T> Deref for Pooled<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.item.as_ref().expect(TAKEN)
    }
}

impl<T> DerefMut for Pooled<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.item.as_mut().expect(TAKEN)
    }
}

impl<T> Drop for Pooled<T> {
    fn drop(&mut self) {
        if let Some(item) = self.item.take() {
            self.pool.put_back(item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_that_fit_are_reused_and_only_a_few_are_kept() {
        let pool = Arc::new(ObjectPool::<u32>::with_capacity(4));
        let take = |least: u32| pool.take(|&kept| kept >= least, || Ok::<_, ()>(least)).unwrap();
        let all: Vec<_> = (1..=6).map(take).collect();
        drop(all);
        assert_eq!(*pool.lock(), [3, 4, 5, 6]);
        assert_eq!(*take(5), 5);
        assert_eq!(*take(9), 9);
        assert_eq!(*pool.lock(), [4, 6, 5, 9]);
        pool.clear();
        assert!(pool.lock().is_empty());
    }
}
