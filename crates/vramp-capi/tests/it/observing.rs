//! Observers, limits, histories, statistics, handlers of shortages, and what callbacks in C may do.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{dangling_mut, null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::Duration;

use vramp_capi::abi::vramp_event_kind_t::*;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{
    vramp_allocator_t, vramp_device_t, vramp_event_t, vramp_shortage_t, vramp_stream_t,
};
use vramp_capi::interface::*;
use vramp_capi::queries::*;

use crate::common::*;

// --- Observers, limits, histories and snapshots through the C interface ---

type Log = Mutex<Vec<vramp_event_t>>;

unsafe extern "C" fn note(event: *const vramp_event_t, user: *mut c_void) {
    // SAFETY: vramp gives an event, and the test a log that outlives the allocator.
    let (event, log) = unsafe { (*event, &*user.cast::<Log>()) };
    log.lock().expect("no thread panicked").push(event);
}

#[test]
fn observers_see_allocations_growth_and_failures_until_they_are_removed() {
    let log = Log::default();
    let allocator = open("limit=64MiB");
    let stream = stream(allocator);
    let mut registration = 0;
    let user = (&raw const log).cast_mut().cast();
    // SAFETY: the log outlives the allocator, and `note` may be called from anywhere.
    let status = unsafe { vramp_observe(allocator, Some(note), user, &mut registration) };
    assert_eq!(status, VRAMP_OK);
    let block = malloc(allocator, 5_000_000, stream).expect("there is memory");
    assert_eq!(malloc(allocator, 1 << 30, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    let events = std::mem::take(&mut *log.lock().expect("no thread panicked"));
    let find = |kind| events.iter().find(|event| event.kind == kind).copied();
    let allocated = find(VRAMP_EVENT_ALLOCATED).expect("it was observed");
    assert_eq!((allocated.address, allocated.requested), (block as u64, 5_000_000));
    assert!(find(VRAMP_EVENT_GROWN).expect("it was observed").size >= 5_000_000);
    assert_eq!(find(VRAMP_EVENT_OUT_OF_MEMORY).expect("it was observed").requested, 1 << 30);
    assert_eq!(find(VRAMP_EVENT_FREED).expect("it was observed").address, block as u64);
    assert_eq!(vramp_unobserve(allocator, registration), VRAMP_OK);
    assert_eq!(vramp_unobserve(allocator, registration), VRAMP_ERROR_RANGE);
    assert_eq!(vramp_unobserve(allocator, 0), VRAMP_ERROR_RANGE);
    let block = malloc(allocator, 100, stream).expect("there is memory");
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert!(log.lock().expect("no thread panicked").is_empty());
    // SAFETY: null is what the functions must withstand.
    unsafe {
        assert_eq!(vramp_observe(allocator, None, null_mut(), &mut registration), VRAMP_ERROR_NULL);
        assert_eq!(vramp_observe(allocator, Some(note), user, null_mut()), VRAMP_ERROR_NULL);
        assert_eq!(vramp_snapshot(allocator, null()), VRAMP_ERROR_NULL);
    }
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_snapshot_of_all_devices_refuses_wrong_arguments() {
    // SAFETY: null is what the function must withstand.
    assert_eq!(unsafe { vramp_snapshot_of_devices(null()) }, VRAMP_ERROR_NULL);
    // SAFETY: the path ends with a zero.
    let status = unsafe { vramp_snapshot_of_devices(c"/nowhere/at/all".as_ptr()) };
    assert_eq!(status, VRAMP_ERROR_FILE);
    assert!(last_error().contains("cannot write /nowhere/at/all"), "{}", last_error());
    assert_eq!(vramp_record_history_of_devices(10_000_001), VRAMP_ERROR_RANGE);
    assert!(last_error().contains("use at most 10000000"), "{}", last_error());
    assert_eq!(vramp_record_history_of_devices(0), VRAMP_OK);
}

#[test]
fn a_limit_that_is_set_later_holds_and_a_snapshot_is_written() {
    let allocator = open("");
    let stream = stream(allocator);
    assert_eq!(vramp_record_history(allocator, 100), VRAMP_OK);
    let block = malloc(allocator, 3 << 20, stream).expect("there is memory");
    assert_eq!(vramp_set_limit(allocator, 64 << 20), VRAMP_OK);
    assert_eq!(malloc(allocator, 80 << 20, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert!(last_error().contains("limit"), "{}", last_error());
    assert_eq!(vramp_set_limit(allocator, 0), VRAMP_OK);
    let large = malloc(allocator, 80 << 20, stream).expect("there is no limit any more");
    for (name, start) in [("snapshot.pickle", &b"\x80\x04"[..]), ("timeline.json", b"{")] {
        let path = std::env::temp_dir().join(format!("vramp-{}-{name}", std::process::id()));
        let text = CString::new(path.to_str().expect("a plain path")).expect("no zeros in it");
        // SAFETY: the path ends with a zero.
        assert_eq!(unsafe { vramp_snapshot(allocator, text.as_ptr()) }, VRAMP_OK);
        let written = std::fs::read(&path).expect("it was written");
        assert!(written.starts_with(start), "{name}");
        std::fs::remove_file(&path).expect("it is ours");
    }
    // SAFETY: the path ends with a zero.
    let status = unsafe { vramp_snapshot(allocator, c"/nowhere/at/all".as_ptr()) };
    assert_eq!(status, VRAMP_ERROR_FILE);
    assert_eq!(vramp_record_history(allocator, 0), VRAMP_OK);
    for block in [block, large] {
        assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    }
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

// --- The version, the device, raw streams, peaks, statistics by name, and handlers of shortages ---

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

unsafe extern "C" fn log_event(event: *const vramp_event_t, user: *mut c_void) {
    // SAFETY: vramp gives an event, and the test a log that lives on.
    let (event, log) = unsafe { (*event, &*user.cast::<Log>()) };
    log.lock().unwrap().push(event);
}

/// A log of the allocator's events. It lives as long as the process.
fn observed(allocator: vramp_allocator_t) -> &'static Log {
    let log: &'static Log = Box::leak(Box::default());
    let mut registration = 0;
    let user = (&raw const *log).cast_mut().cast();
    // SAFETY: the log lives on, and `log_event` may be called from anywhere.
    let status = unsafe { vramp_observe(allocator, Some(log_event), user, &mut registration) };
    assert_eq!(status, VRAMP_OK);
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

// --- What an observer in C may do, and how closing and removing it meet calls in progress ---

const ENOUGH: Duration = Duration::from_secs(60);

/// An observer as a closure. It lives as long as the process, because the tests are about the end of
/// the observer and not of the closure.
type Code = Box<dyn Fn(vramp_event_t) + Send + Sync>;

unsafe extern "C" fn run(event: *const vramp_event_t, user: *mut c_void) {
    // SAFETY: vramp gives an event, and `observe` a closure that lives on.
    let (event, code) = unsafe { (*event, &*user.cast::<Code>()) };
    code(event);
}

fn observe(
    allocator: vramp_allocator_t,
    code: impl Fn(vramp_event_t) + Send + Sync + 'static,
) -> u64 {
    let code: Code = Box::new(code);
    let user = Box::leak(Box::new(code));
    let mut registration = 0;
    // SAFETY: the closure may be called from any thread for as long as the process runs.
    let status =
        unsafe { vramp_observe(allocator, Some(run), (&raw mut *user).cast(), &mut registration) };
    assert_eq!(status, VRAMP_OK, "{}", last_error());
    registration
}

/// Runs `work` on another thread and fails the test if it does not end.
fn finishes(work: impl FnOnce() + Send + 'static) {
    let (done, over) = channel();
    let thread = thread::spawn(move || {
        work();
        done.send(()).unwrap();
    });
    let ended = over.recv_timeout(ENOUGH);
    // A panic of the thread ends it too, and is reported here.
    assert!(ended.is_ok() || thread.is_finished(), "it hangs");
    thread.join().unwrap();
}

fn pair(allocator: vramp_allocator_t, stream: vramp_stream_t) -> Result<(), vramp_status_t> {
    let block = malloc(allocator, 1000, stream)?;
    match vramp_free(allocator, block, stream) {
        VRAMP_OK => Ok(()),
        status => Err(status),
    }
}

fn usable(allocator: vramp_allocator_t, address: u64) -> Result<usize, vramp_status_t> {
    let mut size = 0;
    // SAFETY: the result outlives the call.
    match unsafe { vramp_usable_size(allocator, address as *mut c_void, &mut size) } {
        VRAMP_OK => Ok(size),
        status => Err(status),
    }
}

#[test]
fn an_observer_finds_the_block_that_it_hears_of_and_so_does_a_thread_that_it_tells() {
    finishes(|| {
        let allocator = open("");
        let stream = stream(allocator);
        observe(allocator, move |event| match event.kind {
            VRAMP_EVENT_ALLOCATED => {
                let found = thread::spawn(move || usable(allocator, event.address));
                assert_eq!(found.join().unwrap(), Ok(event.size as usize));
                assert_eq!(usable(allocator, event.address), Ok(event.size as usize));
            }
            VRAMP_EVENT_FREED => {
                assert_eq!(usable(allocator, event.address), Err(VRAMP_ERROR_UNKNOWN_POINTER));
            }
            _ => {}
        });
        for size in [100, 100, 8 << 20] {
            let block = malloc(allocator, size, stream).unwrap();
            assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
        }
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    });
}

#[test]
fn an_observer_may_free_the_block_that_it_hears_of() {
    let allocator = open("");
    let stream = stream(allocator);
    let registration = observe(allocator, move |event| {
        if event.kind == VRAMP_EVENT_ALLOCATED {
            let block = event.address as *mut c_void;
            assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
        }
    });
    let block = malloc(allocator, 100, stream).unwrap();
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_ERROR_UNKNOWN_POINTER);
    assert_eq!((stats(allocator).live, stats(allocator).freed), (0, 1));
    assert_eq!(vramp_unobserve(allocator, registration), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn closing_inside_an_observer_is_refused_and_says_what_to_do() {
    finishes(|| {
        let allocator = open("");
        let stream = stream(allocator);
        let refused = &*Box::leak(Box::new(AtomicU64::new(0)));
        observe(allocator, move |_| {
            assert_eq!(vramp_close(allocator), VRAMP_ERROR_BUSY);
            assert!(last_error().contains("return from it, and then close"), "{}", last_error());
            refused.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(pair(allocator, stream), Ok(()));
        assert!(refused.load(Ordering::Relaxed) >= 2);
        assert_eq!(vramp_close(allocator), VRAMP_OK);
        assert_eq!(vramp_close(allocator), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    });
}

#[test]
fn calls_inside_an_observer_are_served_while_another_thread_closes() {
    finishes(|| {
        let allocator = open("");
        let stream = stream(allocator);
        let (begun, began) = channel();
        let begun = Mutex::new(begun);
        let refused = &*Box::leak(Box::new(AtomicBool::new(false)));
        observe(allocator, move |event| {
            if event.requested != 1000 || event.kind != VRAMP_EVENT_ALLOCATED {
                return;
            }
            begun.lock().unwrap().send(()).unwrap();
            // Until the close waits: from then on calls from outside are refused.
            while !refused.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            assert_eq!(usable(allocator, event.address), Ok(event.size as usize));
            assert_eq!(stats(allocator).live, 1000);
            let block = malloc(allocator, 500, stream).unwrap();
            assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
            assert_eq!(vramp_close(allocator), VRAMP_ERROR_BUSY);
        });
        thread::scope(|scope| {
            let caller = scope.spawn(|| malloc(allocator, 1000, stream).map(drop));
            began.recv_timeout(ENOUGH).unwrap();
            let closer = scope.spawn(|| vramp_close(allocator));
            // Threads of other stripes: each is refused once the closer has come to its own.
            while usable_anywhere(allocator) != Err(VRAMP_ERROR_UNKNOWN_ALLOCATOR) {
                thread::yield_now();
            }
            refused.store(true, Ordering::SeqCst);
            assert!(caller.join().unwrap().is_ok());
            assert_eq!(closer.join().unwrap(), VRAMP_OK);
        });
    });
}

/// Asks on a new thread.
fn usable_anywhere(allocator: vramp_allocator_t) -> Result<usize, vramp_status_t> {
    thread::spawn(move || match usable(allocator, 1) {
        Err(VRAMP_ERROR_UNKNOWN_POINTER) => Ok(0),
        other => other,
    })
    .join()
    .unwrap()
}

#[test]
fn observers_of_two_allocators_call_each_other_while_both_are_closed() {
    finishes(|| {
        for _ in 0..30 {
            let both = [open(""), open("")];
            let streams = both.map(stream);
            for index in 0..2 {
                let (other, on) = (both[1 - index], streams[1 - index]);
                observe(both[index], move |_| {
                    // Served, or refused because it is being closed.
                    let done = pair(other, on);
                    assert!(matches!(done, Ok(()) | Err(VRAMP_ERROR_UNKNOWN_ALLOCATOR)));
                });
            }
            let begin = Barrier::new(8);
            thread::scope(|scope| {
                for caller in 0..6 {
                    let (allocator, stream) = (both[caller % 2], streams[caller % 2]);
                    let begin = &begin;
                    scope.spawn(move || {
                        begin.wait();
                        while pair(allocator, stream).is_ok() {}
                    });
                }
                for allocator in both {
                    let begin = &begin;
                    scope.spawn(move || {
                        begin.wait();
                        assert_eq!(vramp_close(allocator), VRAMP_OK);
                    });
                }
            });
        }
    });
}

#[test]
fn observers_that_close_each_others_allocators_do_not_wait() {
    finishes(|| {
        for _ in 0..30 {
            let both = [open(""), open("")];
            let streams = both.map(stream);
            let inside = &*Box::leak(Box::new(Barrier::new(2)));
            let statuses = &*Box::leak(Box::new(Mutex::new(Vec::new())));
            for index in 0..2 {
                let other = both[1 - index];
                observe(both[index], move |event| {
                    if event.kind == VRAMP_EVENT_ALLOCATED {
                        inside.wait();
                        let status = vramp_close(other);
                        statuses.lock().unwrap().push((status, last_error()));
                        inside.wait();
                    }
                });
            }
            thread::scope(|scope| {
                for index in 0..2 {
                    scope
                        .spawn(move || malloc(both[index], 100, streams[index]).map(drop).unwrap());
                }
            });
            for (status, text) in &*statuses.lock().unwrap() {
                assert_eq!(*status, VRAMP_ERROR_BUSY);
                assert!(text.contains("a callback does not wait"), "{text}");
            }
            for allocator in both {
                assert_eq!(vramp_close(allocator), VRAMP_OK);
            }
        }
    });
}

#[test]
fn an_observer_opens_and_closes_another_allocator() {
    finishes(|| {
        let allocator = open("");
        let stream = stream(allocator);
        let done = &*Box::leak(Box::new(AtomicU64::new(0)));
        observe(allocator, move |_| {
            let other = open("");
            assert_eq!(pair(other, crate::common::stream(other)), Ok(()));
            assert_eq!(vramp_close(other), VRAMP_OK);
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(pair(allocator, stream), Ok(()));
        assert!(done.load(Ordering::Relaxed) >= 2);
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    });
}

#[test]
fn a_removed_observer_does_not_run_so_its_user_pointer_may_be_freed() {
    unsafe extern "C" fn alive(_: *const vramp_event_t, user: *mut c_void) {
        // SAFETY: the test frees it only after the observer was removed.
        let alive = unsafe { &*user.cast::<AtomicBool>() };
        assert!(alive.load(Ordering::SeqCst));
    }
    let allocator = open("");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let stream = stream(allocator);
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(pair(allocator, stream), Ok(()));
                }
            });
        }
        let mut last = 0;
        for _ in 0..500 {
            let user = Box::new(AtomicBool::new(true));
            let mut registration = 0;
            let raw = (&raw const *user).cast_mut().cast();
            // SAFETY: `user` lives until the observer is removed.
            let status = unsafe { vramp_observe(allocator, Some(alive), raw, &mut registration) };
            assert_eq!(status, VRAMP_OK);
            assert!(registration > last, "numbers are not used again");
            last = registration;
            assert_eq!(vramp_unobserve(allocator, registration), VRAMP_OK);
            user.store(false, Ordering::SeqCst);
            drop(user);
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn observers_that_remove_each_other_and_themselves_do_not_wait() {
    finishes(|| {
        let allocator = open("");
        let stream = stream(allocator);
        let registrations = &*Box::leak(Box::new(Mutex::new(Vec::new())));
        for _ in 0..2 {
            let registration = observe(allocator, move |_| {
                for registration in std::mem::take(&mut *registrations.lock().unwrap()) {
                    assert_eq!(vramp_unobserve(allocator, registration), VRAMP_OK);
                }
            });
            registrations.lock().unwrap().push(registration);
        }
        assert_eq!(pair(allocator, stream), Ok(()));
        assert_eq!(vramp_unobserve(allocator, 1), VRAMP_ERROR_RANGE);
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    });
}

#[test]
fn closes_meet_opens_that_reuse_their_slots() {
    finishes(|| {
        let stale = &*Box::leak(Box::new(Mutex::new(Vec::new())));
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(move || {
                    for _ in 0..60 {
                        let allocator = open("");
                        let stream = stream(allocator);
                        stale.lock().unwrap().push((allocator, stream));
                        observe(allocator, move |_| assert!(stats(allocator).placed > 0));
                        assert_eq!(pair(allocator, stream), Ok(()));
                        // Of two closes one succeeds.
                        let other = thread::spawn(move || vramp_close(allocator));
                        let mut both = [vramp_close(allocator), other.join().unwrap()];
                        both.sort_by_key(|status| *status as u32);
                        assert_eq!(both, [VRAMP_OK, VRAMP_ERROR_UNKNOWN_ALLOCATOR]);
                    }
                });
            }
            scope.spawn(move || {
                for _ in 0..20_000 {
                    let handles = stale.lock().unwrap().last().copied();
                    let Some((allocator, stream)) = handles else { continue };
                    let done = malloc(allocator, 64, stream);
                    assert!(matches!(done, Ok(_) | Err(VRAMP_ERROR_UNKNOWN_ALLOCATOR)), "{done:?}");
                }
            });
        });
    });
}

#[test]
fn a_history_is_bounded_and_says_by_what() {
    let allocator = open("");
    assert_eq!(vramp_record_history(allocator, u32::MAX), VRAMP_ERROR_RANGE);
    assert!(last_error().contains("use at most 10000000"), "{}", last_error());
    assert_eq!(vramp_record_history(allocator, 10_000_000), VRAMP_OK);
    let mut registration = 0;
    // SAFETY: null is what the function must withstand.
    let status = unsafe { vramp_observe(allocator, None, null_mut(), &mut registration) };
    assert_eq!((status, registration), (VRAMP_ERROR_NULL, 0));
    // A history is no observer of the caller's.
    assert!((0..10).all(|number| vramp_unobserve(allocator, number) == VRAMP_ERROR_RANGE));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_thread_that_ends_has_a_message_that_says_so() {
    struct AtTheEnd;
    static TEXT: Mutex<String> = Mutex::new(String::new());
    impl Drop for AtTheEnd {
        fn drop(&mut self) {
            assert_eq!(vramp_close(vramp_allocator_t::default()), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
            *TEXT.lock().unwrap() = last_error();
        }
    }
    thread_local! {
        static END: AtTheEnd = const { AtTheEnd };
    }
    thread::spawn(|| {
        // Destroyed after the library's own storage, which is used later.
        END.with(|_| ());
        assert_eq!(vramp_close(vramp_allocator_t::default()), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
        assert!(last_error().contains("the allocator is zero"));
    })
    .join()
    .unwrap();
    let text = TEXT.lock().unwrap();
    assert!(text.contains("the thread is ending"), "{text}");
}
