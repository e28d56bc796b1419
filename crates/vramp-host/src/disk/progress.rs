//! How far a transfer has come, whatever the kernel answers.

use vramp_core::Bytes;

use super::{DISK_BLOCK, Direction, OsCode};

/// Calls in a row that may move nothing before a transfer is given up.
const IDLE_CALLS_MOST: u32 = 100;

/// One transfer under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    pub moved: Bytes,
    len: Bytes,
    idle_calls: u32,
}

/// What to do after one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Ask for what is left.
    Again,
    /// Nothing is left.
    Done,
    /// No further call will help. `None`: the file ends here.
    Failed(Option<OsCode>),
}

impl Progress {
    pub fn new(len: Bytes) -> Progress {
        Progress { moved: Bytes::ZERO, len, idle_calls: 0 }
    }

    pub fn left(&self) -> Bytes {
        self.len - self.moved
    }

    /// Notes what one call for some of what is left answered.
    pub fn note(&mut self, direction: Direction, answer: Result<Bytes, OsCode>) -> Next {
        let before = self.moved;
        let stuck = match answer {
            Ok(moved) => {
                let moved = (self.moved + moved).min(self.len);
                // Direct calls begin at whole blocks: what is left of a torn one moves again.
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
            Err(code) if code.is_passing() => Some(code),
            Err(code) => return Next::Failed(Some(code)),
        };
        self.idle_calls = if self.moved > before { 0 } else { self.idle_calls + 1 };
        match self.idle_calls < IDLE_CALLS_MOST {
            true => Next::Again,
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
        assert_eq!(progress.note(WRITE, moved(20)), Next::Again);
        assert_eq!(progress.note(WRITE, Err(OsCode(libc::EINTR))), Next::Again);
        assert_eq!(progress.note(WRITE, Err(OsCode(libc::EAGAIN))), Next::Again);
        assert_eq!(progress.moved, Bytes::kib(20));
        assert_eq!(progress.note(WRITE, moved(44)), Next::Done);
    }

    #[test]
    fn a_torn_block_moves_again_as_a_whole() {
        let mut progress = Progress::new(Bytes::kib(12));
        assert_eq!(progress.note(READ, Ok(Bytes::new(5000))), Next::Again);
        assert_eq!(progress.moved, DISK_BLOCK);
        // The end of a length that is no whole number of blocks is no tear.
        let mut progress = Progress::new(Bytes::new(5000));
        assert_eq!(progress.note(READ, Ok(Bytes::new(5000))), Next::Done);
    }

    #[test]
    fn a_file_that_ends_early_and_calls_that_never_succeed_end_the_transfer() {
        let mut progress = Progress::new(Bytes::kib(8));
        assert_eq!(progress.note(READ, moved(0)), Next::Failed(None));
        let forever = |answer: Result<Bytes, OsCode>| {
            let mut progress = Progress::new(Bytes::kib(8));
            (0..1000).map(|_| progress.note(WRITE, answer)).find(|next| *next != Next::Again)
        };
        assert_eq!(forever(moved(0)), Some(Next::Failed(None)));
        let interrupted = OsCode(libc::EINTR);
        assert_eq!(forever(Err(interrupted)), Some(Next::Failed(Some(interrupted))));
    }

    #[test]
    fn a_failed_call_ends_the_transfer_at_once() {
        let mut progress = Progress::new(Bytes::kib(8));
        let broken = OsCode(libc::EIO);
        assert_eq!(progress.note(READ, Err(broken)), Next::Failed(Some(broken)));
    }
}
