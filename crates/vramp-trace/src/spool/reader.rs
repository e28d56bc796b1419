//! Reads records, up to the first that is not whole.

use std::borrow::Cow;

use super::fields::Fields;
use super::record::{Change, Event, FRAMES_MAX, Record};
use super::{Api, HEADER_BYTES, MAGIC, RECORD_MAX, SpoolError, kind};
use crate::trace::SIZE_MAX;

/// Reads the header of a file and returns its records. O(1).
///
/// # Errors
/// The file is not one of these, or of another version. A file that is shorter than its header, as
/// that of a process that ended while it began to record, has no records.
pub fn read(bytes: &[u8]) -> Result<Records<'_>, SpoolError> {
    let start = &bytes[..bytes.len().min(MAGIC.len())];
    let is_empty = start.iter().all(|&byte| byte == 0);
    let differs = start.iter().zip(MAGIC).position(|(&found, expected)| found != expected);
    match differs {
        None => {}
        Some(_) if is_empty => {}
        Some(6) => return Err(SpoolError::Version { found: start[6] }),
        Some(_) => return Err(SpoolError::NotASpool),
    }
    let (pid, rest) = match bytes.split_at_checked(HEADER_BYTES) {
        Some((header, rest)) if !is_empty => (Fields(&header[8..]).u64().unwrap_or_default(), rest),
        _ => (0, &[][..]),
    };
    Ok(Records { pid, rest, offset: HEADER_BYTES as u64, end: None })
}

/// The records of a file, in the order in which they were written.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    pid: u64,
    rest: &'a [u8],
    offset: u64,
    end: Option<End>,
}

/// Why a file has no further record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Nothing was written beyond.
    Complete,
    /// The file ends within a record.
    Cut,
    /// The record at this offset is not one: the file is damaged.
    Damaged {
        /// Bytes from the beginning of the file.
        offset: u64,
    },
}

impl<'a> Records<'a> {
    /// Returns the id of the process; zero if the file has no header.
    pub fn pid(&self) -> u64 {
        self.pid
    }

    /// Returns why there is no further record, once the iterator has returned `None`.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    fn take(&mut self) -> Result<Record<'a>, End> {
        if self.rest.is_empty() {
            return Err(End::Complete);
        }
        let head = Fields(self.rest).u32().ok_or(End::Cut)?;
        let [kind, ..] = head.to_le_bytes();
        let length = (head >> 8) as usize;
        let damaged = End::Damaged { offset: self.offset };
        if kind == kind::END {
            // The first four bytes of a record are written last and at once.
            return Err(if head == 0 { End::Complete } else { damaged });
        }
        if !length.is_multiple_of(8) || !(8..=RECORD_MAX).contains(&length) {
            return Err(damaged);
        }
        let (whole, rest) = self.rest.split_at_checked(length).ok_or(End::Cut)?;
        let record = decode(kind, Fields(&whole[4..])).ok_or(damaged)?;
        self.rest = rest;
        self.offset += length as u64;
        Ok(record)
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Record<'a>;

    fn next(&mut self) -> Option<Record<'a>> {
        if self.end.is_some() {
            return None;
        }
        self.take().map_err(|end| self.end = Some(end)).ok()
    }
}

impl std::iter::FusedIterator for Records<'_> {}

fn decode(kind: u8, mut fields: Fields<'_>) -> Option<Record<'_>> {
    let record = match kind {
        kind::PROGRAM => {
            let length = fields.u32()? as usize;
            let (start_us, start_ns) = (fields.u64()?, fields.u64()?);
            Record::Program { start_us, start_ns, command: fields.bytes(length)? }
        }
        kind::DEVICE => {
            Record::Device { device: fields.u32()?, total: fields.u64()?, name: fields.text()? }
        }
        kind::MODULE => Record::Module {
            id: fields.u32()?,
            bias: fields.u64()?,
            start: fields.u64()?,
            end: fields.u64()?,
            path: fields.text()?,
        },
        kind::STACK => {
            let id = fields.u32()?;
            let (pcs, _) = fields.bytes(fields.0.len())?.as_chunks::<8>();
            if pcs.len() > FRAMES_MAX {
                return None;
            }
            Record::Stack {
                id,
                pcs: Cow::Owned(pcs.iter().map(|pc| u64::from_le_bytes(*pc)).collect()),
            }
        }
        kind::EVENT => Record::Event(event(&mut fields)?),
        kind::CALLS => {
            let length = fields.u32()? as usize;
            Record::Calls { count: fields.u64()?, name: fields.bytes(length)? }
        }
        _ => return None,
    };
    // What is left is padding.
    (fields.0.len() < 8).then_some(record)
}

fn event(fields: &mut Fields<'_>) -> Option<Event> {
    let stack = fields.u32()?;
    let change = *Change::ALL.get(usize::from(fields.u8()?))?;
    let api = Api::from_number(fields.u8()?)?;
    let device = fields.u16()?;
    fields.u32()?;
    let event = Event {
        change,
        api,
        device,
        stack: (stack != u32::MAX).then_some(stack),
        ns: fields.u64()?,
        address: fields.u64()?,
        size: fields.u64()?,
        stream: fields.u64()?,
    };
    (event.size <= SIZE_MAX).then_some(event)
}
