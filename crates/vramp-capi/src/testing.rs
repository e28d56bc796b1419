//! The C functions behind safe signatures, for tests and random programs. Each wrapper makes one
//! call, as a program in C makes it, and returns what the function wrote or why it refused. Functions
//! without pointers need no wrapper: [`done`] converts their status.
//!
//! Some functions exist only here: [`open_on`] opens an allocator on a device that the caller made, and
//! [`driver_stream`] returns the device's stream of a handle. [`malloc_at_hand`] and [`free_at_hand`] are
//! the calls of the Python module that take no lock which others hold for long. The header has none of them.

use std::ffi::{CStr, CString, c_void};
use std::ops::Range;
use std::sync::Arc;

use vramp_alloc::observe::is_in_callback;
use vramp_driver::{Driver, Stream};

use crate::abi::vramp_status_t::{self, *};
use crate::abi::{
    vramp_allocator_t, vramp_arena_t, vramp_event_t, vramp_graph_t, vramp_lease_t, vramp_stats_t,
    vramp_stream_t,
};
use crate::device::Device;
use crate::graphs::*;
use crate::handles;
use crate::interface::*;
use crate::kv::abi::{vramp_kv_options_t, vramp_kv_pages_t, vramp_kv_stats_t, vramp_kv_t};
use crate::kv::{
    vramp_kv_address, vramp_kv_commit, vramp_kv_create, vramp_kv_park, vramp_kv_release,
    vramp_kv_stats, vramp_kv_take,
};
use crate::process::{OpenAllocator, StreamName};
use crate::session::Session;
use crate::status::{catch_failure, check_fork, last_error_text};

/// A call that failed: its status and the thread's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Status that the function returned.
    pub status: vramp_status_t,
    /// Text of `vramp_last_error`, on the thread of the call.
    pub text: String,
}

/// Result of a call.
pub type Outcome<T> = Result<T, Refusal>;

/// Converts the status of a call that the calling thread made last.
pub fn done(status: vramp_status_t) -> Outcome<()> {
    match status {
        VRAMP_OK => Ok(()),
        status => Err(Refusal { status, text: last_error_text() }),
    }
}

/// Opens an allocator on a device, as `vramp_open` does on the device of a name.
///
/// # Errors
/// Those of `vramp_open`.
pub fn open_on(
    driver: Arc<dyn Driver>,
    config: impl Into<vramp_peers::Config>,
) -> Outcome<vramp_allocator_t> {
    let opened = catch_failure(|| {
        check_fork()?;
        handles::insert(Arc::new(Session::on(Device::of(driver), config.into())?))
    });
    opened.map_err(|failure| Refusal { status: failure.status(), text: failure.text.clone() })
}

/// Returns the device's stream. `None` if the handle is unknown or the stream was forgotten.
pub fn driver_stream(allocator: vramp_allocator_t, stream: vramp_stream_t) -> Option<Stream> {
    let found = handles::with(allocator, |session| {
        let stream = session.stream(stream)?;
        Ok(session.allocator().stream(stream))
    });
    found.ok().flatten()
}

/// Calls `vramp_open`.
///
/// # Errors
/// Those of the function.
///
/// # Panics
/// If a text has a zero.
pub fn open(device: &str, options: &str) -> Outcome<vramp_allocator_t> {
    let device = CString::new(device).expect("no zeros in names");
    let options = CString::new(options).expect("no zeros in options");
    let mut allocator = vramp_allocator_t::default();
    // SAFETY: the texts end with zeros and the result outlives the call.
    done(unsafe { vramp_open(device.as_ptr(), options.as_ptr(), &mut allocator) })?;
    Ok(allocator)
}

/// Calls `vramp_stream_create`.
///
/// # Errors
/// Those of the function.
pub fn create_stream(allocator: vramp_allocator_t) -> Outcome<vramp_stream_t> {
    let mut stream = vramp_stream_t::default();
    // SAFETY: the result outlives the call.
    done(unsafe { vramp_stream_create(allocator, &mut stream) })?;
    Ok(stream)
}

/// Calls `vramp_stream_adopt`, on a simulated device or one of [`open_on`]: any value is a stream
/// there.
///
/// # Errors
/// Those of the function.
///
/// # Panics
/// If the allocator is on a card, whose driver would use the value.
pub fn adopt_stream(allocator: vramp_allocator_t, raw: usize) -> Outcome<vramp_stream_t> {
    let on_card = handles::with(allocator, |session| Ok(session.is_on_card())).unwrap_or(false);
    assert!(!on_card, "only the caller of `vramp_stream_adopt` knows streams of a card");
    let mut stream = vramp_stream_t::default();
    // SAFETY: the result outlives the call, and no driver gets the value.
    done(unsafe { vramp_stream_adopt(allocator, raw as *mut c_void, &mut stream) })?;
    Ok(stream)
}

/// Calls `vramp_malloc`.
///
/// # Errors
/// Those of the function.
///
/// # Panics
/// If a failed call leaves an address.
pub fn malloc(
    allocator: vramp_allocator_t,
    size: usize,
    stream: vramp_stream_t,
) -> Outcome<*mut c_void> {
    let mut address = std::ptr::dangling_mut();
    // SAFETY: the result outlives the call.
    let placed = done(unsafe { vramp_malloc(allocator, size, stream, &mut address) });
    assert!(placed.is_ok() || address.is_null(), "a failure leaves no address behind");
    placed.map(|()| address)
}

/// Calls [`OpenAllocator::malloc_at_hand`] and returns the address.
pub fn malloc_at_hand(
    allocator: vramp_allocator_t,
    size: usize,
    stream: vramp_stream_t,
) -> Option<*mut c_void> {
    let block =
        OpenAllocator(allocator).malloc_at_hand(size as u64, StreamName::Created(stream))?;
    Some(block.addr as *mut c_void)
}

/// Calls [`OpenAllocator::free_at_hand`].
pub fn free_at_hand(allocator: vramp_allocator_t, address: u64, stream: vramp_stream_t) -> bool {
    OpenAllocator(allocator).free_at_hand(address, StreamName::Created(stream))
}

/// Calls `vramp_usable_size`.
///
/// # Errors
/// Those of the function.
pub fn usable_size(allocator: vramp_allocator_t, address: u64) -> Outcome<usize> {
    let mut size = 0;
    // SAFETY: the result outlives the call.
    done(unsafe { vramp_usable_size(allocator, address as *mut c_void, &mut size) })?;
    Ok(size)
}

/// Calls `vramp_stats`.
///
/// # Errors
/// Those of the function.
pub fn stats(allocator: vramp_allocator_t) -> Outcome<vramp_stats_t> {
    let struct_size = size_of::<vramp_stats_t>() as u64;
    let mut stats = vramp_stats_t { struct_size, ..vramp_stats_t::default() };
    // SAFETY: the struct is as large as it says.
    done(unsafe { vramp_stats(allocator, &mut stats) })?;
    Ok(stats)
}

/// Calls `vramp_arena_create`.
///
/// # Errors
/// Those of the function.
///
/// # Panics
/// If the text has a zero.
pub fn create_arena(allocator: vramp_allocator_t, options: &str) -> Outcome<vramp_arena_t> {
    let options = CString::new(options).expect("no zeros in options");
    let mut arena = vramp_arena_t::default();
    // SAFETY: the text ends with a zero and the result outlives the call.
    done(unsafe { vramp_arena_create(allocator, options.as_ptr(), &mut arena) })?;
    Ok(arena)
}

/// Calls `vramp_kv_create`, and `vramp_kv_address` of the first tensor.
///
/// # Errors
/// Those of the functions.
pub fn create_cache(
    allocator: vramp_allocator_t,
    options: vramp_kv_options_t,
) -> Outcome<(vramp_kv_t, u64)> {
    let struct_size = size_of::<vramp_kv_options_t>() as u64;
    let options = vramp_kv_options_t { struct_size, ..options };
    let mut kv = vramp_kv_t::default();
    // SAFETY: the struct is as large as it says and the result outlives the call.
    done(unsafe { vramp_kv_create(allocator, &options, &mut kv) })?;
    let (mut address, mut length) = (std::ptr::null_mut(), 0);
    // SAFETY: the results outlive the call.
    done(unsafe { vramp_kv_address(allocator, kv, 0, &mut address, &mut length) })?;
    Ok((kv, address as u64))
}

fn pages_to_c(pages: &[Range<u32>]) -> Vec<vramp_kv_pages_t> {
    pages.iter().map(|range| vramp_kv_pages_t { first: range.start, end: range.end }).collect()
}

/// Calls `vramp_kv_commit`.
///
/// # Errors
/// Those of the function.
pub fn commit(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    pages: &[Range<u32>],
    stream: vramp_stream_t,
) -> Outcome<()> {
    let pages = pages_to_c(pages);
    // SAFETY: the ranges are as many as said.
    done(unsafe { vramp_kv_commit(allocator, kv, pages.as_ptr(), pages.len(), stream) })
}

/// Calls `vramp_kv_park`.
///
/// # Errors
/// Those of the function.
pub fn park(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    pages: &[Range<u32>],
    stream: vramp_stream_t,
) -> Outcome<()> {
    let pages = pages_to_c(pages);
    // SAFETY: the ranges are as many as said.
    done(unsafe { vramp_kv_park(allocator, kv, pages.as_ptr(), pages.len(), stream) })
}

/// Calls `vramp_kv_take`.
///
/// # Errors
/// Those of the function.
pub fn take(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    count: u32,
    stream: vramp_stream_t,
) -> Outcome<Vec<Range<u32>>> {
    let mut pages = vec![vramp_kv_pages_t::default(); count as usize];
    let mut ranges = 0;
    let (to, capacity) = (pages.as_mut_ptr(), pages.len());
    // SAFETY: there is room for as many ranges as said, and the result outlives the call.
    done(unsafe { vramp_kv_take(allocator, kv, count, stream, to, capacity, &mut ranges) })?;
    Ok(pages[..ranges].iter().map(|pages| pages.first..pages.end).collect())
}

/// Calls `vramp_kv_release`.
///
/// # Errors
/// Those of the function.
pub fn release(allocator: vramp_allocator_t, kv: vramp_kv_t, keep: u64) -> Outcome<u64> {
    let mut released = 0;
    // SAFETY: the result outlives the call.
    done(unsafe { vramp_kv_release(allocator, kv, keep, &mut released) })?;
    Ok(released)
}

/// Calls `vramp_kv_stats`.
///
/// # Errors
/// Those of the function.
pub fn cache_stats(allocator: vramp_allocator_t, kv: vramp_kv_t) -> Outcome<vramp_kv_stats_t> {
    let struct_size = size_of::<vramp_kv_stats_t>() as u64;
    let mut stats = vramp_kv_stats_t { struct_size, ..vramp_kv_stats_t::default() };
    // SAFETY: the struct is as large as it says.
    done(unsafe { vramp_kv_stats(allocator, kv, &mut stats) })?;
    Ok(stats)
}

/// Calls `vramp_capture_end`.
///
/// # Errors
/// Those of the function.
pub fn end_capture(allocator: vramp_allocator_t, arena: vramp_arena_t) -> Outcome<vramp_graph_t> {
    let mut graph = vramp_graph_t::default();
    // SAFETY: the result outlives the call.
    done(unsafe { vramp_capture_end(allocator, arena, &mut graph) })?;
    Ok(graph)
}

/// Calls `vramp_capture_detach`.
///
/// # Errors
/// Those of the function.
pub fn detach_capture(
    allocator: vramp_allocator_t,
    arena: vramp_arena_t,
) -> Outcome<vramp_graph_t> {
    let mut graph = vramp_graph_t::default();
    // SAFETY: the result outlives the call.
    done(unsafe { vramp_capture_detach(allocator, arena, &mut graph) })?;
    Ok(graph)
}

/// Calls `vramp_graph_launch` with a lease.
///
/// # Errors
/// Those of the function.
pub fn launch(
    allocator: vramp_allocator_t,
    graph: vramp_graph_t,
    stream: vramp_stream_t,
) -> Outcome<vramp_lease_t> {
    let mut lease = vramp_lease_t::default();
    // SAFETY: the result outlives the call.
    done(unsafe { vramp_graph_launch(allocator, graph, stream, &mut lease) })?;
    Ok(lease)
}

type Code = Box<dyn Fn(&vramp_event_t) + Send + Sync>;

/// An observer with its closure. Removed when it is dropped.
pub struct Observer {
    allocator: vramp_allocator_t,
    registration: u64,
    /// `None` once the closure may not be dropped.
    code: Option<Box<Code>>,
}

impl Observer {
    /// Calls `vramp_observe`. The closure must not panic, which would end the process.
    ///
    /// # Errors
    /// Those of the function.
    pub fn new(
        allocator: vramp_allocator_t,
        code: impl Fn(&vramp_event_t) + Send + Sync + 'static,
    ) -> Outcome<Observer> {
        let code: Box<Code> = Box::new(Box::new(code));
        let user = (&raw const *code).cast_mut().cast();
        let mut registration = 0;
        // SAFETY: the closure is `Sync`, and `Observer` keeps it until no call is in progress.
        done(unsafe { vramp_observe(allocator, Some(call), user, &mut registration) })?;
        Ok(Observer { allocator, registration, code: Some(code) })
    }

    /// Returns the number for `vramp_unobserve`. Once that was called inside a callback, the
    /// observer may still run, and its closure lives on.
    pub fn registration(&self) -> u64 {
        self.registration
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        // Waits for calls in progress, except in a callback, and where another thread removed it.
        let removed = vramp_unobserve(self.allocator, self.registration) == VRAMP_OK;
        if !removed || is_in_callback() {
            std::mem::forget(self.code.take());
        }
    }
}

/// # Safety
/// `event` is valid, and `user` is the closure of an [`Observer`].
unsafe extern "C" fn call(event: *const vramp_event_t, user: *mut c_void) {
    // SAFETY: this function's contract.
    let event = unsafe { &*event };
    // SAFETY: as above.
    let code = unsafe { &*user.cast::<Code>() };
    code(event);
}

/// Returns the text of `vramp_last_error`.
pub fn last_error() -> String {
    // SAFETY: never null, ends with a zero, and is copied before the thread's next call.
    unsafe { CStr::from_ptr(vramp_last_error()) }.to_string_lossy().into_owned()
}
