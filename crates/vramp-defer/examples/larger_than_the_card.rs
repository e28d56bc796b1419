//! Sorts three times as much as the card may hold, under leases, and checks the result.
//!
//! `cargo run -p vramp-defer --example larger_than_the_card [DEVICE]`: by default DEVICE is `sim`,
//! a small simulated card; `auto` is the card.
//!
//! The numbers lie in nine buffers, of which three fit at once. Neighbours are merged in turn: the
//! lower half stays left, the upper half goes right. After as many rounds as there are buffers all is
//! sorted. What a kernel would do is done here by the host, on a copy of what lies at the leased
//! addresses: there are no kernels in this project.

use std::process::ExitCode;
use std::sync::Arc;

use vramp_alloc::{Allocator, Config, Driver, StreamId};
use vramp_defer::{Access, DeferrableBuffer, LeaseSet, SpillConfig, SpillManager, SpillParts};
use vramp_driver::sim::{Contents, Simulator};
use vramp_driver::{HostBuffer, HostSlice, Stream};
use vramp_tiers::host::HostPoolConfig;
use vramp_tiers::movers::MoverConfig;
use vramp_tiers::{Bytes, HostPool, Mover, ReservationManager, SpaceConfig, SpaceId};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const BUFFERS: usize = 9;
const FIT: u64 = 3;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let name = std::env::args().nth(1).unwrap_or_else(|| "sim".to_owned());
    let (sorter, each) = Sorter::new(&name)?;
    println!("{} in {BUFFERS} buffers, of which {FIT} fit on {name}", each * BUFFERS as u64);

    let buffers = (0..BUFFERS).map(|_| sorter.manager.buffer(each));
    let buffers = buffers.collect::<std::result::Result<Vec<_>, _>>()?;
    let mut random = fastrand::Rng::with_seed(1);
    let mut before = Sum::default();
    for buffer in &buffers {
        sorter.work(&[buffer], Access::Exclusive, |numbers| {
            numbers.iter_mut().for_each(|number| *number = random.u32(..));
            numbers.sort_unstable();
            before.add(numbers);
        })?;
    }
    for round in 0..BUFFERS {
        for pair in buffers[round % 2..].chunks_exact(2) {
            sorter.work(&[&pair[0], &pair[1]], Access::Exclusive, <[u32]>::sort)?;
        }
    }

    let (mut after, mut last) = (Sum::default(), 0);
    for buffer in &buffers {
        let mut in_order = true;
        sorter.work(&[buffer], Access::Shared, |numbers| {
            in_order = last <= numbers[0] && numbers.is_sorted();
            last = numbers[numbers.len() - 1];
            after.add(numbers);
        })?;
        if !in_order {
            return Err(format!("{buffer:?} is not in order").into());
        }
    }
    if before != after {
        return Err("some numbers are others than before".into());
    }
    let stats = sorter.manager.stats();
    let moved = |bytes| Bytes::new(bytes);
    println!("{} numbers are in order", after.count);
    println!(
        "{} left the card, {} were restored",
        moved(stats.to_host_bytes),
        moved(stats.from_host_bytes)
    );
    sorter.manager.audit()?;
    sorter.driver.free_host(sorter.window)?;
    Ok(())
}

struct Sorter {
    driver: Arc<dyn Driver>,
    manager: SpillManager,
    stream: StreamId,
    queue: Stream,
    /// Pinned memory for the contents of two buffers.
    window: HostBuffer,
}

impl Sorter {
    /// On a device that holds so many buffers, whose length is the second value.
    fn new(name: &str) -> Result<(Sorter, Bytes)> {
        let mut driver = vramp_alloc::open(name)?;
        let mut each = Bytes::mib(64);
        if driver.info().simulated {
            // One that keeps what is written.
            let card = Simulator::builder().memory(Bytes::mib(256)).contents(Contents::Stored);
            (driver, each) = (Arc::new(card.build()), Bytes::mib(2));
        }
        let limit = Config { limit: Some(each * FIT), ..Config::default() };
        let allocator = Arc::new(Allocator::new(Arc::clone(&driver), limit)?);

        // The host has room for all of it, in pinned blocks.
        let host = SpaceId::host(0);
        let room = each * BUFFERS as u64 * 2;
        let spaces = ReservationManager::new([(host, SpaceConfig::host(room))])?;
        let space = spaces.space(host).ok_or("it was configured")?;
        let config = HostPoolConfig { blocks_per_pool: 8, ..HostPoolConfig::default() };
        let pool = HostPool::new(&space, config, [Arc::clone(&driver)])?;
        let mover = Mover::new(Arc::clone(&driver), &pool, MoverConfig::default())?;
        let parts = SpillParts {
            allocator: Arc::clone(&allocator),
            mover,
            disk: None,
            budget: None,
            peers: vec![],
        };
        let manager = SpillManager::new(
            parts,
            SpillConfig {
                piece: each.clamp(Bytes::mib(4), Bytes::mib(32)),
                ..SpillConfig::default()
            },
        )?;

        let stream = allocator.create_stream()?;
        let queue = allocator.stream(stream).ok_or("the stream was made a moment ago")?;
        let window = driver.alloc_host(each * 2)?;
        Ok((Sorter { driver, manager, stream, queue, window }, each))
    }

    /// Runs `kernel` on the contents of the buffers, one after the other, under a lease on all of
    /// them.
    fn work(
        &self,
        buffers: &[&DeferrableBuffer],
        access: Access,
        kernel: impl FnOnce(&mut [u32]),
    ) -> Result<()> {
        let named: Vec<_> = buffers.iter().map(|&buffer| (buffer, access)).collect();
        let lease = self.manager.lease(&named, self.stream)?;
        for (from, slice) in self.windows(&lease) {
            self.driver.copy_to_host(self.queue, from, slice)?;
        }
        self.driver.synchronize_stream(self.queue)?;
        let len: Bytes = lease.addresses().map(|range| range.len).sum();
        let mut bytes = vec![0; usize::try_from(len.count())?];
        self.driver.read_host(self.window, Bytes::ZERO, &mut bytes)?;
        let words = bytes.chunks_exact(4).map(|word| word.try_into().map(u32::from_le_bytes));
        let mut numbers = words.collect::<std::result::Result<Vec<u32>, _>>()?;
        kernel(&mut numbers);
        if access == Access::Exclusive {
            let bytes: Vec<u8> = numbers.into_iter().flat_map(u32::to_le_bytes).collect();
            self.driver.write_host(self.window, Bytes::ZERO, &bytes)?;
            for (to, slice) in self.windows(&lease) {
                self.driver.copy_to_device(self.queue, slice, to)?;
            }
            // The window is reused now. Without this wait the lease alone would be right for the
            // buffers.
            self.driver.synchronize_stream(self.queue)?;
        }
        Ok(())
    }

    /// Where each leased buffer starts, and its part of the window.
    fn windows(&self, lease: &LeaseSet) -> Vec<(vramp_alloc::DeviceAddr, HostSlice)> {
        let mut offset = Bytes::ZERO;
        let window = |range: vramp_core::AddrRange| {
            let slice = HostSlice { buffer: self.window, offset, len: range.len };
            offset += range.len;
            (range.start, slice)
        };
        lease.addresses().map(window).collect()
    }
}

/// A sum that is the same for the same numbers in any order.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sum {
    count: usize,
    sum: u64,
    squares: u64,
}

impl Sum {
    fn add(&mut self, numbers: &[u32]) {
        self.count += numbers.len();
        for &number in numbers {
            let number = u64::from(number);
            self.sum = self.sum.wrapping_add(number);
            self.squares = self.squares.wrapping_add(number * number);
        }
    }
}
