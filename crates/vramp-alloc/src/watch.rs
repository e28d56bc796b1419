//! Who is told what happens, and who is asked for memory when it runs short. Never under a lock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use vramp_core::{Bytes, DeviceAddr, Shortage, StreamId};

use crate::Allocation;
use crate::error::Report;

/// Something that happened in an allocator.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Memory was handed out.
    Allocated(&'a Allocation),
    /// Memory was taken back; work of other streams may still use it.
    Freed {
        /// Where it began.
        addr: DeviceAddr,
        /// How long it was.
        len: Bytes,
        /// How much was asked for.
        requested: Bytes,
        /// The stream it was freed on.
        stream: StreamId,
    },
    /// The allocator took physical memory from the card.
    Grown {
        /// How much.
        bytes: Bytes,
    },
    /// The allocator gave physical memory back to the card.
    Shrunk {
        /// How much.
        bytes: Bytes,
    },
    /// Free memory was moved to where it was needed.
    Remapped {
        /// How many chunks.
        chunks: u64,
        /// How much memory.
        bytes: Bytes,
    },
    /// A request could not be served at first.
    Short(&'a Shortage),
    /// A request failed for good.
    OutOfMemory(&'a Report),
}

type Observer = dyn Fn(&Event<'_>) + Send + Sync;
type Handler = dyn Fn(&Shortage) -> bool + Send + Sync;

/// Names what was registered, to take it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Registration(u64);

/// All that is registered with an allocator.
#[derive(Default)]
pub(crate) struct Watchers {
    /// True if there are observers: what a hit looks at.
    watched: AtomicBool,
    lists: RwLock<Lists>,
}

#[derive(Default)]
struct Lists {
    next: u64,
    observers: Vec<(u64, Arc<Observer>)>,
    handlers: Vec<(u64, Arc<Handler>)>,
}

impl Watchers {
    #[inline]
    pub(crate) fn is_watched(&self) -> bool {
        self.watched.load(Ordering::Relaxed)
    }

    pub(crate) fn observe(&self, observer: Arc<Observer>) -> Registration {
        self.change(|lists, number| lists.observers.push((number, observer)))
    }

    pub(crate) fn handle(&self, handler: Arc<Handler>) -> Registration {
        self.change(|lists, number| lists.handlers.push((number, handler)))
    }

    /// True if it was registered.
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
        self.watched.store(!lists.observers.is_empty(), Ordering::Relaxed);
        Registration(number)
    }

    /// Tells every observer, in the order they came.
    pub(crate) fn tell(&self, event: &Event<'_>) {
        if !self.is_watched() {
            return;
        }
        let observers: Vec<_> = {
            let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
            lists.observers.iter().map(|(_, observer)| Arc::clone(observer)).collect()
        };
        observers.iter().for_each(|observer| observer(event));
    }

    /// Asks for memory. True if somebody gave some.
    pub(crate) fn ask(&self, shortage: &Shortage) -> bool {
        let handlers: Vec<_> = {
            let lists = self.lists.read().unwrap_or_else(PoisonError::into_inner);
            lists.handlers.iter().map(|(_, handler)| Arc::clone(handler)).collect()
        };
        let mut given = false;
        for handler in handlers {
            given |= handler(shortage);
        }
        given
    }
}
