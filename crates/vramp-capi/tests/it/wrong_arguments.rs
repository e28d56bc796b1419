//! Every function with invalid arguments: it returns an error and changes nothing.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};

use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{
    vramp_allocator_t, vramp_arena_report_t, vramp_arena_t, vramp_capture_report_t, vramp_event_t,
    vramp_export_t, vramp_graph_t, vramp_lease_t, vramp_pin_t, vramp_shortage_t, vramp_stats_t,
    vramp_stream_t,
};
use vramp_capi::graphs::*;
use vramp_capi::interface::{vramp_close, *};
use vramp_capi::kept::abi::*;
use vramp_capi::kept::locks::*;
use vramp_capi::kept::*;
use vramp_capi::queries::*;
use vramp_capi::sharing::{vramp_comm_pool, *};
use vramp_capi::sleep::abi::vramp_region_phase_t::*;
use vramp_capi::sleep::abi::*;
use vramp_capi::sleep::callbacks::vramp_region_around_sleep;
use vramp_capi::sleep::*;
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::buffers::*;
use vramp_capi::tiers::leases::*;
use vramp_capi::tiers::observing::*;
use vramp_capi::tiers::reservations::*;
use vramp_capi::tiers::spaces::*;
use vramp_capi::tiers::*;

use crate::common::*;

unsafe extern "C" fn ignore(_: *const vramp_event_t, _: *mut c_void) {}

unsafe extern "C" fn frees_nothing(_: *const vramp_shortage_t, _: *mut c_void) -> c_int {
    0
}

unsafe extern "C" fn ignore_stat(_: *const c_char, _: u64, _: *mut c_void) {}

/// Calls every function that takes an allocator.
fn every_call(allocator: vramp_allocator_t, stream: vramp_stream_t) -> Vec<vramp_status_t> {
    let mut address = null_mut();
    let mut made = vramp_stream_t::default();
    let (mut size, mut registration) = (0, 0);
    let mut stats = vramp_stats_t { struct_size: 136, ..vramp_stats_t::default() };
    let mut device = no_device();
    let mut raw = null_mut();
    let block = 0x1000 as *mut c_void;
    let (mut arena, mut graph) = (vramp_arena_t { id: 1 }, vramp_graph_t { id: 1 });
    let mut lease = vramp_lease_t { id: 1 };
    let mut memory = vramp_arena_report_t { struct_size: 56, ..vramp_arena_report_t::default() };
    let mut needed =
        vramp_capture_report_t { struct_size: 64, ..vramp_capture_report_t::default() };
    let (mut exported, mut pin) = (vramp_export_t { id: 1 }, vramp_pin_t { id: 1 });
    let (mut ticket, mut pool, mut number) = (no_ticket(), vramp_allocator_t::default(), 0);
    let mut sharing = no_sharing();
    // SAFETY: every result outlives its call.
    unsafe {
        vec![
            vramp_stream_create(allocator, &mut made),
            vramp_stream_adopt(allocator, null_mut(), &mut made),
            vramp_stream_forget(allocator, stream),
            vramp_malloc(allocator, 1, stream, &mut address),
            vramp_free(allocator, block, stream),
            vramp_record_use(allocator, block, stream),
            vramp_usable_size(allocator, block, &mut size),
            vramp_trim(allocator, 0),
            vramp_stats(allocator, &mut stats),
            vramp_audit(allocator),
            vramp_set_limit(allocator, 0),
            vramp_record_history(allocator, 10),
            vramp_snapshot(allocator, c"/nowhere/at/all".as_ptr()),
            vramp_observe(allocator, Some(ignore), null_mut(), &mut registration),
            vramp_unobserve(allocator, 1),
            vramp_device(allocator, &mut device),
            vramp_stream_raw(allocator, stream, &mut raw),
            vramp_stream_synchronize(allocator, stream),
            vramp_free_on_own_stream(allocator, block),
            vramp_reset_peaks(allocator),
            vramp_memory_stats(allocator, Some(ignore_stat), null_mut()),
            vramp_on_shortage(allocator, Some(frees_nothing), null_mut(), &mut registration),
            vramp_arena_create(allocator, null(), &mut arena),
            vramp_arena_destroy(allocator, arena),
            vramp_arena_reset(allocator, arena),
            vramp_arena_report(allocator, arena, &mut memory),
            vramp_capture_begin(allocator, stream, arena),
            vramp_capture_end(allocator, arena, &mut graph),
            vramp_capture_attach(allocator, stream, arena),
            vramp_capture_detach(allocator, arena, &mut graph),
            vramp_graph_launch(allocator, graph, stream, &mut lease),
            vramp_lease_end(allocator, lease),
            vramp_graph_report(allocator, graph, &mut needed),
            vramp_graph_destroy(allocator, graph),
            vramp_export(allocator, block, &mut exported),
            vramp_export_ticket(allocator, exported, 1, &mut ticket),
            vramp_export_is_held(allocator, exported, null_mut(), null_mut()),
            vramp_export_wait(allocator, exported, 0, null_mut()),
            vramp_export_close(allocator, exported),
            vramp_import(allocator, &ticket, &mut address, &mut size),
            vramp_import_record_use(allocator, block, stream),
            vramp_import_close(allocator, block),
            vramp_grant_access(allocator, 1, null_mut(), null_mut()),
            vramp_revoke_access(allocator, 1, null_mut(), null_mut()),
            vramp_pin(allocator, block, 1, &mut pin),
            vramp_unpin(allocator, pin),
            vramp_export_dma_buf(allocator, block, 1, &mut number, &mut size, &mut pin),
            vramp_comm_pool(allocator, null(), &mut pool),
            vramp_sharing(allocator, &mut sharing),
            vramp_close(allocator),
        ]
    }
}

#[test]
fn a_zero_closed_or_made_up_allocator_is_unknown_to_every_function() {
    let allocator = open("");
    let stream = stream(allocator);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    // Ids near this one may be given out by tests that run at the same time.
    let later = allocator.id + (1 << 40);
    let numbers = [0, 1, allocator.id, later, allocator.id ^ 1, u64::MAX, 1 << 63];
    for id in numbers {
        let statuses = every_call(vramp_allocator_t { id }, stream);
        assert_eq!(statuses, [VRAMP_ERROR_UNKNOWN_ALLOCATOR; 50], "{id:#x}: {}", last_error());
    }
    assert!(last_error().contains("closed or was never opened"));
}

#[test]
fn null_results_are_refused_before_anything_happens() {
    let allocator = open("");
    let stream = stream(allocator);
    let (mut address, mut size, mut number) = (null_mut(), 0, 0);
    let mut pin = vramp_pin_t::default();
    // SAFETY: null is what the functions must withstand.
    let statuses = unsafe {
        [
            vramp_open(c"sim".as_ptr(), null(), null_mut()),
            vramp_stream_create(allocator, null_mut()),
            vramp_stream_adopt(allocator, null_mut(), null_mut()),
            vramp_malloc(allocator, 64, stream, null_mut()),
            vramp_usable_size(allocator, null_mut(), null_mut()),
            vramp_stats(allocator, null_mut()),
            vramp_arena_create(allocator, null(), null_mut()),
            vramp_arena_report(allocator, vramp_arena_t::default(), null_mut()),
            vramp_capture_end(allocator, vramp_arena_t::default(), null_mut()),
            vramp_capture_detach(allocator, vramp_arena_t::default(), null_mut()),
            vramp_graph_report(allocator, vramp_graph_t::default(), null_mut()),
            vramp_export(allocator, null_mut(), null_mut()),
            vramp_export_ticket(allocator, vramp_export_t::default(), 0, null_mut()),
            vramp_export_revoke(allocator, vramp_export_t::default(), null(), null_mut()),
            vramp_import(allocator, null(), &mut address, null_mut()),
            vramp_import(allocator, &no_ticket(), null_mut(), null_mut()),
            vramp_pin(allocator, null_mut(), 1, null_mut()),
            vramp_export_dma_buf(allocator, null_mut(), 1, null_mut(), &mut size, &mut pin),
            vramp_export_dma_buf(allocator, null_mut(), 1, &mut number, null_mut(), &mut pin),
            vramp_export_dma_buf(allocator, null_mut(), 1, &mut number, &mut size, null_mut()),
            vramp_comm_pool(allocator, null(), null_mut()),
            vramp_sharing(allocator, null_mut()),
        ]
    };
    assert_eq!(statuses, [VRAMP_ERROR_NULL; 22]);
    assert_eq!(stats(allocator).placed, 0);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn null_texts_mean_the_defaults() {
    let mut allocator = vramp_allocator_t::default();
    // SAFETY: the text has a zero at its end, and the result outlives the call.
    let options = unsafe { vramp_open(c"sim".as_ptr(), null(), &mut allocator) };
    assert_eq!(options, VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    // SAFETY: the result outlives the call.
    match unsafe { vramp_open(null(), null(), &mut allocator) } {
        // On a card, or where VRAMP_DEVICE names a device.
        VRAMP_OK => assert_eq!(vramp_close(allocator), VRAMP_OK),
        refused => {
            assert_eq!(refused, VRAMP_ERROR_DEVICE);
            assert!(last_error().contains("set VRAMP_DEVICE=sim"), "{}", last_error());
        }
    }
}

#[test]
fn errors_for_invalid_texts_name_valid_ones() {
    let refused = |device, options, says: &str| {
        let status = open_on(device, options).expect_err("it cannot be opened");
        assert!(last_error().contains(says), "{}", last_error());
        status
    };
    assert_eq!(refused("gpu", "", "use auto, sim, sim:CARD"), VRAMP_ERROR_DEVICE);
    assert_eq!(refused("cuda:4000000000", "", "sim"), VRAMP_ERROR_DEVICE);
    assert_eq!(refused("sim", "colour=red", "use preset, limit"), VRAMP_ERROR_OPTION);
    assert_eq!(refused("sim", "limit=lots", "80GiB"), VRAMP_ERROR_OPTION);
    assert_eq!(refused("sim", "page=3KiB", "multiple"), VRAMP_ERROR_OPTION);
    assert_eq!(refused("sim", "limit=1", "use at least that"), VRAMP_ERROR_OPTION);
    assert_eq!(refused("sim", "span=1", "a span of 1 B is not possible"), VRAMP_ERROR_OPTION);
    assert_eq!(refused("sim", "page=6MiB", "power of two"), VRAMP_ERROR_OPTION);
    for options in ["page=16MiB", "page=512MiB", "span=2MiB", "limit=2MiB"] {
        let allocator = open(options);
        let stream = stream(allocator);
        assert!(malloc(allocator, 100, stream).is_ok(), "{options}: {}", last_error());
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    }
    assert_eq!(refused("sim", "prefill=900GiB", "use a smaller prefill"), VRAMP_ERROR_OPTION);
    let mut allocator = vramp_allocator_t::default();
    // SAFETY: the texts end with zeros and the result outlives the call.
    let status = unsafe { vramp_open(c"sim".as_ptr(), c"\xff=1".as_ptr(), &mut allocator) };
    assert_eq!((status, allocator), (VRAMP_ERROR_TEXT, vramp_allocator_t::default()));
}

#[test]
fn foreign_and_made_up_streams_are_refused() {
    let (mine, other) = (open(""), open(""));
    let (own, foreign) = (stream(mine), stream(other));
    let block = malloc(mine, 4096, own).unwrap();
    let made_up = [0, 1, own.id + 1, own.id & !0xffff_ffff, own.id | 0xffff_ffff, u64::MAX];
    for id in made_up.into_iter().chain([foreign.id]) {
        let wrong = vramp_stream_t { id };
        assert_eq!(malloc(mine, 64, wrong), Err(VRAMP_ERROR_UNKNOWN_STREAM), "{id:#x}");
        assert_eq!(vramp_free(mine, block, wrong), VRAMP_ERROR_UNKNOWN_STREAM, "{id:#x}");
        assert_eq!(vramp_record_use(mine, block, wrong), VRAMP_ERROR_UNKNOWN_STREAM, "{id:#x}");
        assert_eq!(vramp_stream_forget(mine, wrong), VRAMP_ERROR_UNKNOWN_STREAM, "{id:#x}");
    }
    assert_eq!(vramp_free(mine, block, own), VRAMP_OK, "the block is still held");
    assert_eq!(stats(mine).live, 0);
    assert_eq!((vramp_close(mine), vramp_close(other)), (VRAMP_OK, VRAMP_OK));
}

#[test]
fn the_stream_that_each_thread_has_of_its_own_has_a_handle_in_each() {
    // `cudaStreamPerThread`. Two threads that had one handle would have each the other's memory.
    let allocator = open("");
    let own = adopt(allocator, 2).unwrap();
    let block = malloc(allocator, 4096, own).unwrap();
    let (addr, mine) = (block as usize, own.id);
    let elsewhere = std::thread::spawn(move || {
        let other = adopt(allocator, 2).unwrap();
        assert_ne!(other.id, mine);
        assert_eq!(adopt(allocator, 2), Ok(other));
        let theirs = malloc(allocator, 4096, other).unwrap();
        assert_ne!(theirs as usize, addr);
        assert_eq!(vramp_free(allocator, theirs, other), VRAMP_OK);
        // The handle of another thread's stream is good for a free of its block.
        let freed = vramp_free(allocator, addr as *mut c_void, vramp_stream_t { id: mine });
        assert_eq!(freed, VRAMP_OK);
        other
    });
    let ended = elsewhere.join().unwrap();
    assert_eq!(malloc(allocator, 4096, ended), Err(VRAMP_ERROR_UNKNOWN_STREAM));
    assert_eq!(vramp_stream_forget(allocator, own), VRAMP_OK);
    assert_ne!(adopt(allocator, 2), Ok(own), "a forgotten one is made anew");
    // The legacy stream by its number and as null.
    for raw in [0, 1] {
        let stream = adopt(allocator, raw).unwrap();
        assert_eq!(adopt(allocator, raw), Ok(stream));
    }
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn addresses_that_are_not_a_block_are_refused() {
    for preset in ["vramp", "vpmm", "stream-ordered"] {
        // Two cards: the simulator gives both the same addresses.
        let (mine, other) = (open(&format!("preset={preset}")), open(""));
        let (own, theirs) = (stream(mine), stream(other));
        let block = malloc(mine, 3 << 20, own).unwrap();
        let foreign = malloc(other, 64 << 20, theirs).unwrap();
        let inside = block.wrapping_byte_add(512);
        let wild = usize::MAX as *mut c_void;
        for wrong in [
            null_mut(),
            inside,
            block.wrapping_byte_add(1),
            wild,
            foreign.wrapping_byte_add(32 << 20),
        ] {
            let mut size = 0;
            assert_eq!(vramp_free(mine, wrong, own), VRAMP_ERROR_UNKNOWN_POINTER, "{wrong:p}");
            assert_eq!(vramp_record_use(mine, wrong, own), VRAMP_ERROR_UNKNOWN_POINTER);
            // SAFETY: the result outlives the call.
            let status = unsafe { vramp_usable_size(mine, wrong, &mut size) };
            assert_eq!((status, size), (VRAMP_ERROR_UNKNOWN_POINTER, 0));
        }
        assert_eq!(vramp_free(mine, inside, own), VRAMP_ERROR_UNKNOWN_POINTER);
        assert!(last_error().contains("lies 512 bytes inside the block"), "{}", last_error());
        assert_eq!(vramp_free(mine, block, own), VRAMP_OK);
        assert_eq!(vramp_free(mine, block, own), VRAMP_ERROR_UNKNOWN_POINTER, "free twice");
        assert!(last_error().contains("freed already"), "{}", last_error());
        assert_eq!(vramp_record_use(mine, block, own), VRAMP_ERROR_UNKNOWN_POINTER);
        assert_eq!(vramp_audit(mine), VRAMP_OK);
        assert_eq!((vramp_close(mine), vramp_close(other)), (VRAMP_OK, VRAMP_OK));
    }
}

#[test]
fn sizes_at_the_ends_of_their_range_are_served_or_refused() {
    for preset in ["vramp", "vpmm", "stream-ordered"] {
        let allocator = open(&format!("preset={preset}"));
        let stream = stream(allocator);
        let nothing = [malloc(allocator, 0, stream), malloc(allocator, 0, stream)];
        assert!(nothing.iter().all(|block| block.is_ok_and(|block| !block.is_null())), "{preset}");
        assert_ne!(nothing[0], nothing[1]);
        for size in [usize::MAX, usize::MAX - 511, usize::MAX >> 1, 1 << 62, 1 << 47] {
            let status = malloc(allocator, size, stream).expect_err("no card is so large");
            assert_eq!(status, VRAMP_ERROR_OUT_OF_MEMORY, "{preset}, {size:#x}: {}", last_error());
        }
        assert_eq!(vramp_audit(allocator), VRAMP_OK);
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    }
}

#[test]
fn the_out_of_memory_message_has_request_and_limit() {
    let allocator = open("limit=64MiB");
    let stream = stream(allocator);
    let block = malloc(allocator, 48 << 20, stream).unwrap();
    assert_eq!(malloc(allocator, 32 << 20, stream), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    let text = last_error();
    assert!(
        text.contains("tried to allocate 32.00 MiB") && text.contains("limit of 64.00 MiB"),
        "{text}"
    );
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert!(malloc(allocator, 64 << 20, stream).is_ok(), "all of it is free again");
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_forgotten_stream_takes_frees_and_nothing_else() {
    let allocator = open("");
    let stays = stream(allocator);
    let goes = adopt(allocator, 0xabc0).unwrap();
    assert_eq!(adopt(allocator, 0xabc0), Ok(goes), "adopting twice changes nothing");
    let small = malloc(allocator, 1000, goes).unwrap();
    let large = malloc(allocator, 32 << 20, goes).unwrap();
    let idle = malloc(allocator, 64 << 20, goes).unwrap();
    assert_eq!(vramp_free(allocator, idle, goes), VRAMP_OK);
    assert_eq!(vramp_stream_forget(allocator, goes), VRAMP_OK);
    assert_eq!(vramp_stream_forget(allocator, goes), VRAMP_ERROR_UNKNOWN_STREAM);
    assert_eq!(malloc(allocator, 64, goes), Err(VRAMP_ERROR_UNKNOWN_STREAM));
    assert!(last_error().contains("was forgotten"), "{}", last_error());
    assert_eq!(vramp_record_use(allocator, small, goes), VRAMP_ERROR_UNKNOWN_STREAM);
    assert_eq!(vramp_free(allocator, small, goes), VRAMP_OK, "{}", last_error());
    let before = stats(allocator).reserved;
    let again = malloc(allocator, 64 << 20, stays).unwrap();
    assert_eq!(stats(allocator).reserved, before, "what the stream left behind is used again");
    for block in [large, again] {
        assert_eq!(vramp_free(allocator, block, stays), VRAMP_OK, "{}", last_error());
    }
    assert_ne!(adopt(allocator, 0xabc0), Ok(goes), "a new stream at an old address is a new one");
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_trim(allocator, 0), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn stats_write_at_most_the_size_of_the_callers_struct() {
    let allocator = open("");
    let stream = stream(allocator);
    malloc(allocator, 5000, stream).unwrap();
    let mut fields = [7u64; 32];
    let ask = |fields: &mut [u64; 32]| {
        // SAFETY: the array is at least as large as its first number says.
        unsafe { vramp_stats(allocator, fields.as_mut_ptr().cast()) }
    };
    for size in [0, 7, 15] {
        fields[0] = size;
        assert_eq!(ask(&mut fields), VRAMP_ERROR_STRUCT_SIZE);
        assert_eq!(fields[1..], [7; 31]);
    }
    fields[0] = 16;
    assert_eq!(ask(&mut fields), VRAMP_OK);
    assert_eq!((fields[0], fields[1], fields[2]), (16, 5000, 7), "an older caller's struct");
    fields[0] = 256;
    assert_eq!(ask(&mut fields), VRAMP_OK);
    let len = size_of::<vramp_stats_t>();
    assert_eq!((fields[0] as usize, fields[len / 8]), (len, 7), "a newer caller's struct");
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn every_code_has_its_name() {
    // SAFETY: names end with zeros and live for ever.
    let name = |code| unsafe { CStr::from_ptr(vramp_status_name(code)) }.to_str().unwrap();
    assert_eq!(name(VRAMP_OK as i32), format!("{VRAMP_OK:?}"));
    let codes = [
        VRAMP_ERROR_NULL,
        VRAMP_ERROR_TEXT,
        VRAMP_ERROR_OPTION,
        VRAMP_ERROR_DEVICE,
        VRAMP_ERROR_UNKNOWN_ALLOCATOR,
        VRAMP_ERROR_UNKNOWN_STREAM,
        VRAMP_ERROR_UNKNOWN_POINTER,
        VRAMP_ERROR_OUT_OF_MEMORY,
        VRAMP_ERROR_DRIVER,
        VRAMP_ERROR_TOO_MANY,
        VRAMP_ERROR_STRUCT_SIZE,
        VRAMP_ERROR_IN_USE,
        VRAMP_ERROR_RANGE,
        VRAMP_ERROR_INCONSISTENT,
        VRAMP_ERROR_INTERNAL,
        VRAMP_ERROR_FILE,
        VRAMP_ERROR_UNKNOWN_ARENA,
        VRAMP_ERROR_UNKNOWN_GRAPH,
        VRAMP_ERROR_UNKNOWN_LEASE,
        VRAMP_ERROR_BUSY,
        VRAMP_ERROR_CAPTURE,
        VRAMP_ERROR_UNSUPPORTED,
        VRAMP_ERROR_FORKED,
        VRAMP_ERROR_VERSION,
        VRAMP_ERROR_UNKNOWN_EXPORT,
        VRAMP_ERROR_UNKNOWN_PIN,
        VRAMP_ERROR_TICKET,
        VRAMP_ERROR_EXPORT_ENDED,
        VRAMP_ERROR_EXCHANGE,
        VRAMP_ERROR_NO_TIERS,
        VRAMP_ERROR_UNKNOWN_SPACE,
        VRAMP_ERROR_UNKNOWN_RESERVATION,
        VRAMP_ERROR_UNKNOWN_BUFFER,
        VRAMP_ERROR_TIMEOUT,
        VRAMP_ERROR_CANCELLED,
        VRAMP_ERROR_DEADLOCK,
        VRAMP_ERROR_CONTENTS,
        VRAMP_ERROR_REGION,
        VRAMP_ERROR_OVER_RESERVATION,
        VRAMP_ERROR_CALLBACK,
        VRAMP_ERROR_NOT_KEPT,
        VRAMP_ERROR_KEPT_BUSY,
        VRAMP_ERROR_TORN,
        VRAMP_ERROR_KEEPER,
        VRAMP_ERROR_UNKNOWN_KEPT,
    ];
    for code in codes {
        assert_eq!(name(code as i32), format!("{code:?}"));
    }
    for code in [-1, 46, i32::MAX, i32::MIN] {
        assert_eq!(name(code), "unknown");
    }
    // SAFETY: the version ends with a zero and lives for ever.
    let version = unsafe { CStr::from_ptr(vramp_version()) };
    assert_eq!(version.to_str().unwrap(), env!("CARGO_PKG_VERSION"));
}

/// Calls every function of kept memory.
fn every_kept_call(allocator: vramp_allocator_t) -> Vec<vramp_status_t> {
    let (mut keeper, mut kept) = (vramp_keeper_t { id: 1 }, vramp_kept_t { id: 1 });
    let (mut state, mut entry) = (no_kept_state(), no_entry());
    let (mut address, mut count, mut freed) = (null_mut(), 0, 0);
    let options = kept_options();
    // SAFETY: every text, struct and result outlives its call.
    unsafe {
        vec![
            vramp_keeper_open(allocator, c"/nowhere".as_ptr(), 0, &mut keeper),
            vramp_keeper_close(allocator, keeper),
            vramp_keeper_entries(allocator, keeper, &mut entry, 1, &mut count),
            vramp_keeper_remove(allocator, keeper, c"a".as_ptr()),
            vramp_keeper_evict(allocator, keeper, 1, &mut freed),
            vramp_kept_draft(allocator, keeper, c"a".as_ptr(), &options, 0, &mut kept),
            vramp_kept_place(allocator, kept, 1, &mut address),
            vramp_kept_commit(allocator, kept, null(), 0, null(), 0),
            vramp_kept_open(allocator, keeper, c"a".as_ptr(), null(), 0, &mut kept),
            vramp_kept_state(allocator, kept, &mut state),
            vramp_kept_layout(allocator, kept, null_mut(), 0, &mut count),
            vramp_kept_record_use(allocator, kept, vramp_stream_t::default()),
            vramp_kept_read(allocator, kept, 0, null_mut()),
            vramp_kept_write(allocator, kept, 0, null_mut()),
            vramp_kept_unlock(allocator, kept),
            vramp_kept_yield_to_writer(allocator, kept, 0, null_mut()),
            vramp_kept_commit_update(allocator, kept, VRAMP_KEPT_READ, null_mut()),
            vramp_kept_release_unchanged(allocator, kept),
            vramp_kept_wait_newer(allocator, kept, 0, 0, null_mut()),
            vramp_kept_close(allocator, kept),
        ]
    }
}

fn kept_options() -> vramp_kept_options_t {
    let struct_size = size_of::<vramp_kept_options_t>() as u64;
    vramp_kept_options_t { struct_size, bytes: 1 << 20, ..vramp_kept_options_t::default() }
}

#[test]
fn wrong_allocators_and_handles_are_found_by_every_call_of_kept_memory() {
    let allocator = open("");
    let statuses = every_kept_call(allocator);
    assert_eq!(statuses[0], VRAMP_OK, "no message is sent");
    // The keeper of the first call does not run, and is closed by the second.
    assert_eq!(statuses[1], VRAMP_OK);
    assert_eq!(statuses[2..], [VRAMP_ERROR_UNKNOWN_KEPT; 18]);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    for wrong in [allocator, vramp_allocator_t::default(), vramp_allocator_t { id: u64::MAX }] {
        assert_eq!(every_kept_call(wrong), [VRAMP_ERROR_UNKNOWN_ALLOCATOR; 20]);
    }
}

#[test]
fn arguments_of_kept_memory_are_checked_before_a_message() {
    let allocator = open("");
    let (mut keeper, mut kept) = (vramp_keeper_t::default(), vramp_kept_t::default());
    let (mut count, name) = (0, c"a".as_ptr());
    let options = kept_options();
    let sizeless = vramp_kept_options_t { struct_size: 8, ..options };
    let nothing = vramp_kept_options_t { bytes: 0, ..options };
    let mut entry = vramp_kept_entry_t { struct_size: 0, ..no_entry() };
    let mut state = vramp_kept_state_t { struct_size: 0, ..no_kept_state() };
    let lock = vramp_kept_open_options_t {
        struct_size: size_of::<vramp_kept_open_options_t>() as u64,
        lock: 3,
        ..vramp_kept_open_options_t::default()
    };
    // SAFETY: null is what the functions must withstand; the rest outlives the calls.
    unsafe {
        let nowhere = c"/nowhere/at/all".as_ptr();
        assert_eq!(vramp_keeper_open(allocator, nowhere, 0, &mut keeper), VRAMP_OK);
        let nulls = [
            vramp_keeper_open(allocator, null(), 0, &mut keeper),
            vramp_keeper_open(allocator, nowhere, 0, null_mut()),
            vramp_keeper_entries(allocator, keeper, null_mut(), 0, null_mut()),
            vramp_keeper_entries(allocator, keeper, null_mut(), 1, &mut count),
            vramp_keeper_remove(allocator, keeper, null()),
            vramp_kept_draft(allocator, keeper, null(), &options, 0, &mut kept),
            vramp_kept_draft(allocator, keeper, name, null(), 0, &mut kept),
            vramp_kept_draft(allocator, keeper, name, &options, 0, null_mut()),
            vramp_kept_open(allocator, keeper, null(), null(), 0, &mut kept),
            vramp_kept_open(allocator, keeper, name, null(), 0, null_mut()),
            vramp_kept_place(allocator, kept, 1, null_mut()),
            vramp_kept_state(allocator, kept, null_mut()),
            vramp_kept_layout(allocator, kept, null_mut(), 0, null_mut()),
        ];
        assert_eq!(nulls, [VRAMP_ERROR_NULL; 13]);
        let sizes = [
            vramp_kept_draft(allocator, keeper, name, &sizeless, 0, &mut kept),
            vramp_keeper_entries(allocator, keeper, &mut entry, 1, &mut count),
            vramp_kept_state(allocator, kept, &mut state),
        ];
        assert_eq!(sizes, [VRAMP_ERROR_STRUCT_SIZE; 3]);
        let range = [
            vramp_kept_open(allocator, keeper, name, &lock, 0, &mut kept),
            vramp_kept_commit_update(allocator, kept, 3, null_mut()),
        ];
        assert_eq!(range, [VRAMP_ERROR_RANGE; 2], "{}", last_error());
        let option = [
            vramp_kept_draft(allocator, keeper, name, &nothing, 0, &mut kept),
            vramp_kept_draft(allocator, keeper, c"a b".as_ptr(), &options, 0, &mut kept),
            vramp_kept_open(allocator, keeper, c"".as_ptr(), null(), 0, &mut kept),
        ];
        assert_eq!(option, [VRAMP_ERROR_OPTION; 3], "{}", last_error());
        let text = vramp_keeper_remove(allocator, keeper, c"\xff".as_ptr());
        assert_eq!(text, VRAMP_ERROR_TEXT);
        let no_keeper = [
            vramp_kept_draft(allocator, keeper, name, &options, 0, &mut kept),
            vramp_kept_open(allocator, keeper, name, null(), 0, &mut kept),
            vramp_keeper_evict(allocator, keeper, 1, null_mut()),
            vramp_keeper_entries(allocator, keeper, null_mut(), 0, &mut count),
        ];
        assert_eq!(no_keeper, [VRAMP_ERROR_KEEPER; 4], "{}", last_error());
    }
    assert!(last_error().contains("start `vramp keep`"), "{}", last_error());
    assert_eq!(kept, vramp_kept_t::default(), "a failure leaves no handle behind");
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

fn every_region_call(allocator: vramp_allocator_t) -> Vec<vramp_status_t> {
    vec![
        begin(allocator, "a").err().unwrap_or(VRAMP_OK),
        disable(allocator).err().unwrap_or(VRAMP_OK),
        pause(allocator, &["a"]),
        resume(allocator, &["a"]),
        clean(allocator, &["a"]),
        on_pressure(allocator, &["a"]).err().unwrap_or(VRAMP_OK),
        states(allocator).err().unwrap_or(VRAMP_OK),
        remove(allocator, "a"),
        // SAFETY: the structs outlive the call.
        unsafe { vramp_region_around_sleep(allocator, null(), 0, &pair(c"a"), &mut 0) },
    ]
}

#[test]
fn a_wrong_allocator_is_found_by_every_region_call() {
    let allocator = open("");
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    for wrong in [allocator, vramp_allocator_t::default(), vramp_allocator_t { id: u64::MAX }] {
        assert_eq!(every_region_call(wrong), [VRAMP_ERROR_UNKNOWN_ALLOCATOR; 9]);
    }
}

fn pair(name: &'static std::ffi::CStr) -> vramp_sleep_callbacks_t {
    vramp_sleep_callbacks_t {
        struct_size: size_of::<vramp_sleep_callbacks_t>() as u64,
        name: name.as_ptr(),
        before: None,
        after: None,
        user: null_mut(),
        is_collective: 0,
    }
}

#[test]
fn null_pointers_are_refused_and_change_nothing() {
    let allocator = open("");
    let (mut scope, mut count) = (vramp_region_scope_t::default(), 0);
    let (tags, nulls) = ([c"a".as_ptr()], [null()]);
    // SAFETY: null is what the functions must withstand.
    let statuses = unsafe {
        [
            vramp_region_begin(allocator, null(), null(), &mut scope),
            vramp_region_begin(allocator, c"a".as_ptr(), null(), null_mut()),
            vramp_region_disable(allocator, null_mut()),
            vramp_region_pause(allocator, null(), 1, null()),
            vramp_region_pause(allocator, nulls.as_ptr(), 1, null()),
            vramp_region_resume(allocator, null(), 1),
            vramp_region_resume(allocator, nulls.as_ptr(), 1),
            vramp_region_clean(allocator, nulls.as_ptr(), 1),
            vramp_region_on_pressure(allocator, nulls.as_ptr(), 1, &mut 0),
            vramp_region_on_pressure(allocator, tags.as_ptr(), 1, null_mut()),
            vramp_region_status(allocator, null_mut(), 0, null_mut()),
            vramp_region_status(allocator, null_mut(), 1, &mut count),
            vramp_region_remove(allocator, null()),
            vramp_region_around_sleep(allocator, nulls.as_ptr(), 1, &pair(c"a"), &mut 0),
            vramp_region_around_sleep(allocator, null(), 0, &pair(c"a"), null_mut()),
            vramp_region_around_sleep(allocator, null(), 0, null(), &mut 0),
        ]
    };
    assert_eq!(statuses, [VRAMP_ERROR_NULL; 16]);
    assert_eq!(states(allocator).unwrap(), []);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn structs_that_are_too_small_are_refused() {
    let allocator = open("");
    let (mut scope, mut count) = (vramp_region_scope_t::default(), usize::MAX);
    let region = vramp_region_options_t { struct_size: 15, ..vramp_region_options_t::default() };
    let pause = vramp_pause_options_t { struct_size: 0, ..vramp_pause_options_t::default() };
    let mut status = vramp_region_status_t { struct_size: 8, ..no_status() };
    // SAFETY: the structs outlive the call.
    let statuses = unsafe {
        [
            vramp_region_begin(allocator, c"a".as_ptr(), &region, &mut scope),
            vramp_region_pause(allocator, null(), 0, &pause),
            vramp_region_status(allocator, &mut status, 1, &mut count),
        ]
    };
    assert_eq!(statuses, [VRAMP_ERROR_STRUCT_SIZE; 3]);
    assert_eq!((count, states(allocator).unwrap().len()), (usize::MAX, 0));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_wrong_tag_names_those_that_there_are_and_changes_nothing() {
    let allocator = open("");
    for call in [pause, resume, clean] {
        assert_eq!(call(allocator, &["a"]), VRAMP_ERROR_REGION, "there is none");
    }
    assert_eq!(on_pressure(allocator, &[]), Err(VRAMP_ERROR_REGION));
    let stream = stream(allocator);
    let scope = begin(allocator, "weights").unwrap();
    malloc(allocator, 4 << 20, stream).unwrap();
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    for call in [pause, resume, clean] {
        assert_eq!(call(allocator, &["weights", "wieghts"]), VRAMP_ERROR_REGION);
        assert!(last_error().contains("[\"weights\"]"), "{}", last_error());
    }
    assert_eq!(on_pressure(allocator, &["wieghts"]), Err(VRAMP_ERROR_REGION));
    assert_eq!(state(allocator, "weights").phase, VRAMP_REGION_AWAKE);
    assert_eq!(state(allocator, "weights").to_copy, 0);
    let broken = [c"\xff".as_ptr()];
    // SAFETY: the text ends with a zero.
    let status = unsafe { vramp_region_pause(allocator, broken.as_ptr(), 1, null()) };
    assert_eq!(status, VRAMP_ERROR_TEXT);
    // SAFETY: as many tags are refused before they are read.
    let status = unsafe { vramp_region_resume(allocator, broken.as_ptr(), usize::MAX) };
    assert_eq!(status, VRAMP_ERROR_RANGE);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn options_that_cannot_be_or_differ_are_refused() {
    let allocator = open("");
    for unknown in [3, u32::MAX] {
        let options = region_options(unknown, false);
        assert_eq!(begin_with(allocator, "a", &options), Err(VRAMP_ERROR_RANGE));
        assert!(last_error().contains("VRAMP_BACKUP_NONE"), "{}", last_error());
    }
    assert_eq!(states(allocator).unwrap(), []);
    assert_eq!(vramp_region_end(begin(allocator, "a").unwrap()), VRAMP_OK);
    for other in [region_options(VRAMP_BACKUP_NONE, false), region_options(VRAMP_BACKUP_HOST, true)]
    {
        assert_eq!(begin_with(allocator, "a", &other), Err(VRAMP_ERROR_OPTION));
    }
    // No scope was left behind.
    let stream = stream(allocator);
    malloc(allocator, 4 << 20, stream).unwrap();
    assert_eq!(state(allocator, "a").on_card, 0);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_pool_for_communication_libraries_has_no_regions() {
    let allocator = open("");
    let mut comm = vramp_allocator_t::default();
    // SAFETY: the result outlives the call.
    assert_eq!(unsafe { vramp_comm_pool(allocator, null(), &mut comm) }, VRAMP_OK);
    assert_eq!(begin(comm, "a"), Err(VRAMP_ERROR_UNSUPPORTED));
    assert_eq!(disable(comm), Err(VRAMP_ERROR_UNSUPPORTED));
    assert_eq!(states(comm).unwrap(), []);
    assert_eq!(vramp_close(comm), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

unsafe extern "C" fn ignore_event(_: *const vramp_buffer_event_t, _: *mut c_void) {}

unsafe extern "C" fn ignore_text(_: *const c_char, _: *mut c_void) {}

/// Calls every function that needs tiers, with these objects.
fn every_tiers_call(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
    id: u64,
) -> Vec<vramp_status_t> {
    let (mut space, mut count, mut bytes) = ([DEVICE; 2], 0, 0);
    let mut stats = vramp_space_stats_t { struct_size: 152, ..vramp_space_stats_t::default() };
    let mut about =
        vramp_reservation_info_t { struct_size: 48, ..vramp_reservation_info_t::default() };
    let mut of_all = vramp_tiers_stats_t { struct_size: 184, ..vramp_tiers_stats_t::default() };
    let mut registration = 0;
    let (mut of_buffer, mut memory) = (no_info(), [0_u8; 8]);
    let at = memory.as_mut_ptr().cast::<c_void>();
    let (mut reservation, mut buffer) = (vramp_reservation_t { id }, vramp_buffer_t { id });
    let mut lease = vramp_buffer_lease_t { id };
    let uses = [vramp_buffer_use_t { buffer, access: VRAMP_ACCESS_WRITE }];
    let (held, kept) = (lease, reservation);
    // SAFETY: every result outlives its call.
    unsafe {
        vec![
            vramp_spaces(allocator, space.as_mut_ptr(), 2, &mut count),
            vramp_space_stats(allocator, DEVICE, &mut stats),
            vramp_space_reset_peak(allocator, DEVICE),
            vramp_reserve(allocator, DEVICE, 1, 0, 0, &mut reservation),
            vramp_reserve_up_to(allocator, DEVICE, 0, 1, &mut reservation, null_mut()),
            vramp_buffer_create(allocator, 4096, &mut buffer),
            vramp_evict(allocator, 0, &mut bytes),
            vramp_tiers_stats(allocator, &mut of_all),
            vramp_tiers_failures(allocator, Some(ignore_text), null_mut()),
            vramp_buffers_observe(allocator, Some(ignore_event), null_mut(), &mut registration),
            vramp_sync_and_unlock(allocator, stream),
            // From here on calls that need an object.
            vramp_reservation_info(allocator, kept, &mut about),
            vramp_reservation_grow(allocator, kept, 1, 0),
            vramp_reservation_shrink(allocator, kept, &mut bytes),
            vramp_reservation_attach(allocator, kept, stream),
            vramp_reservation_detach(allocator, kept),
            vramp_reservation_release(allocator, kept),
            vramp_buffer_info(allocator, uses[0].buffer, &mut of_buffer),
            vramp_buffer_set_priority(allocator, uses[0].buffer, 1),
            vramp_buffer_hint(allocator, uses[0].buffer, VRAMP_HINT_WILL_NEED),
            vramp_buffer_prefetch(allocator, uses[0].buffer),
            vramp_buffer_write(allocator, uses[0].buffer, 0, at, 8),
            vramp_buffer_read(allocator, uses[0].buffer, 0, at, 8),
            vramp_buffer_discard(allocator, uses[0].buffer),
            vramp_buffer_retrieve(allocator, uses[0].buffer, 0),
            vramp_buffer_spill(allocator, uses[0].buffer, &mut bytes),
            vramp_buffer_spill_to(allocator, uses[0].buffer, VRAMP_TIER_DISK, &mut bytes),
            vramp_lock(allocator, uses.as_ptr(), 1, stream, 0, null_mut()),
            vramp_buffers_lease(allocator, uses.as_ptr(), 1, stream, 0, null_mut(), &mut lease),
            vramp_buffer_destroy(allocator, uses[0].buffer),
            vramp_buffer_lease_wrote(allocator, held, 0, 0, 1),
            vramp_buffer_lease_end(allocator, held),
            vramp_buffer_lease_cancel(allocator, held),
            vramp_unlock(allocator, stream),
        ]
    }
}

/// Calls of [`every_tiers_call`] that need no object, buffers, reservations and leases.
const COUNTS: [usize; 4] = [11, 6, 13, 4];

#[test]
fn an_unknown_allocator_or_one_without_tiers_is_an_error_of_every_function() {
    let allocator = open("");
    let stream = stream(allocator);
    let calls = COUNTS.iter().sum();
    assert_eq!(every_tiers_call(allocator, stream, 1), vec![VRAMP_ERROR_NO_TIERS; calls]);
    assert_eq!(vramp_tiers_close(allocator), VRAMP_ERROR_NO_TIERS);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    for id in [0, 1, allocator.id, u64::MAX] {
        let unknown = vramp_allocator_t { id };
        let statuses = every_tiers_call(unknown, stream, 1);
        assert_eq!(statuses, vec![VRAMP_ERROR_UNKNOWN_ALLOCATOR; calls], "{id:#x}");
        assert_eq!(open_tiers(unknown, &options(0, MIB)), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
        assert_eq!(vramp_tiers_close(unknown), VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    }
}

#[test]
fn a_made_up_object_is_an_error_of_every_function() {
    let allocator = open_with_tiers(256, 64 * MIB);
    let stream = stream(allocator);
    for id in [0, u64::MAX, 1 << 63] {
        let statuses = every_tiers_call(allocator, stream, id);
        let expected = [
            (VRAMP_OK, COUNTS[0]),
            (VRAMP_ERROR_UNKNOWN_RESERVATION, COUNTS[1]),
            (VRAMP_ERROR_UNKNOWN_BUFFER, COUNTS[2]),
            (VRAMP_ERROR_UNKNOWN_LEASE, COUNTS[3]),
        ];
        let expected: Vec<_> =
            expected.into_iter().flat_map(|(status, count)| vec![status; count]).collect();
        assert_eq!(statuses, expected, "{id:#x}");
    }
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn null_results_of_tiers_are_refused_before_anything_happens() {
    let allocator = open_with_tiers(256, 64 * MIB);
    let stream = stream(allocator);
    let before = space_stats(allocator, DEVICE).unwrap();
    let mut lease = vramp_buffer_lease_t::default();
    let (buffer, mut count, mut registration) = (vramp_buffer_t::default(), 0, 0);
    // SAFETY: null is what the functions must withstand.
    let statuses = unsafe {
        [
            vramp_tiers_open_with(allocator, null()),
            vramp_spaces(allocator, null_mut(), 0, null_mut()),
            vramp_spaces(allocator, null_mut(), 1, &mut count),
            vramp_space_stats(allocator, DEVICE, null_mut()),
            vramp_reserve(allocator, DEVICE, 1, 0, 0, null_mut()),
            vramp_reserve_up_to(allocator, DEVICE, 0, 1, null_mut(), null_mut()),
            vramp_reservation_info(allocator, vramp_reservation_t::default(), null_mut()),
            vramp_buffer_create(allocator, 4096, null_mut()),
            vramp_buffer_info(allocator, buffer, null_mut()),
            vramp_buffers_lease(allocator, null(), 1, stream, 0, null_mut(), &mut lease),
            vramp_buffers_lease(allocator, null(), 0, stream, 0, null_mut(), null_mut()),
            vramp_lock(allocator, null(), 1, stream, 0, null_mut()),
            vramp_tiers_stats(allocator, null_mut()),
            vramp_tiers_failures(allocator, None, null_mut()),
            vramp_buffers_observe(allocator, None, null_mut(), &mut registration),
            vramp_buffers_observe(allocator, Some(ignore_event), null_mut(), null_mut()),
        ]
    };
    assert_eq!(statuses, [VRAMP_ERROR_NULL; 16]);
    assert_eq!(space_stats(allocator, DEVICE).unwrap(), before);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn numbers_that_name_nothing_are_refused() {
    let allocator = open_with_tiers(256, 64 * MIB);
    let stream = stream(allocator);
    let one = buffer(allocator, 4096).unwrap();
    for tier in [3, u32::MAX] {
        let space = vramp_space_t { tier, index: 0 };
        assert_eq!(space_stats(allocator, space), Err(VRAMP_ERROR_RANGE));
        assert_eq!(reserve(allocator, space, 1, 0), Err(VRAMP_ERROR_RANGE));
    }
    for space in [
        vramp_space_t { tier: VRAMP_TIER_DEVICE, index: 1 },
        vramp_space_t { tier: VRAMP_TIER_DISK, index: 0 },
    ] {
        assert_eq!(space_stats(allocator, space), Err(VRAMP_ERROR_UNKNOWN_SPACE));
        assert_eq!(reserve(allocator, space, 1, 0), Err(VRAMP_ERROR_UNKNOWN_SPACE));
    }
    let no_disk = vramp_space_t { tier: VRAMP_TIER_DISK, index: VRAMP_ANY_INDEX };
    assert_eq!(reserve(allocator, no_disk, 1, 0), Err(VRAMP_ERROR_UNKNOWN_SPACE));
    assert_eq!(lease(allocator, &[(one, 7)], stream, 0), Err(VRAMP_ERROR_RANGE));
    assert_eq!(vramp_buffer_hint(allocator, one, 9), VRAMP_ERROR_RANGE);
    for tier in [VRAMP_TIER_DEVICE, VRAMP_TIER_PEER, u32::MAX] {
        // SAFETY: the result may be null.
        let status = unsafe { vramp_buffer_spill_to(allocator, one, tier, null_mut()) };
        assert_eq!(status, VRAMP_ERROR_RANGE);
    }
    assert_eq!(buffer(allocator, 0), Err(VRAMP_ERROR_RANGE), "{}", last_error());
    let mut lease_ = vramp_buffer_lease_t::default();
    // SAFETY: as many elements are refused before they are read.
    let status = unsafe {
        vramp_buffers_lease(allocator, null(), usize::MAX, stream, 0, null_mut(), &mut lease_)
    };
    assert_eq!(status, VRAMP_ERROR_RANGE);
    let foreign = vramp_stream_t { id: 7 };
    assert_eq!(lease(allocator, &[(one, 0)], foreign, 0), Err(VRAMP_ERROR_UNKNOWN_STREAM));
    let (held, _) = lease(allocator, &[(one, 0)], stream, 0).unwrap();
    assert_eq!(vramp_buffer_lease_wrote(allocator, held, 0, 0, 1), VRAMP_ERROR_UNSUPPORTED);
    assert_eq!(vramp_buffer_lease_wrote(allocator, held, 1, 0, 1), VRAMP_ERROR_RANGE);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
