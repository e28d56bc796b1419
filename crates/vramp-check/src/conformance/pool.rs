//! The device's own stream-ordered pool.

use vramp_core::{Bytes, DeviceAddr};

use super::rig::{Rig, pattern, refused};
use super::{Checked, ensure, rules};
use vramp_driver::{Capabilities, ErrorKind};

const POOL: fn(&Capabilities) -> bool = |can| can.stream_ordered_pool;
const POOL_AND_HOST: fn(&Capabilities) -> bool = |can| can.stream_ordered_pool && can.pinned_host;

rules! {
    pool_memory_holds_bytes: POOL_AND_HOST,
    pool_usage_follows_what_is_handed_out: POOL,
    the_pool_keeps_up_to_its_threshold_and_trims: POOL,
    the_pool_reuses_memory_in_stream_order: POOL_AND_HOST,
    pool_memory_is_freed_once: POOL,
    more_than_the_card_has_is_out_of_memory_in_the_pool: POOL,
}

const BLOCK: Bytes = Bytes::mib(48);

fn pool_memory_holds_bytes(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    let len = Bytes::mib(5);
    let first = rig.malloc_async(stream, len)?;
    let second = rig.malloc_async(stream, len)?;
    let (a, b) = (pattern(1, len), pattern(2, len));
    rig.write(stream, first.start, &a)?;
    rig.write(stream, second.start, &b)?;
    rig.expect_bytes(stream, first, &a)?;
    rig.expect_bytes(stream, second, &b)
}

fn pool_usage_follows_what_is_handed_out(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    let before = rig.device.pool_usage()?;
    let range = rig.malloc_async(stream, BLOCK)?;
    rig.device.synchronize_stream(stream)?;
    let during = rig.device.pool_usage()?;
    ensure!(during.used >= before.used + BLOCK, "used {} of {BLOCK}", during.used);
    ensure!(during.reserved >= during.used, "holds {} of {}", during.reserved, during.used);
    ensure!(during.reserved_peak >= during.reserved, "peak {}", during.reserved_peak);
    rig.free_async(stream, range.start)?;
    rig.device.synchronize_stream(stream)?;
    let after = rig.device.pool_usage()?;
    ensure!(after.used == before.used, "{} used before, {} after", before.used, after.used);
    Ok(())
}

fn the_pool_keeps_up_to_its_threshold_and_trims(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    rig.device.set_pool_threshold(Bytes::new(u64::MAX))?;
    let checked = keeps_and_trims(rig, stream);
    rig.device.set_pool_threshold(Bytes::ZERO)?;
    checked
}

fn keeps_and_trims(rig: &Rig, stream: vramp_driver::Stream) -> Checked {
    let range = rig.malloc_async(stream, BLOCK)?;
    rig.free_async(stream, range.start)?;
    rig.device.synchronize_stream(stream)?;
    let kept = rig.device.pool_usage()?.reserved;
    ensure!(kept >= BLOCK, "{kept} were kept of {BLOCK}");
    rig.device.trim_pool(Bytes::ZERO)?;
    let left = rig.device.pool_usage()?;
    ensure!(left.reserved + BLOCK <= kept, "{} are left of {kept} after a trim", left.reserved);
    Ok(())
}

fn the_pool_reuses_memory_in_stream_order(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    let mut last = None;
    for byte in 0..8 {
        let range = rig.malloc_async(stream, BLOCK)?;
        rig.device.fill(stream, range, byte)?;
        if byte == 7 {
            last = Some(range);
        } else {
            rig.free_async(stream, range.start)?;
        }
    }
    match last {
        Some(range) => rig.expect_filled(stream, range, 7),
        None => Ok(()),
    }
}

fn pool_memory_is_freed_once(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    let range = rig.malloc_async(stream, BLOCK)?;
    rig.free_async(stream, range.start)?;
    let again = rig.free_async(stream, range.start);
    refused("free twice", ErrorKind::InvalidUse, again)?;
    let foreign = rig.free_async(stream, DeviceAddr::new(0x1000));
    refused("free a foreign address", ErrorKind::InvalidUse, foreign)
}

fn more_than_the_card_has_is_out_of_memory_in_the_pool(rig: &Rig) -> Checked {
    let stream = rig.stream()?;
    let too_much = rig.device.memory_info()?.total + Bytes::gib(1);
    let asked = rig.malloc_async(stream, too_much);
    refused("more than the card has", ErrorKind::OutOfMemory, asked)?;
    rig.malloc_async(stream, BLOCK)?;
    Ok(())
}
