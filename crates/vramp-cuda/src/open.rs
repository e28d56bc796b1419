//! Finding cards, and opening one.

use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use vramp_core::Bytes;
use vramp_driver::{Capabilities, DeviceInfo, Limits};

use crate::device::CudaDriver;
use crate::error::OpenError;
use crate::load::{Cuda, entry};
use crate::sys::{CUctx_st, CUdevice, CUdevice_attribute, CUresult};
use crate::table::{Opaque, Table};
use crate::turns::Turns;
use crate::{identity, memory, pool};

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
