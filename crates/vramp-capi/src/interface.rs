//! The functions of the interface. Each returns a code, may be called from any thread, and answers
//! wrong arguments with an error; `docs/c-interface.md` has the rules in one place.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use vramp_alloc::observe::Event;

use crate::abi::vramp_event_kind_t::*;
use crate::abi::vramp_status_t::{self, *};
use crate::abi::{
    vramp_allocator_t, vramp_event_t, vramp_observer_t, vramp_stats_t, vramp_stream_t,
};
use crate::context::Context;
use crate::options::Options;
use crate::status::{Failure, last, status_of};
use crate::{handles, pointers};

/// The version of the library, such as "0.1.0". Never null.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The name of a code, such as "VRAMP_ERROR_OUT_OF_MEMORY". Never null; "unknown" for others.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_status_name(status: c_int) -> *const c_char {
    let name = match status {
        0 => c"VRAMP_OK",
        1 => c"VRAMP_ERROR_NULL",
        2 => c"VRAMP_ERROR_TEXT",
        3 => c"VRAMP_ERROR_OPTION",
        4 => c"VRAMP_ERROR_DEVICE",
        5 => c"VRAMP_ERROR_UNKNOWN_ALLOCATOR",
        6 => c"VRAMP_ERROR_UNKNOWN_STREAM",
        7 => c"VRAMP_ERROR_UNKNOWN_POINTER",
        8 => c"VRAMP_ERROR_OUT_OF_MEMORY",
        9 => c"VRAMP_ERROR_DRIVER",
        10 => c"VRAMP_ERROR_TOO_MANY",
        11 => c"VRAMP_ERROR_STRUCT_SIZE",
        12 => c"VRAMP_ERROR_IN_USE",
        13 => c"VRAMP_ERROR_RANGE",
        14 => c"VRAMP_ERROR_INCONSISTENT",
        15 => c"VRAMP_ERROR_INTERNAL",
        16 => c"VRAMP_ERROR_FILE",
        17 => c"VRAMP_ERROR_UNKNOWN_ARENA",
        18 => c"VRAMP_ERROR_UNKNOWN_GRAPH",
        19 => c"VRAMP_ERROR_UNKNOWN_LEASE",
        20 => c"VRAMP_ERROR_BUSY",
        21 => c"VRAMP_ERROR_CAPTURE",
        22 => c"VRAMP_ERROR_UNSUPPORTED",
        _ => c"unknown",
    };
    name.as_ptr()
}

/// What the calling thread's last failed call has to say, in full. Never null; empty before the
/// first failure. Good until the thread's next failing call; a call that succeeds leaves it.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_last_error() -> *const c_char {
    last()
}

/// Opens an allocator on a device.
///
/// `device` is "auto" (card 0 if there is one, else the simulator), "cuda", "cuda:N", "sim" or
/// "sim:CARD"; null means "auto". `options` are key=value pairs with commas between: preset (vramp,
/// vpmm or stream-ordered), limit (such as 80GiB, or 90% of the card), prefill, page, span; null
/// means the defaults. Takes no memory yet, unless prefill says so.
///
/// # Safety
/// The texts are null or end with a zero; `allocator` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_open(
    device: *const c_char,
    options: *const c_char,
    allocator: *mut vramp_allocator_t,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(allocator, "allocator")?;
        // SAFETY: this function's contract says so.
        let device = unsafe { pointers::text(device, "device") }?;
        // SAFETY: this function's contract says so.
        let options = unsafe { pointers::text(options, "options") }?;
        let options = Options::parse(options)?;
        let device = if device.is_empty() { "auto" } else { device };
        let handle = handles::insert(Arc::new(Context::open(device, &options, None)?))?;
        // SAFETY: this function's contract says so.
        unsafe { pointers::write(allocator, handle, "allocator") }
    })
}

/// Closes an allocator: waits for its streams and gives all its memory back, also what was not
/// freed. Calls under way on other threads are waited for; later ones find it unknown.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_close(allocator: vramp_allocator_t) -> vramp_status_t {
    status_of(|| handles::remove(allocator)?.close())
}

/// Makes a stream of the device known that the caller made: a `cudaStream_t`, or null for the
/// default stream. The same one again gives the same answer. No driver call. On the simulator any
/// value names a simulated stream.
///
/// # Safety
/// On a card, `raw` is null or a stream of the card's primary context that lives until it is
/// forgotten or the allocator is closed. `stream` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_stream_adopt(
    allocator: vramp_allocator_t,
    raw: *mut c_void,
    stream: *mut vramp_stream_t,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(stream, "stream")?;
        let name = handles::with(allocator, |context| {
            // SAFETY: this function's contract says so.
            let adopted = unsafe { context.adopt(raw) }?;
            Ok(context.name(adopted))
        })?;
        // SAFETY: this function's contract says so.
        unsafe { pointers::write(stream, name, "stream") }
    })
}

/// Makes a new stream, for programs that have none of their own. One driver call.
///
/// # Safety
/// `stream` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_stream_create(
    allocator: vramp_allocator_t,
    stream: *mut vramp_stream_t,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(stream, "stream")?;
        let name = handles::with(allocator, |context| Ok(context.name(context.create_stream()?)))?;
        // SAFETY: this function's contract says so.
        unsafe { pointers::write(stream, name, "stream") }
    })
}

/// Lets go of a stream, made or adopted: to be called before an adopted one is destroyed, and not
/// while it captures a graph. Never waits; work that is queued still runs, and memory it uses is
/// not handed out before it ends. Blocks of the stream stay, and are freed on another one.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_stream_forget(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
) -> vramp_status_t {
    status_of(|| handles::with(allocator, |context| context.forget(context.stream(stream)?)))
}

/// At least `size` bytes for work on `stream`, aligned to 512 bytes, or to 256 within a capture that
/// an arena serves. A request for nothing gets an
/// address of its own too. On failure `*address` is set to null.
///
/// # Safety
/// `address` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_malloc(
    allocator: vramp_allocator_t,
    size: usize,
    stream: vramp_stream_t,
    address: *mut *mut c_void,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(address, "address")?;
        let placed = handles::with(allocator, |context| {
            context.malloc(size as u64, context.stream(stream)?)
        });
        let found = placed.as_ref().map_or(0, |addr| addr.number());
        // SAFETY: this function's contract says so.
        unsafe { pointers::write(address, found as *mut c_void, "address") }?;
        placed.map(|_| ())
    })
}

/// Takes a block back. All work on it must be queued on `stream`, ordered before its present end,
/// or noted with vramp_record_use; `stream` may be another one than the block's. Never waits.
///
/// A null address, one that is not the start of a block, another allocator's or one that is free
/// already is an error and changes nothing. A block that was handed out again at the same address
/// cannot be told from the old one.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_free(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    stream: vramp_stream_t,
) -> vramp_status_t {
    status_of(|| {
        handles::with(allocator, |context| context.free(address as u64, context.stream(stream)?))
    })
}

/// Notes that work queued on `stream` so far uses a block. No driver call.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_record_use(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    stream: vramp_stream_t,
) -> vramp_status_t {
    status_of(|| {
        handles::with(allocator, |context| {
            context.record_use(address as u64, context.stream(stream)?)
        })
    })
}

/// How many bytes of a block may be used: what was asked, or a little more.
///
/// # Safety
/// `size` is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_usable_size(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    size: *mut usize,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(size, "size")?;
        let usable = handles::with(allocator, |context| context.usable(address as u64))?;
        // SAFETY: this function's contract says so.
        unsafe { pointers::write(size, usable as usize, "size") }
    })
}

/// Gives idle memory back to the card until the allocator holds no more than `keep` bytes or
/// nothing more is idle. Never waits.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_trim(allocator: vramp_allocator_t, keep: usize) -> vramp_status_t {
    status_of(|| handles::with(allocator, |context| context.trim(keep as u64)))
}

/// What the allocator did so far. Set `stats->struct_size` to `sizeof(vramp_stats_t)` before.
///
/// # Safety
/// `stats` is null, or its first eight bytes hold a size that is good for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_stats(
    allocator: vramp_allocator_t,
    stats: *mut vramp_stats_t,
) -> vramp_status_t {
    status_of(|| {
        let find = || handles::with(allocator, Context::stats);
        // SAFETY: the struct begins with its size; the rest is this function's contract.
        unsafe { pointers::write_sized(stats, find, "stats") }
    })
}

/// Checks every invariant of the allocator's books. O(n log n): for tests.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_audit(allocator: vramp_allocator_t) -> vramp_status_t {
    status_of(|| handles::with(allocator, Context::audit))
}

/// The most physical memory the allocator may hold, in bytes; zero for as much as the card has.
/// What is idle above it is given back at once; what is in use stays.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_set_limit(allocator: vramp_allocator_t, limit: u64) -> vramp_status_t {
    status_of(|| handles::with(allocator, |context| context.set_limit(limit)))
}

/// Records the last `events` events from now on; zero ends a recording. A recording costs a lock
/// shared by all threads for each malloc and free.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_record_history(
    allocator: vramp_allocator_t,
    events: u32,
) -> vramp_status_t {
    status_of(|| {
        handles::with(allocator, |context| {
            context.record_history(events);
            Ok(())
        })
    })
}

/// Writes what the allocator holds, and its history if one is recorded, to a file: as a snapshot
/// for `torch/cuda/_memory_viz.py` and its viewer, or, if the path ends with `.json`, as a timeline
/// for Perfetto.
///
/// # Safety
/// `path` is null or ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_snapshot(
    allocator: vramp_allocator_t,
    path: *const c_char,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(path.cast_mut(), "path")?;
        // SAFETY: this function's contract says so.
        let path = unsafe { pointers::text(path, "path") }?;
        handles::with(allocator, |context| context.write_snapshot(path))
    })
}

/// A caller's pointer that goes with its function.
struct User(*mut c_void);

// SAFETY: nobody follows it here; the caller promises that its function may be called with it from
// any thread.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl User {
    fn get(&self) -> *mut c_void {
        self.0
    }
}

/// Calls `observer` for every event from now on, with `user`, and writes a number to take it back
/// by to `registration`.
///
/// # Safety
/// `observer` may be called from any thread with `user` until the allocator is closed or
/// vramp_unobserve has returned and no call of it is under way; it does not unwind. `registration`
/// is null or good for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_observe(
    allocator: vramp_allocator_t,
    observer: vramp_observer_t,
    user: *mut c_void,
    registration: *mut u64,
) -> vramp_status_t {
    status_of(|| {
        pointers::check(registration, "registration")?;
        let Some(observer) = observer else {
            return Err(Failure::new(VRAMP_ERROR_NULL, "observer is null: give a function"));
        };
        let user = User(user);
        let number = handles::with(allocator, |context| {
            Ok(context.observe(move |event| {
                let Some(event) = event_of(event) else { return };
                // SAFETY: this function's contract says that it may be called so.
                unsafe { observer(&event, user.get()) };
            }))
        })?;
        // SAFETY: this function's contract says so.
        unsafe { pointers::write(registration, number, "registration") }
    })
}

/// Takes an observer back. A number that names none, or one taken back before, is an error.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_unobserve(
    allocator: vramp_allocator_t,
    registration: u64,
) -> vramp_status_t {
    status_of(|| {
        let found = handles::with(allocator, |context| Ok(context.unobserve(registration)))?;
        let text = "the registration names no observer, or it was taken back before";
        if found { Ok(()) } else { Err(Failure::new(VRAMP_ERROR_RANGE, text)) }
    })
}

fn event_of(event: &Event<'_>) -> Option<vramp_event_t> {
    let (kind, address, size, requested) = match *event {
        Event::Allocated(block) => (
            VRAMP_EVENT_ALLOCATED,
            block.addr().number(),
            block.len().count(),
            block.requested().count(),
        ),
        Event::Freed { addr, len, requested, .. } => {
            (VRAMP_EVENT_FREED, addr.number(), len.count(), requested.count())
        }
        Event::Grown { bytes } => (VRAMP_EVENT_GROWN, 0, bytes.count(), 0),
        Event::Shrunk { bytes } => (VRAMP_EVENT_SHRUNK, 0, bytes.count(), 0),
        Event::Remapped { bytes, .. } => (VRAMP_EVENT_REMAPPED, 0, bytes.count(), 0),
        Event::Short(shortage) => (VRAMP_EVENT_SHORT, 0, 0, shortage.requested.count()),
        Event::OutOfMemory(report) => {
            (VRAMP_EVENT_OUT_OF_MEMORY, 0, 0, report.shortage.requested.count())
        }
        _ => return None,
    };
    Some(vramp_event_t { kind, address, size, requested })
}
