//! A bound on the length of a line.

use std::io::{self, Read};

use crate::formats::input::Input;

/// Maximum length of a line in bytes.
const LONGEST_LINE: usize = 16 << 10;

/// Fails on a line longer than `LONGEST_LINE`, before it fills the memory.
pub(super) struct LineGuard<R> {
    pub input: Input<R>,
    since_newline: usize,
}

impl<R> LineGuard<R> {
    pub fn new(input: Input<R>) -> LineGuard<R> {
        LineGuard { input, since_newline: 0 }
    }
}

impl<R: Read> Read for LineGuard<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        // Reads no more than a line at once, so that every overlong line is detected.
        let room = out.len().min(LONGEST_LINE);
        let read = self.input.read(&mut out[..room])?;
        self.since_newline = match out[..read].iter().rposition(|&byte| byte == b'\n') {
            Some(newline) => read - newline - 1,
            None => self.since_newline + read,
        };
        if self.since_newline > LONGEST_LINE {
            let what = "a line of more than 16 KiB";
            return Err(io::Error::other(self.input.malformed(what)));
        }
        Ok(read)
    }
}
