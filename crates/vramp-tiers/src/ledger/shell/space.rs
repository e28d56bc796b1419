//! One place that holds memory, as its users see it.

use std::sync::Arc;

use crate::ledger::core::{
    Bound, Crossing, Levels, Pressure, Priority, SpaceCensus, SpaceId, Strategy, Tag, TagCensus,
};
use vramp_core::Bytes;

use crate::ledger::shell::charge::Charge;
use crate::ledger::shell::error::SpaceFull;
use crate::ledger::shell::notify::NotificationChannel;
use crate::ledger::shell::pressure::{PressureWatch, Subscriber, Subscription};
use crate::ledger::shell::shared::Shared;
use crate::ledger::shell::spill::{Spiller, SpillerRegistration};
use crate::ledger::shell::wait::RequestBuilder;

const KNOWN: &str = "a space's handle comes from the manager that has the space";

/// A card, a NUMA node or a directory with its budget. Equal to every handle of the same space.
#[derive(Clone)]
pub struct MemorySpace {
    pub(crate) shared: Arc<Shared>,
    pub(crate) id: SpaceId,
}

impl MemorySpace {
    /// Which space.
    pub fn id(&self) -> SpaceId {
        self.id
    }

    /// Asks for `bytes` here and nowhere else.
    pub fn request(&self, bytes: Bytes) -> RequestBuilder<'_> {
        RequestBuilder::new(&self.shared, Strategy::Specific(self.id), bytes)
    }

    /// Accounts for memory without a reservation, up to the capacity, until the charge is dropped.
    ///
    /// # Errors
    /// The space has no room for it.
    pub fn charge(&self, bytes: Bytes) -> Result<Charge, SpaceFull> {
        Charge::unreserved(&self.shared, self.id, bytes)
    }

    /// The books of the space.
    pub fn census(&self) -> SpaceCensus {
        self.shared.look().ledger.census(self.id).expect(KNOWN)
    }

    /// What is charged to the space under one tag. Zeros for a tag of another manager.
    pub fn tag_census(&self, tag: Tag) -> TagCensus {
        self.shared.look().ledger.tag_census(self.id, tag).expect(KNOWN)
    }

    /// Its levels in bytes.
    pub fn levels(&self) -> Levels {
        self.shared.look().ledger.levels(self.id).expect(KNOWN)
    }

    /// What it can hold.
    pub fn capacity(&self) -> Bytes {
        self.levels().capacity
    }

    /// Up to where reservations are given.
    pub fn limit(&self) -> Bytes {
        self.levels().limit
    }

    /// What can be reserved now, if nobody waits for it.
    pub fn available(&self) -> Bytes {
        self.shared.look().ledger.available(self.id, Bound::Limit).expect(KNOWN)
    }

    /// Everything charged to it: reservations, what exceeds them, and memory outside any.
    pub fn total(&self) -> Bytes {
        self.shared.look().ledger.total(self.id).expect(KNOWN)
    }

    /// The sizes of all reservations.
    pub fn total_reserved(&self) -> Bytes {
        self.census().reserved
    }

    /// How many reservations there are.
    pub fn active_reservations(&self) -> usize {
        self.census().reservations
    }

    /// The largest total since the last [`reset_peaks`](MemorySpace::reset_peaks).
    pub fn peak(&self) -> Bytes {
        self.census().peak
    }

    /// Makes the present totals the peaks, of the space and of its tags.
    pub fn reset_peaks(&self) {
        self.shared.act(|state| state.ledger.reset_peaks(self.id)).expect(KNOWN);
    }

    /// How full it is against its levels.
    pub fn pressure(&self) -> Pressure {
        self.shared.look().ledger.pressure(self.id).expect(KNOWN)
    }

    /// True at the trigger and above: data should leave.
    pub fn should_downgrade(&self) -> bool {
        self.pressure().should_downgrade()
    }

    /// True at the stop and below: enough has left.
    pub fn should_stop_downgrading(&self) -> bool {
        self.pressure().should_stop()
    }

    /// What has to leave to reach the stop.
    pub fn amount_to_downgrade(&self) -> Bytes {
        self.pressure().amount_to_downgrade()
    }

    /// Calls `callback` once for each crossing of the trigger or the stop from now on, in order,
    /// in the thread that crossed it and with no lock held. It may reserve and release. A panic in
    /// it is contained and counted ([`panics`](crate::ReservationManager::panics)).
    pub fn subscribe(
        &self,
        callback: impl Fn(SpaceId, Crossing) + Send + Sync + 'static,
    ) -> Subscription {
        let subscriber = self.shared.act(|state| {
            let watch = state.ledger.watch(self.id).expect(KNOWN);
            let subscriber = Arc::new(Subscriber::new(watch, Box::new(callback)));
            state.subscribers.push(Arc::clone(&subscriber));
            subscriber
        });
        Subscription { shared: Arc::downgrade(&self.shared), subscriber }
    }

    /// The same crossings for one who asks.
    pub fn watch(&self) -> PressureWatch {
        let watch = self.shared.look().ledger.watch(self.id).expect(KNOWN);
        PressureWatch { shared: Arc::clone(&self.shared), watch }
    }

    /// Registers one who can move data out of the space. Requests that have to wait here call it, and
    /// so does [`spill`](MemorySpace::spill); of several the one with the highest priority first, and
    /// then the oldest. Those who wait already try it at once.
    pub fn register_spiller(
        &self,
        priority: Priority,
        spiller: impl Spiller + 'static,
    ) -> SpillerRegistration {
        self.shared.register(self.id, priority, Box::new(spiller))
    }

    /// Has so many bytes moved out of the space, in this thread, and returns how many were: more by
    /// the last step, fewer if there is no more, none if called by a spiller of the space itself.
    /// Requests that wait spill by themselves; this is for keeping memory free ahead of them.
    pub fn spill(&self, bytes: Bytes) -> Bytes {
        self.shared.spill(self.id, bytes)
    }

    /// A channel that is notified whenever memory comes back to the space, and shut down with the
    /// manager.
    pub fn channel(&self) -> NotificationChannel {
        self.shared.act(|state| {
            let known = state.channels.iter().find(|(space, ..)| *space == self.id);
            if let Some((_, channel, _)) = known {
                return channel.clone();
            }
            let channel = NotificationChannel::new();
            match state.queue.is_shut_down() {
                true => channel.shutdown(),
                false => {
                    let notifier = channel.notifier();
                    state.channels.push((self.id, channel.clone(), notifier));
                }
            }
            channel
        })
    }
}

impl PartialEq for MemorySpace {
    fn eq(&self, other: &MemorySpace) -> bool {
        self.id == other.id && Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Eq for MemorySpace {}

impl std::fmt::Debug for MemorySpace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let census = self.census();
        write!(f, "{}: {} of {}", self.id, census.total, census.levels.capacity)
    }
}
