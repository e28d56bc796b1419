//! The pieces of a transfer: which one begins, and which one to wait for. And which of several transfers to
//! wait for, so that none of them runs out of queued steps.

use vramp_core::Bytes;

/// A piece of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::movers) struct Piece {
    /// First byte in the transferred range.
    pub offset: Bytes,
    /// Length in bytes.
    pub len: Bytes,
    /// First byte in a staging buffer.
    pub skip: Bytes,
}

/// Limits of one transfer.
#[derive(Clone, Copy, Debug)]
pub(in crate::movers) struct Pipeline {
    /// Bytes to transfer.
    pub len: Bytes,
    /// Length of a piece.
    pub piece: Bytes,
    /// Most pieces in flight.
    pub most: usize,
}

impl Pipeline {
    /// Returns the piece that begins next, with `begun` bytes begun and `active` pieces in flight, if only
    /// the first `ready` bytes may. `None` if none may begin.
    pub fn next_piece(self, begun: Bytes, active: usize, ready: Bytes) -> Option<Piece> {
        let len = self.piece.min(self.len.min(ready).saturating_sub(begun));
        let piece = Piece { offset: begun, len, skip: Bytes::ZERO };
        (active < self.most && !len.is_zero()).then_some(piece)
    }
}

/// State of a piece in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::movers) enum Stage {
    Filling,
    Filled,
    Draining,
}

/// What to wait for so that the transfer can advance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::movers) enum NextWait {
    /// The copy of the piece with this index.
    Piece(usize),
    /// Capacity of the last hop.
    Drain,
    /// Capacity of the first hop.
    Fill,
}

/// Chooses what to wait for. `stages` are in order of begin: draining pieces first.
pub(in crate::movers) fn next_wait(stages: impl IntoIterator<Item = Stage>) -> NextWait {
    let mut first = None;
    for (index, stage) in stages.into_iter().enumerate() {
        if stage == Stage::Filling {
            return NextWait::Piece(index);
        }
        first = first.or(Some(stage));
    }
    match first {
        Some(Stage::Draining) => NextWait::Piece(0),
        Some(_) => NextWait::Drain,
        None => NextWait::Fill,
    }
}

/// A transfer that others run beside.
#[derive(Clone, Copy, Debug)]
pub(in crate::movers) struct Running {
    /// Bytes that arrived while the transfers ran beside each other.
    pub arrived: Bytes,
    /// Length of the step that arrives next.
    pub next: Bytes,
}

/// Returns the index of the transfer whose next step is expected first: each goes on at the rate of its
/// bytes so far. One of which none arrived comes before all others. `None` if there is no transfer.
///
/// A transfer over a fast link has several turns for each turn of one over a slow link, so the steps
/// that it has queued do not run out meanwhile. O(transfers).
pub(in crate::movers) fn next_to_wait(running: impl IntoIterator<Item = Running>) -> Option<usize> {
    // All ran for the same time, so the time until the next step is (arrived + next) / arrived of it.
    let sooner = |one: &Running, other: &Running| {
        let product = |a: &Running, b: &Running| {
            u128::from((a.arrived + a.next).count()) * u128::from(b.arrived.count())
        };
        match (one.arrived.is_zero(), other.arrived.is_zero()) {
            (false, false) => product(one, other).cmp(&product(other, one)),
            (one, other) => other.cmp(&one),
        }
    };
    let running = running.into_iter().enumerate();
    running.min_by(|(_, one), (_, other)| sooner(one, other)).map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Stage::{Draining, Filled, Filling};

    #[test]
    fn pieces_begin_in_order_while_few_are_in_flight() {
        let mib = Bytes::mib;
        let pipeline = Pipeline { len: mib(10), piece: mib(4), most: 2 };
        for (begun, active, expected) in [
            (0, 0, Some((0, 4))),
            (4, 1, Some((4, 4))),
            (8, 1, Some((8, 2))),
            (4, 2, None),
            (10, 0, None),
        ] {
            let piece = pipeline.next_piece(mib(begun), active, mib(10));
            let expected = expected.map(|(at, len)| {
                let (offset, len) = (mib(at), mib(len));
                Piece { offset, len, skip: Bytes::ZERO }
            });
            assert_eq!(piece, expected, "{begun} MiB begun, {active} pieces active");
        }
        let little = Piece { offset: mib(4), len: mib(3), skip: Bytes::ZERO };
        assert_eq!(pipeline.next_piece(mib(4), 1, mib(7)), Some(little));
        assert_eq!(pipeline.next_piece(mib(8), 1, mib(7)), None);
        let empty = Pipeline { len: Bytes::ZERO, ..pipeline };
        assert_eq!(empty.next_piece(Bytes::ZERO, 0, mib(10)), None);
    }

    #[test]
    fn the_first_fill_is_waited_for_before_any_drain() {
        for (stages, expected) in [
            (&[][..], NextWait::Fill),
            (&[Filling], NextWait::Piece(0)),
            (&[Draining, Filled, Filling, Filling], NextWait::Piece(2)),
            (&[Draining, Filled], NextWait::Piece(0)),
            (&[Filled, Filled], NextWait::Drain),
        ] {
            assert_eq!(next_wait(stages.iter().copied()), expected, "{stages:?}");
        }
    }

    fn running(arrived: u64, next: u64) -> Running {
        Running { arrived: Bytes::mib(arrived), next: Bytes::mib(next) }
    }

    #[test]
    fn the_next_step_by_the_rates_so_far() {
        for (all, expected) in [
            (&[][..], None),
            (&[running(5, 1)], Some(0)),
            (&[running(5, 1), running(0, 16)], Some(1)),
            (&[running(0, 1), running(0, 1)], Some(0)),
            (&[running(32, 16), running(16, 16)], Some(0)),
            (&[running(16, 16), running(160, 16)], Some(1)),
            (&[running(16, 1), running(160, 16)], Some(0)),
        ] {
            assert_eq!(next_to_wait(all.iter().copied()), expected, "{all:?}");
        }
    }

    /// A link with at most four steps queued, each of which takes `step` time units.
    struct Link {
        step: u64,
        /// Time at which each queued step arrives.
        queued: std::collections::VecDeque<u64>,
        arrived: u64,
    }

    impl Link {
        /// Queues steps up to the window: those that arrived by `now` were taken out of it by the caller.
        fn fill(&mut self, now: u64) {
            self.queued.retain(|&at| {
                self.arrived += u64::from(at <= now);
                at > now
            });
            while self.queued.len() < 4 {
                let last = self.queued.back().copied().unwrap_or(now);
                self.queued.push_back(last + self.step);
            }
        }
    }

    #[test]
    fn no_link_is_idle_while_another_is_waited_for() {
        for step in [1, 2, 3, 10, 40] {
            let mut links =
                [step, 1].map(|step| Link { step, queued: Default::default(), arrived: 0 });
            let mut now = 0;
            while now < 4_000 {
                links.iter_mut().for_each(|link| link.fill(now));
                let all = links.iter().map(|link| running(16 * link.arrived, 16));
                let index = next_to_wait(all).unwrap();
                now = links[index].queued[0];
            }
            for link in &links {
                let most = now / link.step;
                assert!(link.arrived * 100 >= 97 * most, "{} of {most} at 1:{step}", link.arrived);
            }
        }
    }
}
