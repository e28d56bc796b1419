//! A CUDA card as a [`vramp_driver::Driver`], through libcuda, which is loaded at run time.
//!
//! ```no_run
//! use vramp_cuda::{CudaDriver, OpenError};
//! use vramp_driver::Driver;
//!
//! match CudaDriver::open(0) {
//!     Ok(device) => println!("{}, {}", device.info().name, device.memory_info()?.free),
//!     Err(OpenError::NoLibrary { tried }) => println!("no NVIDIA driver: {}", tried.join("; ")),
//!     Err(error) => println!("{error}"),
//! }
//! # Ok::<(), vramp_driver::DriverError>(())
//! ```
//!
//! Life cycle of a device:
//!
//! 1. [`CudaDriver::open`] loads libcuda, retains the card's primary context and creates a
//!    stream-ordered pool for this device. A missing or old driver, or a missing card, is an
//!    [`OpenError`].
//! 2. Each call makes the context current on the calling thread, translates ids to raw handles,
//!    refuses ids and addresses that are not the device's, and makes one driver call. The rules are
//!    those of [`vramp_driver`].
//! 3. A code that invalidates the context loses the device: each later call fails at once with the
//!    same code.
//! 4. Dropping the device frees everything that is left, unless work is in flight: unmapping under
//!    running work is a fault, so the memory then stays allocated until the process ends.
//!
//! A symbol that the installed libcuda lacks turns off a
//! [capability](vramp_driver::Capabilities); its calls fail as not supported.
//!
//! This is the only crate with raw CUDA calls. No raw handle or pointer leaves it but that of a
//! stream, for code that queues work of its own ([`CudaDriver::raw_stream`]).
//!
//! Deliberately absent: policy, retries, kernels, environment variables.

mod addresses;
mod adopted;
mod capture_mode;
mod copy;
mod device;
mod driver;
mod error;
mod graph;
mod host;
mod identity;
mod load;
mod memory;
mod node_ids;
mod open;
mod pinned;
mod pool;
mod raw;
mod stream;
mod sys;
mod table;
mod teardown;
mod turns;
mod uses;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod layout;
#[cfg(test)]
mod tests;

pub use device::CudaDriver;
pub use error::{EntryError, OpenError};
pub use open::{DeviceSummary, devices};
