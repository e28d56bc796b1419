//! One trim returns all idle memory, however it became idle.

use crate::common::{Rig, pages};
use vramp_alloc::{Bytes, Config};
use vramp_driver::Call;
use vramp_driver::sim::{FaultPlan, Simulator};
use vramp_peers::Preset;

/// All work is over by now: one trim leaves nothing.
fn trim_leaves_nothing(rig: Rig) {
    rig.sim.advance(1 << 30);
    rig.allocator.trim(Bytes::ZERO).unwrap();
    rig.allocator.audit().unwrap();
    assert_eq!(rig.held(), 0, "\n{}", rig.census());
    rig.assert_accounts_agree();
    rig.close();
}

#[test]
fn the_slab_that_a_stream_keeps_is_given_back() {
    let rig = Rig::new(Preset::Vramp);
    let block = rig.allocator.malloc(Bytes::new(512), rig.stream).unwrap();
    rig.free(block);
    trim_leaves_nothing(rig);
}

#[test]
fn a_slab_emptied_by_a_free_on_another_stream_is_given_back() {
    let rig = Rig::new(Preset::Vramp);
    let other = rig.allocator.create_stream().unwrap();
    let block = rig.allocator.malloc(Bytes::new(512), rig.stream).unwrap();
    rig.free_on(block, other);
    trim_leaves_nothing(rig);
}

#[test]
fn memory_that_waits_for_a_stream_which_freed_nothing_is_given_back() {
    for preset in [Preset::Vramp, Preset::Vpmm] {
        let rig = Rig::new(preset);
        let other = rig.allocator.create_stream().unwrap();
        let block = rig.malloc(16);
        rig.allocator.record_use(&block, other).unwrap();
        rig.free(block);
        assert_eq!(rig.census().waiting, pages(16));
        trim_leaves_nothing(rig);
    }
}

#[test]
fn a_chunk_in_which_idle_memory_of_two_streams_meets_is_given_back() {
    let rig = Rig::new(Preset::Vramp);
    let other = rig.allocator.create_stream().unwrap();
    let half = Bytes::mib(4);
    rig.allocator.prefill(half * 2, rig.stream).unwrap();
    let front = rig.allocator.malloc(half, rig.stream).unwrap();
    // New memory waits for nothing, so the other stream takes the back half of the chunk.
    let back = rig.allocator.malloc(half, other).unwrap();
    assert_eq!(rig.sim.live().handles, 1);
    rig.free(front);
    rig.free_on(back, other);
    trim_leaves_nothing(rig);
}

#[test]
fn a_chunk_that_is_stuck_where_it_was_to_move_is_kept_and_counted_until_it_is_unmapped() {
    for preset in [Preset::Vramp, Preset::Vpmm] {
        let config = Config { span: Bytes::gib(1), ..preset.config() };
        let rig = Rig::on(Simulator::builder(), config);
        let blocks: Vec<_> = (0..4).map(|_| rig.malloc(4)).collect();
        let mut kept = Vec::new();
        for (n, block) in blocks.into_iter().enumerate() {
            if n % 2 == 0 {
                rig.free(block);
            } else {
                kept.push(block);
            }
        }
        let stuck = FaultPlan::nth_of(Call::SetAccess, 1).and(FaultPlan::nth_of(Call::Unmap, 1));
        rig.sim.set_faults(stuck.with_code(1));
        assert!(rig.allocator.malloc(pages(8), rig.stream).is_err());
        rig.sim.set_faults(FaultPlan::none());
        assert!(!rig.census().quarantined_addresses.is_zero());
        for block in kept {
            rig.free(block);
        }
        // The first unmap of a trim is of the mapping that could not be undone.
        rig.sim.set_faults(FaultPlan::nth_of(Call::Unmap, 1).with_code(1));
        rig.allocator.trim(Bytes::ZERO).unwrap();
        rig.allocator.audit().unwrap();
        rig.assert_accounts_agree();
        assert!(rig.held() > 0, "the stuck chunk cannot be released");
        rig.allocator.trim(Bytes::ZERO).unwrap();
        rig.allocator.audit().unwrap();
        assert_eq!((rig.held(), rig.census().quarantined_addresses), (0, Bytes::ZERO));
        rig.close();
    }
}
