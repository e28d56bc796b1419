//! Slices: memory of a pool that cudarc's calls take.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, RangeBounds};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr,
    DeviceSlice, DriverError, HostSlice, LaunchArgs, PushKernelArg, SyncOnDrop, ValidAsZeroBits,
};
use vramp_alloc::{Allocation, Bytes};

use crate::error::{AdoptError, SliceError};
use crate::pool::{Lane, Pool};

/// Slices of cudarc on the same memory, which they do not own: the second one has events, which cudarc makes with a
/// slice or never. Each is lent while the context tracks uses as it does.
type Lent<T> = [OnceLock<ManuallyDrop<CudaSlice<T>>>; 2];

/// `len` elements of `T` on the device, from a [`Pool`]. cudarc's calls take it as they take `CudaSlice`: it has the
/// same traits, views and order of uses.
///
/// It lends a `CudaSlice` of the same memory: `&VrampSlice<T>` derefs to `&CudaSlice<T>`. It
/// never gives one away, or a mutable reference to one, because a drop of it would free vramp's memory by a call
/// of the driver.
///
/// Dropping it frees the memory in the order of its stream, behind the last read and the last write that cudarc's
/// events recorded on any stream. It never waits.
///
/// # Panics
/// The first use by cudarc, and the first deref, make two events if cudarc tracks uses, and panic if the driver cannot.
pub struct VrampSlice<T> {
    /// `None` once it is given away.
    block: Option<Allocation>,
    len: usize,
    lane: Arc<Lane>,
    /// Made with the first use.
    lent: OnceLock<Box<Lent<T>>>,
}

/// # Slices
impl Pool {
    /// Allocates a slice for work on `stream`. A slice of no elements has an address too.
    ///
    /// Cost: that of a cache hit of vramp, no driver call. Events are made with the slice's first use.
    ///
    /// # Safety
    /// The memory is not set: it has to be written before it is read as `T`.
    ///
    /// # Errors
    /// [`SliceError::Alloc`] with a report if there is no memory; those of [`Pool::stream_id`];
    /// [`SliceError::TooLong`].
    #[inline]
    pub unsafe fn alloc<T: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
    ) -> Result<VrampSlice<T>, SliceError> {
        VrampSlice::on(self.lane(stream)?, len)
    }

    /// Allocates a slice of zeros: an allocation and a fill on `stream`.
    ///
    /// # Errors
    /// As of [`Pool::alloc`], and [`SliceError::Cuda`].
    pub fn alloc_zeros<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        stream: &Arc<CudaStream>,
        len: usize,
    ) -> Result<VrampSlice<T>, SliceError> {
        // SAFETY: it is filled here.
        let slice = unsafe { self.alloc(stream, len) }?;
        slice.filled(|slice, stream| stream.memset_zeros(slice))
    }

    /// Allocates a slice and copies host memory into it on `stream`.
    ///
    /// # Errors
    /// As of [`Pool::alloc`], and [`SliceError::Cuda`].
    pub fn clone_htod<T: DeviceRepr, Src: HostSlice<T> + ?Sized>(
        &self,
        stream: &Arc<CudaStream>,
        src: &Src,
    ) -> Result<VrampSlice<T>, SliceError> {
        // SAFETY: it is filled here.
        let slice = unsafe { self.alloc(stream, src.len()) }?;
        slice.filled(|slice, stream| stream.memcpy_htod(src, slice))
    }

    /// Allocates a slice and copies device memory of any owner into it on `stream`, which waits for the writes of
    /// `src`.
    ///
    /// # Errors
    /// As of [`Pool::alloc`], and [`SliceError::Cuda`].
    pub fn clone_dtod<T: DeviceRepr, Src: DevicePtr<T>>(
        &self,
        stream: &Arc<CudaStream>,
        src: &Src,
    ) -> Result<VrampSlice<T>, SliceError> {
        // SAFETY: it is filled here.
        let slice = unsafe { self.alloc(stream, src.len()) }?;
        slice.filled(|slice, stream| stream.memcpy_dtod(src, slice))
    }

    /// Makes a slice of a block of the pool's allocator, which it frees on `stream` in the end.
    ///
    /// # Safety
    /// All work on the block is ordered before the end of `stream`. Its memory is written before it is read as `T`.
    ///
    /// # Errors
    /// [`AdoptError`] with the block: for [`SliceError::ForeignBlock`], [`SliceError::ShortBlock`] and the errors of
    /// [`Pool::stream_id`].
    pub unsafe fn adopt<T: DeviceRepr>(
        &self,
        stream: &Arc<CudaStream>,
        block: Allocation,
        len: usize,
    ) -> Result<VrampSlice<T>, AdoptError> {
        match self.lane_for::<T>(stream, &block, len) {
            Ok(lane) => Ok(VrampSlice { block: Some(block), len, lane, lent: OnceLock::new() }),
            Err(error) => Err(AdoptError { block, error }),
        }
    }

    fn lane_for<T>(
        &self,
        stream: &Arc<CudaStream>,
        block: &Allocation,
        len: usize,
    ) -> Result<Arc<Lane>, SliceError> {
        let needed = bytes_of::<T>(len)?;
        if block.pool_number() != self.allocator().number() {
            return Err(SliceError::ForeignBlock);
        }
        if block.len() < needed {
            return Err(SliceError::ShortBlock { len: block.len(), needed });
        }
        self.lane(stream)
    }

    /// Records that the work queued on `stream` so far uses a slice, whose memory is then reused only after that work.
    /// For uses that cudarc does not record: those of other libraries, those while it tracks none, and reads on a
    /// stream while another one reads too. No driver call.
    ///
    /// # Errors
    /// [`SliceError::Use`] if the slice is another allocator's; those of [`Pool::stream_id`].
    pub fn record_use<T>(
        &self,
        slice: &VrampSlice<T>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), SliceError> {
        Ok(self.allocator().record_use(slice.block(), self.stream_id(stream)?)?)
    }
}

/// Returns the bytes of `len` elements.
#[inline]
fn bytes_of<T>(len: usize) -> Result<Bytes, SliceError> {
    let size = size_of::<T>();
    match len.checked_mul(size) {
        Some(bytes) => Ok(Bytes::new(bytes as u64)),
        None => Err(SliceError::TooLong { len, size }),
    }
}

impl<T> VrampSlice<T> {
    /// Not inlined: a block that is made in registers and copied at once takes a third longer.
    #[inline(never)]
    fn on(lane: Arc<Lane>, len: usize) -> Result<VrampSlice<T>, SliceError> {
        let bytes = bytes_of::<T>(len)?;
        let block = Some(lane.allocator.malloc(bytes, lane.id)?);
        Ok(VrampSlice { block, len, lane, lent: OnceLock::new() })
    }

    /// Returns the slice once `fill` has queued what fills it, unless it has no bytes.
    fn filled(
        mut self,
        fill: impl FnOnce(&mut VrampSlice<T>, &Arc<CudaStream>) -> Result<(), DriverError>,
    ) -> Result<VrampSlice<T>, SliceError> {
        if self.num_bytes() != 0 {
            let stream = Arc::clone(self.stream());
            // The slice's own events can return no error: here one of the device, or one that cudarc has kept, is found.
            drop(stream.context().new_event(None)?);
            fill(&mut self, &stream)?;
        }
        Ok(self)
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes of its elements.
    pub fn num_bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Returns the stream that it was allocated on and is freed on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.lane.stream
    }

    /// Returns its context.
    pub fn context(&self) -> &Arc<CudaContext> {
        self.lane.stream.context()
    }

    /// Returns the number of its device.
    pub fn ordinal(&self) -> usize {
        self.context().ordinal()
    }

    /// Returns the block of vramp: its address and its length with rounding.
    pub fn block(&self) -> &Allocation {
        self.block.as_ref().expect("a slice has its block until it ends")
    }

    /// Returns the block, which no drop frees any more: `Allocator::free` does, or a slice that [`Pool::adopt`] makes
    /// of it. The slice's stream is ordered behind the uses that cudarc recorded.
    #[must_use = "the block leaks until the allocator is closed"]
    pub fn into_block(mut self) -> Allocation {
        // The drop of the rest orders the stream.
        self.block.take().expect("a slice has its block until it ends")
    }

    /// Returns a mutable view of all of it.
    pub fn as_view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.lend_mut().as_view_mut()
    }

    /// Returns a mutable view of a range.
    ///
    /// # Panics
    /// If the range is not inside.
    pub fn slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> CudaViewMut<'_, T> {
        self.lend_mut().slice_mut(bounds)
    }

    /// Returns a mutable view of a range, or `None` if it is not inside.
    pub fn try_slice_mut(&mut self, bounds: impl RangeBounds<usize>) -> Option<CudaViewMut<'_, T>> {
        self.lend_mut().try_slice_mut(bounds)
    }

    /// Returns mutable views of the elements before `mid`, and from it on.
    ///
    /// # Panics
    /// If `mid` is past the end.
    pub fn split_at_mut(&mut self, mid: usize) -> (CudaViewMut<'_, T>, CudaViewMut<'_, T>) {
        self.lend_mut().split_at_mut(mid)
    }

    /// Returns what [`VrampSlice::split_at_mut`] does, or `None` if `mid` is past the end.
    pub fn try_split_at_mut(
        &mut self,
        mid: usize,
    ) -> Option<(CudaViewMut<'_, T>, CudaViewMut<'_, T>)> {
        self.lend_mut().try_split_at_mut(mid)
    }

    /// Returns a mutable view of the same memory as `len` elements of `S`, or `None` if they are longer.
    ///
    /// # Safety
    /// The bytes are valid as `S`, and what is written as `S` is valid as `T`.
    pub unsafe fn transmute_mut<S>(&mut self, len: usize) -> Option<CudaViewMut<'_, S>> {
        // SAFETY: this function's contract is the same.
        unsafe { self.lend_mut().transmute_mut(len) }
    }

    /// Returns a slice of cudarc on the same memory.
    fn lend(&self) -> &CudaSlice<T> {
        self.lend_as(self.context().is_event_tracking())
    }

    fn lend_mut(&mut self) -> &mut CudaSlice<T> {
        let is_tracked = self.context().is_event_tracking();
        self.lend_as(is_tracked);
        let lent = self.lent.get_mut().and_then(|lent| lent[usize::from(is_tracked)].get_mut());
        lent.expect("it was made above")
    }

    fn lend_as(&self, is_tracked: bool) -> &CudaSlice<T> {
        let lent = self.lent.get_or_init(Box::default);
        lent[usize::from(is_tracked)].get_or_init(|| ManuallyDrop::new(self.make_lent()))
    }

    #[cold]
    fn make_lent(&self) -> CudaSlice<T> {
        let (stream, context) = (self.stream(), self.context());
        let pointer = self.block().addr().number();
        // An error of an earlier call that cudarc has kept is for a call that can return it.
        let kept = context.check_err();
        // SAFETY: the block is allocated for as long as `self`, and has room for the elements; those who made the slice
        // answer for its contents. Nothing drops the slice: its end is `order_uses`.
        let mut lent = unsafe { stream.upgrade_device_ptr::<T>(pointer, self.len) };
        if context.is_managing_stream_synchronization() {
            // Records the present end of the slice's stream as a write. Work of the memory's user before is ordered on
            // that stream only, and other streams begin behind it.
            drop(lent.device_ptr_mut(stream));
        }
        context.record_err(kept);
        lent
    }

    /// Orders the slice's stream behind the uses that cudarc's events recorded.
    #[inline(never)]
    fn order_uses(&mut self) {
        for lent in self.lent.take().into_iter().flat_map(|lent| *lent) {
            if let Some(lent) = lent.into_inner() {
                let mut lent = ManuallyDrop::into_inner(lent);
                order_behind_ended_streams(&mut lent);
                // Waits for both events if cudarc manages the order of streams, and gives the memory back.
                let _ = lent.leak();
            }
        }
    }
}

/// Makes the slice's stream wait for its events where cudarc does not: once the last other stream was dropped, whose work
/// may go on.
fn order_behind_ended_streams<T>(lent: &mut CudaSlice<T>) {
    let stream = Arc::clone(lent.stream());
    let context = stream.context();
    if !context.is_event_tracking() || context.is_in_multi_stream_mode() {
        return;
    }
    let wait = |guard: SyncOnDrop<'_>| {
        if let SyncOnDrop::Record(Some((event, _))) = &guard {
            context.record_err(stream.wait(event));
        }
    };
    wait(lent.device_ptr(&stream).1);
    wait(lent.device_ptr_mut(&stream).1);
}

impl<T: DeviceRepr> VrampSlice<T> {
    /// Returns a copy in memory of the same pool, made on the slice's stream.
    ///
    /// # Errors
    /// [`SliceError::Alloc`] and [`SliceError::Cuda`].
    pub fn try_clone(&self) -> Result<VrampSlice<T>, SliceError> {
        let copy = VrampSlice::on(Arc::clone(&self.lane), self.len)?;
        copy.filled(|copy, stream| stream.memcpy_dtod(self, copy))
    }
}

impl<T: DeviceRepr> Clone for VrampSlice<T> {
    /// Returns what [`VrampSlice::try_clone`] does.
    ///
    /// # Panics
    /// If there is no memory, or the copy fails.
    fn clone(&self) -> VrampSlice<T> {
        self.try_clone().unwrap_or_else(|error| panic!("a slice cannot be copied: {error}"))
    }
}

impl<T> Drop for VrampSlice<T> {
    #[inline]
    fn drop(&mut self) {
        if self.lent.get().is_some() {
            self.order_uses();
        }
        if let Some(block) = self.block.take() {
            // A drop reports no error. After a failed driver call the memory is free all the same.
            drop(self.lane.allocator.free(block, self.lane.id));
        }
    }
}

impl<T> Deref for VrampSlice<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        self.lend()
    }
}

impl<T> DeviceSlice<T> for VrampSlice<T> {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.lane.stream
    }
}

impl<T> DevicePtr<T> for VrampSlice<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.lend().device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for VrampSlice<T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.lend_mut().device_ptr_mut(stream)
    }
}

// SAFETY: it pushes what cudarc's own slice of the same memory pushes, which lives as long as the reference.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b VrampSlice<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b VrampSlice<T>) -> &mut Self {
        self.arg(arg.lend())
    }
}

// SAFETY: it pushes what cudarc's own slice of the same memory pushes, which lives as long as the reference.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b mut VrampSlice<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut VrampSlice<T>) -> &mut Self {
        self.arg(arg.lend_mut())
    }
}

impl<T> fmt::Debug for VrampSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VrampSlice")
            .field("block", &self.block)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
