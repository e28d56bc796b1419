//! The C interface of vramp and the shared library `libvramp.so`, which C and C++ programs link
//! and PyTorch loads.
//!
//! Steps of a call:
//!
//! 1. `interface.rs`, `queries.rs`, `graphs.rs`, `kv.rs`, `budget.rs`, `sharing.rs`, `kept.rs`, `sleep.rs`, `tiers.rs` or
//!    `torch/mod.rs` receives ids and pointers. An id is looked up, never dereferenced.
//! 2. `handles.rs` looks up the allocator; `gate.rs` keeps it open until the call returns.
//! 3. `addresses.rs` looks up the allocation at an address. `captures.rs` looks up arenas, graphs
//!    and leases, `sharing/tables.rs` exports, imports and pins, `kept/tables.rs` keepers and kept memory,
//!    `tiers/tables.rs` reservations, buffers and leases.
//! 4. `session.rs` calls the Rust interface.
//! 5. `status.rs` converts an error to a status code, stores its message for the thread, and
//!    catches panics.
//!
//! The functions are declared in `include/vramp.h`, which is generated from this crate. Rust
//! programs use the crate `vramp` instead. The example shows the error handling:
//!
//! ```
//! use vramp_capi::abi::{vramp_allocator_t, vramp_status_t::*, vramp_stream_t};
//! use vramp_capi::interface::*;
//!
//! let mut allocator = vramp_allocator_t::default();
//! let mut stream = vramp_stream_t::default();
//! let mut address = std::ptr::null_mut();
//! // SAFETY: the texts are zero-terminated and the results outlive the calls.
//! unsafe {
//!     let opened = vramp_open(c"sim:h200".as_ptr(), c"limit=64MiB".as_ptr(), &mut allocator);
//!     assert_eq!(opened, VRAMP_OK);
//!     assert_eq!(vramp_stream_create(allocator, &mut stream), VRAMP_OK);
//!     assert_eq!(vramp_malloc(allocator, 1 << 20, stream, &mut address), VRAMP_OK);
//!
//!     // Above the limit: a status, a null address, and a message for this thread.
//!     let mut large = std::ptr::null_mut();
//!     let status = vramp_malloc(allocator, 1 << 30, stream, &mut large);
//!     assert_eq!(status, VRAMP_ERROR_OUT_OF_MEMORY);
//!     let message = std::ffi::CStr::from_ptr(vramp_last_error());
//!     assert!(message.to_str().is_ok_and(|text| text.contains("limit of 64.00 MiB")));
//! }
//! assert_eq!(vramp_free(allocator, address, stream), VRAMP_OK);
//! // A double free is an error and changes nothing.
//! assert_eq!(vramp_free(allocator, address, stream), VRAMP_ERROR_UNKNOWN_POINTER);
//! assert_eq!(vramp_close(allocator), VRAMP_OK);
//! ```
//!
//! Deliberately absent: policy, and access to device memory. The environment is read in one place
//! (`environment.rs`).

pub mod abi;
mod addresses;
mod brief_lock;
pub mod budget;
mod captures;
mod device;
mod environment;
mod exchange;
mod gate;
pub mod graphs;
mod handles;
pub mod host;
mod ids;
pub mod interface;
pub mod kept;
pub mod kv;
mod options;
mod pointers;
mod print;
pub mod process;
pub mod queries;
mod region_disk;
mod regions;
mod session;
pub mod sharing;
pub mod sleep;
mod slot;
mod status;
mod sync;
#[doc(hidden)]
pub mod testing;
mod threads;
pub mod tiers;
pub mod torch;
mod writing;

/// Keeps a call that is under way from aborting the process when the host has no memory left.
#[global_allocator]
static MEMORY: vramp_host::HostReserve = vramp_host::HostReserve;
