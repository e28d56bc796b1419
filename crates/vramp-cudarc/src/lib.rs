//! Slices of vramp's memory for [cudarc](https://docs.rs/cudarc): kernels, copies and libraries take them as they take
//! `CudaSlice`.
//!
//! ```no_run
//! use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
//! use vramp_cudarc::{Config, Pool};
//! # fn double() -> cudarc::driver::CudaFunction { unimplemented!() }
//!
//! let context = CudaContext::new(0)?;
//! let pool = Pool::new(&context, Config::default())?;
//! let stream = context.new_stream()?;
//! let input = pool.clone_htod(&stream, &[1.0f32, 2.0, 3.0])?;
//! let mut output = pool.alloc_zeros::<f32>(&stream, input.len())?;
//!
//! let double = double();                     // a function of a module, as always
//! let mut launch = stream.launch_builder(&double);
//! launch.arg(&input).arg(&mut output).arg(&3usize);
//! // SAFETY: the kernel takes two addresses of floats and their number.
//! unsafe { launch.launch(LaunchConfig::for_num_elems(3)) }?;
//! drop(input);                               // in stream order: the kernel still reads it
//! println!("{:?}", stream.clone_dtoh(&output)?);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | cudarc | here | the same |
//! |---|---|---|
//! | `stream.alloc(len)` | [`pool.alloc(&stream, len)`](Pool::alloc) | `unsafe`: the memory is not set |
//! | `stream.alloc_zeros(len)` | [`pool.alloc_zeros(&stream, len)`](Pool::alloc_zeros) | |
//! | `stream.clone_htod(&host)` | [`pool.clone_htod(&stream, &host)`](Pool::clone_htod) | |
//! | `stream.clone_dtod(&slice)` | [`pool.clone_dtod(&stream, &slice)`](Pool::clone_dtod) | from memory of any owner |
//! | `CudaSlice<T>` | [`VrampSlice<T>`] | `DeviceSlice`, `DevicePtr`, `DevicePtrMut`, `PushKernelArg`, `Send`, `Sync`, `Clone` |
//! | `&CudaSlice<T>` | `&VrampSlice<T>` | by deref |
//! | `CudaView`, `CudaViewMut` | the same types | `slice`, `split_at`, `slice_mut`, `transmute` and the rest |
//! | `slice.leak()`, `stream.upgrade_device_ptr` | [`VrampSlice::into_block`], [`Pool::adopt`] | |
//! | `CudaContext`, `CudaStream`, `CudaEvent`, `CudaGraph` | the same types | |
//!
//! `memcpy_htod`, `memcpy_dtoh`, `memcpy_dtod`, `memset_zeros`, `clone_dtoh` of cudarc's streams, and its cuBLAS, cuDNN and
//! other libraries, take slices by these traits. Limits, statistics and shortages are those of [`Pool::allocator`].
//!
//! # Order of streams
//!
//! A slice is allocated, used and freed in the order of its stream. With several streams cudarc records a read and a write
//! event of each slice, and lets other streams and the drop wait for them; slices of vramp record and wait with the same
//! events. Beyond what `CudaSlice` does,
//!
//! - the first use on another stream waits for the allocation, because memory that the slice's stream freed before may
//!   still be in use there;
//! - a drop also waits for streams that were dropped before it while their work goes on;
//! - the events are made with the first use, so that an allocation costs nothing of them.
//!
//! As with `CudaSlice`, **one** event stands for the last read. Where two streams read a slice at once, the order of the
//! drop is only known for the one that was queued last: record both with [`Pool::record_use`]. So too for uses that cudarc
//! does not record: after `disable_event_tracking`, through a raw pointer, and by other libraries. The memory is then
//! reused once that work is over.
//!
//! # Graphs
//!
//! As with `CudaSlice`, captures need `disable_event_tracking`. Slices from before a capture may be used in it, and must
//! not be dropped before its graph. A capture may make slices of its own if the pool's allocator knows of it: they come
//! from a graph arena, and the graph keeps its memory.
//!
//! ```no_run
//! # use cudarc::driver::{CudaContext, sys};
//! # use vramp_cudarc::{Config, Pool, graph::ArenaConfig};
//! # let context = CudaContext::new(0)?;
//! # let pool = Pool::new(&context, Config::default())?;
//! # let stream = context.new_stream()?;
//! let arena = pool.allocator().graph_arena(ArenaConfig::default())?;
//! stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
//! let capture = pool.allocator().attach_capture(pool.stream_id(&stream)?, &arena)?;
//! // ... slices that live for the capture only, and those that the graph writes
//! let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0))?;
//! let hold = capture.detach();                // keep it as long as the graph
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Whether a stream captures is not asked for each allocation, which would take 17 times as long as all the rest of it. So a
//! slice made in a capture that was not attached is not refused. It is memory of the pool like any other, and must outlive
//! the graph too.
//!
//! # Streams and contexts
//!
//! A [`Pool`] is of one device's primary context, which `CudaContext::new` returns; other contexts, streams of other
//! contexts and `per_thread_stream` are refused by errors that say what to do. The pool holds a stream from its first
//! slice until no other code does: see [`Pool`].
//!
//! # What is refused, and why
//!
//! A `CudaSlice` frees its memory by a call of the driver. So none is ever given away or lent mutably: `mem::swap` would do
//! to lose one. A library that wants to own a `CudaSlice`, as candle's storage does, cannot be given memory of vramp.
//! Do not pass the address of a slice to `upgrade_device_ptr`: dropping the result frees memory that is not the driver's.
//!
//! # Cost
//!
//! A cache hit and its drop take about as long as those of `Allocator::malloc_guard`, and make no driver call: example
//! `hit` measures both, beside `CudaSlice`. The first use of a slice makes two events while cudarc tracks uses, as
//! each `CudaSlice` does when it is allocated.
//!
//! # Versions, and machines without a card
//!
//! It is for cudarc 0.19, whose features are the program's: its own dependency on cudarc names the version of CUDA and the
//! libraries. Without a version cudarc takes that of `nvcc`, or the newest; `CUDARC_CUDA_VERSION=13000` chooses one for a
//! build.
//!
//! cudarc loads libcuda at its first call, and panics if there is none: ask `cudarc::driver::sys::is_culib_present` before.
//! vramp's simulated cards have no libcuda, so cudarc does not run on them.
//!
//! # What an allocator trait of cudarc would need
//!
//! All memory of cudarc could come from vramp, and candle's with it, if a context could be given an allocator:
//!
//! 1. a trait, `Send + Sync`, with `alloc(&self, bytes, &CudaStream) -> Result<CUdeviceptr, DriverError>` and
//!    `free(&self, CUdeviceptr, bytes, &CudaStream)`: in the order of the stream, and with the length at the free;
//! 2. a place for it in the context, set before the first allocation;
//! 3. in `CudaSlice` the allocator that it came from, which its drop calls behind the waits that it makes today. That would also
//!    answer `leak` and `upgrade_device_ptr`, which would take and return it;
//! 4. a call when a `CudaStream` is destroyed, so that an allocator may keep memory by stream without holding streams;
//! 5. that the constructors order the first use on another stream, as described above.
//!
//! # candle, burn and cubecl
//!
//! They allocate inside: candle by `CudaStream::alloc`, whose `CudaSlice` its storage owns, and cubecl by `GpuStorage`, which
//! calls `cuMemAllocAsync`. cubecl's trait `ComputeStorage` is public, but `cubecl-cuda` makes its `GpuStorage` in the
//! constructor of each stream and its server is of that type, so no other storage can be put in its place without a
//! fork. `vramp exec --pool` serves such programs as they are, by the driver's calls.
#![deny(unsafe_op_in_unsafe_fn)]

mod error;
mod pool;
mod slice;

pub use error::{AdoptError, OpenError, SliceError};
pub use pool::Pool;
pub use slice::VrampSlice;
pub use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, Config, device, graph};
