//! Two streams, a use on another stream, a limit, running out of memory, and a snapshot.
//!
//! `cargo run -p vramp --example allocator [DEVICE]`: DEVICE is `sim` by default, a simulated
//! H200; `auto` is the card.

use vramp::device::{DriverError, MemoryInfo, Stream};
use vramp::history::{HistorySize, Trace};
use vramp::{AllocError, Allocation, Allocator, Bytes, Config, StreamId};

/// A stream that other code created, CUDA's own API for example, made known to the allocator.
fn adopt(allocator: &Allocator) -> Result<StreamId, DriverError> {
    let stream: Stream = allocator.driver().create_stream()?;
    Ok(allocator.adopt_stream(stream))
}

fn main() -> Result<(), vramp::Error> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "sim".to_owned());
    let device = vramp::open(&name)?;
    let MemoryInfo { total, .. } = device.memory_info()?;
    println!("{} with {total}", device.info().name);

    let config = Config { limit: Some(Bytes::gib(1)), ..Config::default() };
    let allocator = Allocator::new(device, config)?;
    let recording = allocator.record_history(HistorySize::default(), None);

    // The copy stream reads what the compute stream wrote. Freeing does not wait: the memory serves
    // other requests once both streams are past it.
    let (compute, copies) = (allocator.create_stream()?, adopt(&allocator)?);
    let block: Allocation = allocator.malloc(Bytes::mib(64), compute)?;
    allocator.record_use(&block, copies)?;
    allocator.free(block, compute)?;

    let weights = allocator.malloc_tagged(Bytes::mib(700), compute, allocator.tag("weights"))?;
    match allocator.malloc(Bytes::mib(400), compute) {
        Err(AllocError::OutOfMemory(report)) => println!("\n{report}"),
        Err(other) => return Err(other.into()),
        Ok(_) => unreachable!("1,100 MiB fitted into 1 GiB"),
    }

    // For pytorch.org/memory_viz, or for `vramp replay` on other allocators.
    let snapshot: Trace = allocator.snapshot(Some(&recording));
    let path = std::env::temp_dir().join(format!("vramp-example-{}.pickle", std::process::id()));
    snapshot.write_snapshot(std::fs::File::create(&path)?)?;
    println!("\n{} events, {} bytes", snapshot.events.len(), std::fs::metadata(&path)?.len());
    std::fs::remove_file(&path)?;

    allocator.free(weights, compute)?;
    allocator.close()?;
    Ok(())
}
