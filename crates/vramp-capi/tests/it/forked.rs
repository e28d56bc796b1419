//! The Rust allocator in children that are forked while other threads use it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vramp_alloc::error::{AllocError, CreateError, StreamError, Unusable};
use vramp_alloc::history::HistorySize;
use vramp_alloc::{Allocator, Bytes, Config, FreeError, StreamId};

/// Ends a child that hangs. The child reports nothing else: a lock of the standard library's output
/// may be held for ever there.
const SECONDS: u32 = 20;

/// Returns how a forked child that runs `work` ended: zero if `work` returned true.
fn forked(work: impl FnOnce() -> bool) -> i32 {
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
    let driver = vramp_alloc::open("sim:h200").unwrap().driver;
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
