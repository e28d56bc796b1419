//! Requests of the pool beside threads that lease without end.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};

use super::below::until;
use super::*;

/// Raises a flag when it is dropped, also by a panic: the other threads end then.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Rig {
    /// Leases the buffers in turn, one at a time, and counts. Checks and changes their first bytes.
    fn lease_in_turn(&self, buffers: &[DeferrableBuffer], over: &AtomicBool, leased: &AtomicUsize) {
        let stream = self.allocator.create_stream().unwrap();
        let queue = self.allocator.stream(stream).unwrap();
        let mut bytes = vec![0; buffers.len()];
        buffers.iter().for_each(|buffer| self.fill(buffer, 0));
        for (index, buffer) in buffers.iter().enumerate().cycle() {
            if over.load(Ordering::Relaxed) {
                break;
            }
            let lease = buffer.lease(Access::Exclusive, stream).unwrap();
            let first = AddrRange::new(lease.address(0).start, Bytes::new(1));
            self.sim.synchronize_stream(queue).unwrap();
            assert_eq!(self.sim.peek(first).unwrap(), [bytes[index]]);
            bytes[index] = bytes[index].wrapping_add(1);
            self.sim.fill(queue, first, bytes[index]).unwrap();
            drop(lease);
            leased.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Makes so many requests, each after all buffers were leased again. Returns how many failed.
    fn request(&self, len: Bytes, requests: usize, leased: &AtomicUsize) -> usize {
        let stream = self.allocator.create_stream().unwrap();
        let mut failed = 0;
        for _ in 0..requests {
            match self.allocator.malloc(len, stream) {
                Ok(block) => drop(self.allocator.free(block, stream)),
                Err(error) => {
                    println!("{error}");
                    failed += 1;
                }
            }
            let before = leased.load(Ordering::Relaxed);
            until(|| leased.load(Ordering::Relaxed) >= before + 4);
        }
        failed
    }
}

#[test]
fn a_request_is_served_though_a_thread_never_stops_to_lease() {
    let rig = patient().build();
    let buffers: Vec<_> = (0..4).map(|_| rig.manager.buffer(MIB(16)).unwrap()).collect();
    let (over, leased) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let ends = Over(&over);
        scope.spawn(|| rig.lease_in_turn(&buffers, &over, &leased));
        until(|| leased.load(Ordering::Relaxed) >= 4);
        // One buffer is leased at a time, so 48 MiB can leave.
        assert_eq!(rig.request(MIB(40), 40, &leased), 0);
        drop(ends);
    });
    assert!(rig.manager.stats().spills >= 40, "{:?}", rig.manager.stats());
    rig.check();
}

#[test]
fn neither_requests_nor_leases_starve_beside_several_of_both() {
    let rig = patient().build();
    let buffers: Vec<_> = (0..8).map(|_| rig.manager.buffer(MIB(16)).unwrap()).collect();
    let over = AtomicBool::new(false);
    let leased: Vec<_> = (0..2).map(|_| AtomicUsize::new(0)).collect();
    std::thread::scope(|scope| {
        let ends = Over(&over);
        for (own, leased) in buffers.chunks(4).zip(&leased) {
            scope.spawn(|| rig.lease_in_turn(own, &over, leased));
        }
        // Two leases have 32 MiB, and the two requests 24.
        let requests = leased.iter().map(|leased| scope.spawn(|| rig.request(MIB(12), 40, leased)));
        let requests: Vec<_> = requests.collect();
        let failed = requests.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>();
        assert_eq!(failed, 0);
        drop(ends);
    });
    rig.check();
}

#[test]
fn a_request_of_another_pool_is_served_though_a_thread_never_stops_to_lease() {
    let rig = patient().build();
    let pool = rig.allocator.create_pool("other").unwrap();
    let stream = pool.create_stream().unwrap();
    let buffers: Vec<_> = (0..4).map(|_| rig.manager.buffer(MIB(16)).unwrap()).collect();
    let (over, leased) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let ends = Over(&over);
        scope.spawn(|| rig.lease_in_turn(&buffers, &over, &leased));
        until(|| leased.load(Ordering::Relaxed) >= 4);
        for _ in 0..20 {
            let block = pool.malloc(MIB(40), stream).unwrap();
            pool.free(block, stream).unwrap();
            let before = leased.load(Ordering::Relaxed);
            until(|| leased.load(Ordering::Relaxed) >= before + 4);
        }
        drop(ends);
    });
    rig.check();
}

#[test]
fn a_request_under_a_lease_holds_up_neither_itself_nor_others() {
    let rig = patient().build();
    let buffers: Vec<_> = (0..4).map(|_| rig.manager.buffer(MIB(16)).unwrap()).collect();
    let (over, leased) = (AtomicBool::new(false), AtomicUsize::new(0));
    let (own, others) = buffers.split_at(2);
    std::thread::scope(|scope| {
        let ends = Over(&over);
        scope.spawn(|| rig.lease_in_turn(others, &over, &leased));
        until(|| leased.load(Ordering::Relaxed) >= 4);
        for _ in 0..20 {
            let outer = own[0].lease(Access::Exclusive, rig.stream).unwrap();
            let block = rig.allocator.malloc(MIB(24), rig.stream).unwrap();
            // It needs the memory that the other thread's buffers have.
            rig.allocator.free(block, rig.stream).unwrap();
            drop(own[1].lease(Access::Exclusive, rig.stream).unwrap());
            drop(outer);
            let before = leased.load(Ordering::Relaxed);
            until(|| leased.load(Ordering::Relaxed) >= before + 4);
        }
        drop(ends);
    });
    rig.check();
}

#[test]
fn a_handler_may_wait_for_a_thread_that_leases() {
    let rig = patient().build();
    let buffers: Vec<_> = (0..4).map(|byte| rig.filled(MIB(16), byte)).collect();
    let (wanted, wishes) = mpsc::channel::<usize>();
    let (done, granted) = mpsc::channel::<usize>();
    let calls = Arc::new(AtomicUsize::new(0));
    let (count, wanted, granted) = (Arc::clone(&calls), Mutex::new(wanted), Mutex::new(granted));
    let this = std::thread::current().id();
    let handler = rig.allocator.on_shortage(move |_| {
        // The leases of the other thread are short of memory too.
        if std::thread::current().id() != this {
            return false;
        }
        let which = count.fetch_add(1, Ordering::Relaxed) % 4;
        wanted.lock().unwrap().send(which).unwrap();
        assert_eq!(granted.lock().unwrap().recv().unwrap(), which);
        false
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for which in wishes {
                drop(buffers[which].lease(Access::Exclusive, rig.stream).unwrap());
                // The request may be over.
                let _ = done.send(which);
            }
        });
        let other = rig.allocator.create_stream().unwrap();
        let blocks = [24, 16].map(|mib| rig.allocator.malloc(MIB(mib), other).unwrap());
        assert!(rig.allocator.malloc(MIB(32), other).is_err(), "24 MiB are left");
        for block in blocks {
            rig.allocator.free(block, other).unwrap();
        }
        rig.allocator.unregister(handler);
    });
    assert!(calls.load(Ordering::Relaxed) >= 3);
    rig.check();
}
