//! Loom models of the state that threads share on the fast path: every interleaving, and every
//! value that a relaxed load may return. `cargo xtask loom` explores them.
//!
//! 1. A thread fills its cache and takes from it while other threads empty it (`cache.rs`).
//! 2. A thread uses its stream's heap while other threads free into it and gather from it
//!    (`virtual_pool.rs`), with the locks in the allocator's order.
//! 3. A thread frees blocks of a stream while another thread ends that stream.
//! 4. A callback is removed while other threads call it (`observe.rs`).

use std::sync::Arc;

use loom::sync::Mutex;
use loom::thread;
use vramp_core::{Bytes, Freed, PoolConfig, StreamId};
use vramp_driver::sim::Simulator;

use crate::allocation::Owner;
use crate::cache::{BLOCK_ALIGN, Cache, CachedBlock, Tag};
use crate::config::{Config, Progress};
use crate::observe::Slot;
use crate::sharing::{Access, SharingConfig};
use crate::virtual_pool::VirtualPool;

// --- caches ---

/// Returns block number `n`. The parts of a torn block differ.
fn block(n: u64) -> CachedBlock {
    CachedBlock { addr: n, at: n, id: n }
}

fn number(kept: CachedBlock) -> u64 {
    assert!(kept == block(kept.addr), "{kept:?} is torn");
    kept.addr
}

fn small() -> Tag {
    Tag::new(0, 1).expect("one grain on the first stream fits a tag")
}

fn large() -> Tag {
    Tag::new(0, 1 << 20).expect("half a GiB on the first stream fits a tag").of_pool()
}

fn drained(cache: &Cache) -> Vec<u64> {
    let mut numbers = Vec::new();
    cache.drain(|_, kept| numbers.push(number(kept)));
    numbers
}

/// The owner of a cache holds blocks 1 and 2. It puts each into the cache and takes one out again;
/// before the step `pause` it yields to other threads. Returns the blocks it holds at the end.
fn put_and_take(cache: &Cache, tag: Tag, pause: u64) -> Vec<u64> {
    let mut held = Vec::new();
    for n in [1, 2] {
        if n == pause {
            thread::yield_now();
        }
        cache.note_new(tag.units(), n);
        if !cache.put(tag, block(n)) {
            held.push(n);
        }
    }
    if pause == 3 {
        thread::yield_now();
    }
    // A request does not say who placed the block.
    let wanted = Tag::new(tag.stream(), tag.units()).expect("it was one before");
    if let Some((found, kept)) = cache.take(wanted) {
        assert_eq!(found, tag);
        held.push(number(kept));
    }
    held
}

/// Both blocks come out of the cache, each once.
///
/// The checker looks for orders that matter by the last access to each atomic before the one at
/// hand. A thread that loads a tag before it exchanges it hides the accesses of other threads
/// before its load, so one starting order is not enough: the owner pauses before each of its steps
/// in turn.
fn no_block_is_lost_or_handed_out_twice(tag: Tag, drainers: usize) {
    (0..=3).for_each(|pause| no_block_is_lost_with_a_pause(tag, drainers, pause));
}

fn no_block_is_lost_with_a_pause(tag: Tag, drainers: usize, pause: u64) {
    loom::model(move || {
        let cache = Arc::new(Cache::new());
        let others: Vec<_> = (0..drainers)
            .map(|_| {
                let cache = Arc::clone(&cache);
                thread::spawn(move || drained(&cache))
            })
            .collect();
        let mut all = put_and_take(&cache, tag, pause);
        for other in others {
            all.extend(other.join().expect("a drainer does not panic"));
        }
        all.extend(drained(&cache));
        all.sort_unstable();
        assert_eq!(all, [1, 2]);
    });
}

#[test]
fn a_small_block_is_its_owners_or_the_drainers() {
    no_block_is_lost_or_handed_out_twice(small(), 1);
}

#[test]
fn a_large_block_is_its_owners_or_the_drainers() {
    no_block_is_lost_or_handed_out_twice(large(), 1);
}

#[test]
fn two_drainers_do_not_get_the_same_large_block() {
    no_block_is_lost_or_handed_out_twice(large(), 2);
}

/// The owner delays frees while another thread gathers; each looks with the allocator's lock.
#[test]
fn a_delayed_block_is_returned_once_and_whole() {
    loom::model(|| {
        let cache = Arc::new(Cache::new());
        let returned = Arc::new(Mutex::new(Vec::new()));
        let gather = |cache: &Cache, returned: &Mutex<Vec<u64>>| {
            let mut returned = returned.lock().expect("no thread panics");
            cache.drain_large(|_, kept| returned.push(number(kept)));
        };
        let other = {
            let (cache, returned) = (Arc::clone(&cache), Arc::clone(&returned));
            thread::spawn(move || gather(&cache, &returned))
        };
        for n in [1, 2] {
            if !cache.delay(large(), block(n)) {
                gather(&cache, &returned);
                assert!(cache.delay(large(), block(n)), "the slot is vacant");
            }
        }
        other.join().expect("the gatherer does not panic");
        gather(&cache, &returned);
        assert_eq!(*returned.lock().expect("no thread panics"), [1, 2]);
    });
}

// --- heaps ---

const SIZE: Bytes = Bytes::kib(4);

/// A pool on a simulated card, in the allocator's lock, with one stream.
fn pool() -> (Arc<Mutex<VirtualPool>>, StreamId) {
    use vramp_driver::Driver;
    // On a thread of the system: a model's own stack is too small to build a card on.
    let built = std::thread::spawn(|| {
        let driver: Arc<dyn Driver> = Arc::new(Simulator::builder().build());
        let access = Access::resolve(&*driver, &SharingConfig::default());
        (driver, access.expect("it is possible"))
    });
    let (driver, access) = built.join().expect("a card is built");
    let Config { span, policy, .. } = Config::default();
    let page = driver.info().limits.page;
    let config = PoolConfig { page, span, first_span: span, limit: None, policy };
    let stream = driver.create_stream().expect("a stream can be made");
    let pool = VirtualPool::new(driver, access, config, Progress::Events);
    let mut pool = pool.expect("it is possible");
    let raw = stream;
    let stream = StreamId::new(0);
    pool.add_stream(stream, Some(raw));
    (Arc::new(Mutex::new(pool)), stream)
}

fn take_from_pool(pool: &mut VirtualPool, stream: StreamId) -> Owner {
    match pool.malloc(SIZE, stream, false) {
        Ok(placed) => placed.owner,
        Err(_) => panic!("the card is empty"),
    }
}

fn heap_id(owner: Owner) -> vramp_core::BlockId {
    match owner {
        Owner::Heap { id, .. } => id,
        other => panic!("{other:?} is not in a heap"),
    }
}

/// The owner takes from its heap and frees into it, as a hit that misses the cache does. A slab
/// that the heap does not need goes to the pool without the heap's lock.
fn hit(pool: &Mutex<VirtualPool>, heap: &crate::virtual_pool::HeapCell, stream: StreamId) {
    let taken = heap.lock().take(SIZE);
    let Some(block) = taken else { return };
    let freed = heap.lock().free_in_order(block.id).expect("it was taken");
    if let Freed::Surplus(slab) = freed {
        pool.lock().expect("no thread panics").pool.take_back(slab, stream);
    }
}

/// All memory is accounted for and free.
fn assert_all_is_free(pool: &Mutex<VirtualPool>) {
    let pool = pool.lock().expect("no thread panics");
    pool.audit().expect("every invariant holds");
    assert_eq!(pool.census().used, Bytes::ZERO);
}

#[test]
fn a_free_into_another_threads_heap_meets_its_owners_hits() {
    loom::model(|| {
        let (pool, stream) = pool();
        let (heap, foreign) = {
            let mut pool = pool.lock().expect("no thread panics");
            let foreign = heap_id(take_from_pool(&mut pool, stream));
            (Arc::clone(&pool.heaps.get(stream).expect("it is open")), foreign)
        };
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || {
                pool.lock().expect("no thread panics").free_in_heap(foreign, stream, stream);
            })
        };
        hit(&pool, &heap, stream);
        other.join().expect("the other thread does not panic");
        assert_all_is_free(&pool);
    });
}

#[test]
fn a_gather_meets_a_thread_that_uses_its_cache_and_its_heap() {
    loom::model(|| {
        let (pool, stream) = pool();
        let cache = Arc::new(Cache::new());
        let (heap, first) = {
            let mut pool = pool.lock().expect("no thread panics");
            pool.caches.push(Arc::clone(&cache));
            let first = heap_id(take_from_pool(&mut pool, stream));
            (Arc::clone(&pool.heaps.get(stream).expect("it is open")), first)
        };
        let gatherer = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.lock().expect("no thread panics").gather())
        };
        let tag = Tag::new(stream.index(), SIZE.count() / BLOCK_ALIGN).expect("it fits a tag");
        let kept = CachedBlock { addr: 0, at: 0, id: first.number() };
        assert!(cache.put(tag, kept), "the cache has room");
        hit(&pool, &heap, stream);
        let again = cache.take(tag);
        gatherer.join().expect("the gatherer does not panic");
        if let Some((_, CachedBlock { id, .. })) = again {
            let id = vramp_core::BlockId::from_number(id);
            pool.lock().expect("no thread panics").free_in_heap(id, stream, stream);
        }
        pool.lock().expect("no thread panics").gather();
        assert_all_is_free(&pool);
    });
}

// --- callbacks ---

/// What a callback captured: says when it is dropped.
struct Captured(Arc<loom::sync::atomic::AtomicBool>);

impl Drop for Captured {
    fn drop(&mut self) {
        self.0.store(true, loom::sync::atomic::Ordering::Relaxed);
    }
}

/// Calls a callback once, as `Observers::call` does. It must not have been dropped.
fn call(slot: &Slot<Captured>) {
    let Some(captured) = slot.begin() else { return };
    assert!(!captured.0.load(loom::sync::atomic::Ordering::Relaxed), "it was dropped");
    thread::yield_now();
    assert!(!captured.0.load(loom::sync::atomic::Ordering::Relaxed), "it was dropped");
    drop(captured);
    slot.end();
}

/// One thread removes a callback while others call it. Returns after all have ended.
fn remove_beside_calls(callers: usize, waits: bool) {
    loom::model(move || {
        let dropped = Arc::new(loom::sync::atomic::AtomicBool::new(false));
        let slot = Slot::new(Arc::new(Captured(Arc::clone(&dropped))));
        let others: Vec<_> = (0..callers)
            .map(|_| {
                let slot = Arc::clone(&slot);
                thread::spawn(move || call(&slot))
            })
            .collect();
        drop(slot.remove(waits).expect("no other thread removes it"));
        if waits {
            assert!(dropped.load(loom::sync::atomic::Ordering::Relaxed), "no call is in progress");
        }
        assert!(slot.begin().is_none(), "no call begins");
        for other in others {
            other.join().expect("no call meets a dropped closure");
        }
        assert!(dropped.load(loom::sync::atomic::Ordering::Relaxed), "no closure is lost");
    });
}

#[test]
fn a_removal_that_waits_returns_after_the_last_call_and_drops_the_closure() {
    remove_beside_calls(1, true);
    remove_beside_calls(2, true);
}

#[test]
fn a_removal_inside_a_callback_leaves_the_drop_to_the_last_call() {
    remove_beside_calls(2, false);
}

#[test]
fn of_two_removals_one_finds_the_callback() {
    loom::model(|| {
        let slot = Slot::new(Arc::new(()));
        let other = Arc::clone(&slot);
        let other = thread::spawn(move || other.remove(true).is_some());
        let own = slot.remove(true).is_some();
        assert!(own != other.join().expect("it does not panic"));
    });
}

// --- ends of streams ---

/// A free without the allocator's lock, as `Allocator::free` does it.
fn free_local(
    pool: &Mutex<VirtualPool>,
    cache: &Cache,
    heap: &crate::virtual_pool::HeapCell,
    stream: StreamId,
    id: vramp_core::BlockId,
) {
    let tag = Tag::new(stream.index(), SIZE.count() / BLOCK_ALIGN).expect("it fits a tag");
    let kept = CachedBlock { addr: 0, at: 0, id: id.number() };
    if heap.has_ended() || !cache.put(tag, kept) {
        pool.lock().expect("no thread panics").free_in_heap(id, stream, stream);
    }
}

#[test]
fn a_stream_ends_while_another_thread_frees_its_blocks() {
    loom::model(|| {
        let (pool, stream) = pool();
        let cache = Arc::new(Cache::new());
        let (heap, first, second) = {
            let mut pool = pool.lock().expect("no thread panics");
            pool.caches.push(Arc::clone(&cache));
            let [first, second] = [(); 2].map(|()| heap_id(take_from_pool(&mut pool, stream)));
            (Arc::clone(&pool.heaps.get(stream).expect("it is open")), first, second)
        };
        let ender = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.lock().expect("no thread panics").end_stream(stream, None))
        };
        free_local(&pool, &cache, &heap, stream, first);
        thread::yield_now();
        free_local(&pool, &cache, &heap, stream, second);
        ender.join().expect("the other thread does not panic");
        // What a thread cached while the stream ended is found by the next gather, as all is.
        pool.lock().expect("no thread panics").gather();
        assert_all_is_free(&pool);
        assert!(heap.has_ended(), "no thread takes from it or caches for it any more");
    });
}
