//! Keeps three times a limit of one card in free memory of another one, and checks every byte it looks at.
//!
//! `cargo run --release -p vramp-defer --example other_card [MACHINE]`: by default MACHINE is `sim:h200x2`.
//! `cuda` is this machine's cards 0 and 1. A read by the host needs a block of host memory: a full host has none.

use std::process::ExitCode;

use vramp_defer::{Access, Tiers};
use vramp_driver::Driver;
use vramp_tiers::config::TiersConfig;
use vramp_tiers::{Bytes, SpaceId};

/// Of each buffer these bytes are compared.
const LOOKED_AT: u64 = 4096;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let machine = std::env::args().nth(1).unwrap_or_else(|| "sim:h200x2".to_owned());
    let len = Bytes::mib(if machine.starts_with("sim") { 16 } else { 512 });
    let (card, peer) = (len * 4, len * 8);
    let text = format!(
        "device = '{machine}'\n[[gpu]]\nindex = 0\ncapacity = '{}B'\nlimit = 1.0\n\
         [[host]]\nindex = 0\ncapacity = '4GiB'\n[[peer]]\nindex = 1\nlimit = '{}B'\n",
        card.count(),
        peer.count()
    );
    let tiers = Tiers::open(&TiersConfig::from_toml(&text)?)?;
    let device = tiers.device();
    println!("{} spills to card 1, of which it may take {peer}", device.info().id);
    let buffers = (0..12).map(|_| tiers.buffer(len)).collect::<Result<Vec<_>, _>>()?;
    let begun = device.now_ns();
    for (byte, buffer) in (1..).zip(&buffers) {
        let lease = buffer.lease(Access::Overwrite, tiers.stream())?;
        device.fill(tiers.queue(), lease.address(0), byte)?;
    }
    device.synchronize_stream(tiers.queue())?;
    let filled = device.now_ns() - begun;
    let begun = device.now_ns();
    for buffer in &buffers {
        drop(buffer.lease(Access::Shared, tiers.stream())?);
        device.synchronize_stream(tiers.queue())?;
    }
    let restored = device.now_ns() - begun;
    let stats = tiers.manager().stats();
    for (byte, buffer) in (1..).zip(&buffers) {
        let mut bytes = vec![0; LOOKED_AT as usize];
        for at in [0, len.count() - LOOKED_AT] {
            buffer.read(Bytes::new(at), &mut bytes)?;
            if bytes.iter().any(|&seen| seen != byte) {
                return Err(format!("wrong bytes in the buffer of {byte} at {at}").into());
            }
        }
    }
    let rate = |bytes: u64, ns: u64| bytes as f64 / ns.max(1) as f64;
    println!(
        "to card 1: {}, {:.1} GB/s; back: {}, {:.1} GB/s; to the host: {}",
        Bytes::new(stats.to_peer_bytes),
        rate(stats.to_peer_bytes, stats.to_peer_ns),
        Bytes::new(stats.from_peer_bytes),
        rate(stats.from_peer_bytes, restored),
        Bytes::new(stats.to_host_bytes)
    );
    println!("filled in {} ms, leased again in {} ms", filled / 1_000_000, restored / 1_000_000);
    tiers.manager().audit()?;
    if stats.to_peer_bytes == 0 {
        return Err("nothing went to the other card".into());
    }
    assert!(tiers.reservations().space(SpaceId::gpu(1)).is_none(), "it has no allocator");
    Ok(())
}
