//! Allocators whose processes share a card by budgets.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vramp_alloc::budget::{
    Ahead, Budget, BudgetConfig, BudgetError, ClaimError, JoinBudgetError, Usage,
};
use vramp_alloc::kv::{Layout, Options};
use vramp_alloc::{AllocError, Allocator, Bytes, Config};

const LONG: Duration = Duration::from_secs(60);

fn join(folder: &Path, program: &str, guaranteed: Bytes) -> Budget {
    Budget::join(&BudgetConfig {
        directory: &folder.join("vramp"),
        card: "GPU-1",
        group: "serving",
        program,
        capacity: Bytes::gib(4).count(),
        guaranteed: guaranteed.count(),
        limit: None,
        priority: 0,
        timeout: LONG,
    })
    .unwrap()
}

fn ahead(bytes: Bytes, patience: Duration) -> Ahead {
    Ahead { bytes, patience }
}

fn allocator(config: Config) -> Allocator {
    Allocator::new(vramp_alloc::open("sim:h200").unwrap(), config).unwrap()
}

#[test]
fn an_allocator_reserves_what_it_claimed_and_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let allocator = allocator(Config::default());
    let stream = allocator.create_stream().unwrap();
    let first = allocator.malloc(Bytes::mib(100), stream).unwrap();
    let budget = join(folder.path(), "chat", Bytes::ZERO);
    let budget = allocator.join_budget(budget, ahead(Bytes::mib(64), Duration::ZERO)).unwrap();
    assert_eq!(budget.claimed(), allocator.reserved());
    assert_eq!(allocator.limit(), Some(budget.claimed()));
    // It claims with some memory ahead, so that the next request claims nothing.
    let second = allocator.malloc(Bytes::mib(100), stream).unwrap();
    assert_eq!(budget.claimed(), Bytes::mib(264));
    let third = allocator.malloc(Bytes::mib(60), stream).unwrap();
    assert_eq!((budget.claimed(), allocator.reserved()), (Bytes::mib(264), Bytes::mib(260)));
    // A request that is not granted says why.
    let other = join(folder.path(), "search", Bytes::ZERO);
    other.claim(Bytes::gib(3).count(), Duration::ZERO).unwrap();
    let error = allocator.malloc(Bytes::gib(1), stream).unwrap_err();
    let AllocError::OutOfMemory(report) = &error else { panic!("{error:?}") };
    assert!(report.budget.as_ref().unwrap().contains("(search) has 3.00 GiB"), "{error}");
    assert!(error.to_string().contains("\n  budget: 1020 MiB were not free"), "{error}");
    assert!(error.to_string().lines().all(|line| line.len() <= 100), "{error}");
    assert_eq!(budget.claimed(), Bytes::mib(264), "nothing was claimed");
    assert!(budget.last_refusal().is_some());
    // Exactly what it lacks is free.
    drop(other);
    let rest = Bytes::gib(4) - Bytes::mib(260);
    let fourth = allocator.malloc(rest, stream).unwrap();
    assert_eq!((budget.claimed(), budget.last_refusal()), (Bytes::gib(4), None));
    for block in [first, second, third, fourth] {
        allocator.free(block, stream).unwrap();
    }
    assert_eq!(budget.give_back_idle().unwrap(), Bytes::gib(4));
    assert_eq!((budget.claimed(), allocator.reserved()), (Bytes::ZERO, Bytes::ZERO));
}

#[test]
fn another_process_gets_idle_memory_and_then_what_handlers_free() {
    let folder = tempfile::tempdir().unwrap();
    let allocator = Arc::new(allocator(Config::default()));
    let stream = allocator.create_stream().unwrap();
    let guaranteed = Bytes::mib(512);
    let budget = join(folder.path(), "chat", guaranteed);
    let budget = allocator.join_budget(budget, ahead(Bytes::mib(512), LONG)).unwrap();
    let layout = Layout { tensors: 4, bytes_each: Bytes::mib(512), ..Layout::default() };
    let cache = Arc::new(allocator.kv_arena(layout, Options::default()).unwrap());
    cache.commit(0..256, stream).unwrap();
    let weights = allocator.malloc(Bytes::mib(512), stream).unwrap();
    let idle = allocator.malloc(Bytes::mib(512), stream).unwrap();
    allocator.free(idle, stream).unwrap();
    assert_eq!(allocator.reserved(), Bytes::gib(3));
    let (arena, shed) = (Arc::clone(&cache), Arc::new(std::sync::Mutex::new(Vec::new())));
    let log = Arc::clone(&shed);
    budget.on_reclaim(move |bytes| {
        log.lock().unwrap().push(bytes);
        let pages =
            u32::try_from(bytes.count().div_ceil(arena.stats().page_bytes.count())).unwrap();
        arena.park(256 - pages..256, stream).unwrap();
    });
    // A gigabyte lacks: what was claimed ahead and what is idle suffice.
    let other = join(folder.path(), "search", Bytes::ZERO);
    let before = budget.claimed();
    let free = Bytes::new(other.room().unwrap().available);
    other.claim((free + (before - allocator.reserved())).count(), LONG).unwrap();
    assert_eq!(allocator.reserved(), Bytes::gib(3), "nothing was trimmed");
    other.claim(Bytes::mib(512).count(), LONG).unwrap();
    assert_eq!((allocator.reserved(), shed.lock().unwrap().len()), (Bytes::mib(2560), 0));
    // The rest lies in the cache.
    other.claim(Bytes::mib(256).count(), LONG).unwrap();
    assert_eq!(*shed.lock().unwrap(), [Bytes::mib(256)]);
    assert_eq!((allocator.reserved(), cache.stats().committed), (Bytes::mib(2304), 256 - 32));
    assert_eq!(budget.claimed(), Bytes::mib(2304));
    // A look at the group finds what it is used for.
    let look = || {
        let group = vramp_alloc::budget::BudgetGroup::open(
            &folder.path().join("vramp"),
            "GPU-1",
            "serving",
        );
        let group = group.unwrap();
        group.refresh().unwrap();
        group.status().unwrap().members[0].usage
    };
    cache.park(0..10, stream).unwrap();
    while look().parked != Bytes::mib(80).count() {
        vramp_testing::moment();
    }
    // The weights, and 214 pages of the cache.
    let live = Bytes::mib(512 + 214 * 8).count();
    assert_eq!(look(), Usage { live, ..look() });
    // It takes back what is free, and not what it is not given.
    let error = allocator.malloc(Bytes::gib(4), stream).unwrap_err();
    assert!(matches!(error, AllocError::OutOfMemory(_)), "{error}");
    allocator.free(weights, stream).unwrap();
}

#[test]
fn pools_of_a_group_share_its_budget_and_its_own_limit_holds() {
    let folder = tempfile::tempdir().unwrap();
    let limit = Some(Bytes::gib(1));
    let main = allocator(Config { limit, ..Config::default() });
    let stream = main.create_stream().unwrap();
    let before = main.create_pool("before").unwrap();
    let budget = join(folder.path(), "chat", Bytes::ZERO);
    let budget = main.join_budget(budget, ahead(Bytes::mib(512), Duration::ZERO)).unwrap();
    let after = main.create_pool("after").unwrap();
    let blocks: Vec<_> = [&main, &before, &after]
        .map(|pool| (pool, pool.malloc(Bytes::mib(300), stream).unwrap()))
        .into();
    assert_eq!(budget.claimed(), Bytes::gib(1), "not more than the limit, ahead or not");
    let error = after.malloc(Bytes::mib(300), stream).unwrap_err();
    let AllocError::OutOfMemory(report) = &error else { panic!("{error:?}") };
    assert_eq!(report.budget, None, "the budget was not the cause");
    // Idle memory of one pool serves another one: nothing is claimed for it.
    let mut blocks = blocks.into_iter();
    let (pool, block) = blocks.next().unwrap();
    pool.free(block, stream).unwrap();
    let block = after.malloc(Bytes::mib(300), stream).unwrap();
    assert_eq!(budget.claimed(), Bytes::gib(1));
    after.free(block, stream).unwrap();
    blocks.for_each(|(pool, block)| pool.free(block, stream).unwrap());
    let again = main.join_budget(join(folder.path(), "again", Bytes::ZERO), Ahead::default());
    assert!(matches!(again, Err(JoinBudgetError::HasBudget)), "{again:?}");
}

#[test]
fn a_budget_that_lacks_what_is_reserved_leaves_the_allocator_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let allocator = allocator(Config::default());
    let stream = allocator.create_stream().unwrap();
    let block = allocator.malloc(Bytes::gib(2), stream).unwrap();
    let other = join(folder.path(), "search", Bytes::gib(3));
    let patience = ahead(Bytes::ZERO, Duration::ZERO);
    let own = join(folder.path(), "chat", Bytes::ZERO);
    let refused = allocator.join_budget(own, patience).unwrap_err();
    let JoinBudgetError::Claim { reserved, error } = &refused else { panic!("{refused}") };
    assert_eq!(*reserved, Bytes::gib(2));
    assert!(matches!(error, ClaimError::Impossible(_)), "{error}");
    assert_eq!((allocator.limit(), other.status().unwrap().members.len()), (None, 1));
    drop(other);
    let own = join(folder.path(), "chat", Bytes::ZERO);
    let budget = allocator.join_budget(own, patience).unwrap();
    allocator.free(block, stream).unwrap();
    // The budget ends with the allocator and its handle.
    drop(allocator);
    let group =
        vramp_alloc::budget::BudgetGroup::open(&folder.path().join("vramp"), "GPU-1", "serving");
    let group = group.unwrap();
    assert_eq!(group.status().unwrap().members.len(), 1);
    drop(budget);
    let room = group.room().map_err(|error: BudgetError| error.to_string());
    assert_eq!(room, Ok(None));
}

/// Two allocators on one simulated card that holds no more than the group.
#[test]
fn two_allocators_of_a_group_never_reserve_more_than_it_has_and_are_served() {
    for seed in vramp_testing::seeds(8) {
        let mut random = fastrand::Rng::with_seed(seed);
        let folder = tempfile::tempdir().unwrap();
        let engines: Vec<_> = ["chat", "search"]
            .into_iter()
            .map(|program| {
                let allocator = allocator(Config::default());
                let stream = allocator.create_stream().unwrap();
                let own = join(folder.path(), program, Bytes::mib(512));
                let ahead = ahead(Bytes::mib(128), LONG);
                let budget = allocator.join_budget(own, ahead).unwrap();
                (allocator, stream, budget)
            })
            .collect();
        let mut blocks = [Vec::new(), Vec::new()];
        let live = |blocks: &Vec<vramp_alloc::Allocation>| {
            blocks.iter().map(vramp_alloc::Allocation::len).sum::<Bytes>()
        };
        for _ in 0..200 {
            let at = random.usize(..2);
            let (allocator, stream, budget) = &engines[at];
            let size = Bytes::mib(random.u64(1..400));
            // What is live of both always fits: so a request is served by what is idle in the other.
            let fits = live(&blocks[0]) + live(&blocks[1]) + size + Bytes::mib(16) <= Bytes::gib(3);
            if random.bool() && fits {
                blocks[at].push(allocator.malloc(size, *stream).unwrap());
            } else if !blocks[at].is_empty() {
                let freed = random.usize(..blocks[at].len());
                allocator.free(blocks[at].swap_remove(freed), *stream).unwrap();
            }
            assert!(allocator.reserved() <= budget.claimed());
            let reserved: Bytes = engines.iter().map(|(one, ..)| one.reserved()).sum();
            let claimed: Bytes = engines.iter().map(|(.., budget)| budget.claimed()).sum();
            assert!(reserved <= claimed && claimed <= Bytes::gib(4), "{reserved} of {claimed}");
        }
        for ((allocator, stream, _), blocks) in engines.iter().zip(&mut blocks) {
            blocks.drain(..).for_each(|block| allocator.free(block, *stream).unwrap());
            allocator.audit().unwrap();
        }
    }
}
