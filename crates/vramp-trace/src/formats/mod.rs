//! The file formats: PyTorch snapshots, RMM logs, `.vtrace` files and Perfetto timelines.
//!
//! 1. [`read()`] detects the format by the first bytes, and decompresses (`compressed.rs`) or
//!    unpacks (`archive.rs`). `foreign.rs` names files of other kinds.
//! 2. `pickle/`, `rmm.rs` and `vtrace/` parse. All of them read through an `Input`, which counts
//!    bytes against [`ReadLimits`], and fill a `TraceBuilder`.
//! 3. A writer validates the whole trace before it writes the first byte.
//!
//! Compiled only with the feature `formats`.

mod archive;
mod builder;
mod compressed;
mod error;
mod foreign;
mod input;
mod memory;
mod perfetto;
mod pickle;
mod read;
mod rmm;
mod validate;
mod vtrace;

pub use error::{ReadError, ReadLimits};
pub use read::{Format, read, read_trace};
