//! What holds a buffer where it is.

use std::fmt;

use super::{BufferLeaseId, MoveId, UseToken};

/// Everything that must end before all of a buffer may leave the card.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holds {
    /// Leases on the buffer.
    pub leases: Vec<BufferLeaseId>,
    /// Number of pins.
    pub pins: u32,
    /// Work in flight. The buffer can be chosen, and leaves when the work is complete.
    pub uses: Vec<UseToken>,
    /// Moves of its pieces.
    pub moves: Vec<MoveId>,
}

impl Holds {
    /// Returns true if the buffer may leave at once.
    pub fn is_free(&self) -> bool {
        *self == Holds::default()
    }
}

impl fmt::Display for Holds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (self.leases.len(), "leases to end"),
            (self.pins as usize, "pins to remove"),
            (self.uses.len(), "uses to be over"),
            (self.moves.len(), "moves to settle"),
        ];
        let parts = parts.iter().filter(|(count, _)| *count > 0);
        let parts: Vec<String> = parts.map(|(count, what)| format!("{count} {what}")).collect();
        match parts.is_empty() {
            true => f.write_str("nothing holds it"),
            false => f.write_str(&parts.join(", ")),
        }
    }
}
