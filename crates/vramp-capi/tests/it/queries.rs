//! The version, the device, raw streams, peaks, statistics by name, and handlers of shortages.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{dangling_mut, null_mut};
use std::sync::Mutex;

use crate::common::*;
use vramp_capi::abi::vramp_event_kind_t::*;
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::abi::{
    vramp_allocator_t, vramp_device_t, vramp_event_t, vramp_shortage_t, vramp_stream_t,
};
use vramp_capi::interface::*;
use vramp_capi::queries::*;

const MIB: usize = 1 << 20;

fn text(chars: &[c_char]) -> String {
    // SAFETY: the arrays of `vramp_device_t` end with a zero.
    unsafe { CStr::from_ptr(chars.as_ptr()) }.to_str().expect("names are UTF-8").to_owned()
}

#[test]
fn a_program_of_another_abi_is_refused_with_both_versions() {
    let own = vramp_version_number();
    assert_eq!(vramp_check_version(own), VRAMP_OK);
    for header in [own + 1, own + 1000, own + 1_000_000, 0] {
        assert_eq!(vramp_check_version(header), VRAMP_ERROR_VERSION);
        assert!(last_error().contains(env!("CARGO_PKG_VERSION")), "{}", last_error());
    }
}

#[test]
fn a_device_has_a_name_that_opens_it_again() {
    let allocator = open_on("sim:l4", "").expect("it is a card of the simulator");
    let mut device = no_device();
    // SAFETY: the struct has its size.
    assert_eq!(unsafe { vramp_device(allocator, &mut device) }, VRAMP_OK);
    assert_eq!((device.simulated, device.ordinal), (1, -1));
    assert_eq!(device.memory, stats(allocator).card_total);
    assert!(device.granularity >= 4096 && device.memory.is_multiple_of(device.granularity));
    assert!(text(&device.name).contains("L4"), "{}", text(&device.name));
    assert_eq!((text(&device.uuid), text(&device.pci)), (String::new(), String::new()));
    let again = open_on(&text(&device.id), "").expect("the id is a device");
    assert_eq!(stats(again).card_total, device.memory);
    for allocator in [allocator, again] {
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    }
}

#[test]
fn a_struct_of_an_older_version_gets_as_much_as_it_has() {
    let allocator = open("");
    let mut device = vramp_device_t { struct_size: 24, ordinal: 77, ..no_device() };
    // SAFETY: 24 bytes of the struct are valid.
    assert_eq!(unsafe { vramp_device(allocator, &mut device) }, VRAMP_OK);
    assert_eq!((device.struct_size, device.ordinal), (24, 77));
    assert!(device.memory > 0 && device.granularity > 0);
    device.struct_size = 8;
    // SAFETY: as above.
    assert_eq!(unsafe { vramp_device(allocator, &mut device) }, VRAMP_ERROR_STRUCT_SIZE);
    // SAFETY: null is what the function must withstand.
    assert_eq!(unsafe { vramp_device(allocator, null_mut()) }, VRAMP_ERROR_NULL);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn an_adopted_stream_has_its_own_value_and_a_created_one_none_on_the_simulator() {
    let allocator = open("");
    let raw_of = |stream: vramp_stream_t| {
        let mut raw = dangling_mut();
        // SAFETY: the result outlives the call.
        let status = unsafe { vramp_stream_raw(allocator, stream, &mut raw) };
        (status, raw as usize)
    };
    let (legacy, adopted) = (adopt(allocator, 0).unwrap(), adopt(allocator, 0x50).unwrap());
    let created = stream(allocator);
    assert_eq!(raw_of(legacy), (VRAMP_OK, 0));
    assert_eq!(raw_of(adopted), (VRAMP_OK, 0x50));
    assert_eq!(raw_of(created), (VRAMP_ERROR_UNSUPPORTED, 0));
    assert!(last_error().contains("vramp_device"), "{}", last_error());
    for stream in [adopted, created] {
        assert_eq!(vramp_stream_forget(allocator, stream), VRAMP_OK);
        assert_eq!(raw_of(stream), (VRAMP_ERROR_UNKNOWN_STREAM, 0));
    }
    assert_eq!(raw_of(vramp_stream_t::default()), (VRAMP_ERROR_UNKNOWN_STREAM, 0));
    // SAFETY: null is what the function must withstand.
    assert_eq!(unsafe { vramp_stream_raw(allocator, legacy, null_mut()) }, VRAMP_ERROR_NULL);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_block_is_freed_on_the_stream_of_its_allocation_also_if_that_was_forgotten() {
    let allocator = open("");
    let (first, second) = (stream(allocator), stream(allocator));
    let log = observed(allocator);
    let on_first = malloc(allocator, 4 * MIB, first).unwrap();
    let on_second = malloc(allocator, 4 * MIB, second).unwrap();
    assert_eq!(vramp_free_on_own_stream(allocator, on_first), VRAMP_OK);
    assert_eq!(vramp_free_on_own_stream(allocator, on_first), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!(vramp_stream_forget(allocator, second), VRAMP_OK);
    assert_eq!(vramp_free_on_own_stream(allocator, on_second), VRAMP_OK);
    let of_kind = |kind| {
        let log = log.lock().unwrap();
        let streams = log.iter().filter(|event| event.kind == kind).map(|event| event.stream);
        streams.collect::<Vec<vramp_stream_t>>()
    };
    assert_eq!(of_kind(VRAMP_EVENT_ALLOCATED), [first, second]);
    assert_eq!(of_kind(VRAMP_EVENT_FREED), [first, second]);
    assert_eq!(stats(allocator).live, 0);
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn peaks_are_reset_and_statistics_have_pytorchs_names() {
    let allocator = open("limit=512MiB");
    let stream = stream(allocator);
    let block = malloc(allocator, 64 * MIB, stream).unwrap();
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    let before = named(allocator);
    assert_eq!(before["requested_bytes.all.peak"], 64 << 20);
    assert_eq!((before["num_ooms"], before["max_split_size"]), (0, u64::MAX));
    assert_eq!(stats(allocator).live_peak, 64 << 20);
    assert_eq!(vramp_reset_peaks(allocator), VRAMP_OK);
    assert_eq!(stats(allocator).live_peak, 0);
    assert_eq!(named(allocator)["requested_bytes.all.peak"], 0);
    assert_eq!(stats(allocator).released, 0);
    assert_eq!(vramp_trim(allocator, 0), VRAMP_OK);
    assert_eq!(stats(allocator).released, stats(allocator).reserved_peak);
    assert_eq!(stats(allocator).limit, 512 << 20);
    // SAFETY: a null visitor is never called.
    assert_eq!(unsafe { vramp_memory_stats(allocator, None, null_mut()) }, VRAMP_ERROR_NULL);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn fields_stay_where_programs_of_this_abi_read_them() {
    use std::mem::offset_of;
    use vramp_capi::abi::{vramp_arena_report_t, vramp_capture_report_t, vramp_stats_t};
    assert_eq!(size_of::<vramp_allocator_t>(), 8);
    assert_eq!(size_of::<vramp_stream_t>(), 8);
    // Later versions add fields behind the last ones here.
    assert_eq!(offset_of!(vramp_stats_t, callback_panics), 136);
    assert_eq!(offset_of!(vramp_stats_t, looked_at), 160);
    assert_eq!(offset_of!(vramp_stats_t, quarantined_addresses), 176);
    assert_eq!(offset_of!(vramp_arena_report_t, lent), 48);
    assert_eq!(offset_of!(vramp_capture_report_t, kept), 56);
    assert_eq!(offset_of!(vramp_event_t, requested), 24);
    assert_eq!(offset_of!(vramp_event_t, stream), 32);
    assert_eq!(offset_of!(vramp_shortage_t, stream), 56);
    assert_eq!(offset_of!(vramp_device_t, simulated), 28);
    assert_eq!(offset_of!(vramp_device_t, pci), 272);
}

type Named = BTreeMap<String, u64>;

unsafe extern "C" fn keep(name: *const c_char, value: u64, user: *mut c_void) {
    // SAFETY: vramp gives a name that ends with a zero, and the test a map.
    let (name, named) = unsafe { (CStr::from_ptr(name), &mut *user.cast::<Named>()) };
    named.insert(name.to_str().unwrap().to_owned(), value);
}

fn named(allocator: vramp_allocator_t) -> Named {
    let mut named = Named::new();
    // SAFETY: the map outlives the call.
    let status = unsafe { vramp_memory_stats(allocator, Some(keep), (&raw mut named).cast()) };
    assert_eq!(status, VRAMP_OK);
    named
}

unsafe extern "C" fn close_it(_: *const c_char, _: u64, user: *mut c_void) {
    // SAFETY: the test gives an allocator.
    vramp_close(unsafe { *user.cast::<vramp_allocator_t>() });
}

#[test]
fn a_visitor_of_statistics_may_close_the_allocator() {
    let mut allocator = open("");
    let user = (&raw mut allocator).cast();
    // SAFETY: the allocator outlives the call.
    assert_eq!(unsafe { vramp_memory_stats(allocator, Some(close_it), user) }, VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
}

type Log = Mutex<Vec<vramp_event_t>>;

unsafe extern "C" fn note(event: *const vramp_event_t, user: *mut c_void) {
    // SAFETY: vramp gives an event, and the test a log that lives on.
    let (event, log) = unsafe { (*event, &*user.cast::<Log>()) };
    log.lock().unwrap().push(event);
}

/// A log of the allocator's events. It lives as long as the process.
fn observed(allocator: vramp_allocator_t) -> &'static Log {
    let log: &'static Log = Box::leak(Box::default());
    let mut registration = 0;
    let user = (&raw const *log).cast_mut().cast();
    // SAFETY: the log lives on, and `note` may be called from anywhere.
    assert_eq!(unsafe { vramp_observe(allocator, Some(note), user, &mut registration) }, VRAMP_OK);
    log
}

/// What a handler of shortages frees, and what it was called with.
struct Spill {
    allocator: vramp_allocator_t,
    blocks: Mutex<Vec<usize>>,
    seen: Mutex<Vec<vramp_shortage_t>>,
}

unsafe extern "C" fn spill(shortage: *const vramp_shortage_t, user: *mut c_void) -> c_int {
    // SAFETY: vramp gives a shortage, and the test a struct that outlives the allocator.
    let (shortage, spill) = unsafe { (*shortage, &*user.cast::<Spill>()) };
    spill.seen.lock().unwrap().push(shortage);
    assert_eq!(vramp_close(spill.allocator), VRAMP_ERROR_BUSY);
    match spill.blocks.lock().unwrap().pop() {
        Some(block) => {
            assert_eq!(vramp_free_on_own_stream(spill.allocator, block as *mut c_void), VRAMP_OK);
            1
        }
        None => 0,
    }
}

#[test]
fn a_handler_frees_blocks_until_the_request_is_served_or_none_is_left() {
    let allocator = open("limit=256MiB");
    let stream = stream(allocator);
    let blocks = (0..4).map(|_| malloc(allocator, 64 * MIB, stream).unwrap() as usize).collect();
    let held = Spill { allocator, blocks: Mutex::new(blocks), seen: Mutex::default() };
    let mut registration = 0;
    let user = (&raw const held).cast_mut().cast();
    // SAFETY: `held` outlives the allocator; null is what the function must withstand.
    unsafe {
        let refused = vramp_on_shortage(allocator, None, user, &mut registration);
        assert_eq!(refused, VRAMP_ERROR_NULL);
        let refused = vramp_on_shortage(allocator, Some(spill), user, null_mut());
        assert_eq!(refused, VRAMP_ERROR_NULL);
        assert_eq!(vramp_on_shortage(allocator, Some(spill), user, &mut registration), VRAMP_OK);
    }
    let large = malloc(allocator, 120 * MIB, stream).expect("the handler frees two blocks");
    let seen = std::mem::take(&mut *held.seen.lock().unwrap());
    assert_eq!((seen.len(), held.blocks.lock().unwrap().len()), (2, 2));
    let first = seen[0];
    assert_eq!((first.requested, first.limit), (120 << 20, 256 << 20));
    assert_eq!((first.reserved, first.used, first.free), (256 << 20, 256 << 20, 0));
    assert_eq!((first.stream, seen[1].free), (stream, 64 << 20));
    assert_eq!(malloc(allocator, 300 * MIB, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert!(held.blocks.lock().unwrap().is_empty());
    assert_eq!(vramp_unobserve(allocator, registration), VRAMP_OK);
    let calls = held.seen.lock().unwrap().len();
    assert_eq!(malloc(allocator, 300 * MIB, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert_eq!(held.seen.lock().unwrap().len(), calls);
    assert_eq!(vramp_free(allocator, large, stream), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
