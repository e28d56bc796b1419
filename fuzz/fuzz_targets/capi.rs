//! Random sequences of calls to the C interface with valid, stale and invalid arguments. Each call
//! returns the status that a model predicts, the statistics are consistent, and no call panics.
#![no_main]

mod regions;
mod tiers;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, CString, c_void};
use std::ptr::null_mut;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{
    vramp_allocator_t, vramp_arena_report_t, vramp_arena_t, vramp_capture_report_t, vramp_graph_t,
    vramp_lease_t, vramp_stats_t, vramp_stream_t,
};
use vramp_capi::graphs::*;
use vramp_capi::interface::*;
use vramp_capi::sleep::abi::vramp_region_scope_t;
use vramp_capi::sleep::vramp_region_end;
use vramp_capi::tiers::abi::vramp_reservation_t;
use vramp_capi::tiers::paying::vramp_reservation_malloc;

use crate::regions::{Regions, RegionsCall};
use crate::tiers::{Target, Tiers, TiersCall};

/// An object from an earlier call, by an index modulo their number, or a made-up value.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Pick {
    Earlier(u8),
    MadeUp(u64),
}

#[derive(Arbitrary, Debug)]
enum Call {
    Open { preset: u8, limit: Option<u8> },
    OpenWith(String),
    Close(Pick),
    Create(Pick),
    Adopt(Pick, u8),
    Forget(Pick, Pick),
    Malloc { allocator: Pick, stream: Pick, size: u32, shift: u8 },
    Free { allocator: Pick, stream: Pick, address: Pick, inside: u16 },
    RecordUse { allocator: Pick, stream: Pick, address: Pick },
    UsableSize { allocator: Pick, address: Pick },
    Trim(Pick, u64),
    Stats(Pick, u16),
    Audit(Pick),
    Null(Pick, Pick),
    Arena { allocator: Pick, options: u8 },
    DestroyArena(Pick, Pick),
    ResetArena(Pick, Pick),
    Begin { allocator: Pick, stream: Pick, arena: Pick },
    End(Pick, Pick),
    Attach { allocator: Pick, stream: Pick, arena: Pick },
    Detach(Pick, Pick),
    Launch { allocator: Pick, stream: Pick, graph: Pick, held: bool },
    EndLease(Pick, Pick),
    DestroyGraph(Pick, Pick),
    Reports { allocator: Pick, arena: Pick, graph: Pick, size: u16 },
    Tiers { allocator: Pick, stream: Pick, object: Pick, other: Pick, call: TiersCall },
    PaidMalloc { allocator: Pick, stream: Pick, reservation: Pick, size: u32 },
    Regions { allocator: Pick, call: RegionsCall },
    EndScope(Pick),
}

const ARENAS: [&CStr; 4] = [
    c"",
    c"policy=monotone,capacity=8MiB,mode=global",
    c"overlap=order,mode=relaxed",
    c"capacity=64MiB,replan=off,mode=global",
];

/// The model. Keeps every object ever returned, so that it can be passed again when it is stale.
#[derive(Default)]
struct Model {
    allocators: Vec<u64>,
    streams: Vec<u64>,
    addresses: Vec<usize>,
    /// Arenas, graphs and leases.
    numbers: Vec<u64>,
    open: BTreeMap<u64, Held>,
    /// Scopes of regions on this thread that did not end, also of allocators that are closed.
    scopes: BTreeSet<u64>,
}

#[derive(Default)]
struct Held {
    streams: BTreeSet<u64>,
    /// Streams that were forgotten. Frees accept them.
    forgotten: BTreeSet<u64>,
    adopted: BTreeMap<u8, u64>,
    blocks: BTreeMap<usize, usize>,
    /// The stream that captures into each.
    arenas: BTreeMap<u64, Option<u64>>,
    graphs: BTreeSet<u64>,
    leases: BTreeSet<u64>,
    /// `None` while the allocator has none.
    tiers: Option<Tiers>,
    regions: Regions,
}

impl Held {
    fn any_captures(&self) -> bool {
        self.arenas.values().any(Option::is_some)
    }

    /// Returns true if a capture may use what is not the pool's own, so that a close waits for its end.
    fn refuses_close(&self) -> bool {
        self.any_captures() && (self.tiers.is_some() || !self.regions.is_empty())
    }

    fn captures(&self, stream: vramp_stream_t) -> bool {
        self.arenas.values().any(|capturing| *capturing == Some(stream.id))
    }

    /// Returns the status expected for an unknown arena, or for one with an active capture.
    fn wrong_arena(&self, arena: u64) -> Option<vramp_status_t> {
        match self.arenas.get(&arena) {
            None => Some(VRAMP_ERROR_UNKNOWN_ARENA),
            Some(Some(_)) => Some(VRAMP_ERROR_BUSY),
            Some(None) => None,
        }
    }
}

fn pick<T: Copy>(pick: Pick, earlier: &[T], made_up: impl Fn(u64) -> T) -> T {
    match pick {
        Pick::Earlier(nth) if !earlier.is_empty() => earlier[nth as usize % earlier.len()],
        Pick::Earlier(nth) => made_up(u64::from(nth)),
        Pick::MadeUp(number) => made_up(number),
    }
}

impl Model {
    fn allocator(&self, of: Pick) -> vramp_allocator_t {
        vramp_allocator_t { id: pick(of, &self.allocators, |number| number) }
    }

    fn stream(&self, of: Pick) -> vramp_stream_t {
        vramp_stream_t { id: pick(of, &self.streams, |number| number) }
    }

    fn number(&self, of: Pick) -> u64 {
        pick(of, &self.numbers, |number| number)
    }

    fn address(&self, of: Pick) -> usize {
        pick(of, &self.addresses, |number| number as usize)
    }

    /// The first thing that is wrong with a call, in the order the interface looks.
    fn wrong(
        &self,
        allocator: vramp_allocator_t,
        stream: Option<vramp_stream_t>,
        address: Option<usize>,
    ) -> Option<vramp_status_t> {
        let Some(held) = self.open.get(&allocator.id) else {
            return Some(VRAMP_ERROR_UNKNOWN_ALLOCATOR);
        };
        if stream.is_some_and(|stream| !held.streams.contains(&stream.id)) {
            return Some(VRAMP_ERROR_UNKNOWN_STREAM);
        }
        let unknown = address.is_some_and(|address| !held.blocks.contains_key(&address));
        unknown.then_some(VRAMP_ERROR_UNKNOWN_POINTER)
    }

    fn is_forgotten(&self, allocator: vramp_allocator_t, stream: vramp_stream_t) -> bool {
        self.open.get(&allocator.id).is_some_and(|held| held.forgotten.contains(&stream.id))
    }

    /// The first thing that is wrong with a call about an object, which may be looked up before the
    /// allocator finds that the stream was forgotten. Returns also whether it was.
    fn wrong_or_forgotten(
        &self,
        allocator: vramp_allocator_t,
        stream: vramp_stream_t,
    ) -> (Option<vramp_status_t>, bool) {
        let forgotten = self.is_forgotten(allocator, stream);
        (self.wrong(allocator, (!forgotten).then_some(stream), None), forgotten)
    }

    /// The first thing that is wrong with a call about a block, which is looked up before the allocator
    /// finds that the stream was forgotten.
    fn wrong_block(
        &self,
        allocator: vramp_allocator_t,
        stream: vramp_stream_t,
        address: usize,
    ) -> Option<vramp_status_t> {
        let known = (!self.is_forgotten(allocator, stream)).then_some(stream);
        self.wrong(allocator, known, Some(address))
    }

    fn held(&mut self, allocator: vramp_allocator_t) -> &mut Held {
        self.open.get_mut(&allocator.id).expect("the call went well, so it is open")
    }

    fn open(&mut self, options: &str, must: bool) {
        let Ok(options) = CString::new(options) else { return };
        let mut allocator = vramp_allocator_t::default();
        // SAFETY: the texts end with zeros and the result outlives the call.
        let status =
            unsafe { vramp_open(c"sim:rtx4090".as_ptr(), options.as_ptr(), &mut allocator) };
        assert!(!must || status == VRAMP_OK, "{options:?}: {status:?}");
        if status == VRAMP_OK {
            assert!(self.open.insert(allocator.id, Held::default()).is_none());
            self.allocators.push(allocator.id);
        }
    }

    fn made_stream(&mut self, allocator: vramp_allocator_t, stream: vramp_stream_t) {
        self.held(allocator).streams.insert(stream.id);
        self.streams.push(stream.id);
    }

    /// Checks a new block.
    fn placed(
        &mut self,
        allocator: vramp_allocator_t,
        stream: vramp_stream_t,
        address: usize,
        size: usize,
    ) {
        let held = self.held(allocator);
        let grain = if held.captures(stream) { 256 } else { 512 };
        let blocks = &mut held.blocks;
        assert!(address != 0 && address.is_multiple_of(grain));
        let before = blocks.range(..=address).next_back();
        assert!(before.is_none_or(|(start, len)| start + len <= address));
        let after = blocks.range(address..).next();
        assert!(after.is_none_or(|(start, _)| address + size <= *start));
        blocks.insert(address, size.max(1));
        self.addresses.push(address);
    }

    /// Checks a request that was refused because its region sleeps.
    fn asleep(&mut self, allocator: vramp_allocator_t, address: *mut c_void) {
        assert!(address.is_null() && !self.scopes.is_empty());
        assert!(self.held(allocator).regions.may_sleep());
    }

    fn malloc_paid(
        &mut self,
        allocator: vramp_allocator_t,
        stream: vramp_stream_t,
        id: u64,
        size: usize,
    ) {
        // The reservation is looked up and charged before the allocator finds that a stream was forgotten.
        let (wrong, forgotten) = self.wrong_or_forgotten(allocator, stream);
        let wrong = wrong.or_else(|| match &self.open[&allocator.id].tiers {
            None => Some(VRAMP_ERROR_NO_TIERS),
            Some(tiers) => {
                let unknown = !tiers.reservations.contains(&id);
                unknown.then_some(VRAMP_ERROR_UNKNOWN_RESERVATION)
            }
        });
        let mut address = null_mut();
        let reservation = vramp_reservation_t { id };
        // SAFETY: the result outlives the call.
        let status =
            unsafe { vramp_reservation_malloc(allocator, reservation, size, stream, &mut address) };
        match (status, wrong) {
            (VRAMP_OK, None) => {
                assert!(!forgotten);
                self.placed(allocator, stream, address as usize, size);
            }
            (VRAMP_ERROR_UNKNOWN_STREAM, None) => assert!(forgotten && address.is_null()),
            (
                VRAMP_ERROR_OUT_OF_MEMORY
                | VRAMP_ERROR_OVER_RESERVATION
                | VRAMP_ERROR_UNKNOWN_SPACE,
                None,
            ) => assert!(address.is_null()),
            (VRAMP_ERROR_REGION, None) => self.asleep(allocator, address),
            (status, wrong) => assert_eq!(Some(status), wrong),
        }
    }

    fn call(&mut self, call: Call) {
        match call {
            Call::Open { preset, limit } if self.open.len() < 4 => {
                let preset = ["vramp", "vpmm", "stream-ordered"][preset as usize % 3];
                let limit = limit.map(|pages| format!(",limit={}MiB", 2 + 2 * u32::from(pages)));
                self.open(&format!("preset={preset}{}", limit.unwrap_or_default()), true);
            }
            Call::OpenWith(options) if self.open.len() < 4 => self.open(&options, false),
            Call::Open { .. } | Call::OpenWith(_) => {}
            Call::Close(allocator) => {
                let allocator = self.allocator(allocator);
                let mut expected = self.wrong(allocator, None, None).unwrap_or(VRAMP_OK);
                // A capture may use buffers and regions.
                if self.open.get(&allocator.id).is_some_and(Held::refuses_close) {
                    expected = VRAMP_ERROR_CAPTURE;
                }
                assert_eq!(vramp_close(allocator), expected);
                if expected != VRAMP_ERROR_CAPTURE {
                    self.open.remove(&allocator.id);
                }
            }
            Call::Create(allocator) => {
                let allocator = self.allocator(allocator);
                let expected = self.wrong(allocator, None, None).unwrap_or(VRAMP_OK);
                let mut stream = vramp_stream_t::default();
                // SAFETY: the result outlives the call.
                assert_eq!(unsafe { vramp_stream_create(allocator, &mut stream) }, expected);
                if expected == VRAMP_OK {
                    self.made_stream(allocator, stream);
                }
            }
            Call::Adopt(allocator, raw) => {
                let allocator = self.allocator(allocator);
                let expected = self.wrong(allocator, None, None).unwrap_or(VRAMP_OK);
                let mut stream = vramp_stream_t::default();
                let pointer = usize::from(raw) as *mut c_void;
                // SAFETY: the result outlives the call; the device is simulated.
                let status = unsafe { vramp_stream_adopt(allocator, pointer, &mut stream) };
                assert_eq!(status, expected);
                if expected == VRAMP_OK {
                    let known = *self.held(allocator).adopted.entry(raw).or_insert(stream.id);
                    assert_eq!(known, stream.id);
                    self.made_stream(allocator, stream);
                }
            }
            Call::Forget(allocator, stream) => {
                let (allocator, stream) = (self.allocator(allocator), self.stream(stream));
                let mut expected = self.wrong(allocator, Some(stream), None).unwrap_or(VRAMP_OK);
                if expected == VRAMP_OK && self.held(allocator).captures(stream) {
                    expected = VRAMP_ERROR_CAPTURE;
                }
                assert_eq!(vramp_stream_forget(allocator, stream), expected);
                if expected == VRAMP_OK {
                    let held = self.held(allocator);
                    held.streams.remove(&stream.id);
                    held.forgotten.insert(stream.id);
                    held.adopted.retain(|_, known| *known != stream.id);
                }
            }
            Call::Malloc { allocator, stream, size, shift } => {
                let (allocator, stream) = (self.allocator(allocator), self.stream(stream));
                let size = (size as usize).rotate_left(u32::from(shift));
                let wrong = self.wrong(allocator, Some(stream), None);
                let mut address = null_mut();
                // SAFETY: the result outlives the call.
                let status = unsafe { vramp_malloc(allocator, size, stream, &mut address) };
                match (status, wrong) {
                    (VRAMP_OK, None) => self.placed(allocator, stream, address as usize, size),
                    (VRAMP_ERROR_OUT_OF_MEMORY, None) => assert!(address.is_null()),
                    (VRAMP_ERROR_REGION, None) => self.asleep(allocator, address),
                    (status, wrong) => assert_eq!(Some(status), wrong),
                }
            }
            Call::Free { allocator, stream, address, inside } => {
                let (allocator, stream) = (self.allocator(allocator), self.stream(stream));
                let address = self.address(address).wrapping_add(usize::from(inside) * 256);
                let wrong = self.wrong_block(allocator, stream, address);
                let status = vramp_free(allocator, address as *mut c_void, stream);
                assert_eq!(status, wrong.unwrap_or(VRAMP_OK));
                if status == VRAMP_OK {
                    self.held(allocator).blocks.remove(&address);
                }
            }
            Call::RecordUse { allocator, stream, address } => {
                let (allocator, stream) = (self.allocator(allocator), self.stream(stream));
                let address = self.address(address);
                let forgotten = self.is_forgotten(allocator, stream);
                let wrong = self
                    .wrong_block(allocator, stream, address)
                    .or(forgotten.then_some(VRAMP_ERROR_UNKNOWN_STREAM));
                let status = vramp_record_use(allocator, address as *mut c_void, stream);
                assert_eq!(status, wrong.unwrap_or(VRAMP_OK));
            }
            Call::UsableSize { allocator, address } => {
                let (allocator, address) = (self.allocator(allocator), self.address(address));
                let wrong = self.wrong(allocator, None, Some(address));
                let mut size = 0;
                let pointer = address as *mut c_void;
                // SAFETY: the result outlives the call.
                let status = unsafe { vramp_usable_size(allocator, pointer, &mut size) };
                assert_eq!(status, wrong.unwrap_or(VRAMP_OK));
                if status == VRAMP_OK {
                    assert!(size >= self.held(allocator).blocks[&address]);
                }
            }
            Call::Trim(allocator, keep) => {
                let allocator = self.allocator(allocator);
                let expected = self.wrong(allocator, None, None).unwrap_or(VRAMP_OK);
                assert_eq!(vramp_trim(allocator, keep as usize), expected);
            }
            Call::Stats(allocator, size) => self.stats(allocator, size),
            Call::Audit(allocator) => {
                let allocator = self.allocator(allocator);
                let expected = self.wrong(allocator, None, None).unwrap_or(VRAMP_OK);
                assert_eq!(vramp_audit(allocator), expected);
            }
            Call::Null(allocator, stream) => {
                let (allocator, stream) = (self.allocator(allocator), self.stream(stream));
                // SAFETY: null is what the functions must withstand.
                let statuses = unsafe {
                    [
                        vramp_stream_create(allocator, null_mut()),
                        vramp_stream_adopt(allocator, null_mut(), null_mut()),
                        vramp_malloc(allocator, 1, stream, null_mut()),
                        vramp_usable_size(allocator, null_mut(), null_mut()),
                        vramp_stats(allocator, null_mut()),
                    ]
                };
                assert_eq!(statuses, [VRAMP_ERROR_NULL; 5]);
            }
            Call::Tiers { allocator, stream, object, other, call } => {
                let (allocator, stream) = (self.allocator(allocator), self.stream(stream));
                let (object, other) = (self.number(object), self.number(other));
                let Some(held) = self.open.get_mut(&allocator.id) else { return };
                let captures = held.any_captures();
                let on = Target { allocator, stream, captures, object, other };
                self.numbers.extend(tiers::call(&mut held.tiers, call, &on));
            }
            Call::PaidMalloc { allocator, stream, reservation, size } => {
                let (allocator, stream) = (self.allocator(allocator), self.stream(stream));
                self.malloc_paid(allocator, stream, self.number(reservation), size as usize);
            }
            Call::Regions { allocator, call } => {
                let allocator = self.allocator(allocator);
                let mut none = Regions::default();
                let (is_open, captures, regions) = match self.open.get_mut(&allocator.id) {
                    Some(held) => (true, held.any_captures(), &mut held.regions),
                    None => (false, false, &mut none),
                };
                let made = regions::call(regions, call, allocator, is_open, captures);
                self.numbers.extend(made);
                self.scopes.extend(made);
            }
            Call::EndScope(scope) => {
                let id = self.number(scope);
                let expected = if self.scopes.remove(&id) { VRAMP_OK } else { VRAMP_ERROR_REGION };
                assert_eq!(vramp_region_end(vramp_region_scope_t { id }), expected);
            }
            call => self.call_of_graphs(call),
        }
    }

    fn call_of_graphs(&mut self, call: Call) {
        match call {
            Call::Arena { allocator, options } => {
                let allocator = self.allocator(allocator);
                let options = ARENAS[options as usize % ARENAS.len()];
                let wrong = self.wrong(allocator, None, None);
                let mut arena = vramp_arena_t::default();
                // SAFETY: the text ends with a zero and the result outlives the call.
                let status = unsafe { vramp_arena_create(allocator, options.as_ptr(), &mut arena) };
                match (status, wrong) {
                    (VRAMP_OK, None) => {
                        self.held(allocator).arenas.insert(arena.id, None);
                        self.numbers.push(arena.id);
                    }
                    (VRAMP_ERROR_UNSUPPORTED | VRAMP_ERROR_DRIVER | VRAMP_ERROR_RANGE, None) => {}
                    (status, wrong) => assert_eq!(Some(status), wrong),
                }
            }
            Call::DestroyArena(allocator, arena) => {
                let (allocator, id) = (self.allocator(allocator), self.number(arena));
                let wrong = self.wrong(allocator, None, None);
                let wrong = wrong.or_else(|| self.held(allocator).wrong_arena(id));
                let status = vramp_arena_destroy(allocator, vramp_arena_t { id });
                assert_eq!(status, wrong.unwrap_or(VRAMP_OK));
                if status == VRAMP_OK {
                    self.held(allocator).arenas.remove(&id);
                }
            }
            Call::ResetArena(allocator, arena) => {
                let (allocator, id) = (self.allocator(allocator), self.number(arena));
                let wrong = self.wrong(allocator, None, None);
                let wrong = wrong.or_else(|| self.held(allocator).wrong_arena(id));
                match (vramp_arena_reset(allocator, vramp_arena_t { id }), wrong) {
                    (VRAMP_OK | VRAMP_ERROR_BUSY, None) => {}
                    (status, wrong) => assert_eq!(Some(status), wrong),
                }
            }
            Call::Begin { allocator, stream, arena } => {
                let (allocator, stream) = (self.allocator(allocator), self.stream(stream));
                let id = self.number(arena);
                let (wrong, forgotten) = self.wrong_or_forgotten(allocator, stream);
                let wrong = wrong.or_else(|| {
                    let held = self.held(allocator);
                    let captures = held.captures(stream).then_some(VRAMP_ERROR_CAPTURE);
                    held.wrong_arena(id).or(captures)
                });
                let status = vramp_capture_begin(allocator, stream, vramp_arena_t { id });
                match (status, wrong) {
                    (VRAMP_ERROR_UNKNOWN_STREAM, _) if forgotten => {}
                    (VRAMP_OK, None) => {
                        assert!(!forgotten);
                        self.held(allocator).arenas.insert(id, Some(stream.id));
                    }
                    (VRAMP_ERROR_OUT_OF_MEMORY, None | Some(VRAMP_ERROR_CAPTURE)) => {}
                    (status, wrong) => assert_eq!(Some(status), wrong),
                }
            }
            Call::End(allocator, arena) => {
                let (allocator, id) = (self.allocator(allocator), self.number(arena));
                let wrong = self.wrong(allocator, None, None);
                let wrong = wrong.or_else(|| match self.held(allocator).wrong_arena(id) {
                    Some(VRAMP_ERROR_BUSY) => None,
                    wrong => Some(wrong.unwrap_or(VRAMP_ERROR_CAPTURE)),
                });
                let mut graph = vramp_graph_t::default();
                // SAFETY: the result outlives the call.
                let status =
                    unsafe { vramp_capture_end(allocator, vramp_arena_t { id }, &mut graph) };
                assert_eq!(status, wrong.unwrap_or(VRAMP_OK));
                if status == VRAMP_OK {
                    let held = self.held(allocator);
                    held.arenas.insert(id, None);
                    held.graphs.insert(graph.id);
                    self.numbers.push(graph.id);
                }
            }
            Call::Attach { allocator, stream, arena } => {
                let (allocator, stream) = (self.allocator(allocator), self.stream(stream));
                let id = self.number(arena);
                let (wrong, forgotten) = self.wrong_or_forgotten(allocator, stream);
                // Every capture in this test has an arena.
                let wrong = wrong.or_else(|| self.held(allocator).wrong_arena(id));
                let status = vramp_capture_attach(allocator, stream, vramp_arena_t { id });
                if !forgotten || status != VRAMP_ERROR_UNKNOWN_STREAM {
                    assert_eq!(status, wrong.unwrap_or(VRAMP_ERROR_CAPTURE));
                }
            }
            Call::Detach(allocator, arena) => {
                let (allocator, id) = (self.allocator(allocator), self.number(arena));
                let wrong = self.wrong(allocator, None, None);
                let wrong = wrong.or_else(|| {
                    let unknown = !self.held(allocator).arenas.contains_key(&id);
                    unknown.then_some(VRAMP_ERROR_UNKNOWN_ARENA)
                });
                let mut graph = vramp_graph_t::default();
                // SAFETY: the result outlives the call.
                let status =
                    unsafe { vramp_capture_detach(allocator, vramp_arena_t { id }, &mut graph) };
                assert_eq!(status, wrong.unwrap_or(VRAMP_ERROR_CAPTURE));
            }
            Call::Launch { allocator, stream, graph, held } => {
                let (allocator, stream) = (self.allocator(allocator), self.stream(stream));
                let graph = vramp_graph_t { id: self.number(graph) };
                let (wrong, forgotten) = self.wrong_or_forgotten(allocator, stream);
                let wrong = wrong.or_else(|| {
                    let known = self.held(allocator);
                    match known.graphs.contains(&graph.id) {
                        true => known.captures(stream).then_some(VRAMP_ERROR_CAPTURE),
                        false => Some(VRAMP_ERROR_UNKNOWN_GRAPH),
                    }
                });
                let mut lease = vramp_lease_t::default();
                let out = if held { &raw mut lease } else { null_mut() };
                // SAFETY: the result is null or outlives the call.
                match (unsafe { vramp_graph_launch(allocator, graph, stream, out) }, wrong) {
                    (VRAMP_ERROR_UNKNOWN_STREAM, _) if forgotten => {}
                    (VRAMP_OK, None) if held => {
                        assert!(!forgotten);
                        self.held(allocator).leases.insert(lease.id);
                        self.numbers.push(lease.id);
                    }
                    (VRAMP_OK | VRAMP_ERROR_BUSY | VRAMP_ERROR_OUT_OF_MEMORY, None) => {}
                    (status, wrong) => assert_eq!(Some(status), wrong),
                }
            }
            Call::EndLease(allocator, lease) => {
                let (allocator, id) = (self.allocator(allocator), self.number(lease));
                let wrong = self.wrong(allocator, None, None);
                let wrong = wrong.or_else(|| {
                    let unknown = !self.held(allocator).leases.remove(&id);
                    unknown.then_some(VRAMP_ERROR_UNKNOWN_LEASE)
                });
                let status = vramp_lease_end(allocator, vramp_lease_t { id });
                assert_eq!(status, wrong.unwrap_or(VRAMP_OK));
            }
            Call::DestroyGraph(allocator, graph) => {
                let (allocator, id) = (self.allocator(allocator), self.number(graph));
                let wrong = self.wrong(allocator, None, None);
                let wrong = wrong.or_else(|| {
                    let unknown = !self.held(allocator).graphs.remove(&id);
                    unknown.then_some(VRAMP_ERROR_UNKNOWN_GRAPH)
                });
                let status = vramp_graph_destroy(allocator, vramp_graph_t { id });
                assert_eq!(status, wrong.unwrap_or(VRAMP_OK));
            }
            Call::Reports { allocator, arena, graph, size } => {
                self.reports(allocator, arena, graph, size);
            }
            call => unreachable!("{call:?} is not about graphs"),
        }
    }

    fn reports(&mut self, allocator: Pick, arena: Pick, graph: Pick, size: u16) {
        let allocator = self.allocator(allocator);
        let (arena, graph) = (self.number(arena), self.number(graph));
        let size = u64::from(size % 512);
        let wrong = self.wrong(allocator, None, None);
        let known = self.open.get(&allocator.id);
        let no_arena = known.is_some_and(|held| !held.arenas.contains_key(&arena));
        let no_graph = known.is_some_and(|held| !held.graphs.contains(&graph));
        let expected = |unknown: bool, status| match (size < 16, wrong) {
            (true, _) => VRAMP_ERROR_STRUCT_SIZE,
            (false, Some(wrong)) => wrong,
            (false, None) if unknown => status,
            (false, None) => VRAMP_OK,
        };
        let (arena, graph) = (vramp_arena_t { id: arena }, vramp_graph_t { id: graph });
        let mut fields = [u64::MAX; 64];
        fields[0] = size;
        // SAFETY: the array is at least as large as its first number says.
        let status = unsafe { vramp_arena_report(allocator, arena, fields.as_mut_ptr().cast()) };
        assert_eq!(status, expected(no_arena, VRAMP_ERROR_UNKNOWN_ARENA));
        let whole = size_of::<vramp_arena_report_t>() / 8;
        assert!(fields[whole..].iter().all(|field| *field == u64::MAX), "nothing beyond");
        let mut fields = [u64::MAX; 64];
        fields[0] = size;
        // SAFETY: the array is at least as large as its first number says.
        let status = unsafe { vramp_graph_report(allocator, graph, fields.as_mut_ptr().cast()) };
        assert_eq!(status, expected(no_graph, VRAMP_ERROR_UNKNOWN_GRAPH));
        let whole = size_of::<vramp_capture_report_t>() / 8;
        assert!(fields[whole..].iter().all(|field| *field == u64::MAX), "nothing beyond");
    }

    fn stats(&mut self, allocator: Pick, size: u16) {
        let allocator = self.allocator(allocator);
        let mut fields = [u64::MAX; 64];
        let size = u64::from(size % 512);
        fields[0] = size;
        // SAFETY: the array is at least as large as its first number says.
        let status = unsafe { vramp_stats(allocator, fields.as_mut_ptr().cast()) };
        if size < 16 {
            assert_eq!(status, VRAMP_ERROR_STRUCT_SIZE);
            return;
        }
        assert_eq!(status, self.wrong(allocator, None, None).unwrap_or(VRAMP_OK));
        let whole = size_of::<vramp_stats_t>() / 8;
        assert!(fields[whole..].iter().all(|field| *field == u64::MAX), "nothing beyond");
        if status == VRAMP_OK {
            assert!(fields[0] <= size);
        }
    }
}

fuzz_target!(|calls: Vec<Call>| {
    let mut model = Model::default();
    model.open("", true);
    // Starts with a stream, an arena and a graph, which few random sequences would create.
    let first = Pick::Earlier(0);
    model.call(Call::Create(first));
    model.call(Call::Arena { allocator: first, options: 0 });
    model.call(Call::Begin { allocator: first, stream: first, arena: first });
    model.call(Call::End(first, first));
    for call in calls.into_iter().take(200) {
        model.call(call);
    }
    // In any order.
    for id in std::mem::take(&mut model.scopes) {
        assert_eq!(vramp_region_end(vramp_region_scope_t { id }), VRAMP_OK);
    }
    for (id, held) in std::mem::take(&mut model.open) {
        let allocator = vramp_allocator_t { id };
        assert_eq!(vramp_audit(allocator), VRAMP_OK);
        let stream = held.streams.first().map(|id| vramp_stream_t { id: *id });
        for &address in held.blocks.keys() {
            let Some(stream) = stream else { break };
            assert_eq!(vramp_free(allocator, address as *mut c_void, stream), VRAMP_OK);
        }
        assert_eq!(vramp_audit(allocator), VRAMP_OK);
        if held.refuses_close() {
            for id in held.arenas.iter().filter(|(_, stream)| stream.is_some()).map(|(id, _)| *id) {
                let mut graph = vramp_graph_t::default();
                // SAFETY: the result outlives the call.
                let ended =
                    unsafe { vramp_capture_end(allocator, vramp_arena_t { id }, &mut graph) };
                assert_eq!(ended, VRAMP_OK);
            }
        }
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    }
});
