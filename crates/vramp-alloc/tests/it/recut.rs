//! Huge free chunks are cut before small blocks enter them.

use crate::common::Rig;
use vramp_alloc::{Bytes, Config};
use vramp_driver::Call;
use vramp_driver::sim::{Kernel, Simulator};

/// 8 GiB in chunks of 128 MiB, and 2 MiB blocks of which one in 64 stays: then 1 GiB blocks.
#[test]
fn a_few_small_blocks_do_not_pin_the_chunks_of_a_huge_one() {
    let limit = Bytes::gib(8);
    let config = Config { limit: Some(limit), ..Config::default() };
    let rig = Rig::on(Simulator::builder(), config);
    let huge = rig.malloc(4096);
    assert_eq!(rig.sim.calls_of(Call::Create), 64);
    rig.free(huge);
    let small: Vec<_> = (0..4096).map(|_| rig.malloc(1)).collect();
    assert_eq!(rig.sim.calls_of(Call::Create), 64 + 64 * 32, "each was cut into 4 MiB, once");
    let (mut kept, mut freed) = (Vec::new(), Vec::new());
    for (number, block) in small.into_iter().enumerate() {
        if number % 64 == 0 { kept.push(block) } else { freed.push(block) }
    }
    freed.into_iter().for_each(|block| rig.free(block));
    // 64 blocks stay, and each pins 4 MiB: 7.75 GiB can be moved.
    let large: Vec<_> = (0..7).map(|_| rig.malloc(512)).collect();
    rig.assert_accounts_agree();
    large.into_iter().chain(kept).for_each(|block| rig.free(block));
    rig.close();
}

/// While the huge block's work may still run, its chunks are as they are.
#[test]
fn a_huge_chunk_whose_work_is_not_over_is_not_cut() {
    let rig = Rig::on(Simulator::builder(), Config::default());
    let huge = rig.malloc(4096);
    let gate = rig.sim.gate();
    let stream = rig.allocator.stream(rig.stream).expect("it is open");
    rig.sim.launch(stream, Kernel::new("busy").until(gate)).expect("no call fails");
    rig.free(huge);
    let releases = rig.sim.calls_of(Call::Release);
    let small = rig.malloc(1);
    assert_eq!(rig.sim.calls_of(Call::Release), releases);
    rig.sim.open(gate);
    rig.free(small);
    rig.close();
}
