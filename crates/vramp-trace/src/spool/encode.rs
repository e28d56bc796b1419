//! Writes records.

use super::record::{Event, FRAMES_MAX, Record, TEXT_MAX};
use super::{HEADER_BYTES, MAGIC, kind};
use crate::trace::SIZE_MAX;

/// Returns the first bytes of the file of a process.
pub fn header(pid: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(&pid.to_le_bytes());
    bytes
}

/// Appends the bytes of a record. They are a multiple of 8, and the first four are not zero.
///
/// O(bytes). Allocates only what `out` needs to grow.
pub fn encode(record: &Record<'_>, out: &mut Vec<u8>) {
    let begin = out.len();
    out.extend([0; 4]);
    let kind = match *record {
        Record::Program { start_us, start_ns, command } => {
            let command = cut(command);
            put32(out, length(command));
            put64(out, start_us);
            put64(out, start_ns);
            out.extend_from_slice(command);
            kind::PROGRAM
        }
        Record::Device { device, total, name } => {
            put32(out, device);
            put64(out, total);
            put_text(out, name);
            kind::DEVICE
        }
        Record::Module { id, bias, start, end, path } => {
            put32(out, id);
            put64(out, bias);
            put64(out, start);
            put64(out, end);
            put_text(out, path);
            kind::MODULE
        }
        Record::Stack { id, ref pcs } => {
            put32(out, id);
            pcs.iter().take(FRAMES_MAX).for_each(|&pc| put64(out, pc));
            kind::STACK
        }
        Record::Event(ref event) => {
            put_event(out, event);
            kind::EVENT
        }
        Record::Calls { count, name } => {
            let name = cut(name);
            put32(out, length(name));
            put64(out, count);
            out.extend_from_slice(name);
            kind::CALLS
        }
    };
    let whole = (out.len() - begin).next_multiple_of(8);
    out.resize(begin + whole, 0);
    let length = u32::try_from(whole).expect("texts and stacks are cut");
    out[begin..begin + 4].copy_from_slice(&(u32::from(kind) | length << 8).to_le_bytes());
}

fn put_event(out: &mut Vec<u8>, event: &Event) {
    put32(out, event.stack.unwrap_or(u32::MAX));
    out.push(event.change as u8);
    out.push(event.api.number());
    out.extend_from_slice(&event.device.to_le_bytes());
    put32(out, 0);
    put64(out, event.ns);
    put64(out, event.address);
    put64(out, event.size.min(SIZE_MAX));
    put64(out, event.stream);
}

fn put_text(out: &mut Vec<u8>, text: &[u8]) {
    let text = cut(text);
    put32(out, length(text));
    put32(out, 0);
    out.extend_from_slice(text);
}

fn cut(text: &[u8]) -> &[u8] {
    &text[..text.len().min(TEXT_MAX)]
}

fn length(text: &[u8]) -> u32 {
    u32::try_from(text.len()).expect("a text is cut")
}

fn put32(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_le_bytes());
}

fn put64(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_le_bytes());
}
