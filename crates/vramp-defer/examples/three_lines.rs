//! The first byte of a deferrable buffer: tiers from TOML, a buffer, a write.
//!
//! `cargo run -p vramp-defer --example three_lines`

use vramp_defer::Tiers;
use vramp_tiers::Bytes;

const TIERS: &str = r#"
device = "sim:h200" # without it the first card of the machine

[[gpu]]
index = 0
capacity = "1GiB"

[[host]]
index = 0
capacity = "4GiB"
"#;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let tiers = Tiers::from_toml(TIERS)?;
    let buffer = tiers.buffer(Bytes::mib(64))?;
    buffer.write(Bytes::ZERO, b"first bytes")?;

    let mut back = [0; 11];
    buffer.read(Bytes::ZERO, &mut back)?;
    println!("{} on {tiers:?}", String::from_utf8_lossy(&back));
    Ok(())
}
