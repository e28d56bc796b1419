//! The loop: every request of a workload, in order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use sha2::{Digest, Sha256};
use vramp::config::{ExternalProgress, Progress};
use vramp::device::OpenError;
use vramp::error::{Inconsistency, UseError};
use vramp::inspect::{Mark, PoolAddr};
use vramp::peers::Config;
use vramp::peers::torch::{self, TorchSegment};
use vramp::{
    AllocError, Allocation, Allocator, Bytes, CloseError, CreateError, DeviceAddr, Driver,
    DriverError, FreeError, StreamId,
};
use vramp_driver::meter::{MeterSnapshot, Metered};
use vramp_driver::sim::Hazard;
use vramp_driver::{Call, Stream};
use vramp_trace::{Request, Workload};

use super::audit::{Auditor, raw};
use super::fidelity::Peaks;
use super::{
    CallCount, CurvePoint, Fidelity, Outcome, Past, PendingUses, Recorded, Reserved,
    SCHEMA_VERSION, SegmentChanges,
};
use vramp::device::Device;

/// Requests between two progress reports.
const TICK: usize = 1 << 13;

/// Stands for a small request that is passed to the driver's pool. Its place is not the allocator's
/// decision and differs between devices.
const LEFT_TO_DRIVER: u64 = u64::MAX;

/// Options of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options<'a> {
    /// Audit the allocator after every request. On the simulator, queue kernels that access the
    /// memory and detect unordered accesses.
    pub audit: bool,
    /// Record no use on another stream: a deliberate bug, which the audit has to find.
    pub skip_record_use: bool,
    /// Compare the segments of PyTorch's allocator with this recording. Blocks are then freed at
    /// the recorded end of their uses, and requests that failed are left out.
    pub compare_with: Option<&'a Recorded>,
    /// Release cached memory where the program of this recording did. PyTorch's native allocator
    /// does so also where the recorded one released memory because it lacked some.
    pub releases_of: Option<&'a Recorded>,
    /// Record the reserved bytes at every change, as [`Outcome::curve`].
    pub curve: bool,
}

/// Why a replay failed. Out of memory is an outcome, not an error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The device could not be opened again.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The allocator could not be created.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// A request failed for another reason than lack of memory.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A use on another stream could not be recorded.
    #[error(transparent)]
    Use(#[from] UseError),
    /// A free failed.
    #[error(transparent)]
    Free(#[from] FreeError),
    /// A driver call of the replay itself failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The allocator was not closed.
    #[error(transparent)]
    Close(#[from] CloseError),
    /// The audit found a broken invariant.
    #[error("the audit failed: {0}")]
    Inconsistent(Inconsistency),
    /// The allocator's count of live bytes is wrong.
    #[error("the audit failed: the allocator counts {counted} allocated, the replay {expected}")]
    Miscount {
        /// The allocator's count.
        counted: Bytes,
        /// The replay's count.
        expected: Bytes,
    },
    /// One of the other errors, with its request.
    #[error("at {at}: {source}")]
    At {
        /// The request.
        at: String,
        /// The error.
        source: Box<ReplayError>,
    },
    /// Memory was reused while unordered work could still access it.
    #[error("memory was reused too early {found} times; first: {}", first.as_ref().map_or_else(String::new, ToString::to_string))]
    Hazards {
        /// Number of unordered accesses.
        found: u64,
        /// The first of them.
        first: Option<Box<Hazard>>,
    },
    /// The simulated device was lost.
    #[error("the simulated device was lost: {0}")]
    Fault(String),
}

/// Replays `workload` on a new allocator of `device` with `config`, whose `progress` is replaced.
/// `tick` is called with the number of requests done, every few thousand requests.
///
/// The fields of the outcome that depend on the trace are those of a trace without events: see
/// [`Outcome::with_recorded`].
///
/// # Errors
/// Anything but out of memory: see [`ReplayError`].
pub fn replay(
    workload: &Workload,
    device: &Device,
    config: Config,
    options: Options<'_>,
    mut tick: impl FnMut(usize),
) -> Result<Outcome, ReplayError> {
    let preset = config.preset;
    let fresh = device.fresh(options.audit)?;
    let meter = Arc::new(Metered::new(Arc::clone(&fresh.driver)));
    let mut run = Run::new(workload, &meter, config, options)?;
    if options.audit {
        run.auditor = Some(Auditor::new(fresh.simulator.clone())?);
    }

    meter.reset();
    let begun = Instant::now();
    let oom = run.all(&mut tick)?;
    let replay_s = begun.elapsed().as_secs_f64();
    let calls = meter.snapshot();

    let stats = run.allocator.stats()?;
    let fidelity = run.fidelity(stats.reserved_peak);
    let decisions_sha256 = run.digest();
    let worst_malloc_ns = run.worst_malloc_ns;
    let curve = std::mem::take(&mut run.curve);
    run.close()?;
    let hazards = match &fresh.simulator {
        Some(simulator) if options.audit => {
            if let Some(fault) = simulator.device_loss() {
                return Err(ReplayError::Fault(fault.explanation));
            }
            Some(simulator.hazards_found())
        }
        _ => None,
    };
    if let (Some(found @ 1..), Some(simulator)) = (hazards, &fresh.simulator) {
        let first = simulator.hazards().into_iter().next().map(Box::new);
        return Err(ReplayError::Hazards { found, first });
    }

    let info = fresh.driver.info();
    let peak_live = workload.peak_live;
    let demand = workload.peak_demand;
    let ratio = stats.reserved_peak.count() as f64 / demand.count() as f64;
    let total = calls.total();
    let (oom_at_event, oom) = oom.map_or((None, None), |(at, text)| (Some(at), Some(text)));
    Ok(Outcome {
        schema_version: SCHEMA_VERSION,
        trace: workload.name.clone(),
        trace_device: workload.device,
        allocator: preset.name(),
        variables: Vec::new(),
        settings: None,
        device: info.id.clone(),
        events: 0,
        requests: workload.requests.len() as u64,
        streams: workload.streams.len() as u64,
        peak_live_bytes: peak_live.count(),
        peak_demand_bytes: demand.count(),
        recorded_peak_bytes: None,
        recording: Past::default().name(),
        peak_reserved_bytes: stats.reserved_peak.count(),
        overhead: (!demand.is_zero() && oom.is_none()).then_some(ratio),
        driver_ms: ms(total.total_ns),
        driver_ms_is: if info.simulated { "modelled" } else { "measured" },
        worst_malloc_us: worst_malloc_ns as f64 / 1e3,
        hits: stats.hits,
        misses: stats.misses,
        driver_calls: total.calls,
        handles_created: stats.chunks_created,
        handles_moved: stats.chunks_moved + stats.chunks_reactivated,
        moved_bytes: stats.moved.count(),
        oom_at_event,
        oom,
        replay_s,
        read_s: 0.0,
        decisions_sha256,
        calls: by_kind(&calls),
        repairs: workload.repairs.counts().into_iter().filter(|&(_, count)| count > 0).collect(),
        hazards,
        fidelity,
        curve,
    })
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn by_kind(calls: &MeterSnapshot) -> BTreeMap<&'static str, CallCount> {
    let count = |(call, stats): (Call, vramp_driver::meter::CallStats)| {
        (call.name(), CallCount { count: stats.calls, ms: ms(stats.total_ns) })
    };
    calls.iter().map(count).collect()
}

/// A live block.
struct LiveBlock {
    allocation: Allocation,
    size: Bytes,
    stream: StreamId,
}

struct Run<'a> {
    workload: &'a Workload,
    allocator: Allocator,
    meter: Arc<Metered<Arc<dyn Driver>>>,
    options: Options<'a>,
    auditor: Option<Auditor>,
    pending: PendingUses,
    streams: Vec<StreamId>,
    /// Live blocks by number.
    live: Vec<Option<LiveBlock>>,
    /// Place of each block, in the order of allocation.
    decisions: Vec<u64>,
    has_own_pool: bool,
    /// Whether PyTorch's allocator has expandable segments.
    is_expandable: bool,
    /// Whether PyTorch's allocator returns memory without being asked to; `None` for others.
    returns_by_itself: Option<bool>,
    first_driver_block: Option<DeviceAddr>,
    worst_malloc_ns: u64,
    /// Segment changes of PyTorch's allocator, where they are compared.
    segments: SegmentChanges,
    curve: Vec<CurvePoint>,
}

impl<'a> Run<'a> {
    fn new(
        workload: &'a Workload,
        meter: &Arc<Metered<Arc<dyn Driver>>>,
        mut config: Config,
        options: Options<'a>,
    ) -> Result<Run<'a>, ReplayError> {
        let progress = Arc::new(ExternalProgress::default());
        let pending = PendingUses::new(Arc::clone(&progress));
        let driver: Arc<dyn Driver> = Arc::clone(meter) as _;
        config.base.progress = Progress::External(progress);
        let allocator = config.open(driver)?;
        // A block whose uses outlive its free is used by another stream, even if that stream never
        // allocates.
        let unseen =
            usize::from(workload.streams.len() == 1 && any_pending_uses(&workload.requests));
        let streams = (0..workload.streams.len() + unseen)
            .map(|_| allocator.create_stream())
            .collect::<Result<_, _>>()?;
        let has_own_pool = allocator.pool_state().is_some();
        let torch = torch::state(&allocator);
        let returns_by_itself = torch.as_ref().map(|pool| {
            let config = pool.config();
            config.garbage_collection_threshold.is_some() || config.max_split_size.is_some()
        });
        let is_expandable = torch.is_some_and(|pool| pool.config().expandable_segments);
        let mut live = Vec::new();
        live.resize_with(workload.blocks as usize, || None);
        Ok(Run {
            workload,
            allocator,
            meter: Arc::clone(meter),
            options,
            auditor: None,
            pending,
            streams,
            live,
            decisions: Vec::with_capacity(workload.blocks as usize),
            has_own_pool,
            is_expandable,
            returns_by_itself,
            first_driver_block: None,
            worst_malloc_ns: 0,
            segments: SegmentChanges::default(),
            curve: Vec::new(),
        })
    }

    /// Makes every request. Stops at the first one that fails for lack of memory and returns its
    /// event and error.
    fn all(&mut self, tick: &mut dyn FnMut(usize)) -> Result<Option<(u64, String)>, ReplayError> {
        self.restore_recorded()?;
        let requests = &self.workload.requests;
        for (index, &request) in requests.iter().enumerate() {
            if index % TICK == 0 {
                tick(index);
            }
            match self.request(index, request) {
                Ok(()) => {}
                Err(ReplayError::Alloc(error)) if error.is_out_of_memory() => {
                    return Ok(Some((self.event(index), error.to_string())));
                }
                Err(error) => {
                    return Err(ReplayError::At { at: self.at(index), source: Box::new(error) });
                }
            }
        }
        tick(requests.len());
        self.empty_cache_as_recorded(requests.len())?;
        Ok(None)
    }

    fn request(&mut self, index: usize, request: Request) -> Result<(), ReplayError> {
        self.empty_cache_as_recorded(index)?;
        let compared = self.options.compare_with.is_some();
        match request {
            // The block was live when the recording began.
            Request::Alloc { block, .. } if self.live[block as usize].is_some() => {}
            Request::Alloc { block, size, stream } => {
                self.alloc(block, size, stream)?;
                self.record_segments(index);
            }
            Request::Free { block } => {
                let pending = has_pending_uses(&self.workload.requests, index, block);
                if !(pending && compared) {
                    self.free(block, pending)?;
                }
            }
            Request::FreeCompleted { block } if self.live[block as usize].is_some() => {
                self.free(block, false)?;
            }
            Request::FreeCompleted { block } => self.uses_done(block),
            // The recorded request failed, and the program continued.
            Request::Oom { .. } if compared => {}
            Request::Oom { size, stream, .. } => self.probe(size, stream)?,
        }
        if self.options.curve {
            self.record_reserved(index)?;
        }
        match &self.auditor {
            Some(auditor) => auditor.check(&self.allocator),
            None => Ok(()),
        }
    }

    // --- the recorded allocator's segments ---

    /// Restores the segments that existed when the recording began.
    fn restore_recorded(&mut self) -> Result<(), ReplayError> {
        let Some(recorded) = self.options.compare_with else { return Ok(()) };
        let sizes = self.workload.block_sizes();
        let mut segments = Vec::new();
        for initial in &recorded.initial {
            let known = self.workload.streams.iter().position(|&raw| raw == initial.raw_stream);
            let stream = match known {
                Some(known) => self.streams[known],
                // The stream never allocates again, but has live blocks.
                None => self.allocator.create_stream()?,
            };
            let held = initial.blocks.iter().filter_map(|&block| {
                Some((self.workload.initial_address(block)?, sizes[block as usize]))
            });
            let held = held.collect();
            let (start, len) = (initial.start, initial.len);
            segments.push(TorchSegment { start, len, stream, held });
        }
        let restored = torch::restore(&self.allocator, &segments)?;
        let blocks = recorded.initial.iter().zip(&segments).flat_map(|(initial, segment)| {
            initial.blocks.iter().map(|&block| (block, segment.stream))
        });
        for ((block, stream), allocation) in blocks.zip(restored) {
            let Some(allocation) = allocation else { continue };
            let size = sizes[block as usize];
            self.decisions.extend(allocation.pool_addr().map(PoolAddr::number));
            if let Some(auditor) = &mut self.auditor {
                auditor.allocated(&allocation, size, raw(&self.allocator, stream))?;
            }
            self.live[block as usize] = Some(LiveBlock { allocation, size, stream });
        }
        Ok(())
    }

    /// Releases unused memory where the recorded allocator did: see `fidelity.rs`.
    fn empty_cache_as_recorded(&mut self, request: usize) -> Result<(), ReplayError> {
        let Some(recorded) = self.options.compare_with.or(self.options.releases_of) else {
            return Ok(());
        };
        let segments = &recorded.segments;
        let releases = match self.returns_by_itself {
            Some(false) if !self.is_expandable || self.options.compare_with.is_some() => {
                segments.frees_before(request)
            }
            Some(true) if self.options.compare_with.is_some() => false,
            _ => segments.is_released_before(request, self.workload),
        };
        if releases {
            self.allocator.trim(Bytes::ZERO)?;
            self.record_segments(request);
        }
        Ok(())
    }

    fn record_reserved(&mut self, request: usize) -> Result<(), ReplayError> {
        let reserved = self.allocator.stats()?.reserved;
        if self.curve.last().is_none_or(|last| last.reserved_bytes != reserved.count()) {
            let request = u32::try_from(request).expect("a workload has fewer than 2^32 requests");
            self.curve.push(CurvePoint { request, reserved_bytes: reserved.count() });
        }
        Ok(())
    }

    /// Makes a request that failed when it was recorded. Where it succeeds, how long the program
    /// would have kept the block is unknown, so it is freed at once.
    fn probe(&mut self, size: Bytes, stream: u32) -> Result<(), ReplayError> {
        let stream = self.streams[stream as usize];
        let begun_ns = self.meter.now_ns();
        let allocation = self.allocator.malloc(size, stream)?;
        let took_ns = self.meter.now_ns().saturating_sub(begun_ns);
        self.worst_malloc_ns = self.worst_malloc_ns.max(took_ns);
        self.allocator.free(allocation, stream)?;
        Ok(())
    }

    fn record_segments(&mut self, request: usize) {
        if self.options.compare_with.is_some() {
            for op in torch::operations(&self.allocator) {
                self.segments.record_op(request, op);
            }
        }
    }

    fn fidelity(&self, replayed: Bytes) -> Option<Fidelity> {
        let recorded = self.options.compare_with?;
        let recorded_peak = match recorded.reserved {
            Reserved::Peak(peak) | Reserved::AtLeast(peak) => peak,
            Reserved::Unknown => Bytes::ZERO,
        };
        let peaks = Peaks { recorded: recorded_peak, replayed };
        Some(recorded.segments.compare(&self.segments, self.workload, peaks))
    }

    fn alloc(&mut self, block: u32, size: Bytes, stream: u32) -> Result<(), ReplayError> {
        let stream = self.streams[stream as usize];
        // A wait matters only while uses are pending on other streams.
        let before = (!self.pending.is_empty()).then(|| self.waits_and_now(stream));
        let begun_ns = self.meter.now_ns();
        let allocation = self.allocator.malloc(size, stream)?;
        let took_ns = self.meter.now_ns().saturating_sub(begun_ns);
        self.worst_malloc_ns = self.worst_malloc_ns.max(took_ns);
        if let Some((waits, Some(now))) = before
            && self.meter.snapshot().of(Call::Wait).calls > waits
        {
            self.pending.hold_by_all(now);
        }
        let decision = match allocation.pool_addr() {
            Some(place) => place.number(),
            None if self.has_own_pool => LEFT_TO_DRIVER,
            None => {
                let first = *self.first_driver_block.get_or_insert(allocation.addr());
                allocation.addr().number().wrapping_sub(first.number())
            }
        };
        self.decisions.push(decision);
        if let Some(auditor) = &mut self.auditor {
            auditor.allocated(&allocation, size, raw(&self.allocator, stream))?;
        }
        self.live[block as usize] = Some(LiveBlock { allocation, size, stream });
        Ok(())
    }

    fn waits_and_now(&self, stream: StreamId) -> (u64, Option<Mark>) {
        (self.meter.snapshot().of(Call::Wait).calls, self.now(stream))
    }

    fn now(&self, stream: StreamId) -> Option<Mark> {
        self.allocator.mark(stream)
    }

    fn free(&mut self, block: u32, uses_pending: bool) -> Result<(), ReplayError> {
        let freed = self.live[block as usize].take();
        let LiveBlock { allocation, size, stream } =
            freed.expect("a workload frees each of its live blocks once");
        let others: Vec<StreamId> = if uses_pending {
            self.streams.iter().copied().filter(|&other| other != stream).collect()
        } else {
            Vec::new()
        };
        if let Some(auditor) = &mut self.auditor {
            let own = raw(&self.allocator, stream);
            let raws: Vec<Stream> = others.iter().map(|&id| raw(&self.allocator, id)).collect();
            auditor.freeing(block, &allocation, size, own, &raws)?;
        }
        for &other in &others {
            if let Some(now) = self.now(other) {
                // A stream that uses another one's memory waits for that one first.
                self.pending.hold_by_all(now);
                self.pending.hold(block, now);
            }
            if !self.options.skip_record_use {
                self.allocator.record_use(&allocation, other)?;
            }
        }
        if uses_pending && let Some(mark) = self.now(stream) {
            self.pending.hold(block, mark);
        }
        self.allocator.free(allocation, stream)?;
        Ok(())
    }

    fn uses_done(&mut self, block: u32) {
        self.pending.end(block);
        if let Some(auditor) = &mut self.auditor {
            auditor.uses_done(block);
        }
    }

    /// Returns the SHA-256 over every decision, in the order of the requests: the block's number in
    /// 4 bytes, its place in 8, both little-endian. The place is the address within the allocator's
    /// own pool; for the driver's pool it is the distance from the first block.
    fn digest(&self) -> String {
        let mut hasher = Sha256::new();
        let mut batch = Vec::with_capacity(12 << 12);
        for (block, decisions) in (0u32..).step_by(1 << 12).zip(self.decisions.chunks(1 << 12)) {
            batch.clear();
            for (block, place) in (block..).zip(decisions) {
                batch.extend_from_slice(&block.to_le_bytes());
                batch.extend_from_slice(&place.to_le_bytes());
            }
            hasher.update(&batch);
        }
        hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn close(mut self) -> Result<(), CloseError> {
        if let Some(auditor) = &mut self.auditor {
            auditor.finish();
        }
        self.allocator.close()
    }

    /// Returns the number of a request's event among those of the device; 0 for blocks from before
    /// the recording.
    fn event(&self, request: usize) -> u64 {
        self.workload.device_event_of(request).unwrap_or(0) as u64
    }

    fn at(&self, request: usize) -> String {
        match self.workload.device_event_of(request) {
            Some(event) => format!("event {event} of '{}'", self.workload.name),
            None => format!("a block allocated before the first event of '{}'", self.workload.name),
        }
    }
}

/// Returns true if uses of `block`, freed at `index`, are pending after the free.
pub fn has_pending_uses(requests: &[Request], index: usize, block: u32) -> bool {
    requests.get(index + 1) != Some(&Request::FreeCompleted { block })
}

fn any_pending_uses(requests: &[Request]) -> bool {
    requests.iter().enumerate().any(|(index, request)| match *request {
        Request::Free { block } => has_pending_uses(requests, index, block),
        _ => false,
    })
}
