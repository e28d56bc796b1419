//! The device as the allocator under test sees it: the same device, with one call that fails.
//!
//! The program's own calls go to the device directly, so an injected failure never hits them. A
//! failed call is not made, as on the simulator.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_driver::sim::{Contents, Simulator};
use vramp_driver::wrapper::{Wrapped, Wrapper};
use vramp_driver::{
    Call, CaptureInfo, CaptureMode, Driver, DriverError, DriverResult, Event, Graph, GraphExec,
    Handle, MemoryProperties, Stream,
};

/// What a program runs on.
#[derive(Clone)]
pub(super) struct Ground {
    pub device: Arc<dyn Driver>,
    pub sim: Option<Arc<Simulator>>,
    /// The device as the subject sees it.
    pub tap: Arc<Wrapped<Tap>>,
    /// True if bytes are stored and compared.
    pub stores: bool,
}

impl Ground {
    /// Returns a card, which stores bytes, or a simulated one of so much memory.
    pub(super) fn new(card: Option<&Arc<dyn Driver>>, memory: Bytes, stores: bool) -> Ground {
        let (device, sim) = match card {
            Some(card) => (Arc::clone(card), None),
            None => {
                let contents = if stores { Contents::Stored } else { Contents::Discarded };
                let sim = Simulator::builder().memory(memory).contents(contents);
                let sim = Arc::new(sim.checked().build());
                (Arc::clone(&sim) as Arc<dyn Driver>, Some(sim))
            }
        };
        Ground { tap: Tap::on(Arc::clone(&device)), device, sim, stores: stores || card.is_some() }
    }

    /// Returns the device as the subject sees it.
    pub(super) fn tapped(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.tap) as Arc<dyn Driver>
    }
}

/// A failure to inject.
#[derive(Clone, Copy, Debug)]
struct Plan {
    /// `None` for calls of every kind.
    call: Option<Call>,
    /// Calls of this kind until the one that fails.
    left: u64,
    /// Calls that fail.
    times: u64,
    code: i32,
}

/// A device whose calls can be made to fail.
pub(super) struct Tap {
    device: Arc<dyn Driver>,
    /// True while a failure is planned: other calls read only this.
    armed: AtomicU64,
    plan: Mutex<Option<Plan>>,
    fired: Mutex<Vec<Call>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tap {
    pub(super) fn on(device: Arc<dyn Driver>) -> Arc<Wrapped<Tap>> {
        Arc::new(Wrapped(Tap {
            device,
            armed: AtomicU64::new(0),
            plan: Mutex::new(None),
            fired: Mutex::default(),
        }))
    }

    /// Makes the `nth` call of this kind, or of any, from now on fail with the driver's `code`, and those after
    /// it: so many `times`. Replaces an earlier plan.
    pub(super) fn fail(&self, call: Option<Call>, nth: u64, code: i32, times: u64) {
        *lock(&self.plan) = Some(Plan { call, left: nth, times, code });
        self.armed.store(1, Ordering::Relaxed);
    }

    /// Cancels the planned failure.
    pub(super) fn cancel(&self) {
        *lock(&self.plan) = None;
        self.armed.store(0, Ordering::Relaxed);
    }

    /// Returns the calls that failed so far.
    pub(super) fn fired(&self) -> usize {
        lock(&self.fired).len()
    }

    /// Returns true if a call that returns something to the device failed: what it was to return
    /// may stay.
    pub(super) fn lost_something(&self) -> bool {
        let returns = |call: &Call| {
            matches!(
                call,
                Call::Release
                    | Call::FreeAddresses
                    | Call::Unmap
                    | Call::FreeMemory
                    | Call::FreeAsync
                    | Call::DestroyEvent
                    | Call::DestroyStream
                    | Call::DestroyGraph
                    | Call::DestroyGraphExec
                    | Call::EndCapture
                    | Call::SynchronizeStream
                    | Call::SynchronizeEvent
                    | Call::FreeHost
                    | Call::TrimPool
            )
        };
        lock(&self.fired).iter().any(returns)
    }

    /// Returns the call that failed last.
    pub(super) fn last_fired(&self) -> Option<Call> {
        lock(&self.fired).last().copied()
    }

    fn check(&self, call: Call) -> DriverResult<()> {
        if self.armed.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        let mut plan = lock(&self.plan);
        let Some(Plan { call: planned, left, times, code }) = &mut *plan else { return Ok(()) };
        if planned.is_some_and(|planned| planned != call) {
            return Ok(());
        }
        *left = left.saturating_sub(1);
        if *left > 0 {
            return Ok(());
        }
        let code = *code;
        *times = times.saturating_sub(1);
        if *times == 0 {
            *plan = None;
            self.armed.store(0, Ordering::Relaxed);
        }
        lock(&self.fired).push(call);
        Err(DriverError::from_code(call, code, "injected"))
    }
}

macro_rules! checked {
    ($($call:ident => $method:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $method(&self $(, $argument: $type)*) -> DriverResult<$result> {
            self.check(Call::$call)?;
            self.device.$method($($argument),*)
        })*
    };
}

impl Wrapper for Tap {
    type Device = Arc<dyn Driver>;

    fn device(&self) -> &Arc<dyn Driver> {
        &self.device
    }

    checked! {
        Reserve => reserve(len: Bytes, alignment: Bytes) -> DeviceAddr;
        FreeAddresses => free_addresses(range: AddrRange) -> ();
        Create => create(len: Bytes, properties: MemoryProperties) -> Handle;
        Release => release(handle: Handle) -> ();
        Map => map(at: DeviceAddr, handle: Handle) -> ();
        Unmap => unmap(range: AddrRange) -> ();
        SetAccess => set_access(range: AddrRange, peers: &[u32]) -> ();
        AllocMemory => alloc_memory(len: Bytes) -> DeviceAddr;
        FreeMemory => free_memory(at: DeviceAddr) -> ();
        DestroyStream => destroy_stream(stream: Stream) -> ();
        CreateStream => create_stream() -> Stream;
        SynchronizeStream => synchronize_stream(stream: Stream) -> ();
        CreateEvent => create_event() -> Event;
        DestroyEvent => destroy_event(event: Event) -> ();
        Record => record(event: Event, stream: Stream) -> ();
        Record => record_outside(event: Event, stream: Stream) -> bool;
        Query => query(event: Event) -> bool;
        Wait => wait(stream: Stream, event: Event) -> ();
        SynchronizeEvent => synchronize_event(event: Event) -> ();
        IsCapturing => is_capturing(stream: Stream) -> bool;
        CaptureInfo => capture_info(stream: Stream) -> Option<CaptureInfo>;
        BeginCapture => begin_capture(stream: Stream, mode: CaptureMode) -> ();
        EndCapture => end_capture(stream: Stream) -> Graph;
        Instantiate => instantiate(graph: Graph) -> GraphExec;
        LaunchGraph => launch_graph(exec: GraphExec, stream: Stream) -> ();
        DestroyGraph => destroy_graph(graph: Graph) -> ();
        DestroyGraphExec => destroy_graph_exec(exec: GraphExec) -> ();
        MallocAsync => malloc_async(stream: Stream, len: Bytes) -> DeviceAddr;
        FreeAsync => free_async(stream: Stream, at: DeviceAddr) -> ();
        TrimPool => trim_pool(keep: Bytes) -> ();
    }
}
