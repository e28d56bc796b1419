//! Models of what threads share on the fast path: every order in which they can run, and every
//! value that a relaxed load may see. `cargo xtask loom` explores them.
//!
//! 1. A thread fills and takes from its cache while others empty it (`cache.rs`).
//! 2. A thread works on its stream's heap while others free into it and gather from it
//!    (`virtual_pool.rs`), with the locks in the allocator's order.

use std::sync::Arc;

use loom::sync::Mutex;
use loom::thread;
use vramp_core::{Bytes, Freed, Policy, PoolConfig, StreamId};
use vramp_driver::sim::Simulator;

use crate::allocation::Owner;
use crate::cache::{Cache, Kept, Tag};
use crate::config::{Config, Preset, Progress};
use crate::virtual_pool::VirtualPool;

// --- caches ---

/// Block number `n`: a torn one shows, for its parts differ.
fn block(n: u64) -> Kept {
    Kept { addr: n, at: n, id: n }
}

fn number(kept: Kept) -> u64 {
    assert!(kept == block(kept.addr), "{kept:?} is torn");
    kept.addr
}

fn small() -> Tag {
    Tag::new(0, 1).expect("one grain on the first stream is kept")
}

fn large() -> Tag {
    Tag::new(0, 1 << 20).expect("half a GiB on the first stream is kept").of_pool()
}

fn drained(cache: &Cache) -> Vec<u64> {
    let mut numbers = Vec::new();
    cache.drain(|_, kept| numbers.push(number(kept)));
    numbers
}

/// The owner of a cache has blocks 1 and 2 in its hands. It puts each into the cache and takes one
/// out again; before the step `pause` it lets others go first. What it has at the end comes back.
fn put_and_take(cache: &Cache, tag: Tag, pause: u64) -> Vec<u64> {
    let mut hands = Vec::new();
    for n in [1, 2] {
        if n == pause {
            thread::yield_now();
        }
        cache.made(tag.grains(), n);
        if !cache.put(tag, block(n)) {
            hands.push(n);
        }
    }
    if pause == 3 {
        thread::yield_now();
    }
    // A request does not know who placed the block.
    let wanted = Tag::new(tag.stream(), tag.grains()).expect("it was one before");
    if let Some((found, kept)) = cache.take(wanted) {
        assert_eq!(found, tag);
        hands.push(number(kept));
    }
    hands
}

/// Both blocks come out of it, each once, whoever got them.
///
/// The checker looks for orders that matter by the last access to each atomic before the one at
/// hand. A thread that loads a tag before it exchanges it hides the accesses of others before its
/// load, so one starting order is not enough: the owner pauses before each of its steps in turn.
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

// --- heaps ---

const SIZE: Bytes = Bytes::kib(4);

/// A pool on a simulated card, behind the allocator's lock, with one stream.
fn pool() -> (Arc<Mutex<VirtualPool>>, StreamId) {
    use vramp_driver::Driver;
    let driver: Arc<dyn Driver> = Arc::new(Simulator::builder().build());
    let Config { span, mixed, .. } = Config::preset(Preset::Vramp);
    let page = driver.info().limits.page;
    let config = PoolConfig { page, span, limit: None, policy: Policy::Mixed(mixed) };
    let stream = driver.create_stream().expect("a stream can be made");
    let mut pool = VirtualPool::new(driver, config, Progress::Events).expect("it is possible");
    let stream = pool.add_stream(stream);
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
        other => panic!("{other:?} is no heap's"),
    }
}

/// The owner takes from its heap and frees into it, as a hit past the cache does. A slab that the
/// heap does not need goes to the pool without the heap's lock.
fn hit(pool: &Mutex<VirtualPool>, heap: &crate::virtual_pool::HeapCell, stream: StreamId) {
    let taken = heap.lock().take(SIZE);
    let Some(block) = taken else { return };
    let freed = heap.lock().free_in_order(block.id).expect("it was taken");
    if let Freed::Surplus(slab) = freed {
        pool.lock().expect("nobody panics").pool.take_back(slab, stream);
    }
}

/// All memory is accounted for and free.
fn assert_all_is_free(pool: &Mutex<VirtualPool>) {
    let pool = pool.lock().expect("nobody panics");
    pool.audit().expect("every invariant holds");
    assert_eq!(pool.census().used, Bytes::ZERO);
}

#[test]
fn a_free_into_another_threads_heap_meets_its_owners_hits() {
    loom::model(|| {
        let (pool, stream) = pool();
        let (heap, foreign) = {
            let mut pool = pool.lock().expect("nobody panics");
            let foreign = heap_id(take_from_pool(&mut pool, stream));
            (Arc::clone(&pool.heaps[stream.index()]), foreign)
        };
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || {
                pool.lock().expect("nobody panics").free_in_heap(foreign, stream, stream);
            })
        };
        hit(&pool, &heap, stream);
        other.join().expect("the other thread does not panic");
        assert_all_is_free(&pool);
    });
}

#[test]
fn a_gather_meets_a_thread_that_puts_and_takes_at_hand_and_in_its_heap() {
    loom::model(|| {
        let (pool, stream) = pool();
        let cache = Arc::new(Cache::new());
        let (heap, first) = {
            let mut pool = pool.lock().expect("nobody panics");
            pool.caches.push(Arc::clone(&cache));
            let first = heap_id(take_from_pool(&mut pool, stream));
            (Arc::clone(&pool.heaps[stream.index()]), first)
        };
        let gatherer = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.lock().expect("nobody panics").gather())
        };
        let tag = Tag::new(stream.index(), SIZE.count() / 512).expect("it is kept");
        let kept = Kept { addr: 0, at: 0, id: first.number() };
        assert!(cache.put(tag, kept), "the cache has room");
        hit(&pool, &heap, stream);
        let again = cache.take(tag);
        gatherer.join().expect("the gatherer does not panic");
        if let Some((_, Kept { id, .. })) = again {
            let id = vramp_core::BlockId::from_number(id);
            pool.lock().expect("nobody panics").free_in_heap(id, stream, stream);
        }
        pool.lock().expect("nobody panics").gather();
        assert_all_is_free(&pool);
    });
}
