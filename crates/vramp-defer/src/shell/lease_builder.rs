//! Lease requests with all their settings: waited for by a thread, or by a task.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use smallvec::SmallVec;

use super::buffer_handle::DeferrableBuffer;
use super::lease_owner::LeaseOwner;
use super::lease_set::LeaseSet;
use super::pay::PaymentPoll;
use super::queued_request::{QueuedRequest, Submitted, Wanted};
use super::spill_error::SpillError;
use super::state::Shared;
use super::wait_slot::WaitSlot;
use crate::planner::{Access, HolderKey};
use vramp_alloc::StreamId;
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
        self.request()?.wait(deadline)
    }

    /// Leases without waiting for other leases. Restoring may wait for the evictions that make room, and
    /// for the disk.
    ///
    /// # Errors
    /// As [`SpillManager::lease`](super::SpillManager::lease).
    pub fn now(self) -> Result<LeaseSet, SpillError> {
        self.request()?.wait(Deadline::from(Instant::now()))
    }

    fn request(&self) -> Result<QueuedRequest, SpillError> {
        let owner = self.owner.unwrap_or_else(LeaseOwner::new);
        let mut request = QueuedRequest::new(
            self.shared,
            Wanted {
                buffers: self.buffers,
                streams: &self.streams,
                in_place: self.in_place,
                holder: owner.key,
                holding: self.holding.clone(),
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
        let request = self.request();
        let deadline = self.deadline.unwrap_or(Deadline::NEVER);
        LeaseFuture { stage: Stage::New(request), deadline, spawn: self.spawn }
    }
}

/// A lease request as a future, for any executor. Made by awaiting a [`LeaseBuilder`].
///
/// The first poll requests the lease. In the queue it costs no thread; the thread that ends the wait
/// wakes the task. Dropping it leaves the queue, and ends a lease that it was granted meanwhile.
#[must_use = "a future requests nothing before it is polled"]
pub struct LeaseFuture {
    stage: Stage,
    deadline: Deadline,
    spawn: Option<Spawn>,
}

enum Stage {
    New(Result<QueuedRequest, SpillError>),
    /// In the queue of the budget's space, or out of it.
    Paying(QueuedRequest),
    /// In the queue of leases.
    Waiting(QueuedRequest),
    /// A job restores it, or spills for it.
    InJob(Arc<WaitSlot<JobEnd>>),
    Done,
}

/// What a job has done.
enum JobEnd {
    Leased(LeaseSet),
    Failed(Box<QueuedRequest>, SpillError),
    /// It has spilled for a request in the budget's queue.
    Spilled(Box<QueuedRequest>),
    /// The job was dropped before it ran.
    Dropped,
}

/// A request on its way to the thread that does blocking work for it.
struct Job {
    request: Option<QueuedRequest>,
    task: JobTask,
    slot: Arc<WaitSlot<JobEnd>>,
}

#[derive(Clone, Copy)]
enum JobTask {
    /// The request is granted.
    Restore,
    /// It is in the budget's queue.
    Spill,
}

impl Job {
    fn run(mut self) {
        let mut request = self.request.take().expect("a job runs once");
        let end = match self.task {
            JobTask::Restore => match request.restore() {
                Ok(lease) => JobEnd::Leased(lease),
                Err(error) => JobEnd::Failed(Box::new(request), error),
            },
            JobTask::Spill => {
                request.spill_for_budget();
                JobEnd::Spilled(Box::new(request))
            }
        };
        self.slot.put(end);
        self.slot.wake();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.request.take().is_some() {
            self.slot.put(JobEnd::Dropped);
            self.slot.wake();
        }
    }
}

impl Future for LeaseFuture {
    type Output = Result<LeaseSet, SpillError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        loop {
            let step = match std::mem::replace(&mut this.stage, Stage::Done) {
                Stage::New(request) => request.and_then(|request| this.begin(request)),
                Stage::Paying(request) => this.pay(request, context.waker()),
                Stage::Waiting(mut request) => {
                    let slot = request.slot().expect("a queued request has a slot");
                    match slot.poll(context.waker()) {
                        None => Ok(Step::Sleep(Stage::Waiting(request))),
                        Some(outcome) => {
                            request.accept(outcome).and_then(|()| this.restore(request))
                        }
                    }
                }
                Stage::InJob(slot) => match slot.poll(context.waker()) {
                    None => Ok(Step::Sleep(Stage::InJob(slot))),
                    Some(JobEnd::Leased(lease)) => Ok(Step::Leased(lease)),
                    Some(JobEnd::Dropped) => Err(SpillError::JobDropped),
                    Some(JobEnd::Failed(request, error)) => this.retry_after(*request, error),
                    Some(JobEnd::Spilled(request)) => Ok(Step::Go(Stage::Paying(*request))),
                },
                Stage::Done => panic!("the future of a lease was polled after it was ready"),
            };
            match step {
                Ok(Step::Go(stage)) => this.stage = stage,
                Ok(Step::Sleep(stage)) => {
                    this.stage = stage;
                    return Poll::Pending;
                }
                Ok(Step::Leased(lease)) => return Poll::Ready(Ok(lease)),
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

/// What follows a stage.
enum Step {
    Go(Stage),
    /// The stage has stored the waker.
    Sleep(Stage),
    Leased(LeaseSet),
}

impl LeaseFuture {
    fn begin(&mut self, mut request: QueuedRequest) -> Result<Step, SpillError> {
        if let Some(promoted) = request.promote() {
            return promoted.map(Step::Leased);
        }
        request.queue_behind_starving(self.deadline)?;
        Ok(Step::Go(Stage::Paying(request)))
    }

    /// Requests the lease once the budget's queue has served the request.
    fn pay(&mut self, mut request: QueuedRequest, waker: &Waker) -> Result<Step, SpillError> {
        match request.poll_budget(waker)? {
            PaymentPoll::Pending => Ok(Step::Sleep(Stage::Paying(request))),
            PaymentPoll::Spill => match &self.spawn {
                Some(spawn) => Ok(start(spawn, request, JobTask::Spill)),
                None => {
                    request.spill_for_budget();
                    Ok(Step::Go(Stage::Paying(request)))
                }
            },
            PaymentPoll::Ready => match request.submit(self.deadline, self.deadline.instant())? {
                Submitted::Granted => self.restore(request),
                Submitted::Queued => Ok(Step::Go(Stage::Waiting(request))),
            },
        }
    }

    /// Restores a granted lease, here or in a job.
    fn restore(&mut self, mut request: QueuedRequest) -> Result<Step, SpillError> {
        if let Some(spawn) = self.spawn.as_ref().filter(|_| request.has_to_restore()) {
            return Ok(start(spawn, request, JobTask::Restore));
        }
        match request.restore() {
            Ok(lease) => Ok(Step::Leased(lease)),
            Err(error) => self.retry_after(request, error),
        }
    }

    fn retry_after(
        &mut self,
        mut request: QueuedRequest,
        error: SpillError,
    ) -> Result<Step, SpillError> {
        let error = request.refuse_if_stuck(error, self.deadline)?;
        if request.waits_for_budget(&error, self.deadline) {
            request.queue_for_budget(self.deadline)?;
            return Ok(Step::Go(Stage::Paying(request)));
        }
        let _queued = request.retry_after(error, self.deadline, self.deadline.instant())?;
        Ok(Step::Go(Stage::Waiting(request)))
    }
}

fn start(spawn: &Spawn, request: QueuedRequest, task: JobTask) -> Step {
    let slot = Arc::new(WaitSlot::default());
    let job = Job { request: Some(request), task, slot: Arc::clone(&slot) };
    spawn(Box::new(move || job.run()));
    Step::Go(Stage::InJob(slot))
}
