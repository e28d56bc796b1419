//! Eviction policies of the program: who leaves first, and what a policy cannot break.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use vramp_defer::policy::{BufferId, EvictionPolicy, EvictionRequest};

use super::*;

/// Installs a closure.
fn install(
    rig: &Rig,
    policy: impl Fn(&EvictionRequest<'_>) -> Vec<BufferId> + Send + Sync + 'static,
) {
    rig.manager.set_eviction_policy(Some(Arc::new(policy)));
}

fn ids(request: &EvictionRequest<'_>) -> Vec<BufferId> {
    request.candidates.iter().map(|candidate| candidate.buffer).collect()
}

/// Buffers of 8 MiB, used in the order of their bytes, on a card of 64 MiB. Their work is over.
fn eight(rig: &Rig) -> Vec<DeferrableBuffer> {
    let buffers = (1..=8).map(|byte| rig.filled(MIB(8), byte)).collect();
    rig.sim.synchronize_stream(rig.queue).unwrap();
    rig.manager.census();
    buffers
}

fn gone(buffers: &[DeferrableBuffer]) -> Vec<usize> {
    (0..buffers.len()).filter(|&index| !buffers[index].is_resident()).collect()
}

#[test]
fn the_policy_decides_who_leaves_and_the_manager_how_much() {
    let rig = rig();
    let buffers = eight(&rig);
    // The most recently used first, against the usual order.
    install(&rig, |request| {
        let order = ids(request);
        assert!(
            request.candidates.windows(2).all(|pair| pair[0].cost.idle_ns >= pair[1].cost.idle_ns)
        );
        order.into_iter().rev().collect()
    });
    assert_eq!(rig.manager.spill(MIB(12)).freed, MIB(16), "whole pieces, and no more");
    assert_eq!(gone(&buffers), [6, 7]);
    // Allocations and leases as well.
    let block = rig.allocator.malloc(MIB(24), rig.stream).unwrap();
    assert_eq!(gone(&buffers), [5, 6, 7]);
    rig.allocator.free(block, rig.stream).unwrap();
    rig.expect(&buffers[7], 8);
    rig.manager.set_eviction_policy(None);
    let calls = rig.manager.stats().policy_calls;
    assert!(calls >= 2);
    rig.manager.spill(MIB(8));
    assert_eq!(rig.manager.stats().policy_calls, calls);
    assert!(gone(&buffers).contains(&0), "the least recently used again");
    (1..).zip(&buffers).for_each(|(byte, buffer)| rig.expect(buffer, byte));
    rig.check();
}

#[test]
fn what_a_policy_does_not_name_is_chosen_by_cost() {
    let rig = rig();
    let buffers = eight(&rig);
    let third = buffers[3].id();
    install(&rig, move |_| vec![third]);
    assert_eq!(rig.manager.spill(MIB(24)).freed, MIB(24));
    assert_eq!(gone(&buffers), [0, 1, 3]);
    install(&rig, |_| Vec::new());
    assert_eq!(rig.manager.spill(MIB(8)).freed, MIB(8));
    assert_eq!(gone(&buffers), [0, 1, 2, 3]);
    assert_eq!(rig.manager.stats().policy_ignored, 0);
    (1..).zip(&buffers).for_each(|(byte, buffer)| rig.expect(buffer, byte));
    rig.check();
}

#[test]
fn an_answer_that_makes_no_sense_is_ignored_and_counted() {
    let rig = rig();
    let buffers = eight(&rig);
    let dropped = rig.manager.buffer(MIB(2)).unwrap();
    let unknown = dropped.id();
    drop(dropped);
    let held = buffers[0].lease(Access::Shared, rig.stream).unwrap();
    let pinned = buffers[1].lease(Access::Shared, rig.stream).unwrap().pin(0).unwrap();
    let [of_held, of_pinned, last] = [&buffers[0], &buffers[1], &buffers[7]].map(|one| one.id());
    install(&rig, move |request| {
        assert!(!ids(request).contains(&of_held) && !ids(request).contains(&of_pinned));
        vec![unknown, of_held, last, last, of_pinned, BufferId::from_number(u64::MAX)]
    });
    assert_eq!(rig.manager.spill(MIB(16)).freed, MIB(16));
    assert_eq!(gone(&buffers).len(), 2);
    assert!(gone(&buffers).contains(&7) && buffers[0].is_resident() && buffers[1].is_resident());
    assert_eq!(rig.manager.stats().policy_ignored, 5, "unknown, held, twice, pinned, no id at all");
    drop((held, pinned));
    (1..).zip(&buffers).for_each(|(byte, buffer)| rig.expect(buffer, byte));
    rig.check();
}

#[test]
fn a_policy_that_panics_is_counted_and_the_manager_chooses() {
    let rig = rig();
    let buffers = eight(&rig);
    install(&rig, |_| panic!("a policy with a mistake"));
    let block = rig.allocator.malloc(MIB(16), rig.stream).unwrap();
    assert_eq!(gone(&buffers), [0, 1]);
    let stats = rig.manager.stats();
    assert_eq!(
        (stats.policy_calls, stats.policy_panics),
        (stats.policy_panics, stats.policy_calls)
    );
    assert!(stats.policy_panics >= 1);
    rig.allocator.free(block, rig.stream).unwrap();
    (1..).zip(&buffers).for_each(|(byte, buffer)| rig.expect(buffer, byte));
    rig.check();
}

#[test]
fn a_policy_is_called_without_a_lock_and_not_for_its_own_evictions() {
    let rig = Arc::new(rig());
    let buffers = eight(&rig);
    let depth = Arc::new(AtomicU64::new(0));
    let kept = buffers[5].clone();
    let (weak, depth_of) = (Arc::downgrade(&rig), Arc::clone(&depth));
    install(&rig, move |request| {
        assert_eq!(depth_of.fetch_add(1, Ordering::Relaxed), 0, "it is not called within itself");
        let rig = weak.upgrade().unwrap();
        // It queries the manager, leases what is resident, and evicts and allocates on its own.
        assert_eq!(rig.manager.census().buffers, 8);
        drop(rig.manager.request(&[(&kept, Access::Shared)]).now().unwrap());
        assert!(!rig.manager.spill(MIB(8)).freed.is_zero());
        let block = rig.allocator.malloc(MIB(8), rig.stream).unwrap();
        rig.allocator.free(block, rig.stream).unwrap();
        depth_of.fetch_sub(1, Ordering::Relaxed);
        ids(request).into_iter().rev().collect()
    });
    let freed = rig.manager.spill(MIB(8)).freed;
    assert!(freed >= MIB(8), "{freed}");
    assert!(!buffers[7].is_resident() && !buffers[0].is_resident());
    rig.manager.set_eviction_policy(None);
    (1..).zip(&buffers).for_each(|(byte, buffer)| rig.expect(buffer, byte));
    rig.check();
}

#[test]
fn a_group_is_offered_by_its_members_and_leaves_as_a_whole() {
    let rig = rig();
    let group = rig.manager.group();
    let members: Vec<_> = (0..4).map(|_| group.buffer(Bytes::kib(64)).unwrap()).collect();
    members.iter().zip(1..).for_each(|(member, byte)| rig.fill(member, byte));
    let other = rig.filled(MIB(8), 9);
    rig.sim.synchronize_stream(rig.queue).unwrap();
    rig.manager.census();
    let offered = Arc::new(Mutex::new(Vec::new()));
    let (seen, second) = (Arc::clone(&offered), members[1].id());
    install(&rig, move |request| {
        seen.lock().unwrap().extend_from_slice(request.candidates);
        vec![second, second]
    });
    assert!(rig.manager.spill(MIB(1)).freed >= MIB(1));
    assert!(members.iter().all(|member| !member.is_resident()) && other.is_resident());
    let offered = offered.lock().unwrap();
    for member in &members {
        let found: Vec<_> = offered.iter().filter(|one| one.buffer == member.id()).collect();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].frees, PIECE, "the memory of the group");
    }
    (1..).zip(&members).for_each(|(byte, member)| rig.expect(member, byte));
    rig.check();
}

/// Offers few.
struct Few;

impl EvictionPolicy for Few {
    fn order(&self, request: &EvictionRequest<'_>) -> Vec<BufferId> {
        assert_eq!(request.candidates.len(), 10);
        ids(request).into_iter().rev().collect()
    }

    fn most_candidates(&self) -> usize {
        10
    }
}

#[test]
fn a_round_looks_at_as_many_candidates_as_the_policy_says_however_many_buffers_there_are() {
    for count in [100_u64, 10_000] {
        let card = Simulator::builder().memory(Bytes::tib(1)).contents(Contents::Discarded);
        let rig = Plan { limit: MIB(2) * count, ..Plan::default() }.build_on(card);
        let buffers: Vec<_> = (0..count).map(|_| rig.manager.buffer(MIB(2)).unwrap()).collect();
        for buffer in &buffers {
            drop(buffer.lease(Access::Exclusive, rig.stream).unwrap());
        }
        rig.sim.synchronize_stream(rig.queue).unwrap();
        // The first choice after a change lists what has changed.
        rig.manager.spill(MIB(2));
        rig.manager.set_eviction_policy(Some(Arc::new(Few)));
        let before = rig.manager.counters().looked_at;
        assert_eq!(rig.manager.spill(MIB(2)).freed, MIB(2));
        let looked_at = rig.manager.counters().looked_at - before;
        assert!(looked_at <= 20, "{looked_at} of {count}");
        rig.check();
    }
}
