//! Lease requests with all their settings: waited for by a thread, or by a task.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use smallvec::SmallVec;

use super::buffer_handle::DeferrableBuffer;
use super::lease_owner::LeaseOwner;
use super::lease_set::LeaseSet;
use super::queued_request::{QueuedRequest, Wanted};
use super::spill_error::SpillError;
use super::state::Shared;
use crate::planner::{Access, HolderKey};
use vramp_alloc::StreamId;
use vramp_tiers::wait::{Step, WaitSlot, Waits, block_on};
use vramp_tiers::{Deadline, Reservation};

/// A job that restores a lease's buffers, see [`LeaseBuilder::restore_on`].
pub type RestoreJob = Box<dyn FnOnce() + Send>;

/// Starts jobs on a thread of the caller's choice.
type Spawn = Box<dyn Fn(RestoreJob) + Send + Sync>;

/// A lease request. Finish with [`wait`](LeaseBuilder::wait), [`now`](LeaseBuilder::now) or `.await`.
///
/// The lease belongs to an owner of its own, unless [`owner`](LeaseBuilder::owner) sets one.
#[must_use = "nothing is requested before `wait`, `now` or `.await`"]
pub struct LeaseBuilder<'a> {
    shared: &'a Arc<Shared>,
    buffers: &'a [(&'a DeferrableBuffer, Access)],
    streams: SmallVec<[StreamId; 2]>,
    deadline: Option<Deadline>,
    in_place: bool,
    owner: Option<LeaseOwner>,
    holding: SmallVec<[HolderKey; 1]>,
    reservation: Option<Arc<Reservation>>,
    spawn: Option<Spawn>,
}

impl<'a> LeaseBuilder<'a> {
    pub(super) fn new(
        shared: &'a Arc<Shared>,
        buffers: &'a [(&'a DeferrableBuffer, Access)],
    ) -> LeaseBuilder<'a> {
        LeaseBuilder {
            shared,
            buffers,
            streams: SmallVec::new(),
            deadline: None,
            in_place: false,
            owner: None,
            holding: SmallVec::new(),
            reservation: None,
            spawn: None,
        }
    }

    /// Adds a stream whose work will use the buffers. Without one the work is complete when the lease
    /// ends.
    pub fn stream(mut self, stream: StreamId) -> LeaseBuilder<'a> {
        self.streams.push(stream);
        self
    }

    /// Sets the end of the wait. By default [`SpillConfig::patience`](super::SpillConfig::patience) from
    /// now for [`wait`](LeaseBuilder::wait), and none for `.await`: dropping the future ends its wait.
    pub fn deadline(mut self, deadline: impl Into<Deadline>) -> LeaseBuilder<'a> {
        self.deadline = Some(deadline.into());
        self
    }

    /// Leaves buffers that are only read where they are if possible, as
    /// [`lease_in_place`](super::SpillManager::lease_in_place) does.
    pub fn in_place(mut self) -> LeaseBuilder<'a> {
        self.in_place = true;
        self
    }

    /// Sets the owner of the lease. Its other leases count as held while this request waits.
    pub fn owner(mut self, owner: LeaseOwner) -> LeaseBuilder<'a> {
        self.owner = Some(owner);
        self
    }

    /// Names a lease that the caller keeps while it waits: the request may overtake older ones that wait
    /// for it, or for another lease of its owner. Without this, or a common owner, such a request waits
    /// until its deadline.
    pub fn holding(mut self, lease: &LeaseSet) -> LeaseBuilder<'a> {
        self.holding.push(lease.owner().key);
        self
    }

    /// Sets the reservation that pays for memory the lease needs. What it lacks is taken from the space.
    /// Without this, a reservation attached to the stream or the thread pays.
    ///
    /// A reservation of another space is refused with [`SpillError::OtherSpace`]. A manager that was given
    /// no space charges none.
    pub fn paid_by(mut self, reservation: &Arc<Reservation>) -> LeaseBuilder<'a> {
        self.reservation = Some(Arc::clone(reservation));
        self
    }

    /// Sets where a future restores its buffers: `spawn` gets a job to run, for example on a thread for
    /// blocking work. By default the thread that polls the future restores them.
    ///
    /// Restoring may block: while evictions make room, and while contents are read from the disk. So may
    /// evictions for a request that waits for its budget; they are a job too. The waits in the queues never
    /// block, and a lease on resident buffers has no job.
    pub fn restore_on(
        mut self,
        spawn: impl Fn(RestoreJob) + Send + Sync + 'static,
    ) -> LeaseBuilder<'a> {
        self.spawn = Some(Box::new(spawn));
        self
    }

    /// Leases, and waits in the queue until the deadline.
    ///
    /// # Errors
    /// As [`SpillManager::lease`](super::SpillManager::lease).
    pub fn wait(self) -> Result<LeaseSet, SpillError> {
        let deadline = self.deadline.unwrap_or_else(|| self.shared.config.patience.into());
        block_on(self.request(deadline)?)
    }

    /// Leases without waiting for other leases. Restoring may wait for the evictions that make room, and
    /// for the disk.
    ///
    /// # Errors
    /// As [`SpillManager::lease`](super::SpillManager::lease).
    pub fn now(self) -> Result<LeaseSet, SpillError> {
        block_on(self.request(Deadline::from(Instant::now()))?)
    }

    fn request(&self, deadline: Deadline) -> Result<QueuedRequest, SpillError> {
        let owner = self.owner.unwrap_or_else(LeaseOwner::new);
        let mut request = QueuedRequest::new(
            self.shared,
            Wanted {
                buffers: self.buffers,
                streams: &self.streams,
                in_place: self.in_place,
                holder: owner.key,
                holding: self.holding.clone(),
                deadline,
            },
        )?;
        if let Some(reservation) = &self.reservation {
            request.pay_by(Arc::clone(reservation))?;
        }
        Ok(request)
    }
}

impl IntoFuture for LeaseBuilder<'_> {
    type Output = Result<LeaseSet, SpillError>;
    type IntoFuture = LeaseFuture;

    fn into_future(self) -> LeaseFuture {
        let stage = match self.request(self.deadline.unwrap_or(Deadline::NEVER)) {
            Ok(mut request) => {
                request.is_task = true;
                Stage::Here(Box::new(request))
            }
            Err(error) => Stage::Failed(error),
        };
        LeaseFuture { stage, spawn: self.spawn }
    }
}

/// A lease request as a future, for any executor. Made by awaiting a [`LeaseBuilder`].
///
/// The first poll requests the lease. In the queue it costs no thread; the thread that ends the wait
/// wakes the task. Dropping it leaves the queue, and ends a lease that it was granted meanwhile.
#[must_use = "a future requests nothing before it is polled"]
pub struct LeaseFuture {
    stage: Stage,
    spawn: Option<Spawn>,
}

enum Stage {
    Here(Box<QueuedRequest>),
    /// A job does its work. The slot gets it back, or nothing if the job did not do it.
    InJob(Arc<JobSlot>),
    Failed(SpillError),
    Done,
}

type JobSlot = WaitSlot<Option<Box<QueuedRequest>>>;

/// A request on its way to the thread that does blocking work for it.
struct Job {
    request: Option<Box<QueuedRequest>>,
    slot: Arc<JobSlot>,
}

impl Job {
    fn run(mut self) {
        if let Some(request) = &mut self.request {
            request.work();
        }
        self.slot.complete(self.request.take());
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.request.take().is_some() {
            self.slot.complete(None);
        }
    }
}

impl Future for LeaseFuture {
    type Output = Result<LeaseSet, SpillError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let waker = context.waker();
        loop {
            match std::mem::replace(&mut self.stage, Stage::Done) {
                Stage::Here(mut request) => match request.step(waker) {
                    Step::Ready(leased) => return Poll::Ready(leased),
                    Step::Work => match self.spawn.as_ref().filter(|_| request.may_block()) {
                        Some(spawn) => self.stage = start(spawn, request),
                        None => {
                            request.work();
                            self.stage = Stage::Here(request);
                        }
                    },
                    Step::Pending(_) => {
                        self.stage = Stage::Here(request);
                        return Poll::Pending;
                    }
                },
                Stage::InJob(slot) => match slot.poll(waker) {
                    Some(Some(request)) => self.stage = Stage::Here(request),
                    Some(None) => return Poll::Ready(Err(SpillError::JobDropped)),
                    None => {
                        self.stage = Stage::InJob(slot);
                        return Poll::Pending;
                    }
                },
                Stage::Failed(error) => return Poll::Ready(Err(error)),
                Stage::Done => panic!("the future of a lease was polled after it was ready"),
            }
        }
    }
}

fn start(spawn: &Spawn, request: Box<QueuedRequest>) -> Stage {
    let slot = Arc::new(JobSlot::default());
    let job = Job { request: Some(request), slot: Arc::clone(&slot) };
    spawn(Box::new(move || job.run()));
    Stage::InJob(slot)
}
