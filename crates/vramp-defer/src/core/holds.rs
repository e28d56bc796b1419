//! What keeps a buffer where it is.

use std::fmt;

use super::piece::PieceMove;
use super::{BufferId, BufferLeaseId, Deferrables, MoveId, UnknownBuffer, UseToken};

/// Everything that has to end before all of a buffer may leave the card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holds {
    /// Leases.
    pub leases: Vec<BufferLeaseId>,
    /// How often it is pinned.
    pub pins: u32,
    /// How many holders of its pointer nobody knows.
    pub opaque: u32,
    /// Its pointer is out until the epoch ends.
    pub epoch: bool,
    /// Work that is not over: it can be chosen, and leaves when this ends. Where its pointer is
    /// out to streams, it is not chosen before.
    pub uses: Vec<UseToken>,
    /// Moves of its pieces.
    pub moves: Vec<MoveId>,
}

impl Holds {
    /// True if it may leave at once.
    pub fn is_free(&self) -> bool {
        *self == Holds::default()
    }
}

impl fmt::Display for Holds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (self.leases.len(), "leases to end"),
            (self.pins as usize, "pins to take off"),
            (self.opaque as usize, "exposures to release"),
            (usize::from(self.epoch), "epoch to end"),
            (self.uses.len(), "uses to be over"),
            (self.moves.len(), "moves to settle"),
        ];
        let parts = parts.iter().filter(|(count, _)| *count > 0);
        let parts: Vec<String> = parts.map(|(count, what)| format!("{count} {what}")).collect();
        match parts.is_empty() {
            true => f.write_str("nothing, it may leave at once"),
            false => f.write_str(&parts.join(", ")),
        }
    }
}

impl Deferrables {
    /// When a buffer may move again. O(pieces).
    pub fn holds(&self, buffer: BufferId) -> Result<Holds, UnknownBuffer> {
        let buffer = self.get(buffer)?;
        Ok(Holds {
            leases: buffer.holders.iter().map(|&(lease, _)| lease).collect(),
            pins: buffer.pins,
            opaque: buffer.exposed.opaque,
            epoch: buffer.exposed.quiesced,
            uses: buffer.uses.all(),
            moves: buffer
                .pieces
                .iter()
                .filter_map(|piece| piece.motion.map(PieceMove::id))
                .collect(),
        })
    }
}
