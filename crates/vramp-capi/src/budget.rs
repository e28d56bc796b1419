//! Budgets in C: an allocator whose process shares a card with others.
//!
//! 1. [`vramp_budget_join`] joins a group and ties the allocator to the budget.
//! 2. [`vramp_budget_on_reclaim`] registers what gives way to other processes, and [`vramp_budget_on_sleep`] what
//!    puts the process's memory to sleep.
//! 3. The budget ends with the allocator.
//!
//! Deliberately absent: budgets without an allocator, and the members of a group: `vramp top` shows them.

pub mod abi;

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::time::Duration;

use vramp_alloc::Bytes;
use vramp_alloc::budget::{Ahead, Budget, BudgetConfig, PoolBudget, Sleep};

use crate::abi::{vramp_allocator_t, vramp_status_t};
use crate::budget::abi::*;
use crate::interface::User;
use crate::pointers::WithSize;
use crate::session::Session;
use crate::status::{Failure, Kind, Result};
use crate::{handles, pointers};

impl Session {
    fn budget(&self) -> Result<&PoolBudget> {
        let text = "the allocator has no budget: call vramp_budget_join first";
        self.budget.get().ok_or_else(|| Failure::new(Kind::Option, text))
    }
}

/// Joins a group of processes that share a card, and ties the allocator to the budget: from then on its limit is
/// what is claimed, and a request that passes it claims what it lacks. Other processes get idle memory of the
/// allocator, and then what vramp_budget_on_reclaim frees. The budget ends with the allocator.
///
/// VRAMP_ERROR_OPTION for amounts and names that cannot be; VRAMP_ERROR_OUT_OF_MEMORY if the others are guaranteed
/// too much; VRAMP_ERROR_TIMEOUT if they gave back too little; VRAMP_ERROR_IN_USE if the allocator has a budget, or
/// another process counts with another capacity. The message names the processes. Then the allocator is as before.
///
/// # Safety
/// `options` is null, or its first eight bytes hold a size that is valid for reading, and its texts are null or
/// zero-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_budget_join(
    allocator: vramp_allocator_t,
    options: *const vramp_budget_options_t,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        // SAFETY: the struct begins with its size, and any bytes are valid; the rest is required by this
        // function's contract.
        let options = unsafe { pointers::read_sized(options, "options") }?;
        // SAFETY: required by this function's contract.
        let directory = unsafe { pointers::given_text(options.directory, "options->directory") }?;
        // SAFETY: as above.
        let card = unsafe { pointers::given_text(options.card, "options->card") }?;
        // SAFETY: as above.
        let group = unsafe { pointers::given_text(options.group, "options->group") }?;
        // SAFETY: as above.
        let program = unsafe { pointers::text(options.program, "options->program") }?;
        let priority = u8::try_from(options.priority).map_err(|_| {
            let text = format!("options->priority is {}: use 0 to 255", options.priority);
            Failure::new(Kind::Range, text)
        })?;
        let patience = Duration::from_millis(options.patience_ms);
        let budget = Budget::join(&BudgetConfig {
            directory: Path::new(directory),
            card,
            group,
            program,
            capacity: options.capacity,
            guaranteed: options.guaranteed,
            limit: (options.limit != 0).then_some(options.limit),
            priority,
            timeout: patience,
        })?;
        let bytes = match options.ahead {
            0 => Ahead::default().bytes,
            bytes => Bytes::new(bytes),
        };
        let tied = session.allocator().join_budget(budget, Ahead { bytes, patience })?;
        // An allocator gets one budget only.
        let _ = session.budget.set(tied);
        Ok(())
    })
}

/// Returns what the process can have. Some instructions and a system call for each member.
///
/// # Safety
/// `room` is null, or its first eight bytes hold a size that is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_budget_room(
    allocator: vramp_allocator_t,
    room: *mut vramp_budget_room_t,
) -> vramp_status_t {
    let find = |session: &Session| {
        let budget = session.budget()?.budget();
        let found = budget.room()?;
        Ok(vramp_budget_room_t {
            struct_size: size_of::<vramp_budget_room_t>() as u64,
            claimed: budget.claimed(),
            available: found.available,
            obtainable: found.obtainable,
            most: found.most,
        })
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, WithSize(room, "room"), find) }
}

/// Returns idle memory of the allocator to the card, and gives back what is claimed and not reserved beyond the
/// guarantee. Returns the bytes in `*given`, which may be null.
///
/// # Safety
/// `given` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_budget_give_back(
    allocator: vramp_allocator_t,
    given: *mut u64,
) -> vramp_status_t {
    let give = |session: &Session| Ok(session.budget()?.give_back_idle()?.count());
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, given, give) }
}

/// Registers `handler`, which is called with `user` when another process lacks memory and nothing is idle: the
/// place to free blocks. Handlers run in the order of registration, until enough is free.
///
/// # Safety
/// `handler` may be called from any thread with `user` until the allocator is closed. It does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_budget_on_reclaim(
    allocator: vramp_allocator_t,
    handler: vramp_reclaim_handler_t,
    user: *mut c_void,
) -> vramp_status_t {
    let user = User(user);
    handles::on(allocator, |session| {
        let handler = pointers::function(handler, "handler")?;
        session.budget()?.on_reclaim(move |bytes| {
            // SAFETY: allowed by this function's contract.
            unsafe { handler(bytes.count(), user.get()) };
        });
        Ok(())
    })
}

/// Registers `handler`, which is called with `user` when a person or another program pauses or resumes this process's
/// memory: `vramp ctl pause`. It replaces an earlier one.
///
/// # Safety
/// `handler` may be called from any thread with `user` until the allocator is closed. It does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_budget_on_sleep(
    allocator: vramp_allocator_t,
    handler: vramp_sleep_handler_t,
    user: *mut c_void,
) -> vramp_status_t {
    let user = User(user);
    handles::on(allocator, |session| {
        let handler = pointers::function(handler, "handler")?;
        let registered = session.budget()?.budget().on_sleep(move |sleep| {
            let resume = c_int::from(sleep == Sleep::Resume);
            // SAFETY: allowed by this function's contract.
            unsafe { handler(resume, user.get()) != 0 }
        });
        Ok(registered?)
    })
}
