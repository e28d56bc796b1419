//! The memory of PyTorch's own caching allocator, which serves graphs and memory pools.
//!
//! It takes its *segments* from here. A segment is handed out after all earlier work on its memory, because
//! PyTorch uses it on any stream and in graphs that run later. A thread that is in a region gets its
//! segments from the region, so pools and graphs made there sleep with it.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vramp_alloc::sharing::{Export, ExportError};
use vramp_alloc::{AllocError, Allocation, Allocator, Bytes, DeviceAddr, StreamId};

use super::{TORCH, Torch};
use crate::abi::vramp_status_t;
use crate::pointers::write_out;
use crate::print::write_line;
use crate::regions::{Owner, not_allocated};
use crate::session::Session;
use crate::status::{Failure, Kind, Result, check_fork, status_of};

/// The segments of a device that PyTorch's own allocator has.
#[derive(Debug)]
pub(super) struct Segments(Mutex<SegmentTable>);

#[derive(Debug)]
struct SegmentTable {
    stream: Option<StreamId>,
    /// By address.
    live: BTreeMap<u64, Segment>,
    /// The pool of segments of one handle each, for memory that is registered.
    comm: Option<Arc<Allocator>>,
    /// True once a line said that segments are plain allocations.
    said_plain: bool,
}

#[derive(Debug)]
struct Segment {
    block: Allocation,
    /// True for memory of the comm pool.
    is_comm: bool,
}

impl Segments {
    pub(super) const fn new() -> Segments {
        Segments(Mutex::new(SegmentTable {
            stream: None,
            live: BTreeMap::new(),
            comm: None,
            said_plain: false,
        }))
    }

    /// Returns the number of segments.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.lock().live.len()
    }

    /// Returns true if a segment begins at the address.
    pub(super) fn has(&self, addr: u64) -> bool {
        self.lock().live.contains_key(&addr)
    }

    /// Returns the first address of the segment that contains an address. O(log n).
    pub(super) fn containing(&self, addr: u64) -> Option<u64> {
        let table = self.lock();
        let (&start, segment) = table.live.range(..=addr).next_back()?;
        (addr - start < segment.block.len().count()).then_some(start)
    }

    /// Returns the number of the pool whose segment contains an address. O(log n).
    fn pool_of(&self, addr: u64) -> Option<u64> {
        let table = self.lock();
        let (&start, segment) = table.live.range(..=addr).next_back()?;
        (addr - start < segment.block.len().count()).then(|| segment.block.pool_number())
    }

    /// Exports the segment that begins at an address. `None` if none does.
    pub(super) fn export(
        &self,
        session: &Session,
        start: u64,
    ) -> Option<std::result::Result<Export, ExportError>> {
        let table = self.lock();
        let segment = table.live.get(&start)?;
        let comm = table.comm.as_deref().filter(|_| segment.is_comm);
        let owner = session.owner(segment.block.pool_number());
        Some(comm.unwrap_or(&owner).export(&segment.block))
    }

    /// Returns the number of exported segments of the comm pool.
    pub(super) fn exported(&self) -> usize {
        self.lock().comm.as_ref().map_or(0, |comm| comm.exported())
    }

    /// Returns the pool of segments of one handle. The first call creates it.
    fn comm(&self, allocator: &Allocator) -> Result<Arc<Allocator>> {
        let mut table = self.lock();
        if let Some(comm) = &table.comm {
            return Ok(Arc::clone(comm));
        }
        let comm = Arc::new(vramp_peers::comm_pool(allocator, "torch-comm")?);
        table.comm = Some(Arc::clone(&comm));
        Ok(comm)
    }

    fn lock(&self) -> MutexGuard<'_, SegmentTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stream(&self, create: impl FnOnce() -> Result<StreamId>) -> Result<StreamId> {
        let mut table = self.lock();
        if let Some(stream) = table.stream {
            return Ok(stream);
        }
        let stream = create()?;
        table.stream = Some(stream);
        Ok(stream)
    }
}

impl Torch {
    pub(super) fn segment_malloc(&self, device: c_int, size: u64) -> Result<DeviceAddr> {
        let session = self.session(device)?;
        let stream = self.segments(device).stream(|| session.create_stream())?;
        let region = session.region_of_thread()?;
        let allocator = region.as_ref().map_or(session.allocator(), |region| region.allocator());
        let segment = allocator.malloc(Bytes::new(size), stream);
        let segment = segment.map_err(|error| match &region {
            Some(region) => not_allocated(region.tag(), error),
            None => error.into(),
        })?;
        // The pool may have made this stream wait for other streams. Streams that use the segment do not
        // wait for this stream, so the work has to be over.
        let waited = match allocator.stream(stream) {
            Some(raw) => allocator.driver().synchronize_stream(raw),
            None => Ok(()),
        };
        if let Err(error) = waited {
            allocator.free(segment, stream)?;
            return Err(error.into());
        }
        let addr = segment.addr();
        let segment = Segment { block: segment, is_comm: false };
        self.segments(device).lock().live.insert(addr.number(), segment);
        Ok(addr)
    }

    /// Refuses an address in a segment whose region sleeps: PyTorch's own allocator may have had it free, and
    /// gives it to a request of any thread. O(log n) in the segments, and O(1) without regions.
    pub(super) fn check_awake(&self, device: c_int, addr: u64) -> Result<()> {
        let Some(session) = self.opened_on(device)? else { return Ok(()) };
        if session.regions_if_any().is_none() {
            return Ok(());
        }
        let Some(number) = self.segments(device).pool_of(addr) else { return Ok(()) };
        match session.owner(number) {
            Owner::Region(region) if region.allocator().is_asleep() => {
                let tag = region.tag();
                let text = format!(
                    "the memory pool has free memory of the region {tag:?}, which sleeps: resume the \
                     region first, or use another pool"
                );
                Err(Failure::of_region(tag, text))
            }
            _ => Ok(()),
        }
    }

    /// Allocates a segment that is a plain allocation of the driver, or a part of one. A thread in a region
    /// gets the region's memory, which can sleep.
    pub(super) fn plain_malloc(&self, device: c_int, size: u64) -> Result<DeviceAddr> {
        let session = self.session(device)?;
        if session.region_of_thread()?.is_some() {
            return self.segment_malloc(device, size);
        }
        let segments = self.segments(device);
        let stream = segments.stream(|| session.create_stream())?;
        let plain = session.plain_pool()?;
        // Before the trim the card may have no more memory, where the limit allows more.
        let placed = plain.malloc(Bytes::new(size), stream).or_else(|error| {
            if !matches!(error, AllocError::OutOfMemory(_)) {
                return Err(Failure::from(error));
            }
            session.trim(0)?;
            Ok(plain.malloc(Bytes::new(size), stream)?)
        });
        let block = placed?;
        let addr = block.addr();
        let mut table = segments.lock();
        table.live.insert(addr.number(), Segment { block, is_comm: false });
        if !std::mem::replace(&mut table.said_plain, true) {
            drop(table);
            write_line(&format!(
                "vramp: memory of graphs and memory pools on device {device} comes from cudaMalloc, so that \
                 cudaIpcGetMemHandle takes it (VRAMP_CONF=ipc): it is not moved and stays on the card in a sleep"
            ));
        }
        Ok(addr)
    }

    /// Allocates a segment of one handle, whose memory is fresh or unused.
    pub(super) fn comm_malloc(&self, device: c_int, size: u64) -> Result<DeviceAddr> {
        let session = self.session(device)?;
        let segments = self.segments(device);
        let stream = segments.stream(|| session.create_stream())?;
        let comm = segments.comm(session.allocator())?;
        let placed = comm.malloc(Bytes::new(size), stream).or_else(|error| {
            if !matches!(error, AllocError::OutOfMemory(_)) {
                return Err(Failure::from(error));
            }
            // The device's memory may be idle in the allocator of the tensors.
            session.trim(0)?;
            Ok(comm.malloc(Bytes::new(size), stream)?)
        });
        let block = placed?;
        let addr = block.addr();
        segments.lock().live.insert(addr.number(), Segment { block, is_comm: true });
        Ok(addr)
    }

    /// Frees a segment of any device and returns its size.
    pub(super) fn segment_free(&self, addr: u64, may_be_in_use: bool) -> Result<u64> {
        check_fork()?;
        for (device, session) in self.opened_by_device() {
            let removed = self.segments(device).lock().live.remove(&addr);
            let Some(segment) = removed else { continue };
            self.shares.withdraw(device, addr);
            let Segment { block: segment, is_comm } = segment;
            let comm = if is_comm { self.segments(device).lock().comm.clone() } else { None };
            let owner = session.owner(segment.pool_number());
            let allocator = comm.as_deref().unwrap_or(&owner);
            let (size, stream) = (segment.requested().count(), segment.stream());
            if may_be_in_use {
                for user in session.adopted_streams() {
                    allocator.record_use(&segment, user)?;
                }
            }
            let is_plain = session
                .plain_pool_if_any()
                .is_some_and(|plain| plain.number() == allocator.number());
            allocator.free(segment, stream)?;
            // A segment of another size could not use it. A plain allocation is freed where the device was
            // waited for: the driver waits too, which a capture forbids.
            if is_comm || (is_plain && !may_be_in_use) {
                allocator.trim(Bytes::ZERO)?;
            }
            return Ok(size);
        }
        let text = format!("no segment of any device begins at {addr:#x}");
        Err(Failure::new(Kind::UnknownPointer, text))
    }

    /// Returns the device of a segment.
    pub(super) fn segment_device(&self, addr: u64) -> Option<c_int> {
        let mut opened = self.opened_by_device().map(|(device, _)| device);
        opened.find(|&device| self.segments(device).has(addr))
    }
}

fn pointer(addr: DeviceAddr) -> *mut c_void {
    addr.number() as *mut c_void
}

/// Allocates a segment for PyTorch's own allocator. Waits on the host for earlier work on its memory.
///
/// # Safety
/// `address` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_segment_malloc(
    device: c_int,
    size: u64,
    address: *mut *mut c_void,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    unsafe { write_out((address, "address"), || TORCH.segment_malloc(device, size).map(pointer)) }
}

/// Allocates a segment for PyTorch's own allocator that is a plain allocation of the driver, or a part of one,
/// so that cudaIpcGetMemHandle takes its address. The caller's thread is in relaxed capture mode if a stream
/// captures. A line on stderr says so once. A thread in a region gets the region's memory.
///
/// # Safety
/// `address` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_plain_malloc(
    device: c_int,
    size: u64,
    address: *mut *mut c_void,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    unsafe { write_out((address, "address"), || TORCH.plain_malloc(device, size).map(pointer)) }
}

/// Returns the option `ipc`: 0 for `off`, 1 for `legacy`, 2 for `auto`.
///
/// # Safety
/// `mode` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_ipc(mode: *mut c_int) -> vramp_status_t {
    let find = || Ok(TORCH.read_settings()?.ipc as c_int);
    // SAFETY: required by this function's contract.
    unsafe { write_out((mode, "mode"), find) }
}

/// Allocates a segment of one handle for PyTorch's own allocator: it never moves, and libraries can register and
/// export it.
///
/// # Safety
/// `address` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_comm_malloc(
    device: c_int,
    size: u64,
    address: *mut *mut c_void,
) -> vramp_status_t {
    // SAFETY: required by this function's contract.
    unsafe { write_out((address, "address"), || TORCH.comm_malloc(device, size).map(pointer)) }
}

/// VRAMP_ERROR_REGION if an address lies in a segment whose region sleeps: a block there must not be given
/// to a program.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_segment_awake(
    device: c_int,
    address: *const c_void,
) -> vramp_status_t {
    status_of(|| TORCH.check_awake(device, address as u64))
}

/// Returns the device of a segment. VRAMP_ERROR_UNKNOWN_POINTER if none begins at the address.
///
/// # Safety
/// `device` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_segment_device(
    address: *mut c_void,
    device: *mut c_int,
) -> vramp_status_t {
    let find = || {
        check_fork()?;
        TORCH.segment_device(address as u64).ok_or_else(|| {
            let text = format!("no segment of any device begins at {address:p}");
            Failure::new(Kind::UnknownPointer, text)
        })
    };
    // SAFETY: required by this function's contract.
    unsafe { write_out((device, "device"), find) }
}

/// Frees a segment; `*size` is its size. With `may_be_in_use`, its memory is reused after all work that
/// is queued now on the streams of the device's allocator; otherwise no work uses it any more.
///
/// # Safety
/// `size` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vramp_torch_segment_free(
    address: *mut c_void,
    may_be_in_use: c_int,
    size: *mut u64,
) -> vramp_status_t {
    let free = || TORCH.segment_free(address as u64, may_be_in_use != 0);
    // SAFETY: required by this function's contract.
    unsafe { write_out((size, "size"), free) }
}
