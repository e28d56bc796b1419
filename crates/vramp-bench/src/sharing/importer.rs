//! What the other process does, by its role.

use std::io::{BufRead, Write};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use vramp::Bytes;
use vramp::device::Call;

use super::Side;

/// What the other process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Opens what tickets name, checks and changes it, and closes it.
    Importer,
    /// Exports blocks.
    Exporter,
}

impl Role {
    /// Returns the name of its argument.
    pub fn name(self) -> &'static str {
        match self {
            Role::Importer => "importer",
            Role::Exporter => "exporter",
        }
    }
}

/// Serves the lines of standard input until `end`.
///
/// # Errors
/// A call failed, or a byte is wrong.
pub fn serve(device: &str, role: Role) -> Result<()> {
    let side = Side::open(device)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready")?;
    out.flush()?;
    let mut exported = Vec::new();
    let mut descriptors = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        if line == "end" {
            break;
        }
        match role {
            Role::Importer => {
                let (ticket, byte) = line.split_once(' ').with_context(|| line.clone())?;
                let byte: u8 = byte.parse()?;
                let begun = Instant::now();
                let memory = side.exchange.open(&side.allocator, &from_hex(ticket)?)?;
                let took = begun.elapsed().as_nanos();
                side.check(memory.range(), byte)?;
                side.fill(memory.range(), byte + 1)?;
                memory.close()?;
                if descriptors.is_none() {
                    // With what stays mapped gone: simulated memory of another process has a descriptor.
                    side.allocator.trim(Bytes::ZERO)?;
                    descriptors = Some(super::descriptors()?);
                }
                writeln!(out, "closed {took}")?;
            }
            Role::Exporter => {
                let byte = exported.len() as u8 + 1;
                let block = side.block(Bytes::mib(5) * (exported.len() as u64 + 1), byte)?;
                let shared = side.exchange.share(side.allocator.export(&block)?)?;
                writeln!(out, "{} {byte}", to_hex(&shared.ticket().to_bytes()))?;
                exported.push((block, shared));
            }
        }
        out.flush()?;
    }
    side.allocator.trim(Bytes::ZERO)?;
    let first = descriptors.unwrap_or(usize::MAX);
    let begun = Instant::now();
    // A connection that the exporter ended is closed on another thread.
    while super::descriptors()? > first && begun.elapsed() < super::PATIENCE {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let open = super::descriptors()?;
    ensure!(open <= first, "{open} descriptors are open, {first} after the first cycle");
    let counts = side.driver.snapshot();
    let means =
        [Call::Reserve, Call::Import, Call::Map, Call::SetAccess, Call::Unmap, Call::Release].map(
            |call| {
                let calls = counts.of(call).calls;
                let mean = counts.of(call).total_ns as f64 / 1000.0 / calls.max(1) as f64;
                format!("{calls} {call} of {mean:.0} us")
            },
        );
    eprintln!("driver calls of the other process: {}", means.join(", "));
    Ok(())
}

pub(super) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn from_hex(text: &str) -> Result<Vec<u8>> {
    ensure!(text.is_ascii() && text.len().is_multiple_of(2), "{text} is not hexadecimal");
    let digits = (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16));
    Ok(digits.collect::<Result<_, _>>()?)
}
