//! Observers of an allocator's events, and handlers that free memory when a request runs short.
//!
//! Both run without a lock, on the thread that caused the event.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use vramp_core::{Bytes, DeviceAddr, StreamId};

pub use vramp_core::Shortage;

use crate::Allocation;
use crate::error::OutOfMemoryReport;

/// Something that happened in an allocator.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A block was allocated.
    Allocated(&'a Allocation),
    /// A block was freed; work of other streams may still use it.
    Freed {
        /// Address of the block.
        addr: DeviceAddr,
        /// Length of the block.
        len: Bytes,
        /// Bytes that were requested.
        requested: Bytes,
        /// Stream that it was freed on.
        stream: StreamId,
    },
    /// The allocator reserved physical memory of the card.
    Grown {
        /// Bytes reserved.
        bytes: Bytes,
    },
    /// The allocator returned physical memory to the card.
    Shrunk {
        /// Bytes returned.
        bytes: Bytes,
    },
    /// Free chunks were remapped to build a larger block.
    Remapped {
        /// Chunks moved.
        chunks: u64,
        /// Bytes moved.
        bytes: Bytes,
    },
    /// A request found no memory. It may still succeed after handlers ran.
    Short(&'a Shortage),
    /// A request failed.
    OutOfMemory(&'a OutOfMemoryReport),
}

type Observer = dyn Fn(&Event<'_>) + Send + Sync;
type Handler = dyn Fn(&Shortage) -> bool + Send + Sync;

/// Handle of a registered observer or handler, for
/// [`Allocator::unregister`](crate::Allocator::unregister).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Registration(u64);

/// The observers and handlers of an allocator.
#[derive(Default)]
pub(crate) struct Observers {
    /// True if there are observers. A cache hit reads only this.
    observed: AtomicBool,
    lists: RwLock<Lists>,
}

#[derive(Default)]
struct Lists {
    next: u64,
    observers: Vec<(u64, Arc<Observer>)>,
    handlers: Vec<(u64, Arc<Handler>)>,
}

impl Observers {
    #[inline]
    pub(crate) fn is_observed(&self) -> bool {
        self.observed.load(Ordering::Relaxed)
    }

    pub(crate) fn add_observer(&self, observer: Arc<Observer>) -> Registration {
        self.change(|lists, number| lists.observers.push((number, observer)))
    }

    pub(crate) fn add_handler(&self, handler: Arc<Handler>) -> Registration {
        self.change(|lists, number| lists.handlers.push((number, handler)))
    }

    /// Removes an observer or handler. Returns false if it was removed before.
    pub(crate) fn remove(&self, Registration(gone): Registration) -> bool {
        let mut found = false;
        self.change(|lists, _| {
            let before = lists.observers.len() + lists.handlers.len();
            lists.observers.retain(|&(number, _)| number != gone);
            lists.handlers.retain(|&(number, _)| number != gone);
            found = lists.observers.len() + lists.handlers.len() < before;
        });
        found
    }

    fn change(&self, change: impl FnOnce(&mut Lists, u64)) -> Registration {
        let mut lists = self.lists.write().unwrap_or_else(PoisonError::into_inner);
        let number = lists.next;
        lists.next += 1;
        change(&mut lists, number);
        self.observed.store(!lists.observers.is_empty(), Ordering::Relaxed);
        Registration(number)
    }

    /// Calls every observer, in order of registration.
    pub(crate) fn notify(&self, event: &Event<'_>) {
        if !self.is_observed() {
            return;
        }
        let observers: Vec<_> = {
            let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
            lists.observers.iter().map(|(_, observer)| Arc::clone(observer)).collect()
        };
        observers.iter().for_each(|observer| observer(event));
    }

    /// Calls every handler, in order of registration. Returns true if one freed memory.
    pub(crate) fn run_handlers(&self, shortage: &Shortage) -> bool {
        let handlers: Vec<_> = {
            let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
            lists.handlers.iter().map(|(_, handler)| Arc::clone(handler)).collect()
        };
        let mut freed = false;
        for handler in handlers {
            freed |= handler(shortage);
        }
        freed
    }
}
