//! Memory whose work is over is memory of no stream and serves each, on paper.

use crate::paper::rig::{PAGE, Rig, range};
use vramp_core::{Bytes, Mixed, Policy};

fn rig(streams: usize) -> Rig {
    let chunks =
        Mixed { chunk_min: PAGE, chunk_usual: PAGE, chunk_max: PAGE * 8, ..Mixed::default() };
    Rig::with(Policy::Mixed(Mixed { heap_limit: Bytes::ZERO, ..chunks }), streams, None)
}

#[test]
fn new_memory_serves_every_stream_whichever_it_was_made_for() {
    let mut rig = rig(2);
    rig.shell.prefill(PAGE * 4, rig.streams[0]);
    let (four, cost) = rig.costly(4, 1);
    assert_eq!((cost, rig.shell.pool.counters().misses), ((0, 0, 0), 0), "a hit");
    rig.shell.paper.touch(rig.streams[1], 1, range(four));
}

#[test]
fn what_was_freed_before_there_was_a_second_stream_serves_that_once_its_work_is_over() {
    for over in [true, false] {
        let mut rig = rig(1);
        let two = rig.malloc(2, 0);
        rig.shell.paper.touch(rig.streams[0], 1, range(two));
        rig.free(two, 0);
        assert!(rig.shell.record_freed());
        if over {
            rig.finish(0);
        }
        let second = rig.shell.add_stream();
        rig.streams.push(second);
        let (again, cost) = rig.costly(2, 1);
        assert_eq!((again.block.at == two.block.at, cost.1 == 0), (over, over), "{cost:?}");
        rig.shell.paper.touch(second, 2, range(again));
    }
}

#[test]
fn of_neighbours_those_whose_work_is_over_serve_others_and_the_rest_does_not() {
    // The blocks are freed in this order, an event behind each; the work before two of them is over.
    for order in [[0, 1, 2], [2, 1, 0], [0, 2, 1]] {
        let mut rig = rig(2);
        let blocks = [0; 3].map(|_| rig.malloc(2, 0));
        rig.malloc(1, 0);
        for (life, which) in (1..).zip(order) {
            rig.shell.paper.touch(rig.streams[0], life, range(blocks[which]));
            rig.free(blocks[which], 0);
            assert!(rig.shell.record_freed());
        }
        let reserved = rig.shell.pool.census().reserved;
        rig.shell.pool.set_limit(Some(reserved), None);
        rig.shell.paper.queues.advance(rig.streams[0], 4);
        rig.shell.poll();
        for (number, pending) in [false, false, true].into_iter().enumerate() {
            let (two, cost) = rig.costly(2, 1);
            assert_eq!(cost, (0, 0, usize::from(pending)), "{order:?}: {number}");
            assert_eq!(two.block.at == blocks[order[2]].block.at, pending, "{order:?}: {number}");
            rig.shell.paper.touch(rig.streams[1], 9, range(two));
        }
    }
}
