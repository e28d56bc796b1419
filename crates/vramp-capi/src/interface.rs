//! The functions of the interface. Each may be called from any thread, and returns an error for
//! invalid arguments. `docs/c-interface.md` has the common rules.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use vramp_alloc::observe::Event;
use vramp_alloc::{Bytes, DeviceAddr, StreamId};

use crate::abi::vramp_event_kind_t::*;
use crate::abi::vramp_status_t;
use crate::abi::{
    vramp_allocator_t, vramp_event_t, vramp_observer_t, vramp_stats_t, vramp_stream_t,
};
use crate::environment::variable;
use crate::options::Options;
use crate::pointers::{WithSize, write_out};
use crate::session::Session;
use crate::status::{Failure, Kind, Result, check_fork, last_error, status_of};
use crate::torch::snapshot::{record_history_of_devices, snapshot_of_devices};
use crate::{handles, pointers};

/// Returns the version of the library, such as "0.1.0". Never null.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Returns the name of a status, such as "VRAMP_ERROR_OUT_OF_MEMORY". Never null; "unknown" for
/// others.
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
        23 => c"VRAMP_ERROR_FORKED",
        24 => c"VRAMP_ERROR_VERSION",
        25 => c"VRAMP_ERROR_UNKNOWN_EXPORT",
        26 => c"VRAMP_ERROR_UNKNOWN_PIN",
        27 => c"VRAMP_ERROR_TICKET",
        28 => c"VRAMP_ERROR_EXPORT_ENDED",
        29 => c"VRAMP_ERROR_EXCHANGE",
        30 => c"VRAMP_ERROR_NO_TIERS",
        31 => c"VRAMP_ERROR_UNKNOWN_SPACE",
        32 => c"VRAMP_ERROR_UNKNOWN_RESERVATION",
        33 => c"VRAMP_ERROR_UNKNOWN_BUFFER",
        34 => c"VRAMP_ERROR_TIMEOUT",
        35 => c"VRAMP_ERROR_CANCELLED",
        36 => c"VRAMP_ERROR_DEADLOCK",
        37 => c"VRAMP_ERROR_CONTENTS",
        38 => c"VRAMP_ERROR_REGION",
        39 => c"VRAMP_ERROR_OVER_RESERVATION",
        40 => c"VRAMP_ERROR_CALLBACK",
        41 => c"VRAMP_ERROR_NOT_KEPT",
        42 => c"VRAMP_ERROR_KEPT_BUSY",
        43 => c"VRAMP_ERROR_TORN",
        44 => c"VRAMP_ERROR_KEEPER",
        45 => c"VRAMP_ERROR_UNKNOWN_KEPT",
        _ => c"unknown",
    };
    name.as_ptr()
}

/// Returns the message of the calling thread's last failed call. Never null; empty before the first
/// failure. Valid until the next failed call of the thread. Successful calls do not change it. While
/// a thread ends, after its thread-local storage, it is a fixed text that says so.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_last_error() -> *const c_char {
    last_error()
}

/// Opens an allocator on a device.
///
/// `device` is "auto" (what VRAMP_DEVICE names; card 0 without it), "cuda", "cuda:N", "sim",
/// "sim:CARD", or "sim:CARDxCOUNT:N" for card N of a simulated machine; null means "auto". `options` are
/// key=value pairs separated by commas: preset (vramp, vpmm, stream-ordered, torch or
/// torch-expandable), limit (such as 80GiB, or 90% of the device), prefill, page, span, torch (settings
/// in PyTorch's syntax in brackets, such as `[max_split_size_mb:64]`), sharing (none, posix-fd or
/// fabric), rdma (off, on or auto), peers (none, on-demand, all or a list such as `[0,1]`); null means
/// the defaults. Reserves no memory yet, unless prefill is set.
///
/// The preset vpmm also reads VPMM_PAGE_SIZE, VPMM_VA_SIZE and VPMM_PAGES, and the presets of PyTorch
/// PYTORCH_ALLOC_CONF or else PYTORCH_CUDA_ALLOC_CONF, as far as no option says otherwise. A line on
/// stderr names those that were used.
///
/// # Safety
/// The texts are null or zero-terminated; `allocator` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_open(
    device: *const c_char,
    options: *const c_char,
    allocator: *mut vramp_allocator_t,
) -> vramp_status_t {
    let open = || {
        check_fork()?;
        // SAFETY: required by this function's contract.
        let device = unsafe { pointers::text(device, "device") }?;
        // SAFETY: required by this function's contract.
        let options = unsafe { pointers::text(options, "options") }?;
        let device = if device.is_empty() { "auto" } else { device };
        let options = Options::parse(options)?;
        handles::insert(Arc::new(Session::open(device, &options, None, variable)?))
    };
    // SAFETY: required by this function's contract.
    unsafe { write_out((allocator, "allocator"), open) }
}

/// Closes an allocator: waits for its streams, forgotten ones included, and releases all its memory,
/// also of blocks that were not freed. Exports, imports and pins end with it: what other processes
/// opened stays theirs, later opens fail. While a stream captures a graph that vramp did not begin it
/// returns VRAMP_ERROR_CAPTURE, and VRAMP_ERROR_DRIVER if the wait fails: then nothing is released,
/// and the allocator stays open. Waits for calls in progress on other threads. Later calls return
/// VRAMP_ERROR_UNKNOWN_ALLOCATOR. Inside a callback it never waits for calls: it returns
/// VRAMP_ERROR_BUSY for the callback's own allocator, and for another one while calls are in
/// progress on it. In a forked child it returns VRAMP_ERROR_FORKED, and there is nothing to close.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_close(allocator: vramp_allocator_t) -> vramp_status_t {
    status_of(|| handles::close(allocator))
}

/// Adopts a stream that the caller made: a `cudaStream_t`, or null for the legacy default stream.
/// Adopting it again returns the same handle. No driver call. On the simulator every value is a
/// simulated stream. `cudaStreamPerThread` is the calling thread's own stream: each thread gets another
/// handle, two driver calls at first, which ends with the thread. Other threads may pass it to free and to
/// record uses; requests for it are the thread's own.
///
/// # Safety
/// On a GPU, `raw` is null or a stream of the device's primary context that lives until it is
/// forgotten or the allocator is closed. `stream` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_stream_adopt(
    allocator: vramp_allocator_t,
    raw: *mut c_void,
    stream: *mut vramp_stream_t,
) -> vramp_status_t {
    let find = |session: &Session| {
        // SAFETY: required by this function's contract.
        let adopted = unsafe { session.adopt(raw) }?;
        Ok(session.handle_of(adopted))
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (stream, "stream"), find) }
}

/// Creates a stream, for programs that have none of their own. One driver call.
///
/// # Safety
/// `stream` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_stream_create(
    allocator: vramp_allocator_t,
    stream: *mut vramp_stream_t,
) -> vramp_status_t {
    let find = |session: &Session| Ok(session.handle_of(session.create_stream()?));
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (stream, "stream"), find) }
}

/// Forgets a stream, created or adopted. Call it before destroying an adopted stream; while the stream
/// captures a graph it returns VRAMP_ERROR_CAPTURE. Never waits: queued work still runs, and memory
/// that it uses is not reused before it completes. Blocks of the stream stay live, and may be freed on
/// it or on another stream. After VRAMP_ERROR_DRIVER the call can be repeated.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_stream_forget(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.forget(session.stream(stream)?))
}

/// Allocates at least `size` bytes for work on `stream`, aligned to 512 bytes, or to 256 bytes in a
/// capture into an arena. A block of zero bytes has a unique address too. On failure `*address` is
/// set to null. Before it fails for want of memory, it waits on the host for work that uses freed
/// memory.
///
/// # Safety
/// `address` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_malloc(
    allocator: vramp_allocator_t,
    size: usize,
    stream: vramp_stream_t,
    address: *mut *mut c_void,
) -> vramp_status_t {
    let place = |session: &Session| {
        let block = session.place(size as u64, session.stream(stream)?)?;
        Ok(block.addr as *mut c_void)
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out_or(allocator, (address, "address"), std::ptr::null_mut(), place) }
}

/// Frees a block. All work on it must be queued on `stream`, or ordered before the work queued on
/// it so far, or recorded with vramp_record_use. `stream` may differ from the stream of the
/// allocation, and may be forgotten. Never waits.
///
/// An address that is null, not the start of a block, of another allocator or free already is an
/// error and changes nothing. A new block at the same address cannot be distinguished from the old
/// one.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_free(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    stream: vramp_stream_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.free(address as u64, session.stream(stream)?))
}

/// Records that work queued on `stream` so far uses a block. No driver call.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_record_use(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    stream: vramp_stream_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.record_use(address as u64, session.stream(stream)?))
}

/// Returns the usable bytes of a block: the requested size, or slightly more.
///
/// # Safety
/// `size` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_usable_size(
    allocator: vramp_allocator_t,
    address: *mut c_void,
    size: *mut usize,
) -> vramp_status_t {
    let find = |session: &Session| Ok(session.usable(address as u64)? as usize);
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (size, "size"), find) }
}

/// Releases idle memory to the device until at most `keep` bytes are reserved or no more memory is
/// idle, and unpins all idle memory of the host. Never waits.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_trim(allocator: vramp_allocator_t, keep: usize) -> vramp_status_t {
    handles::on(allocator, |session| session.trim(keep as u64))
}

/// Returns statistics. Set `stats->struct_size` to `sizeof(vramp_stats_t)` before.
///
/// # Safety
/// `stats` is null, or its first eight bytes hold a size that is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_stats(
    allocator: vramp_allocator_t,
    stats: *mut vramp_stats_t,
) -> vramp_status_t {
    // SAFETY: the struct begins with its size; the rest is this function's contract.
    unsafe { handles::out(allocator, WithSize(stats, "stats"), Session::stats) }
}

/// Checks every invariant of the state of the allocator and its tiers. O(n log n): for tests.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_audit(allocator: vramp_allocator_t) -> vramp_status_t {
    handles::on(allocator, Session::audit)
}

/// Sets the limit of reserved bytes; zero means the memory of the device. Idle memory above the
/// limit is released at once. Memory in use stays.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_set_limit(allocator: vramp_allocator_t, limit: u64) -> vramp_status_t {
    handles::on(allocator, |session| session.set_limit(limit))
}

/// Starts to record the last `events` events, 40 bytes each; zero stops recording. More than
/// 10,000,000 are VRAMP_ERROR_RANGE. Recording takes a lock shared by all threads in each malloc
/// and free.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_record_history(
    allocator: vramp_allocator_t,
    events: u32,
) -> vramp_status_t {
    handles::on(allocator, |session| session.record_history(events))
}

/// Writes all blocks and segments, and the history if one is recorded, to a file: a snapshot for
/// `torch/cuda/_memory_viz.py` and PyTorch's viewer, or, if the path ends with `.json`, a timeline
/// for Perfetto.
///
/// # Safety
/// `path` is null or is zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_snapshot(
    allocator: vramp_allocator_t,
    path: *const c_char,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        // SAFETY: required by this function's contract.
        session.write_snapshot(unsafe { pointers::given_text(path, "path") }?)
    })
}

/// Starts to record the last `events` events, 40 bytes each, of each device that PyTorch, Python and C share
/// in this process, also of those that are opened later; zero stops recording. More than 10,000,000 are
/// VRAMP_ERROR_RANGE.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_record_history_of_devices(events: u32) -> vramp_status_t {
    status_of(|| record_history_of_devices(events))
}

/// Writes all blocks and segments, and the history if one is recorded, of each device that PyTorch, Python
/// and C share in this process to one file, as vramp_snapshot does for one allocator. Each device has the
/// number that PyTorch gives it.
///
/// # Safety
/// `path` is null or is zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_snapshot_of_devices(path: *const c_char) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    status_of(|| snapshot_of_devices(unsafe { pointers::given_text(path, "path") }?))
}

/// The `user` pointer of a callback.
#[derive(Clone, Copy, Debug)]
pub(crate) struct User(pub(crate) *mut c_void);

// SAFETY: vramp never dereferences it, and by the contracts of `vramp_observe` and
// `vramp_on_shortage` the callback may be called with it from any thread.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl User {
    pub(crate) fn get(&self) -> *mut c_void {
        self.0
    }
}

/// Registers an observer with an allocator. Returns the number of the registration.
///
/// # Safety
/// As of [`vramp_observe`].
pub(crate) unsafe fn register_observer(
    session: &Session,
    observer: unsafe extern "C" fn(event: *const vramp_event_t, user: *mut c_void),
    user: User,
) -> u64 {
    let name = session.namer();
    session.observe(move |event| {
        let Some(event) = event_of(event, &name) else { return };
        // SAFETY: allowed by this function's contract.
        unsafe { observer(&event, user.get()) };
    })
}

/// Registers `observer`, which is called with `user` for every event. `*registration` receives the
/// number for vramp_unobserve. Other threads may call the observer before it is written.
///
/// # Safety
/// `observer` may be called from any thread with `user` until the allocator is closed or
/// vramp_unobserve has returned; if that was called inside a callback, until calls in progress have
/// returned too. It does not unwind.
/// `registration` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_observe(
    allocator: vramp_allocator_t,
    observer: vramp_observer_t,
    user: *mut c_void,
    registration: *mut u64,
) -> vramp_status_t {
    let user = User(user);
    let register = |session: &Session| {
        let observer = pointers::function(observer, "observer")?;
        // SAFETY: allowed by this function's contract.
        Ok(unsafe { register_observer(session, observer, user) })
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (registration, "registration"), register) }
}

/// Removes an observer, a shortage handler, or callbacks around a sleep. When it returns, no call of it is in progress
/// or begins, and `user` may be freed. So the caller must hold no lock that it takes. Inside a callback it does not wait
/// for calls in progress on other threads. An unknown number, or one that was removed before, is an error.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_unobserve(
    allocator: vramp_allocator_t,
    registration: u64,
) -> vramp_status_t {
    handles::on(allocator, |session| registered(session.unobserve(registration)))
}

/// Returns an error for a registration that was not found.
pub(crate) fn registered(is_found: bool) -> Result<()> {
    let text = "the registration is unknown or was removed before";
    if is_found { Ok(()) } else { Err(Failure::new(Kind::Range, text)) }
}

fn event_of(
    event: &Event<'_>,
    name: &impl Fn(StreamId) -> vramp_stream_t,
) -> Option<vramp_event_t> {
    let of_block = |kind, addr: DeviceAddr, size: Bytes, requested: Bytes, stream| vramp_event_t {
        kind,
        address: addr.number(),
        size: size.count(),
        requested: requested.count(),
        stream: name(stream),
    };
    let of_amount = |kind, size, requested| vramp_event_t {
        kind,
        address: 0,
        size,
        requested,
        stream: vramp_stream_t::default(),
    };
    Some(match *event {
        Event::Allocated { addr, len, requested, stream } => {
            of_block(VRAMP_EVENT_ALLOCATED, addr, len, requested, stream)
        }
        Event::Freed { addr, len, requested, stream } => {
            of_block(VRAMP_EVENT_FREED, addr, len, requested, stream)
        }
        Event::Grown { bytes } => of_amount(VRAMP_EVENT_GROWN, bytes.count(), 0),
        Event::Shrunk { bytes } => of_amount(VRAMP_EVENT_SHRUNK, bytes.count(), 0),
        Event::Remapped { bytes, .. } => of_amount(VRAMP_EVENT_REMAPPED, bytes.count(), 0),
        Event::Short(shortage) => of_amount(VRAMP_EVENT_SHORT, 0, shortage.requested.count()),
        Event::OutOfMemory(report) => {
            of_amount(VRAMP_EVENT_OUT_OF_MEMORY, 0, report.shortage.requested.count())
        }
        _ => return None,
    })
}
