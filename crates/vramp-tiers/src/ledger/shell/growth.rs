//! The growth of a reservation, as a request with options.

use crate::ledger::core::{Priority, Strategy};
use vramp_core::Bytes;

use crate::ledger::shell::error::ReserveError;
use crate::ledger::shell::reservation::Reservation;
use crate::ledger::shell::spill::Spilling;
use crate::ledger::shell::wait::{CancelToken, RequestBuilder};
use crate::wait::Deadline;

impl Reservation {
    /// Waits until the reservation has grown, with its own priority, as
    /// [`request_growth`](Reservation::request_growth) does.
    ///
    /// # Errors
    /// As [`GrowthRequest::wait`]. The reservation does not change.
    pub fn grow_wait(
        &mut self,
        by: Bytes,
        deadline: impl Into<Deadline>,
    ) -> Result<(), ReserveError> {
        self.request_growth(by).deadline(deadline).wait()
    }

    /// Begins a request to grow the reservation. Finish it with `now` or `wait`.
    pub fn request_growth(&mut self, by: Bytes) -> GrowthRequest<'_> {
        GrowthRequest::new(self, by)
    }
}

/// Request to grow a reservation. Finish with [`now`](GrowthRequest::now) or
/// [`wait`](GrowthRequest::wait).
#[must_use = "nothing is requested before `now` or `wait`"]
pub struct GrowthRequest<'a> {
    reservation: &'a mut Reservation,
    by: Bytes,
    priority: Priority,
    deadline: Deadline,
    token: Option<CancelToken>,
    spilling: Spilling,
}

impl<'a> GrowthRequest<'a> {
    fn new(reservation: &'a mut Reservation, by: Bytes) -> GrowthRequest<'a> {
        let priority = reservation.priority();
        let (deadline, token, spilling) = (Deadline::NEVER, None, Spilling::default());
        GrowthRequest { reservation, by, priority, deadline, token, spilling }
    }

    /// Sets the priority; a larger number goes first. By default the reservation's own.
    pub fn priority(mut self, priority: i32) -> GrowthRequest<'a> {
        self.priority = Priority(priority);
        self
    }

    /// Sets the end of a [`wait`](GrowthRequest::wait). No deadline by default.
    pub fn deadline(mut self, deadline: impl Into<Deadline>) -> GrowthRequest<'a> {
        self.deadline = deadline.into();
        self
    }

    /// Sets a token that cancels a [`wait`](GrowthRequest::wait).
    pub fn cancel_token(mut self, token: &CancelToken) -> GrowthRequest<'a> {
        self.token = Some(token.clone());
        self
    }

    /// Sets when spillers are called for the request; before it waits by default.
    pub fn spilling(mut self, spilling: Spilling) -> GrowthRequest<'a> {
        self.spilling = spilling;
        self
    }

    /// Grows the reservation at once or fails. Overtakes waiters only within their bound. With
    /// [`Spilling::AlsoNow`] each spiller is called once, while the request is queued.
    ///
    /// # Errors
    /// As [`Reservation::grow`]. The reservation does not change.
    pub fn now(self) -> Result<(), ReserveError> {
        match self.spilling {
            Spilling::AlsoNow => self.finish(|request| request.now()),
            Spilling::Never | Spilling::BeforeWaiting => {
                self.reservation.grow_now(self.by, self.priority)
            }
        }
    }

    /// Waits until the reservation has grown. Two reservations that wait for each other's memory are a
    /// deadlock, and one of the waits ends with [`ReserveError::Deadlock`].
    ///
    /// # Errors
    /// As [`RequestBuilder::wait`]. The reservation does not change.
    pub fn wait(self) -> Result<(), ReserveError> {
        self.finish(|request| request.wait())
    }

    /// Requests the missing part as a reservation of the same owner, and merges it.
    fn finish(
        self,
        end: impl FnOnce(RequestBuilder<'_>) -> Result<Reservation, ReserveError>,
    ) -> Result<(), ReserveError> {
        let GrowthRequest { reservation, by, priority, deadline, token, spilling } = self;
        reservation.fits_at_all(by)?;
        let strategy = Strategy::Specific(reservation.space());
        let mut request = RequestBuilder::new(reservation.shared(), strategy, by)
            .owner(reservation.owner())
            .tag(reservation.tag())
            .priority(priority.0)
            .deadline(deadline)
            .spilling(spilling);
        if let Some(token) = &token {
            request = request.cancel_token(token);
        }
        let part = end(request)?;
        reservation.merge(part).expect("both are of one space, with different ids");
        Ok(())
    }
}

impl std::fmt::Debug for GrowthRequest<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "growth of {:?} by {}", self.reservation, self.by)
    }
}
