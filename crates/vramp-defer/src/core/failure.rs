//! What to do after a failure: wait and retry, make room first, fall back, or report.
//!
//! The shell maps its errors to a [`Failure`]. The answers are here.

use super::LeaseRefused;

/// Kinds of failures of a lease or a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The planner refused the lease.
    Refused,
    /// No memory on the card.
    CardFull,
    /// No budget for memory on the card.
    BudgetFull,
    /// No free blocks of pinned memory.
    HostFull,
    /// No space on the disk.
    DiskFull,
    /// No memory on another card.
    PeerFull,
    /// The memory is pinned.
    Pinned,
    /// A driver call, a transfer or a callback failed, or the call was wrong.
    Broken,
}

/// What to do after the buffers of a granted lease could not be restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RestoreRetry {
    /// Reclaim pinned memory first.
    pub reclaim_host: bool,
    /// Wait in the queue and retry, until the deadline.
    pub waits: bool,
}

/// What to do after a transfer between card and disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StagingRetry {
    /// Return the result.
    Return,
    /// Retry at once: a concurrent transfer has released its staging blocks.
    Now,
    /// Wait for a concurrent transfer, then retry.
    AfterOthers,
}

impl Failure {
    /// Returns true if something was full that other work may release. The move is then given up
    /// without a failure record.
    pub fn is_capacity(self) -> bool {
        match self {
            Failure::CardFull
            | Failure::BudgetFull
            | Failure::HostFull
            | Failure::DiskFull
            | Failure::PeerFull
            | Failure::Pinned => true,
            Failure::Refused | Failure::Broken => false,
        }
    }

    /// Returns what a lease does whose buffers could not be restored. A full disk is no reason to
    /// wait: restoring takes no disk space.
    pub fn restore_retry(self) -> RestoreRetry {
        let waits = matches!(self, Failure::CardFull | Failure::BudgetFull | Failure::HostFull);
        RestoreRetry { reclaim_host: self == Failure::HostFull, waits }
    }

    /// Returns true if buffers that should be promoted are read in place instead.
    pub fn reads_in_place_instead(self) -> bool {
        matches!(self, Failure::Refused | Failure::CardFull | Failure::BudgetFull)
    }

    /// Returns what a transfer through staging blocks does, given how many others were in flight
    /// when it began and ended. A transfer that has some blocks proceeds with those, so one of them
    /// always completes.
    pub fn staging_retry(self, others_before: usize, others_after: usize) -> StagingRetry {
        match (self, others_before, others_after) {
            (Failure::HostFull, 0, 0) => StagingRetry::Return,
            (Failure::HostFull, _, 0) => StagingRetry::Now,
            (Failure::HostFull, _, _) => StagingRetry::AfterOthers,
            _ => StagingRetry::Return,
        }
    }
}

impl LeaseRefused {
    /// Returns true if the same request may be granted later. False for a buffer that does not
    /// exist and for a set that never fits.
    pub fn is_transient(&self) -> bool {
        match self {
            LeaseRefused::Busy { .. }
            | LeaseRefused::Settling { .. }
            | LeaseRefused::Full { .. }
            | LeaseRefused::NoMemory
            | LeaseRefused::OlderWaiters { .. } => true,
            LeaseRefused::Unknown(_) | LeaseRefused::TooLarge { .. } => false,
        }
    }
}

/// A time that doubles with each failure in a row, up to a bound.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    first_ns: u64,
    most_ns: u64,
    next_ns: u64,
    until_ns: u64,
}

impl Backoff {
    /// Returns one that is closed `first_ns` after the first failure, and never longer than
    /// `most_ns`.
    pub fn new(first_ns: u64, most_ns: u64) -> Backoff {
        let first_ns = first_ns.min(most_ns);
        Backoff { first_ns, most_ns, next_ns: first_ns, until_ns: 0 }
    }

    /// Records a failure, which closes the tier. Returns true if it was open: moves that were in flight
    /// at an earlier failure count with that one.
    pub fn failed(&mut self, now_ns: u64) -> bool {
        let was_open = !self.is_closed(now_ns);
        if was_open {
            self.until_ns = now_ns.saturating_add(self.next_ns);
            self.next_ns = self.next_ns.saturating_mul(2).min(self.most_ns);
        }
        was_open
    }

    /// Records a success, which opens the tier: the next failure closes it for the first time again.
    pub fn succeeded(&mut self) {
        self.next_ns = self.first_ns;
        self.open();
    }

    /// Opens the tier for an attempt. If that fails too, the next time is twice the last.
    pub fn open(&mut self) {
        self.until_ns = 0;
    }

    /// Returns true while the tier gets no new copies.
    pub fn is_closed(&self, now_ns: u64) -> bool {
        now_ns < self.until_ns
    }
}

#[cfg(test)]
mod backoff_tests {
    use super::*;

    #[test]
    fn it_doubles_up_to_a_bound_and_starts_again_after_a_success() {
        let mut backoff = Backoff::new(10, 35);
        // Time of a failure, whether it closed the tier, and the end of that.
        for (now, closes, until) in [
            (100, true, 110),
            (105, false, 110),
            (110, true, 130),
            (200, true, 235),
            (300, true, 335),
        ] {
            assert_eq!(backoff.failed(now), closes, "at {now}");
            assert!(backoff.is_closed(until - 1) && !backoff.is_closed(until), "at {now}");
        }
        backoff.succeeded();
        assert!(!backoff.is_closed(301));
        assert!(backoff.failed(400) && backoff.is_closed(409) && !backoff.is_closed(410));
        backoff.open();
        assert!(!backoff.is_closed(401));
        assert!(backoff.failed(402) && backoff.is_closed(421) && !backoff.is_closed(422));
        let mut never = Backoff::new(10, 0);
        assert!(never.failed(7) && !never.is_closed(7));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BufferId, Ticket, UnknownBuffer};
    use super::*;
    use vramp_core::Bytes;

    #[test]
    fn each_failure_has_its_answers() {
        use Failure::*;
        // is_capacity, reclaim_host, waits, reads_in_place_instead
        for (failure, answers) in [
            (Refused, [false, false, false, true]),
            (CardFull, [true, false, true, true]),
            (BudgetFull, [true, false, true, true]),
            (HostFull, [true, true, true, false]),
            (DiskFull, [true, false, false, false]),
            (PeerFull, [true, false, false, false]),
            (Pinned, [true, false, false, false]),
            (Broken, [false, false, false, false]),
        ] {
            let RestoreRetry { reclaim_host, waits } = failure.restore_retry();
            let found =
                [failure.is_capacity(), reclaim_host, waits, failure.reads_in_place_instead()];
            assert_eq!(found, answers, "{failure:?}");
        }
    }

    #[test]
    fn a_transfer_waits_for_staging_only_where_others_have_it() {
        use Failure::*;
        for (failure, before, after, retry) in [
            (HostFull, 0, 0, StagingRetry::Return),
            (HostFull, 1, 0, StagingRetry::Now),
            (HostFull, 0, 1, StagingRetry::AfterOthers),
            (HostFull, 2, 2, StagingRetry::AfterOthers),
            (DiskFull, 1, 1, StagingRetry::Return),
            (Broken, 1, 1, StagingRetry::Return),
        ] {
            let found = failure.staging_retry(before, after);
            assert_eq!(found, retry, "{failure:?} {before} {after}");
        }
    }

    #[test]
    fn a_refusal_is_transient_where_waiting_may_help() {
        let (needed, capacity) = (Bytes::new(2), Bytes::new(1));
        let committed = capacity;
        let unknown = UnknownBuffer { buffer: BufferId::from_number(0) };
        for (refused, transient) in [
            (LeaseRefused::Unknown(unknown), false),
            (LeaseRefused::TooLarge { needed, capacity }, false),
            (LeaseRefused::Busy { held_by: Vec::new() }, true),
            (LeaseRefused::Settling { moves: Vec::new() }, true),
            (LeaseRefused::Full { needed, committed, capacity, held_by: Vec::new() }, true),
            (LeaseRefused::NoMemory, true),
            (LeaseRefused::OlderWaiters { behind: Ticket(1) }, true),
        ] {
            assert_eq!(refused.is_transient(), transient, "{refused}");
        }
    }
}
