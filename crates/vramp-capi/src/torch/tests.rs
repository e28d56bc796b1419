//! Tests of PyTorch's calls on the simulator.

mod plain;
mod regions;

use std::ptr::null_mut;

use vramp_alloc::Bytes;
use vramp_alloc::device::AddrRange;
use vramp_driver::{CaptureMode, Driver, Stream};

use super::settings::Settings;
use super::*;
use crate::handles;

fn torch(conf: &str) -> Torch {
    let torch = Torch::new();
    torch.settings.set(Settings::of("sim", conf)).unwrap();
    torch
}

fn raw(stream: usize) -> *mut c_void {
    stream as *mut c_void
}

impl Torch {
    fn get(&self, size: isize, stream: usize) -> Result<u64> {
        // SAFETY: on the simulator any value is a stream.
        unsafe { self.malloc(size, 0, raw(stream)) }.map(DeviceAddr::number)
    }

    fn put(&self, addr: u64, stream: usize) -> Result<()> {
        // SAFETY: on the simulator any value is a stream.
        unsafe { self.free(addr, 0, raw(stream)) }
    }

    fn note(&self, addr: u64, stream: usize) -> Result<()> {
        // SAFETY: on the simulator any value is a stream.
        unsafe { self.record_stream(addr, raw(stream)) }
    }
}

fn status<T: std::fmt::Debug>(result: Result<T>) -> vramp_status_t {
    result.unwrap_err().status()
}

#[test]
fn streams_are_adopted_at_their_first_use() {
    let torch = torch("");
    let on_default = torch.get(1 << 20, 0).unwrap();
    let on_side = torch.get(1 << 20, 0x7f00_0000).unwrap();
    assert_ne!(on_default, on_side);
    torch.note(on_side, 0).unwrap();
    torch.note(on_side, 0x7f00_1000).unwrap();
    torch.put(on_side, 0x7f00_0000).unwrap();
    torch.put(on_default, 0x7f00_2000).unwrap();
    let session = torch.session(0).unwrap();
    assert_eq!(session.stats().unwrap().live, 0);
    session.audit().unwrap();
}

#[test]
fn the_stream_that_each_thread_has_of_its_own_is_one_of_the_calling_thread() {
    let torch = torch("");
    let block = torch.get(4 << 20, 2).unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let theirs = torch.get(4 << 20, 2).unwrap();
            assert_ne!(theirs, block);
            torch.note(block, 2).unwrap();
            torch.put(theirs, 2).unwrap();
            // PyTorch frees on the stream of the allocation, from any thread.
            torch.put(block, 2).unwrap();
            assert_ne!(torch.get(4 << 20, 2).unwrap(), block);
        });
        other.join().unwrap();
    });
    let session = torch.session(0).unwrap();
    // SAFETY: on the simulator any value is a stream.
    let own = unsafe { session.adopt(raw(2)) }.unwrap();
    assert_eq!(session.raw(own), 2);
    assert!(session.adopted_streams().contains(&own));
    session.audit().unwrap();
}

#[test]
fn what_cannot_be_freed_is_an_error_and_no_crash() {
    let torch = torch("");
    let block = torch.get(5000, 0).unwrap();
    assert_eq!(status(torch.put(0, 0)), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!(status(torch.put(block + 512, 0)), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!(status(torch.note(block + 512, 0)), VRAMP_ERROR_UNKNOWN_POINTER);
    torch.put(block, 0).unwrap();
    assert_eq!(status(torch.put(block, 0)), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!(status(torch.note(block, 0)), VRAMP_ERROR_UNKNOWN_POINTER);
}

#[test]
fn sizes_and_devices_out_of_range_are_errors() {
    let torch = torch("");
    assert_eq!(status(torch.get(-1, 0)), VRAMP_ERROR_RANGE);
    assert_eq!(status(torch.get(isize::MIN, 0)), VRAMP_ERROR_RANGE);
    assert_eq!(status(torch.get(isize::MAX, 0)), VRAMP_ERROR_OUT_OF_MEMORY);
    for device in [-1, 64, c_int::MIN, c_int::MAX] {
        // SAFETY: no device, so no stream.
        let placed = unsafe { torch.malloc(1, device, null_mut()) };
        assert_eq!(status(placed), VRAMP_ERROR_RANGE, "{device}");
        assert_eq!(status(torch.set_fraction(0.5, device)), VRAMP_ERROR_RANGE);
        assert_eq!(status(torch.handle(device)), VRAMP_ERROR_RANGE);
    }
    let (one, other) = (torch.get(0, 0).unwrap(), torch.get(0, 0).unwrap());
    assert!(one != 0 && other != 0 && one != other, "PyTorch tracks blocks by address");
}

#[test]
fn out_of_memory_begins_as_pytorchs_own() {
    let torch = torch("limit=64MiB");
    let failure = torch.get(128 << 20, 0).unwrap_err();
    assert_eq!(failure.status(), VRAMP_ERROR_OUT_OF_MEMORY);
    assert!(failure.text.starts_with("CUDA out of memory on device 0. vramp: "), "{failure}");
    assert!(failure.text.contains("limit of 64.00 MiB"), "{failure}");
}

#[test]
fn a_fraction_holds_and_may_change() {
    let torch = torch("");
    for wrong in [-0.5, 1.5, f64::NAN, f64::INFINITY] {
        assert_eq!(status(torch.set_fraction(wrong, 0)), VRAMP_ERROR_RANGE);
    }
    torch.set_fraction(0.25, 0).unwrap();
    let memory = torch.session(0).unwrap().stats().unwrap().card_total;
    assert_eq!(status(torch.get((memory / 2) as isize, 0)), VRAMP_ERROR_OUT_OF_MEMORY);
    torch.get((memory / 5) as isize, 0).unwrap();
    torch.set_fraction(1.0, 0).unwrap();
    torch.get((memory / 2) as isize, 0).unwrap();
    assert_eq!(status(torch.set_fraction(2.0, 0)), VRAMP_ERROR_RANGE);
    torch.set_fraction(0.0, 0).unwrap();
    assert_eq!(status(torch.get((memory / 4) as isize, 0)), VRAMP_ERROR_OUT_OF_MEMORY);
}

#[test]
fn settings_that_cannot_be_used_fail_every_allocation_with_their_reason() {
    let torch = torch("limit=plenty");
    for _ in 0..2 {
        let failure = torch.get(1, 0).unwrap_err();
        assert!(failure.text.contains("VRAMP_CONF is invalid: limit=plenty"), "{failure}");
    }
    let none = Torch::new();
    none.settings.set(Settings::of("sim:none", "")).unwrap();
    assert_eq!(status(none.get(1, 0)), VRAMP_ERROR_DEVICE);
}

#[test]
fn devices_have_an_allocator_each_that_cannot_be_closed() {
    let torch = torch("");
    let handles = [torch.handle(0).unwrap(), torch.handle(5).unwrap()];
    assert_ne!(handles[0], handles[1]);
    assert_eq!(torch.handle(0).unwrap(), handles[0]);
    torch.get(1 << 20, 0).unwrap();
    assert_eq!(handles::with(handles[0], Session::stats).unwrap().live, 1 << 20);
    assert_eq!(handles::with(handles[1], Session::stats).unwrap().live, 0);
    assert_eq!(handles::close(handles[0]).unwrap_err().status(), VRAMP_ERROR_IN_USE);
    handles::with(handles[0], Session::audit).unwrap();
}

// --- the class of PyTorch's allocator ---

impl Torch {
    fn block_of(&self, size: u64, stream: usize) -> dropin::vramp_torch_block_t {
        // SAFETY: on the simulator any value is a stream.
        unsafe { self.malloc_block(size, 0, raw(stream)) }.unwrap()
    }
}

#[test]
fn a_block_is_freed_by_its_address_alone_and_described() {
    let torch = torch("");
    let block = torch.block_of(5000, SIDE);
    assert_eq!((block.requested, block.stream, block.device), (5000, SIDE as u64, 0));
    assert!(block.size >= 5000 && block.size.is_multiple_of(512));
    let freed = torch.free_block(block.address).unwrap();
    assert_eq!(format!("{freed:?}"), format!("{block:?}"));
    assert_eq!(status(torch.free_block(block.address)), VRAMP_ERROR_UNKNOWN_POINTER);
    let other = torch.block_of(5000, SIDE);
    assert_eq!(other.address, block.address, "the stream gets its own memory again");
}

#[test]
fn a_segment_is_no_block_and_may_begin_where_a_pools_block_begins() {
    let torch = torch("");
    let segment = torch.segment_malloc(0, 2 << 20).unwrap().number();
    assert_eq!(status(torch.find(segment)), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!(status(torch.free_block(segment)), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!(torch.segment_device(segment), Some(0));
    let states: Vec<u32> = torch.parts(0).unwrap().iter().map(|part| part.state).collect();
    assert!(states.contains(&3) && !states.contains(&1), "{states:?}");
    for may_be_in_use in [false, true] {
        let segment = torch.segment_malloc(0, 4 << 20).unwrap().number();
        assert_eq!(torch.segment_free(segment, may_be_in_use).unwrap(), 4 << 20);
        assert_eq!(status(torch.segment_free(segment, false)), VRAMP_ERROR_UNKNOWN_POINTER);
    }
    torch.segment_free(segment, false).unwrap();
    assert_eq!(torch.segment_device(segment), None);
    assert_eq!(torch.session(0).unwrap().stats().unwrap().live, 0);
}

#[test]
fn a_segment_is_handed_out_after_the_work_on_its_memory() {
    let torch = torch("limit=64MiB");
    let block = torch.block_of(60 << 20, SIDE);
    let (driver, queue) = (torch.driver(), torch.queue(SIDE));
    let range = AddrRange::new(DeviceAddr::new(block.address), Bytes::new(block.size));
    let event = driver.create_event().unwrap();
    driver.fill(queue, range, 7).unwrap();
    driver.record(event, queue).unwrap();
    torch.free_block(block.address).unwrap();
    assert!(!driver.query(event).unwrap(), "the fill takes longer than a free");
    torch.segment_malloc(0, 60 << 20).unwrap();
    assert!(driver.query(event).unwrap());
}

/// The parts of memory add up to the statistics, after random requests of sizes of both pools.
#[test]
fn the_parts_of_memory_add_up_to_the_statistics() {
    let torch = torch("");
    let mut random = fastrand::Rng::with_seed(7);
    let mut live: Vec<dropin::vramp_torch_block_t> = Vec::new();
    let segment = torch.segment_malloc(0, 20 << 20).unwrap().number();
    for step in 0..2000 {
        if live.is_empty() || random.u32(0..5) < 3 {
            let size = 1u64 << random.u32(0..24);
            live.push(torch.block_of(random.u64(0..size), 0x1000 * random.usize(0..4)));
        } else {
            let block = live.swap_remove(random.usize(0..live.len()));
            if random.bool() {
                torch.note(block.address, 0x1000 * random.usize(0..4)).unwrap();
            }
            torch.free_block(block.address).unwrap();
        }
        if step % 100 != 0 {
            continue;
        }
        let (parts, memory) = (torch.parts(0).unwrap(), torch.memory(0).unwrap());
        let sum = |of: &dyn Fn(&statistics::vramp_torch_part_t) -> bool| -> u64 {
            parts.iter().filter(|part| of(part)).map(|part| part.size).sum()
        };
        assert_eq!(sum(&|_| true), memory.reserved);
        assert_eq!(sum(&|part| part.is_small == 1), memory.reserved_small);
        assert_eq!(sum(&|part| part.state == 1), live.iter().map(|block| block.size).sum::<u64>());
        assert_eq!(sum(&|part| part.state == 2), memory.waiting_bytes.iter().sum::<u64>());
        assert_eq!(sum(&|part| part.state == 3), 20 << 20);
        let requested: u64 = parts.iter().map(|part| part.requested).sum();
        assert_eq!(requested, live.iter().map(|block| block.requested).sum::<u64>());
    }
    torch.segment_free(segment, false).unwrap();
}

#[test]
fn a_table_of_segments_keeps_nothing_of_those_that_ended() {
    let torch = torch("");
    for _ in 0..10_000 {
        let segment = torch.segment_malloc(0, 2 << 20).unwrap().number();
        torch.segment_free(segment, false).unwrap();
    }
    assert_eq!(torch.segments(0).count(), 0);
}

// --- graphs ---

/// A capture of one of PyTorch's streams.
struct Capture<'a> {
    torch: &'a Torch,
    queue: Stream,
}

const POOL: PoolId = (1, 0);
const SIDE: usize = 0x7f00;

impl Torch {
    fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(self.session(0).unwrap().allocator().driver())
    }

    /// Returns the driver's stream of a PyTorch stream.
    fn queue(&self, stream: usize) -> Stream {
        let session = self.session(0).unwrap();
        // SAFETY: on the simulator any value is a stream.
        let id = unsafe { session.adopt(raw(stream)) }.unwrap();
        session.allocator().stream(id).unwrap()
    }

    fn capture(&self, pool: PoolId, stream: usize) -> Capture<'_> {
        self.begin_pool(0, pool).unwrap();
        let queue = self.queue(stream);
        self.driver().begin_capture(queue, CaptureMode::Global).unwrap();
        Capture { torch: self, queue }
    }

    fn is_in_arena(&self, addr: u64) -> bool {
        self.session(0).unwrap().is_of_arena(addr)
    }

    fn live(&self) -> u64 {
        self.session(0).unwrap().stats().unwrap().live
    }

    fn release(&self, pool: PoolId) -> Result<()> {
        self.pools(0).unwrap().release(pool)
    }

    fn audit(&self) {
        self.session(0).unwrap().audit().unwrap();
    }
}

impl Capture<'_> {
    fn end(self, pool: PoolId) {
        let graph = self.torch.driver().end_capture(self.queue).unwrap();
        self.torch.pools(0).unwrap().end(pool).unwrap();
        self.torch.driver().destroy_graph(graph).unwrap();
    }

    /// Fails a capture, which ends without a hook.
    fn fail(self) {
        self.torch.driver().alloc_memory(vramp_alloc::Bytes::mib(2)).unwrap_err();
        self.torch.driver().end_capture(self.queue).unwrap_err();
    }
}

#[test]
fn a_capture_into_a_pool_is_served_by_an_arena_until_its_end() {
    let torch = torch("");
    let before = torch.get(1 << 20, SIDE).unwrap();
    let capture = torch.capture(POOL, SIDE);
    let inside = torch.get(4 << 20, SIDE).unwrap();
    let beside = torch.get(4 << 20, 0).unwrap();
    assert!(torch.is_in_arena(inside) && !torch.is_in_arena(beside));
    torch.put(inside, SIDE).unwrap();
    let output = torch.get(4 << 20, SIDE).unwrap();
    assert_eq!(output, inside, "the captured order proves that it is unused");
    capture.end(POOL);
    let after = torch.get(4 << 20, SIDE).unwrap();
    assert!(!torch.is_in_arena(after));
    torch.release(POOL).unwrap();
    for (block, stream) in [(before, SIDE), (beside, 0), (output, SIDE), (after, SIDE)] {
        torch.put(block, stream).unwrap();
    }
    assert_eq!(torch.live(), 0);
    torch.audit();
}

#[test]
fn a_capture_without_a_begin_is_not_served_by_an_arena() {
    let torch = torch("");
    let queue = torch.queue(SIDE);
    torch.driver().begin_capture(queue, CaptureMode::Global).unwrap();
    let block = torch.get(1 << 20, SIDE).unwrap();
    assert!(!torch.is_in_arena(block));
    let graph = torch.driver().end_capture(queue).unwrap();
    torch.driver().destroy_graph(graph).unwrap();
    torch.put(block, SIDE).unwrap();
}

#[test]
fn memory_from_before_that_is_freed_in_a_capture_is_kept_until_release() {
    let torch = torch("");
    let (own, other) = (torch.get(8 << 20, SIDE).unwrap(), torch.get(8 << 20, 0).unwrap());
    let theirs = torch.get(8 << 20, 0).unwrap();
    let capture = torch.capture(POOL, SIDE);
    let inside = torch.get(512, SIDE).unwrap();
    // PyTorch frees on the stream of the allocation.
    torch.put(own, SIDE).unwrap();
    torch.put(other, 0).unwrap();
    std::thread::scope(|threads| {
        let freed = threads.spawn(|| torch.put(theirs, 0)).join();
        freed.expect("it does not panic").unwrap();
    });
    assert_eq!(torch.live(), (16 << 20) + 512, "a thread outside of the capture frees at once");
    capture.end(POOL);
    assert_eq!(torch.live(), (16 << 20) + 512);
    torch.put(inside, SIDE).unwrap();
    torch.release(POOL).unwrap();
    assert_eq!(torch.live(), 0);
    torch.audit();
}

#[test]
fn a_thread_that_allocates_in_a_capture_belongs_to_it() {
    let torch = torch("");
    let before = torch.get(8 << 20, 0).unwrap();
    let capture = torch.capture(POOL, SIDE);
    torch.get(512, SIDE).unwrap();
    std::thread::scope(|threads| {
        let backward = || {
            let inside = torch.get(512, SIDE).unwrap();
            torch.put(before, 0).unwrap();
            inside
        };
        let inside = threads.spawn(backward).join().expect("it does not panic");
        assert!(torch.is_in_arena(inside));
    });
    assert_eq!(torch.live(), (8 << 20) + 1024);
    capture.end(POOL);
    torch.release(POOL).unwrap();
    assert_eq!(torch.live(), 1024);
    torch.audit();
}

#[test]
fn graphs_of_a_pool_share_its_arena_until_the_last_is_released() {
    let torch = torch("");
    let mut places = Vec::new();
    for _ in 0..3 {
        let capture = torch.capture(POOL, SIDE);
        let inside = torch.get(32 << 20, SIDE).unwrap();
        places.push(inside);
        torch.put(inside, SIDE).unwrap();
        capture.end(POOL);
    }
    assert!(places.iter().all(|place| *place == places[0]), "one after the other");
    let reserved = || torch.session(0).unwrap().stats().unwrap().reserved;
    for left in [2, 1, 0] {
        torch.release(POOL).unwrap();
        torch.session(0).unwrap().trim(0).unwrap();
        assert_eq!(reserved() == 0, left == 0, "{left} graphs are left");
    }
    assert_eq!(status(torch.release(POOL)), VRAMP_ERROR_UNKNOWN_ARENA);
    torch.audit();
}

#[test]
fn a_failed_capture_is_removed_by_the_next_begin_and_has_no_effect_until_then() {
    let torch = torch("");
    for spoilt_early in [true, false] {
        let capture = torch.capture(POOL, SIDE);
        let before = torch.get(1 << 20, 0).unwrap();
        if !spoilt_early {
            torch.put(torch.get(1 << 20, SIDE).unwrap(), SIDE).unwrap();
        }
        capture.fail();
        torch.put(before, 0).unwrap();
        assert_eq!(torch.live(), 0, "nothing is kept for a capture that has ended");
        let block = torch.get(1 << 20, SIDE).unwrap();
        assert!(!torch.is_in_arena(block));
        torch.put(block, SIDE).unwrap();
    }
    let capture = torch.capture((2, 0), SIDE);
    assert!(torch.is_in_arena(torch.get(1 << 20, SIDE).unwrap()));
    capture.end((2, 0));
    assert_eq!(status(torch.release(POOL)), VRAMP_ERROR_UNKNOWN_ARENA, "it had no graph");
    torch.release((2, 0)).unwrap();
    assert!(!torch.pools(0).unwrap().any_open());
    torch.audit();
}

#[test]
fn hooks_out_of_order_are_errors_and_change_nothing() {
    let torch = torch("");
    assert_eq!(status(torch.pools(0).unwrap().end(POOL)), VRAMP_ERROR_UNKNOWN_ARENA);
    assert_eq!(status(torch.release(POOL)), VRAMP_ERROR_UNKNOWN_ARENA);
    let capture = torch.capture(POOL, SIDE);
    assert_eq!(status(torch.release(POOL)), VRAMP_ERROR_UNKNOWN_ARENA, "it has no graph yet");
    let inside = torch.get(1 << 20, SIDE).unwrap();
    capture.end(POOL);
    assert_eq!(status(torch.pools(0).unwrap().end(POOL)), VRAMP_ERROR_UNKNOWN_ARENA);
    torch.release(POOL).unwrap();
    torch.put(inside, SIDE).unwrap();
    for device in [-1, 64] {
        assert_eq!(status(torch.begin_pool(device, POOL)), VRAMP_ERROR_RANGE);
        assert_eq!(torch.pools(device).err().unwrap().status(), VRAMP_ERROR_RANGE);
    }
    torch.audit();
}

#[test]
fn a_preset_without_arenas_fails_requests_within_captures_with_its_reason() {
    let torch = torch("preset=vpmm");
    let capture = torch.capture(POOL, SIDE);
    let failure = torch.get(4 << 20, SIDE).unwrap_err();
    assert_eq!(failure.status(), VRAMP_ERROR_UNSUPPORTED);
    assert!(failure.text.contains("needs the preset vramp"), "{failure}");
    let beside = torch.get(4 << 20, 0).unwrap();
    torch.put(beside, 0).unwrap();
    capture.end(POOL);
    torch.release(POOL).unwrap();
    torch.audit();
}

#[test]
fn a_capture_with_an_arena_is_not_attached_again() {
    let torch = torch("");
    let session = torch.session(0).unwrap();
    torch.begin_pool(0, POOL).unwrap();
    // SAFETY: on the simulator any value is a stream.
    let stream = unsafe { session.adopt(raw(SIDE)) }.unwrap();
    let arena = session.create_arena(vramp_alloc::graph::ArenaConfig::default()).unwrap();
    session.begin_capture(arena, stream).unwrap();
    let inside = torch.get(1 << 20, SIDE).unwrap();
    assert!(torch.is_in_arena(inside));
    let graph = session.end_capture(arena).unwrap();
    assert_eq!(session.report_graph(graph).unwrap().blocks, 1);
    torch.pools(0).unwrap().end(POOL).unwrap();
    torch.release(POOL).unwrap();
    torch.put(inside, SIDE).unwrap();
    torch.audit();
}

#[test]
fn recording_a_use_in_a_forked_child_waits_for_no_lock_of_the_parent() {
    let torch = torch("");
    let block = torch.get(4096, 0).unwrap();
    let session = torch.session(0).unwrap();
    // A thread of the parent is in the table of blocks.
    let status = session.with_locked_block(block, || {
        // SAFETY: the child calls vramp, which is what the test is about, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: it only sets a timer, whose signal ends the child.
            unsafe { libc::alarm(20) };
            // SAFETY: null is the default stream.
            let refused = unsafe { torch.record_stream(block, null_mut()) };
            let code = i32::from(!refused.is_err_and(|why| why.status() == VRAMP_ERROR_FORKED));
            // SAFETY: it ends the child at once.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: the result outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        status
    });
    assert_eq!(status, 0, "a signal of 14 means that the call hung");
}
