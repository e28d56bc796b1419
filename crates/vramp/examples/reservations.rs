//! Memory that is reserved before it is used: a query that takes its share of a card or waits, and a
//! cache that frees memory for it.
//!
//! `cargo run -p vramp --example reservations [DEVICE]`: DEVICE is `sim` by default, a simulated
//! H200; `auto` is the card.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use vramp::tiers::spill::SpillRequest;
use vramp::tiers::tracked::{Policies, Scope};
use vramp::tiers::{
    Priority, ReservationManager, ReserveError, SpaceConfig, SpaceId, Strategy, Tier,
    TrackedAllocator,
};
use vramp::{Allocator, Bytes, Config};

fn main() -> Result<(), vramp::Error> {
    let card = SpaceId::gpu(0);
    let manager = ReservationManager::new([
        (card, SpaceConfig::gpu(Bytes::gib(8))),
        (SpaceId::host(0), SpaceConfig::host(Bytes::gib(64))),
    ])?;
    let space = manager.space(card).expect("the space was configured above");

    // A cache holds 5 GiB of the card and gives back what others need.
    let cached = Mutex::new(Some(space.charge(Bytes::gib(5))?));
    let _cache = space.register_spiller(Priority::default(), move |request: &SpillRequest<'_>| {
        println!("the cache is asked for {}", request.bytes());
        let freed = cached.lock().map(|mut cached| cached.take());
        freed.ok().flatten().map_or(Bytes::ZERO, |charge| charge.bytes())
    });

    // Six GiB for a query on any card, within ten seconds.
    let query = manager
        .request(Strategy::AnyInTier(Tier::Gpu), Bytes::gib(6))
        .deadline(Duration::from_secs(10))
        .wait()?;
    println!("reserved {} in {}", query.bytes(), query.space());

    // What the query allocates on its stream is paid for by its reservation.
    let name = std::env::args().nth(1).unwrap_or_else(|| "sim".to_owned());
    let device = vramp::open(&name)?;
    let allocator = Arc::new(Allocator::new(device, Config::default())?);
    let stream = allocator.create_stream()?;
    let memory = TrackedAllocator::new(allocator, &space, Policies::default());
    memory.attach(Scope::Stream(stream), query)?;
    let table = memory.malloc(Bytes::gib(4), stream)?;

    // Nothing spills for a request that must not wait; the error says who holds the memory.
    match manager.request(Strategy::Specific(card), Bytes::gib(3)).now() {
        Err(ReserveError::NotNow(refusal)) => println!("{refusal}"),
        Err(other) => return Err(other.into()),
        Ok(_) => unreachable!("3 GiB fitted beside 6 of 8"),
    }
    memory.free(table, stream)?;
    drop(memory.detach(Scope::Stream(stream)));
    println!("{} of {} are free", space.available(), space.capacity());
    Ok(())
}
