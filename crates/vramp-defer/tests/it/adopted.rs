//! Memory of others that becomes deferrable: where leases see it, when its owner is dropped, and what
//! happens to the bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vramp_alloc::{Allocation, Allocator, Config, Driver, StreamId};
use vramp_core::AddrRange;
use vramp_defer::{Access, DeferrableBuffer, SpillError, SpillManager};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_tiers::Bytes;
use vramp_tiers::regions::{RegionOptions, Regions};

use super::{MIB, PIECE, Plan, Rig, patient, rig};

/// A block of an allocator, freed when this is dropped. Counts the drops.
struct Owned {
    allocator: Arc<Allocator>,
    block: Option<Allocation>,
    stream: StreamId,
    drops: Arc<AtomicUsize>,
}

impl Drop for Owned {
    fn drop(&mut self) {
        let block = self.block.take().unwrap();
        self.allocator.free(block, self.stream).unwrap();
        self.drops.fetch_add(1, Ordering::SeqCst);
    }
}

/// Memory of another allocator on the rig's device, filled with a byte by work on the rig's stream.
struct Foreign {
    memory: AddrRange,
    owner: Box<Owned>,
    drops: Arc<AtomicUsize>,
}

fn block_of(rig: &Rig, allocator: &Arc<Allocator>, len: Bytes, byte: u8) -> Foreign {
    let stream = match Arc::ptr_eq(allocator, &rig.allocator) {
        true => rig.stream,
        false => allocator.create_stream().unwrap(),
    };
    let block = allocator.malloc(len, stream).unwrap();
    let memory = AddrRange::new(block.addr(), len);
    let queue = allocator.stream(stream).unwrap();
    rig.sim.fill(queue, memory, byte).unwrap();
    rig.sim.synchronize_stream(queue).unwrap();
    let drops = Arc::new(AtomicUsize::new(0));
    let owner = Owned {
        allocator: Arc::clone(allocator),
        block: Some(block),
        stream,
        drops: Arc::clone(&drops),
    };
    Foreign { memory, owner: Box::new(owner), drops }
}

fn other_allocator(rig: &Rig) -> Arc<Allocator> {
    let config = Config { limit: Some(MIB(256)), ..Config::default() };
    Arc::new(Allocator::new(rig.sim.clone(), config).unwrap())
}

fn adopt(rig: &Rig, foreign: Foreign) -> (DeferrableBuffer, Arc<AtomicUsize>) {
    let Foreign { memory, owner, drops } = foreign;
    (rig.manager.adopt(memory, owner, rig.stream).unwrap(), drops)
}

fn dropped(drops: &AtomicUsize) -> usize {
    drops.load(Ordering::SeqCst)
}

#[test]
fn adopted_memory_is_leased_where_it_is_and_leaves_for_a_place_of_its_own() {
    for own in [false, true] {
        let rig = rig();
        let allocator = if own { Arc::clone(&rig.allocator) } else { other_allocator(&rig) };
        let foreign = block_of(&rig, &allocator, PIECE * 3 + Bytes::kib(5), 7);
        let memory = foreign.memory;
        let (buffer, drops) = adopt(&rig, foreign);
        assert!(buffer.is_adopted() && buffer.is_resident());
        assert_eq!(rig.manager.census().adopted, memory.len);
        let lease = buffer.lease(Access::Exclusive, rig.stream).unwrap();
        assert_eq!(lease.address(0), memory);
        rig.sim.fill(rig.queue, lease.address(0), 8).unwrap();
        drop(lease);
        rig.expect(&buffer, 8);

        let spilled = rig.manager.spill(PIECE);
        assert!(spilled.freed >= memory.len, "{spilled:?}");
        assert_eq!(dropped(&drops), 1);
        assert!(!buffer.is_adopted() && buffer.is_deferred());
        assert_eq!(rig.manager.census().adopted, Bytes::ZERO);
        let lease = buffer.lease(Access::Shared, rig.stream).unwrap();
        assert_eq!(lease.address(0), buffer.addresses());
        assert_ne!(lease.address(0), memory);
        drop(lease);
        rig.expect(&buffer, 8);
        // From now on it is a buffer like any other: its pieces leave one by one.
        rig.manager.spill(PIECE);
        assert_eq!(buffer.status().deferred, PIECE);
        rig.expect(&buffer, 8);
        allocator.audit().unwrap();
        rig.check();
    }
}

#[test]
fn an_allocation_gets_the_memory_that_an_adopted_buffer_leaves() {
    let rig = rig();
    let foreign = block_of(&rig, &rig.allocator, MIB(48), 5);
    let (buffer, drops) = adopt(&rig, foreign);
    let block = rig.allocator.malloc(MIB(48), rig.stream).unwrap();
    assert_eq!(dropped(&drops), 1);
    rig.allocator.free(block, rig.stream).unwrap();
    rig.expect(&buffer, 5);
    rig.check();
}

#[test]
fn adopted_memory_takes_no_room_of_leases_until_it_has_left() {
    let rig = Plan { budget: true, ..Plan::default() }.build();
    let foreign = block_of(&rig, &rig.allocator, MIB(40), 5);
    let (adopted, _) = adopt(&rig, foreign);
    let own = rig.filled(MIB(16), 6);
    assert_eq!(rig.spaces.space(vramp_tiers::SpaceId::gpu(0)).unwrap().total(), MIB(16));
    let both = [(&adopted, Access::Shared), (&own, Access::Shared)];
    drop(rig.manager.lease(&both, rig.stream).unwrap());
    rig.manager.spill(MIB(64));
    // The space pays for both now that both are its own.
    drop(rig.manager.lease(&both, rig.stream).unwrap());
    assert_eq!(rig.spaces.space(vramp_tiers::SpaceId::gpu(0)).unwrap().total(), MIB(56));
    rig.expect(&adopted, 5);
    rig.expect(&own, 6);
    rig.check();
}

#[test]
fn pieces_that_left_alone_come_back_to_the_adopted_memory() {
    let rig = rig();
    let foreign = block_of(&rig, &other_allocator(&rig), PIECE * 4, 3);
    let memory = foreign.memory;
    let (buffer, drops) = adopt(&rig, foreign);
    // The third copy fails, so the buffer leaves in part, and its memory is not free.
    rig.fail(FaultPlan::nth_of(Call::CopyToHost, 5).with_code(1));
    let spilled = rig.manager.spill(PIECE);
    rig.fail(FaultPlan::none());
    assert!(spilled.failed.is_some() && spilled.freed.is_zero(), "{spilled:?}");
    assert!(buffer.is_adopted() && buffer.is_deferred(), "{:?}", buffer.states());
    assert_eq!(dropped(&drops), 0);
    let lease = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    assert_eq!(lease.address(0), memory);
    drop(lease);
    rig.expect(&buffer, 3);
    rig.manager.spill(PIECE);
    assert_eq!(dropped(&drops), 1);
    rig.expect(&buffer, 3);
    rig.check();
}

#[test]
fn the_owner_is_dropped_with_the_last_handle_once_the_work_is_over() {
    let rig = rig();
    let foreign = block_of(&rig, &other_allocator(&rig), PIECE, 3);
    let (buffer, drops) = adopt(&rig, foreign);
    let view = buffer.view(MIB(1), MIB(2)).unwrap();
    rig.fill(&buffer, 4);
    drop(buffer);
    assert_eq!(dropped(&drops), 0, "a view is a handle");
    drop(view);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let _ = rig.manager.census();
    assert_eq!(dropped(&drops), 1);
    rig.check();
}

#[test]
fn the_manager_and_its_last_buffer_drop_the_owner_once() {
    let rig = rig();
    let foreign = block_of(&rig, &other_allocator(&rig), PIECE, 3);
    let (buffer, drops) = adopt(&rig, foreign);
    rig.fill(&buffer, 4);
    drop(rig);
    drop(buffer);
    assert_eq!(dropped(&drops), 1);
}

#[test]
fn reads_writes_views_and_hints_use_the_adopted_memory() {
    let rig = rig();
    let foreign = block_of(&rig, &other_allocator(&rig), PIECE * 2, 3);
    let memory = foreign.memory;
    let (buffer, drops) = adopt(&rig, foreign);
    buffer.write(PIECE, b"written").unwrap();
    let view = buffer.view(PIECE, MIB(1)).unwrap();
    let mut lease = view.lease(Access::Exclusive, rig.stream).unwrap();
    assert_eq!(lease.address(0), AddrRange::new(memory.start + PIECE, MIB(1)));
    lease.wrote_only(0, Bytes::ZERO, Bytes::new(7)).unwrap();
    drop(lease);
    assert!(buffer.readable_while_spilled().is_err());
    buffer.prefetch().unwrap();
    let mut back = [0; 7];
    for _ in 0..2 {
        view.read(Bytes::ZERO, &mut back).unwrap();
        assert_eq!(&back, b"written");
        rig.manager.spill(PIECE * 2);
    }
    assert_eq!(dropped(&drops), 1);
    rig.check();
}

#[test]
fn discarded_contents_leave_without_a_copy() {
    let rig = rig();
    let foreign = block_of(&rig, &other_allocator(&rig), PIECE * 2, 3);
    let (buffer, drops) = adopt(&rig, foreign);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    buffer.discard().unwrap();
    rig.manager.spill(PIECE);
    assert_eq!((dropped(&drops), rig.manager.stats().to_host_bytes), (1, 0));
    rig.fill(&buffer, 9);
    rig.expect(&buffer, 9);
    rig.check();
}

/// Memory that no allocator on the rig's device made. Dropping it frees it, and counts.
struct Elsewhere {
    sim: Arc<Simulator>,
    memory: AddrRange,
    drops: Arc<AtomicUsize>,
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        self.sim.free_elsewhere(self.memory.start).unwrap();
        self.drops.fetch_add(1, Ordering::SeqCst);
    }
}

fn elsewhere(rig: &Rig, len: Bytes) -> Elsewhere {
    let memory = AddrRange::new(rig.sim.alloc_elsewhere(len).unwrap(), len);
    Elsewhere { sim: rig.sim.clone(), memory, drops: Arc::default() }
}

#[test]
fn memory_that_the_driver_did_not_allocate_is_copied_while_it_is_adopted() {
    let rig = rig();
    let theirs = elsewhere(&rig, PIECE * 2);
    let (memory, drops) = (theirs.memory, Arc::clone(&theirs.drops));
    let buffer = rig.manager.adopt(memory, Box::new(theirs), rig.stream).unwrap();
    rig.fill(&buffer, 7);
    rig.expect(&buffer, 7);
    buffer.write(PIECE, b"written").unwrap();
    let mut back = [0; 7];
    buffer.read(PIECE, &mut back).unwrap();
    assert_eq!(&back, b"written");
    rig.fill(&buffer, 8);
    // A copy fails, so it leaves in part and comes back to the adopted memory.
    rig.fail(FaultPlan::nth_of(Call::CopyToHost, 2).with_code(1));
    assert!(rig.manager.spill(PIECE).failed.is_some());
    rig.fail(FaultPlan::none());
    rig.expect(&buffer, 8);
    assert!(buffer.is_adopted() && rig.sim.owns(memory));
    let spilled = rig.manager.spill(PIECE);
    assert!(spilled.failed.is_none() && spilled.freed >= memory.len, "{spilled:?}");
    assert_eq!((dropped(&drops), rig.sim.live().adoptions), (1, 0));
    rig.expect(&buffer, 8);
    rig.check();
}

#[test]
fn memory_is_forgotten_before_its_owner_frees_it() {
    struct Watched(Elsewhere);
    impl Drop for Watched {
        fn drop(&mut self) {
            assert!(!self.0.sim.owns(self.0.memory), "the driver still accepts it");
        }
    }
    for discard in [false, true] {
        let rig = rig();
        let theirs = elsewhere(&rig, PIECE);
        let (memory, drops) = (theirs.memory, Arc::clone(&theirs.drops));
        let buffer = rig.manager.adopt(memory, Box::new(Watched(theirs)), rig.stream).unwrap();
        if discard {
            drop(buffer);
            let _ = rig.manager.census();
        } else {
            assert!(rig.manager.spill(PIECE).failed.is_none());
        }
        assert_eq!((dropped(&drops), rig.sim.live().adoptions), (1, 0));
    }
}

#[test]
fn what_no_copy_can_be_made_of_is_refused_when_it_is_adopted() {
    let rig = rig();
    let theirs = elsewhere(&rig, PIECE * 2);
    let (memory, drops) = (theirs.memory, Arc::clone(&theirs.drops));
    let mut owner: Box<dyn Send> = Box::new(theirs);
    let block = rig.allocator.malloc(PIECE, rig.stream).unwrap();
    let own = rig.filled(PIECE * 2, 1);
    let unknown = AddrRange::new(vramp_core::DeviceAddr::new(64), PIECE);
    let beyond = AddrRange::new(memory.start + PIECE, PIECE * 2);
    for wrong in [unknown, beyond] {
        let failed = rig.manager.adopt(wrong, owner, rig.stream).unwrap_err();
        assert!(matches!(failed.error, SpillError::NotAdoptable { .. }), "{failed}");
        owner = failed.owner;
    }
    // Addresses of a buffer of the manager: its memory moves.
    for of_buffer in [own.addresses(), AddrRange::new(own.addresses().start + PIECE, PIECE)] {
        let failed = rig.manager.adopt(of_buffer, owner, rig.stream).unwrap_err();
        assert!(matches!(failed.error, SpillError::AddressesOfBuffer(_)), "{failed}");
        owner = failed.owner;
    }
    assert_eq!((dropped(&drops), rig.sim.live().adoptions), (0, 0));
    let first = AddrRange::new(memory.start, PIECE);
    let buffer = rig.manager.adopt(first, owner, rig.stream).unwrap();
    for overlapping in [memory, first] {
        let failed = rig.manager.adopt(overlapping, Box::new(()), rig.stream).unwrap_err();
        assert!(matches!(failed.error, SpillError::NotAdoptable { .. }), "{failed}");
    }
    assert_eq!(rig.sim.live().adoptions, 1);
    drop(buffer);
    rig.allocator.free(block, rig.stream).unwrap();
    rig.check();
}

#[test]
fn memory_that_a_pause_takes_from_the_card_is_not_adopted() {
    let rig = rig();
    let regions = Regions::new(rig.mover());
    let region = regions.region(&rig.allocator, "weights", RegionOptions::default()).unwrap();
    let beside = rig.allocator.create_pool("beside").unwrap();
    for (pool, name) in [(region.allocator(), "weights"), (&beside, "beside")] {
        let block = pool.malloc(PIECE * 2, rig.stream).unwrap();
        let whole = AddrRange::new(block.addr(), block.len());
        let part = AddrRange::new(block.addr() + PIECE, Bytes::new(1));
        let beyond = AddrRange::new(block.addr() + PIECE, Bytes::gib(64));
        for memory in [whole, part, beyond] {
            let failed = rig.manager.adopt(memory, Box::new(()), rig.stream).unwrap_err();
            let of_pool = matches!(&failed.error,
                SpillError::MemoryOfPool { memory: of, pool } if (*of, &**pool) == (memory, name));
            assert!(of_pool, "{failed}");
        }
        assert_eq!((rig.manager.census().buffers, rig.sim.live().adoptions), (0, 0));
        pool.free(block, rig.stream).unwrap();
    }
    drop(beside);
    rig.check();
}

#[test]
fn what_is_not_adopted_is_returned_with_its_owner() {
    let rig = rig();
    let Foreign { memory, owner, drops } = block_of(&rig, &other_allocator(&rig), PIECE, 3);
    let empty = AddrRange::new(memory.start, Bytes::ZERO);
    let failed = rig.manager.adopt(empty, owner, rig.stream).unwrap_err();
    assert!(matches!(failed.error, SpillError::Addresses(_)), "{failed}");
    let unknown = StreamId::new(9999);
    let failed = rig.manager.adopt(memory, failed.owner, unknown).unwrap_err();
    assert!(matches!(failed.error, SpillError::UnknownStream(_)), "{failed}");
    rig.sim.begin_capture(rig.queue, vramp_alloc::device::CaptureMode::Relaxed).unwrap();
    let failed = rig.manager.adopt(memory, failed.owner, rig.stream).unwrap_err();
    assert!(matches!(failed.error, SpillError::Capturing(_)), "{failed}");
    rig.sim.end_capture(rig.queue).unwrap();
    assert_eq!(dropped(&drops), 0);
    drop(rig.manager.adopt(memory, failed.owner, rig.stream).unwrap());
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert_eq!(rig.manager.census().buffers, 0);
    assert_eq!(dropped(&drops), 1);
}

/// An owner that calls the manager, and one that panics.
#[test]
fn owners_may_call_the_manager_and_may_panic() {
    struct Caller(SpillManager, Option<Owned>);
    impl Drop for Caller {
        fn drop(&mut self) {
            assert_eq!(self.0.census().adopted, Bytes::ZERO);
            drop(self.0.buffer(PIECE).unwrap());
            self.0.spill(PIECE);
            drop(self.1.take());
            panic!("an owner that panics");
        }
    }
    let rig = rig();
    let Foreign { memory, owner, drops } = block_of(&rig, &other_allocator(&rig), PIECE, 3);
    let caller = Caller(rig.manager.clone(), Some(*owner));
    let buffer = rig.manager.adopt(memory, Box::new(caller), rig.stream).unwrap();
    rig.manager.spill(PIECE);
    assert_eq!(dropped(&drops), 1);
    rig.expect(&buffer, 3);
    rig.check();
}

#[test]
fn adopted_and_own_buffers_of_many_threads_keep_their_bytes() {
    let rig = patient().build();
    let others = other_allocator(&rig);
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let (rig, others) = (&rig, &others);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(u64::from(thread));
                let stream = rig.allocator.create_stream().unwrap();
                let queue = rig.allocator.stream(stream).unwrap();
                for round in 0..8u8 {
                    let byte = thread * 16 + round;
                    let len = PIECE * random.u64(1..3);
                    let buffer = match random.bool() {
                        true => adopt(rig, block_of(rig, others, len, byte)).0,
                        false => {
                            let buffer = rig.manager.buffer(len).unwrap();
                            let lease = buffer.lease(Access::Exclusive, stream).unwrap();
                            rig.sim.fill(queue, lease.address(0), byte).unwrap();
                            drop(lease);
                            buffer
                        }
                    };
                    if random.bool() {
                        rig.manager.spill(PIECE * 2);
                    }
                    for add in 0..2 {
                        let lease = buffer.lease(Access::Exclusive, stream).unwrap();
                        rig.sim.synchronize_stream(queue).unwrap();
                        let range = lease.address(0);
                        let last = Bytes::new(range.len.count() - 1);
                        let one = AddrRange::new(range.start + last, Bytes::new(1));
                        assert_eq!(rig.sim.peek(one).unwrap(), [byte + add]);
                        rig.sim.fill(queue, range, byte + add + 1).unwrap();
                    }
                }
            });
        }
    });
    rig.check();
    others.audit().unwrap();
}
