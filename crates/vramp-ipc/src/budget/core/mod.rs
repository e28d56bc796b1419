//! Pure parts of budgets: the numbers of the ledger, the way to a claim, and the order of requests.
//!
//! No file, process or clock.

pub mod claim;
#[cfg(test)]
mod model;
pub mod order;
pub mod word;
