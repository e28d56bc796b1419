//! Reads RMM logs, which `logging_resource_adaptor` writes, one line per call.
//!
//! ```text
//! Thread,Time,Action,Pointer,Size,Stream
//! 2260,16:06:30.678500,allocate,0x7f2e40000000,1024,0x0
//! 2260,16:06:30.678623,free,0x7f2e40000000,1024,0x0
//! ```
//!
//! Columns are found by name, so older logs (`PID` for `Thread`, a colon before the microseconds,
//! no `Stream`) are read too. A free completes at once: RMM frees in stream order and records
//! nothing about other streams.
//!
//! Deliberately absent: devices (a log is of one resource, which is on one device) and stacks.

use std::io::{self, Read};

use csv::ByteRecord;
use vramp_core::DeviceAddr;

use crate::formats::builder::{SIZE_RANGE, TraceBuilder};
use crate::formats::input::Input;
use crate::formats::memory::Meter;
use crate::trace::size;
use crate::{Event, EventKind, Format, ReadError, ReadLimits, Trace};

/// Maximum length of the header in bytes.
pub(crate) const LONGEST_HEADER: usize = 256;
/// Maximum length of a line in bytes.
const LONGEST_LINE: usize = 16 << 10;
const HOUR_US: u64 = 3_600_000_000;

/// Returns true if the contents begin with the header of a log.
pub(crate) fn is_log(start: &[u8]) -> bool {
    let line = start.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let names = line.to_ascii_lowercase();
    let has = |name: &str| names.split(|&byte| byte == b',').any(|field| trim(field) == name);
    has("action") && has("pointer") && has("size")
}

fn trim(field: &[u8]) -> &str {
    std::str::from_utf8(field)
        .unwrap_or_default()
        .trim_matches(|c: char| c.is_whitespace() || c == '\u{feff}')
}

/// Index of each column.
struct Columns {
    time: Option<usize>,
    action: usize,
    pointer: usize,
    size: usize,
    stream: Option<usize>,
}

pub(crate) fn read<R: Read>(mut input: Input<R>, limits: &ReadLimits) -> Result<Trace, ReadError> {
    input.format = Format::RmmLog;
    let guard = LineGuard { input, since_newline: 0 };
    // Without quotes a record ends at the end of its line, so the guard bounds both.
    let mut reader = csv::ReaderBuilder::new().flexible(true).quoting(false).from_reader(guard);
    let header = match reader.byte_headers() {
        Ok(header) => header.clone(),
        Err(error) => return Err(csv_error(error, reader.get_ref())),
    };
    let columns = columns(&header)?;

    let mut builder = TraceBuilder::new(limits);
    let mut meter = Meter::new(limits);
    let mut clock = Clock::default();
    let mut record = ByteRecord::new();
    loop {
        match reader.read_byte_record(&mut record) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => return Err(csv_error(error, reader.get_ref())),
        }
        let offset = reader.position().byte();
        line(&record, &columns, &mut clock, &mut builder, &mut meter, offset)?;
    }
    builder.trace.device_count = 1;
    Ok(builder.trace)
}

fn csv_error<R: Read>(error: csv::Error, guard: &LineGuard<R>) -> ReadError {
    match error.into_kind() {
        csv::ErrorKind::Io(source) => guard.input.failed(source),
        _ => guard.input.malformed("a line is not a list of fields"),
    }
}

fn columns(header: &ByteRecord) -> Result<Columns, ReadError> {
    let find = |name: &str| header.iter().position(|field| trim(field).eq_ignore_ascii_case(name));
    let required = |name: &'static str| {
        find(name).ok_or_else(|| ReadError::BadField {
            place: "line 1".to_owned(),
            field: name,
            found: "missing".to_owned(),
            expected: "a column of this name",
        })
    };
    Ok(Columns {
        time: find("time"),
        action: required("action")?,
        pointer: required("pointer")?,
        size: required("size")?,
        stream: find("stream"),
    })
}

fn line(
    record: &ByteRecord,
    columns: &Columns,
    clock: &mut Clock,
    builder: &mut TraceBuilder,
    meter: &mut Meter,
    offset: u64,
) -> Result<(), ReadError> {
    let field = |column: usize| trim(record.get(column).unwrap_or_default());
    let bad = |name: &'static str, text: &str, expected: &'static str| ReadError::BadField {
        place: format!("line {}", record.position().map_or(0, csv::Position::line)),
        field: name,
        found: format!("{:?}", text.chars().take(40).collect::<String>()),
        expected,
    };

    let time_us = match columns.time.map(field) {
        None => 0,
        Some(text) => {
            clock.read(text).ok_or_else(|| bad("time", text, "a time such as 16:06:30.678500"))?
        }
    };
    let text = field(columns.pointer);
    let pointer = number(text, 16)
        .ok_or_else(|| bad("pointer", text, "a hexadecimal address such as 0x7f2e40000000"))?;
    let text = field(columns.size);
    let bytes = number(text, 10).and_then(size).ok_or_else(|| bad("size", text, SIZE_RANGE))?;
    let stream = match columns.stream.map(field) {
        None | Some("") => 0,
        Some(text) => number(text, 10)
            .or_else(|| number(text, 16))
            .ok_or_else(|| bad("stream", text, "a number such as 0x0 or 2"))?,
    };
    let action = field(columns.action);
    let (kind, then) = match action.to_ascii_lowercase().as_str() {
        "allocate" | "alloc" => (EventKind::Alloc, None),
        "free" | "deallocate" => (EventKind::FreeRequested, Some(EventKind::FreeCompleted)),
        "allocate failure" => (EventKind::Oom, None),
        _ => {
            let unknown = builder.unknown_action(action, meter, offset)?;
            (unknown.ok_or_else(|| bad("action", action, "fewer than 65,536 kinds"))?, None)
        }
    };
    let address = match kind {
        EventKind::Oom => Event::UNKNOWN_FREE,
        _ => DeviceAddr::new(pointer),
    };
    let stream = builder.stream(stream, meter, offset)?;
    let event = Event { kind, device: 0, stream, address, size: bytes, time_us, stack: None };
    builder.push(event, meter, offset)?;
    if let Some(kind) = then {
        builder.push(Event { kind, ..event }, meter, offset)?;
    }
    Ok(())
}

/// Parses a number in `radix`, or in hexadecimal after `0x`. C prints a null pointer as `(nil)`.
fn number(text: &str, radix: u32) -> Option<u64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        _ if text.starts_with('+') => None,
        Some(digits) if !digits.starts_with('+') => u64::from_str_radix(digits, 16).ok(),
        Some(_) => None,
        None if text == "(nil)" || text == "nullptr" => Some(0),
        None => u64::from_str_radix(text, radix).ok(),
    }
}

/// Converts times of day into microseconds since the first midnight.
#[derive(Default)]
struct Clock {
    days: u64,
    last_us: u64,
}

impl Clock {
    fn read(&mut self, text: &str) -> Option<u64> {
        let time_us = time_of_day_us(text)?;
        // Threads may log slightly out of order. A step back of half a day or more is the next day.
        if time_us + 12 * HOUR_US < self.last_us {
            self.days += 1;
        }
        self.last_us = time_us;
        Some(self.days * 24 * HOUR_US + time_us)
    }
}

/// Parses `HH:MM:SS`, with a fraction after a point, or after a colon as in older logs.
fn time_of_day_us(text: &str) -> Option<u64> {
    let mut parts = text.split([':', '.']);
    let mut whole = |below: u64| {
        let part = parts.next()?;
        let number = part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse().ok())?;
        number.filter(|number: &u64| *number < below)
    };
    let (hours, minutes, seconds) = (whole(24)?, whole(60)?, whole(61)?);
    let fraction_us = match parts.next() {
        None => 0,
        Some(digits) if digits.is_empty() || digits.len() > 9 => return None,
        Some(digits) => {
            if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            let nanoseconds = format!("{digits:0<9}").parse::<u64>().ok()?;
            nanoseconds / 1000
        }
    };
    let complete = parts.next().is_none();
    complete.then_some(hours * HOUR_US + minutes * 60_000_000 + seconds * 1_000_000 + fraction_us)
}

/// Fails on a line longer than `LONGEST_LINE`, before it fills the memory.
struct LineGuard<R> {
    input: Input<R>,
    since_newline: usize,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_day_are_read_with_either_separator() {
        for (text, time_us) in [
            ("00:00:00.000001", Some(1)),
            ("00:00:01:5", Some(1_500_000)),
            ("16:06:30", Some(57_990_000_000)),
            ("16:06:30.678500123", Some(57_990_678_500)),
            ("24:00:00", None),
            ("16:06", None),
            ("16:06:30.", None),
            ("16:06:30.1.2", None),
            ("-1:00:00", None),
            ("", None),
        ] {
            assert_eq!(time_of_day_us(text), time_us, "{text}");
        }
    }

    #[test]
    fn a_clock_that_runs_past_midnight_keeps_counting() {
        let mut clock = Clock::default();
        assert_eq!(clock.read("23:59:59.999999"), Some(24 * HOUR_US - 1));
        assert_eq!(clock.read("00:00:00.000000"), Some(24 * HOUR_US));
        assert_eq!(clock.read("00:00:00.000001"), Some(24 * HOUR_US + 1));
    }

    #[test]
    fn numbers_are_read_as_c_prints_them() {
        assert_eq!(number("0x7f", 16), Some(127));
        assert_eq!(number("7f", 16), Some(127));
        assert_eq!(number("(nil)", 16), Some(0));
        assert_eq!(number("10", 10), Some(10));
        assert_eq!(number("0x10", 10), Some(16));
        for text in ["", "0x", "+1", "0x+1", "-1", "1 2", "18446744073709551616"] {
            assert_eq!(number(text, 10), None, "{text}");
        }
    }
}
