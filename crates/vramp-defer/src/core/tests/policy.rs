//! Victims in an order that is given, and the candidates for it.

use super::*;

use Access::Shared;

fn victims(ordered: &OrderedChoice) -> Vec<PieceId> {
    let moves = ordered.choice.victims.iter().flat_map(|victim| &victim.moves);
    moves.map(|out| out.piece).collect()
}

#[test]
fn victims_are_taken_in_the_given_order_until_enough_is_freed() {
    let mut core = core();
    let all = [0, 1, 2].map(|now| written(&mut core, 32, now));
    let ordered = core.choose_in_order(&[all[2], all[0], all[1]], &short(40), 9);
    core.audit().unwrap();
    assert_eq!(victims(&ordered), [piece(all[2], 0), piece(all[2], 1), piece(all[0], 0)]);
    assert_eq!((ordered.choice.frees, ordered.ignored), (b(48), 0));
    // What was chosen is in flight, and not chosen again.
    let again = core.choose_in_order(&[all[2], all[0]], &short(40), 9);
    assert_eq!((victims(&again), again.ignored), (vec![piece(all[0], 1)], 1));
    let rest = core.choose(&short(1000), 9);
    assert_eq!(rest.frees, b(32), "the other buffer");
    core.audit().unwrap();
}

#[test]
fn what_cannot_leave_is_ignored_and_what_has_no_room_is_passed_over() {
    let mut core = core();
    let [held, clean, dirty, gone] = [0, 1, 2, 3].map(|now| written(&mut core, 16, now));
    core.remove(gone).unwrap();
    let outs = core.choose_in_order(&[clean], &short(16), 4);
    settle_all(&mut core, &outs.choice);
    let reader = lease(&mut core, clean, Shared, 5);
    end(&mut core, reader, 5);
    let _held = try_lease(&mut core, &[(held, Shared)], S1, 5).unwrap();
    let full = SpillDemand { room: SpillRoom::default(), ..short(100) };
    let ordered = core.choose_in_order(&[held, gone, dirty, dirty, clean], &full, 6);
    core.audit().unwrap();
    assert_eq!(victims(&ordered), [piece(clean, 0)], "it has a copy");
    assert_eq!(ordered.ignored, 3, "held, removed, and named twice");
    assert_eq!(core.choose_in_order(&[dirty], &short(0), 6), OrderedChoice::default());
}

#[test]
fn candidates_come_in_the_order_in_which_they_would_leave() {
    let mut core = core();
    let all = [30, 10, 20, 40].map(|now| written(&mut core, 16, now));
    core.set_priority(all[0], -1).unwrap();
    core.hint(all[1], Hint::WillNeed).unwrap();
    let two = written(&mut core, 32, 5);
    let buffers = |core: &mut Deferrables, most| -> Vec<(BufferId, u64)> {
        let found = core.candidates(most, &short(0), 100);
        found.iter().map(|one| (one.buffer, one.frees.count())).collect()
    };
    let expected = [(all[0], 16), (two, 32), (all[2], 16), (all[3], 16), (all[1], 16)];
    assert_eq!(buffers(&mut core, 100), expected);
    // Of a buffer what was looked at counts.
    assert_eq!(buffers(&mut core, 2), [(all[0], 16), (two, 16)]);
    assert_eq!(buffers(&mut core, 0), []);
    for (buffer, frees) in expected {
        for _ in 0..frees / 16 {
            assert_eq!(spill(&mut core, 16, 100)[0].buffer, buffer);
        }
    }
}
