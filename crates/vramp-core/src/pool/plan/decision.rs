//! What a planner decides about a request.

use crate::Bytes;
use crate::ids::ArenaId;
use crate::pool::index::RegionKey;
use crate::pool::ops::Range;
use crate::pool::request::Step;

/// What the pool does next for a request.
#[derive(Debug)]
pub(in crate::pool) enum Decision {
    /// Carve the request, `len` bytes rounded, from the front of a free region of its stream.
    Carve { region: RegionKey, len: Bytes },
    /// Take over idle memory of another stream and carve the request from where it is then.
    TakeOver { idle: RegionKey, len: Bytes },
    /// The stream's own memory and idle memory do not serve the request: freed regions that wait no more
    /// may.
    Miss,
    /// Join a free region of the stream with the idle memory beside it, and carve the request there.
    Join { region: RegionKey, len: Bytes },
    /// End the lending of an arena's own chunks within a range.
    EndLending { arena: ArenaId, part: Range },
    /// Cut an arena's gap in two at `offset`.
    CutGap { gap: RegionKey, offset: Bytes },
    /// Nothing changes: this is the shell's next step.
    Return(Step),
}

/// What one rung of the ladder has for a request.
#[derive(Debug)]
pub(in crate::pool) enum Climb {
    /// Nothing: go on to the next rung.
    Up,
    /// Act on the decision, and go on from the next rung.
    ThenUp(Decision),
    /// Act on the decision, and go on from the rung that the attempt is at.
    Stay(Decision),
}
