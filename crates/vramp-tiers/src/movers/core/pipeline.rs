//! The pieces of a transfer: which one begins, and which one to wait for.

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
}
