//! The order of steps, compared with asking every stream.

use proptest::prelude::*;

use super::*;

const STREAMS: usize = 5;

#[derive(Clone, Debug)]
enum Op {
    Work { stream: usize, ns: u64 },
    Gated { stream: usize, gate: usize },
    Wait { stream: usize, on: usize },
    Open(usize),
    Step,
    Pass(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..STREAMS, 0..4u64).prop_map(|(stream, ns)| Op::Work { stream, ns }),
        1 => (0..STREAMS, 0..3usize).prop_map(|(stream, gate)| Op::Gated { stream, gate }),
        4 => (0..STREAMS, 0..STREAMS).prop_map(|(stream, on)| Op::Wait { stream, on }),
        1 => (0..3usize).prop_map(Op::Open),
        8 => Just(Op::Step),
        1 => (0..6u64).prop_map(Op::Pass),
    ]
}

/// The stream that advances next, by asking all.
fn naive(streams: &Streams) -> Option<(u64, usize)> {
    let all = 0..streams.queues.len();
    all.filter_map(|stream| Some((streams.due_ns(stream)?, stream))).min()
}

fn step(streams: &mut Streams, now_ns: &mut u64) {
    assert_eq!(streams.next_due(), naive(streams));
    let Some((due_ns, stream)) = streams.next_due() else { return };
    if let Step::Started(mut work) = streams.step(stream, due_ns) {
        work.kernel.duration_ns += 1;
        streams.run(stream, work);
    }
    *now_ns = (*now_ns).max(due_ns);
    assert_eq!(streams.next_due(), naive(streams));
}

#[test]
fn streams_that_were_destroyed_and_are_done_leave_nothing() {
    let mut streams = Streams::default();
    let stays = streams.create(0);
    let gate = streams.gate();
    for number in 0..1_000_u64 {
        let created = streams.create(0);
        let stream = streams.index(0, created).expect("it was just created");
        let kernel = Kernel::new("work").lasting(1);
        streams.push(stream, Work { kernel, ..Work::default() }, number);
        let end = streams.end_of(stream);
        streams.destroy(stream);
        assert!(!streams.is_done(end) && streams.index(0, created).is_err());
        while let Some((due_ns, next)) = streams.next_due() {
            if let Step::Started(work) = streams.step(next, due_ns) {
                streams.run(next, work);
            }
        }
        assert!(streams.is_done(end) && streams.is_done(streams.end_of(stream)));
    }
    assert_eq!((streams.queues.len(), streams.busy.len(), streams.due.len()), (1, 0, 0));
    assert_eq!(streams.index(0, stays).expect("it was not destroyed"), 0);
    // One with work stays until that is done.
    let last = streams.create_unnamed(0);
    let kernel = Kernel::new("gated").until(gate);
    streams.push(0, Work { kernel, ..Work::default() }, 0);
    streams.destroy(0);
    assert_eq!(streams.queues.keys().copied().collect::<Vec<_>>(), [0, last]);
}

proptest! {
    #[test]
    fn the_next_stream_is_the_one_that_asking_all_finds(
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let mut streams = Streams::default();
        let _ = [(); STREAMS].map(|()| streams.create(0));
        let gates = [(); 3].map(|()| streams.gate());
        let mut now_ns = 0;
        let work = |kernel: Kernel| Work { kernel, ..Work::default() };
        for op in ops {
            match op {
                Op::Work { stream, ns } => {
                    streams.push(stream, work(Kernel::new("k").lasting(ns)), now_ns);
                }
                Op::Gated { stream, gate } => {
                    streams.push(stream, work(Kernel::new("g").until(gates[gate])), now_ns);
                }
                Op::Wait { stream, on } => {
                    streams.push_wait(stream, streams.end_of(on), now_ns);
                }
                Op::Open(gate) => prop_assert!(streams.open(gates[gate], now_ns)),
                Op::Step => step(&mut streams, &mut now_ns),
                // The host's clock passes only what is due.
                Op::Pass(ns) => {
                    now_ns += ns;
                    while streams.next_due().is_some_and(|(due_ns, _)| due_ns <= now_ns) {
                        step(&mut streams, &mut now_ns);
                    }
                }
            }
            prop_assert_eq!(streams.next_due(), naive(&streams));
        }
        prop_assert!(gates.into_iter().all(|gate| streams.open(gate, now_ns)));
        while streams.next_due().is_some() {
            step(&mut streams, &mut now_ns);
        }
        prop_assert!(streams.pending == 0 && streams.busy().count() == 0);
        for queue in streams.queues.values() {
            prop_assert!(queue.items.is_empty() && queue.waiters.is_empty());
        }
    }
}
