//! Call stacks of the program, by the unwind tables of its code.
//!
//! A frame costs some tens of nanoseconds where its rule is cached. Only memory of the thread's own stack is read, so
//! that a stack ends early, and never faults, in code without tables or frame pointers.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;

use framehop::{ExplicitModuleSectionInfo, Unwinder};
use rustc_hash::FxHashMap;

#[cfg(target_arch = "aarch64")]
type Cache = framehop::aarch64::CacheAarch64;
#[cfg(target_arch = "aarch64")]
type Tables = framehop::aarch64::UnwinderAarch64<&'static [u8]>;
#[cfg(target_arch = "x86_64")]
type Cache = framehop::x86_64::CacheX86_64;
#[cfg(target_arch = "x86_64")]
type Tables = framehop::x86_64::UnwinderX86_64<&'static [u8]>;

/// Most different stacks. Events beyond have none.
const STACKS_MAX: usize = 1 << 20;

/// A loaded file of code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// Load address minus link address.
    pub bias: u64,
    /// Its mapped range.
    pub range: Range<u64>,
    pub path: Vec<u8>,
    tables: Option<Section>,
}

/// The unwind tables of a file, by address in this process.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Section {
    header: Range<u64>,
    /// From the tables to the end of the segment.
    frames: Range<u64>,
}

/// The stack of a call.
#[derive(Debug, PartialEq, Eq)]
pub enum Stack<'a> {
    /// Seen before.
    Known(u32),
    /// New, with its return addresses.
    New(u32, &'a [u64]),
    /// None: unwinding is off, or there are too many.
    None,
}

/// What is known of the code and the stacks of this process.
pub struct Stacks {
    frames: usize,
    unwinder: Tables,
    cache: Cache,
    /// Loads and unloads that the dynamic linker had counted.
    version: (u64, u64),
    loaded: Vec<Loaded>,
    own: Range<u64>,
    ids: FxHashMap<Box<[u64]>, u32>,
    /// The frames of the call at hand.
    pcs: Vec<u64>,
}

impl std::fmt::Debug for Stacks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stacks").field("known", &self.ids.len()).finish_non_exhaustive()
    }
}

impl Stacks {
    /// Stacks of at most `frames` frames.
    pub fn new(frames: usize) -> Stacks {
        Stacks {
            frames,
            unwinder: Tables::new(),
            cache: Cache::new(),
            version: (u64::MAX, u64::MAX),
            loaded: Vec::new(),
            own: 0..0,
            ids: FxHashMap::default(),
            pcs: Vec::new(),
        }
    }

    /// Unwinds the calling thread. `loaded` gets each file of code that is new.
    pub fn current(&mut self, mut loaded: impl FnMut(&Loaded)) -> Stack<'_> {
        if self.frames == 0 {
            return Stack::None;
        }
        // Files may be loaded between the two.
        while let Some(now) = self.unwind_if_current() {
            let version = now.version;
            self.renew(now, &mut loaded);
            self.version = version;
        }
        if let Some(&id) = self.ids.get(self.pcs.as_slice()) {
            return Stack::Known(id);
        }
        if self.ids.len() >= STACKS_MAX {
            return Stack::None;
        }
        let id = self.ids.len() as u32;
        self.ids.insert(self.pcs.as_slice().into(), id);
        Stack::New(id, &self.pcs)
    }

    /// Unwinds while no file can be unloaded, or returns what is loaded where that has changed.
    fn unwind_if_current(&mut self) -> Option<Now> {
        let mut visit = Visit { stacks: self, now: None };
        let data = (&raw mut visit).cast::<c_void>();
        // SAFETY: the callback is called with `data` until the call returns.
        unsafe { libc::dl_iterate_phdr(Some(visit_loaded), data) };
        visit.now
    }

    fn renew(&mut self, now: Now, loaded: &mut impl FnMut(&Loaded)) {
        let mut unwinder = Tables::new();
        for file in &now.loaded {
            if let Some(tables) = &file.tables {
                unwinder.add_module(module(file, tables));
            }
            if !self.loaded.contains(file) {
                loaded(file);
            }
        }
        let here = Stacks::new as *const () as u64;
        let own = now.loaded.iter().find(|file| file.range.contains(&here));
        self.own = own.map_or(0..0, |file| file.range.clone());
        self.unwinder = unwinder;
        self.cache = Cache::new();
        self.loaded = now.loaded;
    }

    #[inline(never)]
    fn unwind(&mut self) {
        self.pcs.clear();
        let (pc, registers, sp) = registers();
        let bounds = stack_of_thread();
        if !bounds.contains(&sp) {
            // On a stack of the program's own making.
            return;
        }
        let mut read = |address: u64| {
            if !address.is_multiple_of(8) || address < sp || address.saturating_add(8) > bounds.end
            {
                return Err(());
            }
            // SAFETY: the address is on this thread's stack, between its innermost frame and its end.
            Ok(unsafe { (address as *const u64).read() })
        };
        let mut frames = self.unwinder.iter_frames(pc, registers, &mut self.cache, &mut read);
        while let Ok(Some(frame)) = frames.next() {
            let address = frame.address();
            if self.own.contains(&address) {
                // What is inside of a hook is not the program's.
                self.pcs.clear();
                continue;
            }
            self.pcs.push(address);
            if self.pcs.len() == self.frames {
                return;
            }
        }
    }
}

/// What is loaded.
struct Now {
    version: (u64, u64),
    loaded: Vec<Loaded>,
}

struct Visit<'a> {
    stacks: &'a mut Stacks,
    now: Option<Now>,
}

/// Called by the dynamic linker for each loaded file, with its lock held.
unsafe extern "C" fn visit_loaded(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    // SAFETY: `unwind_if_current` passes it, and uses nothing of it until the call returns.
    let visit = unsafe { &mut *data.cast::<Visit<'_>>() };
    // SAFETY: the dynamic linker passes a valid entry.
    let info = unsafe { &*info };
    let version = (info.dlpi_adds, info.dlpi_subs);
    if visit.now.is_none() && version == visit.stacks.version {
        visit.stacks.unwind();
        return 1;
    }
    let now = visit.now.get_or_insert_with(|| Now { version, loaded: Vec::new() });
    let is_first = now.loaded.is_empty();
    // SAFETY: as above.
    now.loaded.extend(unsafe { describe(info, is_first) });
    0
}

/// Describes a loaded file. `None` if it has no code.
///
/// # Safety
/// The entry is the dynamic linker's, which holds its lock.
unsafe fn describe(info: &libc::dl_phdr_info, is_program: bool) -> Option<Loaded> {
    let bias = info.dlpi_addr;
    // SAFETY: the entry has this many program headers.
    let headers =
        unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    let segments = || headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
    let start = bias.wrapping_add(segments().map(|header| header.p_vaddr).min()?);
    let end = bias.wrapping_add(segments().map(|header| header.p_vaddr + header.p_memsz).max()?);
    let tables =
        headers.iter().find(|header| header.p_type == libc::PT_GNU_EH_FRAME).and_then(|header| {
            let at = bias.wrapping_add(header.p_vaddr);
            let range = at..at + header.p_memsz;
            let segment = segments().find(|segment| {
                (segment.p_vaddr..segment.p_vaddr + segment.p_memsz).contains(&header.p_vaddr)
            })?;
            // SAFETY: the header lies in a mapped segment.
            let frames = unsafe { frames_of(&range) }?;
            let segment = bias.wrapping_add(segment.p_vaddr)
                ..bias.wrapping_add(segment.p_vaddr + segment.p_memsz);
            let end = segments()
                .map(|segment| {
                    bias.wrapping_add(segment.p_vaddr)
                        ..bias.wrapping_add(segment.p_vaddr + segment.p_memsz)
                })
                .find(|segment| segment.contains(&frames))
                .map_or(segment.end, |segment| segment.end);
            (frames < end).then_some(Section { header: range, frames: frames..end })
        });
    let path = if info.dlpi_name.is_null() {
        Vec::new()
    } else {
        // SAFETY: a name of the dynamic linker ends with a zero.
        unsafe { CStr::from_ptr(info.dlpi_name) }.to_bytes().to_vec()
    };
    let path = if path.is_empty() && is_program {
        let program = std::fs::read_link("/proc/self/exe").unwrap_or_default();
        program.as_os_str().as_bytes().to_vec()
    } else {
        path
    };
    Some(Loaded { bias, range: start..end, path, tables })
}

/// Returns where the unwind tables begin that a table's header names.
///
/// # Safety
/// The range is mapped.
unsafe fn frames_of(header: &Range<u64>) -> Option<u64> {
    if header.end - header.start < 8 {
        return None;
    }
    // SAFETY: required by this function's contract.
    let bytes = unsafe { std::slice::from_raw_parts(header.start as *const u8, 8) };
    // Version 1, and a pointer relative to its own place, as every linker writes it.
    if bytes[0] != 1 || bytes[1] != 0x1b {
        return None;
    }
    let offset = i32::from_ne_bytes(bytes[4..8].try_into().ok()?);
    Some((header.start + 4).wrapping_add_signed(i64::from(offset)))
}

fn module(file: &Loaded, tables: &Section) -> framehop::Module<&'static [u8]> {
    let bytes = |range: &Range<u64>| {
        let length = (range.end - range.start) as usize;
        // SAFETY: the tables are mapped while the file is loaded. They are read in the dynamic linker's callback, in
        // which no file is unloaded, and not again once the count of unloads has changed.
        unsafe { std::slice::from_raw_parts(range.start as *const u8, length) }
    };
    // Addresses of the file are those of this process.
    let info = ExplicitModuleSectionInfo {
        base_svma: file.range.start,
        eh_frame_svma: Some(tables.frames.clone()),
        eh_frame: Some(bytes(&tables.frames)),
        eh_frame_hdr_svma: Some(tables.header.clone()),
        eh_frame_hdr: Some(bytes(&tables.header)),
        ..Default::default()
    };
    let name = String::from_utf8_lossy(&file.path).into_owned();
    framehop::Module::new(name, file.range.clone(), file.range.start, info)
}

/// Returns address, registers and stack pointer of this place.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn registers() -> (u64, framehop::x86_64::UnwindRegsX86_64, u64) {
    let (pc, sp, bp): (u64, u64, u64);
    // SAFETY: reads three registers.
    unsafe {
        std::arch::asm!(
            "lea {pc}, [rip]",
            "mov {sp}, rsp",
            "mov {bp}, rbp",
            pc = out(reg) pc,
            sp = out(reg) sp,
            bp = out(reg) bp,
            options(nomem, nostack, preserves_flags),
        );
    }
    (pc, framehop::x86_64::UnwindRegsX86_64::new(pc, sp, bp), sp)
}

/// As above.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn registers() -> (u64, framehop::aarch64::UnwindRegsAarch64, u64) {
    let (pc, lr, sp, fp): (u64, u64, u64, u64);
    // SAFETY: reads four registers.
    unsafe {
        std::arch::asm!(
            "adr {pc}, .",
            "mov {lr}, x30",
            "mov {sp}, sp",
            "mov {fp}, x29",
            pc = out(reg) pc,
            lr = out(reg) lr,
            sp = out(reg) sp,
            fp = out(reg) fp,
            options(nomem, nostack, preserves_flags),
        );
    }
    (pc, framehop::aarch64::UnwindRegsAarch64::new(lr, sp, fp), sp)
}

/// Returns the addresses of the calling thread's stack. Empty if they are not known.
fn stack_of_thread() -> Range<u64> {
    thread_local! {
        static BOUNDS: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
    }
    let (start, end) = BOUNDS.get().unwrap_or_else(|| {
        let bounds = ask_for_stack().unwrap_or((0, 0));
        BOUNDS.set(Some(bounds));
        bounds
    });
    start..end
}

fn ask_for_stack() -> Option<(u64, u64)> {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    // SAFETY: no precondition.
    let thread = unsafe { libc::pthread_self() };
    // SAFETY: the thread is the calling one, and the attributes are valid for writing.
    let code = unsafe { libc::pthread_getattr_np(thread, attributes.as_mut_ptr()) };
    if code != 0 {
        return None;
    }
    let (mut start, mut size) = (std::ptr::null_mut(), 0);
    // SAFETY: the call above filled the attributes.
    let code = unsafe { libc::pthread_attr_getstack(attributes.as_ptr(), &mut start, &mut size) };
    // SAFETY: as above; they are not used again.
    unsafe { libc::pthread_attr_destroy(attributes.as_mut_ptr()) };
    (code == 0).then(|| (start as u64, start as u64 + size as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[inline(never)]
    fn deep(stacks: &mut Stacks, depth: u32) -> (bool, usize) {
        if depth > 0 {
            let answer = deep(stacks, depth - 1);
            return std::hint::black_box(answer);
        }
        let mut files = 0;
        let is_new = match stacks.current(|_| files += 1) {
            Stack::New(_, pcs) => {
                assert!(!pcs.is_empty());
                true
            }
            Stack::Known(_) => false,
            Stack::None => panic!("no stack"),
        };
        (is_new, files)
    }

    #[test]
    fn the_same_call_has_the_same_stack_and_files_are_told_once() {
        let mut stacks = Stacks::new(64);
        // The library is this program here: nothing is left out of the stack.
        stacks.own = 0..0;
        let mut new = Vec::new();
        for depth in [3, 3, 4] {
            let (is_new, files) = deep(&mut stacks, depth);
            new.push((is_new, files > 0));
        }
        // The frames of the test itself are at other places in its loop.
        assert!(new[0].1 && !new[1].1 && !new[2].1, "{new:?}");
    }

    #[test]
    fn without_frames_nothing_is_unwound() {
        assert_eq!(Stacks::new(0).current(|_| panic!("a file")), Stack::None);
    }
}
