use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::{Blocks, NotAllocated, PoolId, Run};

fn all_of(runs: &[Run]) -> impl Iterator<Item = (PoolId, u32)> {
    runs.iter().flat_map(|run| (run.first..run.first + run.count).map(|block| (run.pool, block)))
}

#[test]
fn what_fits_in_one_run_is_one_run_and_the_shortest_that_will_do() {
    let mut blocks = Blocks::default();
    let pool = blocks.add_pool(10);
    let all = blocks.allocate(10).unwrap();
    assert_eq!(all, [Run { pool, first: 0, count: 10 }]);
    for (first, count) in [(0, 5), (6, 3)] {
        blocks.free(Run { pool, first, count }).unwrap();
    }
    assert_eq!(blocks.allocate(2).unwrap(), [Run { pool, first: 6, count: 2 }]);
    assert_eq!(blocks.free_blocks(), 6);
}

#[test]
fn what_fits_in_no_run_takes_the_longest_ones() {
    let mut blocks = Blocks::default();
    let (first, second) = (blocks.add_pool(4), blocks.add_pool(8));
    let runs = blocks.allocate(11).unwrap();
    let expected =
        [Run { pool: second, first: 0, count: 8 }, Run { pool: first, first: 0, count: 3 }];
    assert_eq!(runs, expected);
    assert_eq!(blocks.allocate(2), None);
    assert_eq!(blocks.free_blocks(), 1);
}

#[test]
fn only_what_is_allocated_is_freed_and_only_once() {
    let mut blocks = Blocks::default();
    let pool = blocks.add_pool(4);
    blocks.allocate(3).unwrap();
    let wrong = [(3, 1), (2, 2), (0, 0), (4, 1), (u32::MAX, 2)];
    for (first, count) in wrong {
        let run = Run { pool, first, count };
        assert_eq!(blocks.free(run), Err(NotAllocated(run)));
    }
    let stranger = Run { pool: PoolId(9), first: 0, count: 1 };
    assert_eq!(blocks.free(stranger), Err(NotAllocated(stranger)));
    blocks.free(Run { pool, first: 1, count: 1 }).unwrap();
    assert_eq!(blocks.free(Run { pool, first: 0, count: 2 }).unwrap_err().0.count, 2);
    blocks.audit().unwrap();
}

#[test]
fn a_pool_leaves_when_all_of_it_is_free() {
    let mut blocks = Blocks::default();
    let (first, second) = (blocks.add_pool(2), blocks.add_pool(2));
    let run = blocks.allocate(1).unwrap()[0];
    assert_eq!(run.pool, first, "the lowest number is used first");
    assert!(!blocks.remove_pool(first));
    assert_eq!(blocks.idle_pools().collect::<Vec<_>>(), [(second, 2)]);
    assert!(blocks.remove_pool(second));
    assert!(!blocks.remove_pool(second));
    assert_eq!((blocks.free_blocks(), blocks.total_blocks()), (1, 2));
}

proptest! {
    #[test]
    fn random_programs_agree_with_a_set_of_blocks(steps in prop::collection::vec((0..4_u8, 0..12_u32), 1..80)) {
        let mut blocks = Blocks::default();
        let mut free: BTreeSet<(PoolId, u32)> = BTreeSet::new();
        let mut held: Vec<Run> = Vec::new();
        for (what, number) in steps {
            match what {
                0 => {
                    let pool = blocks.add_pool(number);
                    free.extend((0..number).map(|block| (pool, block)));
                }
                1 => match blocks.allocate(number) {
                    Some(runs) => {
                        prop_assert_eq!(all_of(&runs).count(), number as usize);
                        for block in all_of(&runs) {
                            prop_assert!(free.remove(&block), "{:?} was not free", block);
                        }
                        held.extend(runs);
                    }
                    None => prop_assert!((number as usize) > free.len()),
                },
                2 if !held.is_empty() => {
                    let run = held.swap_remove(number as usize % held.len());
                    blocks.free(run).unwrap();
                    free.extend(all_of(&[run]));
                }
                _ => {
                    let idle: Vec<_> = blocks.idle_pools().collect();
                    if let Some(&(pool, _)) = idle.get(number as usize) {
                        prop_assert!(blocks.remove_pool(pool));
                        prop_assert!(held.iter().all(|run| run.pool != pool));
                        free.retain(|(other, _)| *other != pool);
                    }
                }
            }
            blocks.audit().unwrap();
            prop_assert_eq!(blocks.free_blocks(), free.len() as u64);
        }
    }
}
