//! Random programs on two devices that share memory, and on a model too simple to be wrong.

use proptest::prelude::*;
use vramp_core::{AddrRange, Bytes};
use vramp_driver::sim::{Contents, Simulator};
use vramp_driver::{
    DeviceCopy, Driver, DriverResult, ErrorKind, ExportedHandle, Handle, HandleType,
    MemoryLocation, MemoryProperties, Stream,
};

const PAGE: u64 = 2 << 20;
const CARD_PAGES: u64 = 10;
/// Pages of addresses that each device reserves.
const SPACE: u64 = 8;

fn pages(count: u64) -> Bytes {
    Bytes::new(count * PAGE)
}

/// Pages of addresses of one device.
#[derive(Clone, Copy, Debug)]
struct Span {
    owner: usize,
    page: u64,
    pages: u64,
}

#[derive(Clone, Debug)]
enum Step {
    Create { device: usize, on_peer: bool, pages: u64, shared: bool },
    Release(usize),
    Export(usize),
    Close(usize),
    Import { device: usize, export: usize },
    Map { handle: usize, owner: usize, page: u64 },
    Unmap(Span),
    SetAccess { span: Span, peer: bool },
    Revoke(Span),
    Fill { device: usize, span: Span, byte: u8 },
    Copy { device: usize, from: Span, to: Span, peer: bool },
}

fn span() -> impl Strategy<Value = Span> {
    (0..2usize, 0..SPACE, 1..4u64).prop_map(|(owner, page, pages)| Span {
        owner,
        page,
        pages: pages.min(SPACE - page),
    })
}

fn step() -> impl Strategy<Value = Step> {
    let which = any::<usize>;
    prop_oneof![
        4 => (0..2usize, any::<bool>(), 1..4u64, any::<bool>()).prop_map(
            |(device, on_peer, pages, shared)| Step::Create { device, on_peer, pages, shared }
        ),
        2 => which().prop_map(Step::Release),
        2 => which().prop_map(Step::Export),
        1 => which().prop_map(Step::Close),
        2 => (0..2usize, which()).prop_map(|(device, export)| Step::Import { device, export }),
        8 => (which(), 0..2usize, 0..SPACE)
            .prop_map(|(handle, owner, page)| Step::Map { handle, owner, page }),
        3 => span().prop_map(Step::Unmap),
        8 => (span(), any::<bool>()).prop_map(|(span, peer)| Step::SetAccess { span, peer }),
        2 => span().prop_map(Step::Revoke),
        5 => (0..2usize, span(), any::<u8>())
            .prop_map(|(device, span, byte)| Step::Fill { device, span, byte }),
        5 => (0..2usize, span(), span(), any::<bool>())
            .prop_map(|(device, from, to, peer)| Step::Copy { device, from, to, peer }),
    ]
}

/// One page of addresses.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// Which handle, which of its pages, which mapping.
    backing: Option<(usize, u64, usize)>,
    access: [bool; 2],
}

struct Held {
    handle: Handle,
    device: usize,
    body: usize,
    owned: bool,
}

struct Body {
    card: usize,
    pages: u64,
    shared: bool,
    bytes: Vec<Option<u8>>,
}

struct Model {
    devices: [Simulator; 2],
    streams: [Stream; 2],
    spaces: [AddrRange; 2],
    slots: [[Slot; SPACE as usize]; 2],
    handles: Vec<Held>,
    bodies: Vec<Body>,
    exports: Vec<Option<(usize, ExportedHandle)>>,
    mappings: usize,
}

impl Model {
    fn new() -> Model {
        let builder = Simulator::builder().memory(pages(CARD_PAGES)).contents(Contents::Stored);
        let devices: [Simulator; 2] = builder.checked().build_machine(2).try_into().unwrap();
        let space = |device: &Simulator| {
            AddrRange::new(device.reserve(pages(SPACE), pages(1)).unwrap(), pages(SPACE))
        };
        Model {
            streams: [&devices[0], &devices[1]].map(|device| device.create_stream().unwrap()),
            spaces: [&devices[0], &devices[1]].map(space),
            devices,
            slots: Default::default(),
            handles: Vec::new(),
            bodies: Vec::new(),
            exports: Vec::new(),
            mappings: 0,
        }
    }

    fn range(&self, span: Span) -> AddrRange {
        AddrRange::new(self.spaces[span.owner].start + pages(span.page), pages(span.pages))
    }

    fn slots(&self, span: Span) -> &[Slot] {
        &self.slots[span.owner][span.page as usize..(span.page + span.pages) as usize]
    }

    fn slots_mut(&mut self, span: Span) -> &mut [Slot] {
        &mut self.slots[span.owner][span.page as usize..(span.page + span.pages) as usize]
    }

    fn mapped(&self, handle: usize) -> bool {
        let mut all = self.slots.iter().flatten();
        all.any(|slot| slot.backing.is_some_and(|(other, ..)| other == handle))
    }

    fn lives(&self, body: usize) -> bool {
        let handle =
            |(i, held): (usize, &Held)| held.body == body && (held.owned || self.mapped(i));
        self.handles.iter().enumerate().any(handle)
            || self.exports.iter().flatten().any(|(exported, _)| *exported == body)
    }

    fn used(&self, card: usize) -> u64 {
        let on_card = |body: &usize| self.bodies[*body].card == card && self.lives(*body);
        (0..self.bodies.len()).filter(on_card).map(|body| self.bodies[body].pages).sum()
    }

    fn whole_mappings(&self, span: Span) -> bool {
        let mapping = |page: u64| {
            let slot = self.slots[span.owner].get(page as usize);
            slot.and_then(|slot| slot.backing).map(|(.., mapping)| mapping)
        };
        let end = span.page + span.pages;
        (span.page..end).all(|page| mapping(page).is_some())
            && (span.page == 0 || mapping(span.page - 1) != mapping(span.page))
            && mapping(end) != mapping(end - 1)
    }

    fn may(&self, device: usize, span: Span) -> bool {
        self.slots(span).iter().all(|slot| slot.backing.is_some() && slot.access[device])
    }

    /// Whether a span has to do with another device than this one.
    fn is_of_another(&self, device: usize, span: Span) -> bool {
        let elsewhere = |slot: &Slot| {
            slot.backing
                .is_some_and(|(handle, ..)| self.bodies[self.handles[handle].body].card != device)
        };
        // Memory behind the first page without a mapping is not looked at.
        let mapped = self.slots(span).iter().take_while(|slot| slot.backing.is_some());
        span.owner != device || mapped.into_iter().any(elsewhere)
    }

    fn page_of(&self, slot: Slot) -> (usize, usize) {
        let (handle, page, _) = slot.backing.expect("it is mapped");
        (self.handles[handle].body, page as usize)
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Create { device, on_peer, pages: count, shared } => {
                let card = if on_peer { 1 - device } else { device };
                let location = match on_peer {
                    true => MemoryLocation::Peer(card as u32),
                    false => MemoryLocation::Device,
                };
                let handle_type = if shared { HandleType::PosixFd } else { HandleType::None };
                let properties = MemoryProperties { location, handle_type, rdma: false };
                let created = self.devices[device].create(pages(count), properties);
                assert_eq!(created.is_ok(), self.used(card) + count <= CARD_PAGES, "{step:?}");
                if let Ok(handle) = created {
                    let body = self.bodies.len();
                    let bytes = vec![None; count as usize];
                    self.bodies.push(Body { card, pages: count, shared, bytes });
                    self.handles.push(Held { handle, device, body, owned: true });
                }
            }
            Step::Release(which) => {
                let Some(which) = which.checked_rem(self.handles.len()) else { return };
                let held = &mut self.handles[which];
                let released = self.devices[held.device].release(held.handle);
                assert_eq!(released.is_ok(), held.owned, "{step:?}");
                held.owned = false;
            }
            Step::Export(which) => {
                let Some(which) = which.checked_rem(self.handles.len()) else { return };
                let held = &self.handles[which];
                let exported = self.devices[held.device].export(held.handle);
                let allowed = held.owned && self.bodies[held.body].shared;
                assert_eq!(exported.is_ok(), allowed, "{step:?}");
                self.exports.extend(exported.ok().map(|exported| Some((held.body, exported))));
            }
            Step::Close(which) => {
                let Some(which) = which.checked_rem(self.exports.len()) else { return };
                self.exports[which] = None;
            }
            Step::Import { device, export } => {
                let Some(export) = export.checked_rem(self.exports.len()) else { return };
                let Some((body, exported)) = &self.exports[export] else { return };
                let body = *body;
                let handle =
                    self.devices[device].import(exported, pages(self.bodies[body].pages)).unwrap();
                self.handles.push(Held { handle, device, body, owned: true });
            }
            Step::Map { handle, owner, page } => {
                let Some(handle) = handle.checked_rem(self.handles.len()) else { return };
                let held = &self.handles[handle];
                let count = self.bodies[held.body].pages;
                let span = Span { owner, page, pages: count };
                let allowed = held.owned
                    && held.device == owner
                    && page + count <= SPACE
                    && self.slots(span).iter().all(|slot| slot.backing.is_none());
                let mapped = self.devices[owner].map(self.range(span).start, held.handle);
                assert_eq!(mapped.is_ok(), allowed, "{step:?}");
                if allowed {
                    self.mappings += 1;
                    let mapping = self.mappings;
                    for (slot, page) in self.slots_mut(span).iter_mut().zip(0..) {
                        *slot = Slot { backing: Some((handle, page, mapping)), access: [false; 2] };
                    }
                }
            }
            Step::Unmap(span) => {
                let allowed = self.whole_mappings(span);
                let unmapped = self.devices[span.owner].unmap(self.range(span));
                assert_eq!(unmapped.is_ok(), allowed, "{step:?}");
                if allowed {
                    self.slots_mut(span).fill(Slot::default());
                }
            }
            Step::SetAccess { span, peer } => {
                let allowed = self.whole_mappings(span);
                let other = 1 - span.owner;
                let peers: &[u32] = if peer { &[other as u32] } else { &[] };
                let set = self.devices[span.owner].set_access(self.range(span), peers);
                assert_eq!(set.is_ok(), allowed, "{step:?}");
                if allowed {
                    for slot in self.slots_mut(span) {
                        slot.access[span.owner] = true;
                        slot.access[other] |= peer;
                    }
                }
            }
            Step::Revoke(span) => {
                let allowed = self.whole_mappings(span);
                let other = 1 - span.owner;
                let device = &self.devices[span.owner];
                let revoked = device.revoke_access(self.range(span), &[other as u32]);
                assert_eq!(revoked.is_ok(), allowed, "{step:?}");
                if allowed {
                    self.slots_mut(span).iter_mut().for_each(|slot| slot.access[other] = false);
                }
            }
            Step::Fill { device, span, byte } => {
                // Touching other memory would end the program: the device would be lost.
                if !self.may(device, span) {
                    assert_eq!(self.devices[device].peek(self.range(span)), None, "{step:?}");
                    return;
                }
                let (simulator, stream) = (&self.devices[device], self.streams[device]);
                simulator.fill(stream, self.range(span), byte).unwrap();
                simulator.synchronize_stream(stream).unwrap();
                for slot in self.slots(span).to_vec() {
                    let (body, page) = self.page_of(slot);
                    self.bodies[body].bytes[page] = Some(byte);
                }
            }
            Step::Copy { device, from, to, peer } => self.copy(device, [from, to], peer),
        }
    }

    fn copy(&mut self, device: usize, [from, mut to]: [Span; 2], peer: bool) {
        if to.page + from.pages > SPACE {
            return;
        }
        to.pages = from.pages;
        let sides = [from, to];
        let (range_from, range_to) = (self.range(from), self.range(to));
        let copy = DeviceCopy { from: range_from.start, to: range_to.start, len: range_from.len };
        let overlap = from.owner == to.owner && from.page.abs_diff(to.page) < from.pages;
        let (simulator, stream) = (&self.devices[device], self.streams[device]);
        let other = &self.devices[1 - device];
        let refused = |result: DriverResult<()>| {
            assert_eq!(result.expect_err("it is refused").kind, ErrorKind::InvalidUse);
        };
        if peer {
            if overlap || sides.iter().any(|side| !self.may(side.owner, *side)) {
                return refused(simulator.copy_peer(stream, copy, other));
            }
            simulator.copy_peer(stream, copy, other).unwrap();
        } else {
            let without = |side: &&Span| !self.may(device, **side);
            let mut lacking = sides.iter().filter(without).peekable();
            if overlap || lacking.peek().is_some() {
                // Own memory that is not accessible would lose the device when the copy starts.
                if overlap || lacking.any(|side| self.is_of_another(device, *side)) {
                    refused(simulator.copy(stream, copy));
                }
                return;
            }
            simulator.copy(stream, copy).unwrap();
        }
        simulator.synchronize_stream(stream).unwrap();
        let read: Vec<_> = self
            .slots(from)
            .iter()
            .map(|slot| {
                let (body, page) = self.page_of(*slot);
                self.bodies[body].bytes[page]
            })
            .collect();
        let aliased = |slot: &Slot| {
            let page = self.page_of(*slot);
            self.slots(from).iter().any(|other| self.page_of(*other) == page)
        };
        // A copy from memory to itself by another address keeps no promise about its bytes.
        let unknown = self.slots(to).iter().any(aliased);
        for (slot, byte) in self.slots(to).to_vec().into_iter().zip(read) {
            let (body, page) = self.page_of(slot);
            self.bodies[body].bytes[page] = if unknown { None } else { byte };
        }
    }

    fn check(&self, step: &Step) {
        for (device, simulator) in self.devices.iter().enumerate() {
            let live = simulator.live();
            assert_eq!(live.device_bytes, pages(self.used(device)), "{step:?}");
            let own = |held: &&Held| held.device == device && held.owned;
            assert_eq!(live.handles, self.handles.iter().filter(own).count(), "{step:?}");
            assert_eq!(simulator.device_loss(), None);
            for owner in 0..2 {
                for (slot, page) in self.slots[owner].iter().zip(0..) {
                    let range = self.range(Span { owner, page, pages: 1 });
                    let last = AddrRange::new(range.start + Bytes::new(PAGE - 1), Bytes::new(1));
                    let seen = simulator.peek(last);
                    let visible = slot.backing.is_some() && slot.access[device];
                    assert_eq!(seen.is_some(), visible, "page {page} of {owner} after {step:?}");
                    let Some(seen) = seen else { continue };
                    let (body, index) = self.page_of(*slot);
                    if let Some(byte) = self.bodies[body].bytes[index] {
                        assert_eq!(seen, [byte], "page {page} of {owner} after {step:?}");
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(40)))]

    #[test]
    fn two_devices_that_share_memory_behave_like_two_rows_of_slots(
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut model = Model::new();
        for step in &steps {
            model.run(step);
            model.check(step);
        }
        prop_assert_eq!(model.devices[0].hazards(), []);
    }
}
