//! Reads the logs that RMM writes, one line per call.
//!
//! 1. The CSV of `logging_resource_adaptor` (`csv.rs`), and the CSV of `rmmWriteLog` before it.
//! 2. The debug log of RMM's pools (`debug.rs`), with the level `trace`.
//!
//! A free completes at once: RMM frees in stream order and records nothing about other streams.
//!
//! Deliberately absent: stacks, which no log has.

mod csv;
mod debug;
mod lines;

use std::io::Read;

use vramp_core::{Bytes, DeviceAddr};

use crate::formats::builder::TraceBuilder;
use crate::formats::input::Input;
use crate::formats::memory::Meter;
use crate::{Event, EventKind, Format, ReadError, ReadLimits, Trace};

/// Returns true if the contents begin with a line of a log.
pub(crate) fn is_log(start: &[u8]) -> bool {
    csv::is_header(first_line(start)) || debug::is_line(first_line(start))
}

fn trim(field: &[u8]) -> &str {
    std::str::from_utf8(field).unwrap_or_default().trim()
}

fn first_line(start: &[u8]) -> &[u8] {
    start.split(|&byte| byte == b'\n').next().unwrap_or_default()
}

pub(crate) fn read<R: Read>(mut input: Input<R>, limits: &ReadLimits) -> Result<Trace, ReadError> {
    input.format = Format::RmmLog;
    let is_debug = debug::is_line(first_line(input.peek(LONGEST_HEADER)?));
    let mut log = Log {
        builder: TraceBuilder::new(limits),
        meter: Meter::new(limits),
        clock: Clock::default(),
    };
    log.builder.trace.device_count = 1;
    if is_debug {
        debug::read(input, &mut log)?
    } else {
        csv::read(input, &mut log)?
    }
    log.builder.sort_by_device(&mut log.meter)?;
    Ok(log.builder.trace)
}

const LONGEST_HEADER: usize = 256;

const HOUR_US: u64 = 3_600_000_000;

/// A log that is being read.
struct Log {
    builder: TraceBuilder,
    meter: Meter,
    clock: Clock,
}

/// One call, from one line.
struct Call {
    kind: EventKind,
    device: u16,
    stream: u64,
    pointer: u64,
    size: Bytes,
    time_us: u64,
}

impl Log {
    fn call(&mut self, call: &Call, offset: u64) -> Result<(), ReadError> {
        let Log { builder, meter, .. } = self;
        let devices = &mut builder.trace.device_count;
        *devices = (*devices).max(u32::from(call.device) + 1);
        let event = Event {
            kind: call.kind,
            device: call.device,
            stream: builder.stream(call.stream, meter, offset)?,
            address: match call.kind {
                EventKind::Oom => Event::UNKNOWN_FREE,
                _ => DeviceAddr::new(call.pointer),
            },
            size: call.size,
            time_us: call.time_us,
            stack: None,
        };
        builder.push(event, meter, offset)?;
        if call.kind == EventKind::FreeRequested {
            let completed = Event { kind: EventKind::FreeCompleted, ..event };
            builder.push(completed, meter, offset)?;
        }
        Ok(())
    }
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
