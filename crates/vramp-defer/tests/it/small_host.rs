//! A host that is small beside the staging of a disk.

use vramp_alloc::Driver;
use vramp_defer::report::PieceState;
use vramp_tiers::movers::MoverConfig;

use super::{MIB, PIECE, Plan};

#[test]
fn a_host_smaller_than_the_staging_of_the_disk_takes_copies_in_its_other_half() {
    let staging = MoverConfig { step: MIB(4), ..MoverConfig::default() };
    let staging = staging.step * u64::from(staging.staging_pieces);
    let rig = Plan { host: staging, disk: Some(MIB(512)), ..Plan::default() }.build();
    let buffers: Vec<_> = (0..6).map(|byte| rig.filled(PIECE, byte)).collect();
    rig.sim.synchronize_stream(rig.queue).unwrap();
    assert_eq!(rig.manager.spill(MIB(48)).freed, MIB(48));
    let census = rig.manager.census();
    assert_eq!(
        (census.host_copies, census.disk_copies),
        (staging.round_down(PIECE) - PIECE, MIB(40))
    );
    let on_host = buffers.iter().flat_map(|buffer| buffer.states());
    let on_host =
        on_host.filter(|state| matches!(state, PieceState::Spilled { copies } if copies.host));
    assert_eq!(on_host.count(), 1);
    for (byte, buffer) in (0..).zip(&buffers) {
        rig.expect(buffer, byte);
    }
    rig.check();
}
