//! A fake libcuda for tests: functions that count calls, keep state and fail on request.
//!
//! Its state is thread-local, so tests do not affect each other.
#![allow(non_snake_case, reason = "the functions have the driver's names")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::rc::Rc;

use crate::device::CudaDriver;
use crate::error::OpenError;
use crate::load::Cuda;
use crate::load::tests::empty_api;
use crate::sys::*;

#[derive(Default)]
struct State {
    calls: Vec<&'static str>,
    /// Function that fails, and its code.
    failing: Option<(&'static str, u32)>,
    current: usize,
    made: usize,
    devices: i32,
    version: i32,
    /// Streams that events were recorded on, and that waited for events.
    ordered: Vec<usize>,
    /// State that every stream reports.
    capture: Capture,
    /// The stream on which a capture began. Only this one says that it is capturing.
    origin: usize,
    /// Code with which the end of a capture is refused; zero for none.
    end_refused: u32,
    /// True if all work is complete.
    complete: bool,
    /// Memory of other code, by its first address.
    others: BTreeMap<u64, OtherMemory>,
    /// Called in each driver call with its name.
    watch: Option<Rc<dyn Fn(&'static str)>>,
}

/// Memory that other code allocated: see [`allocate_elsewhere`].
#[derive(Clone, Copy)]
pub(crate) struct OtherMemory {
    /// Accessible bytes from the first address on. The rest of the reservation is not mapped.
    pub(crate) len: u64,
    /// Length of each mapping; that of the memory for a plain allocation.
    pub(crate) step: u64,
    pub(crate) reserved: u64,
    pub(crate) kind: CUmemorytype,
    pub(crate) ordinal: i32,
    pub(crate) is_managed: bool,
}

impl OtherMemory {
    /// A `cudaMalloc` on the first device.
    pub(crate) fn plain(len: u64) -> OtherMemory {
        let kind = CUmemorytype::CU_MEMORYTYPE_DEVICE;
        OtherMemory { len, step: len, reserved: len, kind, ordinal: 0, is_managed: false }
    }

    fn at(state: &State, at: u64) -> Option<(u64, OtherMemory)> {
        let (&start, &memory) = state.others.range(..=at).next_back()?;
        (at < start + memory.reserved).then_some((start, memory))
    }
}

/// A capture whose last node depends on one other: see [`FIRST`] and [`LAST`].
#[derive(Clone, Copy, Default, PartialEq)]
enum Capture {
    #[default]
    None,
    Valid,
    Invalidated,
}

impl Capture {
    fn status(self) -> CUstreamCaptureStatus {
        match self {
            Capture::None => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
            Capture::Valid => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
            Capture::Invalidated => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED,
        }
    }
}

/// Number of every capture.
pub(crate) const CAPTURE: u64 = 7;
const FIRST: usize = 0x20;
const LAST: usize = 0x40;

/// An array owned by the driver.
struct Nodes([CUgraphNode; 1]);

// SAFETY: no code dereferences the pointer in it.
unsafe impl Sync for Nodes {}

static TIPS: Nodes = Nodes([LAST as CUgraphNode]);
static EDGES: [CUgraphEdgeData; 1] =
    [CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] }];

thread_local! {
    static STATE: RefCell<State> = RefCell::new(State { devices: 1, version: 13_000, ..State::default() });
}

/// Context of every fake device.
pub(crate) const CONTEXT: usize = 0xc0;

fn with<R>(use_it: impl FnOnce(&mut State) -> R) -> R {
    STATE.with(|state| use_it(&mut state.borrow_mut()))
}

/// Records the call; runs `answer` unless the function fails.
fn called(name: &'static str, answer: impl FnOnce(&mut State)) -> CUresult {
    if let Some(watch) = with(|state| state.watch.clone()) {
        watch(name);
    }
    with(|state| {
        state.calls.push(name);
        if let Some((failing, code)) = state.failing
            && failing == name
        {
            return CUresult(code);
        }
        answer(state);
        CUresult::CUDA_SUCCESS
    })
}

/// Makes one function fail with `code` until [`heal`].
pub(crate) fn fail(name: &'static str, code: u32) {
    with(|state| state.failing = Some((name, code)));
}

/// Returns the streams that events were recorded on and that waited for events since the last call, on this
/// thread.
pub(crate) fn ordered() -> Vec<usize> {
    with(|state| std::mem::take(&mut state.ordered))
}

pub(crate) fn heal() {
    with(|state| state.failing = None);
}

pub(crate) fn set_devices(count: i32, version: i32) {
    with(|state| (state.devices, state.version) = (count, version));
}

/// Makes the end of a capture fail. On a wrong thread (908) that ends the capture.
pub(crate) fn refuse_end(code: u32) {
    with(|state| state.end_refused = code);
}

/// Invalidates the capture, as a refused call does.
pub(crate) fn invalidate_capture() {
    with(|state| state.capture = Capture::Invalidated);
}

/// Allocates memory as other code does, at `start`.
pub(crate) fn allocate_elsewhere(start: u64, memory: OtherMemory) {
    with(|state| state.others.insert(start, memory));
}

/// Makes every stream report a valid capture, which no call of the device began.
pub(crate) fn capture_elsewhere() {
    with(|state| state.capture = Capture::Valid);
}

/// Ends that capture without the device.
pub(crate) fn end_elsewhere() {
    with(|state| state.capture = Capture::None);
}

/// Completes all work, or leaves it in flight.
pub(crate) fn set_complete(complete: bool) {
    with(|state| state.complete = complete);
}

/// Calls `watch` in each driver call of this thread, with its name, until [`unwatch`].
pub(crate) fn watch(watch: impl Fn(&'static str) + 'static) {
    with(|state| state.watch = Some(Rc::new(watch)));
}

pub(crate) fn unwatch() {
    with(|state| state.watch = None);
}

/// Makes another context current on this thread, as another library would.
pub(crate) fn set_context(number: usize) {
    with(|state| state.current = number);
}

pub(crate) fn context() -> usize {
    with(|state| state.current)
}

/// Removes and returns the calls, except those on the current context.
pub(crate) fn calls() -> Vec<&'static str> {
    let calls = with(|state| std::mem::take(&mut state.calls));
    calls.into_iter().filter(|name| !name.starts_with("cuCtx")).collect()
}

/// Opens a device on this library after `change` to its symbols.
pub(crate) fn open(change: impl FnOnce(&mut Api)) -> Result<CudaDriver, OpenError> {
    let mut api = api();
    change(&mut api);
    let driver = CudaDriver::open_on(Cuda::start(api)?, 0);
    calls();
    driver
}

/// Returns the error of a missing symbol.
pub(crate) fn absent() -> libloading::Error {
    libloading::Error::DlSymUnknown
}

/// Writes `value` as the driver would.
fn put<T>(to: *mut T, value: T) {
    // SAFETY: the tests pass pointers to variables of their own, as the device does.
    unsafe { to.write(value) };
}

fn fresh(state: &mut State) -> usize {
    state.made += 1;
    state.made << 40
}

macro_rules! fakes {
    ($($name:ident($($arg:ident: $type:ty),*) $state:ident $body:block)*) => {
        $(unsafe extern "C" fn $name($($arg: $type),*) -> CUresult {
            $(let _ = &$arg;)*
            called(stringify!($name), |$state| { let _ = &$state; $body })
        })*

        fn api() -> Api {
            let mut api = empty_api();
            $(api.$name = Ok($name);)*
            api.cuGetErrorName = Ok(error_name);
            api.cuEventQuery = Ok(event_query);
            api.cuMemGetAddressRange_v2 = Ok(address_range);
            api.cuStreamEndCapture = Ok(end_capture);
            api
        }
    };
}

/// Ends the capture, even if it fails.
unsafe extern "C" fn end_capture(_: CUstream, graph: *mut CUgraph) -> CUresult {
    let refused = with(|state| state.end_refused);
    if refused != 0 {
        with(|state| {
            if refused == 908 {
                state.capture = Capture::None;
            }
        });
        return CUresult(refused);
    }
    let capture = with(|state| std::mem::take(&mut state.capture));
    let code = called("cuStreamEndCapture", |state| put(graph, fresh(state) as CUgraph));
    match capture {
        Capture::Invalidated => CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        Capture::None | Capture::Valid => code,
    }
}

unsafe extern "C" fn error_name(code: CUresult, text: *mut *const c_char) -> CUresult {
    let name = match code.0 {
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        _ => return CUresult::CUDA_ERROR_INVALID_VALUE,
    };
    put(text, name.as_ptr());
    CUresult::CUDA_SUCCESS
}

/// Returns the mapping at an address. Fails for memory of the device itself: it is in its own table.
unsafe extern "C" fn address_range(
    start: *mut CUdeviceptr,
    len: *mut usize,
    at: CUdeviceptr,
) -> CUresult {
    let found = with(|state| OtherMemory::at(state, at));
    let mapped = found.filter(|(first, memory)| at < first + memory.len);
    let Some((first, memory)) = mapped else {
        called("cuMemGetAddressRange_v2", |_| ());
        return CUresult::CUDA_ERROR_NOT_FOUND;
    };
    called("cuMemGetAddressRange_v2", |_| {
        put(start, first + (at - first) / memory.step * memory.step);
        put(len, memory.step as usize);
    })
}

/// Reports work in flight, unless set to fail or complete.
unsafe extern "C" fn event_query(_: CUevent) -> CUresult {
    match called("cuEventQuery", |_| ()) {
        CUresult::CUDA_SUCCESS if with(|state| state.complete) => CUresult::CUDA_SUCCESS,
        CUresult::CUDA_SUCCESS => CUresult::CUDA_ERROR_NOT_READY,
        failure => failure,
    }
}

fakes! {
    cuInit(flags: c_uint) s {}
    cuDriverGetVersion(version: *mut c_int) s { put(version, s.version) }
    cuDeviceGetCount(count: *mut c_int) s { put(count, s.devices) }
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int) s { put(device, ordinal) }
    cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice) s { put(name.cast(), *b"Fake\0") }
    cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: CUdevice) s { put(text.cast(), *b"0000:3B:00.0\0") }
    cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) s { put(uuid.cast(), *b"\x89\x32\xf9\x37\xd7\x2c\x41\x06\xc1\x2f\x20\xbd\x9f\xae\xd9\xf6") }
    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) s { put(bytes, 1 << 30) }
    cuDeviceGetAttribute(value: *mut c_int, which: CUdevice_attribute, device: CUdevice) s { put(value, 9) }
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) s { put(context, CONTEXT as CUcontext) }
    cuDevicePrimaryCtxRelease_v2(device: CUdevice) s {}
    cuCtxGetCurrent(context: *mut CUcontext) s { put(context, s.current as CUcontext) }
    cuCtxSetCurrent(context: CUcontext) s { s.current = context as usize }
    cuMemGetAllocationGranularity(bytes: *mut usize, wanted: *const CUmemAllocationProp, option: CUmemAllocationGranularity_flags) s { put(bytes, 2 << 20) }
    cuMemAddressReserve(start: *mut CUdeviceptr, len: usize, alignment: usize, at: CUdeviceptr, flags: c_ulonglong) s { put(start, fresh(s) as u64) }
    cuMemAddressFree(start: CUdeviceptr, len: usize) s {}
    cuMemCreate(handle: *mut CUmemGenericAllocationHandle, len: usize, wanted: *const CUmemAllocationProp, flags: c_ulonglong) s { put(handle, fresh(s) as u64) }
    cuMemRelease(handle: CUmemGenericAllocationHandle) s {}
    cuMemMap(at: CUdeviceptr, len: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong) s {}
    cuMemUnmap(at: CUdeviceptr, len: usize) s {}
    cuMemSetAccess(at: CUdeviceptr, len: usize, wanted: *const CUmemAccessDesc, count: usize) s {}
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) s { put(free, 1 << 29); put(total, 1 << 30) }
    cuMemAlloc_v2(start: *mut CUdeviceptr, len: usize) s { put(start, fresh(s) as u64) }
    cuMemFree_v2(start: CUdeviceptr) s {}
    cuPointerGetAttributes(count: c_uint, wanted: *mut CUpointer_attribute, values: *mut *mut c_void, at: CUdeviceptr) s {
        let found = OtherMemory::at(s, at);
        // SAFETY: the caller passes arrays of `count` elements.
        let wanted = unsafe { std::slice::from_raw_parts(wanted, count as usize) };
        // SAFETY: as above.
        let values = unsafe { std::slice::from_raw_parts(values, count as usize) };
        for (&wanted, &value) in wanted.iter().zip(values) {
            let Some((start, memory)) = found else { continue };
            match wanted {
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => put(value.cast(), memory.kind),
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => put(value.cast(), memory.ordinal),
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED => put(value.cast(), u32::from(memory.is_managed)),
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => put(value.cast(), start),
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE => put(value.cast(), memory.reserved),
                _ => unreachable!("an attribute that the device does not read"),
            }
        }
    }
    cuStreamCreate(stream: *mut CUstream, flags: c_uint) s { put(stream, fresh(s) as CUstream) }
    cuStreamDestroy_v2(stream: CUstream) s {}
    cuStreamSynchronize(stream: CUstream) s {}
    cuCtxSynchronize() s {}
    cuStreamQuery(stream: CUstream) s {}
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) s { s.ordered.push(stream as usize) }
    cuEventCreate(event: *mut CUevent, flags: c_uint) s { put(event, fresh(s) as CUevent) }
    cuEventDestroy_v2(event: CUevent) s {}
    cuEventRecord(event: CUevent, stream: CUstream) s { s.ordered.push(stream as usize) }
    cuEventSynchronize(event: CUevent) s {}
    cuMemsetD8Async(at: CUdeviceptr, byte: u8, len: usize, stream: CUstream) s {}
    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream) s {}
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, len: usize, stream: CUstream) s {}
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, len: usize, stream: CUstream) s {}
    cuMemPoolCreate(pool: *mut CUmemoryPool, wanted: *const CUmemPoolProps) s { put(pool, fresh(s) as CUmemoryPool) }
    cuMemPoolDestroy(pool: CUmemoryPool) s {}
    cuMemPoolGetAttribute(pool: CUmemoryPool, which: CUmemPool_attribute, value: *mut c_void) s { put(value.cast::<u64>(), which.0 as u64) }
    cuMemPoolSetAttribute(pool: CUmemoryPool, which: CUmemPool_attribute, value: *mut c_void) s {}
    cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) s {}
    cuMemAllocFromPoolAsync(start: *mut CUdeviceptr, len: usize, pool: CUmemoryPool, stream: CUstream) s { put(start, fresh(s) as u64) }
    cuMemFreeAsync(start: CUdeviceptr, stream: CUstream) s {}
    cuMemHostAlloc(start: *mut *mut c_void, len: usize, flags: c_uint) s {
        let memory: &'static mut [u8] = vec![0xa5; len].leak();
        put(start, memory.as_mut_ptr().cast())
    }
    cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus) s {
        let capture = if stream as usize == s.origin { s.capture } else { Capture::None };
        put(status, capture.status())
    }
    cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode) s {
        s.capture = Capture::Valid;
        s.origin = stream as usize
    }
    cuStreamGetCaptureInfo_v3(stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut cuuint64_t, graph: *mut CUgraph, nodes: *mut *const CUgraphNode, edges: *mut *const CUgraphEdgeData, count: *mut usize) s {
        put(status, s.capture.status());
        if s.capture == Capture::Valid {
            put(id, CAPTURE);
            if !nodes.is_null() {
                put(nodes, TIPS.0.as_ptr());
                put(edges, EDGES.as_ptr());
                put(count, 1);
            }
        }
    }
    cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) s { put(count, 2) }
    cuGraphNodeGetDependencies_v2(node: CUgraphNode, before: *mut CUgraphNode, edges: *mut CUgraphEdgeData, count: *mut usize) s {
        let first = node as usize == FIRST;
        put(count, usize::from(!first));
        if !first && !before.is_null() {
            put(before, FIRST as CUgraphNode);
        }
    }
    cuGraphInstantiateWithFlags(ready: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong) s { put(ready, fresh(s) as CUgraphExec) }
    cuGraphDestroy(graph: CUgraph) s {}
    cuGraphLaunch(graph: CUgraphExec, stream: CUstream) s {}
    cuGraphExecDestroy(graph: CUgraphExec) s {}
    cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) s {}
    cuMemFreeHost(start: *mut c_void) s {}
    cuMemHostRegister_v2(start: *mut c_void, len: usize, flags: c_uint) s {}
    cuMemHostUnregister(start: *mut c_void) s {}
}
