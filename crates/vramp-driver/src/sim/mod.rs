//! A simulated GPU: the same rules and costs as a card, in virtual time, on any machine.
//!
//! [`Simulator`] implements [`crate::Driver`] and adds what only a simulation can offer: kernels as
//! ranges they touch and a duration ([`Simulator::launch`]), gates that keep work in flight
//! ([`Simulator::gate`]), failures on purpose ([`FaultPlan`]), a happens-before checker
//! ([`Simulator::hazards`]), counts and a log of driver calls, and the list of what is alive
//! ([`Simulator::live`]).
//!
//! Time: the host's clock moves only by what calls cost ([`CostTable`]) and by
//! [`Simulator::advance`]. Work on streams runs beside it, in order of virtual time, and is carried
//! out as far as the host's clock has come whenever the host makes a call. Identical calls on
//! equally built simulators give identical results, to the nanosecond.
//!
//! Faults: work that touches memory that is unmapped or without access loses the device, and so
//! does unmapping memory that queued or running work touches. [`Simulator::fault`] tells which work
//! and address it was.
//!
//! Stricter than a card may be: unmap and set-access take whole mappings inside one reservation;
//! unmapping under work that has not started is a fault although other memory could be mapped there
//! in time. While a capture forbids queries it also forbids to allocate and free plain and pinned
//! memory and to synchronise events; a capturing stream cannot be destroyed; and waiting for an event
//! that was never recorded does not belong to a capture either. Not modelled: allocating from the
//! device's own pool in a capture, graphs within graphs, several devices, competition between streams
//! for the card.
//!
//! Captures: what is queued on a capturing stream is kept as nodes, which run when the graph is
//! launched, in exactly the captured order. To the checker, and in its reports, branches of a graph
//! beside each other are streams of their own.

mod builder;
mod bytes;
mod capture;
mod card;
mod cost;
mod driver;
mod fault;
mod graph;
mod hazard;
mod history;
mod host;
mod log;
mod memory;
mod pool;
mod refusal;
mod state;
mod streams;
mod work;

use std::sync::{Mutex, MutexGuard, PoisonError};

use vramp_core::{AddrRange, Bytes};

pub use builder::SimulatorBuilder;
pub use bytes::Contents;
pub use card::{CardModel, UnknownCard};
pub use cost::{CostError, CostTable};
pub use fault::FaultPlan;
pub use hazard::{Access, Hazard};
pub use log::LoggedCall;
pub use streams::{Gate, Kernel};

use crate::{Call, DeviceInfo, DriverResult, Stream};
use state::State;

/// A simulated GPU. See the [module's page](self).
///
/// ```
/// use vramp_core::Bytes;
/// use vramp_driver::{Driver, MemoryLocation, sim::Simulator};
/// let device = Simulator::card("h200")?;
/// let range = vramp_core::AddrRange::new(device.reserve(Bytes::mib(4), Bytes::mib(2))?, Bytes::mib(4));
/// let handle = device.create(range.len, MemoryLocation::Device)?;
/// device.map(range.start, handle)?;
/// device.set_access(range)?;
/// let stream = device.create_stream()?;
/// device.fill(stream, range, 7)?;
/// device.synchronize_stream(stream)?;
/// assert!(device.now_ns() > 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Simulator {
    info: DeviceInfo,
    state: Mutex<State>,
}

/// What a device holds. Two equal censuses mean that nothing leaked in between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveObjects {
    /// Reserved ranges of addresses.
    pub reservations: usize,
    /// Addresses in them.
    pub reserved_addresses: Bytes,
    /// Handles not released.
    pub handles: usize,
    /// Handles released that a mapping keeps alive.
    pub handles_released_but_mapped: usize,
    /// Mappings.
    pub mappings: usize,
    /// Memory of the card in handles, in plain allocations and in the device's own pool.
    pub device_bytes: Bytes,
    /// Streams not destroyed.
    pub streams: usize,
    /// Events not destroyed.
    pub events: usize,
    /// Captures not ended.
    pub captures: usize,
    /// Graphs not destroyed.
    pub graphs: usize,
    /// Instantiated graphs not destroyed.
    pub graph_execs: usize,
    /// Buffers of pinned host memory.
    pub host_buffers: usize,
    /// Memory in them.
    pub host_bytes: Bytes,
    /// Plain allocations; they count among neither handles nor mappings.
    pub allocations: usize,
    /// Allocations from the device's own pool.
    pub pool_allocations: usize,
    /// Memory in them.
    pub pool_bytes: Bytes,
}

/// Why the device was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLoss {
    /// The driver's code, such as 700.
    pub code: i32,
    /// Which work touched which address, and what was wrong with it.
    pub explanation: String,
}

impl Simulator {
    /// A simulated card by name: see [`CardModel::all`].
    ///
    /// # Errors
    /// [`UnknownCard`] lists the cards there are.
    pub fn card(id: &str) -> Result<Simulator, UnknownCard> {
        Ok(Simulator::builder().card(CardModel::find(id)?).build())
    }

    /// A simulated card put together by hand; an H200 unless told otherwise.
    pub fn builder() -> SimulatorBuilder {
        SimulatorBuilder::default()
    }

    // --- work ---

    /// Queues a kernel on `stream`, or captures it. Costs the host what queueing a fill costs.
    ///
    /// Not a driver call of the trait: it is not counted, logged, or failed on purpose.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidUse`] for an unknown stream or gate, and
    /// [`crate::ErrorKind::DeviceLost`] once the device is lost. Touching memory it may not touch
    /// shows only when the kernel starts.
    pub fn launch(&self, stream: Stream, kernel: Kernel) -> DriverResult<()> {
        self.lock().launch(stream, kernel)
    }

    /// A new, closed gate. A kernel queued with [`Kernel::until`] runs until it is open.
    pub fn gate(&self) -> Gate {
        self.lock().streams.gate()
    }

    /// Opens a gate: kernels held by it end now, and pass it at once from now on.
    ///
    /// To the checker this says nothing: the host still has to see the kernel complete.
    ///
    /// # Panics
    /// If the gate is another simulator's.
    pub fn open(&self, gate: Gate) {
        assert!(self.lock().open(gate), "gate {} is not this simulator's", gate.0);
    }

    /// Lets `ns` nanoseconds pass on the host.
    pub fn advance(&self, ns: u64) {
        self.lock().advance(ns);
    }

    // --- looking in ---

    /// Why the device was lost, if it was.
    pub fn device_loss(&self) -> Option<DeviceLoss> {
        self.lock().device_loss()
    }

    /// Accesses without order that were found so far: the first thousand in full. Empty if the
    /// checker is off.
    pub fn hazards(&self) -> Vec<Hazard> {
        self.lock().hazards()
    }

    /// How many accesses without order were found so far.
    pub fn hazards_found(&self) -> u64 {
        self.lock().hazards_found()
    }

    /// How many captures were spoilt so far, or ended with a fork that was not joined.
    pub fn invalidated_captures(&self) -> u64 {
        self.lock().captures.spoilt
    }

    /// What the device holds.
    pub fn live(&self) -> LiveObjects {
        self.lock().live()
    }

    /// The bytes of `range` as they are now, or `None` if bytes are not stored or the range cannot
    /// be touched. Takes no time and waits for nothing.
    pub fn peek(&self, range: AddrRange) -> Option<Vec<u8>> {
        self.lock().peek(range)
    }

    /// Driver calls so far, failed ones included.
    pub fn calls(&self) -> u64 {
        self.lock().calls.iter().sum()
    }

    /// Driver calls of one kind so far, failed ones included.
    pub fn calls_of(&self, call: Call) -> u64 {
        self.lock().calls[call as usize]
    }

    /// Replaces the plan for failing calls. Its counting begins with the next call.
    pub fn set_faults(&self, plan: FaultPlan) {
        self.lock().set_faults(plan);
    }

    /// Takes the log of driver calls since it was last taken. Empty if no log is kept.
    pub fn take_log(&self) -> Vec<LoggedCall> {
        self.lock().log.take()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held is a bug of this crate that its own message tells; other
        // threads may go on to report theirs.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
