//! The library that stands between a program and libcuda while `vramp exec` runs it.
//!
//! The dynamic linker loads it before all others (`LD_PRELOAD`). It exports functions of the driver about memory
//! under their own names, and `dlsym`, so that it is found however a program looks for the driver:
//!
//! | how the program reaches a function | what stands in front |
//! |---|---|
//! | linked against libcuda | the exported name |
//! | `dlopen` and `dlsym`, as the CUDA runtime begins | `dlsym` in `lookup.rs` |
//! | `cuGetProcAddress`, as the CUDA runtime goes on | the hook of `cuGetProcAddress` |
//!
//! What a hook does depends on the settings, which `vramp exec` passes in one variable of the
//! environment. Without the variable every call goes to the driver as it is. All other functions of the driver are
//! never seen, virtual memory that a program maps itself passes through.
//!
//! Life of a process: nothing happens before the program's first call of a hook. The first opens the recording and the
//! limit; the first request for memory on a device opens the pool there. A forked child begins anew.
//!
//! It holds no allocator: the pool is libvramp, opened by path and called through the C interface, so that `vramp.torch`
//! and other parts of vramp in the process share it.
//!
//! Cost: a thread-local flag and a call through a pointer for each hook, and what a mode adds: its docs say so.

mod driver;
mod gate;
mod hooks;
mod ledger;
mod limit;
mod lookup;
mod pool;
mod process;
mod record;
mod report;
mod settings;
mod sleep;
