//! A simulated GPU: the rules and costs of a card, in virtual time, on any machine.
//!
//! [`Simulator`] implements [`crate::Driver`]. It adds what only a simulation can offer:
//!
//! - kernels, as the ranges that they access and a duration ([`Simulator::launch`]);
//! - gates that keep work in flight ([`Simulator::gate`]);
//! - fault injection ([`FaultPlan`]);
//! - a race detector ([`Simulator::hazards`]);
//! - counts and a log of driver calls, and counts of live objects ([`Simulator::live`]).
//!
//! Time: the host clock advances only by the cost of calls ([`CostTable`]) and by
//! [`Simulator::advance`]. Work on streams runs concurrently in virtual time. Each host call first
//! carries out the work that is due by the host clock. Identical calls on equal simulators give
//! identical results, to the nanosecond.
//!
//! Device loss: work that accesses memory that is unmapped or has no access loses the device. So
//! does unmapping memory that queued or running work accesses. [`Simulator::device_loss`] returns
//! the work and the address.
//!
//! Stricter than a card may be: unmap and set-access take whole mappings inside one reservation.
//! Unmapping under queued work is a fault, although other memory could be mapped there before the
//! work starts. A capture that forbids queries also forbids allocating and freeing plain and pinned
//! memory and synchronising events. A capturing stream cannot be destroyed, and cannot wait for an
//! event that was never recorded.
//!
//! Several devices: [`SimulatorBuilder::build_machine`] returns the devices of one machine. They share
//! the host clock, the addresses and the race detector, so its diagnostics are those of the machine.
//! Streams, events, handles, reservations, graphs and pinned memory belong to the device that made
//! them; another one refuses them. Work on different devices runs concurrently. Copies over one link
//! in one direction share it: the second one is done after the first.
//!
//! Several processes: an exported descriptor is real. It keeps the memory, and its device counts it as
//! used, until all duplicates are closed in all processes. The bytes are shared by simulators that are
//! mapped to the host's memory ([`SimulatorBuilder::mapped_to`]).
//!
//! Not modelled: allocation from the device's own pool in a capture, child graphs, contention between
//! streams for the card, export of host memory, and work that waits for an event of another device.
//!
//! Captures: work queued on a capturing stream is kept as nodes, which run when the graph is
//! launched, in exactly the captured order. In reports of the race detector, concurrent branches of
//! a graph are separate streams.

mod builder;
mod bytes;
mod capture;
mod captures;
mod card;
mod clock;
mod cost;
mod cost_spec;
mod devices;
mod driver;
mod exports;
mod fault;
mod hazard;
mod history;
mod host;
mod log;
mod memory;
mod peers;
mod pool;
mod refusal;
mod register;
mod sharing;
mod state;
mod streams;
mod threads;
mod work;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vramp_core::{AddrRange, Bytes, DeviceAddr};

pub use builder::SimulatorBuilder;
pub use bytes::Contents;
pub use card::{CardModel, UnknownCard};
pub use cost::CostTable;
pub use cost_spec::{CostError, CostSpec, PerMib, PoolSpec, Rates, SharingCosts, SizedCosts};
pub use devices::DEVICES_MAX;
pub use fault::FaultPlan;
pub use hazard::{Access, Hazard};
pub use host::Registration;
pub use log::LoggedCall;
pub use refusal::{DeviceLoss, LiveObjects};
pub use streams::{Gate, Kernel};

use crate::{Call, DeviceInfo, DriverResult, Stream};
use state::State;

/// A simulated GPU. See the [module's page](self).
///
/// ```
/// use vramp_core::Bytes;
/// use vramp_driver::{Driver, MemoryProperties, sim::Simulator};
/// let device = Simulator::card("h200")?;
/// let range = vramp_core::AddrRange::new(device.reserve(Bytes::mib(4), Bytes::mib(2))?, Bytes::mib(4));
/// let handle = device.create(range.len, MemoryProperties::DEVICE)?;
/// device.map(range.start, handle)?;
/// device.set_access(range, &[])?;
/// let stream = device.create_stream()?;
/// device.fill(stream, range, 7)?;
/// device.synchronize_stream(stream)?;
/// assert!(device.now_ns() > 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Simulator {
    info: DeviceInfo,
    device: usize,
    /// Shared by all devices of the machine.
    state: Arc<Mutex<State>>,
}

impl Simulator {
    /// Returns a simulated card by name. [`CardModel::all`] lists the names.
    ///
    /// # Errors
    /// [`UnknownCard`] lists the names.
    pub fn card(id: &str) -> Result<Simulator, UnknownCard> {
        Ok(Simulator::builder().card(CardModel::find(id)?).build())
    }

    /// Returns a builder of a simulated card, an H200 by default.
    pub fn builder() -> SimulatorBuilder {
        SimulatorBuilder::default()
    }

    // --- work ---

    /// Queues a kernel on `stream`, or captures it. Costs the host as much as queueing a fill.
    ///
    /// Not a call of the trait: it is neither counted nor logged, and no fault is injected.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidUse`] for an unknown stream or gate, and
    /// [`crate::ErrorKind::DeviceLost`] once the device is lost. An access to inaccessible memory
    /// loses the device only when the kernel starts.
    pub fn launch(&self, stream: Stream, kernel: Kernel) -> DriverResult<()> {
        self.lock().launch(self.device, stream, kernel)
    }

    /// Creates a closed gate. A kernel queued with [`Kernel::until`] runs until it is open.
    pub fn gate(&self) -> Gate {
        self.lock().streams.gate()
    }

    /// Opens a gate: kernels that wait for it end now, and later ones do not wait.
    ///
    /// This is no synchronisation for the race detector: the host still has to observe the
    /// completion of the kernel.
    ///
    /// # Panics
    /// If the gate belongs to another simulator.
    pub fn open(&self, gate: Gate) {
        assert!(self.lock().open(gate), "gate {} belongs to another simulator", gate.0);
    }

    /// Advances the host clock by `ns` nanoseconds.
    pub fn advance(&self, ns: u64) {
        self.lock().advance(ns);
    }

    // --- other code of the process ---

    /// Allocates memory as other code of the process does, by a `cudaMalloc` of its own. The device does
    /// not own it until it adopts it.
    ///
    /// Not a call of the trait: it is neither counted nor logged, takes no time, and no fault is injected.
    ///
    /// # Errors
    /// As of [`Driver::alloc_memory`](crate::Driver::alloc_memory).
    pub fn alloc_elsewhere(&self, len: Bytes) -> DriverResult<DeviceAddr> {
        self.lock().alloc_elsewhere(self.device, len)
    }

    /// Frees what [`Simulator::alloc_elsewhere`] returned, as `cudaFree` does: it waits for all work of
    /// the device.
    ///
    /// # Errors
    /// As of [`Driver::free_memory`](crate::Driver::free_memory).
    pub fn free_elsewhere(&self, at: DeviceAddr) -> DriverResult<()> {
        self.lock().free_elsewhere(self.device, at)
    }

    // --- libraries and network cards ---

    /// Registers `range` for `holder`, as a communication library or a network card does that keeps
    /// using the physical memory mapped there. Until it is unregistered, the race detector reports
    /// each call that unmaps a mapping of the range, maps its memory at another address, or releases it
    /// after it was unmapped.
    ///
    /// Not a call of the trait: it is neither counted nor logged, and takes no time.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidUse`] unless all of `range` is mapped, and
    /// [`crate::ErrorKind::DeviceLost`].
    pub fn register(&self, range: AddrRange, holder: &str) -> DriverResult<Registration> {
        self.lock().register(self.device, range, holder)
    }

    /// Ends a registration.
    ///
    /// # Panics
    /// If it ended before or belongs to another machine.
    pub fn unregister(&self, registration: Registration) {
        let ended = self.lock().registered.remove(registration);
        assert!(ended, "registration {} does not exist", registration.0);
    }

    // --- diagnostics ---

    /// Returns why the device was lost, if it was.
    pub fn device_loss(&self) -> Option<DeviceLoss> {
        self.lock().devices[self.device].lost.clone()
    }

    /// Returns the first thousand races found so far. Empty if the race detector is off.
    pub fn hazards(&self) -> Vec<Hazard> {
        self.lock().hazards()
    }

    /// Returns the number of races found so far.
    pub fn hazards_found(&self) -> u64 {
        self.lock().hazards_found()
    }

    /// Returns the number of captures that were invalidated or ended with an unjoined fork.
    pub fn invalidated_captures(&self) -> u64 {
        self.lock().captures.invalidated
    }

    /// Returns counts and bytes of live objects.
    pub fn live(&self) -> LiveObjects {
        self.lock().live(self.device)
    }

    /// Returns the high-water mark of [`LiveObjects::device_bytes`].
    pub fn device_bytes_peak(&self) -> Bytes {
        self.lock().memory.used_peak(self.device)
    }

    /// Returns the bytes of `range` as they are now. `None` if bytes are not stored or the range is
    /// not accessible. Takes no time and does not synchronise.
    pub fn peek(&self, range: AddrRange) -> Option<Vec<u8>> {
        self.lock().peek(self.device, range)
    }

    /// Returns the number of driver calls so far, including failed ones.
    pub fn calls(&self) -> u64 {
        self.lock().devices[self.device].calls.iter().sum()
    }

    /// Returns the number of driver calls of one kind so far, including failed ones.
    pub fn calls_of(&self, call: Call) -> u64 {
        self.lock().devices[self.device].calls[call as usize]
    }

    /// Replaces the fault plan. It counts from the next call.
    pub fn set_faults(&self, plan: FaultPlan) {
        self.lock().set_faults(self.device, plan);
    }

    /// Removes and returns the logged driver calls. Empty if no log is kept.
    pub fn take_log(&self) -> Vec<LoggedCall> {
        self.lock().devices[self.device].log.take()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while holding the lock is a bug of this crate with its own message. Other threads
        // may go on and report theirs.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
