//! Tiers, reservations, buffers and leases.

mod buffers;
mod closing;
mod observing;
mod paying;
mod reservations;
mod stores;
mod wrong_calls;
