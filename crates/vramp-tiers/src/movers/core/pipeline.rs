//! The pieces of a staged transfer: which one begins, and which one to wait for.

use vramp_core::Bytes;

/// A piece of a staged transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagedPiece {
    /// First byte in the transferred range.
    pub offset: Bytes,
    /// Length in bytes.
    pub len: Bytes,
    /// First byte in the staging buffer.
    pub skip: Bytes,
}

/// Limits of one staged transfer.
#[derive(Clone, Copy, Debug)]
pub(in crate::movers) struct Pipeline {
    /// Bytes to transfer.
    pub len: Bytes,
    /// Length of a piece.
    pub piece: Bytes,
    /// Most pieces between the endpoints.
    pub most: usize,
}

impl Pipeline {
    /// Returns the piece that begins next, with `begun` bytes begun and `active` pieces between the
    /// endpoints. `None` if none may begin.
    pub fn next_piece(self, begun: Bytes, active: usize) -> Option<StagedPiece> {
        let len = self.piece.min(self.len - begun);
        let piece = StagedPiece { offset: begun, len, skip: Bytes::ZERO };
        (active < self.most && !len.is_zero()).then_some(piece)
    }
}

/// State of a piece between the endpoints.
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
    /// Capacity of the endpoint that drains.
    Drain,
    /// Capacity of the endpoint that fills.
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
    fn pieces_begin_in_order_while_few_are_between_the_endpoints() {
        let mib = Bytes::mib;
        let pipeline = Pipeline { len: mib(10), piece: mib(4), most: 2 };
        for (begun, active, expected) in [
            (0, 0, Some((0, 4))),
            (4, 1, Some((4, 4))),
            (8, 1, Some((8, 2))),
            (4, 2, None),
            (10, 0, None),
        ] {
            let piece = pipeline.next_piece(mib(begun), active);
            let expected = expected.map(|(at, len)| {
                let (offset, len) = (mib(at), mib(len));
                StagedPiece { offset, len, skip: Bytes::ZERO }
            });
            assert_eq!(piece, expected, "{begun} MiB begun, {active} pieces active");
        }
        let empty = Pipeline { len: Bytes::ZERO, ..pipeline };
        assert_eq!(empty.next_piece(Bytes::ZERO, 0), None);
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
