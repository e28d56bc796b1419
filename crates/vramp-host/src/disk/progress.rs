//! Progress of a transfer over short, interrupted and failed system calls.

use vramp_core::Bytes;

use super::{DISK_BLOCK, Direction, OsCode};

/// Consecutive calls without progress after which a transfer fails.
const MAX_IDLE_CALLS: u32 = 100;

/// Progress of one transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    pub moved: Bytes,
    len: Bytes,
    idle_calls: u32,
}

/// What to do after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Submit the rest.
    Continue,
    /// All bytes are transferred.
    Done,
    /// The transfer fails. `None` at the end of the file.
    Failed(Option<OsCode>),
}

impl Progress {
    pub fn new(len: Bytes) -> Progress {
        Progress { moved: Bytes::ZERO, len, idle_calls: 0 }
    }

    pub fn left(&self) -> Bytes {
        self.len - self.moved
    }

    /// Records the result of a call and returns what to do next.
    pub fn record(&mut self, direction: Direction, answer: Result<Bytes, OsCode>) -> Next {
        let before = self.moved;
        let stuck = match answer {
            Ok(moved) => {
                let moved = (self.moved + moved).min(self.len);
                // Direct calls begin at block boundaries, so a partly transferred block is
                // repeated.
                let whole = moved == self.len;
                self.moved = if whole { moved } else { moved.round_down(DISK_BLOCK) };
                if whole {
                    return Next::Done;
                }
                if moved == before && direction == Direction::Read {
                    return Next::Failed(None);
                }
                None
            }
            Err(code) if code.is_transient() => Some(code),
            Err(code) => return Next::Failed(Some(code)),
        };
        self.idle_calls = if self.moved > before { 0 } else { self.idle_calls + 1 };
        match self.idle_calls < MAX_IDLE_CALLS {
            true => Next::Continue,
            false => Next::Failed(stuck),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Direction = Direction::Read;
    const WRITE: Direction = Direction::Write;

    fn moved(kib: u64) -> Result<Bytes, OsCode> {
        Ok(Bytes::kib(kib))
    }

    #[test]
    fn short_and_interrupted_calls_go_on_where_they_stopped() {
        let mut progress = Progress::new(Bytes::kib(64));
        assert_eq!(progress.record(WRITE, moved(20)), Next::Continue);
        assert_eq!(progress.record(WRITE, Err(OsCode(libc::EINTR))), Next::Continue);
        assert_eq!(progress.record(WRITE, Err(OsCode(libc::EAGAIN))), Next::Continue);
        assert_eq!(progress.moved, Bytes::kib(20));
        assert_eq!(progress.record(WRITE, moved(44)), Next::Done);
    }

    #[test]
    fn a_torn_block_moves_again_as_a_whole() {
        let mut progress = Progress::new(Bytes::kib(12));
        assert_eq!(progress.record(READ, Ok(Bytes::new(5000))), Next::Continue);
        assert_eq!(progress.moved, DISK_BLOCK);
        // The last block of an unaligned length is complete.
        let mut progress = Progress::new(Bytes::new(5000));
        assert_eq!(progress.record(READ, Ok(Bytes::new(5000))), Next::Done);
    }

    #[test]
    fn a_file_that_ends_early_and_calls_that_never_succeed_end_the_transfer() {
        let mut progress = Progress::new(Bytes::kib(8));
        assert_eq!(progress.record(READ, moved(0)), Next::Failed(None));
        let forever = |answer: Result<Bytes, OsCode>| {
            let mut progress = Progress::new(Bytes::kib(8));
            (0..1000).map(|_| progress.record(WRITE, answer)).find(|next| *next != Next::Continue)
        };
        assert_eq!(forever(moved(0)), Some(Next::Failed(None)));
        let interrupted = OsCode(libc::EINTR);
        assert_eq!(forever(Err(interrupted)), Some(Next::Failed(Some(interrupted))));
    }

    #[test]
    fn a_failed_call_ends_the_transfer_at_once() {
        let mut progress = Progress::new(Bytes::kib(8));
        let broken = OsCode(libc::EIO);
        assert_eq!(progress.record(READ, Err(broken)), Next::Failed(Some(broken)));
    }
}
