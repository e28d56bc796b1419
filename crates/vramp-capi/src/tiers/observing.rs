//! Observers of buffers' states, statistics and failures.

use std::ffi::{CString, c_void};

use vramp_defer::report::{DeferCensus, SpillStats};

use crate::abi::vramp_allocator_t;
use crate::abi::vramp_status_t;
use crate::interface::{User, registered};
use crate::pointers::WithSize;
use crate::regions::PinnedMemory;
use crate::session::Session;
use crate::status::status_of;
use crate::tiers::abi::*;
use crate::tiers::slot::OpenTiers;
use crate::{handles, pointers};

impl OpenTiers {
    fn stats(&self) -> vramp_tiers_stats_t {
        let manager = self.manager();
        let census: DeferCensus = manager.census();
        let stats: SpillStats = manager.stats();
        let pinned = PinnedMemory::of([self.tiers().host_pool()]);
        vramp_tiers_stats_t {
            struct_size: size_of::<vramp_tiers_stats_t>() as u64,
            buffers: census.buffers as u64,
            leases: census.leases as u64,
            waiting: census.waiting as u64,
            total: census.total.count(),
            empty: census.empty.count(),
            resident: census.resident.count(),
            deferred: census.spilled.count(),
            host_copies: census.host_copies.count(),
            disk_copies: census.disk_copies.count(),
            peer_copies: census.peer_copies.count(),
            leased: census.leased.count(),
            to_host: stats.to_host_bytes,
            to_disk: stats.to_disk_bytes,
            to_peer: stats.to_peer_bytes,
            from_host: stats.from_host_bytes,
            from_disk: stats.from_disk_bytes,
            from_peer: stats.from_peer_bytes,
            evictions: stats.spills,
            evicted: stats.freed_bytes,
            waits: stats.waits,
            waited_ns: stats.waited_ns,
            failures: stats.failures,
            host_pinned: pinned.pinned.count(),
            host_used: pinned.used.count(),
            reads_in_place: stats.reads_in_place,
            promotions: stats.promotions,
        }
    }
}

/// Registers `observer`, which a thread of vramp calls with `user` for every change of a buffer from now
/// on. No change waits for it: it gets events a little later, those of one buffer in their order. If it
/// falls behind by more than 65,536 events the oldest are dropped, and it gets VRAMP_BUFFER_EVENTS_LOST.
/// `*registration` receives the number for vramp_buffers_unobserve.
///
/// # Safety
/// `observer` may be called on another thread with `user` until vramp_buffers_unobserve,
/// vramp_tiers_close or vramp_close has returned; if vramp_buffers_unobserve was called inside it, until
/// it has returned. It does not unwind. `registration` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_buffers_observe(
    allocator: vramp_allocator_t,
    observer: vramp_buffer_observer_t,
    user: *mut c_void,
    registration: *mut u64,
) -> vramp_status_t {
    let user = User(user);
    let register = |session: &Session| {
        let observer = pointers::function(observer, "observer")?;
        let call = move |event: &vramp_buffer_event_t| {
            // SAFETY: allowed by this function's contract.
            unsafe { observer(event, user.get()) }
        };
        let tiers = session.open_tiers()?;
        tiers.dispatch.add(tiers.manager(), Box::new(call))
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (registration, "registration"), register) }
}

/// Removes an observer of buffers. When it returns, no call of it is in progress or begins, and `user`
/// may be freed. So the caller must hold no lock that it takes. Inside an observer it does not wait.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_buffers_unobserve(
    allocator: vramp_allocator_t,
    registration: u64,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        registered(session.open_tiers()?.dispatch.remove(registration))
    })
}

/// Returns statistics of the buffers. Set `stats->struct_size` to `sizeof(vramp_tiers_stats_t)` before.
/// O(n) in the pieces of all buffers, which are summed while other calls wait.
///
/// # Safety
/// `stats` is null, or its first eight bytes hold a size that is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_tiers_stats(
    allocator: vramp_allocator_t,
    stats: *mut vramp_tiers_stats_t,
) -> vramp_status_t {
    let find = |session: &Session| Ok(session.open_tiers()?.stats());
    // SAFETY: the struct begins with its size; the rest is this function's contract.
    unsafe { handles::out(allocator, WithSize(stats, "stats"), find) }
}

/// Calls `visitor` with the last moves that failed, the oldest first: a text that names the piece and
/// the cause. Contents stayed where they were. `visitor` may call vramp, and close the allocator.
///
/// # Safety
/// `visitor` may be called with `user`, on this thread and before the function returns. It does not
/// unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_tiers_failures(
    allocator: vramp_allocator_t,
    visitor: vramp_text_visitor_t,
    user: *mut c_void,
) -> vramp_status_t {
    status_of(|| {
        let visitor = pointers::function(visitor, "visitor")?;
        let find = |session: &Session| Ok(session.open_tiers()?.manager().failures());
        for failed in handles::with(allocator, find)? {
            let text = CString::new(failed.to_string().replace('\0', "\\0")).unwrap_or_default();
            // SAFETY: allowed by this function's contract.
            unsafe { visitor(text.as_ptr(), user) };
        }
        Ok(())
    })
}
