//! Tiers, reservations, buffers and leases.

mod buffers;
mod closing;
mod observing;
mod reservations;
mod stores;
mod wrong_calls;
