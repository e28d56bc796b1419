//! Lets calls use a value until it is taken away, at the cost of two stores for a call.
//!
//! 1. [`Gate::open`] puts a value under an id, which is never used again.
//! 2. [`Gate::call`] writes the id into the record of its thread, sees that the gate is still open,
//!    runs, and clears the record. [`Gate::counted_call`] does so for a call without a record of its
//!    own: one inside another call, or of a thread that ends. It counts itself instead.
//! 3. [`Gate::close`] shuts the gate, and returns the value once no record and no count shows a call.
//!    A call that ends sees that the gate is shut and wakes the closer.
//!
//! A call writes its record and then reads the gate; a closer writes the gate and then reads all
//! records. The barrier between is light for the call and heavy for the closer, so a call has no
//! locked instruction. `models` in this file explores the orders.
//!
//! A call costs the same with any number of threads and allocators. A close looks at the record of
//! each thread that exists: 64 bytes or so, reused by a later thread when one ends.
//!
//! Deliberately absent: what an id means, and which error a refused call returns.

use std::ops::Deref;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crossbeam_utils::CachePadded;

use crate::sync::{
    AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, UnsafeCell, fence, heavy, light,
};

/// The id that the outermost call of a thread uses. Zero while there is none.
pub(crate) struct Record(CachePadded<AtomicU64>);

impl Record {
    pub fn new() -> Record {
        Record(CachePadded::new(AtomicU64::new(0)))
    }

    /// Returns true if a call of the thread is in progress. Only the thread itself asks.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }
}

/// Whether a close waits for the calls in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Close {
    Waits,
    /// It is given up if there are any.
    AtOnce,
}

/// A value that calls use until it is taken away.
pub(crate) struct Gate<T> {
    /// Id of the value. Zero while there is none, and while it is taken away.
    open: AtomicU64,
    /// True while there is no value.
    is_vacant: AtomicBool,
    value: UnsafeCell<Option<T>>,
    /// Calls in progress without a record.
    counted: CachePadded<AtomicUsize>,
    idle: Mutex<()>,
    ended: Condvar,
}

// SAFETY: calls share the value, and open and close move it between threads.
unsafe impl<T: Send + Sync> Sync for Gate<T> {}

/// Ends a call, also one that panics.
struct Leave<F: Fn()>(F);

impl<F: Fn()> Drop for Leave<F> {
    #[inline]
    fn drop(&mut self) {
        (self.0)();
    }
}

impl<T> Gate<T> {
    pub fn new() -> Gate<T> {
        Gate {
            open: AtomicU64::new(0),
            is_vacant: AtomicBool::new(true),
            value: UnsafeCell::new(None),
            counted: CachePadded::new(AtomicUsize::new(0)),
            idle: Mutex::new(()),
            ended: Condvar::new(),
        }
    }

    /// Puts a value under an id above zero.
    ///
    /// # Panics
    /// If there is a value.
    pub fn open(&self, id: u64, value: T) {
        let was_vacant = self.is_vacant.swap(false, Ordering::Acquire);
        assert!(was_vacant, "allocator {id:#x} got a slot that is in use");
        // SAFETY: the gate is shut and was vacant, so no call and no closer uses the value.
        self.value.with_mut(|place| unsafe { *place = Some(value) });
        self.open.store(id, Ordering::Release);
    }

    /// Returns true if calls with this id are let in now.
    #[inline]
    pub fn is_open(&self, id: u64) -> bool {
        id != 0 && self.open.load(Ordering::Acquire) == id
    }

    /// Runs `call` on the value under this id, with the record of the calling thread, which is in no
    /// other call.
    ///
    /// # Errors
    /// The gate is not open under this id. `call` is returned.
    #[inline]
    pub fn call<R, F: FnOnce(&T) -> R>(&self, id: u64, record: &Record, call: F) -> Result<R, F> {
        // A refused call is seen by no closer, which could wait for one after the other.
        if !self.is_open(id) {
            return Err(call);
        }
        record.0.store(id, Ordering::Release);
        light();
        let _leave = Leave(|| {
            record.0.store(0, Ordering::Release);
            light();
            self.wake_closer_of(id);
        });
        match self.is_open(id) {
            true => Ok(self.value.with(|value| call(self.get(value)))),
            false => Err(call),
        }
    }

    /// Runs `call` as [`Gate::call`] does, without a record: four locked instructions.
    ///
    /// # Errors
    /// As of [`Gate::call`].
    #[cold]
    pub fn counted_call<R, F: FnOnce(&T) -> R>(&self, id: u64, call: F) -> Result<R, F> {
        if !self.is_open(id) {
            return Err(call);
        }
        self.counted.fetch_add(1, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        let _leave = Leave(|| {
            self.counted.fetch_sub(1, Ordering::AcqRel);
            fence(Ordering::SeqCst);
            self.wake_closer_of(id);
        });
        match self.is_open(id) {
            true => Ok(self.value.with(|value| call(self.get(value)))),
            false => Err(call),
        }
    }

    #[inline]
    fn get(&self, value: *const Option<T>) -> &T {
        // SAFETY: the caller showed a call and found the gate open after that, so a closer waits
        // for it before it takes the value, and no other thread writes it.
        let value = unsafe { &*value };
        value.as_ref().expect("an open gate has a value")
    }

    #[inline]
    fn wake_closer_of(&self, id: u64) {
        if self.open.load(Ordering::Relaxed) != id {
            self.wake_closer();
        }
    }

    #[cold]
    fn wake_closer(&self) {
        // Taken so that a closer that has just looked already waits.
        drop(self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        self.ended.notify_all();
    }

    /// Shuts the gate and returns the value. `records` is asked for the records of all threads after
    /// the gate is shut. `None` if the id is not open, or if calls are in progress and the close does
    /// not wait: then the gate is open again.
    pub fn close<R: Deref<Target = Record>>(
        &self,
        id: u64,
        records: impl FnOnce() -> Vec<R>,
        close: Close,
    ) -> Option<T> {
        if !self.is_open(id)
            || self.open.compare_exchange(id, 0, Ordering::AcqRel, Ordering::Relaxed).is_err()
        {
            return None;
        }
        heavy();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        for record in records() {
            while record.0.load(Ordering::Acquire) == id {
                if close == Close::AtOnce {
                    self.open.store(id, Ordering::Release);
                    return None;
                }
                idle = self.ended.wait(idle).unwrap_or_else(PoisonError::into_inner);
            }
        }
        while self.counted.load(Ordering::Acquire) > 0 {
            if close == Close::AtOnce {
                self.open.store(id, Ordering::Release);
                return None;
            }
            idle = self.ended.wait(idle).unwrap_or_else(PoisonError::into_inner);
        }
        drop(idle);
        // SAFETY: the gate is shut, and calls that were let in before have ended.
        let value = self.value.with_mut(|place| unsafe { (*place).take() });
        self.is_vacant.store(true, Ordering::Release);
        value
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn zero_is_the_id_of_no_value() {
        let (gate, record) = (Gate::<u32>::new(), Record::new());
        assert!(!gate.is_open(0));
        assert!(gate.call(0, &record, |value| *value).is_err());
        assert!(gate.counted_call(0, |value| *value).is_err());
        assert_eq!(gate.close(0, Vec::<&Record>::new, Close::Waits), None);
    }

    #[test]
    fn a_call_that_panics_has_ended() {
        let (gate, record) = (Gate::new(), Record::new());
        gate.open(1, 5);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            gate.call(1, &record, |_| gate.counted_call(1, |_| panic!("inside")))
        }));
        assert!(panicked.is_err() && !record.is_busy());
        assert_eq!(gate.close(1, || vec![&record], Close::AtOnce), Some(5));
    }
}

#[cfg(all(test, loom))]
mod models {
    use std::sync::Arc;

    use loom::thread;

    use super::*;

    /// A value that a call sees whole: it is torn down when it is dropped.
    struct Value(UnsafeCell<bool>);

    // SAFETY: the checker fails a model that accesses the cell from two threads at once.
    unsafe impl Sync for Value {}
    // SAFETY: as above.
    unsafe impl Send for Value {}

    impl Value {
        fn new() -> Value {
            Value(UnsafeCell::new(true))
        }

        fn check(&self) {
            // SAFETY: a closer has the value alone.
            self.0.with(|whole| assert!(unsafe { *whole }));
        }

        fn tear_down(self) {
            // SAFETY: as above.
            self.0.with_mut(|whole| unsafe { *whole = false });
        }
    }

    fn close(gate: &Gate<Value>, records: &[Arc<Record>], close: Close) -> bool {
        gate.close(1, || records.to_vec(), close).map(Value::tear_down).is_some()
    }

    #[test]
    fn a_close_waits_for_calls_and_no_call_sees_the_value_after_it() {
        loom::model(|| {
            let gate = Arc::new(Gate::new());
            gate.open(1, Value::new());
            let records = vec![Arc::new(Record::new())];
            let caller = {
                let (gate, record) = (Arc::clone(&gate), Arc::clone(&records[0]));
                thread::spawn(move || {
                    let first = gate.call(1, &record, Value::check);
                    let second = gate.call(1, &record, Value::check);
                    assert!(first.is_ok() || second.is_err());
                })
            };
            assert!(close(&gate, &records, Close::Waits));
            caller.join().unwrap();
            assert!(gate.call(1, &records[0], Value::check).is_err());
        });
    }

    #[test]
    fn a_close_waits_for_calls_without_a_record_too() {
        loom::model(|| {
            let gate = Arc::new(Gate::new());
            gate.open(1, Value::new());
            let records = vec![Arc::new(Record::new())];
            let caller = {
                let (gate, record) = (Arc::clone(&gate), Arc::clone(&records[0]));
                thread::spawn(move || {
                    let _ = gate.call(1, &record, |value| {
                        // Inside of a call.
                        let _ = gate.counted_call(1, Value::check);
                        value.check();
                    });
                })
            };
            assert!(close(&gate, &records, Close::Waits));
            caller.join().unwrap();
        });
    }

    #[test]
    fn a_close_that_does_not_wait_leaves_the_gate_open_to_later_calls() {
        loom::model(|| {
            let gate = Arc::new(Gate::new());
            gate.open(1, Value::new());
            let records = vec![Arc::new(Record::new())];
            let closer = {
                let (gate, records) = (Arc::clone(&gate), records.clone());
                thread::spawn(move || close(&gate, &records, Close::AtOnce))
            };
            let _ = gate.call(1, &records[0], Value::check);
            let closed = closer.join().unwrap();
            assert_eq!(gate.call(1, &records[0], Value::check).is_err(), closed);
        });
    }

    #[test]
    fn of_two_closes_one_gets_the_value_and_the_slot_serves_again() {
        loom::model(|| {
            let gate = Arc::new(Gate::new());
            gate.open(1, Value::new());
            let other = {
                let gate = Arc::clone(&gate);
                thread::spawn(move || close(&gate, &[], Close::Waits))
            };
            let own = close(&gate, &[], Close::Waits);
            assert!(own != other.join().unwrap());
            gate.open(2, Value::new());
            let record = Record::new();
            assert!(gate.call(1, &record, Value::check).is_err());
            assert!(gate.call(2, &record, Value::check).is_ok());
        });
    }
}
