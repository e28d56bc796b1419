//! The functions of a program that answer requests and commands.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::facts::Usage;

/// A request to give bytes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bytes that another member lacks.
    pub bytes: u64,
    /// The program may release what it has to make again. Otherwise only what is idle.
    pub may_lose: bool,
}

/// Whether the process is to put its memory to sleep or to wake it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleep {
    /// Put it to sleep.
    Pause,
    /// Wake it up.
    Resume,
}

/// Returns the bytes that it released.
pub type OnRequest = dyn Fn(&Request) -> u64 + Send + Sync;
/// Returns true if it succeeded.
pub type OnSleep = dyn Fn(Sleep) -> bool + Send + Sync;

/// Returns what the memory is used for now.
pub type OnLook = dyn Fn() -> Usage + Send + Sync;

/// The functions of the program. They are called without a lock.
#[derive(Default)]
pub struct Handlers {
    pub on_request: Mutex<Option<Arc<OnRequest>>>,
    pub on_sleep: Mutex<Option<Arc<OnSleep>>>,
    pub on_look: Mutex<Option<Arc<OnLook>>>,
}

impl fmt::Debug for Handlers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handlers").finish_non_exhaustive()
    }
}

/// Returns a handler.
pub fn taken<F: ?Sized>(handler: &Mutex<Option<Arc<F>>>) -> Option<Arc<F>> {
    handler.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Replaces a handler.
pub fn replace<F: ?Sized>(handler: &Mutex<Option<Arc<F>>>, new: Option<Arc<F>>) {
    let mut held = handler.lock().unwrap_or_else(PoisonError::into_inner);
    let old = std::mem::replace(&mut *held, new);
    drop(held);
    // Its destructor may run any code.
    drop(old);
}
