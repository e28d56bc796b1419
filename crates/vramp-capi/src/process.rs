//! The allocators of this process for a program in Rust that exports the C interface too: the
//! Python package.
//!
//! 1. [`OpenAllocator::shared`] returns the allocator of a device that C and PyTorch use as well, and
//!    [`OpenAllocator::open`] one of the caller's own. Both are in the table of handles, so a call on
//!    a closed one is an error.
//! 2. A call looks the allocator up and keeps it open until it returns.
//! 3. [`OpenAllocator::close`] waits for calls in progress and returns all memory to the device.
//!
//! Blocks are in the allocator's one map of addresses: what one interface allocates, another frees.
//!
//! Deliberately absent: objects that own blocks, and the interpreter.

mod buffers;
mod exports;
mod regions;
mod sharing;

use std::ffi::c_int;
use std::sync::Arc;

pub use crate::regions::{HostLoan, PinnedMemory};
pub use buffers::SharedTiers;
pub use exports::{Exports, NotClosed};
pub use regions::{
    ScopeTarget, begin_scope_of_region, end_scope_of_region, set_default_region_disk,
    set_region_disk,
};
pub use sharing::{AccessChange, ImportedBlock, PinnedRange, SharedBlock, Sharing, SharingState};
pub use vramp_alloc::device::HandleType;
use vramp_alloc::observe::{Registration, Shortage};
pub use vramp_alloc::stats::{MemoryStats, ScopeId, ScopePeaks, Stats};
use vramp_driver::{DeviceInfo, MemoryInfo};

use crate::abi::{vramp_allocator_t, vramp_stream_t};
use crate::context::Context;
use crate::device;
use crate::environment::variable;
use crate::handles;
use crate::options::Options;
use crate::status::catch_failure;
pub use crate::status::{CallResult, Failure, Kind, Room, check_fork};
use crate::torch::{open, snapshot};

/// An allocator that was opened in this process. A copy names the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OpenAllocator(pub(crate) vramp_allocator_t);

/// A stream that memory is used on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamName {
    /// Number of a `cudaStream_t`. Zero is the legacy default stream.
    Raw(u64),
    /// A stream that [`OpenAllocator::create_stream`] returned.
    Created(vramp_stream_t),
}

/// A block that was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Address of its first byte.
    pub addr: u64,
    /// Usable bytes: those requested, rounded up.
    pub len: u64,
    /// True for a block of PyTorch's small pool: up to 1 MiB, or among such blocks.
    pub is_small: bool,
}

/// Maps the host's memory to the simulated cards that are opened in this process from now on, so that
/// the process may access what it allocates there.
pub fn map_simulated_cards() {
    device::map_simulated();
}

/// Returns why the machine has no card that this process may use. `None` if it has one.
pub fn missing_card() -> Option<String> {
    match vramp_cuda::devices() {
        Ok(found) if found.is_empty() => Some(vramp_cuda::OpenError::NoDevice.to_string()),
        Ok(_) => None,
        Err(error) => Some(error.to_string()),
    }
}

/// Starts to record the last `events` events, 40 bytes each, of each device that [`OpenAllocator::shared`]
/// has opened or will open. Zero stops the recordings.
///
/// # Errors
/// More than 10,000,000 events.
pub fn record_history_of_devices(events: u32) -> CallResult<()> {
    catch_failure(|| snapshot::record_history_of_devices(events))
}

/// Writes blocks, segments and the recorded history of these devices to one file, each under its number: a
/// timeline for Perfetto if the path ends with `.json`, else a snapshot for PyTorch's viewer.
///
/// # Errors
/// The file cannot be written.
pub fn snapshot_of_devices(path: &str) -> CallResult<()> {
    catch_failure(|| snapshot::snapshot_of_devices(path))
}

impl OpenAllocator {
    /// Returns the allocator of device number `device` that C, C++ and PyTorch share. The first call
    /// opens it, with the settings of `VRAMP_CONF`. On a machine without a card it is simulated.
    ///
    /// # Errors
    /// The settings are invalid, or the device cannot be opened.
    pub fn shared(device: u32) -> CallResult<OpenAllocator> {
        let device = c_int::try_from(device).unwrap_or(c_int::MAX);
        Ok(OpenAllocator(catch_failure(|| open::shared_allocator(device))?))
    }

    /// Returns the allocator of device number `device` that C, C++ and PyTorch share. `None` if no memory of
    /// the device was used yet.
    ///
    /// # Errors
    /// The process is a forked child.
    pub fn opened(device: u32) -> CallResult<Option<OpenAllocator>> {
        let device = c_int::try_from(device).unwrap_or(c_int::MAX);
        Ok(catch_failure(|| open::opened_allocator(device))?.map(OpenAllocator))
    }

    /// Opens an allocator of the caller's own, as `vramp_open` does.
    ///
    /// # Errors
    /// The device or an option is invalid, or the device cannot be opened.
    pub fn open(device: &str, options: &str) -> CallResult<OpenAllocator> {
        let opened = catch_failure(|| {
            check_fork()?;
            let options = Options::parse(options)?;
            handles::insert(Arc::new(Context::open(device, &options, None, variable)?))
        });
        Ok(OpenAllocator(opened?))
    }

    /// Returns the handle for the C interface.
    pub fn handle(self) -> vramp_allocator_t {
        self.0
    }

    /// Closes the allocator: waits for its streams and for calls in progress, and returns all memory
    /// to the device, also that of live blocks.
    ///
    /// # Errors
    /// It is closed already, serves PyTorch, or a stream captures a graph.
    pub fn close(self) -> CallResult<()> {
        catch_failure(|| handles::close(self.0))
    }

    #[inline]
    fn with<R>(self, call: impl FnOnce(&Context) -> CallResult<R>) -> CallResult<R> {
        catch_failure(|| handles::with(self.0, call))
    }

    /// Allocates at least `size` bytes for work on `stream`.
    ///
    /// # Errors
    /// Out of memory, with the report; or as of `vramp_malloc`.
    ///
    /// # Safety
    /// On a card, a raw stream is null or a stream of the device's primary context that lives until
    /// it is forgotten or the allocator is closed.
    #[inline]
    pub unsafe fn malloc(self, size: u64, stream: StreamName) -> CallResult<Block> {
        self.with(|context| {
            // SAFETY: this function's contract is the same.
            let stream = unsafe { context.named(stream) }?;
            context.place(size, stream)
        })
    }

    /// Allocates a block as [`OpenAllocator::malloc`] does if the thread or the stream has one and no lock
    /// has to be taken that is held during driver calls or while Python runs. `None` in all other cases,
    /// errors included: then call [`OpenAllocator::malloc`] without the interpreter's lock.
    #[inline]
    pub fn malloc_at_hand(self, size: u64, stream: StreamName) -> Option<Block> {
        handles::with(self.0, |context| Ok(context.place_at_hand(size, stream))).ok().flatten()
    }

    /// Frees a block as [`OpenAllocator::free`] does, under the conditions of
    /// [`OpenAllocator::malloc_at_hand`]. Returns false if it did nothing.
    #[inline]
    pub fn free_at_hand(self, addr: u64, stream: StreamName) -> bool {
        handles::with(self.0, |context| Ok(context.free_at_hand(addr, stream))).unwrap_or(false)
    }

    /// Returns true if the process may access the memory at an address.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn is_host_memory(self, addr: u64) -> CallResult<bool> {
        self.with(|context| Ok(context.is_host_memory(addr)))
    }

    /// Returns the address of a stream as a number, for other libraries. `None` on the simulator.
    ///
    /// # Errors
    /// The stream is unknown.
    pub fn stream_number(self, stream: vramp_stream_t) -> CallResult<Option<u64>> {
        self.with(|context| Ok(context.stream_number(context.stream(stream)?)))
    }

    /// Makes later work on `stream` wait for the work queued on `before` so far. Does not block the
    /// host.
    ///
    /// # Errors
    /// A stream is unknown or captures a graph, or a driver call failed.
    ///
    /// # Safety
    /// As of [`OpenAllocator::malloc`].
    pub unsafe fn order(self, stream: StreamName, before: StreamName) -> CallResult<()> {
        self.with(|context| {
            // SAFETY: this function's contract is the same.
            let stream = unsafe { context.named(stream) }?;
            // SAFETY: as above.
            let before = unsafe { context.named(before) }?;
            if stream == before { Ok(()) } else { context.order(stream, before) }
        })
    }

    /// Forgets a raw stream, which its owner may destroy then. Never waits. Nothing happens if it was
    /// not used.
    ///
    /// # Errors
    /// The stream captures a graph.
    pub fn forget_raw(self, raw: u64) -> CallResult<()> {
        self.with(|context| match context.adopted_before(raw) {
            Some(stream) => context.forget(stream),
            None => Ok(()),
        })
    }

    /// Begins to measure peaks.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn begin_scope(self) -> CallResult<ScopeId> {
        self.with(|context| Ok(context.allocator().begin_scope()?))
    }

    /// Returns the peaks since a scope began. `None` once it ended.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn scope_peaks(self, scope: ScopeId) -> CallResult<Option<ScopePeaks>> {
        self.with(|context| Ok(context.allocator().scope_peaks(scope)?))
    }

    /// Ends a scope and returns its peaks. `None` if it has ended.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn end_scope(self, scope: ScopeId) -> CallResult<Option<ScopePeaks>> {
        self.with(|context| Ok(context.allocator().end_scope(scope)?))
    }

    /// Frees the block at an address, whichever interface allocated it. All work on it must be
    /// queued on `stream` or recorded. `cudaStreamPerThread` means the default stream of the block's thread,
    /// and that of the calling one.
    ///
    /// # Errors
    /// No live block begins there; nothing changes.
    ///
    /// # Safety
    /// As of [`OpenAllocator::malloc`].
    #[inline]
    pub unsafe fn free(self, addr: u64, stream: StreamName) -> CallResult<()> {
        self.with(|context| {
            // SAFETY: this function's contract is the same.
            unsafe { context.free_named(addr, stream) }
        })
    }

    /// Records that work queued on `stream` so far uses a block. No driver call.
    ///
    /// # Errors
    /// No live block begins there.
    ///
    /// # Safety
    /// As of [`OpenAllocator::malloc`].
    pub unsafe fn record_use(self, addr: u64, stream: StreamName) -> CallResult<()> {
        self.with(|context| {
            // SAFETY: this function's contract is the same.
            let stream = unsafe { context.named(stream) }?;
            context.record_use(addr, stream)
        })
    }

    /// Creates a stream on the device. One driver call.
    ///
    /// # Errors
    /// The driver's.
    pub fn create_stream(self) -> CallResult<vramp_stream_t> {
        self.with(|context| Ok(context.handle_of(context.create_stream()?)))
    }

    /// Forgets a stream that was created, and destroys it. Never waits.
    ///
    /// # Errors
    /// As of `vramp_stream_forget`.
    pub fn forget_stream(self, stream: vramp_stream_t) -> CallResult<()> {
        self.with(|context| context.forget(context.stream(stream)?))
    }

    /// Returns the counts so far.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn stats(self) -> CallResult<Stats> {
        self.with(|context| context.total_stats())
    }

    /// Returns the statistics that PyTorch has, by its names. O(n) in the regions of the pool.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn memory_stats(self) -> CallResult<MemoryStats> {
        self.with(Context::memory_stats)
    }

    /// Sets all peaks to the current values, those of regions as well.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn reset_peaks(self) -> CallResult<()> {
        self.with(|context| {
            context.reset_peaks();
            Ok(())
        })
    }

    /// Returns free and total memory of the card. One driver call.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn memory_info(self) -> CallResult<MemoryInfo> {
        self.with(|context| Ok(context.allocator().driver().memory_info()?))
    }

    /// Returns identity, limits and capabilities of the device.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn device(self) -> CallResult<DeviceInfo> {
        self.with(|context| Ok(context.allocator().driver().info().clone()))
    }

    /// Returns the limit of reserved bytes. `None` is the memory of the device.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn limit(self) -> CallResult<Option<u64>> {
        self.with(|context| Ok(context.allocator().limit().map(|limit| limit.count())))
    }

    /// Sets the limit of reserved bytes from bytes, or from a text such as `80GiB` or `90%`. `None` is
    /// the memory of the device. Idle memory above the limit is released at once.
    ///
    /// # Errors
    /// The limit is no size or is below a page, or a driver call failed.
    pub fn set_limit(self, limit: Option<&str>) -> CallResult<()> {
        self.with(|context| {
            let Some(limit) = limit else { return context.set_limit(0) };
            context.set_limit_text(limit)
        })
    }

    /// Returns the pinned memory of the host that its regions and open tiers have. Queries events.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn host_memory(self) -> CallResult<PinnedMemory> {
        self.with(|context| Ok(context.host_memory()))
    }

    /// Releases idle memory until at most `keep` bytes are reserved or no more is idle, and unpins all idle memory of
    /// the host. Never waits.
    ///
    /// # Errors
    /// A driver call failed.
    pub fn trim(self, keep: u64) -> CallResult<()> {
        self.with(|context| context.trim(keep))
    }

    /// Checks every invariant of the allocator. O(n log n).
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn audit(self) -> CallResult<()> {
        self.with(Context::audit)
    }

    /// Registers `handler`, which is called with the requested bytes before a request fails for want of
    /// memory, on the thread of the request and without a lock. It returns true if it freed memory: then
    /// the request is tried again, up to 64 times. Returns the number of the registration. The close of
    /// the allocator drops the handler. No driver call.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn on_shortage(
        self,
        handler: impl Fn(u64) -> bool + Send + Sync + 'static,
    ) -> CallResult<u64> {
        self.with(|context| {
            let handler = move |shortage: &Shortage| handler(shortage.requested.count());
            Ok(context.allocator().on_shortage(handler).number())
        })
    }

    /// Removes a shortage handler. Returns false if it was removed before. Waits for its calls in
    /// progress on other threads, except inside a handler.
    ///
    /// # Errors
    /// The allocator is closed.
    pub fn unregister(self, registration: u64) -> CallResult<bool> {
        self.with(|context| {
            Ok(context.allocator().unregister(Registration::from_number(registration)))
        })
    }

    /// Starts to record the last `events` events, 40 bytes each. Zero stops recording.
    ///
    /// # Errors
    /// More than 10,000,000 events.
    pub fn record_history(self, events: u32) -> CallResult<()> {
        self.with(|context| context.record_history(events))
    }

    /// Writes blocks, segments and the recorded history to a file: a timeline for Perfetto if the
    /// path ends with `.json`, else a snapshot for PyTorch's viewer.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn snapshot(self, path: &str) -> CallResult<()> {
        self.with(|context| context.write_snapshot(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::vramp_status_t::*;

    const DEFAULT: StreamName = StreamName::Raw(0);

    fn malloc(allocator: OpenAllocator, size: u64) -> CallResult<Block> {
        // SAFETY: on the simulator any value is a stream.
        unsafe { allocator.malloc(size, DEFAULT) }
    }

    fn free(allocator: OpenAllocator, addr: u64) -> CallResult<()> {
        // SAFETY: on the simulator any value is a stream.
        unsafe { allocator.free(addr, DEFAULT) }
    }

    #[test]
    fn a_threads_block_that_another_thread_frees_stays_behind_the_work_of_both() {
        const PER_THREAD: StreamName = StreamName::Raw(2);
        let allocator = OpenAllocator::open("sim", "").unwrap();
        // SAFETY: on the simulator any value is a stream.
        let place = move || unsafe { allocator.malloc(4 << 20, PER_THREAD) }.unwrap().addr;
        let addr = place();
        let id = |name| {
            // SAFETY: as above.
            unsafe { allocator.stream_id(name) }.unwrap()
        };
        let own = id(PER_THREAD);
        let ids = std::thread::spawn(move || {
            // SAFETY: as above.
            unsafe { allocator.free(addr, PER_THREAD) }.unwrap();
            assert_ne!(place(), addr, "it may still be in use by the thread that allocated it");
            // SAFETY: as above.
            unsafe { allocator.stream_id(PER_THREAD) }.unwrap()
        });
        assert_ne!(ids.join().unwrap(), own);
        assert_eq!(id(PER_THREAD), own);
        // The other thread ended with nothing queued.
        assert_eq!(place(), addr);
        allocator.close().unwrap();
    }

    #[test]
    fn what_is_at_hand_is_in_the_same_map_of_addresses() {
        let allocator = OpenAllocator::open("sim", "").unwrap();
        assert_eq!(allocator.malloc_at_hand(4096, DEFAULT), None, "the stream was not used yet");
        let first = malloc(allocator, 4096).unwrap();
        assert!(allocator.free_at_hand(first.addr, DEFAULT));
        assert!(!allocator.free_at_hand(first.addr, DEFAULT), "it was freed before");
        let again = allocator.malloc_at_hand(4096, DEFAULT).unwrap();
        assert_eq!(again, first);
        free(allocator, again.addr).unwrap();
        let error = free(allocator, again.addr).unwrap_err();
        assert_eq!(error.status(), VRAMP_ERROR_UNKNOWN_POINTER);
        let stats = allocator.stats().unwrap();
        assert_eq!((stats.live.count(), stats.placed, stats.freed), (0, 2, 2));
        allocator.close().unwrap();
        assert_eq!(allocator.malloc_at_hand(4096, DEFAULT), None);
        assert_eq!(allocator.close().unwrap_err().status(), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    }

    #[test]
    fn a_failure_carries_the_report_and_a_limit_is_a_size_or_a_part() {
        let allocator = OpenAllocator::open("sim:h200", "limit=1GiB").unwrap();
        let error = malloc(allocator, 2 << 30).unwrap_err();
        assert!(error.kind == Kind::OutOfMemory);
        assert_eq!(error.report.as_ref().unwrap().shortage.requested.count(), 2 << 30);
        for (text, expected) in [(Some("3GiB"), Some(3 << 30)), (None, None)] {
            allocator.set_limit(text).unwrap();
            assert_eq!(allocator.limit().unwrap(), expected);
        }
        allocator.set_limit(Some("50%")).unwrap();
        let memory = allocator.device().unwrap().limits.memory.count();
        assert_eq!(allocator.limit().unwrap(), Some(memory / 2));
        for wrong in ["", "0%", "101%", "1KiB", "many"] {
            let error = allocator.set_limit(Some(wrong)).unwrap_err();
            assert_eq!(error.status(), VRAMP_ERROR_OPTION, "{wrong}");
        }
        allocator.close().unwrap();
    }

    #[test]
    fn streams_are_ordered_and_forgotten_by_name() {
        let allocator = OpenAllocator::open("sim", "").unwrap();
        let created = StreamName::Created(allocator.create_stream().unwrap());
        let raw = StreamName::Raw(0x7000);
        // SAFETY: on the simulator any value is a stream.
        unsafe { allocator.order(raw, created) }.unwrap();
        // SAFETY: as above.
        unsafe { allocator.order(created, created) }.unwrap();
        allocator.forget_raw(0x7000).unwrap();
        allocator.forget_raw(0x8000).unwrap();
        let StreamName::Created(handle) = created else { unreachable!("it was created") };
        assert_eq!(allocator.stream_number(handle).unwrap(), None, "it is simulated");
        allocator.forget_stream(handle).unwrap();
        // SAFETY: as above.
        let error = unsafe { allocator.order(raw, created) }.unwrap_err();
        assert_eq!(error.status(), VRAMP_ERROR_UNKNOWN_STREAM);
        allocator.close().unwrap();
    }
}
