//! The lock around the ledger: handles, waiting, spilling, and allocators behind a budget.

pub(crate) mod charge;
pub(crate) mod error;
pub(crate) mod growth;
pub(crate) mod manager;
pub(crate) mod manager_config;
pub mod notify;
pub(crate) mod panics;
pub(crate) mod pressure;
pub mod reclaim;
pub(crate) mod reservation;
pub(crate) mod shared;
pub(crate) mod space;
pub mod spill;
pub mod streams;
pub mod tracked;
pub(crate) mod wait;
