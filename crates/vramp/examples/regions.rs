//! Memory that leaves the card by tag and comes back at the same addresses: an engine that sleeps while
//! another program uses the card.
//!
//! `cargo run -p vramp --example regions`

use vramp::Bytes;
use vramp::defer::Tiers;
use vramp::tiers::regions::{Backup, PauseOptions, RegionOptions, Regions};

const TIERS: &str = r#"
device = "sim:h200" # without it the first card of the machine

[[gpu]]
index = 0
capacity = "8GiB"

[[host]]
index = 0
capacity = "4GiB"
"#;

fn main() -> Result<(), vramp::Error> {
    // The card, and 4 GiB of pinned host memory for copies.
    let tiers = Tiers::from_toml(TIERS)?;
    let regions = Regions::new(tiers.mover().clone());
    let frozen = RegionOptions { read_only: true, ..RegionOptions::default() };
    let weights = regions.region(tiers.allocator(), "weights", frozen)?;
    let lost = RegionOptions { backup: Backup::None, ..RegionOptions::default() };
    let cache = regions.region(tiers.allocator(), "kv", lost)?;

    let stream = tiers.allocator().create_stream()?;
    let model = weights.allocator().malloc(Bytes::gib(2), stream)?;
    let blocks = cache.allocator().malloc(Bytes::gib(3), stream)?;

    // Weights are copied in the first pause only, the cache never.
    for _ in 0..2 {
        regions.pause(&["weights", "kv"], PauseOptions::default())?;
        for status in regions.status() {
            let (asleep, copied) = (status.asleep, status.copied);
            println!("{}: {asleep} off the card, {copied} copied for it", status.tag);
        }
        regions.resume(&["weights", "kv"])?;
        println!(
            "awake: {} at {}, {} at {}",
            model.len(),
            model.addr(),
            blocks.len(),
            blocks.addr()
        );
    }
    weights.allocator().free(model, stream)?;
    cache.allocator().free(blocks, stream)?;
    Ok(())
}
