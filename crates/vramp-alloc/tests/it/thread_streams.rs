//! Per-thread default streams: each thread that asks for its own has a stream id of its own, which ends
//! with the thread; others reach it only where the host waits or memory runs out.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, spawn};

use vramp_alloc::graph::CaptureMode;
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, Config, StreamId};
use vramp_driver::sim::{FaultPlan, Kernel, LiveObjects, Simulator};
use vramp_driver::{Call, Driver, ErrorKind, StreamThread};
use vramp_peers::Preset;

use crate::common::graph_rig::{LONG_NS, range};
use crate::common::{Random, Rig};

const MIB: Bytes = Bytes::mib(1);

fn rig(preset: Preset, limit: Option<Bytes>) -> Rig {
    Rig::on(Simulator::builder().checked(), Config { limit, ..preset.config() })
}

fn assert_sound(sim: &Simulator, context: &str) {
    assert!(sim.device_loss().is_none(), "{context}: {:?}", sim.device_loss());
    assert!(sim.hazards().is_empty(), "{context}: {:?}", sim.hazards());
}

/// Queues a write of a block on a stream.
fn write(sim: &Simulator, allocator: &Allocator, block: &Allocation, stream: StreamId, ns: u64) {
    let kernel = Kernel::new("write").writing(range(block)).lasting(ns);
    sim.launch(allocator.stream(stream).unwrap(), kernel).unwrap();
}

/// A thread that runs what it is sent, until it is dropped.
struct Elsewhere {
    work: Option<Sender<Box<dyn FnOnce() + Send>>>,
    thread: Option<JoinHandle<()>>,
}

impl Elsewhere {
    fn new() -> Elsewhere {
        let (work, todo): (_, Receiver<Box<dyn FnOnce() + Send>>) = channel();
        let thread = spawn(move || todo.into_iter().for_each(|work| work()));
        Elsewhere { work: Some(work), thread: Some(thread) }
    }

    fn run<R: Send + 'static>(&self, work: impl FnOnce() -> R + Send + 'static) -> R {
        let (done, result) = channel();
        let work = Box::new(move || done.send(work()).unwrap());
        self.work.as_ref().unwrap().send(work).unwrap();
        result.recv().unwrap()
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        drop(self.work.take());
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

struct Shared {
    sim: Arc<Simulator>,
    allocator: Arc<Allocator>,
}

fn shared(preset: Preset, limit: Option<Bytes>) -> Arc<Shared> {
    let Rig { sim, allocator, .. } = rig(preset, limit);
    Arc::new(Shared { sim, allocator: Arc::new(allocator) })
}

impl Shared {
    fn own(&self) -> StreamId {
        self.allocator.thread_stream().unwrap()
    }

    /// Allocates and writes a block on the thread's own stream.
    fn work(&self, size: Bytes, ns: u64) -> Allocation {
        let own = self.own();
        let block = self.allocator.malloc(size, own).unwrap();
        write(&self.sim, &self.allocator, &block, own, ns);
        block
    }

    /// Allocates so much that a request rather grows the pool than waits for other streams' work.
    fn fill(&self) {
        let stream = self.allocator.create_stream().unwrap();
        let _ = self.allocator.malloc(Bytes::gib(4), stream).unwrap();
    }

    fn close(self: Arc<Self>, context: &str) {
        let Shared { sim, allocator } = Arc::into_inner(self).expect("it has one owner");
        allocator.audit().unwrap();
        Arc::into_inner(allocator).expect("it has one owner").close().unwrap();
        assert_sound(&sim, context);
        assert_eq!(sim.live(), LiveObjects::default(), "{context}");
    }
}

#[test]
fn a_thread_has_one_stream_of_its_own_in_all_pools_of_a_group() {
    let rig = rig(Preset::Vramp, None);
    let (allocator, sim) = (&rig.allocator, &rig.sim);
    let pool = allocator.create_pool("side").unwrap();
    let own = allocator.thread_stream().unwrap();
    assert_eq!((allocator.thread_stream(), pool.thread_stream()), (Ok(own), Ok(own)));
    let raw = allocator.stream(own).unwrap();
    assert_eq!(sim.stream_thread(raw), StreamThread::This);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let other = allocator.thread_stream().unwrap();
            assert_ne!(other, own);
            assert_eq!(sim.stream_thread(raw), StreamThread::Other);
            assert_eq!(allocator.thread_streams(), [own, other]);
        });
        other.join().unwrap();
        assert_eq!(allocator.thread_streams(), [own]);
    });
    assert_eq!(sim.stream_thread(rig.raw(rig.stream)), StreamThread::Any);
    // One that the caller ends is made anew.
    allocator.destroy_stream(own).unwrap();
    let again = allocator.thread_stream().unwrap();
    assert_ne!(again, own);
    assert_eq!(allocator.thread_stream(), Ok(again));
    pool.close().unwrap();
    rig.close();
}

#[test]
fn eight_threads_use_and_free_each_others_blocks_on_their_own_streams() {
    for preset in Preset::ALL {
        let shared = shared(preset, Some(Bytes::mib(256)));
        let handed: Mutex<Vec<(Allocation, StreamId)>> = Mutex::default();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|thread| {
                    let (shared, handed) = (&shared, &handed);
                    scope.spawn(move || {
                        let mut random = Random(thread);
                        for _ in 0..60 {
                            step(shared, handed, &mut random);
                        }
                    })
                })
                .collect();
            // Each has ended its stream then.
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        // Blocks of threads that ended.
        for (block, last) in handed.into_inner().unwrap() {
            shared.allocator.free(block, last).unwrap();
        }
        shared.close(preset.name());
    }
}

fn step(shared: &Shared, handed: &Mutex<Vec<(Allocation, StreamId)>>, random: &mut Random) {
    let Shared { sim, allocator } = shared;
    match random.below(8) {
        0..=3 => {
            let sizes = [Bytes::kib(3), Bytes::kib(700), Bytes::mib(2), Bytes::mib(9)];
            let size = sizes[random.below(4) as usize];
            let own = shared.own();
            let Ok(block) = allocator.malloc(size, own) else { return };
            write(sim, allocator, &block, own, random.below(1 << 16));
            handed.lock().unwrap().push((block, own));
        }
        4..=5 => {
            let taken = handed.lock().unwrap().pop();
            // Its work is on the stream of the thread that made it, which may have ended.
            taken.into_iter().for_each(|(block, last)| allocator.free(block, last).unwrap());
        }
        6 => {
            let block = handed.lock().unwrap().pop();
            let Some((block, last)) = block else { return };
            // Ordered behind that work, used and freed on the own stream.
            let own = shared.own();
            if let Some(raw) = allocator.stream(last).filter(|_| last != own) {
                let event = sim.create_event().unwrap();
                // The other thread may end meanwhile.
                if sim.record(event, raw).is_err() {
                    sim.destroy_event(event).unwrap();
                    return allocator.free(block, last).unwrap();
                }
                sim.wait(allocator.stream(own).unwrap(), event).unwrap();
                sim.destroy_event(event).unwrap();
            } else if last != own {
                return allocator.free(block, last).unwrap();
            }
            write(sim, allocator, &block, own, random.below(1 << 16));
            allocator.free(block, own).unwrap();
        }
        _ => sim.advance(random.below(1 << 16)),
    }
}

#[test]
fn what_a_thread_frees_serves_it_at_once_and_others_once_its_work_is_over() {
    let shared = shared(Preset::Vramp, None);
    shared.fill();
    let (a, b) = (Elsewhere::new(), Elsewhere::new());
    let at = Arc::clone(&shared);
    let first = a.run(move || {
        let others: Vec<Allocation> = (5..9).map(|size| at.work(MIB * size, 1)).collect();
        let block = at.work(MIB * 64, LONG_NS);
        let addr = block.addr();
        at.allocator.free(block, at.own()).unwrap();
        let again = at.work(MIB * 64, 1);
        let same = again.addr() == addr;
        at.allocator.free(again, at.own()).unwrap();
        // More than its cache takes, so the thread records what it freed.
        others.into_iter().for_each(|block| at.allocator.free(block, at.own()).unwrap());
        assert!(same, "the thread's own memory serves it");
        addr
    });
    let at = Arc::clone(&shared);
    let grown = b.run(move || at.work(MIB * 64, 1));
    assert_ne!(grown.addr(), first, "its work runs");
    shared.sim.advance(2 * LONG_NS);
    let at = Arc::clone(&shared);
    let (reserved, third) = b.run(move || {
        let before = at.allocator.stats().unwrap().reserved;
        let block = at.work(MIB * 64, 1);
        (at.allocator.stats().unwrap().reserved - before, block)
    });
    assert_eq!(reserved, Bytes::ZERO, "what the other thread freed is used");
    let own = b.run({
        let at = Arc::clone(&shared);
        move || at.own()
    });
    [grown, third].into_iter().for_each(|block| shared.allocator.free(block, own).unwrap());
    drop((a, b));
    shared.close("freed memory of another thread");
}

#[test]
fn a_thread_with_long_work_holds_up_no_other_while_there_is_room() {
    let shared = shared(Preset::Vramp, None);
    shared.fill();
    let (slow, quick) = (Elsewhere::new(), Elsewhere::new());
    let gate = shared.sim.gate();
    let at = Arc::clone(&shared);
    slow.run(move || {
        let own = at.own();
        let block = at.allocator.malloc(MIB * 40, own).unwrap();
        let kernel = Kernel::new("slow").writing(range(&block)).until(gate);
        at.sim.launch(at.allocator.stream(own).unwrap(), kernel).unwrap();
        at.allocator.free(block, own).unwrap();
    });
    let at = Arc::clone(&shared);
    quick.run(move || {
        let own = at.own();
        // Each size misses, and looks for what others freed.
        for size in 1..40 {
            let block = at.work(MIB * size, 10);
            at.allocator.free(block, own).unwrap();
        }
        let event = at.sim.create_event().unwrap();
        at.sim.record(event, at.allocator.stream(own).unwrap()).unwrap();
        at.sim.advance(LONG_NS);
        assert!(at.sim.query(event).unwrap(), "it waits for the slow thread's work");
        at.sim.destroy_event(event).unwrap();
    });
    shared.sim.open(gate);
    drop((slow, quick));
    shared.close("a slow thread");
}

#[test]
fn at_the_limit_a_request_gets_what_an_idle_thread_freed() {
    for preset in Preset::ALL {
        let shared = shared(preset, Some(Bytes::mib(128)));
        let (idle, other) = (Elsewhere::new(), Elsewhere::new());
        let at = Arc::clone(&shared);
        // Freed by a third thread, so that its owner never records it.
        let block = idle.run(move || at.work(MIB * 100, LONG_NS));
        shared.allocator.free(block, idle_stream(&idle, &shared)).unwrap();
        let at = Arc::clone(&shared);
        other.run(move || {
            let block = at.work(MIB * 100, 10);
            at.allocator.free(block, at.own()).unwrap();
        });
        drop((idle, other));
        shared.close(preset.name());
    }
}

fn idle_stream(thread: &Elsewhere, shared: &Arc<Shared>) -> StreamId {
    let at = Arc::clone(shared);
    thread.run(move || at.own())
}

#[test]
fn threads_that_end_leave_nothing() {
    let shared = shared(Preset::Vramp, Some(Bytes::mib(64)));
    let mut held = Vec::new();
    for round in 0..400 {
        let at = Arc::clone(&shared);
        let block = spawn(move || {
            let own = at.own();
            let kept = at.work(MIB * 2, 100);
            let freed = at.work(MIB, 100);
            at.allocator.free(freed, own).unwrap();
            (kept, own)
        });
        held.push(block.join().unwrap());
        // Freed after the thread ended: its stream has ended, its work may run on.
        if held.len() == 8 {
            held.drain(..).for_each(|(block, own)| shared.allocator.free(block, own).unwrap());
        }
        if round == 40 {
            shared.sim.advance(1 << 20);
        }
        assert!(shared.sim.live().streams <= 2, "round {round}: {:?}", shared.sim.live());
    }
    held.drain(..).for_each(|(block, own)| shared.allocator.free(block, own).unwrap());
    shared.sim.advance(1 << 20);
    shared.allocator.trim(Bytes::ZERO).unwrap();
    assert_eq!(shared.allocator.stats().unwrap().reserved, Bytes::ZERO);
    shared.close("threads that ended");
}

#[test]
fn a_stream_of_which_the_end_fails_is_ended_by_a_later_thread() {
    let shared = shared(Preset::Vramp, None);
    let streams = shared.sim.live().streams;
    let at = Arc::clone(&shared);
    let ended = spawn(move || {
        let block = at.work(MIB * 4, 100);
        at.allocator.free(block, at.own()).unwrap();
        at.sim.set_faults(FaultPlan::from_nth_of(Call::Record, 1).with_code(304));
    });
    ended.join().unwrap();
    assert_eq!(shared.sim.live().streams, streams + 1, "its work cannot be tracked yet");
    shared.sim.set_faults(FaultPlan::none());
    let at = Arc::clone(&shared);
    spawn(move || at.own()).join().unwrap();
    assert_eq!(shared.sim.live().streams, streams);
    shared.close("a stream that was left");
}

#[test]
fn a_capture_on_a_threads_stream_is_seen_by_the_thread_and_left_alone_by_others() {
    let shared = shared(Preset::Vramp, Some(Bytes::mib(128)));
    let (capturing, other) = (Elsewhere::new(), Elsewhere::new());
    let at = Arc::clone(&shared);
    capturing.run(move || {
        let own = at.own();
        let block = at.work(MIB * 100, 10);
        at.allocator.free(block, own).unwrap();
        let raw = at.allocator.stream(own).unwrap();
        at.sim.begin_capture(raw, CaptureMode::Global).unwrap();
        assert_eq!(at.allocator.any_captures(), Ok(true));
    });
    let at = Arc::clone(&shared);
    let refused = other.run(move || {
        assert_eq!(at.allocator.any_captures(), Ok(true));
        at.allocator.malloc(MIB * 100, at.own()).map(drop)
    });
    assert!(matches!(refused, Err(AllocError::OutOfMemory(_))), "{refused:?}");
    let at = Arc::clone(&shared);
    capturing.run(move || {
        let raw = at.allocator.stream(at.own()).unwrap();
        let graph = at.sim.end_capture(raw).expect("no call of another thread invalidated it");
        at.sim.destroy_graph(graph).unwrap();
    });
    let at = Arc::clone(&shared);
    other.run(move || {
        let block = at.work(MIB * 100, 10);
        at.allocator.free(block, at.own()).unwrap();
    });
    drop((capturing, other));
    shared.close("a capture on a thread's stream");
}

#[test]
fn a_stream_that_cannot_be_made_changes_nothing() {
    let rig = rig(Preset::Vramp, None);
    rig.sim.set_faults(FaultPlan::nth_of(Call::CreateStream, 1).with_code(304));
    let failed = rig.allocator.thread_stream().unwrap_err();
    assert_eq!((failed.call, failed.kind), (Call::CreateStream, ErrorKind::Other));
    let before = rig.sim.live();
    assert_eq!(before.streams, 1);
    rig.allocator.thread_stream().unwrap();
    rig.close();
}
