//! Two cards: granting access, and copies between them.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use vramp::device::{DeviceCopy, Driver, Stream};
use vramp::sharing::{AccessChange, range_of};
use vramp::{Allocator, Bytes, Config};

/// Result of [`peers`]. Rates are in GB/s.
#[derive(Clone, Debug)]
pub struct PeerReport {
    /// Mapped bytes that were granted, and driver calls.
    pub granted: AccessChange,
    /// Time of the grant.
    pub grant: Duration,
    /// Time of the revoke.
    pub revoke: Duration,
    /// Plain memory of both cards (`cuMemAlloc`), by `cuMemcpyPeerAsync`.
    pub plain: f64,
    /// Memory of the allocators by `cuMemcpyPeerAsync`, before the grant.
    pub before: f64,
    /// The same after each card was granted access to the other.
    pub peer: f64,
}

/// Measures with `mapped` bytes on the first card and copies of `copied` bytes.
///
/// # Errors
/// There are no two cards with a link, or a call failed.
pub fn peers(device: &str, mapped: Bytes, copied: Bytes) -> Result<PeerReport> {
    let opened = vramp::device::open_all(device)?;
    ensure!(opened.len() > 1, "{device} has one device: two are needed");
    let [one, two] = [0, 1].map(|n| Arc::clone(&opened[n]));
    ensure!(one.info().peers.contains(&two.info().ordinal), "the two devices have no link");
    let open = |driver: &Arc<dyn Driver>| -> Result<(Allocator, vramp::StreamId)> {
        let allocator = Allocator::new(Arc::clone(driver), Config::default())?;
        let stream = allocator.create_stream()?;
        Ok((allocator, stream))
    };
    let ((owner, stream), (other, theirs)) = (open(&one)?, open(&two)?);
    let queue = owner.stream(stream).context("the stream is open")?;

    let [from, to] = [one.alloc_memory(copied)?, two.alloc_memory(copied)?];
    let copy = DeviceCopy { from, to, len: copied };
    let plain = rate(&*one, queue, copied, || Ok(one.copy_peer(queue, copy, &*two)?))?;
    one.free_memory(from)?;
    two.free_memory(to)?;

    let mut blocks = Vec::new();
    while blocks.len() as u64 * copied.count() < mapped.count() {
        blocks.push(owner.malloc(copied, stream)?);
    }
    let target = other.malloc(copied, theirs)?;
    let first = blocks.first().context("at least one block is mapped")?;
    let copy = DeviceCopy { from: range_of(first).start, to: target.addr(), len: copied };
    let by_peer = || rate(&*one, queue, copied, || Ok(one.copy_peer(queue, copy, &*two)?));
    let before = by_peer()?;
    let begun = one.now_ns();
    let granted = owner.grant_access(two.info().ordinal)?;
    let grant = Duration::from_nanos(one.now_ns() - begun);
    other.grant_access(one.info().ordinal)?;
    let peer = by_peer()?;
    let begun = one.now_ns();
    owner.revoke_access(two.info().ordinal)?;
    let revoke = Duration::from_nanos(one.now_ns() - begun);
    for block in blocks {
        owner.free(block, stream)?;
    }
    other.free(target, theirs)?;
    owner.audit()?;
    Ok(PeerReport { granted, grant, revoke, plain, before, peer })
}

/// Returns the rate of a copy: the best of five rounds of eight.
fn rate(
    driver: &dyn Driver,
    queue: Stream,
    len: Bytes,
    copy: impl Fn() -> Result<()>,
) -> Result<f64> {
    let mut best: f64 = 0.0;
    for _ in 0..5 {
        driver.synchronize_stream(queue)?;
        let begun = driver.now_ns();
        (0..8).try_for_each(|_| copy())?;
        driver.synchronize_stream(queue)?;
        let ns = (driver.now_ns() - begun).max(1);
        best = best.max((len.count() * 8) as f64 / ns as f64);
    }
    Ok(best)
}
