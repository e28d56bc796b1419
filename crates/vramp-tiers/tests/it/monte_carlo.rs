//! Random tasks over a model of an allocator: they reserve, wait with deadlines and cancellations,
//! grow, shrink, split, merge, charge, spill for one another, and end deadlocks. Every task must
//! end, every space must be empty at the end, and no total may exceed a capacity.
//!
//! Two seconds; longer by `VRAMP_MONTE_CARLO_S`, with seeds from `VRAMP_MONTE_CARLO_SEED` on.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use vramp_tiers::reserve::{Charge, LimitPolicy, Overtaking, QueueConfig};
use vramp_tiers::space::Level;
use vramp_tiers::spill::{RetryPolicy, SpillRequest, SpillerRegistration, Spilling};
use vramp_tiers::{
    Bytes, CancelToken, ManagerConfig, Owner, Priority, Reservation, ReservationManager,
    ReserveError, SpaceConfig, SpaceId, Strategy, Tier,
};

const GPUS: [SpaceId; 2] = [SpaceId::gpu(0), SpaceId::gpu(1)];
const HOST: SpaceId = SpaceId::host(0);
const TASKS: u64 = 12;

fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

fn space(capacity: u64) -> SpaceConfig {
    let (limit, granule) = (Level::Fraction(0.95), Bytes::new(8));
    SpaceConfig { limit, granule, ..SpaceConfig::gpu(Bytes::new(capacity)) }
}

fn manager(random: &mut fastrand::Rng) -> ReservationManager {
    let pause = Duration::from_micros(5);
    let config = ManagerConfig {
        queue: QueueConfig {
            overtaking: Overtaking {
                count: random.u32(0..20),
                bytes: Bytes::new(random.u64(0..3000)),
            },
            promote_after: random.bool().then(|| random.u32(1..20)),
        },
        spill_retries: RetryPolicy { max_retries: 3, first_pause: pause, max_pause: pause * 4 },
        ..ManagerConfig::default()
    };
    let spaces = [(GPUS[0], space(4096)), (GPUS[1], space(4096)), (HOST, space(8192))];
    ReservationManager::with_config(spaces, config).unwrap()
}

/// Model of an allocator of one card: its bytes in use, and their high-water mark.
#[derive(Default)]
struct Card {
    used: AtomicU64,
    highest: AtomicU64,
}

impl Card {
    fn allocate(&self, bytes: u64) {
        let used = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.highest.fetch_max(used, Ordering::Relaxed);
    }

    fn free(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Data on a card that may leave for the host.
type Idle = Arc<Mutex<Vec<Reservation>>>;

#[derive(Default, Debug)]
struct Tally {
    served: AtomicU64,
    deadlocks: AtomicU64,
    timeouts: AtomicU64,
    cancelled: AtomicU64,
    shut_down: AtomicU64,
    spilled: AtomicU64,
}

struct World {
    manager: ReservationManager,
    /// Says that data became idle, and so can be spilled.
    became_idle: SyncSender<()>,
    idle: Idle,
    card: Card,
    tally: Tally,
    token: CancelToken,
}

/// One task. It returns all its memory in the end.
fn task(world: &World, seed: u64, end: Instant) {
    let mut random = fastrand::Rng::with_seed(seed);
    let World { manager, became_idle, idle, card, tally, token } = world;
    let owner = Owner(seed);
    let mut held: Vec<Reservation> = Vec::new();
    let mut charges: Vec<(Charge, u64)> = Vec::new();
    while Instant::now() < end {
        let bytes = Bytes::new(random.u64(0..900));
        let at = random.usize(0..held.len().max(1));
        match (random.u8(0..14), held.get_mut(at)) {
            (0..=3, _) => {
                let strategy = match random.u8(0..4) {
                    0 => Strategy::Specific(GPUS[0]),
                    1 => Strategy::Prefer(GPUS[random.usize(0..2)]),
                    2 => Strategy::AnyInTiers([Tier::Gpu, Tier::Host].into_iter().collect()),
                    _ => Strategy::AnyInTier(Tier::Gpu),
                };
                let mut request = manager.request(strategy, bytes).owner(owner);
                request = request.priority(random.i32(0..3));
                if random.bool() {
                    request = request.deadline(Duration::from_micros(random.u64(0..2000)));
                }
                if random.u8(0..8) == 0 {
                    request = request.spilling(Spilling::Never);
                }
                let count = match request.cancel_token(token).wait() {
                    Ok(reservation) => {
                        held.push(reservation);
                        &tally.served
                    }
                    Err(ReserveError::Deadlock { .. }) => {
                        // It releases everything and begins anew, as the error says.
                        charges.drain(..).for_each(|(_, bytes)| card.free(bytes));
                        held.clear();
                        &tally.deadlocks
                    }
                    Err(ReserveError::TimedOut(_)) => &tally.timeouts,
                    Err(ReserveError::Cancelled(_)) => &tally.cancelled,
                    Err(ReserveError::ShutDown(_)) => &tally.shut_down,
                    Err(error) => panic!("it fits in the end: {error}"),
                };
                count.fetch_add(1, Ordering::Relaxed);
            }
            (4, _) => {
                let request = manager.request(Strategy::AnyInTier(Tier::Gpu), bytes).owner(owner);
                held.extend(request.spilling(Spilling::AlsoNow).now());
            }
            (5, Some(reservation)) => drop(reservation.grow(bytes)),
            (6, Some(reservation)) => {
                drop(reservation.grow_wait(bytes, Duration::from_micros(random.u64(0..300))));
            }
            (7, Some(reservation)) => drop(reservation.shrink_to_fit()),
            (8, Some(reservation)) => {
                let part = reservation.split(bytes);
                held.extend(part);
            }
            (9, Some(_)) => {
                let from = held.swap_remove(at);
                match held.iter_mut().find(|into| into.space() == from.space()) {
                    Some(into) => into.merge(from).unwrap(),
                    None => held.push(from),
                }
            }
            (10, Some(reservation)) if reservation.space() == GPUS[0] => {
                if let Ok(charge) = reservation.charge(bytes, &LimitPolicy::Ignore) {
                    // Rounded as the space does.
                    let bytes = bytes.count().next_multiple_of(8);
                    card.allocate(bytes);
                    charges.push((charge, bytes));
                }
            }
            (11, _) if !charges.is_empty() => {
                let (charge, bytes) = charges.swap_remove(random.usize(0..charges.len()));
                card.free(bytes);
                drop(charge);
            }
            (12, Some(reservation)) if reservation.used().is_zero() => {
                // It is not needed now, and may be spilled.
                idle.lock().unwrap().push(held.swap_remove(at));
                // A full channel holds a message that is received after this push.
                let _ = became_idle.try_send(());
            }
            (_, Some(_)) => drop(held.swap_remove(at)),
            _ => thread::yield_now(),
        }
    }
    charges.drain(..).for_each(|(_, bytes)| card.free(bytes));
}

/// Lets waiters spill again whenever data has become idle, and audits the manager, until `end`.
fn watch(
    manager: &ReservationManager,
    spillers: &[SpillerRegistration],
    became_idle: &Receiver<()>,
    end: Instant,
) {
    let left = || end.saturating_duration_since(Instant::now());
    while became_idle.recv_timeout(left()).is_ok() {
        spillers.iter().for_each(SpillerRegistration::notify_spillable);
        manager.audit().unwrap();
    }
}

fn round(seed: u64, length: Duration) -> Tally {
    let mut random = fastrand::Rng::with_seed(seed);
    let manager = manager(&mut random);
    let (idle, card, tally) = (Idle::default(), Card::default(), Tally::default());
    let mut spillers = Vec::new();
    let spilled = Arc::new(AtomicU64::new(0));
    for gpu in GPUS {
        let (idle, handle, spilled) = (Arc::clone(&idle), manager.clone(), Arc::clone(&spilled));
        let spill = move |shortage: &SpillRequest<'_>| {
            let mut freed = Bytes::ZERO;
            while !shortage.left().is_zero() {
                let mut idle = idle.lock().unwrap();
                let Some(at) = idle.iter().position(|data| data.space() == gpu) else { break };
                let data = idle.swap_remove(at);
                drop(idle);
                // Moved to the host if there is room, dropped if not: it can be made again.
                let _moved = handle.request(Strategy::Downgrade(gpu), data.bytes()).now();
                freed += data.bytes();
            }
            spilled.fetch_add(freed.count(), Ordering::Relaxed);
            assert!(fastrand::u32(0..500) > 0, "a spiller fails now and then");
            freed
        };
        spillers.push(manager.space(gpu).unwrap().register_spiller(Priority(0), spill));
    }
    let (became_idle, idle_news) = sync_channel(1);
    let world = World { manager, became_idle, idle, card, tally, token: CancelToken::new() };
    let end = Instant::now() + length;
    thread::scope(|scope| {
        let task = |n| {
            let world = &world;
            move || task(world, seed * TASKS + n, end)
        };
        let tasks: Vec<_> = (0..TASKS).map(|n| scope.spawn(task(n))).collect();
        watch(&world.manager, &spillers, &idle_news, end);
        // Waits without a deadline are cancelled, or ended by the shutdown.
        match random.bool() {
            true => world.token.cancel(),
            false => world.manager.shutdown(),
        }
        tasks.into_iter().for_each(|task| task.join().unwrap());
    });
    world.idle.lock().unwrap().clear();
    drop(spillers);
    let World { manager, card, tally, .. } = world;
    manager.audit().unwrap();
    assert_eq!((manager.waiting(), card.used.into_inner()), (0, 0));
    for space in manager.spaces() {
        let census = space.census();
        assert_eq!((census.total, census.reservations), (Bytes::ZERO, 0));
        assert!(census.peak <= census.levels.capacity, "{census:?}");
    }
    assert!(card.highest.into_inner() <= 4096);
    tally.spilled.store(spilled.load(Ordering::Relaxed), Ordering::Relaxed);
    tally
}

#[test]
fn tasks_at_random_all_end_and_leave_nothing_behind() {
    let first = setting("VRAMP_MONTE_CARLO_SEED", 1);
    let rounds = setting("VRAMP_MONTE_CARLO_S", 2) * 5;
    let tallies: Vec<Tally> =
        (first..first + rounds).map(|seed| round(seed, Duration::from_millis(200))).collect();
    let sum = |of: fn(&Tally) -> &AtomicU64| -> u64 {
        tallies.iter().map(|tally| of(tally).load(Ordering::Relaxed)).sum()
    };
    // Without waits and spills this would be no test of them.
    assert!(sum(|tally| &tally.served) > 0, "{tallies:?}");
    assert!(sum(|tally| &tally.timeouts) > 0, "{tallies:?}");
    assert!(sum(|tally| &tally.spilled) > 0, "{tallies:?}");
    assert!(sum(|tally| &tally.deadlocks) > 0, "{tallies:?}");
}
