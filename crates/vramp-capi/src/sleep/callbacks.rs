//! Callbacks around the sleep of regions in C.

use std::ffi::{c_char, c_int};

use vramp_tiers::regions::{CallbackError, SleepCallbacks};

use super::tags_of;
use crate::abi::{vramp_allocator_t, vramp_status_t};
use crate::interface::User;
use crate::session::Session;
use crate::sleep::abi::*;
use crate::{handles, pointers};

/// Registers a pair of callbacks: `before` is called before memory of the regions with these tags leaves the card, and
/// `after` after it is back at its addresses. They end what other libraries know of the memory, such as windows of NCCL,
/// and make it again: what is pinned or exported cannot leave. A null `tags` with a `count` of zero means all regions;
/// regions need not exist yet. `*registration` receives the number for vramp_unobserve, which ends that; nothing is
/// called then, also where `before` was.
///
/// Pauses of every kind call them: vramp_region_pause, and vramp_region_on_pressure unless `is_collective` is set. A
/// pause calls `before` of each pair that covers one of its regions, in the order of registration, on its thread, before
/// it looks for pins; once, until `after` was called. A resume calls `after` of those of which no region sleeps any more,
/// in reverse order, and so does a pause that fails. If `before` fails no memory leaves, and `after` of those before it is
/// called. If `after` fails the memory is back, the others are called, and the next resume calls it again.
///
/// # Safety
/// The callbacks may be called from any thread with `user`, one call at a time, until the allocator is closed or
/// vramp_unobserve has returned; if that was called inside a callback, until a call in progress has returned too. They do
/// not unwind. `tags` is null or valid for reading `count` texts, each null or zero-terminated; `callbacks` is null, or its
/// first eight bytes hold a size that is valid for reading, and its name is null or zero-terminated; `registration` is
/// null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_region_around_sleep(
    allocator: vramp_allocator_t,
    tags: *const *const c_char,
    count: usize,
    callbacks: *const vramp_sleep_callbacks_t,
    registration: *mut u64,
) -> vramp_status_t {
    let register = |session: &Session| {
        // SAFETY: required by this function's contract.
        let tags = unsafe { tags_of(tags, count) }?;
        // SAFETY: the struct begins with its size, and any bytes are valid; the rest is required by this function's
        // contract.
        let given = unsafe { pointers::read_sized(callbacks, "callbacks") }?;
        // SAFETY: required by this function's contract.
        let name = unsafe { pointers::given_text(given.name, "callbacks->name") }?;
        let user = User(given.user);
        let calling = |function: vramp_sleep_callback_t| {
            move || {
                let Some(function) = function else { return Ok(()) };
                // SAFETY: allowed by this function's contract.
                worked(unsafe { function(user.get()) })
            }
        };
        session.around_sleep(SleepCallbacks {
            name: name.to_owned(),
            tags: tags.map(|tags| tags.into_iter().map(str::to_owned).collect()),
            is_collective: given.is_collective != 0,
            before: Box::new(calling(given.before)),
            after: Box::new(calling(given.after)),
        })
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (registration, "registration"), register) }
}

fn worked(code: c_int) -> Result<(), CallbackError> {
    match code {
        0 => Ok(()),
        code => Err(format!("it returned {code}").into()),
    }
}
