//! The C interface of vramp and the shared library `libvramp.so`, which C and C++ programs link
//! to and PyTorch loads.
//!
//! Life of a call:
//!
//! 1. `interface.rs`, `graphs.rs` or `torch/mod.rs` takes plain numbers and pointers from outside. Nothing of
//!    ours is ever reached through a pointer of the caller's.
//! 2. `handles.rs` turns a number into an allocator and keeps it open until the call is over.
//! 3. `addresses.rs` turns an address into the allocation that the Rust interface asks for.
//!    `captures.rs` does the same for arenas, graphs and leases.
//! 4. `context.rs` makes the call.
//! 5. `status.rs` turns what went wrong into a code, keeps the whole text for the thread, and lets
//!    no panic out.
//!
//! Deliberately absent: policy, and any way to make the library read or write through an address of
//! device memory. The environment is read in one place, for PyTorch (`torch/settings.rs`).

pub mod abi;
mod addresses;
mod captures;
mod context;
mod device;
pub mod graphs;
mod handles;
pub mod interface;
mod options;
mod pointers;
mod status;
pub mod torch;
