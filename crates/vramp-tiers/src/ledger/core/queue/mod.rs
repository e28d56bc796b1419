//! The wait queue, claims and rounds of spilling, and deadlock detection.

mod audit;
mod claim;
mod deadlock;
mod order;
mod request;
mod spill_rounds;
mod wait_queue;

pub use deadlock::{CycleMember, Deadlock, Resolution};
pub use request::{
    Granted, Grants, Overtaking, Priority, QueueConfig, Request, SubmitError, Submitted,
    UnknownWaiter, WaiterId,
};
pub use spill_rounds::{SpillResult, SpillRounds};
pub use wait_queue::WaitQueue;
