//! Reads the CSV of `logging_resource_adaptor`, and the CSV of `rmmWriteLog` before it.
//!
//! ```text
//! Thread,Time,Action,Pointer,Size,Stream
//! 2260,16:06:30.678500,allocate,0x7f2e40000000,1024,0x0
//! 2260,16:06:30.678623,free,0x7f2e40000000,1024,0x0
//! ```
//!
//! Columns are found by name, so older logs (`PID` for `Thread`, a colon before the microseconds,
//! no `Stream`) are read too. The names of `rmmWriteLog` (until 2020) are others, it has the device,
//! and its times are seconds.

use std::io::Read;

use csv::ByteRecord;

use super::lines::LineGuard;
use super::{Call, Log, number, trim};
use crate::formats::builder::SIZE_RANGE;
use crate::formats::input::Input;
use crate::trace::size;
use crate::{EventKind, ReadError};

/// The names of each column, the newest first.
const TIME: [&str; 2] = ["time", "start"];
const ACTION: [&str; 2] = ["action", "event type"];
const POINTER: [&str; 2] = ["pointer", "address"];
const SIZE: [&str; 2] = ["size", "size (bytes)"];
const STREAM: [&str; 2] = ["stream", "stream"];
const DEVICE: [&str; 2] = ["device id", "device"];

/// Returns true if a line is the header of such a log.
pub(super) fn is_header(line: &[u8]) -> bool {
    let lower = line.to_ascii_lowercase();
    let has = |names: [&str; 2]| {
        lower.split(|&byte| byte == b',').any(|field| names.contains(&trim(field)))
    };
    has(ACTION) && has(POINTER) && has(SIZE)
}

/// Index of each column.
struct Columns {
    time: Option<usize>,
    action: usize,
    pointer: usize,
    size: usize,
    stream: Option<usize>,
    device: Option<usize>,
}

pub(super) fn read<R: Read>(input: Input<R>, log: &mut Log) -> Result<(), ReadError> {
    // Without quotes a record ends at the end of its line, so the guard bounds both.
    let mut reader =
        csv::ReaderBuilder::new().flexible(true).quoting(false).from_reader(LineGuard::new(input));
    let header = match reader.byte_headers() {
        Ok(header) => header.clone(),
        Err(error) => return Err(csv_error(error, reader.get_ref())),
    };
    let columns = columns(&header)?;
    let mut record = ByteRecord::new();
    loop {
        match reader.read_byte_record(&mut record) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) => return Err(csv_error(error, reader.get_ref())),
        }
        line(&record, &columns, log, reader.position().byte())?;
    }
}

fn csv_error<R: Read>(error: csv::Error, guard: &LineGuard<R>) -> ReadError {
    match error.into_kind() {
        csv::ErrorKind::Io(source) => guard.input.failed(source),
        _ => guard.input.malformed("a line is not a list of fields"),
    }
}

fn columns(header: &ByteRecord) -> Result<Columns, ReadError> {
    let find = |names: [&str; 2]| {
        let named =
            |name: &str| header.iter().position(|field| trim(field).eq_ignore_ascii_case(name));
        named(names[0]).or_else(|| named(names[1]))
    };
    let required = |names: [&'static str; 2]| {
        find(names).ok_or_else(|| ReadError::BadField {
            place: "line 1".to_owned(),
            field: names[0],
            found: "missing".to_owned(),
            expected: "a column of this name",
        })
    };
    Ok(Columns {
        time: find(TIME),
        action: required(ACTION)?,
        pointer: required(POINTER)?,
        size: required(SIZE)?,
        stream: find(STREAM),
        device: find(DEVICE),
    })
}

fn line(
    record: &ByteRecord,
    columns: &Columns,
    log: &mut Log,
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
            let time_us = log.clock.read(text).or_else(|| seconds_us(text));
            time_us.ok_or_else(|| bad("time", text, "a time such as 16:06:30.678500"))?
        }
    };
    let text = field(columns.pointer);
    let pointer = number(text, 16)
        .ok_or_else(|| bad("pointer", text, "a hexadecimal address such as 0x7f2e40000000"))?;
    let text = field(columns.size);
    let size = number(text, 10).and_then(size).ok_or_else(|| bad("size", text, SIZE_RANGE))?;
    let stream = match columns.stream.map(field) {
        None | Some("") => 0,
        Some(text) => number(text, 10)
            .or_else(|| number(text, 16))
            .ok_or_else(|| bad("stream", text, "a number such as 0x0 or 2"))?,
    };
    let device = match columns.device.map(field) {
        None | Some("") => 0,
        Some(text) => text
            .parse()
            .ok()
            .filter(|&device: &u16| device < u16::MAX)
            .ok_or_else(|| bad("device id", text, "a number below 65,535"))?,
    };
    let action = field(columns.action);
    let kind = match action.to_ascii_lowercase().as_str() {
        "allocate" | "alloc" => EventKind::Alloc,
        "free" | "deallocate" => EventKind::FreeRequested,
        "allocate failure" => EventKind::Oom,
        _ => {
            let unknown = log.builder.unknown_action(action, &mut log.meter, offset)?;
            unknown.ok_or_else(|| bad("action", action, "fewer than 65,536 kinds"))?
        }
    };
    log.call(&Call { kind, device, stream, pointer, size, time_us }, offset)
}

/// Parses seconds since the log began, as C++ prints them: `0.5`, `1e-05`.
fn seconds_us(text: &str) -> Option<u64> {
    let seconds: f64 = text.parse().ok()?;
    // A hundred years.
    let is_time = (0.0..3.2e9).contains(&seconds);
    is_time.then(|| (seconds * 1e6).round() as u64)
}
