//! Memory of another process that stays mapped between two opens: what it saves, and when it goes.
//!
//! The exporter and the importer are two allocators of one simulated card, with an exchange each.

use std::sync::Arc;
use std::time::Instant;

use vramp_alloc::device::Driver;
use vramp_alloc::sharing::{Exchange, IDLE_MAX, OpenedMemory, SharedMemory, range_of};
use vramp_alloc::{Allocation, Allocator, Bytes, Config, StreamId};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_testing::fail_each_call;

use super::*;

struct Pair {
    machine: Machine,
    importer: Allocator,
    /// That of the exporter's process, and that of the importer's.
    exchanges: [Exchange; 2],
}

impl Pair {
    fn new() -> Pair {
        let machine = Machine::new(1);
        let card = Arc::clone(&machine.cards[0]) as Arc<dyn Driver>;
        let importer = Allocator::new(card, Config::default()).unwrap();
        Pair { machine, importer, exchanges: [Exchange::new(), Exchange::new()] }
    }

    fn owner(&self) -> (&Allocator, StreamId) {
        (&self.machine.allocators[0], self.machine.streams[0])
    }

    fn share(&self, block: &Allocation) -> SharedMemory {
        self.exchanges[0].share(self.owner().0.export(block).unwrap()).unwrap()
    }

    fn open(&self, shared: &SharedMemory) -> OpenedMemory {
        self.exchanges[1].open(&self.importer, &shared.ticket().to_bytes()).unwrap()
    }

    /// Frees a block, and waits until no importer has it.
    fn free(&self, block: Allocation, shared: SharedMemory) {
        let (owner, stream) = self.owner();
        let before = owner.exported();
        owner.free(block, stream).unwrap();
        assert!(shared.wait_released(soon()));
        drop(shared);
        until(|| owner.exported() < before);
        owner.wait_for_freed_memory().unwrap();
    }

    fn malloc(&self, size: Bytes, byte: u8) -> (Allocation, SharedMemory) {
        let (owner, stream) = self.owner();
        let block = owner.malloc(size, stream).unwrap();
        self.machine.fill(0, range_of(&block), byte);
        let shared = self.share(&block);
        (block, shared)
    }

    /// Driver calls of either side.
    fn calls(&self) -> u64 {
        const CALLS: [Call; 8] = [
            Call::Reserve,
            Call::FreeAddresses,
            Call::Export,
            Call::Import,
            Call::Map,
            Call::SetAccess,
            Call::Unmap,
            Call::Release,
        ];
        CALLS.map(|call| self.machine.calls(0, call)).iter().sum()
    }

    fn close(self) {
        let Pair { machine, importer, exchanges } = self;
        drop(exchanges);
        importer.close().unwrap();
        machine.close();
    }
}

fn until(reached: impl Fn() -> bool) {
    let deadline = soon();
    while !reached() {
        assert!(Instant::now() < deadline, "it takes too long");
        std::thread::yield_now();
    }
}

#[test]
fn cycles_of_a_small_block_make_no_driver_call_after_the_first() {
    let pair = Pair::new();
    let cycle = |byte| {
        let (block, shared) = pair.malloc(Bytes::kib(4), byte);
        let opened = pair.open(&shared);
        pair.machine.holds(0, opened.range(), byte);
        opened.close().unwrap();
        pair.free(block, shared);
    };
    cycle(1);
    let before = pair.calls();
    (0..300).for_each(|number| cycle(number as u8));
    assert_eq!(pair.calls(), before);
    assert!(pair.importer.idle_imports() > Bytes::ZERO);
    pair.close();
}

#[test]
fn blocks_of_one_handle_and_a_block_opened_again_take_no_driver_call() {
    let pair = Pair::new();
    let blocks: Vec<_> = (0..20).map(|byte| pair.malloc(Bytes::kib(64), byte)).collect();
    let first = pair.open(&blocks[0].1);
    let before = pair.calls();
    let opened: Vec<_> = blocks.iter().map(|(_, shared)| pair.open(shared)).collect();
    for (byte, opened) in opened.iter().enumerate() {
        pair.machine.holds(0, opened.range(), byte as u8);
    }
    assert_eq!(first.range(), opened[0].range());
    drop((first, opened));
    let again = pair.open(&blocks[7].1);
    pair.machine.holds(0, again.range(), 7);
    drop(again);
    assert_eq!(pair.calls(), before);
    blocks.into_iter().for_each(|(block, shared)| pair.free(block, shared));
    pair.close();
}

#[test]
fn a_block_at_another_place_of_known_memory_maps_what_is_new() {
    let pair = Pair::new();
    let (owner, stream) = pair.owner();
    let (large, shared) = pair.malloc(MIB(256), 3);
    let handles = owner.export(&large).unwrap().description().handles.len() as u64;
    assert!(handles > 4);
    pair.open(&shared).close().unwrap();
    assert_eq!(pair.importer.idle_imports(), MIB(256));
    pair.free(large, shared);
    // The next block begins behind a small one, and ends in memory that is new.
    let front = owner.malloc(MIB(24), stream).unwrap();
    let imports = pair.machine.calls(0, Call::Import);
    let (large, shared) = pair.malloc(MIB(256), 4);
    let opened = pair.open(&shared);
    pair.machine.holds(0, opened.range(), 4);
    let new = pair.machine.calls(0, Call::Import) - imports;
    assert!(new < handles / 2, "{new} of {handles} handles");
    opened.close().unwrap();
    owner.free(front, stream).unwrap();
    pair.free(large, shared);
    pair.close();
}

/// The first block of many handles is as it is. From then on large blocks have few, whether their memory is new or
/// was free before, and small ones do not pin those.
#[test]
fn large_blocks_of_a_pool_that_shares_large_blocks_lie_in_few_handles() {
    let builder = Simulator::builder().memory(Bytes::gib(16));
    let card: Arc<dyn Driver> = Arc::new(builder.checked().build());
    let owner = Allocator::new(Arc::clone(&card), Config::default()).unwrap();
    let stream = owner.create_stream().unwrap();
    let handles = |block: &Allocation| owner.export(block).unwrap().description().handles.len();
    let gib = Bytes::gib(1);
    // Neither small blocks nor blocks in few handles change anything.
    for size in [Bytes::kib(4), MIB(20)] {
        let block = owner.malloc(size, stream).unwrap();
        handles(&block);
        owner.free(block, stream).unwrap();
    }
    let [first, second] = [(); 2].map(|()| owner.malloc(gib, stream).unwrap());
    assert!(handles(&first) > 16, "{}", handles(&first));
    let new = owner.malloc(gib, stream).unwrap();
    assert!(handles(&new) <= 3, "{}", handles(&new));
    for block in [first, second] {
        owner.free(block, stream).unwrap();
    }
    owner.wait_for_freed_memory().unwrap();
    let reserved = owner.stats().unwrap().reserved;
    let again = [(); 2].map(|()| owner.malloc(gib, stream).unwrap());
    for block in &again {
        assert!(handles(block) <= 3, "{}", handles(block));
    }
    assert_eq!(owner.stats().unwrap().reserved, reserved, "of the same memory");
    owner.audit().unwrap();
    for block in again {
        owner.free(block, stream).unwrap();
    }
    // Blocks come and go, and what is reserved stays near what is allocated.
    let mut random = fastrand::Rng::with_seed(1);
    let mut blocks: Vec<Allocation> = Vec::new();
    for _ in 0..400 {
        if blocks.len() > 12 {
            owner.free(blocks.swap_remove(random.usize(..blocks.len())), stream).unwrap();
        } else {
            let size = [MIB(2), MIB(40), MIB(300), gib][random.usize(..4)];
            blocks.push(owner.malloc(size, stream).unwrap());
        }
        if random.u8(..4) == 0 {
            owner.wait_for_freed_memory().unwrap();
        }
        owner.audit().unwrap();
    }
    blocks.into_iter().for_each(|block| owner.free(block, stream).unwrap());
    owner.free(new, stream).unwrap();
    owner.close().unwrap();
}

/// The driver's time of an open on the simulated clock, with the costs of an H200. An importer's set-access takes
/// twice as long there as the exporter's, which the simulator does not model.
#[test]
fn an_open_of_a_gib_takes_the_time_of_its_few_handles_and_none_once_they_are_mapped() {
    let card: Arc<dyn Driver> = Arc::new(Simulator::card("h200").unwrap());
    let [owner, importer] =
        [(); 2].map(|()| Allocator::new(Arc::clone(&card), Config::default()).unwrap());
    let (exporter, opener) = (Exchange::new(), Exchange::new());
    let stream = owner.create_stream().unwrap();
    let open = || {
        let block = owner.malloc(Bytes::gib(1), stream).unwrap();
        let shared = exporter.share(owner.export(&block).unwrap()).unwrap();
        let micros = [(); 2].map(|()| {
            let begin = card.now_ns();
            opener.open(&importer, &shared.ticket().to_bytes()).unwrap().close().unwrap();
            (card.now_ns() - begin) / 1000
        });
        (block, micros)
    };
    let (_first, first) = open();
    let (_second, second) = open();
    assert!(first[0] > 900, "{first:?}: 32 handles or more");
    assert!(second[0] < 250, "{second:?}");
    assert_eq!((first[1], second[1]), (0, 0));
    drop((opener, exporter));
}

#[test]
fn idle_memory_is_the_exporters_to_use() {
    let pair = Pair::new();
    let (block, shared) = pair.malloc(MIB(64), 1);
    pair.open(&shared).close().unwrap();
    pair.free(block, shared);
    let (owner, stream) = pair.owner();
    let created = pair.machine.calls(0, Call::Create);
    let block = owner.malloc(MIB(64), stream).unwrap();
    pair.machine.fill(0, range_of(&block), 2);
    assert_eq!(pair.machine.calls(0, Call::Create), created, "it is the same memory");
    assert_eq!(pair.importer.idle_imports(), MIB(64));
    owner.free(block, stream).unwrap();
    pair.close();
}

#[test]
fn what_the_exporter_releases_leaves_the_card() {
    let pair = Pair::new();
    let (owner, stream) = pair.owner();
    for round in 0..3 {
        let (block, shared) = pair.malloc(MIB(64), round);
        let (other, other_shared) = pair.malloc(MIB(8), 9);
        let open = pair.open(&other_shared);
        pair.open(&shared).close().unwrap();
        assert!(pair.importer.idle_imports() >= MIB(60));
        pair.free(block, shared);
        owner.trim(Bytes::ZERO).unwrap();
        until(|| pair.importer.idle_imports().is_zero());
        until(|| pair.machine.cards[0].live().device_bytes < MIB(64));
        // What is open stays, and is unmapped when it is closed: its watch ended.
        pair.machine.holds(0, open.range(), 9);
        open.close().unwrap();
        assert_eq!(pair.importer.idle_imports(), Bytes::ZERO);
        pair.free(other, other_shared);
        owner.trim(Bytes::ZERO).unwrap();
        until(|| pair.machine.cards[0].live().device_bytes.is_zero());
    }
    // A request that needs the card's memory at once waits for the importer.
    let (block, shared) = pair.malloc(MIB(700), 1);
    pair.open(&shared).close().unwrap();
    pair.free(block, shared);
    owner.trim(Bytes::ZERO).unwrap();
    let block = owner.malloc(MIB(900), stream).unwrap();
    owner.free(block, stream).unwrap();
    pair.close();
}

#[test]
fn an_exporter_that_ends_leaves_nothing_idle() {
    let Pair { machine, importer, exchanges: [exporter, opener] } = Pair::new();
    let (owner, stream) = (&machine.allocators[0], machine.streams[0]);
    let block = owner.malloc(MIB(32), stream).unwrap();
    let shared = exporter.share(owner.export(&block).unwrap()).unwrap();
    opener.open(&importer, &shared.ticket().to_bytes()).unwrap().close().unwrap();
    assert_eq!(importer.idle_imports(), MIB(32));
    drop((shared, exporter));
    until(|| importer.idle_imports().is_zero());
    owner.free(block, stream).unwrap();
    drop(opener);
    importer.close().unwrap();
    machine.close();
}

#[test]
fn a_trim_a_shortage_and_a_close_of_the_importer_unmap_what_is_idle() {
    let pair = Pair::new();
    let (block, shared) = pair.malloc(MIB(64), 1);
    pair.open(&shared).close().unwrap();
    pair.importer.trim(Bytes::ZERO).unwrap();
    assert_eq!(pair.importer.idle_imports(), Bytes::ZERO);
    pair.open(&shared).close().unwrap();
    let stream = pair.importer.create_stream().unwrap();
    assert!(pair.importer.malloc(MIB(1000), stream).is_err());
    assert_eq!(pair.importer.idle_imports(), Bytes::ZERO);
    // An import may outlive its allocator.
    let opened = pair.open(&shared);
    let Pair { machine, importer, exchanges } = pair;
    importer.close().unwrap();
    machine.holds(0, opened.range(), 1);
    opened.close().unwrap();
    machine.allocators[0].free(block, machine.streams[0]).unwrap();
    assert!(shared.wait_released(soon()));
    drop((shared, exchanges));
    until(|| machine.allocators[0].exported() == 0);
    machine.close();
}

#[test]
fn no_more_than_a_bound_stays_mapped() {
    let builder = Simulator::builder().memory(IDLE_MAX * 3);
    let card: Arc<dyn Driver> = Arc::new(builder.checked().build());
    let [owner, importer] =
        [(); 2].map(|()| Allocator::new(Arc::clone(&card), Config::default()).unwrap());
    let (exporter, opener) = (Exchange::new(), Exchange::new());
    let stream = owner.create_stream().unwrap();
    let mut blocks = Vec::new();
    for _ in 0..12 {
        let block = owner.malloc(Bytes::gib(1), stream).unwrap();
        let shared = exporter.share(owner.export(&block).unwrap()).unwrap();
        opener.open(&importer, &shared.ticket().to_bytes()).unwrap().close().unwrap();
        // Not freed: the next one lies elsewhere.
        blocks.push(block);
        assert!(importer.idle_imports() <= IDLE_MAX);
    }
    assert!(importer.idle_imports() > Bytes::gib(3));
    drop((opener, exporter));
}

#[test]
fn an_open_of_which_any_call_fails_leaves_nothing() {
    let pair = Pair::new();
    let (owner, _) = pair.owner();
    let mut failures = 0;
    for call in [Call::Reserve, Call::Import, Call::Map, Call::SetAccess] {
        fail_each_call(|nth| {
            let (block, shared) = pair.malloc(MIB(64), 5);
            let before = pair.machine.cards[0].live();
            let calls = pair.machine.calls(0, call);
            pair.machine.cards[0].set_faults(FaultPlan::nth_of(call, nth).with_code(800));
            let ticket = shared.ticket().to_bytes();
            let opened = pair.exchanges[1].open(&pair.importer, &ticket);
            pair.machine.cards[0].set_faults(FaultPlan::none());
            let made = pair.machine.calls(0, call) - calls;
            match opened {
                Ok(opened) => {
                    pair.machine.holds(0, opened.range(), 5);
                    opened.close().unwrap();
                }
                Err(_) => failures += 1,
            }
            pair.importer.trim(Bytes::ZERO).unwrap();
            let after = pair.machine.cards[0].live();
            assert_eq!(
                (after.handles, after.mappings, after.device_bytes),
                (before.handles, before.mappings, before.device_bytes),
                "{call} {nth}"
            );
            pair.free(block, shared);
            owner.trim(Bytes::ZERO).unwrap();
            made
        });
    }
    assert!(failures > 8, "there are several handles: {failures} failures");
    pair.close();
}

/// Threads open and close blocks of the same handles, while the exporter releases others.
#[test]
fn threads_share_the_handles_that_they_open() {
    let pair = Pair::new();
    let blocks: Vec<_> = (1..5).map(|byte| pair.malloc(MIB(24), byte)).collect();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (pair, blocks) = (&pair, &blocks);
            scope.spawn(move || {
                for round in 0..60 {
                    let number = (thread + round) % blocks.len();
                    let opened = pair.open(&blocks[number].1);
                    pair.machine.holds(0, opened.range(), number as u8 + 1);
                    opened.close().unwrap();
                }
            });
        }
        for _ in 0..20 {
            let (block, shared) = pair.malloc(MIB(64), 9);
            pair.open(&shared).close().unwrap();
            pair.free(block, shared);
            pair.owner().0.trim(Bytes::ZERO).unwrap();
        }
    });
    blocks.into_iter().for_each(|(block, shared)| pair.free(block, shared));
    pair.close();
}
