//! Functions beside allocating: the version, the device, the driver's stream, peaks and statistics by
//! name, a free without a stream, and handlers of shortages.

use std::ffi::{CString, c_char, c_int, c_void};

use vramp_alloc::observe::Shortage;

use crate::abi::vramp_status_t;
use crate::abi::{
    vramp_allocator_t, vramp_device_t, vramp_shortage_handler_t, vramp_shortage_t,
    vramp_stat_visitor_t, vramp_stream_t,
};
use crate::interface::User;
use crate::pointers::WithSize;
use crate::session::Session;
use crate::status::{Failure, Kind, status_of};
use crate::{handles, pointers};

/// Versions as numbers: major, minor and patch in units of these.
const MAJOR: u32 = 1_000_000;
const MINOR: u32 = 1_000;

/// Returns the version of the library as a number, which has the form of VRAMP_VERSION.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_version_number() -> u32 {
    version_number(env!("CARGO_PKG_VERSION_MAJOR")) * MAJOR
        + version_number(env!("CARGO_PKG_VERSION_MINOR")) * MINOR
        + version_number(env!("CARGO_PKG_VERSION_PATCH"))
}

fn version_number(text: &str) -> u32 {
    text.parse().expect("cargo writes the parts of a version as numbers")
}

/// Checks that the library serves a program that was compiled with the header of version `header`:
/// pass VRAMP_VERSION. VRAMP_ERROR_VERSION if the library is older than the header, or of another
/// ABI: another major version, or before 1.0 another minor version. Takes no allocator.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_check_version(header: u32) -> vramp_status_t {
    status_of(|| {
        let library = vramp_version_number();
        if serves(library, header) {
            return Ok(());
        }
        let text = format!(
            "the program was compiled with vramp.h {}, and the library is {}: link or load a library \
             of {}, or compile again",
            version_text(header),
            version_text(library),
            required(header),
        );
        Err(Failure::new(Kind::Version, text))
    })
}

/// Returns true if a library of one version serves a program compiled with a header of another.
fn serves(library: u32, header: u32) -> bool {
    library >= header && abi_of(library) == abi_of(header)
}

/// The part of a version within which the ABI only grows.
fn abi_of(version: u32) -> u32 {
    match version / MAJOR {
        0 => version / MINOR,
        major => major * (MAJOR / MINOR),
    }
}

fn version_text(version: u32) -> String {
    format!("{}.{}.{}", version / MAJOR, version % MAJOR / MINOR, version % MINOR)
}

fn required(header: u32) -> String {
    match header / MAJOR {
        0 => format!("0.{}, {} or later", header / MINOR, version_text(header)),
        major => format!("{major}, {} or later", version_text(header)),
    }
}

/// Describes the device of an allocator. Set `device->struct_size` to `sizeof(vramp_device_t)`
/// before. No driver call.
///
/// # Safety
/// `device` is null, or its first eight bytes hold a size that is valid for reading and writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_device(
    allocator: vramp_allocator_t,
    device: *mut vramp_device_t,
) -> vramp_status_t {
    // SAFETY: the struct begins with its size; the rest is this function's contract.
    unsafe { handles::out(allocator, WithSize(device, "device"), |session| Ok(device_of(session))) }
}

fn device_of(session: &Session) -> vramp_device_t {
    let info = session.device().driver.info();
    let ordinal = session.device().ordinal.and_then(|ordinal| i32::try_from(ordinal).ok());
    vramp_device_t {
        struct_size: size_of::<vramp_device_t>() as u64,
        memory: info.limits.memory.count(),
        granularity: info.limits.page.count(),
        ordinal: ordinal.unwrap_or(-1),
        simulated: i32::from(info.simulated),
        name: chars(&info.name),
        id: chars(&info.id),
        uuid: chars(info.uuid.as_deref().unwrap_or_default()),
        pci: chars(info.pci.as_deref().unwrap_or_default()),
    }
}

/// Copies as much of a text as fits before a final zero, and no part of a character.
pub(crate) fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut chars = [0; N];
    let ends = (0..N.min(text.len() + 1)).rev();
    let len = ends.into_iter().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    for (to, from) in chars.iter_mut().zip(text[..len].bytes()) {
        *to = from as c_char;
    }
    chars
}

/// Returns the `CUstream` of a stream in `*raw`, to launch kernels on it. For an adopted stream that is
/// the adopted value, null for the legacy default stream. On failure `*raw` is set to null, which is
/// no other answer than the default stream's: look at the status. No driver call.
///
/// The handle of a created stream is valid until vramp_stream_forget or vramp_close. Do not destroy
/// it, and do not adopt it. On a simulated device a created stream has no CUstream and returns
/// VRAMP_ERROR_UNSUPPORTED; an adopted one returns its value.
///
/// # Safety
/// `raw` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_stream_raw(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
    raw: *mut *mut c_void,
) -> vramp_status_t {
    let find = |session: &Session| session.raw_stream(session.stream(stream)?);
    // SAFETY: required by this function's contract.
    unsafe { handles::out_or(allocator, (raw, "raw"), std::ptr::null_mut(), find) }
}

/// Waits on the host for the work queued on a stream so far. VRAMP_ERROR_CAPTURE while it captures.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_stream_synchronize(
    allocator: vramp_allocator_t,
    stream: vramp_stream_t,
) -> vramp_status_t {
    handles::on(allocator, |session| session.synchronize(session.stream(stream)?))
}

/// Frees a block on the stream that it was allocated for, as vramp_free does with that stream. The
/// stream may be forgotten. For blocks that were used on no other stream, or whose uses are recorded
/// with vramp_record_use.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_free_on_own_stream(
    allocator: vramp_allocator_t,
    address: *mut c_void,
) -> vramp_status_t {
    handles::on(allocator, |session| {
        let addr = address as u64;
        let freed = session.free_on_own_stream(addr)?;
        freed.map(|_| ()).ok_or_else(|| session.unknown_pointer(addr))
    })
}

/// Resets the peaks to the current values, as `torch.cuda.reset_peak_memory_stats` does: those of
/// vramp_stats and of vramp_memory_stats. O(threads).
#[unsafe(no_mangle)]
pub extern "C" fn vramp_reset_peaks(allocator: vramp_allocator_t) -> vramp_status_t {
    handles::on(allocator, |session| {
        session.reset_peaks();
        Ok(())
    })
}

/// Calls `visitor` with each statistic of `torch.cuda.memory_stats`, by PyTorch's name and in the
/// order of names, such as "allocated_bytes.all.peak" and "num_ooms". All are of one moment, before
/// the first call. "max_split_size" without bound is UINT64_MAX. The set of names may grow. O(n) in
/// the regions of the pool. `visitor` may call vramp, and close the allocator.
///
/// # Safety
/// `visitor` may be called with `user`, on this thread and before the function returns. It does not
/// unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_memory_stats(
    allocator: vramp_allocator_t,
    visitor: vramp_stat_visitor_t,
    user: *mut c_void,
) -> vramp_status_t {
    status_of(|| {
        let visitor = pointers::function(visitor, "visitor")?;
        let stats = handles::with(allocator, |session| session.memory_stats())?;
        for (name, value) in stats.by_name() {
            let name = CString::new(name).expect("names of statistics have no zeros");
            // SAFETY: allowed by this function's contract.
            unsafe { visitor(name.as_ptr(), value, user) };
        }
        Ok(())
    })
}

/// Registers `handler`, which is called with `user` before a request fails for want of memory: the
/// place to free or evict blocks. All handlers run, in the order of registration. If one returns
/// nonzero the request is tried again, up to 64 times. `*registration` receives the number for
/// vramp_unobserve. Other threads may call the handler before it is written.
///
/// # Safety
/// As of vramp_observe: `handler` may be called from any thread with `user` until the allocator is
/// closed or vramp_unobserve has returned; if that was called inside a callback, until calls in
/// progress have returned too. It does not unwind.
/// `registration` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_on_shortage(
    allocator: vramp_allocator_t,
    handler: vramp_shortage_handler_t,
    user: *mut c_void,
    registration: *mut u64,
) -> vramp_status_t {
    let user = User(user);
    let register = |session: &Session| {
        let handler = pointers::function(handler, "handler")?;
        let name = session.namer();
        let registered = session.allocator().on_shortage(move |shortage| {
            let stream = shortage.block_for.map(&name).unwrap_or_default();
            let shortage = shortage_of(shortage, stream);
            // SAFETY: allowed by this function's contract.
            let freed: c_int = unsafe { handler(&shortage, user.get()) };
            freed != 0
        });
        Ok(registered.number())
    };
    // SAFETY: required by this function's contract.
    unsafe { handles::out(allocator, (registration, "registration"), register) }
}

fn shortage_of(shortage: &Shortage, stream: vramp_stream_t) -> vramp_shortage_t {
    vramp_shortage_t {
        requested: shortage.requested.count(),
        reserved: shortage.reserved.count(),
        used: shortage.used.count(),
        free: shortage.free.count(),
        largest: shortage.largest.count(),
        waiting: shortage.waiting.count(),
        limit: shortage.limit.map_or(0, |limit| limit.count()),
        stream,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_serves_headers_of_its_abi_that_are_not_newer() {
        let version = |major, minor, patch| major * MAJOR + minor * MINOR + patch;
        for (library, header, served) in [
            ((0, 1, 0), (0, 1, 0), true),
            ((0, 1, 4), (0, 1, 3), true),
            ((0, 1, 3), (0, 1, 4), false),
            ((0, 2, 0), (0, 1, 9), false),
            ((0, 1, 9), (0, 2, 0), false),
            ((1, 0, 0), (0, 9, 9), false),
            ((1, 5, 0), (1, 2, 7), true),
            ((1, 2, 7), (1, 5, 0), false),
            ((2, 0, 0), (1, 999, 999), false),
            ((1, 0, 0), (0, 0, 0), false),
        ] {
            let of = |(major, minor, patch)| version(major, minor, patch);
            assert_eq!(serves(of(library), of(header)), served, "{library:?} {header:?}");
        }
        assert_eq!(version_text(version(12, 34, 56)), "12.34.56");
    }

    #[test]
    fn the_two_versions_of_the_library_agree() {
        assert_eq!(version_text(vramp_version_number()), env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn a_long_name_is_cut_between_characters_and_ends_with_a_zero() {
        let text = |chars: [c_char; 4]| chars.map(|char| char as u8);
        assert_eq!(text(chars("ab")), *b"ab\0\0");
        assert_eq!(text(chars("abcdef")), *b"abc\0");
        // The third byte is the first half of a character.
        assert_eq!(text(chars("ab\u{e9}")), *b"ab\0\0");
    }
}
