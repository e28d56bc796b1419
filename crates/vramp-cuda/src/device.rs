//! One card: opening it, making its context current, and the steps common to all calls.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::{
    Call, Capabilities, CaptureInfo, CaptureMode, DeviceCopy, DeviceInfo, Driver, DriverError,
    DriverResult, Event, ExportedHandle, Graph, GraphExec, GraphNode, Handle, HostBuffer,
    HostMemory, HostSlice, Limits, MemoryInfo, MemoryProperties, PoolUsage, Stream, StreamThread,
};

use crate::addresses::AddressTable;
use crate::error::{OpenError, invalid_id, kind_of};
use crate::graph::{RawExec, RawGraph};
use crate::host::Pinned;
use crate::identity;
use crate::load::{Cuda, entry};
use crate::memory::Physical;
use crate::node_ids::NodeIds;
use crate::stream::RawStream;
use crate::sys::{
    CUctx_st, CUdevice, CUdevice_attribute, CUevent_st, CUmemPoolHandle_st, CUresult, CUstream_st,
};
use crate::table::{Opaque, Refusal, Table};
use crate::turns::Turns;
use crate::uses::Captured;
use crate::{adopted, copy, graph, host, memory, pool, sharing, stream};

/// One CUDA card.
///
/// Any thread may call it. A thread without a CUDA context keeps this card's context after its first
/// call. A thread with another context gets it back after each call.
pub struct CudaDriver {
    pub(crate) cuda: Cuda,
    pub(crate) device: CUdevice,
    pub(crate) context: Opaque<CUctx_st>,
    pub(crate) info: DeviceInfo,
    opened: Instant,
    lost: OnceLock<DriverError>,
    addresses: Mutex<AddressTable>,
    pub(crate) handles: Table<Physical>,
    pub(crate) streams: Table<RawStream>,
    pub(crate) events: Table<Opaque<CUevent_st>>,
    pub(crate) buffers: Table<Pinned>,
    pub(crate) graphs: Table<RawGraph>,
    pub(crate) execs: Table<RawExec>,
    pub(crate) node_ids: Mutex<NodeIds>,
    pub(crate) turns: Turns,
    pub(crate) captured: Mutex<Captured>,
    /// Tail stream: waits for the work of every destroyed stream; see [`crate::teardown`].
    pub(crate) tail: OnceLock<Opaque<CUstream_st>>,
    /// Primary contexts of other cards, retained for copies from and to them.
    pub(crate) peer_contexts: Mutex<BTreeMap<u32, Opaque<CUctx_st>>>,
    /// Pool of this device only. `None` if the card has no such pools.
    pub(crate) pool: Option<Opaque<CUmemPoolHandle_st>>,
}

/// A card that the driver finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSummary {
    /// Number for [`CudaDriver::open`].
    pub ordinal: u32,
    /// Name, such as `NVIDIA H200`.
    pub name: String,
    /// Memory on the card.
    pub memory: Bytes,
    /// Compute capability: major, minor.
    pub compute: (u32, u32),
    /// PCI address, `0000:3b:00.0`. `None` if the driver does not report it.
    pub pci: Option<String>,
    /// UUID, `GPU-8932f937-...`. `None` if the driver does not report it.
    pub uuid: Option<String>,
    /// Nearest NUMA node of the host. `None` if the driver does not report it.
    pub host_numa: Option<u32>,
}

/// Returns every card that the driver of this machine finds, without opening any.
///
/// # Errors
/// As [`CudaDriver::open`], except [`OpenError::NoSuchDevice`].
pub fn devices() -> Result<Vec<DeviceSummary>, OpenError> {
    let cuda = Cuda::open()?;
    (0..cuda.device_count()?).map(|ordinal| Ok(summary(&cuda, ordinal)?.1)).collect()
}

/// Evaluates to the function of this name, or returns early with "not supported" for `$call`.
macro_rules! symbol {
    ($driver:expr, $call:expr, $name:ident) => {
        match &$driver.cuda.$name {
            Ok(function) => *function,
            Err(_) => return Err($crate::error::missing($call, stringify!($name))),
        }
    };
}
pub(crate) use symbol;

impl CudaDriver {
    /// Opens card number `ordinal`, counted from zero as the driver numbers them.
    ///
    /// Retains the card's primary context, which the CUDA runtime uses too, so that addresses are
    /// valid for every library in the process. The first open in a process takes about 100 ms.
    ///
    /// # Errors
    /// [`OpenError`] names what is missing: the library, the driver or the card.
    pub fn open(ordinal: u32) -> Result<CudaDriver, OpenError> {
        CudaDriver::open_on(Cuda::open()?, ordinal)
    }

    pub(crate) fn open_on(cuda: Cuda, ordinal: u32) -> Result<CudaDriver, OpenError> {
        let count = cuda.device_count()?;
        if count == 0 {
            return Err(OpenError::NoDevice);
        }
        if ordinal >= count {
            return Err(OpenError::NoSuchDevice { ordinal, count });
        }
        let (device, summary) = summary(&cuda, ordinal)?;
        let driver = cuda.version()?;
        let mut capabilities = capabilities(&cuda, device, summary.compute);
        let (page, recommended_page) = match capabilities.virtual_memory {
            true => memory::granules(&cuda, device)?,
            false => (memory::USUAL_PAGE, memory::USUAL_PAGE),
        };
        let context = retain_context(&cuda, device)?;
        let pool = match capabilities.stream_ordered_pool {
            true => pool::create(&cuda, device).ok(),
            false => None,
        };
        capabilities.stream_ordered_pool = pool.is_some();
        let info = DeviceInfo {
            name: summary.name,
            id: format!("cuda:{ordinal}"),
            driver: format!("CUDA {}.{}", driver / 1000, driver % 1000 / 10),
            simulated: false,
            pci: summary.pci,
            uuid: summary.uuid,
            host_numa: summary.host_numa,
            ordinal,
            peers: peers(&cuda, device, ordinal, count),
            limits: Limits {
                memory: summary.memory,
                page,
                recommended_page,
                address_space: None,
                pool_step: pool::STEP,
            },
            capabilities,
        };
        Ok(CudaDriver {
            cuda,
            device,
            context,
            info,
            opened: Instant::now(),
            lost: OnceLock::new(),
            addresses: Mutex::default(),
            handles: Table::default(),
            streams: Table::default(),
            events: Table::default(),
            buffers: Table::default(),
            graphs: Table::default(),
            execs: Table::default(),
            node_ids: Mutex::default(),
            turns: Turns::default(),
            captured: Mutex::default(),
            tail: OnceLock::new(),
            peer_contexts: Mutex::default(),
            pool,
        })
    }

    /// Makes this card's context current for one call. Fails at once if the device is lost.
    pub(crate) fn enter(&self, call: Call) -> DriverResult<Entered<'_>> {
        self.refuse_if_lost(call)?;
        let current = symbol!(self, call, cuCtxGetCurrent);
        let mut before = std::ptr::null_mut();
        // SAFETY: `before` outlives the call.
        let code = unsafe { current(&mut before) };
        self.settle(call, code, || "cuCtxGetCurrent".into())?;
        if before == self.context.0 {
            return Ok(Entered { driver: self, restore: None });
        }
        let set = symbol!(self, call, cuCtxSetCurrent);
        // SAFETY: the context is retained for as long as this device lives.
        let code = unsafe { set(self.context.0) };
        self.settle(call, code, || "cuCtxSetCurrent".into())?;
        let restore = (!before.is_null()).then_some(Opaque(before));
        Ok(Entered { driver: self, restore })
    }

    /// Returns the primary context of another card, which stays retained until this device is dropped.
    pub(crate) fn peer_context(&self, call: Call, ordinal: u32) -> DriverResult<*mut CUctx_st> {
        let mut contexts = self.peer_contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = contexts.get(&ordinal) {
            return Ok(context.0);
        }
        let retain = symbol!(self, call, cuDevicePrimaryCtxRetain);
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` outlives the call. A `CUdevice` is the ordinal, and the driver checks it.
        let code = unsafe { retain(&mut context, ordinal.cast_signed()) };
        self.settle(call, code, || format!("the primary context of device {ordinal}"))?;
        contexts.insert(ordinal, Opaque(context));
        Ok(context)
    }

    /// Fails `call` if the device is lost.
    pub(crate) fn refuse_if_lost(&self, call: Call) -> DriverResult<()> {
        match self.lost.get() {
            Some(first) => Err(DriverError { call, ..first.clone() }),
            None => Ok(()),
        }
    }

    /// Converts the driver's code for `call` to a result. Records a code that loses the device.
    pub(crate) fn settle(
        &self,
        call: Call,
        code: CUresult,
        detail: impl FnOnce() -> String,
    ) -> DriverResult<()> {
        if code == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let error = DriverError {
            call,
            code: code.0.cast_signed(),
            name: self.cuda.name_of(code).into(),
            kind: kind_of(code),
            detail: detail().into(),
        };
        if error.is_device_lost() {
            // If another thread was first, its error stays.
            let _ = self.lost.set(error.clone());
        }
        Err(error)
    }

    /// Locks the address table. The lock is never held during a driver call.
    pub(crate) fn addresses(&self) -> MutexGuard<'_, AddressTable> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the error for an id that its table refused.
pub(crate) fn refused(call: Call, what: &'static str, id: u64) -> impl Fn(Refusal) -> DriverError {
    move |refusal| invalid_id(call, format!("{what} {id:#x}: {refusal}"))
}

/// Guard: the card's context is current on this thread while it lives.
pub(crate) struct Entered<'a> {
    driver: &'a CudaDriver,
    restore: Option<Opaque<CUctx_st>>,
}

impl Entered<'_> {
    /// Leaves the card's context current and returns the previous one, if it was another.
    pub(crate) fn keep_current(mut self) -> Option<Opaque<CUctx_st>> {
        self.restore.take()
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let (Some(before), Ok(set)) = (&self.restore, &self.driver.cuda.cuCtxSetCurrent) {
            // SAFETY: the context was current on this thread before. If its owner destroyed it
            // since then, the driver refuses, and there is nothing to restore.
            let _ = unsafe { set(before.0) };
        }
    }
}

fn summary(cuda: &Cuda, ordinal: u32) -> Result<(CUdevice, DeviceSummary), OpenError> {
    let (get, total) = (entry!(cuda, cuDeviceGet), entry!(cuda, cuDeviceTotalMem_v2));
    let number = i32::try_from(ordinal).unwrap_or(i32::MAX);
    let mut device = 0;
    // SAFETY: `device` outlives the call.
    let code = unsafe { get(&mut device, number) };
    cuda.check_open("cuDeviceGet", code)?;
    let mut bytes = 0;
    // SAFETY: `bytes` outlives the call; the driver made `device`.
    let code = unsafe { total(&mut bytes, device) };
    cuda.check_open("cuDeviceTotalMem_v2", code)?;
    let part = |which| u32::try_from(attribute(cuda, device, which)).unwrap_or(0);
    let compute = (
        part(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        part(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
    );
    let name = device_name(cuda, device)?;
    let host_numa = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID;
    let summary = DeviceSummary {
        ordinal,
        name,
        memory: Bytes::new(bytes as u64),
        compute,
        pci: identity::pci_address(cuda, device),
        uuid: identity::uuid(cuda, device),
        // The driver returns -1 for an unknown node.
        host_numa: known_attribute(cuda, device, host_numa).and_then(|id| u32::try_from(id).ok()),
    };
    Ok((device, summary))
}

fn device_name(cuda: &Cuda, device: CUdevice) -> Result<String, OpenError> {
    let ask = entry!(cuda, cuDeviceGetName);
    let mut text = [0u8; 256];
    // SAFETY: the driver writes at most the given number of bytes, all inside `text`.
    let code = unsafe { ask(text.as_mut_ptr().cast(), text.len() as i32, device) };
    cuda.check_open("cuDeviceGetName", code)?;
    let name = text.split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Returns an attribute of the card, or zero ("no") if the driver does not know it.
fn attribute(cuda: &Cuda, device: CUdevice, which: CUdevice_attribute) -> i32 {
    known_attribute(cuda, device, which).unwrap_or(0)
}

/// Returns an attribute of the card, or `None` if the driver does not know it.
fn known_attribute(cuda: &Cuda, device: CUdevice, which: CUdevice_attribute) -> Option<i32> {
    let ask = cuda.cuDeviceGetAttribute.as_ref().ok()?;
    let mut value = 0;
    // SAFETY: `value` outlives the call; the driver made `device`.
    let code = unsafe { ask(&mut value, which, device) };
    (code == CUresult::CUDA_SUCCESS).then_some(value)
}

fn capabilities(cuda: &Cuda, device: CUdevice, compute: (u32, u32)) -> Capabilities {
    let has = |which| attribute(cuda, device, which) != 0;
    let virtual_memory =
        has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
            && cuda.cuMemGetAllocationGranularity.is_ok()
            && cuda.cuMemAddressReserve.is_ok()
            && cuda.cuMemAddressFree.is_ok()
            && cuda.cuMemCreate.is_ok()
            && cuda.cuMemRelease.is_ok()
            && cuda.cuMemMap.is_ok()
            && cuda.cuMemUnmap.is_ok()
            && cuda.cuMemSetAccess.is_ok();
    Capabilities {
        virtual_memory,
        stream_ordered_pool: has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)
            && cuda.cuMemPoolCreate.is_ok()
            && cuda.cuMemAllocFromPoolAsync.is_ok()
            && cuda.cuMemFreeAsync.is_ok(),
        host_numa: virtual_memory
            && has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
        pinned_host: cuda.cuMemHostAlloc.is_ok() && cuda.cuMemFreeHost.is_ok(),
        remap_beside_kernels: virtual_memory && compute.0 >= 8,
        graphs: cuda.cuStreamBeginCapture_v2.is_ok()
            && cuda.cuStreamEndCapture.is_ok()
            && cuda.cuStreamGetCaptureInfo_v3.is_ok()
            && cuda.cuGraphNodeGetDependencies_v2.is_ok()
            && cuda.cuGraphInstantiateWithFlags.is_ok()
            && cuda.cuGraphLaunch.is_ok()
            && cuda.cuGraphDestroy.is_ok()
            && cuda.cuGraphExecDestroy.is_ok(),
        posix_fd: virtual_memory
            && has(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            )
            && cuda.cuMemExportToShareableHandle.is_ok()
            && cuda.cuMemImportFromShareableHandle.is_ok(),
        fabric: virtual_memory
            && has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)
            && cuda.cuMemExportToShareableHandle.is_ok()
            && cuda.cuMemImportFromShareableHandle.is_ok(),
        rdma: virtual_memory
            && has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
        dma_buf: virtual_memory
            && has(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)
            && cuda.cuMemGetHandleForAddressRange.is_ok(),
    }
}

/// Returns the ordinals of the devices that can access this one's memory, and that it can access. A
/// failure means that there are none, because no call needs them.
fn peers(cuda: &Cuda, device: CUdevice, ordinal: u32, count: u32) -> Vec<u32> {
    let Ok(can_access) = cuda.cuDeviceCanAccessPeer.as_ref() else { return Vec::new() };
    let can = |from: CUdevice, to: CUdevice| {
        let mut can = 0;
        // SAFETY: `can` outlives the call. A `CUdevice` is the ordinal, and the driver checks it.
        let code = unsafe { can_access(&mut can, from, to) };
        code == CUresult::CUDA_SUCCESS && can != 0
    };
    let both = |other: u32| can(device, other.cast_signed()) && can(other.cast_signed(), device);
    (0..count).filter(|&other| other != ordinal && both(other)).collect()
}

pub(crate) fn retain_context(cuda: &Cuda, device: CUdevice) -> Result<Opaque<CUctx_st>, OpenError> {
    let retain = entry!(cuda, cuDevicePrimaryCtxRetain);
    let mut context = std::ptr::null_mut();
    // SAFETY: `context` outlives the call; the driver made `device`.
    let code = unsafe { retain(&mut context, device) };
    cuda.check_open("cuDevicePrimaryCtxRetain", code)?;
    Ok(Opaque(context))
}

impl Driver for CudaDriver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn reserve(&self, len: Bytes, alignment: Bytes) -> DriverResult<DeviceAddr> {
        memory::reserve(self, len, alignment)
    }

    fn free_addresses(&self, range: AddrRange) -> DriverResult<()> {
        memory::free_addresses(self, range)
    }

    fn create(&self, len: Bytes, properties: MemoryProperties) -> DriverResult<Handle> {
        memory::create(self, len, properties)
    }

    fn release(&self, handle: Handle) -> DriverResult<()> {
        memory::release(self, handle)
    }

    fn map(&self, at: DeviceAddr, handle: Handle) -> DriverResult<()> {
        memory::map(self, at, handle)
    }

    fn unmap(&self, range: AddrRange) -> DriverResult<()> {
        memory::unmap(self, range)
    }

    fn set_access(&self, range: AddrRange, peers: &[u32]) -> DriverResult<()> {
        memory::set_access(self, range, peers)
    }

    fn revoke_access(&self, range: AddrRange, peers: &[u32]) -> DriverResult<()> {
        memory::revoke_access(self, range, peers)
    }

    fn export(&self, handle: Handle) -> DriverResult<ExportedHandle> {
        sharing::export(self, handle)
    }

    fn import(&self, exported: &ExportedHandle, len: Bytes) -> DriverResult<Handle> {
        sharing::import(self, exported, len)
    }

    fn export_dma_buf(&self, range: AddrRange) -> DriverResult<OwnedFd> {
        sharing::export_dma_buf(self, range)
    }

    fn alloc_memory(&self, len: Bytes) -> DriverResult<DeviceAddr> {
        memory::alloc(self, len)
    }

    fn free_memory(&self, at: DeviceAddr) -> DriverResult<()> {
        memory::free(self, at)
    }

    fn adopt_memory(&self, range: AddrRange) -> DriverResult<()> {
        adopted::adopt(self, range)
    }

    fn forget_memory(&self, range: AddrRange) -> bool {
        adopted::forget(self, range)
    }

    fn create_stream(&self) -> DriverResult<Stream> {
        stream::create_stream(self)
    }

    fn thread_stream(&self) -> DriverResult<Stream> {
        stream::thread_stream(self)
    }

    fn stream_thread(&self, stream: Stream) -> StreamThread {
        stream::stream_thread(self, stream)
    }

    fn destroy_stream(&self, stream: Stream) -> DriverResult<()> {
        stream::destroy_stream(self, stream)
    }

    fn synchronize_stream(&self, stream: Stream) -> DriverResult<()> {
        stream::synchronize_stream(self, stream)
    }

    fn is_capturing(&self, stream: Stream) -> DriverResult<bool> {
        stream::stream_is_capturing(self, stream)
    }

    fn create_event(&self) -> DriverResult<Event> {
        stream::create_event(self)
    }

    fn destroy_event(&self, event: Event) -> DriverResult<()> {
        stream::destroy_event(self, event)
    }

    fn record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        stream::record(self, event, stream)
    }

    fn record_outside(&self, event: Event, stream: Stream) -> DriverResult<bool> {
        stream::record_outside(self, event, stream)
    }

    fn query(&self, event: Event) -> DriverResult<bool> {
        stream::query(self, event)
    }

    fn wait(&self, stream: Stream, event: Event) -> DriverResult<()> {
        stream::wait(self, stream, event)
    }

    fn synchronize_event(&self, event: Event) -> DriverResult<()> {
        stream::synchronize_event(self, event)
    }

    fn synchronize_device(&self) -> DriverResult<()> {
        stream::synchronize_device(self)
    }

    fn fill(&self, stream: Stream, range: AddrRange, byte: u8) -> DriverResult<()> {
        copy::fill(self, stream, range, byte)
    }

    fn copy(&self, stream: Stream, copy: DeviceCopy) -> DriverResult<()> {
        copy::copy(self, stream, copy)
    }

    fn copy_peer(&self, stream: Stream, copy: DeviceCopy, other: &dyn Driver) -> DriverResult<()> {
        copy::copy_peer(self, stream, copy, other)
    }

    fn copy_to_device(&self, stream: Stream, from: HostSlice, to: DeviceAddr) -> DriverResult<()> {
        copy::copy_to_device(self, stream, from, to)
    }

    fn copy_to_host(&self, stream: Stream, from: DeviceAddr, to: HostSlice) -> DriverResult<()> {
        copy::copy_to_host(self, stream, from, to)
    }

    fn begin_capture(&self, stream: Stream, mode: CaptureMode) -> DriverResult<()> {
        graph::begin_capture(self, stream, mode)
    }

    fn end_capture(&self, stream: Stream) -> DriverResult<Graph> {
        graph::end_capture(self, stream)
    }

    fn capture_info(&self, stream: Stream) -> DriverResult<Option<CaptureInfo>> {
        graph::capture_info(self, stream)
    }

    fn node_dependencies(&self, node: GraphNode) -> DriverResult<Vec<GraphNode>> {
        graph::node_dependencies(self, node)
    }

    fn graph_nodes(&self, graph: Graph) -> DriverResult<usize> {
        graph::graph_nodes(self, graph)
    }

    fn instantiate(&self, graph: Graph) -> DriverResult<GraphExec> {
        graph::instantiate(self, graph)
    }

    fn launch_graph(&self, exec: GraphExec, stream: Stream) -> DriverResult<()> {
        graph::launch_graph(self, exec, stream)
    }

    fn destroy_graph(&self, graph: Graph) -> DriverResult<()> {
        graph::destroy_graph(self, graph)
    }

    fn destroy_graph_exec(&self, exec: GraphExec) -> DriverResult<()> {
        graph::destroy_graph_exec(self, exec)
    }

    fn malloc_async(&self, stream: Stream, len: Bytes) -> DriverResult<DeviceAddr> {
        pool::malloc_async(self, stream, len)
    }

    fn free_async(&self, stream: Stream, at: DeviceAddr) -> DriverResult<()> {
        pool::free_async(self, stream, at)
    }

    fn pool_usage(&self) -> DriverResult<PoolUsage> {
        pool::usage(self)
    }

    fn set_pool_threshold(&self, keep: Bytes) -> DriverResult<()> {
        pool::set_threshold(self, keep)
    }

    fn trim_pool(&self, keep: Bytes) -> DriverResult<()> {
        pool::trim(self, keep)
    }

    fn alloc_host(&self, len: Bytes) -> DriverResult<HostBuffer> {
        host::alloc(self, len)
    }

    fn register_host(&self, memory: &Arc<HostMemory>) -> DriverResult<HostBuffer> {
        host::register(self, memory)
    }

    fn free_host(&self, buffer: HostBuffer) -> DriverResult<()> {
        host::free(self, buffer)
    }

    fn write_host(&self, buffer: HostBuffer, offset: Bytes, bytes: &[u8]) -> DriverResult<()> {
        host::write(self, buffer, offset, bytes)
    }

    fn read_host(&self, buffer: HostBuffer, offset: Bytes, bytes: &mut [u8]) -> DriverResult<()> {
        host::read(self, buffer, offset, bytes)
    }

    fn owns(&self, range: AddrRange) -> bool {
        self.addresses().check_owned(range).is_ok()
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        memory::memory_info(self)
    }
}
