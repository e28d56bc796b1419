//! Calls about tiers, buffers, leases, reservations and regions, with ids that are valid, stale or made up,
//! and structs of any size. No call panics, finds itself inconsistent, or writes beyond its struct; one with an
//! id that was never returned is refused; and the allocator closes.
#![no_main]

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::ptr::{null, null_mut};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{vramp_allocator_t, vramp_stream_t};
use vramp_capi::interface::*;
use vramp_capi::sleep::abi::*;
use vramp_capi::sleep::callbacks::vramp_region_around_sleep;
use vramp_capi::sleep::*;
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::buffers::*;
use vramp_capi::tiers::leases::*;
use vramp_capi::tiers::observing::*;
use vramp_capi::tiers::paying::vramp_reservation_malloc;
use vramp_capi::tiers::reservations::*;
use vramp_capi::tiers::spaces::*;
use vramp_capi::tiers::*;

/// An object from an earlier call, by an index modulo their number, or a made-up value.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Pick {
    Earlier(u8),
    MadeUp(u64),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Call {
    Open { device_mib: u8, host_mib: u8 },
    Close,
    Buffer { pages: u8, odd: u16 },
    Destroy(Pick),
    Info(Pick, u16),
    Read { of: Pick, offset: u32, len: u16 },
    Write { of: Pick, offset: u32, len: u16 },
    Spill(Pick, u8),
    Retrieve(Pick),
    Discard(Pick),
    Hint(Pick, u32),
    Lease { of: [Pick; 2], access: u8 },
    EndLease(Pick, bool),
    Lock(Pick, u8),
    Unlock { sync: bool },
    Reserve { tier: u8, index: u8, bytes: u32 },
    Grow(Pick, u32),
    Release(Pick),
    Attach(Pick),
    Detach(Pick),
    Malloc(Pick, u32),
    Evict(u32),
    Stats(u16),
    Begin { tag: u8, backup: u8, read_only: bool, size: u8 },
    Disable,
    End(Pick),
    Pause { tags: [u8; 2], keep: u32, discard: bool },
    Resume([u8; 2]),
    Clean([u8; 2]),
    OnPressure { tags: [u8; 2], stays: bool },
    AroundSleep { tags: [u8; 2], fails: [bool; 2], stays: bool, size: u8 },
    Status { size: u8, capacity: u8 },
}

unsafe extern "C" fn succeed(_: *mut std::ffi::c_void) -> i32 {
    0
}

unsafe extern "C" fn fail(_: *mut std::ffi::c_void) -> i32 {
    1
}

const TAGS: [&CStr; 4] = [c"weights", c"kv", c"", c"\xff"];

/// An allocator, and the ids that its calls returned.
struct World {
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
    ids: Vec<u64>,
    /// Of scopes that did not end. They may, in any order.
    scopes: BTreeSet<u64>,
    blocks: Vec<usize>,
}

/// Room for a struct that the caller says is this long.
struct Fields([u64; 64]);

impl Fields {
    fn new(size: u16) -> Fields {
        let mut fields = [u64::MAX; 64];
        fields[0] = u64::from(size % 512);
        Fields(fields)
    }

    fn check(&self, size: u16, whole: usize) {
        let written = usize::from(size % 512).div_ceil(8).min(whole / 8).max(1);
        assert!(self.0[written..].iter().all(|field| *field == u64::MAX), "nothing beyond");
    }
}

fn sound(status: vramp_status_t) -> bool {
    assert!(![VRAMP_ERROR_INTERNAL, VRAMP_ERROR_INCONSISTENT].contains(&status), "{status:?}");
    status == VRAMP_OK
}

impl World {
    fn id(&self, pick: Pick) -> u64 {
        match pick {
            Pick::Earlier(nth) if !self.ids.is_empty() => {
                self.ids[usize::from(nth) % self.ids.len()]
            }
            Pick::Earlier(nth) => nth.into(),
            Pick::MadeUp(id) => id,
        }
    }

    /// Makes a call on an object.
    fn on(&self, pick: Pick, call: impl FnOnce(u64) -> vramp_status_t) -> bool {
        let id = self.id(pick);
        let done = sound(call(id));
        assert!(!done || self.ids.contains(&id), "{id} was never returned");
        done
    }

    fn tags<R>(&self, picked: [u8; 2], call: impl FnOnce(*const *const i8, usize) -> R) -> R {
        let texts =
            picked.map(|tag| TAGS.get(usize::from(tag % 5)).map_or(null(), |tag| tag.as_ptr()));
        // The first number is of the tags, too: none are all regions.
        call(texts.as_ptr(), usize::from(picked[0] / 5 % 3))
    }

    #[allow(clippy::too_many_lines, reason = "one arm for each call")]
    fn call(&mut self, call: Call) {
        let (allocator, stream) = (self.allocator, self.stream);
        let buffer = |id| vramp_buffer_t { id };
        let reservation = |id| vramp_reservation_t { id };
        match call {
            Call::Open { device_mib, host_mib } => {
                let options = vramp_tiers_options_t {
                    struct_size: size_of::<vramp_tiers_options_t>() as u64,
                    device_bytes: u64::from(device_mib) << 20,
                    host_bytes: u64::from(host_mib) << 20,
                    disk_directory: null(),
                    disk_bytes: 0,
                    store: null(),
                    peer_bytes: 0,
                };
                // SAFETY: the struct outlives the call.
                sound(unsafe { vramp_tiers_open_with(allocator, &options) });
            }
            Call::Close => drop(sound(vramp_tiers_close(allocator))),
            Call::Buffer { pages, odd } => {
                let (size, mut made) = ((u64::from(pages) << 16) + u64::from(odd), buffer(0));
                // SAFETY: the result outlives the call.
                if sound(unsafe { vramp_buffer_create(allocator, size, &mut made) }) {
                    assert!(size > 0);
                    self.ids.push(made.id);
                }
            }
            Call::Destroy(of) => {
                drop(self.on(of, |id| vramp_buffer_destroy(allocator, buffer(id))))
            }
            Call::Info(of, size) => {
                let mut fields = Fields::new(size);
                let to = fields.0.as_mut_ptr().cast();
                // SAFETY: the array is at least as large as its first number says.
                self.on(of, |id| unsafe { vramp_buffer_info(allocator, buffer(id), to) });
                fields.check(size, size_of::<vramp_buffer_info_t>());
            }
            Call::Read { of, offset, len } => {
                let mut bytes = vec![0_u8; usize::from(len)];
                let (to, offset) = (bytes.as_mut_ptr().cast(), offset.into());
                // SAFETY: the bytes outlive the call.
                self.on(of, |id| unsafe {
                    vramp_buffer_read(allocator, buffer(id), offset, to, bytes.len())
                });
            }
            Call::Write { of, offset, len } => {
                let bytes = vec![1_u8; usize::from(len)];
                let (from, offset) = (bytes.as_ptr().cast(), offset.into());
                // SAFETY: the bytes outlive the call.
                self.on(of, |id| unsafe {
                    vramp_buffer_write(allocator, buffer(id), offset, from, bytes.len())
                });
            }
            Call::Spill(of, tier) => {
                let tier = u32::from(tier % 4);
                // SAFETY: the result may be null.
                self.on(of, |id| unsafe {
                    vramp_buffer_spill_to(allocator, buffer(id), tier, null_mut())
                });
            }
            Call::Retrieve(of) => {
                self.on(of, |id| vramp_buffer_retrieve(allocator, buffer(id), 0));
            }
            Call::Discard(of) => {
                drop(self.on(of, |id| vramp_buffer_discard(allocator, buffer(id))))
            }
            Call::Hint(of, hint) => {
                self.on(of, |id| vramp_buffer_hint(allocator, buffer(id), hint));
            }
            Call::Lease { of, access } => {
                let uses = of.map(|of| vramp_buffer_use_t {
                    buffer: buffer(self.id(of)),
                    access: access.into(),
                });
                let (mut made, mut addresses) = (vramp_buffer_lease_t::default(), [null_mut(); 2]);
                let (from, to) = (uses.as_ptr(), addresses.as_mut_ptr());
                // SAFETY: the arrays have as many elements, and the results outlive the call.
                let status =
                    unsafe { vramp_buffers_lease(allocator, from, 2, stream, 0, to, &mut made) };
                if sound(status) {
                    assert!(addresses.iter().all(|address| !address.is_null()));
                    self.ids.push(made.id);
                }
            }
            Call::EndLease(of, cancel) => {
                self.on(of, |id| match (cancel, vramp_buffer_lease_t { id }) {
                    (true, lease) => vramp_buffer_lease_cancel(allocator, lease),
                    (false, lease) => vramp_buffer_lease_end(allocator, lease),
                });
            }
            Call::Lock(of, access) => {
                // SAFETY: the array outlives the call.
                self.on(of, |id| unsafe {
                    let uses = [vramp_buffer_use_t { buffer: buffer(id), access: access.into() }];
                    vramp_lock(allocator, uses.as_ptr(), 1, stream, 0, null_mut())
                });
            }
            Call::Unlock { sync: true } => drop(sound(vramp_sync_and_unlock(allocator, stream))),
            Call::Unlock { sync: false } => drop(sound(vramp_unlock(allocator, stream))),
            Call::Reserve { tier, index, bytes } => {
                let space =
                    vramp_space_t { tier: u32::from(tier % 4), index: u32::from(index % 2) };
                let mut made = reservation(0);
                // SAFETY: the result outlives the call.
                if sound(unsafe { vramp_reserve(allocator, space, bytes.into(), 0, 0, &mut made) })
                {
                    self.ids.push(made.id);
                }
            }
            Call::Grow(of, bytes) => {
                self.on(of, |id| {
                    vramp_reservation_grow(allocator, reservation(id), bytes.into(), 0)
                });
            }
            Call::Release(of) => {
                self.on(of, |id| vramp_reservation_release(allocator, reservation(id)));
            }
            Call::Attach(of) => {
                self.on(of, |id| vramp_reservation_attach(allocator, reservation(id), stream));
            }
            Call::Detach(of) => {
                self.on(of, |id| vramp_reservation_detach(allocator, reservation(id)));
            }
            Call::Malloc(of, size) => {
                let (size, mut address) = (size as usize, null_mut());
                // SAFETY: the result outlives the call.
                let placed = self.on(of, |id| unsafe {
                    vramp_reservation_malloc(allocator, reservation(id), size, stream, &mut address)
                });
                assert_eq!(placed, !address.is_null());
                self.blocks.extend(placed.then_some(address as usize));
            }
            Call::Evict(bytes) => {
                // SAFETY: the result may be null.
                sound(unsafe { vramp_evict(allocator, bytes.into(), null_mut()) });
            }
            Call::Stats(size) => {
                let mut fields = Fields::new(size);
                // SAFETY: the array is at least as large as its first number says.
                sound(unsafe { vramp_tiers_stats(allocator, fields.0.as_mut_ptr().cast()) });
                fields.check(size, size_of::<vramp_tiers_stats_t>());
                let space = vramp_space_t { tier: VRAMP_TIER_HOST, index: 0 };
                sound(vramp_space_reset_peak(allocator, space));
            }
            Call::Begin { tag, backup, read_only, size } => {
                let options = vramp_region_options_t {
                    struct_size: u64::from(size).max(u64::from(size > 0) * 16),
                    backup: backup.into(),
                    read_only: i32::from(read_only),
                };
                let mut scope = vramp_region_scope_t::default();
                let tag = TAGS[usize::from(tag % 4)].as_ptr();
                // SAFETY: the text ends with a zero, and the structs outlive the call.
                if sound(unsafe { vramp_region_begin(allocator, tag, &options, &mut scope) }) {
                    self.scopes.insert(scope.id);
                    self.ids.push(scope.id);
                }
            }
            Call::Disable => {
                let mut scope = vramp_region_scope_t::default();
                // SAFETY: the result outlives the call.
                if sound(unsafe { vramp_region_disable(allocator, &mut scope) }) {
                    self.scopes.insert(scope.id);
                    self.ids.push(scope.id);
                }
            }
            Call::End(of) => {
                let id = self.id(of);
                assert_eq!(
                    sound(vramp_region_end(vramp_region_scope_t { id })),
                    self.scopes.remove(&id)
                );
            }
            Call::Pause { tags, keep, discard } => {
                let options = vramp_pause_options_t {
                    struct_size: size_of::<vramp_pause_options_t>() as u64,
                    keep: keep.into(),
                    discard: i32::from(discard),
                };
                // SAFETY: the texts and the struct outlive the call.
                sound(self.tags(tags, |tags, count| unsafe {
                    vramp_region_pause(allocator, tags, count, &options)
                }));
            }
            Call::Resume(tags) => {
                // SAFETY: the texts outlive the call.
                sound(self.tags(tags, |tags, count| unsafe {
                    vramp_region_resume(allocator, tags, count)
                }));
            }
            Call::Clean(tags) => {
                // SAFETY: the texts outlive the call.
                sound(self.tags(tags, |tags, count| unsafe {
                    vramp_region_clean(allocator, tags, count)
                }));
            }
            Call::OnPressure { tags, stays } => {
                let mut number = 0;
                // SAFETY: the texts and the result outlive the call.
                let made = sound(self.tags(tags, |tags, count| unsafe {
                    vramp_region_on_pressure(allocator, tags, count, &mut number)
                }));
                if made && !stays {
                    assert_eq!(vramp_unobserve(allocator, number), VRAMP_OK);
                    assert_eq!(vramp_unobserve(allocator, number), VRAMP_ERROR_RANGE);
                }
            }
            Call::AroundSleep { tags, fails, stays, size } => {
                let code = |fails| if fails { fail as unsafe extern "C" fn(_) -> _ } else { succeed };
                let pair = vramp_sleep_callbacks_t {
                    struct_size: u64::from(size),
                    name: c"fuzzed".as_ptr(),
                    before: Some(code(fails[0])),
                    after: Some(code(fails[1])),
                    user: null_mut(),
                    is_collective: i32::from(stays),
                };
                let mut number = 0;
                // SAFETY: the texts and the structs outlive the call, and the functions use nothing.
                let made = sound(self.tags(tags, |tags, count| unsafe {
                    vramp_region_around_sleep(allocator, tags, count, &pair, &mut number)
                }));
                if made && !stays {
                    assert_eq!(vramp_unobserve(allocator, number), VRAMP_OK);
                    assert_eq!(vramp_unobserve(allocator, number), VRAMP_ERROR_RANGE);
                }
            }
            Call::Status { size, capacity } => {
                let (size, capacity) = (usize::from(size % 64) * 8, usize::from(capacity % 4));
                let mut fields = vec![u64::MAX; size / 8 * capacity + 2];
                fields[0] = size as u64;
                let (to, mut count) = (fields.as_mut_ptr().cast(), usize::MAX);
                // SAFETY: the array is as large as its first number says.
                let done =
                    sound(unsafe { vramp_region_status(allocator, to, capacity, &mut count) });
                let written = if done { count.min(capacity) * size / 8 } else { 1 };
                let rest = &fields[written.max(1)..];
                assert!(rest.iter().all(|field| *field == u64::MAX), "nothing beyond");
            }
        }
    }
}

fuzz_target!(|calls: Vec<Call>| {
    let (mut allocator, mut stream) = Default::default();
    // SAFETY: the texts end with zeros and the results outlive the calls.
    unsafe {
        assert_eq!(
            vramp_open(c"sim:rtx4090".as_ptr(), c"limit=64MiB".as_ptr(), &mut allocator),
            VRAMP_OK
        );
        assert_eq!(vramp_stream_create(allocator, &mut stream), VRAMP_OK);
    }
    let none = (Vec::new(), BTreeSet::new(), Vec::new());
    let mut world = World { allocator, stream, ids: none.0, scopes: none.1, blocks: none.2 };
    for call in calls.into_iter().take(200) {
        world.call(call);
    }
    for id in std::mem::take(&mut world.scopes) {
        assert_eq!(vramp_region_end(vramp_region_scope_t { id }), VRAMP_OK);
    }
    for address in std::mem::take(&mut world.blocks) {
        assert_eq!(vramp_free(allocator, address as *mut _, stream), VRAMP_OK);
    }
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
});
