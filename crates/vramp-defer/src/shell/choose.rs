//! The choice of victims.

use crate::planner::{PeerTable, SpillDemand, SpillRoom, VictimChoice};
use vramp_core::Bytes;

use super::state::Shared;

impl Shared {
    /// Chooses victims, with the room there is below the card now.
    pub(super) fn choose(&self, missing: Bytes, peers: PeerTable<Bytes>) -> VictimChoice {
        let mut state = self.lock();
        state.note_pins(&self.allocator);
        let room = SpillRoom { peers, ..self.room_below() };
        let demand = SpillDemand { deficit: missing, rates: state.rates, room };
        let now_ns = self.driver.now_ns();
        state.core.choose(&demand, now_ns)
    }
}
