//! Captures a graph, replays it, and lends its memory while it is idle.
//!
//! `cargo run -p vramp-alloc --example graphs [DEVICE]`: DEVICE is `sim` by default, a
//! simulated H200; `auto` is the card.

use vramp_alloc::device::{AddrRange, DeviceCopy};
use vramp_alloc::graph::ArenaConfig;
use vramp_alloc::{Allocator, Bytes, Config};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "sim".to_owned());
    let device = vramp_alloc::open(&name)?;
    println!("on {}", device.info().name);
    // The limit of the program: the arena alone needs half of it.
    let config = Config { limit: Some(Bytes::gib(1)), ..Config::default() };
    let allocator = Allocator::new(device.clone(), config)?;
    let stream = allocator.create_stream()?;
    let queue = allocator.stream(stream).expect("it was made above");

    // Three layers of work. Each needs memory of its own, and only for a while.
    let result = allocator.malloc(Bytes::mib(256), stream)?;
    let arena = allocator.graph_arena(ArenaConfig::default())?;
    let layers = || -> Result<(), Box<dyn std::error::Error>> {
        for byte in [1, 2, 3] {
            let block = allocator.malloc(Bytes::mib(512), stream)?;
            device.fill(queue, AddrRange::new(block.addr(), block.len()), byte)?;
            let (from, to, len) = (block.addr(), result.addr(), result.len());
            device.copy(queue, DeviceCopy { from, to, len })?;
            // Queued, not run: the memory serves the next layer because that one comes behind.
            allocator.free(block, stream)?;
        }
        Ok(())
    };
    let (graph, captured) = allocator.capture(stream, &arena, layers)?;
    captured?;
    println!("\ncaptured: {}", graph.report());

    // Nothing ran so far. Each launch runs all of it, at the addresses of the capture.
    for _ in 0..3 {
        let lease = graph.launch(stream)?;
        // Queue the work that reads the result here: until the lease is dropped, no other stream
        // launches a graph of this arena.
        drop(lease);
    }
    device.synchronize_stream(queue)?;

    // The arena is idle, and the limit leaves 256 MiB: its memory serves an ordinary block.
    let large = allocator.malloc(Bytes::mib(700), stream)?;
    println!("\n{} allocated meanwhile, {} left in the arena", large.len(), arena.report().backed);
    allocator.free(large, stream)?;

    // The next launch backs the arena again, at the same addresses.
    drop(graph.launch(stream)?);
    let stats = allocator.stats()?;
    println!("launched again, with {} in the arena", arena.report().backed);
    println!("{} chunks moved, peak reserved {}", stats.chunks_moved, stats.reserved_peak);

    drop((graph, arena));
    allocator.free(result, stream)?;
    allocator.close()?;
    Ok(())
}
