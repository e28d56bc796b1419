//! Random programs on the simulator and on models too simple to be wrong.
use std::collections::BTreeSet;

use proptest::prelude::*;
use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::sim::{Contents, Kernel, Simulator};
use vramp_driver::{Driver, Handle, MemoryProperties};

const PAGE: u64 = 2 << 20;
const CARD_PAGES: u64 = 12;
const SPACE_PAGES: u64 = 24;

fn pages(count: u64) -> Bytes {
    Bytes::new(count * PAGE)
}

#[derive(Clone, Debug)]
enum MemoryStep {
    Reserve(u64),
    FreeAddresses(usize),
    Create(u64),
    Release(usize),
    Map { handle: usize, page: u64 },
    Unmap { page: u64, pages: u64 },
    SetAccess { page: u64, pages: u64 },
    Fill { page: u64, pages: u64, byte: u8 },
}

fn memory_step() -> impl Strategy<Value = MemoryStep> {
    let page = 0..SPACE_PAGES;
    let some = 1..5u64;
    prop_oneof![
        1 => (1..9u64).prop_map(MemoryStep::Reserve),
        1 => any::<usize>().prop_map(MemoryStep::FreeAddresses),
        3 => (1..4u64).prop_map(MemoryStep::Create),
        1 => any::<usize>().prop_map(MemoryStep::Release),
        6 => (any::<usize>(), page.clone())
            .prop_map(|(handle, page)| MemoryStep::Map { handle, page }),
        3 => (page.clone(), some.clone()).prop_map(|(page, pages)| MemoryStep::Unmap { page, pages }),
        6 => (page.clone(), some.clone())
            .prop_map(|(page, pages)| MemoryStep::SetAccess { page, pages }),
        4 => (page, some, any::<u8>())
            .prop_map(|(page, pages, byte)| MemoryStep::Fill { page, pages, byte }),
    ]
}

/// One page of addresses, seen alone.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
struct Slot {
    reservation: Option<usize>,
    /// Which handle, which of its pages, which mapping.
    backing: Option<(usize, u64, usize)>,
    accessible: bool,
}

struct Chunk {
    handle: Handle,
    pages: u64,
    owned: bool,
    bytes: Vec<Option<u8>>,
}

/// Addresses as a row of slots.
#[derive(Default)]
struct Model {
    slots: Vec<Slot>,
    chunks: Vec<Chunk>,
    reservations: Vec<Option<(u64, u64)>>,
    mappings_made: usize,
}

impl Model {
    fn mapped(&self, chunk: usize) -> bool {
        self.slots.iter().any(|slot| slot.backing.is_some_and(|(c, ..)| c == chunk))
    }

    fn card_pages_used(&self) -> u64 {
        let living = |(i, chunk): &(usize, &Chunk)| chunk.owned || self.mapped(*i);
        self.chunks.iter().enumerate().filter(living).map(|(_, chunk)| chunk.pages).sum()
    }

    fn one_reservation(&self, page: u64, count: u64) -> bool {
        let Some(slots) = self.slots.get(page as usize..(page + count) as usize) else {
            return false;
        };
        slots[0].reservation.is_some()
            && slots.iter().all(|slot| slot.reservation == slots[0].reservation)
    }

    fn whole_mappings(&self, page: u64, count: u64) -> bool {
        let mapping = |at: u64| {
            self.slots.get(at as usize).and_then(|slot| slot.backing).map(|(.., mapping)| mapping)
        };
        let inside = |at| mapping(at).is_some();
        self.one_reservation(page, count)
            && (page..page + count).all(inside)
            && (page == 0 || mapping(page - 1) != mapping(page))
            && mapping(page + count) != mapping(page + count - 1)
    }

    fn touchable(&self, page: u64, count: u64) -> bool {
        let slots = self.slots.get(page as usize..(page + count) as usize);
        slots.is_some_and(|slots| slots.iter().all(|s| s.backing.is_some() && s.accessible))
    }
}

fn run_memory_program(steps: &[MemoryStep]) {
    let device = Simulator::builder()
        .memory(pages(CARD_PAGES))
        .address_space(pages(SPACE_PAGES))
        .contents(Contents::Stored)
        .build();
    let whole = device.reserve(pages(SPACE_PAGES), pages(1)).unwrap();
    device.free_addresses(AddrRange::new(whole, pages(SPACE_PAGES))).unwrap();
    let stream = device.create_stream().unwrap();
    let range = |page: u64, count: u64| {
        AddrRange::new(DeviceAddr::new(whole.number() + page * PAGE), pages(count))
    };
    let mut model =
        Model { slots: vec![Slot::default(); SPACE_PAGES as usize], ..Model::default() };
    for step in steps {
        match *step {
            MemoryStep::Reserve(count) => {
                let fits = model
                    .slots
                    .windows(count as usize)
                    .any(|window| window.iter().all(|slot| slot.reservation.is_none()));
                let reserved = device.reserve(pages(count), pages(1));
                assert_eq!(reserved.is_ok(), fits, "{step:?}");
                if let Ok(at) = reserved {
                    let page = (at.number() - whole.number()) / PAGE;
                    let number = model.reservations.len();
                    for slot in &mut model.slots[page as usize..(page + count) as usize] {
                        assert_eq!(slot.reservation.replace(number), None, "reserved twice");
                    }
                    model.reservations.push(Some((page, count)));
                }
            }
            MemoryStep::FreeAddresses(which) => {
                if model.reservations.is_empty() {
                    continue;
                }
                let which = which % model.reservations.len();
                let Some((page, count)) = model.reservations[which] else { continue };
                let slots = page as usize..(page + count) as usize;
                let empty = model.slots[slots.clone()].iter().all(|slot| slot.backing.is_none());
                assert_eq!(device.free_addresses(range(page, count)).is_ok(), empty, "{step:?}");
                if empty {
                    model.slots[slots].fill(Slot::default());
                    model.reservations[which] = None;
                }
            }
            MemoryStep::Create(count) => {
                let fits = model.card_pages_used() + count <= CARD_PAGES;
                let created = device.create(pages(count), MemoryProperties::DEVICE);
                assert_eq!(created.is_ok(), fits, "{step:?}");
                if let Ok(handle) = created {
                    let bytes = vec![None; count as usize];
                    model.chunks.push(Chunk { handle, pages: count, owned: true, bytes });
                }
            }
            MemoryStep::Release(which) => {
                if model.chunks.is_empty() {
                    continue;
                }
                let which = which % model.chunks.len();
                let chunk = &mut model.chunks[which];
                assert_eq!(device.release(chunk.handle).is_ok(), chunk.owned, "{step:?}");
                chunk.owned = false;
            }
            MemoryStep::Map { handle, page } => {
                if model.chunks.is_empty() {
                    continue;
                }
                let which = handle % model.chunks.len();
                let count = model.chunks[which].pages;
                let free = model.one_reservation(page, count)
                    && (page..page + count).all(|at| model.slots[at as usize].backing.is_none());
                let allowed = model.chunks[which].owned && free;
                let mapped = device.map(range(page, count).start, model.chunks[which].handle);
                assert_eq!(mapped.is_ok(), allowed, "{step:?}");
                if allowed {
                    model.mappings_made += 1;
                    for i in 0..count {
                        let slot = &mut model.slots[(page + i) as usize];
                        slot.backing = Some((which, i, model.mappings_made));
                        slot.accessible = false;
                    }
                }
            }
            MemoryStep::Unmap { page, pages } => {
                let allowed = model.whole_mappings(page, pages);
                assert_eq!(device.unmap(range(page, pages)).is_ok(), allowed, "{step:?}");
                if allowed {
                    for slot in &mut model.slots[page as usize..(page + pages) as usize] {
                        (slot.backing, slot.accessible) = (None, false);
                    }
                }
            }
            MemoryStep::SetAccess { page, pages } => {
                let allowed = model.whole_mappings(page, pages);
                assert_eq!(device.set_access(range(page, pages), &[]).is_ok(), allowed, "{step:?}");
                if allowed {
                    for slot in &mut model.slots[page as usize..(page + pages) as usize] {
                        slot.accessible = true;
                    }
                }
            }
            MemoryStep::Fill { page, pages, byte } => {
                // Touching other memory would end the program: the device would be lost.
                if !model.touchable(page, pages) {
                    assert_eq!(device.peek(range(page, pages)), None, "{step:?}");
                    continue;
                }
                device.fill(stream, range(page, pages), byte).unwrap();
                device.synchronize_stream(stream).unwrap();
                for at in page..page + pages {
                    let (chunk, i, _) = model.slots[at as usize].backing.unwrap();
                    model.chunks[chunk].bytes[i as usize] = Some(byte);
                }
            }
        }
        let used = pages(model.card_pages_used());
        assert_eq!(device.live().device_bytes, used, "{step:?}");
        for (page, slot) in (0..).zip(&model.slots) {
            let Some((chunk, i, _)) = slot.backing.filter(|_| slot.accessible) else { continue };
            let ends = [0, PAGE - 1].map(|offset| {
                let at = range(page, 1).start + Bytes::new(offset);
                device.peek(AddrRange::new(at, Bytes::new(1))).unwrap()[0]
            });
            if let Some(byte) = model.chunks[chunk].bytes[i as usize] {
                assert_eq!(ends, [byte; 2], "page {page} after {step:?}");
            }
        }
    }
}

#[derive(Clone, Debug)]
enum OrderStep {
    Touch { stream: usize, slot: u64, slots: u64, writes: bool },
    Record { event: usize, stream: usize },
    Wait { stream: usize, event: usize },
    SyncStream(usize),
    SyncEvent(usize),
}

const STREAMS: usize = 3;
const EVENTS: usize = 3;
const SLOTS: u64 = 6;

fn order_step() -> impl Strategy<Value = OrderStep> {
    prop_oneof![
        6 => (0..STREAMS, 0..SLOTS, 1..4u64, any::<bool>()).prop_map(|(stream, slot, slots, writes)| {
            OrderStep::Touch { stream, slot, slots: slots.min(SLOTS - slot), writes }
        }),
        3 => (0..EVENTS, 0..STREAMS).prop_map(|(event, stream)| OrderStep::Record { event, stream }),
        3 => (0..STREAMS, 0..EVENTS).prop_map(|(stream, event)| OrderStep::Wait { stream, event }),
        1 => (0..STREAMS).prop_map(OrderStep::SyncStream),
        1 => (0..EVENTS).prop_map(OrderStep::SyncEvent),
    ]
}

/// What is ordered before a point, as a plain set of work.
type Past = BTreeSet<usize>;

/// Whether any two accesses of the program conflict without order, by comparing all with all.
fn has_conflict(steps: &[OrderStep]) -> bool {
    let mut streams = vec![Past::new(); STREAMS];
    let mut events = vec![Past::new(); EVENTS];
    let mut host = Past::new();
    let mut works: Vec<(u64, u64, bool)> = Vec::new();
    let mut conflict = false;
    for step in steps {
        match *step {
            OrderStep::Touch { stream, slot, slots, writes } => {
                streams[stream].extend(&host);
                for (number, (other, others, other_writes)) in works.iter().enumerate() {
                    let overlap = slot < other + others && *other < slot + slots;
                    let ordered = streams[stream].contains(&number);
                    conflict |= overlap && (writes || *other_writes) && !ordered;
                }
                streams[stream].insert(works.len());
                works.push((slot, slots, writes));
            }
            OrderStep::Record { event, stream } => {
                events[event] = streams[stream].union(&host).copied().collect();
            }
            OrderStep::Wait { stream, event } => streams[stream].extend(events[event].clone()),
            OrderStep::SyncStream(stream) => host.extend(streams[stream].clone()),
            OrderStep::SyncEvent(event) => host.extend(events[event].clone()),
        }
    }
    conflict
}

fn checker_finds_conflict(steps: &[OrderStep]) -> bool {
    let device = Simulator::builder().checked().build();
    let range = AddrRange::new(device.reserve(pages(1), pages(1)).unwrap(), pages(1));
    let handle = device.create(pages(1), MemoryProperties::DEVICE).unwrap();
    device.map(range.start, handle).unwrap();
    device.set_access(range, &[]).unwrap();
    let streams: Vec<_> = (0..STREAMS).map(|_| device.create_stream().unwrap()).collect();
    let events: Vec<_> = (0..EVENTS).map(|_| device.create_event().unwrap()).collect();
    for step in steps {
        match *step {
            OrderStep::Touch { stream, slot, slots, writes } => {
                let at = range.start + Bytes::new(slot * 512);
                let part = AddrRange::new(at, Bytes::new(slots * 512));
                let kernel = Kernel::new("k").lasting(5_000);
                let kernel = if writes { kernel.writing(part) } else { kernel.reading(part) };
                device.launch(streams[stream], kernel).unwrap();
            }
            OrderStep::Record { event, stream } => {
                device.record(events[event], streams[stream]).unwrap();
            }
            OrderStep::Wait { stream, event } => {
                device.wait(streams[stream], events[event]).unwrap()
            }
            OrderStep::SyncStream(stream) => device.synchronize_stream(streams[stream]).unwrap(),
            OrderStep::SyncEvent(event) => device.synchronize_event(events[event]).unwrap(),
        }
    }
    device.hazards_found() > 0
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(50)))]

    #[test]
    fn memory_behaves_like_a_row_of_slots(steps in prop::collection::vec(memory_step(), 1..120)) {
        run_memory_program(&steps);
    }

    #[test]
    fn the_checker_finds_a_conflict_exactly_where_comparing_all_with_all_does(
        steps in prop::collection::vec(order_step(), 1..40),
    ) {
        prop_assert_eq!(checker_finds_conflict(&steps), has_conflict(&steps));
    }
}
