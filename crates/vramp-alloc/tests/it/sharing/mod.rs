//! Memory that other cards and processes reach, and registered memory: on simulated cards of one
//! machine that store bytes, under the race detector.

mod exports;
mod kept;
mod orders;
mod peers;
mod registered;
mod retained;

use std::sync::Arc;
use std::time::{Duration, Instant};

use vramp_alloc::device::{Driver, ExportedHandle};
use vramp_alloc::sharing::ExportError;
use vramp_alloc::{Allocator, Bytes, Config, StreamId};
use vramp_core::AddrRange;
use vramp_driver::sim::{Contents, Simulator};
use vramp_driver::{Call, DeviceCopy, ErrorKind};

pub const MIB: fn(u64) -> Bytes = Bytes::mib;

/// Simulated cards of one machine with an allocator each.
pub struct Machine {
    pub cards: Vec<Arc<Simulator>>,
    pub allocators: Vec<Allocator>,
    pub streams: Vec<StreamId>,
}

impl Machine {
    pub fn new(cards: usize) -> Machine {
        Machine::with(cards, Config::default())
    }

    pub fn with(cards: usize, config: Config) -> Machine {
        let builder = Simulator::builder().memory(Bytes::gib(1)).contents(Contents::Stored);
        let cards: Vec<_> =
            builder.checked().build_machine(cards).into_iter().map(Arc::new).collect();
        let allocator = |card: &Arc<Simulator>| {
            Allocator::new(Arc::clone(card) as Arc<dyn Driver>, config.clone()).unwrap()
        };
        let allocators: Vec<_> = cards.iter().map(allocator).collect();
        let streams = allocators.iter().map(|of| of.create_stream().unwrap()).collect();
        Machine { cards, allocators, streams }
    }

    pub fn raw(&self, card: usize) -> vramp_driver::Stream {
        self.allocators[card].stream(self.streams[card]).unwrap()
    }

    pub fn fill(&self, card: usize, range: AddrRange, byte: u8) {
        self.cards[card].fill(self.raw(card), range, byte).unwrap();
        self.cards[card].synchronize_stream(self.raw(card)).unwrap();
    }

    /// Copies on a stream of `card`.
    pub fn copy(&self, card: usize, from: AddrRange, to: AddrRange) -> Result<(), ErrorKind> {
        let copy = DeviceCopy { from: from.start, to: to.start, len: from.len };
        self.cards[card].copy(self.raw(card), copy).map_err(|error| error.kind)?;
        self.cards[card].synchronize_stream(self.raw(card)).unwrap();
        Ok(())
    }

    pub fn holds(&self, card: usize, range: AddrRange, byte: u8) {
        let bytes = self.cards[card].peek(range).unwrap();
        assert!(vramp_testing::is_filled(&bytes, byte), "{range} is not all {byte}");
    }

    pub fn calls(&self, card: usize, call: Call) -> u64 {
        self.cards[card].calls_of(call)
    }

    pub fn check(&self) {
        for (card, allocator) in self.cards.iter().zip(&self.allocators) {
            allocator.audit().unwrap();
            assert!(card.hazards().is_empty(), "{:?}", card.hazards());
        }
    }

    /// Everything is returned to the cards.
    pub fn close(self) {
        self.check();
        for allocator in self.allocators {
            allocator.close().unwrap();
        }
        for card in self.cards {
            let live = card.live();
            assert_eq!((live.handles, live.mappings, live.reservations), (0, 0, 0), "{live:?}");
            assert_eq!(live.device_bytes, Bytes::ZERO);
        }
    }
}

/// Fetches the handles of an export of this process.
pub fn fetch(
    export: &vramp_alloc::sharing::Export,
) -> impl FnMut(usize) -> Result<ExportedHandle, ExportError> + '_ {
    |index| export.descriptor(index)
}

/// When a wait for another thread is given up.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}
