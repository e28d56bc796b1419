//! Arenas for caches: pages of many tensors that come and go together, what a full card, a failing call and a
//! slow stream do to them, and what each step costs in driver calls.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use vramp_alloc::kv::{Arena, Arrangement, KvError, Layout, Options, PageRanges, PageState};
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, Config, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_driver::Call;
use vramp_driver::sim::{Contents, FaultPlan, Kernel, Simulator};
use vramp_testing::{fail_each_call, seeds};

use crate::common;
use crate::common::range_rig::{MIB, RangeRig};

/// Four tensors of 64 pages of 2 MiB.
const LAYOUT: Layout =
    Layout { tensors: 4, bytes_each: MIB_128, page: PAGE, arrangement: Arrangement::Separate };
const PAGE: Bytes = Bytes::mib(2);
const MIB_128: Bytes = Bytes::mib(128);

fn rig() -> RangeRig {
    RangeRig::limited(MIB(512))
}

fn arena(rig: &RangeRig) -> Arena {
    let options = Options { superpage: MIB(32), ..Options::default() };
    rig.allocator.kv_arena(LAYOUT, options).unwrap()
}

/// The addresses of pages in a tensor that is contiguous.
fn at(arena: &Arena, tensor: u32, pages: Range<u32>) -> AddrRange {
    let page = arena.layout().page;
    let start = arena.range(tensor).start + page * u64::from(pages.start);
    AddrRange::new(start, page * pages.len() as u64)
}

fn count(arena: &Arena) -> (u32, u32) {
    let stats = arena.stats();
    assert_eq!(stats.moving, 0);
    (stats.committed, stats.parked)
}

#[test]
fn pages_of_all_tensors_come_and_go_at_addresses_that_stay() {
    let rig = rig();
    let cache = arena(&rig);
    assert_eq!(cache.pages(), 64);
    assert_eq!(cache.whole().len, MIB(512));
    assert_eq!(rig.sim.live().handles, 0, "no memory yet");
    cache.commit([0..16, 40..41], rig.stream).unwrap();
    for tensor in 0..4 {
        assert_eq!(cache.range(tensor).start, cache.whole().start + MIB_128 * u64::from(tensor));
        rig.fill(at(&cache, tensor, 0..16), tensor as u8 + 1);
        rig.fill(at(&cache, tensor, 40..41), 9);
    }
    assert_eq!(count(&cache), (17, 0));
    // 16 neighbours share a handle in each tensor.
    assert_eq!(rig.sim.live().handles, 8);
    cache.park(2..5, rig.stream).unwrap();
    let calls = rig.sim.calls();
    cache.commit(3..4, rig.stream).unwrap();
    assert_eq!(rig.sim.calls(), calls, "a parked page is committed for no driver call");
    assert_eq!(count(&cache), (15, 2));
    assert_eq!(cache.state(4), Some(PageState::Parked));
    assert_eq!(cache.state(5), Some(PageState::Committed));
    assert_eq!(cache.state(17), Some(PageState::Absent));
    assert_eq!(cache.state(64), None);
    rig.holds(at(&cache, 2, 5..16), 3);
    rig.allocator.audit().unwrap();
    drop(cache);
    rig.allocator.trim(Bytes::ZERO).unwrap();
    assert_eq!(rig.allocator.reserved(), Bytes::ZERO);
    assert!(rig.sim.hazards().is_empty());
}

#[test]
fn a_page_of_interleaved_tensors_is_one_handle() {
    let rig = rig();
    let layout = Layout { arrangement: Arrangement::Interleaved, tensors: 5, ..LAYOUT };
    let options = Options::default();
    let cache = rig.allocator.kv_arena(layout, options).unwrap();
    assert_eq!(cache.range(3).start, cache.whole().start + PAGE * 3);
    cache.commit([7..8, 63..64], rig.stream).unwrap();
    assert_eq!(rig.sim.live().handles, 2);
    rig.fill(AddrRange::new(cache.whole().start + MIB(10) * 7, MIB(10)), 1);
    cache.park(7..8, rig.stream).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), MIB(10));
    assert_eq!(count(&cache), (1, 0));
}

#[test]
fn wrong_pages_are_named_and_change_nothing() {
    let rig = rig();
    let cache = arena(&rig);
    cache.commit(10..20, rig.stream).unwrap();
    cache.park(12..14, rig.stream).unwrap();
    let commit = |pages: &dyn PageRanges| cache.commit(pages, rig.stream).unwrap_err();
    let park = |pages: &dyn PageRanges| cache.park(pages, rig.stream).unwrap_err();
    assert!(matches!(commit(&[0..1, 60..66]), KvError::Beyond { page: 64, pages: 64 }));
    assert!(matches!(commit(&(70..71)), KvError::Beyond { page: 70, .. }));
    assert!(matches!(commit(&[30..33, 0..2, 32..40]), KvError::Twice { page: 32 }));
    assert!(matches!(commit(&[0..1, 12..15]), KvError::Committed { page: 14 }));
    assert!(matches!(park(&(10..13)), KvError::NotCommitted { page: 12 }));
    assert!(matches!(park(&[10..11, 10..11]), KvError::Twice { page: 10 }));
    assert!(matches!(park(&(63..65)), KvError::Beyond { page: 64, .. }));
    let foreign = StreamId::new(77);
    assert!(matches!(cache.commit(0..1, foreign), Err(KvError::UnknownStream(s)) if s == foreign));
    assert!(matches!(cache.park(10..11, foreign), Err(KvError::UnknownStream(_))));
    assert!(matches!(cache.take(57, rig.stream), Err(KvError::NoPages { left: 56 })));
    assert_eq!(count(&cache), (8, 2));
    cache.commit([], rig.stream).unwrap();
    rig.allocator.audit().unwrap();

    let layout = |layout: Layout| rig.allocator.kv_arena(layout, Options::default()).unwrap_err();
    assert!(matches!(layout(Layout { page: MIB(3), ..LAYOUT }), KvError::Layout { .. }));
    assert!(matches!(layout(Layout { page: Bytes::ZERO, ..LAYOUT }), KvError::Layout { .. }));
    assert!(matches!(layout(Layout { tensors: 0, ..LAYOUT }), KvError::Layout { .. }));
    let longest = Layout { bytes_each: Bytes::MAX, ..LAYOUT };
    assert!(matches!(layout(longest), KvError::Layout { .. }));
    rig.allocator.close().unwrap();
    assert!(matches!(commit(&(0..1)), KvError::Unusable(_)));
    assert!(matches!(park(&(10..11)), KvError::Unusable(_)));
    assert_eq!(count(&cache), (0, 0));
}

#[test]
fn parked_pages_are_lent_when_the_process_is_short_and_not_before() {
    let rig = rig();
    let cache = arena(&rig);
    cache.commit(0..64, rig.stream).unwrap();
    cache.park(0..48, rig.stream).unwrap();
    // 256 MiB fit beside what is committed: the oldest parked pages go.
    let block = rig.allocator.malloc(MIB(256), rig.stream).unwrap();
    assert_eq!(count(&cache), (16, 16));
    let none = rig.allocator.malloc(MIB(256), rig.stream);
    assert!(matches!(none, Err(AllocError::OutOfMemory(_))));
    rig.allocator.free(block, rig.stream).unwrap();
    cache.commit(0..48, rig.stream).unwrap();
    assert_eq!(count(&cache), (64, 0));
    let Err(KvError::Memory(AllocError::OutOfMemory(_))) = ({
        cache.park(0..16, rig.stream).unwrap();
        let _block = rig.allocator.malloc(MIB(128), rig.stream).unwrap();
        cache.commit(0..16, rig.stream)
    }) else {
        panic!("the block has the memory")
    };
    assert_eq!(count(&cache).0, 48, "nothing of it is committed");
    rig.allocator.audit().unwrap();
    assert!(rig.sim.hazards().is_empty());
}

#[test]
fn what_is_parked_behind_work_is_not_lent_before_that_is_over() {
    let rig = rig();
    let cache = arena(&rig);
    let other = rig.allocator.create_stream().unwrap();
    cache.commit(0..64, rig.stream).unwrap();
    let gate = rig.sim.gate();
    let kernel = Kernel::new("decode").writing(at(&cache, 1, 0..64)).until(gate);
    rig.sim.launch(rig.queue, kernel).unwrap();
    cache.park(0..32, rig.stream).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), Bytes::ZERO, "it waits for no work");
    assert_eq!(count(&cache), (32, 32));
    // Another stream has them at once, and is ordered behind that work.
    let waits = rig.sim.calls_of(Call::Wait);
    cache.commit(0..16, other).unwrap();
    assert_eq!(rig.sim.calls_of(Call::Wait), waits + 1);
    let raw = rig.allocator.stream(other).unwrap();
    rig.sim.launch(raw, Kernel::new("prefill").writing(at(&cache, 1, 0..16))).unwrap();
    rig.sim.open(gate);
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), MIB(128));
    assert_eq!(count(&cache), (48, 0));
    assert!(rig.sim.hazards().is_empty(), "{:?}", rig.sim.hazards());
}

#[test]
fn a_commit_waits_as_long_as_one_request_however_many_tensors_there_are() {
    let patience = Duration::from_millis(150);
    let config = Config { limit: Some(MIB(64)), patience, ..Config::default() };
    let rig = RangeRig::with(config);
    let layout = Layout { tensors: 16, bytes_each: MIB(32), ..LAYOUT };
    let cache = rig.allocator.kv_arena(layout, Options::default()).unwrap();
    let blocks: Vec<Allocation> =
        (0..32).map(|_| rig.allocator.malloc(PAGE, rig.stream).unwrap()).collect();
    std::thread::scope(|scope| {
        // Each comes in time for one tensor, and all of them do not for 16.
        scope.spawn(|| {
            for block in blocks {
                std::thread::sleep(Duration::from_millis(50));
                rig.allocator.free(block, rig.stream).unwrap();
            }
        });
        let error = cache.commit(0..1, rig.stream).unwrap_err();
        assert!(matches!(error, KvError::Memory(AllocError::OutOfMemory(_))), "{error}");
    });
    assert_eq!(cache.stats().committed, 0);
    cache.commit(0..1, rig.stream).unwrap();
    rig.allocator.audit().unwrap();
}

#[test]
fn a_handle_goes_back_once_none_of_its_pages_is_committed_and_the_hints_say_which() {
    let rig = rig();
    let cache = arena(&rig);
    cache.commit([0..16, 16..32], rig.stream).unwrap();
    cache.park([0..4, 16..31], rig.stream).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), Bytes::ZERO);
    assert_eq!(cache.park_first(3), [31..32, 4..6]);
    cache.park(cache.park_first(1), rig.stream).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), MIB(128));
    assert_eq!(count(&cache), (12, 4));
    // Those of the handle that stayed cost nothing still.
    let calls = rig.sim.calls();
    assert_eq!(*cache.take(4, rig.stream).unwrap().ranges(), *(0..4).ranges());
    assert_eq!(rig.sim.calls(), calls);
    assert_eq!(*cache.take(2, rig.stream).unwrap().ranges(), *(16..18).ranges());
}

#[test]
fn a_limit_holds_and_parked_pages_make_room_below_it() {
    let rig = rig();
    let options = Options { limit: Some(MIB(8) * 20), superpage: PAGE, ..Options::default() };
    let cache = rig.allocator.kv_arena(LAYOUT, options).unwrap();
    cache.commit(0..20, rig.stream).unwrap();
    let error = cache.commit(20..21, rig.stream).unwrap_err();
    assert!(matches!(error, KvError::Limit { over, limit } if over == MIB(8) && limit == MIB(160)));
    cache.park(0..5, rig.stream).unwrap();
    cache.commit(20..23, rig.stream).unwrap();
    assert_eq!(count(&cache), (18, 2));
    assert!(rig.allocator.reserved() <= MIB(160), "lent memory was used again");
    cache.set_limit(Some(MIB(8) * 10)).unwrap();
    assert_eq!(count(&cache), (18, 0));
    assert!(matches!(cache.commit(0..1, rig.stream), Err(KvError::Limit { .. })));
    cache.set_limit(None).unwrap();
    cache.commit(0..5, rig.stream).unwrap();
    assert_eq!(cache.stats().limit, None);
    // With a handle of which a page is in use, the limit cannot hold.
    let options = Options { limit: Some(MIB(8) * 16), superpage: MIB(32), ..Options::default() };
    let cache = rig.allocator.kv_arena(LAYOUT, options).unwrap();
    cache.commit(0..16, rig.stream).unwrap();
    cache.park(0..15, rig.stream).unwrap();
    assert!(matches!(cache.commit(16..18, rig.stream), Err(KvError::InUse { .. })));
    assert_eq!(count(&cache), (1, 15));
    cache.commit(0..15, rig.stream).unwrap();
}

#[test]
fn pinned_pages_stay_where_they_are() {
    let rig = rig();
    let cache = arena(&rig);
    cache.commit(0..32, rig.stream).unwrap();
    let pin = rig.allocator.pin_range(at(&cache, 0, 3..4)).unwrap();
    cache.park(0..32, rig.stream).unwrap();
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), MIB(256) - MIB(32));
    assert_eq!(count(&cache), (0, 16), "16 pages have memory in one tensor still");
    rig.allocator.audit().unwrap();
    drop(pin);
    assert_eq!(cache.release(Bytes::ZERO).unwrap(), MIB(32));
    assert_eq!(count(&cache), (0, 0));
    assert!(rig.sim.hazards().is_empty());
}

#[test]
fn a_failing_driver_call_commits_nothing_and_loses_nothing() {
    fail_each_call(|nth| {
        let rig = rig();
        let other = rig.allocator.create_stream().unwrap();
        let cache = arena(&rig);
        cache.commit(0..20, rig.stream).unwrap();
        cache.park(0..10, rig.stream).unwrap();
        rig.fill(at(&cache, 3, 10..20), 5);
        rig.sim.set_faults(FaultPlan::nth(nth));
        let before = rig.sim.calls();
        let committed = cache.commit([5..10, 30..50], other);
        let calls = rig.sim.calls() - before;
        rig.sim.set_faults(FaultPlan::none());
        rig.allocator.audit().unwrap();
        match committed {
            Ok(()) => assert_eq!(cache.stats().committed, 35),
            Err(_) => {
                assert_eq!(cache.stats().committed, 10);
                assert_eq!(cache.state(7), Some(PageState::Parked));
            }
        }
        rig.holds(at(&cache, 3, 10..20), 5);
        if cache.stats().committed == 10 {
            cache.commit([5..10, 30..50], other).unwrap();
        }
        let raw = rig.allocator.stream(other).unwrap();
        for tensor in 0..4 {
            rig.sim.launch(raw, Kernel::new("use").writing(at(&cache, tensor, 30..50))).unwrap();
        }
        rig.sim.synchronize_stream(raw).unwrap();
        drop(cache);
        rig.allocator.trim(Bytes::ZERO).unwrap();
        assert_eq!(rig.allocator.reserved(), Bytes::ZERO, "call {nth}");
        assert!(rig.sim.hazards().is_empty());
        calls
    });
}

/// What one random program has.
struct Random {
    rig: RangeRig,
    streams: Vec<StreamId>,
    cache: Arena,
    /// The stream that uses each committed page.
    pages: Vec<Option<StreamId>>,
    blocks: Vec<(Allocation, StreamId)>,
    rng: fastrand::Rng,
}

impl Random {
    fn new(seed: u64) -> Random {
        let rig = rig();
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut streams = vec![rig.stream];
        streams.extend((0..2).map(|_| rig.allocator.create_stream().unwrap()));
        let superpage = *rng.choice([PAGE, MIB(8), MIB(32)].iter()).unwrap();
        let arrangement =
            *rng.choice([Arrangement::Separate, Arrangement::Interleaved].iter()).unwrap();
        let ahead = if rng.bool() { MIB(64) } else { Bytes::ZERO };
        let options = Options { superpage, ahead, ..Options::default() };
        let cache = rig.allocator.kv_arena(Layout { arrangement, ..LAYOUT }, options).unwrap();
        let pages = vec![None; cache.pages() as usize];
        Random { rig, streams, cache, pages, blocks: Vec::new(), rng }
    }

    fn stream(&mut self) -> StreamId {
        *self.rng.choice(self.streams.iter()).unwrap()
    }

    fn some_pages(&mut self, committed: Option<StreamId>) -> Vec<Range<u32>> {
        let mut chosen: Vec<u32> = (0..self.pages.len() as u32).collect();
        chosen.retain(|&page| self.pages[page as usize] == committed);
        self.rng.shuffle(&mut chosen);
        chosen.truncate(self.rng.usize(1..=24));
        if self.rng.bool() {
            chosen.sort_unstable();
        }
        chosen.into_iter().map(|page| page..page + 1).collect()
    }

    fn use_page(&self, page: u32, stream: StreamId) {
        let raw = self.rig.allocator.stream(stream).unwrap();
        for tensor in 0..4u64 {
            let offset = match self.cache.layout().arrangement {
                Arrangement::Separate => MIB_128 * tensor + PAGE * u64::from(page),
                Arrangement::Interleaved => PAGE * (u64::from(page) * 4 + tensor),
            };
            let range = AddrRange::new(self.cache.whole().start + offset, PAGE);
            self.rig.sim.launch(raw, Kernel::new("use").writing(range)).unwrap();
        }
    }

    fn step(&mut self) {
        let stream = self.stream();
        match self.rng.u32(..12) {
            0..4 => {
                let pages = self.some_pages(None);
                match self.cache.commit(&pages, stream) {
                    Ok(()) => self.committed(&pages, stream),
                    Err(error) => self.may_fail(error),
                }
            }
            4..7 => {
                let pages = self.some_pages(Some(stream));
                self.cache.park(&pages, stream).unwrap();
                pages.iter().cloned().flatten().for_each(|page| self.pages[page as usize] = None);
            }
            7 => match self.cache.take(self.rng.u32(1..6), stream) {
                Ok(pages) => self.committed(&pages, stream),
                Err(error) => self.may_fail(error),
            },
            8 => {
                let len = MIB(self.rng.u64(1..200));
                if let Ok(block) = self.rig.allocator.malloc(len, stream) {
                    let raw = self.rig.allocator.stream(stream).unwrap();
                    let range = AddrRange::new(block.addr(), len);
                    self.rig.sim.launch(raw, Kernel::new("fill").writing(range)).unwrap();
                    self.blocks.push((block, stream));
                }
            }
            9 | 10 if !self.blocks.is_empty() => {
                let (block, stream) = self.blocks.swap_remove(self.rng.usize(..self.blocks.len()));
                self.rig.allocator.free(block, stream).unwrap();
            }
            11 if self.rng.u32(..4) == 0 => {
                let keep = MIB(self.rng.u64(..200));
                drop(self.cache.release(keep));
            }
            _ => self.rig.sim.advance(50_000),
        }
    }

    fn committed(&mut self, pages: &[Range<u32>], stream: StreamId) {
        for page in pages.iter().cloned().flatten() {
            assert_eq!(
                self.pages[page as usize].replace(stream),
                None,
                "page {page} is given once"
            );
            self.use_page(page, stream);
        }
    }

    fn may_fail(&self, error: KvError) {
        match error {
            KvError::Memory(AllocError::OutOfMemory(_) | AllocError::Driver(_)) => {}
            KvError::NoPages { left } => assert!(left < 6),
            error => panic!("{error}"),
        }
    }

    fn check(&self) {
        self.rig.allocator.audit().unwrap();
        let committed = self.pages.iter().flatten().count() as u32;
        assert_eq!(self.cache.stats().committed, committed);
        for (page, user) in self.pages.iter().enumerate() {
            let state = self.cache.state(page as u32);
            assert_eq!(
                state == Some(PageState::Committed),
                user.is_some(),
                "page {page}: {state:?}"
            );
        }
    }
}

#[test]
fn random_programs_commit_park_and_allocate_beside_failing_calls_without_a_hazard() {
    for seed in seeds(24) {
        let mut random = Random::new(seed);
        for step in 0..200 {
            if step % 40 == 20 {
                random.rig.sim.set_faults(FaultPlan::randomly(0.02));
            }
            random.step();
            if step % 40 == 39 {
                random.rig.sim.set_faults(FaultPlan::none());
                random.check();
            }
        }
        assert!(random.rig.sim.hazards().is_empty(), "seed {seed}: {:?}", random.rig.sim.hazards());
        let Random { rig, cache, blocks, .. } = random;
        drop(cache);
        for (block, stream) in blocks {
            rig.allocator.free(block, stream).unwrap();
        }
        rig.allocator.trim(Bytes::ZERO).unwrap();
        rig.allocator.audit().unwrap();
        let closed = rig.allocator.close();
        assert!(closed.is_ok(), "seed {seed}: {closed:?}");
        assert_eq!(rig.sim.live().handles, 0, "seed {seed}");
    }
}

#[test]
fn threads_commit_and_park_pages_of_their_own_and_wait_for_each_other() {
    let card = Simulator::builder().memory(Bytes::gib(1)).contents(Contents::Discarded).checked();
    let rig = common::Rig::on(card, Config::default());
    let options = Options { superpage: MIB(8), ahead: MIB(64), ..Options::default() };
    let cache = rig.allocator.kv_arena(LAYOUT, options).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u32 {
            let (cache, allocator) = (&cache, &rig.allocator);
            scope.spawn(move || {
                let stream = allocator.create_stream().unwrap();
                let mut rng = fastrand::Rng::with_seed(u64::from(thread));
                // Every thread has every fourth page, so that they share handles and blocks.
                let mine: Vec<u32> = (0..64).filter(|page| page % 4 == thread).collect();
                let mut committed = vec![false; mine.len()];
                for _ in 0..300 {
                    let choice = rng.usize(..mine.len());
                    let page = mine[choice]..mine[choice] + 1;
                    match std::mem::replace(&mut committed[choice], false) {
                        true => cache.park([page], stream).unwrap(),
                        false => {
                            cache.commit([page], stream).unwrap();
                            committed[choice] = true;
                        }
                    }
                    if rng.u32(..16) == 0 {
                        cache.release(MIB(32)).unwrap();
                    }
                }
                for (choice, committed) in committed.into_iter().enumerate() {
                    if committed {
                        cache.park(mine[choice]..mine[choice] + 1, stream).unwrap();
                    }
                }
            });
        }
    });
    assert_eq!(cache.stats().committed, 0);
    rig.allocator.audit().unwrap();
    drop(cache);
    rig.allocator.trim(Bytes::ZERO).unwrap();
    assert_eq!(rig.allocator.reserved(), Bytes::ZERO);
    assert!(rig.sim.hazards().is_empty());
}

#[test]
fn pages_are_made_ready_ahead_of_need() {
    let rig = rig();
    let options = Options { ahead: MIB(8) * 16, superpage: PAGE, ..Options::default() };
    let cache = rig.allocator.kv_arena(LAYOUT, options).unwrap();
    cache.commit(0..4, rig.stream).unwrap();
    while cache.stats().parked < 4 || cache.stats().moving > 0 {
        vramp_testing::moment();
    }
    // Parked pages are committed for no driver call; the thread makes some for the next ones.
    assert_eq!(cache.states()[4..8], [PageState::Parked; 4]);
    cache.commit(4..8, rig.stream).unwrap();
    rig.fill(at(&cache, 3, 0..8), 1);
    // They are the first to go.
    cache.commit(8..9, rig.stream).unwrap();
    while cache.stats().parked == 0 || cache.stats().moving > 0 {
        vramp_testing::moment();
    }
    cache.park(0..1, rig.stream).unwrap();
    cache.release(MIB(8)).unwrap();
    assert_eq!(cache.state(0), Some(PageState::Parked));
    assert!(rig.sim.hazards().is_empty());
}

#[test]
fn a_release_looks_at_what_it_releases_however_long_the_tensors_are() {
    let counts = [64, 2048].map(|gib| {
        let card = Simulator::builder().contents(Contents::Discarded).build();
        let allocator = Allocator::new(Arc::new(card), Config::default()).unwrap();
        let stream = allocator.create_stream().unwrap();
        let layout = Layout { bytes_each: Bytes::gib(gib), ..Layout::default() };
        let cache = allocator.kv_arena(layout, Options::default()).unwrap();
        let once = || {
            cache.commit(5..8, stream).unwrap();
            cache.park(5..8, stream).unwrap();
            let counted = allocation_counter::measure(|| {
                assert_eq!(cache.release(Bytes::ZERO).unwrap(), MIB(6));
            });
            counted.count_total
        };
        once();
        once()
    });
    assert!(counts[1] <= counts[0] + 4, "{counts:?} allocations");
}

/// A card like the real one without checks, and an arena of so many tensors of 2 GiB.
fn large(tensors: u32, arrangement: Arrangement) -> (Arc<Simulator>, Allocator, StreamId, Arena) {
    let card = Arc::new(Simulator::builder().contents(Contents::Discarded).build());
    let allocator = Allocator::new(card.clone(), Config::default()).unwrap();
    let stream = allocator.create_stream().unwrap();
    let layout = Layout { tensors, bytes_each: Bytes::gib(2), page: PAGE, arrangement };
    let options = Options { superpage: MIB(32), ..Options::default() };
    let cache = allocator.kv_arena(layout, options).unwrap();
    (card, allocator, stream, cache)
}

#[test]
fn a_start_makes_as_many_driver_calls_with_64_tensors_as_with_one() {
    for tensors in [1, 64] {
        let (card, ..) = large(tensors, Arrangement::Separate);
        let reserved = card.calls_of(Call::Reserve);
        assert!(reserved <= 2, "{tensors} tensors: {reserved} reservations");
        assert_eq!(card.calls_of(Call::Map) + card.calls_of(Call::Create), 0);
    }
}

#[test]
fn a_cold_commit_makes_a_create_a_map_and_a_set_access_for_each_handle_whatever_is_committed() {
    let (card, _allocator, stream, cache) = large(64, Arrangement::Separate);
    let cost = |pages: Range<u32>| {
        let before = [Call::Create, Call::Map, Call::SetAccess].map(|call| card.calls_of(call));
        let all = card.calls();
        cache.commit([pages], stream).unwrap();
        let after = [Call::Create, Call::Map, Call::SetAccess].map(|call| card.calls_of(call));
        assert!(card.calls() - all <= 3 * 64 + 4, "{} calls", card.calls() - all);
        [0, 1, 2].map(|i| after[i] - before[i])
    };
    assert_eq!(cost(3..4), [64, 64, 64]);
    // Every other page is committed: as fragmented as can be.
    let odd: Vec<Range<u32>> = (10..500).map(|page| page * 2..page * 2 + 1).collect();
    cache.commit(&odd[..100], stream).unwrap();
    assert_eq!(cost(1000..1001), [64, 64, 64]);
    assert_eq!(cost(1008..1024), [64, 64, 64], "16 neighbours are one handle");
    let (card, _allocator, stream, cache) = large(64, Arrangement::Interleaved);
    let before = card.calls();
    cache.commit(5..6, stream).unwrap();
    assert_eq!(card.calls() - before, 3, "a page of all tensors is one handle");
}

#[test]
fn a_commit_of_parked_pages_allocates_and_looks_at_little_however_many_there_are() {
    let counts = [64, 1024].map(|pages| {
        let (_card, _allocator, stream, cache) = large(4, Arrangement::Separate);
        cache.commit(0..pages, stream).unwrap();
        cache.park(0..pages, stream).unwrap();
        cache.commit(0..1, stream).unwrap();
        let counted = allocation_counter::measure(|| {
            cache.park(0..1, stream).unwrap();
            cache.commit(0..1, stream).unwrap();
        });
        counted.count_total
    });
    assert!(counts[1] <= counts[0] && counts[0] <= 8, "{counts:?} allocations");
}
