//! The loop: every request of a workload, in order.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use sha2::{Digest, Sha256};
use vramp_alloc::config::Progress;
use vramp_alloc::device::OpenError;
use vramp_alloc::error::{Inconsistency, UseError};
use vramp_alloc::inspect::{Mark, PoolAddr};
use vramp_alloc::torch::TorchSegment;
use vramp_alloc::{
    AllocError, Allocation, Allocator, Bytes, Config, CreateError, DeviceAddr, Driver, DriverError,
    FreeError, StreamId,
};
use vramp_driver::meter::{MeterSnapshot, Metered};
use vramp_driver::sim::Hazard;
use vramp_driver::{Call, Stream};
use vramp_trace::{Request, Workload};

use super::audit::{Auditor, raw};
use super::fidelity::Peaks;
use super::{CallCount, Fidelity, Outcome, Outstanding, Recorded, Segments};
use crate::device::Device;

/// How often progress is told, in requests.
const TICK: usize = 1 << 13;

/// The decision to leave a small request to the driver's pool: where that puts it is not the
/// allocator's to decide, and differs between devices.
const LEFT_TO_DRIVER: u64 = u64::MAX;

/// What a run may do beside replaying.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options<'a> {
    /// Check the allocator after every request. On the simulator, queue kernels that touch the
    /// memory and look for accesses without order.
    pub audit: bool,
    /// Leave out the allocator's knowledge of uses on other streams: a bug on purpose, to see that
    /// the audit finds it.
    pub forget_uses: bool,
    /// Compare what PyTorch's allocator takes from the driver with this recording. Blocks are then
    /// free at the very event at which they were, whatever streams use them.
    pub compared_with: Option<&'a Recorded>,
}

/// Why a replay could not be completed. Running out of memory is no error but an outcome.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The device could not be opened again.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The allocator could not be made.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// A request failed for another reason than memory.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A use on another stream could not be noted.
    #[error(transparent)]
    Use(#[from] UseError),
    /// A free failed.
    #[error(transparent)]
    Free(#[from] FreeError),
    /// A driver call of the replay itself failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The audit found a broken invariant.
    #[error("the audit failed: {0}")]
    Inconsistent(Inconsistency),
    /// The allocator's count of live bytes is wrong.
    #[error("the audit failed: the allocator counts {counted} live, but {expected} are")]
    Miscount {
        /// By the allocator.
        counted: Bytes,
        /// By the replay.
        expected: Bytes,
    },
    /// One of the above, at a request.
    #[error("at {at}: {source}")]
    At {
        /// Which request.
        at: String,
        /// What was found.
        source: Box<ReplayError>,
    },
    /// Memory was handed out while unordered work could still touch it.
    #[error("memory was handed out too early {found} times; first: {}", first.as_ref().map_or_else(String::new, ToString::to_string))]
    Hazards {
        /// How often.
        found: u64,
        /// The first time.
        first: Option<Box<Hazard>>,
    },
    /// The simulated device was lost.
    #[error("the simulated device was lost: {0}")]
    Fault(String),
}

/// Replays `workload` on a new allocator of `device`, made by `config` (whose `progress` is
/// replaced). `tick` hears how many requests are done, now and then.
///
/// `events` and `read_s` of the outcome are left at zero: they are the trace's.
///
/// # Errors
/// Anything but running out of memory: see [`ReplayError`].
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
    let ratio = stats.reserved_peak.count() as f64 / peak_live.count() as f64;
    let total = calls.total();
    let (oom_at_event, oom) = oom.map_or((None, None), |(at, text)| (Some(at), Some(text)));
    Ok(Outcome {
        trace: workload.name.clone(),
        trace_device: workload.device,
        allocator: preset.name(),
        device: info.id.clone(),
        events: 0,
        requests: workload.requests.len() as u64,
        streams: workload.streams.len() as u64,
        peak_live_bytes: peak_live.count(),
        peak_reserved_bytes: stats.reserved_peak.count(),
        reserved_over_live: (!peak_live.is_zero()).then_some(ratio),
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

/// A block in the program's hands.
struct Held {
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
    outstanding: Arc<Mutex<Outstanding>>,
    streams: Vec<StreamId>,
    /// By block number.
    held: Vec<Option<Held>>,
    /// Where each block was placed, by block number.
    decisions: Vec<u64>,
    has_own_pool: bool,
    first_of_driver: Option<DeviceAddr>,
    worst_malloc_ns: u64,
    /// What PyTorch's allocator took from the driver, where it is compared.
    segments: Segments,
}

impl<'a> Run<'a> {
    fn new(
        workload: &'a Workload,
        meter: &Arc<Metered<Arc<dyn Driver>>>,
        mut config: Config,
        options: Options<'a>,
    ) -> Result<Run<'a>, ReplayError> {
        let outstanding = Arc::new(Mutex::new(Outstanding::default()));
        let table = Arc::clone(&outstanding);
        let progress = Progress::External(Arc::new(move |last: Mark| lock(&table).reached(last)));
        let driver: Arc<dyn Driver> = Arc::clone(meter) as _;
        config.progress = progress;
        let allocator = Allocator::new(driver, config)?;
        // A block whose uses outlive its free is used by another stream, even if no memory was
        // ever asked for on that one.
        let unseen = usize::from(workload.streams.len() == 1 && any_lingers(&workload.requests));
        let streams = (0..workload.streams.len() + unseen)
            .map(|_| allocator.create_stream())
            .collect::<Result<_, _>>()?;
        let has_own_pool = allocator.inspect(|_| ()).is_some();
        let mut held = Vec::new();
        held.resize_with(workload.blocks as usize, || None);
        Ok(Run {
            workload,
            allocator,
            meter: Arc::clone(meter),
            options,
            auditor: None,
            outstanding,
            streams,
            held,
            decisions: Vec::with_capacity(workload.blocks as usize),
            has_own_pool,
            first_of_driver: None,
            worst_malloc_ns: 0,
            segments: Segments::default(),
        })
    }

    /// Makes every request, or stops where memory runs out: then the event and what was said.
    fn all(&mut self, tick: &mut dyn FnMut(usize)) -> Result<Option<(u64, String)>, ReplayError> {
        self.begin_as_recorded()?;
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
        let compared = self.options.compared_with.is_some();
        match request {
            // It was there when the recording began.
            Request::Alloc { block, .. } if self.held[block as usize].is_some() => {}
            Request::Alloc { block, size, stream } => {
                self.alloc(block, size, stream)?;
                self.note_segments(index);
            }
            Request::Free { block } => {
                let lingers = lingers(&self.workload.requests, index, block);
                if !(lingers && compared) {
                    self.free(block, lingers)?;
                }
            }
            Request::FreeCompleted { block } if self.held[block as usize].is_some() => {
                self.free(block, false)?;
            }
            Request::FreeCompleted { block } => self.uses_done(block),
            // The recorded allocator failed and took nothing; the program went on without.
            Request::Oom { .. } => {}
        }
        match &self.auditor {
            Some(auditor) => auditor.check(&self.allocator),
            None => Ok(()),
        }
    }

    // --- the recorded allocator's segments ---

    /// Lets PyTorch's allocator begin with the segments that were there when the recording began.
    fn begin_as_recorded(&mut self) -> Result<(), ReplayError> {
        let Some(recorded) = self.options.compared_with else { return Ok(()) };
        let sizes = self.workload.block_sizes();
        let mut segments = Vec::new();
        for earlier in &recorded.earlier {
            let known = self.workload.streams.iter().position(|&raw| raw == earlier.raw_stream);
            let stream = match known {
                Some(known) => self.streams[known],
                // Nothing was asked for on it since, but its memory is held.
                None => self.allocator.create_stream()?,
            };
            let held = earlier.blocks.iter().filter_map(|&block| {
                Some((self.workload.initial_address(block)?, sizes[block as usize]))
            });
            let held = held.collect();
            let (start, len) = (earlier.start, earlier.len);
            segments.push(TorchSegment { start, len, stream, held });
        }
        let restored = self.allocator.restore(&segments)?;
        let blocks = recorded.earlier.iter().zip(&segments).flat_map(|(earlier, segment)| {
            earlier.blocks.iter().map(|&block| (block, segment.stream))
        });
        for ((block, stream), allocation) in blocks.zip(restored) {
            let Some(allocation) = allocation else { continue };
            let size = sizes[block as usize];
            self.decisions.extend(allocation.pool_addr().map(PoolAddr::number));
            if let Some(auditor) = &mut self.auditor {
                auditor.allocated(&allocation, size, raw(&self.allocator, stream))?;
            }
            self.held[block as usize] = Some(Held { allocation, size, stream });
        }
        Ok(())
    }

    /// Gives unused memory back where the recorded allocator did: see `fidelity.rs`.
    fn empty_cache_as_recorded(&mut self, request: usize) -> Result<(), ReplayError> {
        let Some(recorded) = self.options.compared_with else { return Ok(()) };
        let by_itself = self.allocator.inspect_torch(|pool| {
            let config = pool.config();
            config.garbage_collection_threshold.is_some() || config.max_split_size.is_some()
        });
        if recorded.segments.gives_back(request) && by_itself == Some(false) {
            self.allocator.trim(Bytes::ZERO)?;
            self.note_segments(request);
        }
        Ok(())
    }

    fn note_segments(&mut self, request: usize) {
        if self.options.compared_with.is_some() {
            let segments = &mut self.segments;
            self.allocator.inspect_torch(|pool| {
                for &op in pool.performed() {
                    segments.performed(request, op);
                }
            });
        }
    }

    fn fidelity(&self, replayed: Bytes) -> Option<Fidelity> {
        let recorded = self.options.compared_with?;
        let peaks = Peaks { recorded: recorded.peak_reserved.unwrap_or_default(), replayed };
        Some(recorded.segments.compare(&self.segments, self.workload, peaks))
    }

    fn alloc(&mut self, block: u32, size: Bytes, stream: u32) -> Result<(), ReplayError> {
        let stream = self.streams[stream as usize];
        // Only while uses go on elsewhere does it matter whether this stream begins to wait.
        let before = (!lock(&self.outstanding).is_empty()).then(|| self.waits_and_now(stream));
        let begun_ns = self.meter.now_ns();
        let allocation = self.allocator.malloc(size, stream)?;
        let took_ns = self.meter.now_ns().saturating_sub(begun_ns);
        self.worst_malloc_ns = self.worst_malloc_ns.max(took_ns);
        if let Some((waits, Some(now))) = before
            && self.meter.snapshot().of(Call::Wait).calls > waits
        {
            lock(&self.outstanding).spread(now);
        }
        let decision = match allocation.pool_addr() {
            Some(spot) => spot.number(),
            None if self.has_own_pool => LEFT_TO_DRIVER,
            None => {
                let first = *self.first_of_driver.get_or_insert(allocation.addr());
                allocation.addr().number().wrapping_sub(first.number())
            }
        };
        self.decisions.push(decision);
        if let Some(auditor) = &mut self.auditor {
            auditor.allocated(&allocation, size, raw(&self.allocator, stream))?;
        }
        self.held[block as usize] = Some(Held { allocation, size, stream });
        Ok(())
    }

    fn waits_and_now(&self, stream: StreamId) -> (u64, Option<Mark>) {
        (self.meter.snapshot().of(Call::Wait).calls, self.now(stream))
    }

    fn now(&self, stream: StreamId) -> Option<Mark> {
        self.allocator.mark(stream)
    }

    fn free(&mut self, block: u32, lingers: bool) -> Result<(), ReplayError> {
        let held = self.held[block as usize].take();
        let Held { allocation, size, stream } = held.expect("a workload frees what it holds, once");
        let others: Vec<StreamId> = if lingers {
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
                // A stream that uses another one's memory was made to wait for that one.
                let mut outstanding = lock(&self.outstanding);
                outstanding.spread(now);
                outstanding.hold(block, now);
            }
            if !self.options.forget_uses {
                self.allocator.record_use(&allocation, other)?;
            }
        }
        if lingers && let Some(mark) = self.now(stream) {
            lock(&self.outstanding).hold(block, mark);
        }
        self.allocator.free(allocation, stream)?;
        Ok(())
    }

    fn uses_done(&mut self, block: u32) {
        lock(&self.outstanding).done(block);
        if let Some(auditor) = &mut self.auditor {
            auditor.uses_done(block);
        }
    }

    /// SHA-256 over every decision, in the order of the requests: the block's number in 4 bytes, its
    /// place in 8, both little-endian. The place is the pool's spot; where all is the driver's pool,
    /// the distance from its first block.
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

    fn close(mut self) -> Result<(), DriverError> {
        if let Some(auditor) = &mut self.auditor {
            auditor.finish();
        }
        self.allocator.close()
    }

    /// The event of a request; the first one for what was there before.
    fn event(&self, request: usize) -> u64 {
        self.workload.event_of(request).unwrap_or(0) as u64
    }

    fn at(&self, request: usize) -> String {
        match self.workload.event_of(request) {
            Some(event) => format!("event {event} of '{}'", self.workload.name),
            None => format!("a block held before the first event of '{}'", self.workload.name),
        }
    }
}

/// True if uses of `block`, freed at `index`, go on after it.
pub(crate) fn lingers(requests: &[Request], index: usize, block: u32) -> bool {
    requests.get(index + 1) != Some(&Request::FreeCompleted { block })
}

fn any_lingers(requests: &[Request]) -> bool {
    requests.iter().enumerate().any(|(index, request)| match *request {
        Request::Free { block } => lingers(requests, index, block),
        _ => false,
    })
}

/// The table is changed by single steps, so a panic elsewhere leaves it whole.
fn lock(outstanding: &Mutex<Outstanding>) -> MutexGuard<'_, Outstanding> {
    outstanding.lock().unwrap_or_else(PoisonError::into_inner)
}
