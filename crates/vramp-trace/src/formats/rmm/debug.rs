//! Reads the debug log of RMM's pools: `RMM_DEBUG_LOG_FILE`, with the level `trace`.
//!
//! ```text
//! [  2260][16:06:30:678500][trace ] [A][stream 0x0][1024B]
//! [  2260][16:06:30:678511][trace ] [A][stream 0x0][1024B][0x7f2e40000000]
//! [  2260][16:06:30:678623][trace ] [D][stream 0x0][1024B][0x7f2e40000000]
//! ```
//!
//! An allocation is the line with a pointer. A pool that cannot grow logs a failure. All other lines
//! are skipped.

use std::io::{BufRead, BufReader, Read};

use super::lines::LineGuard;
use super::{Call, Log, number, trim};
use crate::formats::builder::SIZE_RANGE;
use crate::formats::input::Input;
use crate::trace::size;
use crate::{EventKind, ReadError};

/// Returns true if a line has the thread, the time and the level of this log.
pub(super) fn is_line(line: &[u8]) -> bool {
    let mut fields = fields(trim(line));
    let thread = fields.next().unwrap_or_default().trim();
    let time = fields.next().unwrap_or_default();
    let is_thread = !thread.is_empty() && thread.bytes().all(|byte| byte.is_ascii_digit());
    is_thread && super::time_of_day_us(time).is_some() && fields.next().is_some()
}

/// Returns the texts in brackets at the beginning of a line.
fn fields(line: &str) -> impl Iterator<Item = &str> {
    let mut rest = line;
    std::iter::from_fn(move || {
        let (field, after) = rest.trim_start().strip_prefix('[')?.split_once(']')?;
        rest = after;
        Some(field)
    })
}

pub(super) fn read<R: Read>(input: Input<R>, log: &mut Log) -> Result<(), ReadError> {
    let mut reader = BufReader::new(LineGuard::new(input));
    let (mut line, mut offset) = (Vec::new(), 0);
    for number in 1u64.. {
        line.clear();
        let len = match reader.read_until(b'\n', &mut line) {
            Ok(0) => return Ok(()),
            Ok(len) => len,
            Err(error) => return Err(reader.get_ref().input.failed(error)),
        };
        offset += len as u64;
        if let Some(call) = call(trim(&line), number, log)? {
            log.call(&call, offset)?;
        }
    }
    Ok(())
}

/// Returns the call of a line, or `None` for a line about something else.
fn call(line: &str, line_number: u64, log: &mut Log) -> Result<Option<Call>, ReadError> {
    let mut fields = fields(line);
    let (Some(_thread), Some(time), Some(_level)) = (fields.next(), fields.next(), fields.next())
    else {
        return Ok(None);
    };
    let Some(time_us) = log.clock.read(time) else { return Ok(None) };
    let action = fields.next();
    let (Some(stream), Some(bytes), Some(result)) = (fields.next(), fields.next(), fields.next())
    else {
        return Ok(None);
    };
    let kind = match action {
        Some("A") if result.starts_with("FAILURE") => EventKind::Oom,
        // Other lines of an allocation say which streams were merged.
        Some("A") if result.starts_with("0x") => EventKind::Alloc,
        Some("D") => EventKind::FreeRequested,
        _ => return Ok(None),
    };
    let bad = |field, found: &str, expected| ReadError::BadField {
        place: format!("line {line_number}"),
        field,
        found: format!("{:?}", found.chars().take(40).collect::<String>()),
        expected,
    };
    let last = |text: &str| text.rsplit(' ').next().and_then(|word| number(word, 16));
    let stream =
        last(stream).ok_or_else(|| bad("stream", stream, "a stream such as stream 0x0"))?;
    let count = bytes.trim_start_matches("Upstream ").strip_suffix('B');
    let size = count
        .and_then(|count| number(count, 10))
        .and_then(size)
        .ok_or_else(|| bad("size", bytes, SIZE_RANGE))?;
    let pointer = match kind {
        EventKind::Oom => 0,
        _ => number(result, 16).ok_or_else(|| bad("pointer", result, "an address"))?,
    };
    // RMM ignores the free of a null pointer.
    let is_call = kind == EventKind::Oom || pointer != 0;
    Ok(is_call.then_some(Call { kind, device: 0, stream, pointer, size, time_us }))
}
