//! Regions by tag for C: scopes of threads, pauses and resumes.
//!
//! 1. [`vramp_region_begin`] starts a scope on the calling thread (`regions.rs`) and creates the region.
//! 2. [`vramp_region_pause`] and [`vramp_region_resume`] move its memory. The allocator stays open until
//!    they return, so a close on another thread waits for them.
//! 3. [`vramp_region_end`] ends the scope. It names no allocator, so that it can end after a close too.
//!
//! A pause or resume inside a callback is refused: the callback may run in the middle of another one, which
//! holds the region, and would wait for its own end.
//!
//! Growth: each call is O(log regions) for each tag, and a status O(regions). A region lives until it is removed
//! ([`vramp_region_remove`]) or the allocator is closed.
//!
//! Deliberately absent: calls in the background. Threads are the caller's own.

pub mod abi;
pub mod callbacks;

use std::ffi::{c_char, c_void};
use std::path::Path;

use vramp_alloc::observe::is_in_callback;
use vramp_alloc::{Bytes, DeviceAddr};
use vramp_tiers::regions::{
    Backup, PauseOptions, Phase, RegionError, RegionOptions, RegionStatus, Regions,
};

use crate::abi::vramp_allocator_t;
use crate::abi::vramp_status_t;
use crate::pointers::write_out;
use crate::queries::chars;
use crate::region_disk;
use crate::regions::{self, Tagged, Target};
use crate::session::Session;
use crate::sleep::abi::vramp_region_phase_t::*;
use crate::sleep::abi::*;
use crate::status::{Failure, Kind, Result, check_fork, status_of};
use crate::{handles, pointers};

/// Most tags of one call.
const TAGS_MAX: usize = 1 << 20;

fn backup(number: u32) -> Result<Backup> {
    match number {
        VRAMP_BACKUP_HOST => Ok(Backup::Host),
        VRAMP_BACKUP_NONE => Ok(Backup::None),
        VRAMP_BACKUP_DISK => Ok(Backup::Disk),
        other => {
            let text = format!(
                "{other} is no backup: use VRAMP_BACKUP_HOST, VRAMP_BACKUP_NONE or VRAMP_BACKUP_DISK"
            );
            Err(Failure::new(Kind::Range, text))
        }
    }
}

fn backup_to_c(backup: Backup) -> u32 {
    match backup {
        Backup::Host => VRAMP_BACKUP_HOST,
        Backup::None => VRAMP_BACKUP_NONE,
        Backup::Disk => VRAMP_BACKUP_DISK,
    }
}

fn status_to_c(status: &RegionStatus) -> vramp_region_status_t {
    vramp_region_status_t {
        struct_size: size_of::<vramp_region_status_t>() as u64,
        phase: match status.phase {
            Phase::Awake => VRAMP_REGION_AWAKE,
            Phase::Pausing => VRAMP_REGION_PAUSING,
            Phase::Asleep => VRAMP_REGION_ASLEEP,
            Phase::Resuming => VRAMP_REGION_RESUMING,
        },
        backup: backup_to_c(status.options.backup),
        read_only: i32::from(status.options.read_only),
        tag_length: u32::try_from(status.tag.len()).unwrap_or(u32::MAX),
        on_card: status.on_card.count(),
        asleep: status.asleep.count(),
        on_host: status.on_host.count(),
        on_disk: status.on_disk.count(),
        copied: status.copied.count(),
        to_copy: status.to_copy.count(),
        tag: chars(&status.tag),
    }
}

/// Reads options of a region. Null means the defaults.
///
/// # Safety
/// As of [`pointers::read_sized`].
unsafe fn region_options(options: *const vramp_region_options_t) -> Result<RegionOptions> {
    if options.is_null() {
        return Ok(RegionOptions::default());
    }
    // SAFETY: the struct begins with its size, and any bytes are valid; the rest is required by this
    // function's contract.
    let options = unsafe { pointers::read_sized(options, "options") }?;
    let (backup, read_only) = (backup(options.backup)?, options.read_only != 0);
    Ok(RegionOptions { backup, read_only, ..RegionOptions::default() })
}

/// Reads options of a pause. Null means the defaults.
///
/// # Safety
/// As of [`pointers::read_sized`].
unsafe fn pause_options(options: *const vramp_pause_options_t) -> Result<PauseOptions> {
    if options.is_null() {
        return Ok(PauseOptions::default());
    }
    // SAFETY: the struct begins with its size, and any bytes are valid; the rest is required by this
    // function's contract.
    let options = unsafe { pointers::read_sized(options, "options") }?;
    Ok(PauseOptions { keep: Bytes::new(options.keep), discard: options.discard != 0 })
}

/// Reads a tag.
///
/// # Safety
/// `tag` is null or zero-terminated, and does not change while the result lives.
unsafe fn tag_of<'a>(tag: *const c_char, name: &str) -> Result<&'a str> {
    if tag.is_null() {
        let text = format!("{name} is null: pass the tag of a region");
        return Err(Failure::new(Kind::Null, text));
    }
    // SAFETY: required by this function's contract.
    unsafe { pointers::text(tag, name) }
}

/// Reads the tags of a call. `None` means all regions.
///
/// # Safety
/// `tags` is null or valid for reading `count` texts, each null or zero-terminated, which do not change
/// while the result lives.
unsafe fn tags_of<'a>(tags: *const *const c_char, count: usize) -> Result<Option<Vec<&'a str>>> {
    if tags.is_null() && count == 0 {
        return Ok(None);
    }
    if count > TAGS_MAX {
        let text = format!("{count} tags: use at most {TAGS_MAX}");
        return Err(Failure::new(Kind::Range, text));
    }
    // SAFETY: required by this function's contract.
    let tags = unsafe { pointers::read_array(tags, count, "tags") }?;
    // SAFETY: required by this function's contract.
    let read = |(nth, &tag)| unsafe { tag_of(tag, &format!("tags[{nth}]")) };
    tags.iter().enumerate().map(read).collect::<Result<_>>().map(Some)
}

/// Calls `call` with the regions that the tags name. Does nothing if they name none.
fn with_regions(
    session: &Session,
    tags: Option<&[&str]>,
    call: impl FnOnce(&Regions, &[&str]) -> std::result::Result<(), RegionError>,
) -> Result<()> {
    let Some(regions) = session.regions_if_any() else {
        let unknown = tags.and_then(<[_]>::first);
        return unknown.map_or(Ok(()), |tag| {
            let text = format!("there is no region {tag:?}: vramp_region_begin creates one");
            Err(Failure::of_region(tag, text))
        });
    };
    if let Some(tags) = tags {
        return call(&regions, tags).map_err(not_moved);
    }
    let known = regions.status();
    let all: Vec<&str> = known.iter().map(|region| region.tag.as_str()).collect();
    call(&regions, &all).map_err(not_moved)
}

fn refuse_in_callback() -> Result<()> {
    if is_in_callback() {
        let text = "a callback runs on this thread, perhaps in the middle of a resume: return from it, and \
                    call then; vramp_region_on_pressure pauses regions for a request";
        return Err(Failure::new(Kind::Busy, text));
    }
    Ok(())
}

/// Calls `call` with the regions that the tags name, as [`with_regions`] does, unless a callback runs on this
/// thread.
///
/// # Safety
/// As of [`tags_of`].
unsafe fn move_regions(
    allocator: vramp_allocator_t,
    (tags, count): (*const *const c_char, usize),
    call: impl FnOnce(&Regions, &[&str]) -> std::result::Result<(), RegionError>,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        // SAFETY: this function's contract is the same.
        let tags = unsafe { tags_of(tags, count) }?;
        refuse_in_callback()?;
        with_regions(session, tags.as_deref(), call)
    })
}

/// Calls `one` for each tag, once all are looked up.
fn each(
    regions: &Regions,
    tags: &[&str],
    one: fn(&Regions, &str) -> std::result::Result<(), RegionError>,
) -> std::result::Result<(), RegionError> {
    tags.iter().try_for_each(|tag| regions.get(tag).map(drop))?;
    tags.iter().try_for_each(|tag| one(regions, tag))
}

#[cold]
fn not_moved(error: RegionError) -> Failure {
    match error.cause() {
        Some(kind) => Failure::new(kind, error.to_string()),
        None => error.into(),
    }
}

fn begin(session: &Session, tagged: Option<Tagged>) -> Result<vramp_region_scope_t> {
    // A pool that has no regions says so.
    session.region_table()?;
    if let Some(tagged) = &tagged {
        session.region(tagged)?;
    }
    let target = match session.device_number() {
        Some(device) => Target::Device(device),
        None => Target::Allocator(session.allocator().number()),
    };
    Ok(vramp_region_scope_t { id: regions::begin(target, tagged)? })
}

/// Starts a scope on the calling thread: until vramp_region_end, blocks that this thread allocates from the
/// allocator, by any call, are in the region `tag`, at most VRAMP_TAG_MAX bytes of UTF-8. Creates the region
/// if there is none. Scopes nest, and the innermost one of an allocator counts. Other threads are not
/// affected. A block of a region is used and freed as any other, in and outside of scopes.
///
/// `options` may be null for the defaults: contents go to the host. VRAMP_ERROR_OPTION if the region exists
/// with other options.
///
/// While the region sleeps allocations in it return VRAMP_ERROR_REGION.
///
/// # Safety
/// `tag` is null or zero-terminated; `options` is null, or its first eight bytes hold a size that is valid
/// for reading; `scope` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_region_begin(
    allocator: vramp_allocator_t,
    tag: *const c_char,
    options: *const vramp_region_options_t,
    scope: *mut vramp_region_scope_t,
) -> vramp_status_t {
    let begin = |session: &Session| {
        // SAFETY: required by this function's contract.
        let tag = unsafe { tag_of(tag, "tag") }?;
        if tag.len() > VRAMP_TAG_MAX {
            let text = format!("a tag of {} bytes: use at most {VRAMP_TAG_MAX}", tag.len());
            return Err(Failure::new(Kind::Range, text));
        }
        // SAFETY: required by this function's contract.
        let options = unsafe { region_options(options) }?;
        begin(session, Some(Tagged { tag: tag.to_owned(), options }))
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (scope, "scope"), begin) }
}

/// Starts a scope on the calling thread in which blocks are in no region, whatever scopes are around it.
///
/// # Safety
/// `scope` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_region_disable(
    allocator: vramp_allocator_t,
    scope: *mut vramp_region_scope_t,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (scope, "scope"), |session| begin(session, None)) }
}

/// Ends a scope of the calling thread, also after its allocator was closed. Scopes may end in any order, and
/// end with their thread. VRAMP_ERROR_REGION if it ended before, or began on another thread.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_region_end(scope: vramp_region_scope_t) -> vramp_status_t {
    status_of(|| {
        check_fork()?;
        regions::end(Some(scope.id))
    })
}

/// Removes a region without live blocks, after its idle memory went back to the card, so that a program with a
/// tag for each job leaves nothing. Waits for the work of the allocator's streams. Scopes with the tag create the
/// region anew when they allocate; a registration of vramp_region_on_pressure leaves a removed region out. The
/// region's counts leave the allocator's statistics.
///
/// VRAMP_ERROR_REGION for a tag that no region has, while the region has blocks, or memory that sleeps, is exported,
/// pinned or kept for graphs, and while a call of another thread uses it; VRAMP_ERROR_CAPTURE while a stream
/// captures a graph; VRAMP_ERROR_BUSY in a callback. The region is as before then.
///
/// # Safety
/// `tag` is null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_region_remove(
    allocator: vramp_allocator_t,
    tag: *const c_char,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        // SAFETY: required by this function's contract.
        let tag = unsafe { tag_of(tag, "tag") }?;
        refuse_in_callback()?;
        session.remove_region(tag)
    })
}

/// Puts regions to sleep, one after the other: copies what is allocated to the host, and gives the memory to
/// the card. Waits for the work of the card's streams first. What sleeps as far already is left as it is. A
/// null `tags` with a `count` of zero means all regions.
///
/// Until the resume work must not use the memory: a kernel that does ends the CUDA context. Frees are
/// served.
///
/// `options` may be null for the defaults: nothing stays on the card, and contents are copied.
///
/// VRAMP_ERROR_REGION for a tag that no region has, and where memory is exported or pinned; VRAMP_ERROR_CALLBACK if
/// one of vramp_region_around_sleep failed;
/// VRAMP_ERROR_CAPTURE while a stream captures a graph; VRAMP_ERROR_OUT_OF_MEMORY if the host has no room for
/// the copies; VRAMP_ERROR_UNSUPPORTED with presets other than vramp; VRAMP_ERROR_BUSY in a callback. Then
/// regions that this call paused are resumed. If that fails too, because the card is full, the message says
/// what sleeps, and a later resume goes on. A pause that discards may have given contents up before it
/// failed.
///
/// # Safety
/// `tags` is null or valid for reading `count` texts, each null or zero-terminated; `options` is null, or its
/// first eight bytes hold a size that is valid for reading.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_region_pause(
    allocator: vramp_allocator_t,
    tags: *const *const c_char,
    count: usize,
    options: *const vramp_pause_options_t,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        // SAFETY: required by this function's contract.
        let tags = unsafe { tags_of(tags, count) }?;
        // SAFETY: required by this function's contract.
        let options = unsafe { pause_options(options) }?;
        refuse_in_callback()?;
        with_regions(session, tags.as_deref(), |regions, tags| regions.pause(tags, options))
    })
}

/// Brings regions back to the same addresses, with their contents, one after the other. Does nothing about
/// those that are awake. A null `tags` with a `count` of zero means all regions.
///
/// VRAMP_ERROR_OUT_OF_MEMORY if the card has no room: the region sleeps on, those before it are awake, and a
/// later call goes on. VRAMP_ERROR_CALLBACK if one of vramp_region_around_sleep failed: the regions are awake, and a
/// later call calls it again. VRAMP_ERROR_REGION for a tag that no region has; VRAMP_ERROR_BUSY in a callback.
///
/// # Safety
/// `tags` is null or valid for reading `count` texts, each null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_region_resume(
    allocator: vramp_allocator_t,
    tags: *const *const c_char,
    count: usize,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    unsafe { move_regions(allocator, (tags, count), Regions::resume) }
}

/// Copies the contents of regions ahead, while they are awake, so that the next pause copies nothing. The
/// program writes nothing in them from this call until they were paused and resumed. Does nothing about
/// regions that sleep or have no backup. A null `tags` with a `count` of zero means all regions. Fails as
/// vramp_region_pause does; the region is as before.
///
/// # Safety
/// `tags` is null or valid for reading `count` texts, each null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_region_clean(
    allocator: vramp_allocator_t,
    tags: *const *const c_char,
    count: usize,
) -> vramp_status_t {
    let clean = |regions: &Regions, tags: &[&str]| each(regions, tags, Regions::clean);
    // SAFETY: required by this function's contract.
    unsafe { move_regions(allocator, (tags, count), clean) }
}

/// Opens a store in the folder `directory`, of at most `limit` bytes, or of the free space there if `limit` is
/// zero. Backups of regions with VRAMP_BACKUP_DISK go there from now on, of all allocators of the process but
/// those whose tiers have a disk. Files that are there already are left alone.
///
/// VRAMP_ERROR_FILE if the folder cannot be used.
///
/// # Safety
/// `directory` is null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_region_set_disk(
    directory: *const c_char,
    limit: u64,
) -> vramp_status_t {
    status_of(|| {
        check_fork()?;
        // SAFETY: required by this function's contract.
        let directory = unsafe { pointers::given_text(directory, "directory") }?;
        let limit = (limit != 0).then(|| Bytes::new(limit));
        region_disk::choose(Path::new(directory), limit)
    })
}

/// Reads the contents of sleeping regions from the disk into pinned host memory, so that a later resume copies
/// from there only. Needs no memory of the card. Does nothing about regions that are awake or have no copy on
/// a disk. A null `tags` with a `count` of zero means all regions.
///
/// VRAMP_ERROR_OUT_OF_MEMORY if the host has no room, and the region is as before.
///
/// # Safety
/// `tags` is null or valid for reading `count` texts, each null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_region_prefetch(
    allocator: vramp_allocator_t,
    tags: *const *const c_char,
    count: usize,
) -> vramp_status_t {
    let prefetch = |regions: &Regions, tags: &[&str]| each(regions, tags, Regions::prefetch);
    // SAFETY: required by this function's contract.
    unsafe { move_regions(allocator, (tags, count), prefetch) }
}

/// Reads `length` bytes of a block in a sleeping region, from `address` on, from the copy of the region to
/// `out`. VRAMP_ERROR_REGION if no sleeping region with a copy has these bytes.
///
/// # Safety
/// `out` is null or valid for writing `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_region_read_backup(
    allocator: vramp_allocator_t,
    address: *const c_void,
    out: *mut c_void,
    length: usize,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        pointers::check(out, "out")?;
        // SAFETY: required by this function's contract.
        let out = unsafe { pointers::bytes_mut(out, length, "out") }?;
        let Some(regions) = session.regions_if_any() else {
            let text = "the allocator has no regions: only memory of a region has a backup";
            return Err(Failure::new(Kind::Region, text));
        };
        regions.read_backup(DeviceAddr::new(address as u64), out).map_err(not_moved)
    })
}

/// Lets regions sleep by themselves, in this order and as far as needed, when a request finds no memory: one of
/// the allocator or in any of its regions, or a resume. The region whose own request or resume it is stays as it
/// is. They have to be resumed before they are used. A null `tags` with a `count` of zero means
/// the regions that there are now. `*registration` receives the number for vramp_unobserve, which ends that.
///
/// # Safety
/// `tags` is null or valid for reading `count` texts, each null or zero-terminated; `registration` is null or
/// valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_region_on_pressure(
    allocator: vramp_allocator_t,
    tags: *const *const c_char,
    count: usize,
    registration: *mut u64,
) -> vramp_status_t {
    let register = |session: &Session| {
        // SAFETY: required by this function's contract.
        let tags = unsafe { tags_of(tags, count) }?;
        let mut number = None;
        with_regions(session, tags.as_deref(), |regions, tags| {
            number = Some(regions.on_pressure(session.allocator(), tags)?.number());
            Ok(())
        })?;
        let text = "the allocator has no regions: vramp_region_begin creates one";
        number.ok_or_else(|| Failure::new(Kind::Region, text))
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (registration, "registration"), register) }
}

/// Writes the states of at most `capacity` regions, in the order of their tags, and the number of all to
/// `*count`. Set `statuses->struct_size` of the first to `sizeof(vramp_region_status_t)` before. With a
/// `capacity` of zero only the number is written. Waits for no pause. No driver call.
///
/// # Safety
/// `statuses` is null, or its first eight bytes hold a size, and `capacity` times that size is valid for
/// reading and writing; `count` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_region_status(
    allocator: vramp_allocator_t,
    statuses: *mut vramp_region_status_t,
    capacity: usize,
    count: *mut usize,
) -> vramp_status_t {
    let find = || {
        let find = |session: &Session| {
            let regions = session.regions_if_any();
            let known = regions.map_or_else(Vec::new, |regions| regions.status());
            Ok(known.iter().map(status_to_c).collect())
        };
        let find = || handles::with(allocator, find);
        // SAFETY: the struct begins with its size; the rest is this function's contract.
        unsafe { pointers::write_array_sized(statuses, capacity, find, "statuses") }
    };
    // SAFETY: required by this function's contract.
    unsafe { write_out((count, "count"), find) }
}
