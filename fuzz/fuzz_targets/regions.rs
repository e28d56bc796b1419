//! Calls about regions, and the statuses that they may return.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::ptr::null;

use arbitrary::Arbitrary;
use vramp_capi::abi::vramp_allocator_t;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::interface::vramp_unobserve;
use vramp_capi::sleep::abi::*;
use vramp_capi::sleep::*;

const TAGS: [&CStr; 4] = [c"weights", c"kv", c"", c"\xff"];

/// The tag that is no text.
const NO_TEXT: usize = 3;

/// Tags of a call: some of [`TAGS`], null pointers, or all regions.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Tags {
    All,
    Some { picked: [u8; 2], count: u8 },
}

/// A call about the regions of an allocator.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum RegionsCall {
    Begin { tag: u8, backup: u8, read_only: bool, size: u8 },
    Disable,
    Pause { tags: Tags, keep: u32, discard: bool },
    Resume(Tags),
    Clean(Tags),
    OnPressure { tags: Tags, stays: bool },
    Status { size: u16, capacity: u8 },
}

/// The regions of one allocator: their options by their tags.
#[derive(Default)]
pub struct Regions {
    known: BTreeMap<usize, (u32, bool)>,
    may_sleep: bool,
}

impl Regions {
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Returns true if one may be asleep.
    pub fn may_sleep(&self) -> bool {
        self.may_sleep
    }

    /// Returns what is wrong with tags.
    fn wrong(&self, tags: Tags, is_open: bool) -> Option<vramp_status_t> {
        let unopened = (!is_open).then_some(VRAMP_ERROR_UNKNOWN_ALLOCATOR);
        let Tags::Some { picked, count } = tags else { return unopened };
        let mut used = picked[..usize::from(count % 3)].iter().map(|tag| usize::from(tag % 5));
        let unread = used.clone().find_map(|tag| match tag {
            4 => Some(VRAMP_ERROR_NULL),
            NO_TEXT => Some(VRAMP_ERROR_TEXT),
            _ => None,
        });
        let unknown = used.any(|tag| !self.known.contains_key(&tag));
        unread.or(unopened).or(unknown.then_some(VRAMP_ERROR_REGION))
    }
}

fn with_tags<R>(tags: Tags, call: impl FnOnce(*const *const c_char, usize) -> R) -> R {
    let Tags::Some { picked, count } = tags else { return call(null(), 0) };
    let texts = picked.map(|tag| TAGS.get(usize::from(tag % 5)).map_or(null(), |tag| tag.as_ptr()));
    call(texts.as_ptr(), usize::from(count % 3))
}

/// Statuses of a move that reached the memory.
const MAY: [vramp_status_t; 4] =
    [VRAMP_OK, VRAMP_ERROR_OUT_OF_MEMORY, VRAMP_ERROR_UNSUPPORTED, VRAMP_ERROR_CAPTURE];

/// Makes one call on an allocator. Returns the id of a scope that it made.
pub fn call(
    regions: &mut Regions,
    call: RegionsCall,
    allocator: vramp_allocator_t,
    is_open: bool,
    captures: bool,
) -> Option<u64> {
    let may = |status: vramp_status_t, wrong: Option<vramp_status_t>| match wrong {
        Some(wrong) => assert_eq!(status, wrong, "{call:?}"),
        None => {
            assert!(MAY.contains(&status), "{call:?}: {status:?}");
            assert!(captures || status != VRAMP_ERROR_CAPTURE, "{call:?}");
        }
    };
    let unopened = (!is_open).then_some(VRAMP_ERROR_UNKNOWN_ALLOCATOR);
    let mut scope = vramp_region_scope_t::default();
    match call {
        RegionsCall::Begin { tag, backup, read_only, size } => {
            let (tag, backup) = (usize::from(tag % 4), [0, 1, 9][usize::from(backup % 3)]);
            let options = vramp_region_options_t {
                struct_size: u64::from(size).max(u64::from(size > 0) * 16),
                backup,
                read_only: i32::from(read_only),
            };
            // SAFETY: the text ends with a zero, and the structs outlive the call.
            let status =
                unsafe { vramp_region_begin(allocator, TAGS[tag].as_ptr(), &options, &mut scope) };
            let unread = (tag == NO_TEXT).then_some(VRAMP_ERROR_TEXT);
            let small = (size == 0).then_some(VRAMP_ERROR_STRUCT_SIZE);
            let no_backup = (backup == 9).then_some(VRAMP_ERROR_RANGE);
            let options = (backup, read_only);
            let differs = regions.known.get(&tag).is_some_and(|known| *known != options);
            let other = differs.then_some(VRAMP_ERROR_OPTION);
            let wrong = unread.or(small).or(no_backup).or(unopened).or(other);
            assert_eq!(status, wrong.unwrap_or(VRAMP_OK), "{call:?}");
            if status == VRAMP_OK {
                regions.known.insert(tag, options);
                return Some(scope.id);
            }
        }
        RegionsCall::Disable => {
            // SAFETY: the result outlives the call.
            let status = unsafe { vramp_region_disable(allocator, &mut scope) };
            assert_eq!(status, unopened.unwrap_or(VRAMP_OK));
            return (status == VRAMP_OK).then_some(scope.id);
        }
        RegionsCall::Pause { tags, keep, discard } => {
            let options = vramp_pause_options_t {
                struct_size: size_of::<vramp_pause_options_t>() as u64,
                keep: keep.into(),
                discard: i32::from(discard),
            };
            // SAFETY: the texts and the struct outlive the call.
            let status = with_tags(tags, |tags, count| unsafe {
                vramp_region_pause(allocator, tags, count, &options)
            });
            may(status, regions.wrong(tags, is_open));
            // Also where the resume after a failure failed.
            regions.may_sleep = true;
        }
        RegionsCall::Resume(tags) => {
            // SAFETY: the texts outlive the call.
            let status = with_tags(tags, |tags, count| unsafe {
                vramp_region_resume(allocator, tags, count)
            });
            may(status, regions.wrong(tags, is_open));
            if status == VRAMP_OK && matches!(tags, Tags::All) {
                regions.may_sleep = false;
            }
        }
        RegionsCall::Clean(tags) => {
            // SAFETY: the texts outlive the call.
            let status = with_tags(tags, |tags, count| unsafe {
                vramp_region_clean(allocator, tags, count)
            });
            may(status, regions.wrong(tags, is_open));
        }
        RegionsCall::OnPressure { tags, stays } => {
            let mut number = 0;
            // SAFETY: the texts and the result outlive the call.
            let status = with_tags(tags, |tags, count| unsafe {
                vramp_region_on_pressure(allocator, tags, count, &mut number)
            });
            let none = regions.is_empty().then_some(VRAMP_ERROR_REGION);
            let wrong = regions.wrong(tags, is_open).or(none);
            assert_eq!(status, wrong.unwrap_or(VRAMP_OK), "{call:?}");
            if status == VRAMP_OK {
                regions.may_sleep = true;
                if !stays {
                    assert_eq!(vramp_unobserve(allocator, number), VRAMP_OK);
                    assert_eq!(vramp_unobserve(allocator, number), VRAMP_ERROR_RANGE);
                }
            }
        }
        RegionsCall::Status { size, capacity } => {
            let (size, capacity) = (usize::from(size % 64) * 8, usize::from(capacity % 4));
            let mut fields = vec![u64::MAX; size / 8 * capacity + 2];
            fields[0] = size as u64;
            let (to, mut count) = (fields.as_mut_ptr().cast(), usize::MAX);
            // SAFETY: the array is as large as its first number says.
            let status = unsafe { vramp_region_status(allocator, to, capacity, &mut count) };
            let small = (capacity > 0 && size < 16).then_some(VRAMP_ERROR_STRUCT_SIZE);
            let wrong = small.or(unopened);
            assert_eq!(status, wrong.unwrap_or(VRAMP_OK), "{call:?}");
            assert_eq!(count, if wrong.is_none() { regions.known.len() } else { usize::MAX });
            let written = if wrong.is_none() { count.min(capacity) * size / 8 } else { 1 };
            let rest = &fields[written.max(1)..];
            assert!(rest.iter().all(|field| *field == u64::MAX), "nothing beyond");
        }
    }
    None
}
