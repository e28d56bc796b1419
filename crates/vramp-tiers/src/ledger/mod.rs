//! Budgets of cards, hosts and disks: reservations, and who gets memory next.
//!
//! `core/` decides, `shell/` locks, waits and wakes.

pub mod core;
pub mod shell;
