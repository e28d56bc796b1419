use super::*;

use Access::{Exclusive, Shared};

/// Pieces of 4 KiB in pages of 1 KiB, so that tenants of 512 bytes fit.
fn grouped(tenants: &[u64]) -> (Deferrables, RangeId, Vec<BufferId>) {
    let sizes = DeferConfig { piece: b(4096), page: b(1024), capacity: b(16384), ..config() };
    let mut core = Deferrables::new(sizes).unwrap();
    let group = core.add_group(b(4000), None).unwrap();
    let add = |&len: &u64| core.add_tenant(group, b(len)).unwrap().buffer;
    let all = tenants.iter().map(add).collect();
    (core, group, all)
}

fn write(core: &mut Deferrables, buffer: BufferId, now_ns: u64) {
    let lease = lease(core, buffer, Exclusive, now_ns);
    end(core, lease, now_ns);
}

#[test]
fn tenants_take_the_lowest_place_and_a_full_group_says_so() {
    let (mut core, group, all) = grouped(&[700, 100, 512]);
    let offsets: Vec<u64> =
        all.iter().map(|&buffer| core.slice(buffer).unwrap().offset.count()).collect();
    assert_eq!(offsets, [0, 1024, 1536]);
    core.remove(all[0]).unwrap();
    core.audit().unwrap();
    assert_eq!(core.add_tenant(group, b(900)).unwrap().at.offset, b(0));
    let full = core.add_tenant(group, b(3000)).unwrap_err();
    assert_eq!(full, AddError::Full { group, len: b(3000), longest: b(2048) });
    assert!(!core.remove_group(group));
    let own = core.add_buffer(b(10)).unwrap().at.range;
    assert!(matches!(core.add_tenant(own, b(1)), Err(AddError::Unknown(_))));
}

#[test]
fn tenants_leave_together_or_not_at_all() {
    let (mut core, group, all) = grouped(&[512, 512, 512]);
    all.iter().for_each(|&buffer| write(&mut core, buffer, 0));
    assert_eq!(core.occupied(), b(4096));
    let held = lease(&mut core, all[1], Shared, 1);
    let wide = SpillDemand {
        room: SpillRoom { host: b(4096), disk: b(0), ..SpillRoom::default() },
        ..short(1)
    };
    let refused = core.choose(&wide, 2);
    assert_eq!((refused.victims.len(), refused.short.unwrap().leased), (0, b(4096)));
    end(&mut core, held, 2);
    let choice = core.choose(&wide, 200);
    assert_eq!((choice.victims.len(), choice.frees), (1, b(4096)));
    assert_eq!(choice.victims[0].moves.len(), 3);
    assert_eq!(choice.victims[0].cost.dirty, b(1536));
    let outs = choice.victims[0].moves.clone();
    core.settle(outs[0].id).unwrap();
    assert_eq!(core.occupied(), b(4096), "the others are still there");
    assert_eq!(core.needed_memory(group).unwrap(), [(b(0), b(2048))]);
    core.settle(outs[1].id).unwrap();
    let last = core.settle(outs[2].id).unwrap();
    assert_eq!(last, Settled::Spilled { piece: outs[2].piece, range: group, frees: b(4096) });
    core.audit().unwrap();
}

#[test]
fn a_lease_on_one_tenant_keeps_those_that_have_not_left() {
    let (mut core, group, all) = grouped(&[512, 512, 512]);
    all.iter().for_each(|&buffer| write(&mut core, buffer, 0));
    let room = SpillRoom { host: b(4096), disk: b(0), ..SpillRoom::default() };
    let outs = core.choose(&SpillDemand { room, ..short(1) }, 1).victims[0].moves.clone();
    core.settle(outs[0].id).unwrap();
    let back = lease(&mut core, all[0], Shared, 2);
    for out in &outs[1..] {
        assert!(matches!(core.settle(out.id), Ok(Settled::Cleaned { .. })), "it frees nothing");
    }
    end(&mut core, back, 2);
    assert_eq!(core.needed_memory(group).unwrap(), [(b(0), b(2048))]);
    assert_eq!(core.census().clean, b(1536));
}

#[test]
fn one_tenant_comes_back_alone() {
    let (mut core, group, all) = grouped(&[512, 512]);
    all.iter().for_each(|&buffer| write(&mut core, buffer, 0));
    let room = SpillRoom { host: b(4096), disk: b(0), ..SpillRoom::default() };
    let choice = core.choose(&SpillDemand { room, ..short(1) }, 1);
    settle_all(&mut core, &choice);
    let granted = try_lease(&mut core, &[(all[1], Shared)], S1, 2).unwrap();
    assert_eq!(granted.restores.len(), 1);
    assert_eq!(granted.restores[0].at, RangeSlice { range: group, offset: b(512), len: b(512) });
    assert_eq!(core.needed_memory(group).unwrap(), [(b(0), b(1024))]);
    assert_eq!(core.census().committed, b(4096));
}

#[test]
fn what_a_group_needs_is_known_by_pages_whatever_the_number_of_its_buffers() {
    let piece = b(64 * 4096);
    let config = DeferConfig { piece, page: b(4096), capacity: b(1 << 30), ..config() };
    let mut core = Deferrables::new(config).unwrap();
    let group = core.add_group(piece, None).unwrap();
    let all: Vec<BufferId> =
        (0..512).map(|_| core.add_tenant(group, b(512)).unwrap().buffer).collect();
    // Every second one gets memory, then only those of the first and the fourth page keep it.
    let odd = all.iter().skip(1).step_by(2);
    odd.clone().for_each(|&buffer| write(&mut core, buffer, 0));
    assert_eq!(core.needed_memory(group).unwrap(), [(b(0), piece)]);
    for (index, &buffer) in all.iter().enumerate().filter(|(index, _)| index % 2 == 1) {
        if ![0, 3].contains(&(index / 8)) {
            core.remove(buffer).unwrap();
        }
    }
    core.audit().unwrap();
    assert_eq!(core.needed_memory(group).unwrap(), [(b(0), b(4096)), (b(3 * 4096), b(4096))]);
}

#[test]
fn a_group_counts_once_towards_what_fits() {
    let (mut core, _, all) = grouped(&[512, 512, 512]);
    core.set_capacity(b(4096));
    let set: Vec<(BufferId, Access)> = all.iter().map(|&buffer| (buffer, Exclusive)).collect();
    let granted = try_lease(&mut core, &set, S1, 0).unwrap();
    end(&mut core, granted.lease, 0);
}

#[test]
fn what_is_kept_is_sorted_and_merged() {
    let mut core = core();
    let a = written(&mut core, 90, 0);
    let range = core.slice(a).unwrap().range;
    assert_eq!(core.needed_memory(range).unwrap(), [(b(0), b(90))]);
    let choice = core.choose(&short(90), 1);
    for out in choice.victims.iter().map(|victim| &victim.moves[0]) {
        match [1, 4].contains(&out.piece.index) {
            true => assert!(core.settle(out.id).is_ok()),
            false => assert!(core.abandon(out.id).is_ok()),
        }
    }
    core.audit().unwrap();
    assert_eq!(core.needed_memory(range).unwrap(), [(b(0), b(16)), (b(32), b(32)), (b(80), b(10))]);
}
