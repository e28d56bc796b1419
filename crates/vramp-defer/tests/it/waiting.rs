//! Waiting for leases: exactly the served waiters are woken, tasks wait without a thread, and owners are
//! values. Mostly futures that are polled by hand, with wakers that count.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use vramp_alloc::Driver;
use vramp_alloc::device::CaptureMode;
use vramp_defer::{
    Deadline, LeaseFuture, LeaseOwner, LeaseRefused, LeaseSet, RestoreJob, SpillError,
};

use super::below::until;
use super::*;

pub type Leased = Result<LeaseSet, SpillError>;
type Wanted<'a> = &'a [(&'a DeferrableBuffer, Access)];

/// Counts how often it is woken.
#[derive(Default)]
struct Count(AtomicU64);

impl Wake for Count {
    fn wake(self: Arc<Count>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A future with its waker, polled by hand.
pub struct Task {
    future: LeaseFuture,
    woken: Arc<Count>,
}

impl Task {
    pub fn new(future: impl IntoFuture<IntoFuture = LeaseFuture>) -> Task {
        Task { future: future.into_future(), woken: Arc::default() }
    }

    /// A task that waits for the buffers.
    fn waiting(rig: &Rig, wanted: Wanted<'_>) -> Task {
        let mut task = Task::new(rig.manager.request(wanted).stream(rig.stream));
        assert!(task.poll().is_none(), "it need not wait");
        task
    }

    pub fn poll(&mut self) -> Option<Leased> {
        let waker = Waker::from(Arc::clone(&self.woken));
        match Pin::new(&mut self.future).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(leased) => Some(leased),
            Poll::Pending => None,
        }
    }

    fn woken(&self) -> u64 {
        self.woken.0.load(Ordering::Relaxed)
    }

    /// Polls until it is ready; the watching thread may have to wake it.
    pub fn wait(&mut self) -> Leased {
        loop {
            let before = self.woken();
            if let Some(leased) = self.poll() {
                return leased;
            }
            until(|| self.woken() > before);
        }
    }
}

/// Wakes a thread that sleeps in [`block_on`].
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Unpark>) {
        self.0.unpark();
    }
}

/// Polls until the lease is there. The thread sleeps between.
pub fn block_on(request: impl IntoFuture<IntoFuture = LeaseFuture>) -> Leased {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = request.into_future();
    loop {
        match Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(leased) => return leased,
            Poll::Pending => std::thread::park(),
        }
    }
}

fn waiting(rig: &Rig) -> usize {
    rig.manager.census().waiting
}

/// Polls the tasks that were woken until all are served. Returns the numbers of the served ones, by
/// rounds.
fn serve(tasks: &mut [Option<Task>]) -> Vec<Vec<usize>> {
    let mut rounds = Vec::new();
    loop {
        let is_woken = |task: &Option<Task>| task.as_ref().is_some_and(|task| task.woken() > 0);
        let woken: Vec<usize> = (0..tasks.len()).filter(|&index| is_woken(&tasks[index])).collect();
        if woken.is_empty() {
            return rounds;
        }
        let leases: Vec<LeaseSet> = woken
            .iter()
            .map(|&index| {
                let mut task = tasks[index].take().unwrap();
                assert_eq!(task.woken(), 1, "task {index}");
                task.poll().expect("a woken task is served").unwrap()
            })
            .collect();
        rounds.push(woken);
        drop(leases);
    }
}

/// Steps of the queue and wake-ups since the start.
fn counts(rig: &Rig) -> [u64; 2] {
    [rig.manager.counters().queue_steps, rig.manager.stats().woken]
}

fn many() -> usize {
    (vramp_testing::cases(2_000) as usize).min(10_000)
}

#[test]
fn thousands_of_writers_of_one_buffer_are_woken_one_by_one() {
    let rig = patient().build();
    let buffer = rig.filled(PIECE, 1);
    let held = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    let before = counts(&rig);
    let wanted = [(&buffer, Access::Exclusive)];
    let mut tasks: Vec<_> = (0..many()).map(|_| Some(Task::waiting(&rig, &wanted))).collect();
    assert_eq!(waiting(&rig), many());
    drop(held);
    let rounds = serve(&mut tasks);
    assert_eq!(rounds.len(), many(), "each one alone");
    assert!(rounds.iter().flatten().copied().eq(0..many()), "in order of arrival");
    let [steps, woken] = counts(&rig);
    assert_eq!(woken - before[1], many() as u64);
    assert!(steps - before[0] <= 6 * many() as u64, "{} steps", steps - before[0]);
    assert_eq!((waiting(&rig), rig.manager.stats().looks), (0, 0), "no thread looked again");
    rig.check();
}

#[test]
fn thousands_of_readers_of_one_buffer_are_woken_by_one_end() {
    let rig = patient().build();
    let buffer = rig.filled(PIECE, 1);
    let held = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    let before = counts(&rig);
    let wanted = [(&buffer, Access::Shared)];
    let mut tasks: Vec<_> = (0..many()).map(|_| Some(Task::waiting(&rig, &wanted))).collect();
    drop(held);
    let rounds = serve(&mut tasks);
    assert_eq!(rounds.len(), 1, "readers share");
    let [steps, woken] = counts(&rig);
    assert_eq!(woken - before[1], many() as u64);
    assert!(steps - before[0] <= 4 * many() as u64, "{} steps", steps - before[0]);
    rig.check();
}

#[test]
fn thousands_that_lack_room_are_woken_as_it_becomes_free() {
    for (waiters, buffers) in [(100, 10), (1_000, 100), (many(), 100), (many(), 1_000)] {
        let usual = patient();
        let config = SpillConfig { capacity: Some(MIB(64)), ..usual.config.clone() };
        let rig = Plan { config, ..usual }.build();
        let all = rig.filled(MIB(64), 1);
        // Four fit at once.
        let them: Vec<_> = (0..buffers).map(|_| rig.manager.buffer(MIB(16)).unwrap()).collect();
        let held = all.lease(Access::Shared, rig.stream).unwrap();
        let before = counts(&rig);
        let wanted: Vec<_> = them.iter().map(|buffer| [(buffer, Access::Shared)]).collect();
        let wanted = (0..waiters).map(|index| &wanted[index * 7 % buffers]);
        let mut tasks: Vec<_> = wanted.map(|wanted| Some(Task::waiting(&rig, wanted))).collect();
        drop(held);
        let served: usize = serve(&mut tasks).iter().map(Vec::len).sum();
        assert_eq!(served, waiters);
        let [steps, woken] = counts(&rig);
        assert_eq!(woken - before[1], waiters as u64);
        let steps = (steps - before[0]) as f64 / waiters as f64;
        assert!(steps <= 20.0, "{steps} steps for each of {waiters}");
        rig.check();
    }
}

#[test]
fn a_resident_buffer_is_leased_without_a_look_at_those_that_wait_for_others() {
    for count in [64, many()] {
        let rig = patient().build();
        let (buffer, outer) = (rig.filled(MIB(2), 1), rig.filled(MIB(2), 2));
        let others: Vec<_> = (0..8).map(|_| rig.filled(MIB(2), 3)).collect();
        let wanted: Vec<_> = others.iter().map(|other| [(other, Access::Exclusive)]).collect();
        let _held: Vec<_> =
            wanted.iter().map(|wanted| rig.manager.request(wanted).now().unwrap()).collect();
        let tasks = (0..count).map(|index| Task::waiting(&rig, &wanted[index % 8]));
        let _tasks: Vec<_> = tasks.collect();
        let before = counts(&rig);
        drop(buffer.lease(Access::Shared, rig.stream).unwrap());
        // Also by a thread that holds another lease.
        let lease = outer.lease(Access::Shared, rig.stream).unwrap();
        drop(buffer.lease(Access::Shared, rig.stream).unwrap());
        drop(lease);
        assert_eq!(counts(&rig), before, "{count} waiters");
    }
}

#[test]
fn a_resident_buffer_is_leased_without_a_look_at_waiters_that_hold_leases() {
    let config = SpillConfig { capacity: Some(MIB(512)), ..patient().config };
    let rig = Plan { limit: MIB(512), config, ..patient() }.build();
    let all: Vec<_> = (0..67).map(|byte| rig.filled(MIB(2), byte)).collect();
    let [buffer, outer, wanted, own @ ..] = &all[..] else { unreachable!("there are 67") };
    let exclusive = [(wanted, Access::Exclusive)];
    let held = rig.manager.request(&exclusive).now().unwrap();
    let mut tasks = Vec::new();
    let mut kept = Vec::new();
    for own in own {
        let owner = LeaseOwner::new();
        let set = [(own, Access::Exclusive)];
        kept.push(rig.manager.request(&set).owner(owner).now().unwrap());
        let mut task = Task::new(rig.manager.request(&exclusive).owner(owner));
        assert!(task.poll().is_none());
        tasks.push(Some(task));
    }
    assert_eq!(waiting(&rig), 64);
    let before = counts(&rig);
    let lease = outer.lease(Access::Shared, rig.stream).unwrap();
    for _ in 0..100 {
        drop(buffer.lease(Access::Shared, rig.stream).unwrap());
    }
    drop(lease);
    assert_eq!(counts(&rig), before);
    drop(held);
    assert_eq!(serve(&mut tasks).len(), 64, "one after another");
    drop(kept);
    rig.check();
}

#[test]
fn a_holder_passes_those_that_lack_room_with_one_look() {
    let usual = patient();
    let config = SpillConfig { capacity: Some(MIB(64)), ..usual.config.clone() };
    let rig = Plan { config, ..usual }.build();
    let (outer, inner) = (rig.filled(MIB(16), 1), rig.filled(MIB(16), 2));
    let large: Vec<_> = (0..64).map(|_| rig.manager.buffer(MIB(56)).unwrap()).collect();
    let lease = outer.lease(Access::Shared, rig.stream).unwrap();
    let wanted: Vec<_> = large.iter().map(|large| [(large, Access::Shared)]).collect();
    let mut tasks: Vec<_> = wanted.iter().map(|wanted| Some(Task::waiting(&rig, wanted))).collect();
    let before = counts(&rig);
    drop(inner.lease(Access::Shared, rig.stream).unwrap());
    let [steps, woken] = counts(&rig);
    assert!(steps - before[0] <= 2, "{} steps", steps - before[0]);
    assert_eq!(woken, before[1]);
    drop(lease);
    assert_eq!(serve(&mut tasks).len(), 64, "one after another");
    rig.check();
}

#[test]
fn a_dropped_future_leaves_the_queue_and_serves_the_next() {
    let rig = patient().build();
    let buffer = rig.filled(PIECE, 1);
    let held = buffer.lease(Access::Shared, rig.stream).unwrap();
    let (write, read) = ([(&buffer, Access::Exclusive)], [(&buffer, Access::Shared)]);
    let writer = Task::waiting(&rig, &write);
    let mut reader = Task::waiting(&rig, &read);
    drop(writer);
    assert_eq!((reader.woken(), waiting(&rig)), (1, 0));
    drop(reader.poll().unwrap().unwrap());
    // One that was served, and is dropped before it is polled, holds nothing.
    let writer = Task::waiting(&rig, &write);
    drop(held);
    assert_eq!((writer.woken(), rig.manager.census().leases), (1, 1));
    drop(writer);
    assert_eq!(rig.manager.census().leases, 0);
    // Neither does one whose buffer would have been restored.
    rig.manager.spill(PIECE);
    let outer = rig.filled(MIB(64), 2).lease(Access::Shared, rig.stream).unwrap();
    let late = Task::waiting(&rig, &read);
    drop(outer);
    assert_eq!((late.woken(), rig.manager.census().moves), (1, 1));
    drop(late);
    assert_eq!((rig.manager.census().leases, rig.manager.census().moves), (0, 0));
    // One that was never polled requested nothing.
    drop(Task::new(rig.manager.request(&write)));
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn a_lease_and_a_future_move_to_another_thread() {
    fn is_send<T: Send>(value: T) -> T {
        value
    }
    let rig = patient().build();
    let buffer = rig.filled(PIECE, 1);
    let wanted = [(&buffer, Access::Exclusive)];
    let held = is_send(rig.manager.request(&wanted).stream(rig.stream).now().unwrap());
    let mut task = is_send(Task::waiting(&rig, &wanted));
    std::thread::scope(|scope| {
        let other = scope.spawn(move || task.wait());
        scope.spawn(move || drop(held)).join().unwrap();
        drop(other.join().unwrap().unwrap());
    });
    rig.check();
}

#[test]
fn a_request_passes_those_that_wait_for_what_it_names_as_held() {
    let rig = patient().build();
    let (buffer, other) = (rig.filled(PIECE, 1), rig.filled(PIECE, 2));
    let read = [(&buffer, Access::Shared)];
    let outer = rig.manager.request(&read).stream(rig.stream).now().unwrap();
    let both = [(&buffer, Access::Exclusive), (&other, Access::Exclusive)];
    let mut writer = Task::waiting(&rig, &both);
    let wanted = [(&other, Access::Shared)];
    let is_behind = |leased: Leased| {
        matches!(leased, Err(SpillError::Refused(LeaseRefused::OlderWaiters { .. })))
    };
    assert!(is_behind(rig.manager.request(&wanted).now()));
    assert!(is_behind(rig.manager.request(&wanted).owner(LeaseOwner::new()).now()));
    // The plain calls are the thread's, which holds nothing.
    assert!(is_behind(rig.manager.lease_on(&wanted, &[rig.stream], Instant::now())));
    let inner = rig.manager.request(&wanted).holding(&outer).now().unwrap();
    assert_ne!(inner.owner(), outer.owner());
    // What it holds is named through any of its leases.
    let third = rig.manager.request(&wanted).holding(&inner).holding(&outer).now().unwrap();
    let own = rig.manager.request(&wanted).owner(outer.owner()).now().unwrap();
    assert_eq!(own.owner(), outer.owner());
    assert!(writer.poll().is_none());
    drop((inner, third, own, outer));
    drop(writer.wait().unwrap());
    rig.check();
}

#[test]
fn tasks_that_wait_for_each_others_leases_pass_the_one_between() {
    let rig = patient().build();
    let all: Vec<_> = (1..=3).map(|byte| rig.filled(PIECE, byte)).collect();
    let [x, y, z] = [&all[0], &all[1], &all[2]];
    let (one, two) = (LeaseOwner::new(), LeaseOwner::new());
    let of_one = rig.manager.request(&[(x, Access::Shared)]).owner(one).now().unwrap();
    let of_two = rig.manager.request(&[(z, Access::Exclusive)]).owner(two).now().unwrap();
    let mut oldest = Task::waiting(&rig, &[(x, Access::Exclusive), (y, Access::Exclusive)]);
    // The second owner waits behind the oldest, until the first owner waits for it.
    let wanted = [(y, Access::Shared)];
    let mut second = Task::new(rig.manager.request(&wanted).owner(two));
    assert!(second.poll().is_none());
    let wanted = [(z, Access::Shared)];
    let mut first = Task::new(rig.manager.request(&wanted).owner(one));
    assert!(first.poll().is_none());
    assert_eq!((second.woken(), first.woken(), oldest.woken()), (1, 0, 0));
    drop(second.poll().unwrap().unwrap());
    drop(of_two);
    drop(first.poll().expect("it was woken").unwrap());
    assert!(oldest.poll().is_none());
    drop(of_one);
    drop(oldest.poll().expect("it was woken").unwrap());
    rig.check();
}

#[test]
fn a_future_restores_in_a_job_of_the_callers_choice() {
    let rig = patient().build();
    let buffer = rig.filled(MIB(32), 1);
    let wanted = [(&buffer, Access::Shared)];
    let (sender, jobs) = mpsc::channel::<RestoreJob>();
    let request = || {
        let sender = sender.clone();
        let request = rig.manager.request(&wanted).stream(rig.stream);
        Task::new(request.restore_on(move |job| drop(sender.send(job))))
    };
    drop(request().poll().expect("a resident buffer needs no job").unwrap());
    assert!(jobs.try_recv().is_err());

    rig.manager.spill(MIB(64));
    let mut task = request();
    assert!(task.poll().is_none());
    let job = jobs.try_recv().unwrap();
    assert_eq!(task.woken(), 0);
    std::thread::spawn(job).join().unwrap();
    assert_eq!(task.woken(), 1);
    drop(task.poll().unwrap().unwrap());

    // Whether the job runs or not, a dropped future leaves no lease.
    for runs in [true, false] {
        rig.manager.spill(MIB(64));
        let mut task = request();
        assert!(task.poll().is_none());
        drop(task);
        let job = jobs.try_recv().unwrap();
        if runs {
            job();
        }
    }
    assert_eq!(rig.manager.census().leases, 0);

    rig.manager.spill(MIB(64));
    let mut task = request();
    assert!(task.poll().is_none());
    drop(jobs.try_recv().unwrap());
    assert_eq!(task.woken(), 1);
    assert!(matches!(task.poll(), Some(Err(SpillError::JobDropped))));
    assert_eq!(rig.manager.census().leases, 0);
    rig.expect(&buffer, 1);
    rig.check();
}

#[test]
fn a_future_ends_at_its_deadline_and_one_without_waits_on() {
    let rig = patient().build();
    let buffer = rig.filled(PIECE, 1);
    let held = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    let wanted = [(&buffer, Access::Shared)];
    let mut patient = Task::new(rig.manager.request(&wanted).deadline(Duration::MAX));
    assert!(patient.poll().is_none());
    let soon = Duration::from_millis(5);
    let mut task = Task::new(rig.manager.request(&wanted).deadline(soon));
    assert!(task.poll().is_none());
    until(|| task.woken() == 1);
    let refused = task.poll().unwrap().unwrap_err();
    assert!(matches!(refused, SpillError::Refused(LeaseRefused::Busy { .. })), "{refused}");
    let now = Task::new(rig.manager.request(&wanted).deadline(Instant::now())).poll();
    assert!(matches!(now, Some(Err(SpillError::Refused(LeaseRefused::Busy { .. })))));
    assert_eq!((waiting(&rig), patient.woken()), (1, 0));
    drop(held);
    drop(patient.poll().unwrap().unwrap());
    rig.check();
}

#[test]
fn the_longest_durations_are_no_deadlines() {
    let usual = Plan::default();
    let config = SpillConfig { patience: Duration::MAX, ..usual.config.clone() };
    let rig = Plan { config, ..usual }.build();
    let buffer = rig.filled(PIECE, 1);
    let wanted = [(&buffer, Access::Exclusive)];
    let held = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    std::thread::scope(|scope| {
        let plain = scope.spawn(|| buffer.lease(Access::Shared, rig.stream).map(drop));
        let given =
            scope.spawn(|| rig.manager.request(&wanted).deadline(Duration::MAX).wait().map(drop));
        until(|| waiting(&rig) == 2);
        drop(held);
        plain.join().unwrap().unwrap();
        given.join().unwrap().unwrap();
    });
    rig.check();
}

#[test]
fn memory_freed_outside_the_manager_serves_the_next_that_lacks_some() {
    let rig = patient().build();
    let buffer = rig.manager.buffer(MIB(32)).unwrap();
    let held = rig.filled(MIB(16), 1).lease(Access::Shared, rig.stream).unwrap();
    // The capacity is what the allocator's own blocks leave of the limit.
    let block = rig.allocator.malloc(MIB(24), rig.stream).unwrap();
    let wanted = [(&buffer, Access::Exclusive)];
    let mut task = Task::new(rig.manager.request(&wanted).stream(rig.stream));
    assert!(task.poll().is_none());
    until(|| rig.manager.stats().looks >= 3);
    assert_eq!(task.woken(), 0);
    rig.allocator.free(block, rig.stream).unwrap();
    drop(task.wait().unwrap());
    assert_eq!(rig.manager.stats().woken, 1);
    drop(held);
    rig.check();
}

#[test]
fn a_lease_that_ends_with_a_capture_serves_the_next() {
    let rig = patient().build();
    let buffer = rig.filled(PIECE, 1);
    let held = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    rig.sim.begin_capture(rig.queue, CaptureMode::Relaxed).unwrap();
    drop(held);
    let wanted = [(&buffer, Access::Shared)];
    let mut task = Task::new(rig.manager.request(&wanted));
    assert!(task.poll().is_none(), "the end is not recorded yet");
    rig.sim.end_capture(rig.queue).unwrap();
    drop(task.wait().unwrap());
    rig.check();
}

#[test]
fn no_thread_looks_again_while_no_waiter_lacks_memory() {
    let rig = patient().build();
    let buffer = rig.filled(PIECE, 1);
    let held = buffer.lease(Access::Exclusive, rig.stream).unwrap();
    let wanted = [(&buffer, Access::Shared)];
    std::thread::scope(|scope| {
        let waiters: Vec<_> = (0..16)
            .map(|_| scope.spawn(|| rig.manager.request(&wanted).wait().map(drop)))
            .collect();
        until(|| waiting(&rig) == 16);
        drop(held);
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap().unwrap());
    });
    let stats = rig.manager.stats();
    assert_eq!((stats.woken, stats.looks), (16, 0));
    rig.check();
}

#[test]
fn waiters_and_owners_leave_nothing() {
    let rig = patient().build();
    let (buffer, outer) = (rig.filled(PIECE, 1), rig.filled(PIECE, 2));
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let left = || {
        rig.sim.synchronize_stream(rig.queue).unwrap();
        rig.manager.footprint()
    };
    let before = left();
    let (wanted, kept) = ([(&buffer, Access::Exclusive)], [(&outer, Access::Shared)]);
    for round in 0..2_000 {
        let held = rig.manager.request(&wanted).now().unwrap();
        let owner = LeaseOwner::new();
        let kept = rig.manager.request(&kept).owner(owner).now().unwrap();
        let mut tasks: Vec<_> = (0..4)
            .map(|_| {
                let mut task = Task::new(rig.manager.request(&wanted).owner(owner).holding(&held));
                assert!(task.poll().is_none());
                Some(task)
            })
            .collect();
        tasks[round % 4] = None;
        drop(held);
        assert_eq!(serve(&mut tasks).len(), 3);
        drop(kept);
    }
    assert_eq!(left(), before);
    rig.check();
}

#[test]
fn thousands_of_leases_leave_nothing() {
    let rig = rig();
    let buffer = rig.filled(MIB(2), 1);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    let before = rig.manager.footprint();
    for _ in 0..vramp_testing::cases(10_000) {
        drop(buffer.lease(Access::Shared, rig.stream).unwrap());
    }
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert_eq!(rig.manager.footprint(), before);
    rig.check();
}

#[test]
fn cancelled_waits_end_once_each_and_later_requests_wait_again() {
    let rig = Plan::default().build();
    let buffer = rig.filled(MIB(2), 1);
    let wanted = [(&buffer, Access::Exclusive)];
    let held = rig.manager.request(&wanted).stream(rig.stream).now().unwrap();
    let mut tasks: Vec<Task> = (0..100).map(|_| Task::waiting(&rig, &wanted)).collect();
    assert_eq!(waiting(&rig), 100);
    let before = rig.manager.stats().woken;
    rig.manager.cancel_waits();
    assert_eq!((waiting(&rig), rig.manager.stats().woken - before), (0, 100));
    for task in &mut tasks {
        assert_eq!(task.woken(), 1);
        assert!(matches!(task.poll(), Some(Err(SpillError::Cancelled))));
    }
    // Meanwhile no request waits; one that can be granted is.
    let refused = rig.manager.request(&wanted).stream(rig.stream).deadline(Deadline::NEVER).wait();
    assert!(matches!(refused, Err(SpillError::Cancelled)), "{refused:?}");
    let other = rig.filled(MIB(2), 2);
    let free = [(&other, Access::Exclusive)];
    drop(rig.manager.request(&free).stream(rig.stream).wait().unwrap());
    rig.manager.allow_waits();
    let mut later = Task::waiting(&rig, &wanted);
    drop(held);
    drop(later.wait().unwrap());
    rig.check();
}
