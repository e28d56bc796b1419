//! Kept memory in C: memory that outlives its process, because a keeper holds it under a name.
//!
//! 1. [`vramp_keeper_open`] names the keeper: a process, `vramp keep`, with a directory.
//! 2. [`vramp_kept_draft`] begins memory of a name, [`vramp_kept_place`] returns addresses in it, and
//!    [`vramp_kept_commit`] makes it visible to other processes. [`vramp_kept_open`] opens it in another one.
//! 3. Locks hand it over in place: `kept/locks.rs`.
//! 4. [`vramp_kept_close`], or the close of the allocator, unmaps it. The keeper goes on keeping it.
//!
//! Deliberately absent: the keeper itself, and keepers without an allocator: `vramp keep list` shows what there is.

pub mod abi;
pub mod locks;
pub(crate) mod tables;

use std::ffi::{c_char, c_void};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vramp_alloc::Bytes;
use vramp_alloc::sharing::kept::{EntryStatus, Keeper, KeptOptions, Lock, MapAs, OpenKept};

use crate::abi::{vramp_allocator_t, vramp_status_t, vramp_stream_t};
use crate::ids::next_id;
use crate::kept::abi::vramp_kept_phase_t::*;
use crate::kept::abi::*;
use crate::kept::tables::{Kept, State, lock, unknown_keeper};
use crate::pointers::{WithSize, write_out};
use crate::queries::chars;
use crate::session::Session;
use crate::status::{Failure, Kind, Result, status_of};
use crate::{handles, pointers};

/// What a keeper has for one answer if the caller names no time.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Stands for no timeout.
const LONGEST: Duration = Duration::from_secs(1_000_000_000);

fn nanoseconds(timeout_ns: u64) -> Duration {
    Duration::from_nanos(timeout_ns).min(LONGEST)
}

fn deadline(timeout_ns: u64) -> Instant {
    Instant::now() + nanoseconds(timeout_ns)
}

fn lock_of(number: u32) -> Result<Lock> {
    match number {
        VRAMP_KEPT_READ => Ok(Lock::Read),
        VRAMP_KEPT_WRITE => Ok(Lock::Write),
        VRAMP_KEPT_UNLOCKED => Ok(Lock::None),
        other => {
            let text = format!(
                "{other} is no lock: use VRAMP_KEPT_READ, VRAMP_KEPT_WRITE or VRAMP_KEPT_UNLOCKED"
            );
            Err(Failure::new(Kind::Range, text))
        }
    }
}

fn lock_to_c(lock: Lock) -> u32 {
    match lock {
        Lock::Read => VRAMP_KEPT_READ,
        Lock::Write => VRAMP_KEPT_WRITE,
        Lock::None => VRAMP_KEPT_UNLOCKED,
    }
}

fn map_as(writable: bool) -> MapAs {
    if writable { MapAs::Writable } else { MapAs::ReadOnly }
}

/// Names the keeper of a directory, which only the user may use. No message: whether one runs, other calls find out.
/// A keeper that is silent for `timeout_ns` nanoseconds in one of its answers is an error; zero is 5 s. Waits for
/// other processes have timeouts of their own. The handle ends with the allocator, or with vramp_keeper_close. Use
/// one for all memory: it has the thread that restores what is open when the keeper is started again.
///
/// # Safety
/// `directory` is null or zero-terminated; `keeper` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_keeper_open(
    allocator: vramp_allocator_t,
    directory: *const c_char,
    timeout_ns: u64,
    keeper: *mut vramp_keeper_t,
) -> vramp_status_t {
    let open = |session: &Session| {
        // SAFETY: required by this function's contract.
        let directory = unsafe { pointers::given_text(directory, "directory") }?;
        let timeout = if timeout_ns == 0 { REPLY_TIMEOUT } else { nanoseconds(timeout_ns) };
        let id = next_id();
        let opened = Keeper::new(Path::new(directory), timeout);
        lock(&session.kept.keepers).insert(id, opened);
        Ok(vramp_keeper_t { id })
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (keeper, "keeper"), open) }
}

/// Ends the handle of a keeper. Memory that was opened with it stays open, and the keeper runs on.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_keeper_close(
    allocator: vramp_allocator_t,
    keeper: vramp_keeper_t,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        let closed = lock(&session.kept.keepers).remove(&keeper.id);
        drop(closed.ok_or_else(|| unknown_keeper(keeper.id))?);
        Ok(())
    })
}

/// Writes at most `capacity` names of a keeper with their states, in the order of the names, and the number of all to
/// `*count`. Set `entries->struct_size` of the first to `sizeof(vramp_kept_entry_t)` before. With a `capacity` of
/// zero only the number is written.
///
/// # Safety
/// `entries` is null, or its first eight bytes hold a size, and `capacity` times that size is valid for reading and
/// writing; `count` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_keeper_entries(
    allocator: vramp_allocator_t,
    keeper: vramp_keeper_t,
    entries: *mut vramp_kept_entry_t,
    capacity: usize,
    count: *mut usize,
) -> vramp_status_t {
    let find = || {
        let find = || {
            let keeper = handles::with(allocator, |session| session.kept.keeper(keeper.id))?;
            Ok(keeper.entries()?.iter().map(entry_to_c).collect())
        };
        // SAFETY: the struct begins with its size; the rest is this function's contract.
        unsafe { pointers::write_array_sized(entries, capacity, find, "entries") }
    };
    // SAFETY: required by this function's contract.
    unsafe { write_out((count, "count"), find) }
}

fn entry_to_c(entry: &EntryStatus) -> vramp_kept_entry_t {
    let current = entry.current.as_ref();
    let mut holders = current.iter().flat_map(|current| &current.holders);
    let writer = holders.find(|holder| holder.lock == Lock::Write);
    let idle = current.and_then(|current| current.idle).unwrap_or_default();
    vramp_kept_entry_t {
        struct_size: size_of::<vramp_kept_entry_t>() as u64,
        bytes: current.map_or(0, |current| current.bytes),
        epoch: current.map_or(0, |current| current.epoch),
        holders: current.map_or(0, |current| current.holder_count),
        waiting: entry.waiting,
        superseded: entry.superseded,
        idle_ns: u64::try_from(idle.as_nanos()).unwrap_or(u64::MAX),
        priority: current.map_or(0, |current| current.priority),
        torn: current.map_or(0, |current| i32::from(current.is_torn)),
        writer: writer.map_or(0, |holder| holder.pid),
        drafter: entry.draft_pid.unwrap_or(0),
        device: chars(current.map_or("", |current| &current.device)),
        name: chars(&entry.name),
    }
}

/// Removes a name. Processes that have its memory open keep it; otherwise it is freed. VRAMP_ERROR_NOT_KEPT if the
/// keeper has no such name.
///
/// # Safety
/// `name` is null or zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_keeper_remove(
    allocator: vramp_allocator_t,
    keeper: vramp_keeper_t,
    name: *const c_char,
) -> vramp_status_t {
    status_of(|| {
        let keeper = handles::with(allocator, |session| session.kept.keeper(keeper.id))?;
        // SAFETY: required by this function's contract.
        Ok(keeper.remove(unsafe { pointers::given_text(name, "name") }?)?)
    })
}

/// Frees memory of the allocator's card that no process has open, the lowest priority and the longest idle first,
/// until `bytes` were freed. `*freed` is how many were; it may be null.
///
/// # Safety
/// `freed` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_keeper_evict(
    allocator: vramp_allocator_t,
    keeper: vramp_keeper_t,
    bytes: u64,
    freed: *mut u64,
) -> vramp_status_t {
    let evict = |session: &Session| {
        let info = session.device().driver.info();
        let card = info.uuid.as_deref().unwrap_or(&info.id);
        Ok(session.kept.keeper(keeper.id)?.evict(card, bytes)?)
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, freed, evict) }
}

/// Begins memory of a name: 1 to 200 letters, digits and `._/:-`. It becomes the name's memory with vramp_kept_commit,
/// as a whole. A second draft of a name waits for the first, for `timeout_ns` nanoseconds: vramp_kept_state says what
/// epoch and digest the name has then, so that of several processes that load the same one does. Reserves addresses;
/// memory comes with vramp_kept_place.
///
/// VRAMP_ERROR_KEEPER if no keeper runs; VRAMP_ERROR_KEPT_BUSY at the timeout; VRAMP_ERROR_OUT_OF_MEMORY if the keeper's
/// limit has no room; VRAMP_ERROR_OPTION for names and amounts that cannot be. vramp_close waits for the call.
///
/// # Safety
/// `name` is null or zero-terminated; `options` is null, or its first eight bytes hold a size that is valid for
/// reading; `kept` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kept_draft(
    allocator: vramp_allocator_t,
    keeper: vramp_keeper_t,
    name: *const c_char,
    options: *const vramp_kept_options_t,
    timeout_ns: u64,
    kept: *mut vramp_kept_t,
) -> vramp_status_t {
    let begin = |session: &Session| {
        // SAFETY: required by this function's contract.
        let name = unsafe { pointers::given_text(name, "name") }?;
        // SAFETY: the struct begins with its size, and any bytes are valid; the rest is required by this
        // function's contract.
        let options = unsafe { pointers::read_sized(options, "options") }?;
        let keeper = session.kept.keeper(keeper.id)?;
        let part = match options.part {
            0 => KeptOptions::default().part,
            part => Bytes::new(part),
        };
        let kept_for = options.kept_for_ns;
        let wanted = KeptOptions {
            bytes: Bytes::new(options.bytes),
            part,
            priority: options.priority,
            kept_for: (kept_for != 0).then(|| Duration::from_nanos(kept_for)),
        };
        let until = deadline(timeout_ns);
        let draft = session.allocator().draft_kept(&keeper, name, &wanted, until)?;
        Ok(vramp_kept_t { id: session.kept.add(name, State::Draft(Box::new(draft))) })
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (kept, "kept"), begin) }
}

/// Returns the address of `size` bytes of a draft, aligned to 512 bytes, behind what was placed before. Contents are
/// not defined: work of the card or of the host fills them. Without memory on the card it makes room as vramp_malloc
/// does. Five driver calls for each new part.
///
/// On failure `*address` is set to null. VRAMP_ERROR_RANGE if the draft has fewer bytes left. VRAMP_ERROR_BUSY while
/// another call uses the draft, as in a handler that this one calls.
///
/// # Safety
/// `address` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kept_place(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
    size: usize,
    address: *mut *mut c_void,
) -> vramp_status_t {
    let place = |session: &Session| {
        let kept = session.kept.get(kept.id)?;
        let mut draft = kept.take_draft()?;
        let placed = draft.place(Bytes::new(size as u64));
        kept.put(State::Draft(draft));
        Ok(placed?.start.number() as *mut c_void)
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out_or(allocator, (address, "address"), std::ptr::null_mut(), place) }
}

/// Waits on the host for the work that was recorded, and makes a draft the memory of its name, which other processes
/// see as a whole. The handle and the addresses stay. `layout` says what lies where, in `length` bytes of the program's
/// own, and `digest`, 32 bytes, which contents these are; null is zeros.
///
/// With a `writable` of 0 work of this process may only read it from now on, and the process has the lock for reading.
/// Otherwise it has the lock for writing.
///
/// After an error the memory is this process's own, until it is closed. VRAMP_ERROR_RANGE if nothing was placed or the
/// layout is longer than 16 MiB.
///
/// # Safety
/// `layout` is null or valid for reading `length` bytes, `digest` null or valid for reading 32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kept_commit(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
    layout: *const c_void,
    length: usize,
    digest: *const u8,
    writable: i32,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        let kept = session.kept.get(kept.id)?;
        // SAFETY: required by this function's contract.
        let layout = unsafe { pointers::bytes(layout, length, "layout") }?;
        let digest = match digest.is_null() {
            true => [0; 32],
            // SAFETY: required by this function's contract; any bytes are valid.
            false => unsafe { pointers::read(digest.cast::<[u8; 32]>(), "digest") }?,
        };
        let draft = kept.take_draft()?;
        match draft.commit(layout, digest, map_as(writable != 0)) {
            Ok(memory) => {
                kept.put(State::Open(Arc::new(memory)));
                Ok(())
            }
            Err(failed) => {
                kept.put(State::Private(failed.memory));
                Err(Failure::of(&*failed.error))
            }
        }
    })
}

/// Opens the memory of a name. No copy; three driver calls for each part and two more. Without options it is mapped for
/// reading only, with the lock for reading, which is waited for `timeout_ns` nanoseconds at most.
///
/// VRAMP_ERROR_NOT_KEPT if there is no such memory; VRAMP_ERROR_KEPT_BUSY at the timeout, with the processes that have the
/// lock; VRAMP_ERROR_TORN; VRAMP_ERROR_KEEPER if no keeper runs; VRAMP_ERROR_DEVICE for memory of another card.
/// vramp_close waits for the call.
///
/// # Safety
/// `name` is null or zero-terminated; `options` is null, or its first eight bytes hold a size that is valid for
/// reading; `kept` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kept_open(
    allocator: vramp_allocator_t,
    keeper: vramp_keeper_t,
    name: *const c_char,
    options: *const vramp_kept_open_options_t,
    timeout_ns: u64,
    kept: *mut vramp_kept_t,
) -> vramp_status_t {
    let open = |session: &Session| {
        // SAFETY: required by this function's contract.
        let name = unsafe { pointers::given_text(name, "name") }?;
        let options = match options.is_null() {
            true => vramp_kept_open_options_t::default(),
            // SAFETY: the struct begins with its size, and any bytes are valid; the rest is required by this
            // function's contract.
            false => unsafe { pointers::read_sized(options, "options") }?,
        };
        let keeper = session.kept.keeper(keeper.id)?;
        let wanted = OpenKept {
            map: map_as(options.writable != 0),
            lock: lock_of(options.lock)?,
            same_addresses: options.any_addresses == 0,
        };
        let until = deadline(timeout_ns);
        let memory = session.allocator().open_kept(&keeper, name, wanted, until)?;
        Ok(vramp_kept_t { id: session.kept.add(name, State::Open(Arc::new(memory))) })
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (kept, "kept"), open) }
}

/// Returns the state of kept memory. Set `state->struct_size` to `sizeof(vramp_kept_state_t)` before. No message and
/// no driver call.
///
/// # Safety
/// `state` is null, or its first eight bytes hold a size that is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kept_state(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
    state: *mut vramp_kept_state_t,
) -> vramp_status_t {
    let find = |session: &Session| state_of(&*session.kept.get(kept.id)?);
    // SAFETY: the struct begins with its size; the rest is this function's contract.
    unsafe { handles::out(allocator, WithSize(state, "state"), find) }
}

fn state_of(kept: &Kept) -> Result<vramp_kept_state_t> {
    let empty = vramp_kept_state_t {
        struct_size: size_of::<vramp_kept_state_t>() as u64,
        address: std::ptr::null_mut(),
        bytes: 0,
        epoch: 0,
        layout_bytes: 0,
        digest: [0; 32],
        phase: VRAMP_KEPT_DRAFT,
        lock: VRAMP_KEPT_UNLOCKED,
        writable: 1,
        torn: 0,
        superseded: 0,
        adrift: 0,
        writer_waits: 0,
        reserved: 0,
    };
    let memory = match &*kept.lock() {
        State::Draft(draft) => {
            let (epoch, digest) = draft.current().unwrap_or_default();
            let address = draft.range().start.number() as *mut c_void;
            let bytes = draft.used().count();
            return Ok(vramp_kept_state_t { address, bytes, epoch, digest, ..empty });
        }
        State::Private(memory) => {
            let address = memory.range().start.number() as *mut c_void;
            let bytes = memory.range().len.count();
            return Ok(vramp_kept_state_t { address, bytes, phase: VRAMP_KEPT_PRIVATE, ..empty });
        }
        State::Open(memory) => Arc::clone(memory),
        other => return Err(kept.refusal(other)),
    };
    let hold = memory.hold();
    Ok(vramp_kept_state_t {
        address: memory.range().start.number() as *mut c_void,
        bytes: memory.range().len.count(),
        epoch: memory.epoch(),
        layout_bytes: memory.layout().len() as u64,
        digest: hold.digest(),
        phase: VRAMP_KEPT_OPEN,
        lock: lock_to_c(hold.held_lock()),
        writable: i32::from(memory.map() == MapAs::Writable),
        torn: i32::from(hold.is_torn()),
        superseded: i32::from(hold.is_superseded()),
        adrift: i32::from(hold.is_adrift()),
        writer_waits: i32::from(hold.writer_waits()),
        ..empty
    })
}

/// Copies the first `capacity` bytes of the publisher's layout to `layout`, and writes the number of all to `*length`.
/// No message.
///
/// # Safety
/// `layout` is null or valid for writing `capacity` bytes; `length` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_kept_layout(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
    layout: *mut c_void,
    capacity: usize,
    length: *mut usize,
) -> vramp_status_t {
    let find = |session: &Session| {
        let memory = session.kept.get(kept.id)?.open()?;
        let found = memory.layout();
        // SAFETY: required by this function's contract.
        unsafe { pointers::write_array(layout.cast::<u8>(), capacity, found, "layout") }?;
        Ok(found.len())
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (length, "length"), find) }
}

/// Records that work queued on `stream`, so far and from now on, uses kept memory: a commit, and what gives the lock
/// or the memory back, waits for it on the host. No driver call.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_kept_record_use(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
    stream: vramp_stream_t,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        let kept = session.kept.get(kept.id)?;
        let stream = session.stream(stream)?;
        match &*kept.lock() {
            State::Draft(draft) => Ok(draft.record_use(stream)?),
            State::Private(memory) => Ok(memory.record_use(stream)?),
            State::Open(memory) => Ok(memory.record_use(stream)?),
            other => Err(kept.refusal(other)),
        }
    })
}

/// Closes kept memory: waits on the host for recorded work, unmaps it, and gives the lock back. The keeper goes on
/// keeping it. A draft is given up, and its memory is freed. If another thread is in a call on it, that call ends it.
/// If the wait fails, as while a recorded stream captures, it stays mapped until the process ends.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_kept_close(
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
) -> vramp_status_t {
    handles::on(allocator, |session| match session.kept.remove(kept.id)? {
        State::Open(memory) => match Arc::into_inner(memory) {
            Some(memory) => Ok(memory.close()?),
            None => Ok(()),
        },
        State::Private(memory) => Ok(memory.close()?),
        State::Draft(_) | State::InCall | State::Closed => Ok(()),
    })
}
