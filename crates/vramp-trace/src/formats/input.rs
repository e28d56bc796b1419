//! A buffered reader that counts and limits the bytes read.

use std::io::{self, Read};

use vramp_core::Bytes;

use crate::{Format, ReadError};

const BUFFER: usize = 128 << 10;

/// Uncompressed contents, read once from front to back. Tracks the offset, for errors.
pub(crate) struct Input<R> {
    source: R,
    buffer: Box<[u8]>,
    next: usize,
    end: usize,
    /// Bytes before the buffer.
    passed: u64,
    allowed: u64,
    pub format: Format,
}

impl<R: Read> Input<R> {
    pub fn new(source: R, allowed: Bytes) -> Input<R> {
        Input {
            source,
            buffer: vec![0; BUFFER].into_boxed_slice(),
            next: 0,
            end: 0,
            passed: 0,
            allowed: allowed.count(),
            format: Format::Pickle,
        }
    }

    /// Returns the number of bytes consumed.
    pub fn offset(&self) -> u64 {
        self.passed + self.next as u64
    }

    /// Returns the source. Bytes left in the buffer are lost.
    pub fn into_source(self) -> R {
        self.source
    }

    pub fn malformed(&self, what: &'static str) -> ReadError {
        ReadError::Malformed { format: self.format, offset: self.offset(), what }
    }

    /// Returns the next `wanted` bytes without consuming them, or fewer at the end of the contents.
    pub fn peek(&mut self, wanted: usize) -> Result<&[u8], ReadError> {
        while self.end - self.next < wanted && self.refill()? {}
        Ok(&self.buffer[self.next..self.end.min(self.next + wanted)])
    }

    pub fn byte(&mut self) -> Result<u8, ReadError> {
        if self.next == self.end && !self.refill()? {
            return Err(self.truncated());
        }
        let byte = self.buffer[self.next];
        self.next += 1;
        Ok(byte)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], ReadError> {
        let mut array = [0; N];
        if let Some(ready) = self.buffer[self.next..self.end].first_chunk::<N>() {
            array = *ready;
            self.next += N;
        } else {
            for byte in &mut array {
                *byte = self.byte()?;
            }
        }
        Ok(array)
    }

    /// Consumes `len` bytes and passes them to `sink` part by part. No buffer of `len` bytes is
    /// allocated, because `len` comes from the file and may be wrong.
    pub fn consume(&mut self, len: u64, mut sink: impl FnMut(&[u8])) -> Result<(), ReadError> {
        let mut left = len;
        while left > 0 {
            if self.next == self.end && !self.refill()? {
                return Err(self.truncated());
            }
            let ready = self.end - self.next;
            let take = usize::try_from(left).map_or(ready, |left| left.min(ready));
            sink(&self.buffer[self.next..self.next + take]);
            self.next += take;
            left -= take as u64;
        }
        Ok(())
    }

    /// Reads more into the buffer. Returns false at the end of the contents.
    fn refill(&mut self) -> Result<bool, ReadError> {
        self.buffer.copy_within(self.next..self.end, 0);
        self.passed += self.next as u64;
        self.end -= self.next;
        self.next = 0;
        loop {
            match self.source.read(&mut self.buffer[self.end..]) {
                Ok(0) => return Ok(false),
                Ok(read) => {
                    self.end += read;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        if self.passed + self.end as u64 > self.allowed {
            return Err(self.too_long());
        }
        Ok(true)
    }

    /// Converts an error of the source. Truncated compressed data is a truncated file. A
    /// `ReadError` that was wrapped in an `io::Error` is unwrapped.
    pub fn failed(&self, source: io::Error) -> ReadError {
        let offset = self.passed + self.end as u64;
        match source.downcast::<ReadError>() {
            Ok(inner) => inner,
            Err(source) if source.kind() == io::ErrorKind::UnexpectedEof => {
                ReadError::Truncated { format: self.format, offset }
            }
            Err(cause) => ReadError::Io { offset, cause },
        }
    }

    pub fn truncated(&self) -> ReadError {
        ReadError::Truncated { format: self.format, offset: self.offset() }
    }

    fn too_long(&self) -> ReadError {
        ReadError::Limit {
            limit: "contents",
            what: "bytes of contents",
            allowed: self.allowed,
            offset: self.passed + self.end as u64,
        }
    }
}

/// Lets a library continue to read at the current offset. A `ReadError` is wrapped in the
/// `io::Error`, and [`Input::failed`] unwraps it.
impl<R: Read> Read for Input<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.next == self.end && !self.refill().map_err(io::Error::other)? {
            return Ok(0);
        }
        let take = out.len().min(self.end - self.next);
        out[..take].copy_from_slice(&self.buffer[self.next..self.next + take]);
        self.next += take;
        Ok(take)
    }
}
