//! Random programs, with failures of the device.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
pub(super) enum Step {
    Malloc { size: u64, stream: u32 },
    Free { pick: usize, stream: u32 },
    Use { pick: usize, stream: u32 },
    Reach,
    EmptyCache,
    Fail { after: u32 },
}

pub(super) fn step() -> impl Strategy<Value = Step> {
    let size = prop_oneof![0..MIB, MIB..30 * MIB, Just(MIB), Just(10 * MIB), 1..200 * MIB];
    prop_oneof![
        8 => (size, 0..3u32).prop_map(|(size, stream)| Step::Malloc { size, stream }),
        6 => (any::<usize>(), 0..3u32).prop_map(|(pick, stream)| Step::Free { pick, stream }),
        2 => (any::<usize>(), 0..3u32).prop_map(|(pick, stream)| Step::Use { pick, stream }),
        1 => Just(Step::Reach),
        1 => Just(Step::EmptyCache),
        1 => (0..3u32).prop_map(|after| Step::Fail { after }),
    ]
}

fn settings() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        Just(""),
        Just("expandable_segments:True"),
        Just("max_split_size_mb:21,garbage_collection_threshold:0.3"),
        Just("expandable_segments:True,max_split_size_mb:30,garbage_collection_threshold:0.6"),
        Just("roundup_power2_divisions:4"),
    ]
}

proptest! {
    /// Every step keeps every invariant (the audit runs in each), no two blocks overlap, and all
    /// memory is released at the end.
    #[test]
    fn random_programs_keep_every_invariant(
        settings in settings(),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut rig = Rig::new(settings, Bytes::mib(600), Some(Bytes::mib(500)));
        rig.pool.add_stream();
        rig.pool.add_stream();
        let mut held: Vec<TorchBlock> = Vec::new();
        for step in steps {
            match step {
                Step::Malloc { size, stream } => {
                    if let Ok(block) = rig.try_malloc(size, stream) {
                        prop_assert!(block.len.count() >= size);
                        let end = block.at.plus(block.len.count());
                        for other in &held {
                            let apart = end <= other.at || other.at.plus(other.len.count()) <= block.at;
                            prop_assert!(apart, "{block:?} overlaps {other:?}");
                        }
                        held.push(block);
                    }
                }
                Step::Free { pick, stream } if !held.is_empty() => {
                    let block = held.swap_remove(pick % held.len());
                    rig.free_on(block.id, stream);
                    prop_assert!(rig.pool.block(block.id).is_err());
                }
                Step::Use { pick, stream } if !held.is_empty() => {
                    let block = held[pick % held.len()];
                    rig.pool.record_use(block.id, Rig::stream(stream)).unwrap();
                }
                Step::Reach => rig.wait(),
                Step::EmptyCache => rig.empty_cache(),
                Step::Fail { after } => rig.fails_in = Some(after),
                _ => {}
            }
            prop_assert!(rig.reserved() <= Bytes::mib(500));
        }
        for block in held {
            rig.free(block);
        }
        rig.empty_cache();
        prop_assert_eq!(rig.reserved(), Bytes::ZERO);
        prop_assert_eq!(rig.pool.counters().live, Bytes::ZERO);
    }
}
