//! What a hit must not do: call the driver, or take heap memory.

use vramp_alloc::{Allocation, Bytes};
use vramp_driver::sim::Simulator;

use crate::common::{Random, Rig};

const SIZES: [Bytes; 5] =
    [Bytes::new(512), Bytes::kib(64), Bytes::mib(1), Bytes::mib(4), Bytes::mib(256)];

/// One allocator whose driver calls are in a log. The log takes heap memory for each call, so a
/// call would be seen twice.
fn rig() -> Rig {
    let config = vramp_alloc::Config::default();
    Rig::on(Simulator::builder().logged(1 << 12), config)
}

/// `work` takes and frees no heap memory on this thread and makes no driver call.
fn assert_free_of_cost(rig: &Rig, what: &str, work: impl FnOnce()) {
    rig.sim.take_log();
    let used = allocation_counter::measure(work);
    assert_eq!(used.count_total, 0, "{what}: {} bytes of heap memory", used.bytes_total);
    let calls = rig.sim.take_log();
    assert!(calls.is_empty(), "{what}: {calls:?}");
}

fn pairs(rig: &Rig, size: Bytes, count: usize) {
    for _ in 0..count {
        let block = rig.allocator.malloc(size, rig.stream).unwrap();
        rig.allocator.free(block, rig.stream).unwrap();
    }
}

#[test]
fn a_counter_that_counts_is_what_sees_no_heap_memory() {
    let used = allocation_counter::measure(|| drop(std::hint::black_box(Box::new(1))));
    assert_eq!(used.count_total, 1);
}

#[test]
fn a_pair_of_any_size_takes_no_heap_memory_and_calls_no_driver() {
    for size in SIZES {
        let rig = rig();
        pairs(&rig, size, 2);
        assert_free_of_cost(&rig, &size.to_string(), || pairs(&rig, size, 100));
        rig.allocator.audit().unwrap();
        rig.close();
    }
}

#[test]
fn pairs_of_all_sizes_in_one_allocator_call_no_driver() {
    let rig = rig();
    let all = || SIZES.iter().for_each(|&size| pairs(&rig, size, 3));
    all();
    rig.sim.take_log();
    all();
    assert_eq!(rig.sim.take_log(), []);
    rig.close();
}

/// Frees a block of 32 and takes another, so often.
fn churn(rig: &Rig, held: &mut [Option<Allocation>], sizes: &[Bytes], steps: u64) {
    let mut random = Random(7);
    for _ in 0..steps {
        let slot = random.below(held.len() as u64) as usize;
        if let Some(block) = held[slot].take() {
            rig.allocator.free(block, rig.stream).unwrap();
        }
        held[slot] = Some(rig.allocator.malloc(*random.pick(sizes), rig.stream).unwrap());
    }
}

#[test]
fn small_blocks_with_32_outstanding_take_no_heap_memory_and_call_no_driver() {
    let sizes: Vec<Bytes> = (1..=128).map(|grains| Bytes::new(grains * 512)).collect();
    let rig = rig();
    let mut held: Vec<Option<Allocation>> = (0..32).map(|_| None).collect();
    // The same steps before and while it is measured: the heap has seen as many pieces as it needs.
    churn(&rig, &mut held, &sizes, 10_000);
    assert_free_of_cost(&rig, "32 outstanding", || churn(&rig, &mut held, &sizes, 10_000));
    let stats = rig.allocator.stats().unwrap();
    assert!(stats.misses < 10, "{} misses", stats.misses);
    held.into_iter().flatten().for_each(|block| rig.free(block));
    rig.close();
}

#[test]
fn a_heap_serves_blocks_that_are_not_at_hand_without_heap_memory_or_a_driver_call() {
    let rig = rig();
    // More of one size than a thread caches.
    let take = || rig.allocator.malloc(Bytes::kib(4), rig.stream).unwrap();
    let give = |block| rig.allocator.free(block, rig.stream).unwrap();
    let mut blocks = Vec::with_capacity(64);
    let mut round = || {
        blocks.extend((0..64).map(|_| take()));
        blocks.drain(..).for_each(give);
    };
    round();
    assert_free_of_cost(&rig, "64 in a row", round);
    rig.close();
}

/// Two blocks of 16 MiB, of which the older one was freed: its thread cannot cache it.
fn with_an_older_one_freed(rig: &Rig) -> Allocation {
    let [older, newer] = [(); 2].map(|()| rig.allocator.malloc(LARGE, rig.stream).unwrap());
    rig.allocator.free(older, rig.stream).unwrap();
    newer
}

const LARGE: Bytes = Bytes::mib(16);

#[test]
fn a_free_of_a_large_block_takes_no_lock_and_its_own_thread_sees_no_difference() {
    let rig = rig();
    let newer = with_an_older_one_freed(&rig);
    let seen_by_another =
        std::thread::scope(|scope| scope.spawn(|| rig.allocator.census().at_hand).join().unwrap());
    assert_eq!(seen_by_another, LARGE, "the pool does not have it yet");
    assert_eq!(rig.allocator.live(), LARGE);
    assert_eq!(rig.allocator.census().at_hand, Bytes::ZERO);
    // A second free in a row takes the lock, after the first one.
    rig.allocator.free(newer, rig.stream).unwrap();
    let whole = rig.allocator.malloc(LARGE + LARGE, rig.stream).unwrap();
    assert_eq!(rig.allocator.stats().unwrap().reserved, LARGE + LARGE, "both were free");
    rig.free(whole);
    rig.close();
}

#[test]
fn a_request_of_another_thread_gets_a_block_whose_free_was_delayed_and_creates_no_memory() {
    let rig = rig();
    let newer = with_an_older_one_freed(&rig);
    let before = rig.allocator.stats().unwrap().reserved;
    let again = with_an_older_one_freed(&rig);
    let others = std::thread::scope(|scope| {
        scope.spawn(|| rig.allocator.malloc(LARGE, rig.stream).unwrap()).join().unwrap()
    });
    let after = rig.allocator.stats().unwrap();
    assert_eq!((after.live, after.reserved), (LARGE * 3, before.max(LARGE * 3)));
    for block in [newer, again, others] {
        rig.free(block);
    }
    rig.allocator.audit().unwrap();
    rig.close();
}

/// A hit that had to copy its result would cost a fifth more.
#[test]
fn an_error_takes_no_more_room_than_the_allocation_it_stands_for() {
    let with_error = size_of::<Result<vramp_alloc::Allocation, vramp_alloc::AllocError>>();
    assert_eq!(with_error, size_of::<vramp_alloc::Allocation>());
}
