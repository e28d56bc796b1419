//! The device behind libcuda: [`CudaDriver`] does what [`vramp_driver::Driver`] promises, on a
//! card.
//!
//! Life of a device:
//!
//! 1. [`CudaDriver::open`] loads libcuda at run time, keeps the card's primary context and makes a
//!    stream-ordered pool of its own. No driver, an old one, or no card is an [`OpenError`].
//! 2. Every call makes the context current on the calling thread, turns ids into the driver's
//!    handles, refuses what is not ours, and then makes one driver call.
//! 3. A code after which the context is useless loses the device: each later call fails at once
//!    with the same code.
//! 4. Dropping the device releases what is left, unless work is still in flight; then memory is
//!    left to the end of the process, because unmapping under running work is a fault.
//!
//! This is the only crate with raw CUDA calls. A raw handle or pointer never leaves it.
//! Deliberately absent: policy, retries, kernels, environment variables.

mod addresses;
mod copy;
mod device;

mod error;
mod graph;
mod host;
mod identity;
mod load;
mod memory;
mod node_ids;
mod pool;
mod stream;
mod sys;
mod table;
mod teardown;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod layout;
#[cfg(test)]
mod tests;

pub use device::{CudaDriver, DeviceSummary, devices};
pub use error::{EntryError, OpenError};
