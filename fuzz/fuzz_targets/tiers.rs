//! Calls about tiers, reservations, buffers and leases, and the statuses that they may return.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::ptr::null_mut;

use arbitrary::Arbitrary;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{vramp_allocator_t, vramp_stream_t};
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::buffers::*;
use vramp_capi::tiers::leases::*;
use vramp_capi::tiers::observing::*;
use vramp_capi::tiers::reservations::*;
use vramp_capi::tiers::spaces::*;
use vramp_capi::tiers::*;

/// A call with numbers that the model has picked: of earlier objects, or made up.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum TiersCall {
    Open { device_mib: u8, host_mib: u8 },
    Close,
    Create { pages: u8, odd: u16 },
    Destroy,
    Info { size: u16 },
    Read { offset: u32, len: u16 },
    Write { offset: u32, len: u16 },
    Spill { tier: u8 },
    Retrieve,
    Discard,
    Hint(u32),
    Lease { access: u8, twice: bool },
    EndLease { cancel: bool },
    Lock { access: u8 },
    Unlock { sync: bool },
    Reserve { tier: u8, index: u8, bytes: u32 },
    Grow { bytes: u32 },
    Release,
    Attach,
    Detach,
    Evict { bytes: u32 },
    Stats { size: u16 },
}

/// The objects of one allocator's tiers.
#[derive(Default)]
pub struct Tiers {
    pub buffers: BTreeSet<u64>,
    leases: BTreeSet<u64>,
    pub reservations: BTreeSet<u64>,
}

/// What a call is about.
pub struct Target {
    pub allocator: vramp_allocator_t,
    pub stream: vramp_stream_t,
    /// True if a capture may forbid the call.
    pub captures: bool,
    pub object: u64,
    pub other: u64,
}

/// Statuses of a call that reached the memory: it may lack some, or other objects are in the way.
const MAY: [vramp_status_t; 7] = [
    VRAMP_OK,
    VRAMP_ERROR_OUT_OF_MEMORY,
    VRAMP_ERROR_TIMEOUT,
    VRAMP_ERROR_BUSY,
    VRAMP_ERROR_RANGE,
    VRAMP_ERROR_CAPTURE,
    VRAMP_ERROR_UNKNOWN_STREAM,
];

fn may(status: vramp_status_t, others: &[vramp_status_t]) -> bool {
    assert!(MAY.contains(&status) || others.contains(&status), "{status:?}");
    status == VRAMP_OK
}

/// Makes one call on an allocator, whose tiers are `tiers` if it is open and has some. Returns the id of
/// an object that it made.
pub fn call(tiers: &mut Option<Tiers>, call: TiersCall, on: &Target) -> Option<u64> {
    let Target { allocator, stream, captures, object, other } = *on;
    let (buffer, lease) = (vramp_buffer_t { id: object }, vramp_buffer_lease_t { id: object });
    let reservation = vramp_reservation_t { id: object };
    if let TiersCall::Open { device_mib, host_mib } = call {
        let options = vramp_tiers_options_t {
            struct_size: size_of::<vramp_tiers_options_t>() as u64,
            device_bytes: u64::from(device_mib) << 20,
            host_bytes: u64::from(host_mib) << 20,
            disk_directory: std::ptr::null(),
            disk_bytes: 0,
            store: std::ptr::null(),
        };
        // SAFETY: the struct outlives the call.
        let status = unsafe { vramp_tiers_open_with(allocator, &options) };
        let is_open = tiers.is_some();
        match status {
            VRAMP_OK => {
                assert!(!is_open);
                *tiers = Some(Tiers::default());
            }
            VRAMP_ERROR_BUSY => assert!(is_open),
            // Other presets have no addresses that stay.
            VRAMP_ERROR_OPTION | VRAMP_ERROR_DRIVER | VRAMP_ERROR_OUT_OF_MEMORY => {}
            status => panic!("{status:?}"),
        }
        return None;
    }
    let Some(known) = tiers else {
        assert_eq!(without_tiers(call, on), VRAMP_ERROR_NO_TIERS, "{call:?}");
        return None;
    };
    let is_buffer = known.buffers.contains(&object);
    let wrong_buffer = (!is_buffer).then_some(VRAMP_ERROR_UNKNOWN_BUFFER);
    let of_buffer = |status: vramp_status_t| match wrong_buffer {
        Some(wrong) => assert_eq!(status, wrong, "{call:?}"),
        None => drop(may(status, &[])),
    };
    match call {
        TiersCall::Close => match vramp_tiers_close(allocator) {
            VRAMP_OK => *tiers = None,
            status => assert!(captures && status == VRAMP_ERROR_CAPTURE, "{status:?}"),
        },
        TiersCall::Create { pages, odd } => {
            let size = (u64::from(pages) << 16) + u64::from(odd);
            let mut made = vramp_buffer_t::default();
            // SAFETY: the result outlives the call.
            if may(unsafe { vramp_buffer_create(allocator, size, &mut made) }, &[]) {
                assert!(known.buffers.insert(made.id) && size > 0);
                return Some(made.id);
            }
        }
        TiersCall::Destroy => {
            let status = vramp_buffer_destroy(allocator, buffer);
            assert_eq!(status, wrong_buffer.unwrap_or(VRAMP_OK));
            known.buffers.remove(&object);
        }
        TiersCall::Info { size } => {
            let mut fields = [u64::MAX; 64];
            fields[0] = u64::from(size % 512);
            // SAFETY: the array is at least as large as its first number says.
            let status =
                unsafe { vramp_buffer_info(allocator, buffer, fields.as_mut_ptr().cast()) };
            let small = (size % 512 < 16).then_some(VRAMP_ERROR_STRUCT_SIZE);
            assert_eq!(status, small.or(wrong_buffer).unwrap_or(VRAMP_OK));
            let whole = size_of::<vramp_buffer_info_t>() / 8;
            assert!(fields[whole..].iter().all(|field| *field == u64::MAX), "nothing beyond");
        }
        TiersCall::Read { offset, len } => {
            let mut bytes = vec![0_u8; usize::from(len)];
            let to = bytes.as_mut_ptr().cast::<c_void>();
            // SAFETY: the bytes outlive the call.
            of_buffer(unsafe {
                vramp_buffer_read(allocator, buffer, offset.into(), to, bytes.len())
            });
        }
        TiersCall::Write { offset, len } => {
            let bytes = vec![1_u8; usize::from(len)];
            let from = bytes.as_ptr().cast::<c_void>();
            // SAFETY: the bytes outlive the call.
            of_buffer(unsafe {
                vramp_buffer_write(allocator, buffer, offset.into(), from, bytes.len())
            });
        }
        TiersCall::Spill { tier } => {
            let tier = u32::from(tier % 4);
            // SAFETY: the result may be null.
            let status = unsafe { vramp_buffer_spill_to(allocator, buffer, tier, null_mut()) };
            match tier {
                VRAMP_TIER_HOST | VRAMP_TIER_DISK => of_buffer(status),
                _ => assert_eq!(status, VRAMP_ERROR_RANGE),
            }
        }
        TiersCall::Retrieve => of_buffer(vramp_buffer_retrieve(allocator, buffer, 0)),
        TiersCall::Discard => of_buffer(vramp_buffer_discard(allocator, buffer)),
        TiersCall::Hint(hint) => of_buffer(vramp_buffer_hint(allocator, buffer, hint)),
        TiersCall::Lease { access, twice } => {
            let uses = [object, if twice { object } else { other }].map(|id| vramp_buffer_use_t {
                buffer: vramp_buffer_t { id },
                access: access.into(),
            });
            let mut made = vramp_buffer_lease_t::default();
            let mut addresses = [null_mut(); 2];
            let (from, to) = (uses.as_ptr(), addresses.as_mut_ptr());
            // SAFETY: the arrays have as many elements, and the results outlive the call.
            let status =
                unsafe { vramp_buffers_lease(allocator, from, 2, stream, 0, to, &mut made) };
            if may(status, &[VRAMP_ERROR_UNKNOWN_BUFFER]) {
                assert!(is_buffer && addresses.iter().all(|address| !address.is_null()));
                known.leases.insert(made.id);
                return Some(made.id);
            }
        }
        TiersCall::EndLease { cancel } => {
            let status = match cancel {
                true => vramp_buffer_lease_cancel(allocator, lease),
                false => vramp_buffer_lease_end(allocator, lease),
            };
            let expected =
                if known.leases.remove(&object) { VRAMP_OK } else { VRAMP_ERROR_UNKNOWN_LEASE };
            assert_eq!(status, expected);
        }
        TiersCall::Lock { access } => {
            let uses = [vramp_buffer_use_t { buffer, access: access.into() }];
            // SAFETY: the array outlives the call.
            let status = unsafe { vramp_lock(allocator, uses.as_ptr(), 1, stream, 0, null_mut()) };
            may(status, &[VRAMP_ERROR_UNKNOWN_BUFFER]);
        }
        TiersCall::Unlock { sync } => {
            let status = match sync {
                true => vramp_sync_and_unlock(allocator, stream),
                false => vramp_unlock(allocator, stream),
            };
            may(status, &[VRAMP_ERROR_UNKNOWN_LEASE]);
        }
        TiersCall::Reserve { tier, index, bytes } => {
            let space = vramp_space_t { tier: u32::from(tier % 4), index: u32::from(index % 2) };
            let mut made = vramp_reservation_t::default();
            // SAFETY: the result outlives the call.
            let status = unsafe { vramp_reserve(allocator, space, bytes.into(), 0, 0, &mut made) };
            if may(status, &[VRAMP_ERROR_UNKNOWN_SPACE]) {
                known.reservations.insert(made.id);
                return Some(made.id);
            }
        }
        TiersCall::Grow { .. } | TiersCall::Release | TiersCall::Attach | TiersCall::Detach => {
            let is_known = known.reservations.contains(&object);
            let status = match call {
                TiersCall::Grow { bytes } => {
                    vramp_reservation_grow(allocator, reservation, bytes.into(), 0)
                }
                TiersCall::Attach => vramp_reservation_attach(allocator, reservation, stream),
                TiersCall::Detach => vramp_reservation_detach(allocator, reservation),
                _ => {
                    known.reservations.remove(&object);
                    vramp_reservation_release(allocator, reservation)
                }
            };
            match is_known {
                true => drop(may(status, &[VRAMP_ERROR_UNKNOWN_SPACE])),
                // A stream is looked up first.
                false => assert!(
                    [VRAMP_ERROR_UNKNOWN_RESERVATION, VRAMP_ERROR_UNKNOWN_STREAM].contains(&status),
                    "{status:?}"
                ),
            }
        }
        TiersCall::Evict { bytes } => {
            // SAFETY: the result may be null.
            assert_eq!(unsafe { vramp_evict(allocator, bytes.into(), null_mut()) }, VRAMP_OK);
        }
        TiersCall::Stats { size } => {
            let mut fields = [u64::MAX; 64];
            fields[0] = u64::from(size % 512);
            // SAFETY: the array is at least as large as its first number says.
            let status = unsafe { vramp_tiers_stats(allocator, fields.as_mut_ptr().cast()) };
            let small = (size % 512 < 16).then_some(VRAMP_ERROR_STRUCT_SIZE);
            assert_eq!(status, small.unwrap_or(VRAMP_OK));
            let space = vramp_space_t { tier: VRAMP_TIER_HOST, index: 0 };
            assert_eq!(vramp_space_reset_peak(allocator, space), VRAMP_OK);
        }
        TiersCall::Open { .. } => unreachable!("it was handled above"),
    }
    None
}

/// Calls of an allocator without tiers that all fail alike.
fn without_tiers(call: TiersCall, on: &Target) -> vramp_status_t {
    let Target { allocator, stream, object, .. } = *on;
    let buffer = vramp_buffer_t { id: object };
    match call {
        TiersCall::Create { .. } => {
            let mut made = vramp_buffer_t::default();
            // SAFETY: the result outlives the call.
            unsafe { vramp_buffer_create(allocator, 4096, &mut made) }
        }
        TiersCall::Destroy => vramp_buffer_destroy(allocator, buffer),
        TiersCall::Unlock { .. } => vramp_unlock(allocator, stream),
        TiersCall::Close => vramp_tiers_close(allocator),
        _ => vramp_buffer_discard(allocator, buffer),
    }
}
