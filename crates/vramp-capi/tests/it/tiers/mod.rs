//! Tiers, reservations, buffers and leases.

mod buffers;
mod closing;
mod reservations;
mod wrong_calls;
