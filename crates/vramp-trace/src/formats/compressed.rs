//! Decompresses gzip, zstd and xz.

use std::io::{self, BufRead, BufReader, Read};

use liblzma::stream::{CONCATENATED, Stream};

use super::foreign::Foreign;
use crate::ReadError;

/// How a file is compressed, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    Gzip,
    Zstd,
    Xz,
}

/// Bytes that tell how a file is compressed.
pub(crate) const LONGEST_MAGIC: usize = 6;
const BUFFER: usize = 64 << 10;
/// Memory of the xz decompressor: a window of 64 MiB, the longest that `xz` writes by its presets,
/// and its tables. The same as zstd's.
const XZ_MEMORY: u64 = 128 << 20;

impl Compression {
    pub fn of(start: &[u8]) -> Option<Compression> {
        match start {
            [0x1f, 0x8b, ..] => Some(Compression::Gzip),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Compression::Zstd),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(Compression::Xz),
            _ => None,
        }
    }

    pub fn decoder<'a>(self, source: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
        let buffered = BufReader::with_capacity(BUFFER, source);
        Ok(match self {
            Compression::Gzip => Box::new(Members::new(buffered)),
            Compression::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(buffered)?),
            Compression::Xz => {
                let stream = Stream::new_stream_decoder(XZ_MEMORY, CONCATENATED)?;
                Box::new(liblzma::bufread::XzDecoder::new_stream(buffered, stream))
            }
        })
    }
}

/// The members of a gzip file, one after the other. Zeros may follow the last, which tapes and
/// some archives add to fill a block.
struct Members<R: BufRead> {
    /// `None` only while a member is replaced by the next.
    member: Option<flate2::bufread::GzDecoder<R>>,
    /// The present member is not the first.
    is_later: bool,
    is_over: bool,
}

impl<R: BufRead> Members<R> {
    fn new(source: R) -> Members<R> {
        let member = Some(flate2::bufread::GzDecoder::new(source));
        Members { member, is_later: false, is_over: false }
    }
}

impl<R: BufRead> Read for Members<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while !self.is_over && !out.is_empty() {
            let Some(member) = &mut self.member else { break };
            let read = member.read(out).map_err(|error| {
                // What follows the last member begins as none.
                match self.is_later && member.header().is_none() {
                    true => io::Error::other(ReadError::from(Foreign::BYTES_BEHIND)),
                    false => error,
                }
            })?;
            if read > 0 {
                return Ok(read);
            }
            let Some(mut source) = self.member.take().map(|member| member.into_inner()) else {
                break;
            };
            self.is_over = !skip_zeros(&mut source)?;
            self.is_later = true;
            self.member = Some(flate2::bufread::GzDecoder::new(source));
        }
        Ok(0)
    }
}

/// Skips zeros, and returns false at the end.
fn skip_zeros(source: &mut impl BufRead) -> io::Result<bool> {
    loop {
        let ready = match source.fill_buf() {
            Ok([]) => return Ok(false),
            Ok(ready) => ready,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let zeros = ready.iter().take_while(|&&byte| byte == 0).count();
        let is_zero = zeros == ready.len();
        source.consume(zeros);
        if !is_zero {
            return Ok(true);
        }
    }
}
