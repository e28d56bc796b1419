//! The wait queue, claims and rounds of spilling, and deadlock detection.

mod claim;
mod deadlock;
mod request;
mod wait_queue;

pub use claim::{SpillResult, SpillRounds};
pub use deadlock::{CycleMember, Deadlock, Resolution};
pub use request::{
    Granted, Grants, Overtaking, Priority, QueueConfig, Request, SubmitError, Submitted,
    UnknownWaiter, WaiterId,
};
pub use wait_queue::WaitQueue;
