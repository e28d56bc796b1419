//! How long a tier that failed gets no new copies.

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
mod tests {
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
