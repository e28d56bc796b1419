//! Requests for memory, and frees. `ZERO` is the stream that zero means to the caller.

use std::ffi::{c_uint, c_void};

use vramp_trace::spool::{Api, Change};

use super::sharing;
use crate::driver::{self, Code, INVALID_VALUE, NOT_FOUND, OUT_OF_MEMORY, Place, SUCCESS, UNKNOWN};
use crate::ledger::{Block, Source};
use crate::pool::Pool;
use crate::process::Process;
use crate::record::Changed;
use crate::sleep;

/// What a row of `cuMemAllocPitch` begins at a multiple of, on every card since 2010.
const PITCH: usize = 512;

/// A request of the program.
#[derive(Clone, Copy)]
struct Request {
    api: Api,
    size: u64,
    stream: usize,
}

impl Request {
    /// Serves the request from the pool with `pooled`, if there is one for the place, or by `driver`, and notes what the
    /// program has got. Each returns the address.
    fn serve(
        self,
        process: &Process,
        place: Option<Place>,
        driver: impl FnOnce() -> Result<u64, Code>,
        pooled: Option<(Source, impl Fn(&Pool, usize) -> Result<u64, Code>)>,
    ) -> Result<u64, Code> {
        let Request { api, size, stream } = self;
        // Without a context the driver says what is wrong.
        let Some(place) = place else { return driver() };
        let Place { device, context, .. } = place;
        let is_within = process.limit.as_ref().is_none_or(|limit| limit.charge(device, size));
        let pool = process.pool_at(place).filter(|_| size > 0);
        let (source, got) = match (pooled, pool) {
            _ if !is_within => (Source::Driver, Err(OUT_OF_MEMORY)),
            (Some((source, pooled)), Some(pool)) => {
                let given = sleep::until_given(pool, device, size, || {
                    let got = pooled(pool, device);
                    let is_full = got == Err(OUT_OF_MEMORY);
                    if is_full && pool.free_kept(device) { pooled(pool, device) } else { got }
                });
                let (source, got) = match given {
                    // The driver may serve it, as in a thread that ends, or says what is wrong, as of a stream.
                    Err(UNKNOWN) => (Source::Driver, driver()),
                    given => (source, given),
                };
                (source, got.inspect_err(|_| pool.refuse(given)))
            }
            _ => (Source::Driver, driver()),
        };
        match got {
            Ok(address) => {
                process.ledger.insert(address, Block { size, device, context, source, ticket: 0 });
                let change = Change::Alloc;
                process.record(Changed { change, api, device, address, size, stream });
            }
            Err(code) => {
                if let Some(limit) = process.limit.as_ref().filter(|_| is_within) {
                    limit.credit(device, size);
                }
                if code == OUT_OF_MEMORY {
                    let change = Change::OutOfMemory;
                    let address = driver::memory_info().map_or(u64::MAX, |(free, _)| free);
                    process.record(Changed { change, api, device, address, size, stream });
                }
            }
        }
        got
    }
}

/// Calls the driver, and returns the address that it wrote.
///
/// # Safety
/// `address` is where the driver writes it.
unsafe fn from_driver(driver: &dyn Fn() -> Code, address: *mut u64) -> Result<u64, Code> {
    match driver() {
        // SAFETY: required by this function's contract.
        SUCCESS => Ok(unsafe { *address }),
        code => Err(code),
    }
}

/// Writes the address for the program.
///
/// # Safety
/// `address` is valid for writing.
unsafe fn answer(got: Result<u64, Code>, address: *mut u64) -> Code {
    match got {
        Ok(got) => {
            // SAFETY: required by this function's contract.
            unsafe { *address = got };
            SUCCESS
        }
        Err(code) => code,
    }
}

/// Serves a request for memory that any stream may use at once.
///
/// # Safety
/// As of `cuMemAlloc_v2`, whose address is not null.
unsafe fn synchronous(
    process: &Process,
    driver: &dyn Fn() -> Code,
    address: *mut u64,
    size: usize,
    api: Api,
) -> Code {
    let request = Request { api, size: size as u64, stream: 0 };
    let pooled = |pool: &Pool, device: usize| pool.allocate(device, size as u64);
    let place = driver::current_place();
    // SAFETY: required by this function's contract.
    let own = || unsafe { from_driver(driver, address) };
    let got = request.serve(process, place, own, Some((Source::Segment, pooled)));
    // SAFETY: as above.
    unsafe { answer(got, address) }
}

/// # Safety
/// As of `cuMemAlloc_v2`.
pub unsafe fn alloc(
    process: &Process,
    driver: &dyn Fn() -> Code,
    address: *mut u64,
    size: usize,
) -> Code {
    if address.is_null() || size == 0 {
        return driver();
    }
    // SAFETY: as of the driver's function.
    unsafe { synchronous(process, driver, address, size, Api::MemAlloc) }
}

/// # Safety
/// As of `cuMemAllocPitch_v2`.
pub unsafe fn alloc_pitch(
    process: &Process,
    driver: &dyn Fn() -> Code,
    address: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> Code {
    let row = width.checked_next_multiple_of(PITCH);
    let size = row.and_then(|row| row.checked_mul(height)).unwrap_or(0);
    let is_valid = !address.is_null() && !pitch.is_null() && matches!(element, 4 | 8 | 16);
    if !is_valid || size == 0 {
        return driver();
    }
    // The driver's own rows may be longer, and it writes how long.
    // SAFETY: as of the driver's function.
    let code = unsafe { synchronous(process, driver, address, size, Api::MemAllocPitch) };
    // SAFETY: the call above has written the address.
    let is_pooled = code == SUCCESS && process.is_pooled(unsafe { *address });
    if let (true, Some(row)) = (is_pooled, row) {
        // SAFETY: as of the driver's function.
        unsafe { *pitch = row };
    }
    code
}

/// # Safety
/// As of `cuMemAllocManaged`.
pub unsafe fn alloc_managed(
    process: &Process,
    driver: &dyn Fn() -> Code,
    address: *mut u64,
    size: usize,
    _: c_uint,
) -> Code {
    if address.is_null() || size == 0 {
        return driver();
    }
    // Managed memory may be beyond the card's, and is where it is used: it is recorded, not limited or pooled.
    let code = driver();
    if let (SUCCESS, Some(place)) = (code, driver::current_place()) {
        let Place { device, context, .. } = place;
        // SAFETY: the driver has written it.
        let address = unsafe { *address };
        let size = size as u64;
        process
            .ledger
            .insert(address, Block { size, device, context, source: Source::Managed, ticket: 0 });
        let (change, api) = (Change::Alloc, Api::MemAllocManaged);
        process.record(Changed { change, api, device, address, size, stream: 0 });
    }
    code
}

/// # Safety
/// As of `cuMemFree_v2`.
pub unsafe fn free(process: &Process, driver: &dyn Fn() -> Code, address: u64) -> Code {
    // The driver's free waits for all work of the device too, and programs rely on it. While a stream captures neither the
    // driver nor this library may wait: the block is free once a later call has waited.
    let has_captures = driver::has_captures();
    let wait = |block: Block| match process.pool() {
        Some(pool) if !has_captures => {
            pool.free_after(block.device, || driver::synchronize(block.device))
        }
        _ => driver::may_allocate(),
    };
    let free = |block: Block| match process.pool() {
        Some(pool) if has_captures => pool.free_later(block.device, address),
        Some(pool) => pool.free(address),
        None => NOT_FOUND,
    };
    release(process, driver, (Api::MemFree, 0), address, wait, free)
}

/// Takes a block out of the ledger, notes that, and frees it: by the driver, or by `free` if it is the pool's, after
/// `wait`. A block that is not freed is there again.
fn release(
    process: &Process,
    driver: &dyn Fn() -> Code,
    (api, stream): (Api, usize),
    address: u64,
    wait: impl FnOnce(Block) -> Code,
    free: impl FnOnce(Block) -> Code,
) -> Code {
    // No block, or one that another thread frees too: the driver says so.
    let Some(block) = process.ledger.remove(address) else { return driver() };
    let Block { size, device, source, .. } = block;
    let waited = if block.is_pooled() { wait(block) } else { SUCCESS };
    if waited != SUCCESS {
        process.ledger.insert(address, block);
        return waited;
    }
    let changed = |change| Changed { change, api, device, address, size, stream };
    if block.ticket != 0 {
        sharing::withdraw(process, block.ticket);
    }
    // Before the memory can be another request's.
    process.record(changed(Change::Free));
    let code = if block.is_pooled() { free(block) } else { driver() };
    if code != SUCCESS {
        process.ledger.insert(address, block);
        process.record(changed(Change::Alloc));
    } else if let Some(limit) = process.limit.as_ref().filter(|_| source != Source::Managed) {
        limit.credit(device, size);
    }
    code
}

/// Returns the stream that zero means.
pub fn named(stream: *mut c_void, zero: usize) -> usize {
    if stream.is_null() { zero } else { stream as usize }
}

/// Serves a request in the order of a stream.
///
/// # Safety
/// As of `cuMemAllocAsync`.
unsafe fn ordered(
    process: &Process,
    driver: &dyn Fn() -> Code,
    address: *mut u64,
    request: Request,
    from: Option<usize>,
) -> Code {
    let Request { size, stream, .. } = request;
    // Memory of a graph is the graph's.
    if address.is_null() || size == 0 || driver::is_capturing(stream) {
        return driver();
    }
    let place = driver::place_of(stream);
    // Memory of a pool that the program made may be of another kind than the device's.
    let is_default = place.is_some_and(|Place { device, .. }| match from {
        Some(pool) => driver::default_pool(device) == Some(pool),
        None => !driver::has_own_pool(device),
    });
    let pooled = is_default.then_some((Source::Block, |pool: &Pool, device: usize| {
        pool.allocate_on(device, size, stream)
    }));
    // SAFETY: required by this function's contract.
    let own = || unsafe { from_driver(driver, address) };
    let got = request.serve(process, place, own, pooled);
    // SAFETY: as above.
    unsafe { answer(got, address) }
}

/// # Safety
/// As of `cuMemAllocAsync`.
pub unsafe fn alloc_async<const ZERO: usize>(
    process: &Process,
    driver: &dyn Fn() -> Code,
    address: *mut u64,
    size: usize,
    stream: *mut c_void,
) -> Code {
    let request =
        Request { api: Api::MemAllocAsync, size: size as u64, stream: named(stream, ZERO) };
    // SAFETY: as of the driver's function.
    unsafe { ordered(process, driver, address, request, None) }
}

/// # Safety
/// As of `cuMemAllocFromPoolAsync`.
pub unsafe fn alloc_from_pool<const ZERO: usize>(
    process: &Process,
    driver: &dyn Fn() -> Code,
    address: *mut u64,
    size: usize,
    pool: *mut c_void,
    stream: *mut c_void,
) -> Code {
    let api = Api::MemAllocFromPoolAsync;
    let request = Request { api, size: size as u64, stream: named(stream, ZERO) };
    // SAFETY: as of the driver's function.
    unsafe { ordered(process, driver, address, request, Some(pool as usize)) }
}

/// # Safety
/// As of `cuMemFreeAsync`.
pub unsafe fn free_async<const ZERO: usize>(
    process: &Process,
    driver: &dyn Fn() -> Code,
    address: u64,
    stream: *mut c_void,
) -> Code {
    free_ordered(process, driver, address, named(stream, ZERO))
}

fn free_ordered(process: &Process, driver: &dyn Fn() -> Code, address: u64, stream: usize) -> Code {
    let wait = |block: Block| match block.source {
        // A graph would free it at each launch, which the driver refuses for memory that is not the graph's.
        _ if driver::is_capturing(stream) => INVALID_VALUE,
        // The pool frees it for all streams at once.
        Source::Segment => driver::synchronize_stream(stream),
        _ => SUCCESS,
    };
    let free = |block: Block| match process.pool() {
        Some(pool) if block.source == Source::Segment => pool.free(address),
        Some(pool) => {
            pool.free_on(block.device, address, block.size, stream);
            SUCCESS
        }
        None => NOT_FOUND,
    };
    release(process, driver, (Api::MemFreeAsync, stream), address, wait, free)
}
