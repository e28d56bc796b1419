//! Arenas for caches in C: tensors at fixed addresses, whose pages get and give up memory together.
//!
//! 1. [`vramp_kv_create`] reserves the addresses. The arena is in the session's table under a number.
//! 2. [`vramp_kv_commit`], [`vramp_kv_take`] and [`vramp_kv_park`] move pages. A stream of zero means any: a commit
//!    then waits on the host until any stream may use the memory, and a park is behind all streams.
//! 3. [`vramp_kv_destroy`] ends the number. Calls in progress on other threads keep the arena until they return.
//!
//! Growth: O(1) for each call to find the arena, whatever number of them there is; the rest is that of
//! [`vramp_alloc::kv`].
//!
//! Deliberately absent: views of the tensors. An address is all that C has.

pub mod abi;
pub(crate) mod tables;

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use vramp_alloc::kv::{Arena, Arrangement, KvError, Layout, Options};
use vramp_alloc::{Bytes, StreamId};

use crate::abi::{vramp_allocator_t, vramp_status_t, vramp_stream_t};
use crate::ids::next_id;
use crate::kv::abi::*;
use crate::kv::tables::unknown_kv;
use crate::pointers::{Out, WithSize};
use crate::session::Session;
use crate::status::{Failure, Kind, Result};
use crate::{handles, pointers};

/// # Arenas for caches
impl Session {
    /// Reserves the addresses of an arena for caches.
    pub fn kv_arena(&self, layout: Layout, options: Options) -> Result<Arena> {
        Ok(self.allocator().kv_arena(layout, options)?)
    }

    /// Gives pages of an arena memory, for work on `stream`; without one for work on any, and then this waits
    /// on the host for work that still uses the memory.
    pub fn kv_commit(
        &self,
        arena: &Arena,
        pages: &[Range<u32>],
        stream: Option<StreamId>,
    ) -> Result<()> {
        self.for_stream(stream, |stream| arena.commit(pages, stream))
    }

    /// Gives `count` pages of the arena's choice memory, as [`Session::kv_commit`] does, and returns them.
    pub fn kv_take(
        &self,
        arena: &Arena,
        count: u32,
        stream: Option<StreamId>,
    ) -> Result<Vec<Range<u32>>> {
        self.for_stream(stream, |stream| arena.take(count, stream))
    }

    /// Gives up pages of an arena, once the work that is queued on `stream` by now is over; without one the work
    /// of all streams.
    pub fn kv_park(
        &self,
        arena: &Arena,
        pages: &[Range<u32>],
        stream: Option<StreamId>,
    ) -> Result<()> {
        Ok(match stream {
            Some(stream) => arena.park(pages, stream),
            None => arena.park_behind_all(pages),
        }?)
    }

    fn for_stream<R>(
        &self,
        stream: Option<StreamId>,
        commit: impl FnOnce(StreamId) -> std::result::Result<R, KvError>,
    ) -> Result<R> {
        if let Some(stream) = stream {
            return Ok(commit(stream)?);
        }
        let own = self.caches_stream()?;
        let committed = commit(own)?;
        self.synchronize(own)?;
        Ok(committed)
    }

    /// Returns the stream of calls that name none. The first call creates it.
    fn caches_stream(&self) -> Result<StreamId> {
        if let Some(&stream) = self.caches.stream.get() {
            return Ok(stream);
        }
        let made = self.create_stream()?;
        // Where another thread was first, this one goes.
        if let Err(made) = self.caches.stream.set(made) {
            self.forget(made)?;
        }
        Ok(*self.caches.stream.get().expect("it was set"))
    }

    /// Returns the stream of a handle; `None` for zero.
    fn stream_if_any(&self, stream: vramp_stream_t) -> Result<Option<StreamId>> {
        if stream.id == 0 { Ok(None) } else { self.stream(stream).map(Some) }
    }
}

fn layout(options: &vramp_kv_options_t) -> Result<(Layout, Options)> {
    let arrangement = match options.arrangement {
        VRAMP_KV_SEPARATE => Arrangement::Separate,
        VRAMP_KV_INTERLEAVED => Arrangement::Interleaved,
        other => {
            let text =
                format!("{other} is no arrangement: use VRAMP_KV_SEPARATE or VRAMP_KV_INTERLEAVED");
            return Err(Failure::new(Kind::Range, text));
        }
    };
    let given = |bytes: u64, default: Bytes| if bytes == 0 { default } else { Bytes::new(bytes) };
    let layout = Layout {
        tensors: options.tensors,
        bytes_each: Bytes::new(options.bytes_each),
        page: given(options.page, Layout::default().page),
        arrangement,
    };
    let options = Options {
        superpage: given(options.superpage, Options::default().superpage),
        limit: limit(options.limit),
        ahead: Bytes::new(options.ahead),
    };
    Ok((layout, options))
}

fn limit(bytes: u64) -> Option<Bytes> {
    (bytes != 0).then(|| Bytes::new(bytes))
}

fn pages_to_c(pages: &[Range<u32>]) -> Vec<vramp_kv_pages_t> {
    pages.iter().map(|range| vramp_kv_pages_t { first: range.start, end: range.end }).collect()
}

/// Reads the pages of a call.
///
/// # Safety
/// `pages` is null or valid for reading `count` values.
unsafe fn pages_of(pages: *const vramp_kv_pages_t, count: usize) -> Result<Vec<Range<u32>>> {
    // SAFETY: required by this function's contract; any bytes are valid.
    let pages = unsafe { pointers::read_array(pages, count, "pages") }?;
    Ok(pages.into_iter().map(|pages| pages.first..pages.end).collect())
}

/// Runs `call` on an arena for caches of an open allocator and returns its status.
fn on(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    call: impl FnOnce(&Session, &Arena) -> Result<()>,
) -> vramp_status_t {
    handles::on(allocator, |session| call(session, &*session.caches.get(kv.id)?))
}

/// Runs `call` as [`on`] does, and writes what it returns.
///
/// # Safety
/// As of [`Out::check`].
unsafe fn out<O: Out>(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    out: O,
    call: impl FnOnce(&Session, &Arena) -> Result<O::Value>,
) -> vramp_status_t {
    let call = |session: &Session| call(session, &*session.caches.get(kv.id)?);
    // SAFETY: this function's contract is the same.
    unsafe { handles::out(allocator, out, call) }
}

/// Reserves addresses for tensors of a cache: keys and values of all layers, as long as they may ever be. They
/// stay the same until vramp_kv_destroy, so that captured graphs and kernels keep them. One driver call at most,
/// and no memory: an access to a page that has none is a fault of the card.
///
/// VRAMP_ERROR_RANGE for lengths that no arena can have; VRAMP_ERROR_UNSUPPORTED unless the preset is vramp and
/// the device has virtual memory.
///
/// # Safety
/// `options` is null, or its first eight bytes hold a size that is valid for reading; `kv` is null or valid for
/// writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kv_create(
    allocator: vramp_allocator_t,
    options: *const vramp_kv_options_t,
    kv: *mut vramp_kv_t,
) -> vramp_status_t {
    let create = |session: &Session| {
        // SAFETY: the struct begins with its size, and any bytes are valid; the rest is required by this
        // function's contract.
        let options = unsafe { pointers::read_sized(options, "options") }?;
        let (layout, options) = layout(&options)?;
        let arena = Arc::new(session.kv_arena(layout, options)?);
        let id = next_id();
        session.caches.lock().insert(id, arena);
        Ok(vramp_kv_t { id })
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (kv, "kv"), create) }
}

/// Ends an arena for caches. Its memory serves other requests once the work is over that was queued by now on
/// the streams that pages were committed for and parked behind, or recorded. Never waits, unless another thread
/// is in a call on the arena, which then ends it.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_kv_destroy(allocator: vramp_allocator_t, kv: vramp_kv_t) -> vramp_status_t {
    handles::on(allocator, |session| {
        let arena = session.caches.lock().remove(&kv.id);
        drop(arena.ok_or_else(|| unknown_kv(kv.id))?);
        Ok(())
    })
}

/// Returns the address of a tensor, counted from zero, and its length. With VRAMP_KV_INTERLEAVED it begins with
/// its first page, and every so many pages as there are tensors another one of its own follows; the length is
/// up to the end of the arena. `length` may be null.
///
/// # Safety
/// `address` and `length` are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kv_address(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    tensor: u32,
    address: *mut *mut c_void,
    length: *mut usize,
) -> vramp_status_t {
    let find = |_: &Session, arena: &Arena| {
        let tensors = arena.layout().tensors;
        if tensor >= tensors {
            let text = format!(
                "there are {tensors} tensors, counted from 0, and not {tensor}: use one of them"
            );
            return Err(Failure::new(Kind::Range, text));
        }
        let range = arena.range(tensor);
        Ok((range.start.number() as *mut c_void, range.len.count() as usize))
    };
    // SAFETY: required by this function's contract.
    unsafe { out(allocator, kv, ((address, "address"), length), find) }
}

/// Gives pages memory in all tensors, for work on `stream`: all of the pages, or none. The contents are not
/// defined. Pages that were parked cost no driver call.
///
/// With a stream of zero the memory is for work on any stream: then the call waits on the host for work that
/// still uses it.
///
/// VRAMP_ERROR_RANGE names a page that is committed, given twice, or beyond the last; VRAMP_ERROR_OUT_OF_MEMORY
/// if the card or the arena's limit has no room. Nothing is committed then, and what was parked stays parked.
///
/// # Safety
/// `pages` is null or valid for reading `count` values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kv_commit(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    pages: *const vramp_kv_pages_t,
    count: usize,
    stream: vramp_stream_t,
) -> vramp_status_t {
    on(allocator, kv, |session, arena| {
        // SAFETY: required by this function's contract.
        let pages = unsafe { pages_of(pages, count) }?;
        session.kv_commit(arena, &pages, session.stream_if_any(stream)?)
    })
}

/// Gives up pages, once the work that is queued on `stream` by now is over; with a stream of zero, the work of
/// all streams of the allocator. They stay mapped: committed again they cost no driver call, and contents are
/// lost only when another request of the process takes the memory. No driver call.
///
/// VRAMP_ERROR_RANGE names a page that is not committed. No page is parked then.
///
/// # Safety
/// `pages` is null or valid for reading `count` values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kv_park(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    pages: *const vramp_kv_pages_t,
    count: usize,
    stream: vramp_stream_t,
) -> vramp_status_t {
    on(allocator, kv, |session, arena| {
        // SAFETY: required by this function's contract.
        let pages = unsafe { pages_of(pages, count) }?;
        session.kv_park(arena, &pages, session.stream_if_any(stream)?)
    })
}

/// Commits `count` pages of the arena's choice, as vramp_kv_commit does: parked ones first. Writes them to
/// `pages`, of which there are `*ranges`. `capacity` has to be `count` at least: so many ranges there may be.
///
/// VRAMP_ERROR_RANGE if fewer pages are left.
///
/// # Safety
/// `pages` is null or valid for writing `capacity` values; `ranges` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kv_take(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    count: u32,
    stream: vramp_stream_t,
    pages: *mut vramp_kv_pages_t,
    capacity: usize,
    ranges: *mut usize,
) -> vramp_status_t {
    let take = |session: &Session, arena: &Arena| {
        pointers::check(pages, "pages")?;
        if capacity < count as usize {
            let text = format!(
                "capacity is {capacity}: use {count}, because {count} pages may lie in so many ranges"
            );
            return Err(Failure::new(Kind::Range, text));
        }
        let taken = session.kv_take(arena, count, session.stream_if_any(stream)?)?;
        // SAFETY: required by this function's contract.
        unsafe { pointers::write_array(pages, capacity, &pages_to_c(&taken), "pages") }?;
        Ok(taken.len())
    };
    // SAFETY: required by this function's contract.
    unsafe { out(allocator, kv, (ranges, "ranges"), take) }
}

/// Returns parked pages to the card, the oldest first, until at most `keep` bytes are parked. `*released` is the
/// bytes that were; it may be null. Waits for no work: pages whose work is not over stay parked, and so do those
/// in one handle with committed ones, and pinned ones.
///
/// # Safety
/// `released` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kv_release(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    keep: u64,
    released: *mut u64,
) -> vramp_status_t {
    let release = |_: &Session, arena: &Arena| Ok(arena.release(Bytes::new(keep))?.count());
    // SAFETY: required by this function's contract.
    unsafe { out(allocator, kv, released, release) }
}

/// Finds at most `count` committed pages, those first that are best given up: a handle goes back once none of
/// its pages is committed. Writes the first `capacity` ranges of them, and the number of all to `*ranges`.
///
/// # Safety
/// `pages` is null or valid for writing `capacity` values; `ranges` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kv_park_first(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    count: u32,
    pages: *mut vramp_kv_pages_t,
    capacity: usize,
    ranges: *mut usize,
) -> vramp_status_t {
    let find = |_: &Session, arena: &Arena| {
        let found = pages_to_c(&arena.park_first(count));
        // SAFETY: required by this function's contract.
        unsafe { pointers::write_array(pages, capacity, &found, "pages") }?;
        Ok(found.len())
    };
    // SAFETY: required by this function's contract.
    unsafe { out(allocator, kv, (ranges, "ranges"), find) }
}

/// Sets the most memory that an arena may have, parked pages included; zero is no limit. What is parked above it
/// serves other requests; what is committed stays.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_kv_set_limit(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    bytes: u64,
) -> vramp_status_t {
    on(allocator, kv, |_, arena| Ok(arena.set_limit(limit(bytes))?))
}

/// Notes that work queued on `stream` so far uses the arena. vramp_kv_destroy then leaves its memory alone until
/// that work is over. Streams of commits and parks are noted anyway.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_kv_record_use(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    stream: vramp_stream_t,
) -> vramp_status_t {
    on(allocator, kv, |session, arena| {
        arena.record_use(session.stream(stream)?);
        Ok(())
    })
}

/// Returns what an arena has. Set `stats->struct_size` to `sizeof(vramp_kv_stats_t)` before. No driver call.
///
/// # Safety
/// `stats` is null, or its first eight bytes hold a size that is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kv_stats(
    allocator: vramp_allocator_t,
    kv: vramp_kv_t,
    stats: *mut vramp_kv_stats_t,
) -> vramp_status_t {
    let find = |_: &Session, arena: &Arena| {
        let stats = arena.stats();
        Ok(vramp_kv_stats_t {
            struct_size: size_of::<vramp_kv_stats_t>() as u64,
            pages: stats.pages,
            committed: stats.committed,
            parked: stats.parked,
            moving: stats.moving,
            page_bytes: stats.page_bytes.count(),
            limit: stats.limit.map_or(0, Bytes::count),
        })
    };
    // SAFETY: the struct begins with its size; the rest is this function's contract.
    unsafe { out(allocator, kv, WithSize(stats, "stats"), find) }
}
