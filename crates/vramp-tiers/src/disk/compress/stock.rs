//! Things that are expensive to make, kept for whoever needs one next.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

pub(super) struct Stock<T> {
    kept: Mutex<Vec<T>>,
    /// More are not kept.
    most: usize,
}

impl<T> Stock<T> {
    pub fn of_at_most(most: usize) -> Stock<T> {
        Stock { kept: Mutex::default(), most }
    }

    /// One that fits, or a new one.
    ///
    /// # Errors
    /// None could be made.
    pub fn take<E>(
        self: &Arc<Stock<T>>,
        fits: impl Fn(&T) -> bool,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Lent<T>, E> {
        let kept = {
            let mut kept = self.lock();
            kept.iter().position(fits).map(|at| kept.remove(at))
        };
        let item = kept.map_or_else(make, Ok)?;
        Ok(Lent { item: Some(item), stock: Arc::clone(self) })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<T>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps none of those that nobody uses.
    pub fn clear(&self) {
        drop(std::mem::take(&mut *self.lock()));
    }

    fn give_back(&self, item: T) {
        let mut kept = self.lock();
        // The one that nobody wanted for longest goes.
        let gone = (kept.len() == self.most).then(|| kept.remove(0));
        kept.push(item);
        drop(kept);
        drop(gone);
    }
}

/// One of a stock, until this is dropped.
pub(super) struct Lent<T> {
    item: Option<T>,
    stock: Arc<Stock<T>>,
}

const HERE: &str = "it is there until this is dropped";

impl<T> Deref for Lent<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.item.as_ref().expect(HERE)
    }
}

impl<T> DerefMut for Lent<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.item.as_mut().expect(HERE)
    }
}

impl<T> Drop for Lent<T> {
    fn drop(&mut self) {
        if let Some(item) = self.item.take() {
            self.stock.give_back(item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_lent_again_if_it_fits_and_only_a_few_are_kept() {
        let stock = Arc::new(Stock::<u32>::of_at_most(4));
        let take = |least: u32| stock.take(|&kept| kept >= least, || Ok::<_, ()>(least)).unwrap();
        let all: Vec<_> = (1..=6).map(take).collect();
        drop(all);
        assert_eq!(*stock.lock(), [3, 4, 5, 6]);
        assert_eq!(*take(5), 5);
        assert_eq!(*take(9), 9);
        assert_eq!(*stock.lock(), [4, 6, 5, 9]);
        stock.clear();
        assert!(stock.lock().is_empty());
    }
}
