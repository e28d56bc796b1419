//! The native module `vramp._native` of the Python package.
//!
//! 1. `module.rs` opens pools and gives the path of this shared object, which exports the C
//!    interface too.
//! 2. `pool.rs` is a pool, `allocation.rs` a block that frees itself, `stream.rs` says what may be
//!    passed as a stream.
//! 3. `ipc.rs` shares blocks with other processes, `pin.rs` keeps memory at its addresses, and `owner.rs`
//!    is what both kinds of memory have in common for arrays.
//! 4. `array.rs` lets other libraries access a block without a copy, `measure.rs` reads peaks of a part
//!    of a program, and `analysis.rs` replays and explains recordings.
//! 5. `shortage.rs` calls functions of the program that free memory before a request fails.
//!    `turns.rs` lets processes take turns at a card, `budget.rs` share its memory. `kv.rs` has arenas for caches.
//! 6. `error.rs` converts a failure to the exception of its kind, `arguments.rs` reads arguments, and
//!    `python.rs` is what several files ask of the interpreter. `ending.rs` is for threads inside of the
//!    library when the interpreter ends.
//!
//! The methods of a class that other classes name are in a file of their own, such as `pool/methods.rs`:
//! they return objects of those classes.
//!
//! Every call that may wait for a lock or a driver call runs detached from the interpreter. A cache
//! hit stays attached: it takes only locks that are held for a few instructions, by threads that do
//! not wait for the interpreter meanwhile. No lock of vramp is held while Python code runs.
//!
//! Deliberately absent: decisions about memory, and classes that Python can express as well: the
//! exceptions and results are in `python/vramp`.

mod allocation;
mod analysis;
mod arguments;
mod array;
mod budget;
mod calls;
mod dlpack;
mod ending;
mod error;
mod ipc;
mod kept;
mod kv;
mod layout;
mod measure;
mod module;
mod owner;
mod pin;
mod pool;
mod python;
mod regions;
mod shortage;
mod sleep;
mod stream;
mod tiers;
mod turns;
