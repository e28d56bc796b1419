//! vramp's pool, through the C interface of a library that is opened by path.
//!
//! It is the allocator that `vramp.torch` and C share in a process (the functions `vramp_torch_*`), one for each device, with the
//! options of `VRAMP_CONF`. Two kinds of blocks:
//!
//! - for `cuMemAlloc`: in the order of a stream of this library that has no other work, and which is waited for, so that
//!   any stream may use it at once;
//! - for `cuMemAllocAsync`: in the order of its stream.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::driver::{self, Code, DEVICES, OUT_OF_MEMORY, SUCCESS, UNKNOWN};
use crate::lookup;
use crate::settings::{self, PoolSettings, Settings};
use crate::sleep;

/// `VRAMP_ERROR_OUT_OF_MEMORY`.
const STATUS_OUT_OF_MEMORY: c_int = 8;
/// `vramp_torch_block_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct BlockRecord {
    address: u64,
    size: u64,
    requested: u64,
    stream: u64,
    device: c_int,
    is_small: c_int,
}

/// The first members of `vramp_stats_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    struct_size: u64,
    pub live: u64,
    pub live_peak: u64,
    pub reserved: u64,
    pub reserved_peak: u64,
}

/// `vramp_torch_ticket_t`.
#[repr(C)]
struct Ticket {
    offset: u64,
    length: u64,
    bytes: [u8; 160],
}

/// `vramp_torch_opened_t`.
#[repr(C)]
#[derive(Default)]
struct OpenedRecord {
    number: u64,
    address: u64,
    size: u64,
}

/// The first members of `vramp_device_t`.
#[repr(C)]
struct DeviceRecord {
    struct_size: u64,
    memory: u64,
    granularity: u64,
    ordinal: i32,
    simulated: i32,
    name: [u8; 96],
    id: [u8; 96],
    uuid: [u8; 48],
}

/// `vramp_budget_options_t`.
#[repr(C)]
struct BudgetOptions {
    struct_size: u64,
    directory: *const c_char,
    card: *const c_char,
    group: *const c_char,
    program: *const c_char,
    capacity: u64,
    guaranteed: u64,
    limit: u64,
    ahead: u64,
    patience_ms: u64,
    priority: u32,
    reserved: u32,
}

/// `vramp_budget_room_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    struct_size: u64,
    pub claimed: u64,
    pub available: u64,
    pub obtainable: u64,
    pub most: u64,
}

/// Declares the functions that are called, by the signatures of `vramp.h`.
macro_rules! functions {
    ($($name:ident: $symbol:literal, fn($($type:ty),*) $(-> $result:ty)?;)*) => {
        #[derive(Debug)]
        struct Functions { $($name: unsafe extern "C" fn($($type),*) $(-> $result)?,)* }

        impl Functions {
            /// Finds them in a library. The name of a missing one is the error.
            fn find(library: *mut c_void) -> Result<Functions, &'static CStr> {
                Ok(Functions { $($name: {
                    let found = lookup::function_of(library, $symbol);
                    if found.is_null() {
                        return Err($symbol);
                    }
                    // SAFETY: the symbol is that of the C interface, whose signature this is.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) $(-> $result)?>(found) }
                },)* })
            }
        }
    };
}

functions! {
    last_error: c"vramp_last_error", fn() -> *const c_char;
    open: c"vramp_torch_open", fn(c_int) -> c_int;
    is_open: c"vramp_torch_is_open", fn(c_int) -> c_int;
    allocator: c"vramp_torch_allocator", fn(c_int, *mut u64) -> c_int;
    stats: c"vramp_stats", fn(u64, *mut Stats) -> c_int;
    block_malloc: c"vramp_torch_block_malloc", fn(c_int, u64, *mut c_void, *mut BlockRecord) -> c_int;
    block_free: c"vramp_torch_block_free", fn(*mut c_void, *mut BlockRecord) -> c_int;
    free: c"vramp_torch_free", fn(*mut c_void, usize, c_int, *mut c_void);
    stream_forget: c"vramp_torch_stream_forget", fn(c_int, *mut c_void) -> c_int;
    enable_peer: c"vramp_torch_enable_peer", fn(c_int, c_int) -> c_int;
    share: c"vramp_torch_share", fn(*mut c_void, *mut Ticket) -> c_int;
    share_open: c"vramp_torch_share_open", fn(c_int, *const u8, u64, *mut OpenedRecord) -> c_int;
    share_close: c"vramp_torch_share_close", fn(u64) -> c_int;
    device: c"vramp_device", fn(u64, *mut DeviceRecord) -> c_int;
    budget_join: c"vramp_budget_join", fn(u64, *const BudgetOptions) -> c_int;
    budget_room: c"vramp_budget_room", fn(u64, *mut Room) -> c_int;
    budget_give_back: c"vramp_budget_give_back", fn(u64, *mut u64) -> c_int;
    budget_on_reclaim: c"vramp_budget_on_reclaim", fn(u64, extern "C" fn(u64, *mut c_void), *mut c_void) -> c_int;
    budget_on_sleep: c"vramp_budget_on_sleep", fn(u64, extern "C" fn(c_int, *mut c_void) -> c_int, *mut c_void) -> c_int;
    region_begin: c"vramp_region_begin", fn(u64, *const c_char, *const c_void, *mut u64) -> c_int;
    region_pause: c"vramp_region_pause", fn(u64, *const *const c_char, usize, *const c_void) -> c_int;
    region_resume: c"vramp_region_resume", fn(u64, *const *const c_char, usize) -> c_int;
}

/// The pool of a process.
#[derive(Debug)]
pub struct Pool {
    functions: Functions,
    settings: &'static Settings,
    /// Held while a device is opened.
    opening: Mutex<()>,
    /// The devices that have joined the group.
    joined: Mutex<[bool; DEVICES]>,
    /// A stream of each device for memory that any stream may use; zero before the first request.
    streams: [AtomicUsize; DEVICES],
    /// Memory that was freed while a stream captured, with its device.
    later: Mutex<Vec<(usize, u64)>>,
    has_later: AtomicBool,
    /// Devices whose group the process could not join.
    is_refused: [AtomicBool; DEVICES],
    /// Devices that are reset or cannot be opened: their requests go to the driver.
    retired: [AtomicBool; DEVICES],
    served: AtomicU64,
    failed: AtomicU64,
}

impl Pool {
    /// Opens the library. The error says what to do.
    pub fn open(of_pool: &PoolSettings, settings: &'static Settings) -> Result<Pool, String> {
        // A program of Python that uses vramp too shares its pool.
        let path = match lookup::loaded_library(settings::is_python_module) {
            Some(module) => module,
            None => CString::new(of_pool.library.as_os_str().as_bytes())
                .map_err(|error| error.to_string())?,
        };
        // SAFETY: libvramp has no initialisers, and the Python package's module none that need Python.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            // SAFETY: no precondition.
            let why = unsafe { libc::dlerror() };
            // SAFETY: after a failed call there is a message, which ends with a zero.
            let why = unsafe { CStr::from_ptr(why) };
            return Err(why.to_string_lossy().into_owned());
        }
        let functions = Functions::find(library).map_err(|missing| {
            format!(
                "{} has no {}: it is of another version than libvramp_preload.so",
                path.to_string_lossy(),
                missing.to_string_lossy()
            )
        })?;
        lookup::let_pass(functions.open as *const c_void);
        let retired = [const { AtomicBool::new(false) }; DEVICES];
        let is_refused = [const { AtomicBool::new(false) }; DEVICES];
        Ok(Pool {
            is_refused,
            functions,
            settings,
            opening: Mutex::new(()),
            joined: Mutex::new([false; DEVICES]),
            later: Mutex::default(),
            has_later: AtomicBool::new(false),
            streams: [const { AtomicUsize::new(0) }; DEVICES],
            retired,
            served: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        })
    }

    /// Returns true if the pool serves requests of a device. The first opens the device, and calls `opened` then.
    pub fn serves(&self, device: usize, opened: impl FnOnce()) -> bool {
        if self.retired[device].load(Ordering::Acquire) {
            return false;
        }
        // SAFETY: any number is allowed.
        if unsafe { (self.functions.is_open)(device as c_int) } != 0 {
            return true;
        }
        let Some(_opening) = self.opening() else { return false };
        // SAFETY: as above.
        if unsafe { (self.functions.is_open)(device as c_int) } != 0 {
            return true;
        }
        // SAFETY: as above.
        let status = unsafe { (self.functions.open)(device as c_int) };
        if status != 0 && !self.retired[device].swap(true, Ordering::AcqRel) {
            crate::report::write_line(&format!(
                "vramp exec: device {device} is not pooled, its memory comes from the driver: {}",
                self.why()
            ));
        }
        if status == 0 {
            opened();
            self.join(device);
        }
        status == 0
    }

    /// Returns the right to open a device. `None` if another thread has it for long: it may wait for the dynamic linker's
    /// lock, which this one has in the initialiser of a library.
    fn opening(&self) -> Option<MutexGuard<'_, ()>> {
        let start = Instant::now();
        loop {
            match self.opening.try_lock() {
                Ok(guard) => return Some(guard),
                Err(TryLockError::Poisoned(error)) => return Some(error.into_inner()),
                Err(TryLockError::WouldBlock) if start.elapsed() > OPENING => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(200)),
            }
        }
    }

    /// Allocates memory that any stream may use at once.
    pub fn allocate(&self, device: usize, size: u64) -> Result<u64, Code> {
        let stream = self.stream(device)?;
        let address = self.allocate_on(device, size, stream)?;
        // What the pool made the stream wait for is over then.
        match driver::synchronize_stream(stream) {
            SUCCESS => Ok(address),
            code => {
                self.free(address);
                Err(code)
            }
        }
    }

    /// Returns the stream of memory for any stream.
    fn stream(&self, device: usize) -> Result<usize, Code> {
        let known = self.streams[device].load(Ordering::Acquire);
        if known != 0 {
            return Ok(known);
        }
        // No lock: the driver's function may be looked up, which a thread may wait for in the initialiser of a library.
        let made = driver::create_stream()?;
        let (order, failed) = (Ordering::AcqRel, Ordering::Acquire);
        match self.streams[device].compare_exchange(0, made, order, failed) {
            Ok(_) => Ok(made),
            Err(known) => {
                driver::destroy_stream(made);
                Ok(known)
            }
        }
    }

    /// Allocates memory in the order of a stream.
    pub fn allocate_on(&self, device: usize, size: u64, stream: usize) -> Result<u64, Code> {
        if self.is_refused[device].load(Ordering::Acquire) {
            return Err(OUT_OF_MEMORY);
        }
        self.in_region(device);
        let mut block = BlockRecord::default();
        // SAFETY: the stream is one of the device, which `cuStreamDestroy` makes the pool forget.
        let status = unsafe {
            (self.functions.block_malloc)(device as c_int, size, as_stream(stream), &mut block)
        };
        self.answer(status).map(|()| block.address)
    }

    /// Frees memory that no work uses.
    pub fn free(&self, address: u64) -> Code {
        let mut block = BlockRecord::default();
        // SAFETY: `block` is valid for writing. Any address is allowed.
        let status = unsafe { (self.functions.block_free)(address as *mut c_void, &mut block) };
        if status == 0 { SUCCESS } else { UNKNOWN }
    }

    /// Frees memory once the device has been waited for.
    pub fn free_later(&self, device: usize, address: u64) -> Code {
        self.later.lock().unwrap_or_else(PoisonError::into_inner).push((device, address));
        self.has_later.store(true, Ordering::Release);
        SUCCESS
    }

    /// Waits for a device with `wait`, and frees what was to be freed then.
    pub fn free_after(&self, device: usize, wait: impl FnOnce() -> Code) -> Code {
        if !self.has_later.load(Ordering::Acquire) {
            return wait();
        }
        // What is added from now on may be in use after the wait.
        let later = std::mem::take(&mut *self.later.lock().unwrap_or_else(PoisonError::into_inner));
        let code = wait();
        for (of, address) in later {
            if code == SUCCESS && of == device {
                self.free(address);
            } else {
                self.free_later(of, address);
            }
        }
        let rest = self.later.lock().unwrap_or_else(PoisonError::into_inner);
        self.has_later.store(!rest.is_empty(), Ordering::Release);
        code
    }

    /// Frees what was to be freed once the device has been waited for. Returns true if there may be more room.
    pub fn free_kept(&self, device: usize) -> bool {
        self.has_later.load(Ordering::Acquire)
            && !driver::has_captures()
            && self.free_after(device, || driver::synchronize(device)) == SUCCESS
    }

    /// Frees a block in the order of a stream.
    pub fn free_on(&self, device: usize, address: u64, size: u64, stream: usize) {
        let (address, stream) = (address as *mut c_void, as_stream(stream));
        // SAFETY: as for `allocate_on`.
        unsafe { (self.functions.free)(address, size as usize, device as c_int, stream) };
    }

    /// Forgets a stream that is about to be destroyed.
    pub fn forget(&self, stream: usize) {
        for device in self.devices() {
            // SAFETY: any value is allowed.
            let status =
                unsafe { (self.functions.stream_forget)(device as c_int, stream as *mut c_void) };
            if status != 0 {
                crate::report::write_line(&format!(
                    "vramp exec: a stream is destroyed that the pool still uses: {}",
                    self.why()
                ));
            }
        }
    }

    /// Lets a device use the memory of another.
    pub fn enable_peer(&self, device: usize, owner: usize) {
        // SAFETY: any numbers are allowed.
        let status = unsafe { (self.functions.enable_peer)(device as c_int, owner as c_int) };
        if status != 0 {
            crate::report::write_line(&format!(
                "vramp exec: device {device} cannot use the pool's memory on device {owner}: {}",
                self.why()
            ));
        }
    }

    /// Publishes the memory that contains an address: a ticket for [`Pool::open_shared`], or why not.
    pub fn share(&self, address: u64) -> Result<Vec<u8>, String> {
        let mut ticket = Ticket { offset: 0, length: 0, bytes: [0; 160] };
        // SAFETY: `ticket` is valid for writing, and any address is allowed.
        if unsafe { (self.functions.share)(address as *mut c_void, &mut ticket) } != 0 {
            return Err(self.why());
        }
        let mut bytes = ticket.offset.to_le_bytes().to_vec();
        bytes.extend_from_slice(&ticket.bytes[..ticket.length as usize]);
        Ok(bytes)
    }

    /// Opens memory of another process for work of a device. Returns a number for [`Pool::close_shared`] and the address
    /// that was shared.
    pub fn open_shared(&self, device: usize, ticket: &[u8]) -> Result<(u64, u64), String> {
        let (offset, ticket) = ticket.split_first_chunk().ok_or("the ticket is cut")?;
        let mut opened = OpenedRecord::default();
        // SAFETY: the ticket has its length, and `opened` is valid for writing.
        let status = unsafe {
            (self.functions.share_open)(
                device as c_int,
                ticket.as_ptr(),
                ticket.len() as u64,
                &mut opened,
            )
        };
        if status != 0 {
            return Err(self.why());
        }
        Ok((opened.number, opened.address + u64::from_le_bytes(*offset)))
    }

    /// Closes memory of another process that no work uses.
    pub fn close_shared(&self, number: u64) {
        // A failure is printed.
        // SAFETY: any number is allowed.
        unsafe { (self.functions.share_close)(number) };
    }

    /// Lets the driver serve a device from now on: the program resets it.
    pub fn retire(&self, device: usize) {
        if let Some(retired) = self.retired.get(device) {
            retired.store(true, Ordering::Release);
        }
    }

    /// Returns what the pool of a device has. `None` if it is not open.
    pub fn stats(&self, device: usize) -> Option<Stats> {
        let allocator = self.allocator(device)?;
        let mut stats = Stats { struct_size: size_of::<Stats>() as u64, ..Stats::default() };
        // SAFETY: at most the bytes that `struct_size` says are written.
        (unsafe { (self.functions.stats)(allocator, &mut stats) } == 0).then_some(stats)
    }

    /// Returns what the process can have of a device in its group. `None` if it is in none.
    pub fn room(&self, device: usize) -> Option<Room> {
        self.settings.group.as_ref()?;
        let allocator = self.allocator(device)?;
        let mut room = Room { struct_size: size_of::<Room>() as u64, ..Room::default() };
        // SAFETY: at most the bytes that `struct_size` says are written.
        (unsafe { (self.functions.budget_room)(allocator, &mut room) } == 0).then_some(room)
    }

    /// Returns true if the program's memory can leave the card.
    pub fn is_sleepable(&self) -> bool {
        self.settings.is_sleepable
    }

    /// Takes the program's memory off all devices, or returns why not. What left before a failure is back.
    pub fn pause(&self) -> Result<(), String> {
        let allocators = || self.devices().filter_map(|device| self.allocator(device));
        for allocator in allocators() {
            // SAFETY: no tags are all of them.
            let status = unsafe {
                (self.functions.region_pause)(allocator, std::ptr::null(), 0, std::ptr::null())
            };
            if status != 0 {
                let why = self.why();
                let _ = self.resume();
                return Err(why);
            }
        }
        // Not before, so that what left is sure to find room where another device fails.
        for allocator in allocators() {
            // SAFETY: null is allowed.
            unsafe { (self.functions.budget_give_back)(allocator, std::ptr::null_mut()) };
        }
        Ok(())
    }

    /// Brings the program's memory back, or returns what lacks.
    pub fn resume(&self) -> Result<(), String> {
        for device in self.devices() {
            let Some(allocator) = self.allocator(device) else { continue };
            // SAFETY: as above.
            if unsafe { (self.functions.region_resume)(allocator, std::ptr::null(), 0) } != 0 {
                return Err(self.why());
            }
        }
        Ok(())
    }

    /// Devices whose memory the pool has.
    pub fn devices(&self) -> impl Iterator<Item = usize> {
        (0..DEVICES).filter(|&device| self.is_open(device))
    }

    /// Lets what the calling thread allocates be in the region that sleeps, from its first request on.
    fn in_region(&self, device: usize) {
        if !self.settings.is_sleepable {
            return;
        }
        thread_local! {
            static IN_REGION: Cell<u64> = const { Cell::new(0) };
        }
        let bit = 1_u64 << device;
        if IN_REGION.get() & bit != 0 {
            return;
        }
        let Some(allocator) = self.allocator(device) else { return };
        let mut scope = 0;
        // SAFETY: the tag ends with a zero, null options are the defaults, and `scope` is valid for writing.
        let status = unsafe {
            (self.functions.region_begin)(
                allocator,
                c"vramp-exec".as_ptr(),
                std::ptr::null(),
                &mut scope,
            )
        };
        if status == 0 {
            // The scope ends with the thread.
            IN_REGION.set(IN_REGION.get() | bit);
        }
    }

    /// Joins the group of the settings with the pool of a device.
    fn join(&self, device: usize) {
        let Some(group) = &self.settings.group else { return };
        let mut joined = self.joined.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut joined[device], true) {
            return;
        }
        let Some(allocator) = self.allocator(device) else { return };
        let mut card = DeviceRecord {
            struct_size: size_of::<DeviceRecord>() as u64,
            memory: 0,
            granularity: 0,
            ordinal: 0,
            simulated: 0,
            name: [0; 96],
            id: [0; 96],
            uuid: [0; 48],
        };
        // SAFETY: at most the bytes that `struct_size` says are written.
        unsafe { (self.functions.device)(allocator, &mut card) };
        let text = |bytes: &[u8]| CString::new(bytes).unwrap_or_default();
        let directory = text(group.directory.as_os_str().as_bytes());
        let name = text(group.name.as_bytes());
        let program = std::fs::read_link("/proc/self/exe").unwrap_or_default();
        let program = text(program.file_name().unwrap_or_default().as_bytes());
        let capacity = match group.capacity {
            0 => sleep::capacity_of(card.memory),
            capacity => capacity,
        };
        let options = BudgetOptions {
            struct_size: size_of::<BudgetOptions>() as u64,
            directory: directory.as_ptr(),
            card: card.uuid.as_ptr().cast(),
            group: name.as_ptr(),
            program: program.as_ptr(),
            capacity,
            guaranteed: group.guaranteed,
            limit: 0,
            ahead: 0,
            patience_ms: if self.settings.is_sleepable { 500 } else { 5000 },
            priority: group.priority,
            reserved: 0,
        };
        // SAFETY: the texts end with zeros and outlive the call.
        let status = unsafe { (self.functions.budget_join)(allocator, &options) };
        if status != 0 {
            // What it took besides would be missing in the budgets of the others.
            self.is_refused[device].store(true, Ordering::Release);
            let why = self.why();
            crate::report::write_line(&format!(
                "vramp exec: the program gets no memory of device {device}, because it cannot join the group {:?}: {why}",
                group.name
            ));
            return;
        }
        if self.settings.is_sleepable {
            // SAFETY: the handlers are functions of this library, which is never unloaded.
            unsafe {
                (self.functions.budget_on_reclaim)(
                    allocator,
                    sleep::on_reclaim,
                    std::ptr::null_mut(),
                )
            };
            // SAFETY: as above.
            unsafe {
                (self.functions.budget_on_sleep)(allocator, sleep::on_sleep, std::ptr::null_mut())
            };
        }
    }

    fn allocator(&self, device: usize) -> Option<u64> {
        let mut allocator = 0;
        // SAFETY: valid for writing, and any number is allowed.
        let is_known = self.is_open(device)
            && unsafe { (self.functions.allocator)(device as c_int, &mut allocator) } == 0;
        is_known.then_some(allocator)
    }

    /// Returns how many requests the pool served, and how many it could not.
    pub fn requests(&self) -> (u64, u64) {
        (self.served.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }

    /// Returns true if the pool of a device is open.
    pub fn is_open(&self, device: usize) -> bool {
        // SAFETY: any number is allowed.
        device < DEVICES
            && !self.retired[device].load(Ordering::Acquire)
            && unsafe { (self.functions.is_open)(device as c_int) } != 0
    }

    fn answer(&self, status: c_int) -> Result<(), Code> {
        if status == 0 {
            self.served.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        Err(if status == STATUS_OUT_OF_MEMORY { OUT_OF_MEMORY } else { UNKNOWN })
    }

    /// Notes that a request of the program fails which the pool was asked for, with the thread's last failure if it is the
    /// pool's.
    pub fn refuse(&self, given: Result<u64, Code>) {
        let is_own = matches!(given, Err(OUT_OF_MEMORY | UNKNOWN));
        if is_own && self.failed.fetch_add(1, Ordering::Relaxed) < LINES {
            crate::report::write_line(&format!("vramp exec: {}", self.why()));
        }
    }

    fn why(&self) -> String {
        // SAFETY: the function has no precondition, and returns a text that ends with a zero.
        let text = unsafe { (self.functions.last_error)() };
        // SAFETY: as above. It is valid until the thread's next failure.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// How long a request waits while another thread opens a device, before the driver serves it.
const OPENING: Duration = Duration::from_secs(2);
/// Failures that are printed.
const LINES: u64 = 5;

/// The legacy default stream is null for the pool.
fn as_stream(stream: usize) -> *mut c_void {
    if stream == driver::LEGACY { std::ptr::null_mut() } else { stream as *mut c_void }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_are_those_of_the_header() {
        let header = include_str!("../../vramp-capi/include/vramp.h");
        assert!(header.contains(&format!("VRAMP_ERROR_OUT_OF_MEMORY = {STATUS_OUT_OF_MEMORY},")));
        let source = include_str!("pool.rs");
        let named: Vec<_> =
            source.lines().filter_map(|line| line.split("c\"vramp_").nth(1)).collect();
        assert!(named.len() > 20);
        for name in named {
            let name = format!("vramp_{}(", name.split('"').next().unwrap_or_default());
            assert!(header.contains(&name), "{name}");
        }
    }
}
