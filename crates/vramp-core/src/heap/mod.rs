//! Small and medium blocks: every stream has a heap of slabs, cut at 512 bytes.
//!
//! A slab is a used region of the pool, so all sizes draw on the same chunks. Within a slab free
//! pieces coalesce; the heap's free pieces of all slabs are binned by size in 32nds of a power of
//! two, so finding one takes two bit scans. A heap is a value of its own, so that the shell can lock
//! each one apart from the pool: a hit touches nothing that streams share.
//!
//! The larger the heap, the larger its slabs; what it does not use it sheds when the pool is short
//! ([`StreamHeap::shed`]): whole slabs, and large free pieces cut out of them.
//!
//! Overhead: a request is rounded up to 512 bytes, so a block wastes less than that.
//!
//! One block: [`StreamHeap::take`] finds a free piece (`bins.rs`) and cuts it (`pieces.rs`); the
//! frees coalesce it with its neighbours; slabs that are not needed go back to the pool (`slabs.rs`,
//! `shed.rs`). `check.rs` has the heap's part of the audit and the census. Each module uses only
//! those before it: `pieces`, `bins`, `slabs`, `stream_heap`, then `shed` and `check`; all may use
//! the pool, which uses none of them.

mod bins;
mod check;
mod pieces;
mod shed;
mod slabs;
mod stream_heap;

pub use stream_heap::{Freed, StreamHeap};
