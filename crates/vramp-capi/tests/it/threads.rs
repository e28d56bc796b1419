//! Many threads on one allocator, and one that closes it during their calls.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::common::*;
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::interface::*;

/// A pseudorandom generator with a fixed seed.
fn numbers(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    }
}

#[test]
fn threads_allocate_free_for_each_other_and_lose_nothing() {
    let allocator = open("");
    let streams: Vec<_> = (0..4).map(|_| stream(allocator)).collect();
    let blocks: Vec<AtomicUsize> = (0..64).map(|_| AtomicUsize::new(0)).collect();
    thread::scope(|scope| {
        for seed in 0..8u64 {
            let (streams, blocks) = (&streams, &blocks);
            scope.spawn(move || {
                let mut random = numbers(seed + 1);
                for _ in 0..2000 {
                    let stream = streams[random(streams.len())];
                    let size = if random(4) == 0 { random(4 << 20) } else { random(64 << 10) };
                    let mine = malloc(allocator, size, stream).unwrap();
                    if random(3) == 0 {
                        let other = streams[random(streams.len())];
                        assert_eq!(vramp_record_use(allocator, mine, other), VRAMP_OK);
                    }
                    let place = &blocks[random(blocks.len())];
                    let old = place.swap(mine as usize, Ordering::AcqRel);
                    if old != 0 {
                        let stream = streams[random(streams.len())];
                        assert_eq!(vramp_free(allocator, old as *mut _, stream), VRAMP_OK);
                    }
                }
            });
        }
    });
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    for block in blocks.into_iter().map(AtomicUsize::into_inner).filter(|block| *block != 0) {
        assert_eq!(vramp_free(allocator, block as *mut _, streams[0]), VRAMP_OK);
    }
    let stats = stats(allocator);
    assert_eq!((stats.live, stats.placed, stats.freed), (0, 16_000, 16_000));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

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
