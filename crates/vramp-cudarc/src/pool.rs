//! A pool for the streams of one context, and the streams that it knows.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cudarc::driver::{CudaContext, CudaStream};
use vramp_alloc::device::CudaDriver;
use vramp_alloc::{Allocator, Config, Driver, StreamId};

use crate::error::{OpenError, SliceError};

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// Number of the next pool.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Memory of vramp for cudarc's streams of one device. A clone is the same pool.
///
/// It takes cudarc's contexts and streams as they are. A stream is registered with its first slice, and the
/// pool holds its `Arc` from then on, so that the driver's stream outlives what vramp knows of it. Once the pool
/// is the last to hold it, the stream is forgotten: when the next one is registered, by [`Pool::forget_dropped`], or
/// with the pool; slices of it that are left keep it until they are dropped. So of streams that come and go without
/// end, only those are kept that were dropped since the last one came. A stream that `CudaContext::wrap_borrowed_stream`
/// wrapped must outlive that too: [`Pool::forget`] it before its owner destroys it.
///
/// Dropping the last clone closes the pool; its memory returns to the device with its last slice.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    /// Never used twice in a process. Zero once the pool is closed.
    number: AtomicU64,
    /// By the driver's handle.
    lanes: Mutex<HashMap<usize, Arc<Lane>>>,
    shared: Arc<Shared>,
}

/// What slices need of their pool. The fields are dropped in this order.
struct Shared {
    allocator: Arc<Allocator>,
    card: Arc<CudaDriver>,
    context: Arc<CudaContext>,
}

/// A stream that vramp knows. Its end makes vramp forget the stream, which cudarc may destroy afterwards.
pub(crate) struct Lane {
    pub allocator: Arc<Allocator>,
    pub stream: Arc<CudaStream>,
    pub id: StreamId,
    shared: Arc<Shared>,
}

/// The lane that a thread used last. It holds no stream.
struct Recent {
    pool: u64,
    /// Address of the `CudaStream`, which is not another one's while the lane lives.
    stream: usize,
    lane: Weak<Lane>,
}

thread_local! {
    static RECENT: RefCell<Recent> =
        const { RefCell::new(Recent { pool: 0, stream: 0, lane: Weak::new() }) };
}

impl Pool {
    /// Opens a pool on the device of a context. Costs what `Allocator::new` does.
    ///
    /// # Errors
    /// [`OpenError::NotPrimary`] unless `CudaContext::new` made the context; and the device's or allocator's.
    pub fn new(context: &Arc<CudaContext>, config: Config) -> Result<Pool, OpenError> {
        let ordinal = context.ordinal();
        check_primary(context)?;
        let card = Arc::new(CudaDriver::open(u32::try_from(ordinal).unwrap_or(u32::MAX))?);
        let allocator = Arc::new(Allocator::new(card.clone(), config)?);
        Pool::of(context, card, allocator)
    }

    /// Opens a pool on an allocator of `card` that the program has already, such as one that other parts of it
    /// allocate from.
    ///
    /// # Errors
    /// [`OpenError::NotPrimary`] as of [`Pool::new`]; [`OpenError::OtherCard`] if the allocator is not on `card`,
    /// or `card` is not the context's device.
    pub fn of(
        context: &Arc<CudaContext>,
        card: Arc<CudaDriver>,
        allocator: Arc<Allocator>,
    ) -> Result<Pool, OpenError> {
        check_primary(context)?;
        let is_on_card = ptr::addr_eq(Arc::as_ptr(&card), Arc::as_ptr(allocator.driver()));
        let ordinal = usize::try_from(card.info().ordinal);
        if !is_on_card || ordinal != Ok(context.ordinal()) {
            let allocator = allocator.driver().info().id.clone();
            return Err(OpenError::OtherCard { context: context.ordinal(), allocator });
        }
        let shared = Shared { allocator, card, context: Arc::clone(context) };
        let inner = Inner {
            number: AtomicU64::new(NEXT.fetch_add(1, Ordering::Relaxed)),
            lanes: Mutex::default(),
            shared: Arc::new(shared),
        };
        Ok(Pool { inner: Arc::new(inner) })
    }

    /// Returns the allocator, for limits, statistics, trimming, shortage handlers and graph arenas.
    pub fn allocator(&self) -> &Arc<Allocator> {
        &self.inner.shared.allocator
    }

    /// Returns the context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.inner.shared.context
    }

    /// Returns vramp's id of a stream, to name it in calls of [`Pool::allocator`]. Registers the stream if the
    /// pool does not know it yet. No driver call for the stream itself.
    ///
    /// # Errors
    /// [`SliceError::OtherContext`], [`SliceError::PerThread`], [`SliceError::Closed`].
    pub fn stream_id(&self, stream: &Arc<CudaStream>) -> Result<StreamId, SliceError> {
        Ok(self.lane(stream)?.id)
    }

    /// Returns the number of streams that the pool knows.
    pub fn streams(&self) -> usize {
        self.inner.lock().len()
    }

    /// Forgets the streams that nothing but the pool holds any more, and returns their number. A few driver
    /// calls for each; never waits. O(streams).
    pub fn forget_dropped(&self) -> usize {
        let dropped = take_dropped(&mut self.inner.lock());
        dropped.len()
    }

    /// Forgets a stream: before its owner destroys a stream that `CudaContext::wrap_borrowed_stream` wrapped.
    /// Slices of the stream keep it until they are dropped. The next slice registers it again. Returns false if
    /// the pool did not know it.
    pub fn forget(&self, stream: &Arc<CudaStream>) -> bool {
        let lane = self.inner.lock().remove(&(stream.cu_stream() as usize));
        lane.is_some()
    }

    /// Closes the pool: it makes no slices any more, and forgets its streams. The memory returns to the device
    /// with the last slice, or with the allocator where other parts of the program hold it.
    pub fn close(&self) {
        self.inner.number.store(0, Ordering::Relaxed);
        let lanes = std::mem::take(&mut *self.inner.lock());
        drop(lanes);
    }

    /// Returns the lane of a stream.
    #[inline]
    pub(crate) fn lane(&self, stream: &Arc<CudaStream>) -> Result<Arc<Lane>, SliceError> {
        let key = (self.inner.number.load(Ordering::Relaxed), Arc::as_ptr(stream).addr());
        let recent = RECENT.try_with(|recent| {
            let recent = recent.borrow();
            if (recent.pool, recent.stream) == key { recent.lane.upgrade() } else { None }
        });
        match recent {
            Ok(Some(lane)) => Ok(lane),
            _ => self.look_up(stream),
        }
    }

    /// Returns the lane of a stream from the table, which it may add it to.
    #[inline(never)]
    fn look_up(&self, stream: &Arc<CudaStream>) -> Result<Arc<Lane>, SliceError> {
        let shared = &self.inner.shared;
        if stream.context() != &shared.context {
            let (stream, pool) = (stream.context().ordinal(), shared.context.ordinal());
            return Err(SliceError::OtherContext { stream, pool });
        }
        let raw = stream.cu_stream();
        if raw as usize == PER_THREAD {
            return Err(SliceError::PerThread);
        }
        // Dropped after the lock: the end of a lane makes driver calls.
        let mut dropped = Vec::new();
        let mut lanes = self.inner.lock();
        // Behind the lock: `close` empties the table after it has set the number.
        let number = self.inner.number.load(Ordering::Relaxed);
        if number == 0 {
            return Err(SliceError::Closed);
        }
        let lane = match lanes.get(&(raw as usize)) {
            Some(lane) => Arc::clone(lane),
            None => {
                dropped = take_dropped(&mut lanes);
                // SAFETY: it is a stream of the device's primary context, because it is of the same context as the
                // pool, or null; the lane holds it until vramp has forgotten it.
                let adopted = unsafe { shared.card.adopt_stream(raw.cast()) };
                let id = shared.allocator.adopt_stream(adopted);
                let allocator = Arc::clone(&shared.allocator);
                let (shared, stream) = (Arc::clone(shared), Arc::clone(stream));
                let lane = Arc::new(Lane { allocator, stream, id, shared });
                lanes.insert(raw as usize, Arc::clone(&lane));
                lane
            }
        };
        drop(lanes);
        drop(dropped);
        // Only the lane's own, whose address is its while the lane lives.
        if Arc::ptr_eq(&lane.stream, stream) {
            let recent = Recent {
                pool: number,
                stream: Arc::as_ptr(stream).addr(),
                lane: Arc::downgrade(&lane),
            };
            // An ending thread has no thread-local storage, and looks up each time.
            let _ = RECENT.try_with(|it| it.replace(recent));
        }
        Ok(lane)
    }
}

/// Removes and returns the lanes whose stream no other code holds.
fn take_dropped(lanes: &mut HashMap<usize, Arc<Lane>>) -> Vec<Arc<Lane>> {
    // The null stream never ends, and cudarc makes another wrapper of it with each `default_stream`.
    let dropped =
        |raw: &usize, lane: &mut Arc<Lane>| *raw != 0 && Arc::strong_count(&lane.stream) == 1;
    lanes.extract_if(dropped).map(|(_, lane)| lane).collect()
}

/// Fails unless the context is its device's primary one.
fn check_primary(context: &CudaContext) -> Result<(), OpenError> {
    match context.is_primary() {
        true => Ok(()),
        false => Err(OpenError::NotPrimary { ordinal: context.ordinal() }),
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Arc<Lane>>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let (allocator, card) = (&self.allocator, &self.shared.card);
        let adopted = allocator.stream(self.id);
        // Its result does not say whether the stream has ended.
        let _ = allocator.destroy_stream(self.id);
        let forgotten = allocator.stream(self.id).is_none()
            && adopted.is_none_or(|adopted| card.destroy_stream(adopted).is_ok());
        if !forgotten {
            // It captures, or the device failed: vramp still names the stream, so it must not be destroyed.
            std::mem::forget(Arc::clone(&self.stream));
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("device", &self.context().ordinal())
            .field("streams", &self.streams())
            .field("live", &self.allocator().live())
            .finish_non_exhaustive()
    }
}
