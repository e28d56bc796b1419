//! One place of the table of handles: a value that calls use, and the claim of the thread that closes it.
//!
//! 1. [`Slot::open`] puts a value in and opens the gate (`gate.rs`).
//! 2. [`Slot::claim`] says, within a call, that the thread closes the value. Of several threads one succeeds.
//! 3. [`Slot::take_claimed`] shuts the gate, waits for the calls in progress and returns the value, of which
//!    there is no other copy then.
//! 4. [`Slot::while_closing`] serves a call inside such a call meanwhile, from the claim.
//! 5. [`Slot::take_at_once`] does both in one step and waits for no call: it is given up if there is one.
//!
//! Deliberately absent: which calls are inside which, and the errors.

use std::ops::Deref;
use std::sync::{Arc, PoisonError};

use crate::gate::{Close, Gate, Record};
use crate::sync::{Mutex, MutexGuard};

/// A value that is being closed.
struct Claim<T> {
    id: u64,
    value: Arc<T>,
}

pub(crate) struct Slot<T> {
    pub gate: Gate<Arc<T>>,
    /// The value that is being closed.
    closing: Mutex<Option<Claim<T>>>,
}

/// What a call finds behind a gate that was shut.
pub(crate) enum Behind<T> {
    /// A close was given up meanwhile: the gate is open.
    Open,
    /// The value, for a call inside a call that the closer waits for.
    Closing(Arc<T>),
    Gone,
}

/// Why a value was not taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NotTaken {
    Gone,
    InUse,
}

impl<T> Slot<T> {
    pub fn new() -> Slot<T> {
        Slot { gate: Gate::new(), closing: Mutex::new(None) }
    }

    fn closing(&self) -> MutexGuard<'_, Option<Claim<T>>> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a value under an id above zero.
    ///
    /// # Panics
    /// If there is a value.
    pub fn open(&self, id: u64, value: Arc<T>) {
        self.gate.open(id, value);
    }

    /// Claims the close of the value, of which the caller is in a call. Returns false if another thread
    /// closes it.
    pub fn claim(&self, id: u64, value: &Arc<T>) -> bool {
        let mut closing = self.closing();
        let is_first = closing.is_none();
        if is_first {
            *closing = Some(Claim { id, value: Arc::clone(value) });
        }
        is_first
    }

    /// Waits for the calls in progress and returns the value that the caller claimed.
    ///
    /// # Panics
    /// If the caller did not claim it.
    pub fn take_claimed<R: Deref<Target = Record>>(
        &self,
        id: u64,
        records: impl FnOnce() -> Vec<R>,
    ) -> Arc<T> {
        drop(self.gate.close(id, records, Close::Waits));
        let claimed = self.closing().take();
        claimed.expect("only the thread that claimed the close ends it").value
    }

    /// Returns the value if no call is in progress.
    ///
    /// # Errors
    /// There is no value under this id, another thread closes it, or calls are in progress.
    pub fn take_at_once<R: Deref<Target = Record>>(
        &self,
        id: u64,
        records: impl FnOnce() -> Vec<R>,
    ) -> Result<Arc<T>, NotTaken> {
        // Held until the end: calls that meet the shut gate wait for it, and then look again.
        let closing = self.closing();
        if closing.is_some() || !self.gate.is_open(id) {
            return Err(NotTaken::Gone);
        }
        self.gate.close(id, records, Close::AtOnce).ok_or(NotTaken::InUse)
    }

    /// Returns what a call finds that the gate refused. `is_inside` says whether it is made inside another
    /// call on the value.
    pub fn while_closing(&self, id: u64, is_inside: impl FnOnce(&T) -> bool) -> Behind<T> {
        match &*self.closing() {
            // A close that does not wait holds this lock until it is over.
            None if self.gate.is_open(id) => Behind::Open,
            // The closer waits for the outer call, which ends after this one. So it finds no copy left.
            Some(claim) if claim.id == id && is_inside(&claim.value) => {
                Behind::Closing(Arc::clone(&claim.value))
            }
            _ => Behind::Gone,
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

    use loom::thread;

    use super::*;
    use crate::sync::UnsafeCell;

    /// A value that a call sees whole: it is torn down when it is closed.
    struct Value(UnsafeCell<bool>);

    // SAFETY: the checker fails a model that accesses the cell from two threads at once.
    unsafe impl Sync for Value {}
    // SAFETY: as above.
    unsafe impl Send for Value {}

    impl Value {
        fn new() -> Arc<Value> {
            Arc::new(Value(UnsafeCell::new(true)))
        }

        fn check(&self) {
            // SAFETY: a closer has the value alone.
            self.0.with(|whole| assert!(unsafe { *whole }));
        }

        fn tear_down(value: Arc<Value>) {
            let value = Arc::into_inner(value).expect("no call is in progress");
            // SAFETY: as above.
            value.0.with_mut(|whole| unsafe { *whole = false });
        }
    }

    /// A call as `handles::with` makes it. Returns false if it was refused.
    fn call(
        slot: &Slot<Value>,
        record: Option<&Record>,
        work: &dyn Fn(&Arc<Value>),
        is_inside: bool,
    ) -> bool {
        loop {
            let done = match record {
                Some(record) => slot.gate.call(1, record, work),
                None => slot.gate.counted_call(1, work),
            };
            if done.is_ok() {
                return true;
            }
            match slot.while_closing(1, |_| is_inside) {
                Behind::Open => {}
                Behind::Closing(value) => {
                    work(&value);
                    return true;
                }
                Behind::Gone => return false,
            }
        }
    }

    #[test]
    fn a_call_inside_a_call_is_served_while_a_close_waits_for_the_outer_one() {
        loom::model(|| {
            let slot = Arc::new(Slot::new());
            slot.open(1, Value::new());
            let records = vec![Arc::new(Record::new()), Arc::new(Record::new())];
            let caller = {
                let (slot, record) = (Arc::clone(&slot), Arc::clone(&records[0]));
                thread::spawn(move || {
                    let inner = AtomicUsize::new(0);
                    let outer = call(
                        &slot,
                        Some(&record),
                        &|value| {
                            let served = call(&slot, None, &|value| value.check(), true);
                            inner.fetch_add(usize::from(served), Relaxed);
                            value.check();
                        },
                        false,
                    );
                    assert_eq!(inner.load(Relaxed), usize::from(outer));
                })
            };
            assert!(call(&slot, Some(&records[1]), &|value| assert!(slot.claim(1, value)), false));
            Value::tear_down(slot.take_claimed(1, || records.clone()));
            caller.join().unwrap();
        });
    }

    #[test]
    fn a_close_that_is_given_up_refuses_no_call() {
        loom::model(|| {
            let slot = Arc::new(Slot::new());
            slot.open(1, Value::new());
            let records = vec![Arc::new(Record::new())];
            let closer = {
                let (slot, records) = (Arc::clone(&slot), records.clone());
                thread::spawn(move || {
                    let taken = slot.take_at_once(1, || records);
                    taken.map(Value::tear_down)
                })
            };
            // The outer call keeps the closer from the value, and so none refuses the inner one.
            let outer_and_inner = |value: &Arc<Value>| {
                assert!(call(&slot, None, &|value| value.check(), false));
                value.check();
            };
            let served = call(&slot, Some(&records[0]), &outer_and_inner, false);
            match closer.join().unwrap() {
                Ok(()) => assert!(!call(&slot, Some(&records[0]), &|value| value.check(), false)),
                Err(refused) => {
                    assert_eq!(refused, NotTaken::InUse);
                    assert!(served);
                }
            }
        });
    }
}
