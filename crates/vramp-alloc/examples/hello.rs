//! Fragments a pool on purpose and shows how it remaps.
//!
//! `cargo run -p vramp-alloc --example hello [DEVICE]`: DEVICE is `sim` by default, a simulated H200;
//! `auto` is the card.

use vramp_alloc::{Allocator, Bytes, Config};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "sim".to_owned());
    let device = vramp_alloc::open(&name)?;
    println!("on {}", device.info().name);

    let allocator = Allocator::new(device, Config::default())?;
    let stream = allocator.create_stream()?;

    // Sixteen blocks, every other one freed: half the memory is free, none of it in one piece.
    let mut blocks = Vec::new();
    for _ in 0..16 {
        blocks.push(Some(allocator.malloc(Bytes::mib(64), stream)?));
    }
    for block in blocks.iter_mut().step_by(2) {
        allocator.free(block.take().expect("every block is there"), stream)?;
    }
    println!("\na comb of 64 MiB blocks:\n{}", allocator.census());

    // As large as all the gaps together: the free chunks are mapped side by side.
    let large = allocator.malloc(Bytes::mib(512), stream)?;
    let stats = allocator.stats()?;
    println!("512 MiB in one piece at {}:\n{}", large.addr(), allocator.census());
    println!("{} chunks moved, peak reserved {}", stats.chunks_moved, stats.reserved_peak);

    allocator.free(large, stream)?;
    for block in blocks.into_iter().flatten() {
        allocator.free(block, stream)?;
    }
    allocator.trim(Bytes::ZERO)?;
    println!("\nall freed and trimmed:\n{}", allocator.census());
    allocator.close()?;
    Ok(())
}
