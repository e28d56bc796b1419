//! What the page of shared memory of a version says.
//!
//! Epoch and state are one number, so that a reader sees both of one moment.

/// Numbers of a page.
pub const NUMBERS: usize = 4;
/// The number that has epoch and state.
pub const WORD: usize = 0;
/// 1 once the version is not the current one of its name.
pub const SUPERSEDED: usize = 1;
/// Clients that wait for the write lock.
pub const WRITERS: usize = 2;
/// Process of the last client that wrote.
pub const WRITER_PID: usize = 3;
/// Bytes of the page's file.
pub const LEN: u64 = 4096;

/// Whether the bytes of a version are those of its epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// They are those of the epoch's commit.
    Whole,
    /// A client with the write lock may be changing them.
    Writing,
    /// A client may have changed some of them, and ended without a commit.
    Torn,
}

/// Epoch and state of a page. Epoch 0 is a version that is not committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word {
    /// Number of the last commit.
    pub epoch: u64,
    /// Whether the bytes are those of the commit.
    pub state: PageState,
}

impl Word {
    /// Returns the word as the number of the page.
    pub fn encode(self) -> u64 {
        let state = match self.state {
            PageState::Whole => 0,
            PageState::Writing => 1,
            PageState::Torn => 2,
        };
        self.epoch << 2 | state
    }

    /// Returns the word of a number. An unknown state is torn.
    pub fn decode(number: u64) -> Word {
        let state = match number & 3 {
            0 => PageState::Whole,
            1 => PageState::Writing,
            _ => PageState::Torn,
        };
        Word { epoch: number >> 2, state }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_read_as_it_was_written() {
        for epoch in [0, 1, u64::MAX >> 2] {
            for state in [PageState::Whole, PageState::Writing, PageState::Torn] {
                let word = Word { epoch, state };
                assert_eq!(Word::decode(word.encode()), word);
            }
        }
        assert_eq!(Word::decode(7), Word { epoch: 1, state: PageState::Torn });
    }
}
