//! The native module `vramp._native` of the Python package.
//!
//! 1. `module.rs` opens pools and gives the path of this shared object, which exports the C
//!    interface too.
//! 2. `pool.rs` is a pool, `allocation.rs` a block that frees itself, `stream.rs` says what may be
//!    passed as a stream.
//! 3. `error.rs` converts a failure to the exception of its kind.
//!
//! Every call that may wait for a lock or a driver call runs detached from the interpreter. No lock
//! of vramp is held while Python code runs.
//!
//! Deliberately absent: decisions about memory, and classes that Python can express as well: the
//! exceptions and results are in `python/vramp`.

mod allocation;
mod error;
mod module;
mod pool;
mod stream;
