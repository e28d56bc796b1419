//! Random threads in one space: reservations that wait, leases with and without a reservation that
//! pays, allocations, spills, deadlines. Each thread must end, no total may exceed the limit, and all
//! of it must come back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vramp_defer::SpillError;
use vramp_tiers::tracked::{Policies, Scope, TrackedAllocator};
use vramp_tiers::{Deadline, MemorySpace, Reservation};

use super::waiting::block_on;
use super::*;

#[derive(Default)]
struct Tally {
    /// By a thread that waited, and by one that polled a future.
    leased: [AtomicU64; 2],
    without_deadline: AtomicU64,
    reserved: AtomicU64,
    refused: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

struct Thread<'a> {
    rig: &'a Rig,
    space: &'a MemorySpace,
    tracked: &'a TrackedAllocator,
    shared: &'a [DeferrableBuffer],
    tally: &'a Tally,
    stream: StreamId,
    queue: Stream,
    own: (DeferrableBuffer, u8),
    held: Option<Reservation>,
    random: fastrand::Rng,
}

impl Thread<'_> {
    /// Long, or none, for a thread that holds nothing which others need, so that it must be served;
    /// short for one that holds a reservation, which may be a deadlock.
    fn deadline(&mut self) -> Deadline {
        let attached = self.tracked.attached(Scope::Stream(self.stream)).is_some();
        let is_free = self.held.is_none() && !attached;
        match self.random.u8(..4) {
            0 if is_free => Deadline::from(LONG),
            1 | 2 if is_free => Deadline::NEVER,
            _ => Deadline::from(Duration::from_micros(self.random.u64(..3000))),
        }
    }

    fn step(&mut self, step: u8) {
        let deadline = self.deadline();
        match self.random.u32(..9) {
            0 | 1 if self.held.is_none() => {
                let request = self.space.request(MIB(self.random.u64(1..30)));
                match request.priority(self.random.i32(-1..2)).deadline(deadline).wait() {
                    Ok(reservation) => {
                        self.held = Some(reservation);
                        count(&self.tally.reserved);
                    }
                    Err(error) => self.is_late(deadline, &error),
                }
            }
            2 => drop(self.held.take()),
            3 => {
                if let Some(reservation) = self.held.take()
                    && let Err(error) = self.tracked.attach(Scope::Stream(self.stream), reservation)
                {
                    let vramp_tiers::tracked::AttachError::Occupied { reservation, .. } = error
                    else {
                        panic!("{error}");
                    };
                    self.held = Some(reservation);
                }
            }
            4 => drop(self.tracked.detach(Scope::Stream(self.stream))),
            5 => {
                let bytes = MIB(self.random.u64(1..8));
                if let Ok(block) = self.tracked.malloc(bytes, self.stream) {
                    self.tracked.free(block, self.stream).unwrap();
                }
            }
            6 => drop(self.rig.manager.spill(MIB(self.random.u64(1..30)))),
            _ => self.lease(step, deadline),
        }
    }

    fn lease(&mut self, step: u8, deadline: Deadline) {
        let Thread { rig, shared, own: (own, byte), stream, queue, .. } = self;
        let place = self.random.usize(..shared.len());
        let set = [(&*own, Access::Exclusive), (&shared[place], Access::Shared)];
        let request = rig.manager.request(&set).stream(*stream).deadline(deadline);
        let is_awaited = self.random.bool();
        let leased = match is_awaited {
            true => block_on(request),
            false => rig.manager.lease_on(&set, &[*stream], deadline),
        };
        match leased {
            Ok(lease) => {
                count(&self.tally.leased[usize::from(is_awaited)]);
                if deadline == Deadline::NEVER {
                    count(&self.tally.without_deadline);
                }
                rig.sim.synchronize_stream(*queue).unwrap();
                let ranges: Vec<_> = lease.addresses().collect();
                for (range, byte) in ranges.iter().zip([*byte, place as u8]) {
                    let at = Bytes::new(self.random.u64(..range.len.count()));
                    let one = AddrRange::new(range.start + at, Bytes::new(1));
                    assert_eq!(rig.sim.peek(one).unwrap(), [byte]);
                }
                rig.sim.fill(*queue, ranges[0], step).unwrap();
                *byte = step;
            }
            Err(SpillError::NoBudget { error, .. }) => self.is_late(deadline, &error),
            Err(SpillError::Refused(refused)) => self.is_late(deadline, &refused),
            // Mallocs of other threads took memory that nothing was charged for yet.
            Err(SpillError::NoMemory { error, .. }) => self.is_late(deadline, &error),
            Err(error) => panic!("{error}"),
        }
    }

    fn is_late(&self, deadline: Deadline, error: &dyn std::fmt::Display) {
        let end = deadline.instant();
        let end = end.unwrap_or_else(|| panic!("refused without a deadline: {error}"));
        assert!(end <= std::time::Instant::now(), "refused before its deadline: {error}");
        assert!(self.rig.spaces.waiting() < 100);
        count(&self.tally.refused);
    }
}

#[test]
fn leases_and_reservations_at_random_starve_none_and_return_all() {
    for seed in vramp_testing::seeds(3) {
        let disk = (seed % 2 == 0).then_some(MIB(512));
        let host = if disk.is_some() { MIB(48) } else { MIB(512) };
        // The card has more than the budget, so that what is charged decides.
        let rig = Plan { limit: MIB(96), host, disk, budget: true, ..patient() }.build();
        let space = rig.spaces.space(SpaceId::gpu(0)).unwrap();
        let tracked =
            TrackedAllocator::new(Arc::clone(&rig.allocator), &space, Policies::default());
        let shared: Vec<_> = (0..4).map(|byte| rig.filled(MIB(12), byte)).collect();
        let tally = Tally::default();
        std::thread::scope(|scope| {
            for thread in 0..6_u64 {
                let (rig, space, tracked, shared) = (&rig, &space, &tracked, &shared[..]);
                let tally = &tally;
                scope.spawn(move || {
                    let stream = rig.allocator.create_stream().unwrap();
                    let queue = rig.allocator.stream(stream).unwrap();
                    let own = rig.filled(MIB(10), 0xEE);
                    let random = fastrand::Rng::with_seed(seed * 100 + thread);
                    let own = (own, 0xEE);
                    let held = None;
                    let mut program = Thread {
                        rig,
                        space,
                        tracked,
                        shared,
                        tally,
                        stream,
                        queue,
                        own,
                        held,
                        random,
                    };
                    for step in 0..60 {
                        program.step(step);
                    }
                    drop(tracked.detach(Scope::Stream(stream)));
                });
            }
        });
        let leased = tally.leased.each_ref().map(|count| count.load(Ordering::Relaxed));
        let without_deadline = tally.without_deadline.load(Ordering::Relaxed);
        assert!(leased.iter().sum::<u64>() > 20, "seed {seed}: {leased:?}");
        assert!(!leased.contains(&0) && without_deadline > 0, "seed {seed}: {leased:?}");
        assert!(tally.reserved.load(Ordering::Relaxed) > 10, "seed {seed}");
        // Mallocs outside reservations may go up to the capacity, all else up to the limit.
        assert!(space.peak() <= space.capacity());
        shared.iter().zip(0..).for_each(|(buffer, byte)| rig.expect(buffer, byte));
        rig.check();
        drop(shared);
        rig.sim.synchronize_stream(rig.queue).unwrap();
        rig.manager.census();
        assert_eq!((space.total(), rig.spaces.waiting()), (Bytes::ZERO, 0), "seed {seed}");
        rig.spaces.audit().unwrap();
        rig.check();
    }
}
