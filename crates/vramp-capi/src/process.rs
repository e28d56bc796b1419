//! The allocators of this process for a program in Rust that exports the C interface too: the
//! Python package.
//!
//! 1. [`OpenAllocator::shared`] returns the allocator of a device that C and PyTorch use as well, and
//!    [`OpenAllocator::open`] one of the caller's own. Both are in the table of handles, so a call on
//!    a closed one is an error.
//! 2. [`OpenAllocator::with`] looks the allocator up and keeps it open until the call returns. All that can
//!    be done with it is in [`Session`].
//! 3. [`OpenAllocator::close`] waits for calls in progress and returns all memory to the device.
//!
//! Blocks are in the allocator's one map of addresses: what one interface allocates, another frees.
//!
//! Deliberately absent: objects that own blocks, and the interpreter.

mod exports;
mod scopes;

use std::ffi::c_int;
use std::sync::Arc;

pub use exports::{Exports, NotClosed};
pub use scopes::{
    ScopeTarget, begin_scope_of_region, end_scope_of_region, set_default_region_disk,
    set_region_disk,
};

use crate::abi::vramp_allocator_t;
use crate::device;
use crate::environment::variable;
use crate::handles;
use crate::options::Options;
pub use crate::regions::{HostLoan, PinnedMemory};
pub use crate::session::{Block, Session, StreamName};
use crate::status::catch_failure;
pub use crate::status::{CallResult, Failure, Kind, Room, check_fork};
use crate::torch::{open, snapshot};

/// An allocator that was opened in this process. A copy names the same one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OpenAllocator(pub(crate) vramp_allocator_t);

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
        catch_failure(|| open::shared_allocator(device)).map(OpenAllocator)
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

    /// Returns the allocators that all interfaces share and that are open, with the numbers of their
    /// devices.
    ///
    /// # Errors
    /// The process is a forked child.
    pub fn all_opened() -> CallResult<Vec<(u32, OpenAllocator)>> {
        let mut all = Vec::new();
        for device in 0..crate::torch::DEVICES as c_int as u32 {
            all.extend(OpenAllocator::opened(device)?.map(|allocator| (device, allocator)));
        }
        Ok(all)
    }

    /// Opens an allocator of the caller's own, as `vramp_open` does.
    ///
    /// # Errors
    /// The device or an option is invalid, or the device cannot be opened.
    pub fn open(device: &str, options: &str) -> CallResult<OpenAllocator> {
        let opened = catch_failure(|| {
            check_fork()?;
            let options = Options::parse(options)?;
            handles::insert(Arc::new(Session::open(device, &options, None, variable)?))
        });
        opened.map(OpenAllocator)
    }

    /// Opens an allocator on each device of a machine, in the order of their ordinals.
    ///
    /// # Errors
    /// As of [`OpenAllocator::open`]. None stays open.
    pub fn open_all(device: &str, options: &str) -> CallResult<Vec<OpenAllocator>> {
        let mut opened = Vec::new();
        let all = catch_failure(|| {
            check_fork()?;
            let options = Options::parse(options)?;
            for device in device::Device::open_all(device)? {
                let session = Session::open_device(device, &options)?;
                opened.push(OpenAllocator(handles::insert(Arc::new(session))?));
            }
            Ok(())
        });
        match all {
            Ok(()) => Ok(opened),
            Err(failure) => {
                for allocator in opened {
                    // The first failure is the one to report.
                    let _ = allocator.close();
                }
                Err(failure)
            }
        }
    }

    /// Makes an allocator for memory that communication libraries register.
    ///
    /// # Errors
    /// As of `vramp_comm_pool`.
    pub fn comm_pool(self, name: &str) -> CallResult<OpenAllocator> {
        let pool = self.with(|session| session.comm_pool(name))?;
        catch_failure(|| handles::insert(Arc::new(pool))).map(OpenAllocator)
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

    /// Calls `call` with the allocator, which stays open meanwhile. A panic is a failure.
    ///
    /// # Errors
    /// The allocator is closed, or those of `call`.
    #[inline]
    pub fn with<R>(self, call: impl FnOnce(&Session) -> CallResult<R>) -> CallResult<R> {
        catch_failure(|| handles::with(self.0, call))
    }

    /// Allocates a block as [`Session::place`] does if the thread or the stream has one and no lock
    /// has to be taken that is held during driver calls or while Python runs. `None` in all other cases,
    /// errors included: then call that without the interpreter's lock.
    #[inline]
    pub fn malloc_at_hand(self, size: u64, stream: StreamName) -> Option<Block> {
        handles::with(self.0, |session| Ok(session.place_at_hand(size, stream))).ok().flatten()
    }

    /// Frees a block as [`Session::free_named`] does, under the conditions of
    /// [`OpenAllocator::malloc_at_hand`]. Returns false if it did nothing.
    #[inline]
    pub fn free_at_hand(self, addr: u64, stream: StreamName) -> bool {
        handles::with(self.0, |session| Ok(session.free_at_hand(addr, stream))).unwrap_or(false)
    }
}

/// Calls on an allocator of the simulator, for tests.
#[cfg(test)]
mod calls {
    use vramp_alloc::StreamId;
    use vramp_alloc::stats::Stats;
    use vramp_tiers::regions::PauseOptions;

    use super::*;

    pub const DEFAULT: StreamName = StreamName::Raw(0);

    impl OpenAllocator {
        pub(crate) fn id(self, name: StreamName) -> StreamId {
            // SAFETY: on the simulator any value is a stream.
            self.with(|session| unsafe { session.named(name) }).unwrap()
        }

        pub(crate) fn malloc(self, size: u64, stream: StreamName) -> CallResult<Block> {
            // SAFETY: as above.
            self.with(|session| session.place(size, unsafe { session.named(stream) }?))
        }

        pub(crate) fn free(self, addr: u64, stream: StreamName) -> CallResult<()> {
            // SAFETY: as above.
            self.with(|session| unsafe { session.free_named(addr, stream) })
        }

        pub(crate) fn stats(self) -> Stats {
            self.with(Session::total_stats).unwrap()
        }

        pub(crate) fn pause(self, tags: &[String], options: PauseOptions) -> CallResult<()> {
            self.with(|session| {
                session.with_regions(tags, |regions, tags| regions.pause(tags, options))
            })
        }

        pub(crate) fn resume(self, tags: &[String]) -> CallResult<()> {
            self.with(|session| session.with_regions(tags, |regions, tags| regions.resume(tags)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::calls::DEFAULT;
    use super::*;
    use crate::abi::vramp_status_t::*;

    #[test]
    fn a_threads_block_that_another_thread_frees_stays_behind_the_work_of_both() {
        const PER_THREAD: StreamName = StreamName::Raw(2);
        let allocator = OpenAllocator::open("sim", "").unwrap();
        let place = move || allocator.malloc(4 << 20, PER_THREAD).unwrap().addr;
        let addr = place();
        let own = allocator.id(PER_THREAD);
        let ids = std::thread::spawn(move || {
            allocator.free(addr, PER_THREAD).unwrap();
            assert_ne!(place(), addr, "it may still be in use by the thread that allocated it");
            allocator.id(PER_THREAD)
        });
        assert_ne!(ids.join().unwrap(), own);
        assert_eq!(allocator.id(PER_THREAD), own);
        // The other thread ended with nothing queued.
        assert_eq!(place(), addr);
        allocator.close().unwrap();
    }

    #[test]
    fn what_is_at_hand_is_in_the_same_map_of_addresses() {
        let allocator = OpenAllocator::open("sim", "").unwrap();
        assert_eq!(allocator.malloc_at_hand(4096, DEFAULT), None, "the stream was not used yet");
        let first = allocator.malloc(4096, DEFAULT).unwrap();
        assert!(allocator.free_at_hand(first.addr, DEFAULT));
        assert!(!allocator.free_at_hand(first.addr, DEFAULT), "it was freed before");
        let again = allocator.malloc_at_hand(4096, DEFAULT).unwrap();
        assert_eq!(again, first);
        allocator.free(again.addr, DEFAULT).unwrap();
        let error = allocator.free(again.addr, DEFAULT).unwrap_err();
        assert_eq!(error.status(), VRAMP_ERROR_UNKNOWN_POINTER);
        let stats = allocator.stats();
        assert_eq!((stats.live.count(), stats.placed, stats.freed), (0, 2, 2));
        allocator.close().unwrap();
        assert_eq!(allocator.malloc_at_hand(4096, DEFAULT), None);
        assert_eq!(allocator.close().unwrap_err().status(), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    }

    #[test]
    fn a_failure_carries_the_report_and_a_limit_is_a_size_or_a_part() {
        let allocator = OpenAllocator::open("sim:h200", "limit=1GiB").unwrap();
        let error = allocator.malloc(2 << 30, DEFAULT).unwrap_err();
        assert!(error.kind == Kind::OutOfMemory);
        assert_eq!(error.report.as_ref().unwrap().shortage.requested.count(), 2 << 30);
        let set_limit = |text| allocator.with(|session| session.set_limit_text(text));
        let limit = || {
            let limit = allocator.with(|session| Ok(session.allocator().limit()));
            limit.unwrap().map(|limit| limit.count())
        };
        for (text, expected) in [(Some("3GiB"), Some(3 << 30)), (None, None)] {
            set_limit(text).unwrap();
            assert_eq!(limit(), expected);
        }
        set_limit(Some("50%")).unwrap();
        let memory = allocator.with(|session| Ok(session.memory())).unwrap().count();
        assert_eq!(limit(), Some(memory / 2));
        for wrong in ["", "0%", "101%", "1KiB", "many"] {
            let error = set_limit(Some(wrong)).unwrap_err();
            assert_eq!(error.status(), VRAMP_ERROR_OPTION, "{wrong}");
        }
        allocator.close().unwrap();
    }

    #[test]
    fn streams_are_ordered_and_forgotten_by_name() {
        let allocator = OpenAllocator::open("sim", "").unwrap();
        let create = |session: &Session| Ok(session.handle_of(session.create_stream()?));
        let created = StreamName::Created(allocator.with(create).unwrap());
        let raw = StreamName::Raw(0x7000);
        let order = |stream, before| {
            // SAFETY: on the simulator any value is a stream.
            let id = |session: &Session, name| unsafe { session.named(name) };
            allocator.with(|session| session.order(id(session, stream)?, id(session, before)?))
        };
        order(raw, created).unwrap();
        order(created, created).unwrap();
        let number = |session: &Session| Ok(session.stream_number(allocator.id(created)));
        assert_eq!(allocator.with(number).unwrap(), None, "it is simulated");
        for name in [raw, StreamName::Raw(0x8000), created] {
            allocator.with(|session| session.forget_named(name)).unwrap();
        }
        let error = order(raw, created).unwrap_err();
        assert_eq!(error.status(), VRAMP_ERROR_UNKNOWN_STREAM);
        allocator.close().unwrap();
    }
}
