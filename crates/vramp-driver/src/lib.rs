//! The contract between vramp and a GPU: the trait [`Driver`], with one method for each driver call
//! that vramp makes.
//!
//! `vramp-cuda` implements it for a card, [`sim`] without one. A device returns opaque ids and no
//! raw handles or pointers, so every method is safe to call with any argument: a stale or
//! foreign id is an error of kind [`ErrorKind::InvalidUse`], never undefined behaviour. An
//! implementation has no policy: it does not retry, round or cache.
//!
//! ```
//! use vramp_core::{AddrRange, Bytes};
//! use vramp_driver::{Driver, ErrorKind, MemoryProperties, sim::Simulator};
//!
//! let device = Simulator::builder().memory(Bytes::mib(64)).build();
//! let page = device.info().limits.page;
//!
//! // Reserve addresses, create physical memory, map it there, and make it accessible.
//! let range = AddrRange::new(device.reserve(page * 4, page)?, page * 4);
//! let handle = device.create(range.len, MemoryProperties::DEVICE)?;
//! device.map(range.start, handle)?;
//! device.set_access(range, &[])?;
//!
//! // Work is queued on a stream; an event marks its completion.
//! let (stream, event) = (device.create_stream()?, device.create_event()?);
//! device.fill(stream, range, 0)?;
//! device.record(event, stream)?;
//! device.synchronize_event(event)?;
//! device.unmap(range)?;
//!
//! // An error has the call, the CUDA code, a kind to match on, and a hint.
//! let error = device.create(Bytes::mib(128), MemoryProperties::DEVICE).unwrap_err();
//! assert_eq!((error.kind, error.code), (ErrorKind::OutOfMemory, 2));
//! assert_eq!(
//!     error.to_string(),
//!     "driver call create failed: CUDA_ERROR_OUT_OF_MEMORY (2): 128.00 MiB requested, 56.00 MiB \
//!      free; free memory and retry",
//! );
//! # Ok::<(), vramp_driver::DriverError>(())
//! ```
//!
//! # Rules of virtual memory
//!
//! Every implementation obeys these six rules. `docs/cuda-facts.md` lists their sources.
//!
//! 1. Sizes and addresses of physical memory are multiples of [`Limits::page`], the granularity.
//! 2. A physical handle is mapped only whole, and a mapping is unmapped only whole. One unmap may
//!    cover many adjacent mappings of one reservation.
//! 3. A handle may be mapped at several addresses at once (alias mappings).
//! 4. A new mapping is inaccessible until access is set, even at an address where an older mapping
//!    was accessible. Set-access takes whole mappings of one reservation without gaps.
//! 5. A handle released while mapped lives until its last mapping is unmapped.
//! 6. None of create, map, set-access, unmap and release waits for work in flight. Unmapping memory
//!    that queued work still accesses is a fault that loses the device.
//!
//! # Rules of stream capture
//!
//! 1. Work queued on a capturing stream becomes nodes of a graph and runs only when the graph is
//!    launched. Each node depends on the nodes that [`CaptureInfo::dependencies`] names.
//! 2. [`Driver::record`] on a capturing stream captures those dependencies in the event. A
//!    stream outside that waits for the event joins the capture (a fork); a stream inside adds
//!    them to its dependencies (a join).
//! 3. A capture does not depend on work outside it. Waiting for an event that was recorded outside
//!    is refused and invalidates the capture. So does a query or a synchronise of captured work.
//! 4. Create, map, set-access, unmap, release, and recording on streams outside are legal in every
//!    mode and on every thread. Query and alloc-memory are refused, and invalidate the capture, as
//!    its [`CaptureMode`] says.
//!
//! # Modules
//!
//! - The root: [`Driver`], its ids and argument types, and [`DriverError`].
//! - [`meter`]: a device that counts and times calls.
//! - [`wrapper`]: a device that overrides some calls of another one.
//! - [`sim`]: the simulated GPU, with feature `sim` (default). Without it this crate depends on
//!   neither serde nor TOML.
//!
//! Deliberately absent: policy, retries, logging, environment variables.
#![forbid(unsafe_code)]

mod call;
mod driver;
mod error;
mod ids;
mod info;
pub mod meter;
#[cfg(feature = "sim")]
pub mod sim;
pub mod wrapper;

pub use call::Call;
pub use driver::{DeviceCopy, Driver, HostSlice};
pub use error::{DriverError, DriverResult, ErrorKind};
pub use ids::{
    CaptureInfo, CaptureMode, Event, Graph, GraphExec, GraphNode, Handle, HostBuffer, Stream,
    StreamThread, ThreadNumber,
};
pub use info::{
    Capabilities, DeviceInfo, ExportedHandle, HandleType, Limits, MemoryInfo, MemoryLocation,
    MemoryProperties, PoolUsage,
};
pub use vramp_host::HostMemory;
