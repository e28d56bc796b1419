//! Checks of calls that have to do with several devices.
//!
//! Links between cards, and the bus: what copies share.

use std::collections::BTreeMap;

use vramp_core::{AddrRange, Bytes};

use super::cost::Rates;
use super::devices::{DEVICES_MAX, DeviceSet};
use super::memory::By;
use super::pool::pool_of;
use super::refusal::{Outcome, Refusal};
use super::state::State;
use super::streams::{Effect, Work};
use super::work::ranges;
use crate::{DeviceCopy, HandleType, MemoryLocation, MemoryProperties, Stream};

/// Returns the set of `peers`. Refuses one that is no peer of the current device.
pub(super) fn peer_set(state: &State, peers: &[u32]) -> Outcome<DeviceSet> {
    let mut set = DeviceSet::default();
    for &ordinal in peers {
        let peer = ordinal as usize;
        if peer >= DEVICES_MAX || !state.own().peers.contains(peer) {
            return Err(Refusal::invalid(format!("device {ordinal} is not a peer of this one")));
        }
        set = set.with(peer);
    }
    Ok(set)
}

/// Refuses memory that the device cannot create.
pub(super) fn check_properties(state: &State, properties: MemoryProperties) -> Outcome<()> {
    match properties.location {
        MemoryLocation::Device => {}
        MemoryLocation::HostNuma(_) => {
            state.need(|can| can.host_numa, "no mapping of host memory")?;
            if properties.handle_type != HandleType::None {
                return Err(Refusal::not_supported("no export of host memory"));
            }
        }
        MemoryLocation::Peer(ordinal) => drop(peer_set(state, &[ordinal])?),
    }
    match properties.handle_type {
        HandleType::None => {}
        HandleType::PosixFd => {
            state.need(|can| can.posix_fd, "no memory exported as a file descriptor")?;
        }
        HandleType::Fabric => {
            state.need(|can| can.fabric, "no memory exported as a fabric handle")?;
            if !state.fabric_permitted {
                let detail = "fabric handles need the IMEX service".to_owned();
                return Err(Refusal { code: 800, detail });
            }
        }
    }
    if properties.rdma {
        state.need(|can| can.rdma, "no memory that network cards can access")?;
    }
    Ok(())
}

/// Refuses a copy whose sides overlap or end beyond the address space.
pub(super) fn check_sides(copy: DeviceCopy) -> Outcome<(AddrRange, AddrRange)> {
    let to = AddrRange::new(copy.to, copy.len);
    let from = AddrRange::new(copy.from, copy.len);
    check_end(to)?;
    check_end(from)?;
    if copy.from < copy.to + copy.len && copy.to < copy.from + copy.len {
        return Err(Refusal::invalid(format!("{from} and {to} overlap")));
    }
    Ok((from, to))
}

/// Refuses a range that is not accessible to the current device and has to do with another one, as
/// cards do when the copy is queued.
pub(super) fn check_across(state: &State, range: AddrRange) -> Outcome<()> {
    if state.devices.len() == 1 {
        return Ok(());
    }
    let pooled = pool_of(range.start.number()).is_some_and(|(owner, _)| owner != state.current);
    let inaccessible = state.inaccessible(By::Device(state.current), range);
    if pooled || inaccessible.is_some() && state.memory.is_of_another(state.current, range) {
        return Err(Refusal::invalid(format!(
            "this device has no access to all of {range}, which has to do with another device: \
             grant it with set-access"
        )));
    }
    Ok(())
}

/// Refuses a range that no device of the machine owns, as cards do when work is queued. That of another
/// device: see [`check_across`].
pub(super) fn check_owned(state: &State, range: AddrRange) -> Outcome<()> {
    check_end(range)?;
    if range.len.is_zero() {
        return Err(Refusal::invalid("the range is empty"));
    }
    match state.owner(range) {
        Some(_) => Ok(()),
        None => Err(Refusal::invalid(format!(
            "{range} is not inside a reservation, an allocation or adopted memory of this device"
        ))),
    }
}

fn check_end(range: AddrRange) -> Outcome<()> {
    match range.checked_end() {
        Some(_) => Ok(()),
        None => Err(Refusal::invalid(format!("{range} ends beyond the address space"))),
    }
}

impl State {
    /// Returns source and target of a copy between this device and the one of `ordinal`, which owns
    /// the sides that `theirs` says, and its effect. Refuses a side that is of neither, and one that
    /// its own device may not access.
    pub fn peer_sides(
        &mut self,
        stream: Stream,
        copy: DeviceCopy,
        ordinal: u32,
        theirs: [bool; 2],
    ) -> Outcome<([AddrRange; 2], Effect)> {
        peer_set(self, &[ordinal])?;
        let (from, to) = check_sides(copy)?;
        self.takes_work(stream)?;
        let accessor = |side: AddrRange, theirs: bool| {
            let known =
                |owner: &usize| *owner == self.current || theirs && *owner == ordinal as usize;
            let owner = self.owner(side).filter(known).ok_or_else(|| {
                Refusal::invalid(format!("{side} is of neither this device nor device {ordinal}"))
            })?;
            match self.inaccessible(By::Device(owner), side) {
                None => Ok(owner),
                Some(bad) => Err(Refusal::invalid(format!("{} is {}", bad.at, bad.why))),
            }
        };
        let (reader, writer) = (accessor(from, theirs[0])?, accessor(to, theirs[1])?);
        Ok(([from, to], Effect::CopyPeer { from, to: copy.to, reader, writer }))
    }
}

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
