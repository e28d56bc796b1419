//! Links between cards, and the bus: what copies share.

use std::collections::BTreeMap;

use vramp_core::{AddrRange, Bytes};

use super::cost::Rates;
use super::memory::By;
use super::pool::pool_of;
use super::state::State;
use super::streams::{Effect, Work};
use super::work::ranges;

impl State {
    /// Delays a copy until the directions of the bus and the links that it needs are free: of two
    /// copies over one of them, the second one is done after the first.
    pub fn take_turns(&mut self, device: usize, now_ns: u64, work: &mut Work) {
        let duration_ns = &mut work.kernel.duration_ns;
        if let Some(direction) = work.effect.direction() {
            let free_ns = &mut self.devices[device].bus_free_ns[direction];
            *duration_ns += free_ns.saturating_sub(now_ns);
            *free_ns = now_ns + *duration_ns;
        }
        if self.devices.len() == 1 {
            return;
        }
        let links = self.links(device, work);
        let rate = self.link_rate(device, work);
        let over_ns = links.values().map(|len| Rates::ns(rate, *len)).max().unwrap_or(0);
        let duration_ns = &mut work.kernel.duration_ns;
        *duration_ns = over_ns.max(*duration_ns);
        if matches!(work.effect, Effect::Nothing) {
            return;
        }
        let free_ns = |link: &(usize, usize)| self.link_free_ns.get(link).copied().unwrap_or(0);
        let wait_ns = links.keys().map(|link| free_ns(link).saturating_sub(now_ns)).max();
        *duration_ns += wait_ns.unwrap_or(0);
        let end_ns = now_ns + *duration_ns;
        self.link_free_ns.extend(links.into_keys().map(|link| (link, end_ns)));
    }

    /// Returns the bytes that work moves over each link, from one card to another.
    fn links(&self, device: usize, work: &Work) -> BTreeMap<(usize, usize), Bytes> {
        let mut links = BTreeMap::new();
        let mut add = |link: (usize, usize), len: Bytes| {
            if link.0 != link.1 {
                *links.entry(link).or_insert(Bytes::ZERO) += len;
            }
        };
        if let Effect::CopyPeer { from, to, reader, writer } = work.effect {
            // The card that each side is on; that of the pool's or the addresses' device if unknown.
            let card = |range: AddrRange, device: usize| {
                let mut card = device;
                self.memory.touched_on_cards(range, |found, _| card = found);
                card
            };
            let cards = (card(from, reader), card(AddrRange::new(to, from.len), writer));
            add(cards, from.len);
            return links;
        }
        for (range, writes) in ranges(work) {
            if pool_of(range.start.number()).is_none() {
                self.memory.touched_on_cards(range, |card, len| {
                    add(if writes { (device, card) } else { (card, device) }, len);
                });
            }
        }
        links
    }

    /// Returns the rate at which work moves bytes over links.
    fn link_rate(&self, device: usize, work: &Work) -> f64 {
        let costs = self.costs.sharing();
        let Effect::CopyPeer { from, to, reader, writer } = work.effect else {
            return costs.peer_access;
        };
        let sides = [from, AddrRange::new(to, from.len)];
        let may = |by: usize| {
            sides.iter().all(|side| self.memory.pieces(*side, By::Device(by), |_| {}).is_ok())
        };
        if [device, reader, writer].into_iter().all(may) {
            costs.peer_copy
        } else {
            costs.peer_copy_by_owners
        }
    }
}
