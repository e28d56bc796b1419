//! Many threads and many allocators, forks, and a device whose calls fail.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vramp_alloc::error::{AllocError, CreateError, StreamError, Unusable};
use vramp_alloc::history::HistorySize;
use vramp_alloc::{Allocator, Bytes, Config, FreeError, StreamId};
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::interface::*;
use vramp_capi::testing;
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{Call, Driver, DriverError, DriverResult, ErrorKind, Stream};

use crate::common::*;

// --- Many threads on one allocator, and one that closes it during their calls ---

#[test]
fn one_of_two_threads_that_free_the_same_block_gets_an_error() {
    let allocator = open("");
    let stream = stream(allocator);
    for _ in 0..500 {
        let block = malloc(allocator, 4096, stream).unwrap() as usize;
        let free = || vramp_free(allocator, block as *mut _, stream);
        let both = thread::scope(|scope| {
            let other = scope.spawn(free);
            [free(), other.join().unwrap()]
        });
        assert_eq!(both.iter().filter(|status| **status == VRAMP_OK).count(), 1);
        assert!(both.contains(&VRAMP_ERROR_UNKNOWN_POINTER));
    }
    assert_eq!(stats(allocator).live, 0);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn calls_during_a_close_return_a_status() {
    for _ in 0..20 {
        let allocator = open("");
        let streams: Vec<_> = (0..3).map(|_| stream(allocator)).collect();
        thread::scope(|scope| {
            for &stream in &streams {
                scope.spawn(move || {
                    let status = loop {
                        let outcome = malloc(allocator, 1000, stream)
                            .map(|block| vramp_free(allocator, block, stream));
                        match outcome {
                            Ok(VRAMP_OK) => {}
                            Ok(status) | Err(status) => break status,
                        }
                    };
                    assert_eq!(status, VRAMP_ERROR_UNKNOWN_ALLOCATOR);
                });
            }
            while stats(allocator).placed < 100 {
                thread::yield_now();
            }
            assert_eq!(vramp_close(allocator), VRAMP_OK);
        });
    }
}

#[test]
fn memory_of_an_ended_thread_is_reused() {
    let allocator = open("");
    let stream = stream(allocator);
    for _ in 0..50 {
        thread::scope(|scope| {
            scope.spawn(|| {
                let blocks: Vec<_> =
                    (0..16).map(|_| malloc(allocator, 8 << 20, stream).unwrap()).collect();
                for block in blocks {
                    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
                }
            });
        });
    }
    assert!(stats(allocator).reserved_peak < 160 << 20);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

// --- The maximum number of allocators, in a process of its own: other tests could open none meanwhile ---

/// Set in the process that this test starts.
const ALONE: &str = "VRAMP_TEST_ALONE";

#[test]
fn as_many_allocators_open_as_there_are_numbers_for() {
    if std::env::var_os(ALONE).is_none() {
        let test = "threads::as_many_allocators_open_as_there_are_numbers_for";
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let status = alone.args(["--exact", test]).env(ALONE, "1").status().unwrap();
        assert!(status.success());
        return;
    }
    let mut opened = Vec::new();
    let refusal = loop {
        match open_on("sim", "") {
            Ok(allocator) => opened.push(allocator),
            Err(status) => break status,
        }
        assert!(opened.len() <= 256);
    };
    assert_eq!(refusal, VRAMP_ERROR_TOO_MANY);
    assert_eq!(opened.len(), 256);
    for allocator in opened {
        assert_eq!(vramp_close(allocator), VRAMP_OK);
        assert_eq!(vramp_close(allocator), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    }
}

// --- The Rust allocator in children that are forked while other threads use it ---

/// Ends a child that hangs. The child reports nothing else: a lock of the standard library's output
/// may be held for ever there.
const SECONDS: u32 = 20;

/// Returns how a forked child that runs `work` ended: zero if `work` returned true.
pub fn forked(work: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child calls vramp, which is what the test is about, and ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: it only sets a timer, whose signal ends the child.
        unsafe { libc::alarm(SECONDS) };
        let code = i32::from(!work());
        // SAFETY: it ends the child at once.
        unsafe { libc::_exit(code) };
    }
    let mut status = -1;
    // SAFETY: the result outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    status
}

fn answers(allocator: &Allocator, stream: StreamId, own: Option<vramp_alloc::Allocation>) -> bool {
    // 16 MiB: no cache has it.
    let refused = allocator.malloc(Bytes::mib(16), stream);
    let created = Allocator::new(Arc::clone(allocator.driver()), Config::default());
    let freed = own.map(|block| {
        // Not the stream of the block: the lock is needed.
        allocator.free(block, StreamId::new(u32::MAX - 1))
    });
    matches!(refused, Err(AllocError::Unusable(Unusable::Forked)))
        && matches!(created, Err(CreateError::Unusable(Unusable::Forked)))
        && matches!(freed, None | Some(Err(FreeError::Unusable(Unusable::Forked))))
        && allocator.stats().is_err()
        && allocator.memory_stats().is_err()
        && allocator.create_stream().is_err()
        && matches!(
            allocator.destroy_stream(stream),
            Err(StreamError::Unknown(_) | StreamError::Unusable(_))
        )
        && allocator.stream(stream).is_none()
        && allocator.any_captures().is_err()
        && allocator.trim(Bytes::ZERO).is_err()
        && allocator.set_limit(None).is_err()
        && allocator.audit().is_err()
        && allocator.live() == Bytes::ZERO
        && allocator.census().reserved == Bytes::ZERO
        && !allocator.unregister(allocator.observe(|_| {}))
        && allocator.snapshot(None).segments.is_empty()
        && (0..100).all(|_| match allocator.malloc(Bytes::kib(4), stream) {
            // What is in the thread's cache is the child's too.
            Ok(block) => {
                let _ = allocator.free(block, stream);
                true
            }
            Err(error) => matches!(error, AllocError::Unusable(Unusable::Forked)),
        })
}

#[test]
fn a_child_forked_beside_busy_threads_gets_errors_and_drops_without_a_wait() {
    let driver = vramp_alloc::open("sim:h200").unwrap();
    let allocator = Allocator::new(driver, Config::default()).unwrap();
    let stream = allocator.create_stream().unwrap();
    let recording = allocator.record_history(HistorySize::default(), None);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for number in 0..6u64 {
            let (allocator, stop) = (&allocator, &stop);
            scope.spawn(move || {
                let own = allocator.create_stream().unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let on = if number % 2 == 0 { own } else { stream };
                    let blocks = [700, 5000, 3 << 20]
                        .map(|size| allocator.malloc(Bytes::new(size + number), on).unwrap());
                    let _ = allocator.stats();
                    for block in blocks {
                        allocator.free(block, stream).unwrap();
                    }
                    allocator.trim(Bytes::ZERO).unwrap();
                }
            });
        }
        for _ in 0..10 {
            let own = allocator.malloc(Bytes::kib(3), stream).unwrap();
            let status = forked(|| answers(&allocator, stream, Some(own)));
            assert_eq!(status, 0, "a signal of 14 means that a call hung");
        }
        stop.store(true, Ordering::Relaxed);
    });
    let status = forked(|| allocator.close().is_ok());
    assert_eq!(status, 0, "closing does nothing");
    drop(recording);
}

// --- Handles on a device whose calls fail ---

/// A device that refuses to destroy streams for a while.
struct KeepsStreams {
    device: Arc<dyn Driver>,
    refuses: Arc<AtomicBool>,
}

impl Wrapper for KeepsStreams {
    type Device = Arc<dyn Driver>;

    fn device(&self) -> &Arc<dyn Driver> {
        &self.device
    }

    fn destroy_stream(&self, stream: Stream) -> DriverResult<()> {
        if self.refuses.load(Ordering::Relaxed) {
            return Err(DriverError {
                call: Call::DestroyStream,
                code: 304,
                name: "CUDA_ERROR_OPERATING_SYSTEM".into(),
                kind: ErrorKind::Other,
                detail: "".into(),
            });
        }
        self.device.destroy_stream(stream)
    }
}

#[test]
fn a_stream_that_the_driver_did_not_destroy_is_forgotten_and_can_be_forgotten_again() {
    let refuses = Arc::new(AtomicBool::new(true));
    let device = vramp_alloc::open("sim:h200").unwrap();
    let device = KeepsStreams { device, refuses: Arc::clone(&refuses) };
    let allocator = testing::open_on(Arc::new(Wrapped(device)), Config::default()).unwrap();
    let stream = testing::create_stream(allocator).unwrap();
    assert_eq!(vramp_stream_forget(allocator, stream), VRAMP_ERROR_DRIVER);
    let refused = testing::malloc(allocator, 64, stream).unwrap_err();
    assert_eq!(refused.status, VRAMP_ERROR_UNKNOWN_STREAM, "{}", refused.text);
    refuses.store(false, Ordering::Relaxed);
    assert_eq!(vramp_stream_forget(allocator, stream), VRAMP_OK);
    assert_eq!(vramp_stream_forget(allocator, stream), VRAMP_ERROR_UNKNOWN_STREAM);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
