//! Tiers, reservations, buffers and leases.

mod buffers;
mod closing;
mod doors;
mod reservations;
