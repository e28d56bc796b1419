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
//! # Cost, and how it grows
//! A call of a hook costs a thread-local flag and a call through a pointer, and what a mode adds:
//!
//! | of what | each costs | what is left when it ends |
//! |---|---|---|
//! | live blocks, n | O(log n) and a lock a call, about 100 bytes | nothing |
//! | recorded calls | 48 bytes of the spool, tens of nanoseconds a frame | the spool, until it is converted |
//! | different stacks | 8 bytes a frame, in memory and in the spool; the first 1,048,576 | as long as the process |
//! | loaded files of code | their unwind tables are found again after each load and unload | a record each in the spool |
//! | streams, threads, devices | nothing; counters of the gate are 64, whatever the threads | nothing |
//! | blocks given to other processes | a file of 170 bytes in the folder of the command | removed with the block |
//! | processes of a command | a spool and a report each | removed with the command |
//!
//! A full disk ends the recording and not the program. A full card, a full group and a slow member of it are the pool's to
//! report: a request waits 5 s, and with `--sleepable` up to 10 minutes while others can give way. A program that cannot
//! fall asleep within 30 s goes on as before.

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
