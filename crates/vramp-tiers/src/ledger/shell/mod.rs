//! The lock around the ledger, and who waits at it.

pub(crate) mod cancel;
pub(crate) mod channel;
pub(crate) mod charge;
pub(crate) mod error;
pub(crate) mod manager;
#[cfg(all(test, loom))]
mod models;
pub(crate) mod pressure;
pub(crate) mod request;
pub(crate) mod reservation;
pub(crate) mod seat;
pub(crate) mod shared;
pub(crate) mod space;
pub(crate) mod spill;
pub(crate) mod streams;
pub(crate) mod tracked;

pub use cancel::CancelToken;
pub use channel::{
    EventNotifier, Listener, NotificationChannel, NotifyOnExit, WaitStatus, notify_on_exit,
};
pub use charge::{Charge, Origin};
pub use error::{MergeRefused, NotMerged, Refusal, ReserveError, SpaceFull, StuckOwner};
pub use manager::{DeadlockCheck, ManagerConfig, ReservationManager};
pub use pressure::{PressureWatch, Subscription};
pub use request::{Deadline, RequestBuilder};
pub use reservation::Reservation;
pub use space::MemorySpace;
pub use spill::{Shortage, SpillAndRetry, Spiller, SpillerRegistration, Spilling};
pub use streams::{Acquire, BorrowedStream, StreamPool, StreamPoolError};
pub use tracked::{
    AttachError, BackOff, Count, Counter, Counts, Fail, LimitRule, MallocError, MemoryShortage,
    OutOf, OutOfMemory, Policies, Remedy, Retries, Scope, Tracked, TrackedAllocation,
    TrackedFreeError,
};
