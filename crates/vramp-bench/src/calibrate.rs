//! The costs of a device's driver calls, as a cost file for the simulator.
//!
//! 1. [`run`] repeats each measurement for its share of the time and keeps the median, so that an
//!    interruption costs one sample.
//! 2. What a device cannot do, or has no memory for, keeps the H200's costs and is listed in
//!    [`Calibration::not_measured`].
//! 3. [`Calibration::to_toml`] is the file.
//!
//! It uses at most half of the memory that is free, and releases all of it, also after a failed call.
//! On a simulator it returns the simulator's own costs.
//!
//! Deliberately absent: kernels, which the driver's trait does not launch.

mod scratch;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use vramp::device::sim::{CardModel, CostError, CostSpec, CostTable, SizedCosts};
use vramp::device::{
    Call, CaptureMode, DeviceCopy, Driver, DriverError, DriverResult, HostSlice, MemoryLocation,
};
use vramp::{Bytes, DeviceAddr};
use vramp_core::AddrRange;
use vramp_host::{HostMemory, PageKind};

use crate::statistics::median;
use scratch::Scratch;

/// Handle sizes of single calls, in MiB.
const ALONE_MIB: [u64; 8] = [2, 8, 32, 128, 512, 1024, 2048, 4096];

/// Handle sizes of runs, in MiB.
const FURTHER_MIB: [u64; 5] = [2, 8, 32, 128, 512];

/// Memory in a run, in MiB, and the most handles of one.
const RUN_MIB: u64 = 2048;
const RUN_HANDLES: u64 = 1024;

/// Most handles that are held at once to measure a single call.
const HELD: u64 = 8;

/// Measurements, which share the time equally.
const MEASUREMENTS: u32 = 40;

/// Most and fewest repetitions of one on a card.
const REPETITIONS: std::ops::RangeInclusive<u32> = 3..=101;

/// Calls in one sample of a short call.
const BATCH: usize = 32;

/// Host memory in one call, and the sizes of copies over the bus: the difference of two sizes is the
/// time of the bytes alone.
const HOST: Bytes = Bytes::mib(64);
const HOST_PART: Bytes = Bytes::mib(16);

/// Why [`run`] failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// The device was lost, or its memory cannot be queried.
    #[error("cannot measure this device: {0}")]
    Driver(#[from] DriverError),
    /// The costs of the device are not those of a card.
    #[error("the measured costs make no table: {0}")]
    Costs(#[from] CostError),
}

/// Options of [`run`].
#[derive(Clone, Debug)]
pub struct Options {
    /// Time to measure for. A simulator needs less.
    pub duration: Duration,
    /// Date for the file.
    pub date: String,
}

/// The measured costs.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// The costs, as a cost file has them.
    pub spec: CostSpec,
    /// What keeps the H200's costs, and why.
    pub not_measured: Vec<NotMeasured>,
}

/// Costs that were not measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotMeasured {
    /// Key of the costs in the file.
    pub key: String,
    /// Reason, in words.
    pub reason: String,
}

impl Calibration {
    /// Returns the cost file, with a comment for what was not measured.
    pub fn to_toml(&self) -> String {
        let mut text = String::from(
            "# Costs of driver calls in microseconds, sizes in MiB, rates in GB/s: medians of `vramp \
             calibrate`.\n# context_mib is what was not free before the first allocation: add what the \
             libraries of a job take.\n# Use: vramp replay --device THIS_FILE.toml\n",
        );
        for NotMeasured { key, reason } in &self.not_measured {
            // A reason of a driver may have several lines.
            let reason = reason.replace('\n', " ");
            writeln!(text, "# Not measured, as on the H200: {key}: {reason}")
                .expect("writing to a string does not fail");
        }
        text + "\n" + &self.spec.to_toml()
    }
}

/// Measures the costs of a device.
///
/// # Errors
/// See [`CalibrateError`]. Other failures of calls leave costs unmeasured.
pub fn run(driver: &dyn Driver, options: &Options) -> Result<Calibration, CalibrateError> {
    let memory = driver.memory_info()?;
    let page = driver.info().limits.page;
    let mut calibrator = Calibrator {
        driver,
        room: Bytes::new(memory.free.count() / 2).round_down(page),
        share: options.duration / MEASUREMENTS,
        samples: BTreeMap::new(),
        not_measured: Vec::new(),
    };
    calibrator.measure()?;
    let mut spec = calibrator.spec();
    let info = driver.info();
    let card = info.name.trim_end_matches(" (simulated)");
    spec.name = short_name(card);
    spec.measured = !info.simulated;
    let how = if info.simulated { "computed by the simulator" } else { "measured" };
    let date = &options.date;
    spec.source = format!("{how} on {card}, driver {}, {date}, by vramp calibrate", info.driver);
    spec.memory_mib = Some(memory.total.count() >> 20);
    spec.context_mib = Some((memory.total.saturating_sub(memory.free)).count() >> 20);
    // What is written can be read.
    CostTable::new(spec.clone())?;
    Ok(Calibration { spec, not_measured: calibrator.not_measured })
}

fn short_name(card: &str) -> String {
    match CardModel::find(card) {
        Ok(model) => model.id.to_owned(),
        Err(_) => {
            let dashed = |c: char| if c.is_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
            card.chars().map(dashed).collect()
        }
    }
}

/// What a sample is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    /// One call on a handle of so many MiB.
    Alone(Call, u64),
    /// Each further handle.
    Further(Call, u64),
    Fixed(Call),
    /// Microseconds for each MiB, or GB/s.
    Other(Other),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Other {
    AllocHost,
    RegisterHost,
    FreeHost,
    CreateHostNuma,
    SetAccessHostNuma,
    ToDevice,
    ToHost,
    Fill,
    Copy,
    HostNumaCopy,
    GranuleMib,
    GrowthUs,
}

struct Calibrator<'a> {
    driver: &'a dyn Driver,
    /// Memory that may be used at one time.
    room: Bytes,
    /// Time for one measurement.
    share: Duration,
    samples: BTreeMap<Key, Vec<f64>>,
    not_measured: Vec<NotMeasured>,
}

type Samples = Vec<(Key, f64)>;

/// Times calls, in microseconds.
fn timed<T>(driver: &dyn Driver, call: impl FnOnce() -> DriverResult<T>) -> DriverResult<(f64, T)> {
    let begun = driver.now_ns();
    let done = call()?;
    Ok((driver.now_ns().saturating_sub(begun) as f64 / 1000.0, done))
}

impl<'a> Calibrator<'a> {
    fn measure(&mut self) -> Result<(), DriverError> {
        for mib in ALONE_MIB {
            self.repeat(&format!("sized at {mib} MiB"), |m| m.alone(mib))?;
            self.repeat(&format!("plain memory at {mib} MiB"), |m| m.plain_alone(mib))?;
        }
        for mib in FURTHER_MIB {
            self.repeat(&format!("runs of {mib} MiB"), |m| m.run(mib))?;
            self.repeat(&format!("runs of plain memory of {mib} MiB"), |m| m.plain_run(mib))?;
        }
        self.repeat("fixed: addresses", Measure::addresses)?;
        self.repeat("fixed: streams and events", Measure::streams_and_events)?;
        self.repeat("fixed: fill and copy", Measure::small_work)?;
        self.repeat("fixed: copies over the bus", Measure::small_copies)?;
        self.repeat("fixed: captures and graphs", Measure::graphs)?;
        self.repeat("fixed: export and import", Measure::exports)?;
        self.repeat("fixed: memory-info", |m| m.batch(Call::MemoryInfo, |d| d.memory_info()))?;
        self.repeat("pool", Measure::pool)?;
        self.repeat("pinned host memory", Measure::pinned)?;
        self.repeat("registered host memory", Measure::registered)?;
        self.repeat("host memory on a NUMA node", Measure::host_numa)?;
        self.repeat("rates of copies over the bus", Measure::bus)?;
        self.repeat("rates of fill and copy", Measure::on_card)?;
        Ok(())
    }

    /// Takes samples of one measurement. Every error but a lost device leaves it unmeasured.
    fn repeat(
        &mut self,
        key: &str,
        mut work: impl FnMut(&mut Measure<'a>) -> DriverResult<()>,
    ) -> Result<(), DriverError> {
        let begun = Instant::now();
        for round in 1..=*REPETITIONS.end() {
            let scratch = Scratch::new(self.driver);
            let mut measure = Measure { scratch, room: self.room, samples: Vec::new() };
            let done = work(&mut measure);
            let samples = std::mem::take(&mut measure.samples);
            drop(measure);
            match done {
                Ok(()) => {}
                Err(error) if error.is_device_lost() => return Err(error),
                Err(error) => {
                    // Samples of earlier rounds count: the memory may be gone since.
                    let reason = error.to_string();
                    self.not_measured.push(NotMeasured { key: key.to_owned(), reason });
                    break;
                }
            }
            for (key, value) in samples {
                self.samples.entry(key).or_default().push(value);
            }
            let enough = round >= *REPETITIONS.start() && begun.elapsed() >= self.share;
            // Times of a simulator do not vary.
            if enough || self.driver.info().simulated {
                break;
            }
        }
        Ok(())
    }

    fn median(&self, key: Key) -> Option<f64> {
        self.samples.get(&key).map(|values| median(values.clone()))
    }

    /// Returns the costs: the medians, and the H200's where there is none.
    fn spec(&mut self) -> CostSpec {
        let mut spec = CostTable::h200().spec().clone();
        self.leave_out("rates", ("host_numa_kernel", "the driver's trait launches no kernels"));
        for call in CostSpec::sized_calls() {
            let curve = |sizes: &[u64], key: &dyn Fn(u64) -> Key| -> Vec<(f64, f64)> {
                let cost = |&mib: &u64| Some((mib as f64, self.median(key(mib))?.max(0.001)));
                sizes.iter().filter_map(cost).collect()
            };
            let alone = curve(&ALONE_MIB, &|mib| Key::Alone(call, mib));
            let further = curve(&FURTHER_MIB, &|mib| Key::Further(call, mib));
            let costs = spec.sized.get_mut(&call).expect("the H200's table is complete");
            let h200 = std::mem::take(costs);
            let measured = [alone.is_empty(), further.is_empty()];
            *costs = SizedCosts {
                alone: if measured[0] { h200.alone } else { alone },
                further: if measured[1] { h200.further } else { further },
            };
            for (_, list) in measured.into_iter().zip(["alone", "further"]).filter(|(no, _)| *no) {
                self.leave_out("sized", (&format!("{call}.{list}"), "no size was measured"));
            }
        }
        for call in CostSpec::fixed_calls() {
            match self.median(Key::Fixed(call)) {
                Some(us) => *spec.fixed.entry(call).or_default() = us.max(0.0),
                None => {
                    let reason = match call {
                        Call::RevokeAccess | Call::CopyPeer => "it needs a second device",
                        Call::ExportDmaBuf | Call::AdoptMemory => "no program here uses it",
                        _ => "the device lacks it, or has too little free memory",
                    };
                    self.leave_out("fixed", (call.name(), reason));
                }
            }
        }
        let mut granule_mib = spec.pool.granule_mib as f64;
        let (per_mib, rates, pool) = (&mut spec.per_mib, &mut spec.rates, &mut spec.pool);
        for (other, key, value) in [
            (Other::AllocHost, "per_mib.alloc-host", &mut per_mib.alloc_host),
            (Other::RegisterHost, "per_mib.register-host", &mut per_mib.register_host),
            (Other::FreeHost, "per_mib.free-host", &mut per_mib.free_host),
            (Other::CreateHostNuma, "per_mib.create-host-numa", &mut per_mib.create_host_numa),
            (
                Other::SetAccessHostNuma,
                "per_mib.set-access-host-numa",
                &mut per_mib.set_access_host_numa,
            ),
            (Other::ToDevice, "rates.to_device", &mut rates.to_device),
            (Other::ToHost, "rates.to_host", &mut rates.to_host),
            (Other::Fill, "rates.fill", &mut rates.fill),
            (Other::Copy, "rates.copy", &mut rates.copy),
            (Other::HostNumaCopy, "rates.host_numa_copy", &mut rates.host_numa_copy),
            (Other::GranuleMib, "pool.granule_mib", &mut granule_mib),
            (Other::GrowthUs, "pool.growth_us", &mut pool.growth_us),
        ] {
            match self.median(Key::Other(other)) {
                Some(measured) => *value = measured.max(0.0),
                None => {
                    let reason = "the device lacks it, or has too little free memory".to_owned();
                    self.not_measured.push(NotMeasured { key: key.to_owned(), reason });
                }
            }
        }
        spec.pool.granule_mib = granule_mib as u64;
        spec
    }

    fn leave_out(&mut self, table: &str, (key, reason): (&str, &str)) {
        let key = format!("{table}.{key}");
        self.not_measured.push(NotMeasured { key, reason: reason.to_owned() });
    }
}

/// One round of one measurement.
struct Measure<'a> {
    scratch: Scratch<'a>,
    room: Bytes,
    samples: Samples,
}

impl<'a> Measure<'a> {
    fn driver(&self) -> &'a dyn Driver {
        self.scratch.driver
    }

    fn note(&mut self, key: Key, us: f64) {
        self.samples.push((key, us));
    }

    /// Returns the size in bytes if a handle of it is possible and there is room for so many.
    fn handle(&self, mib: u64, count: u64) -> Option<Bytes> {
        let len = Bytes::mib(mib);
        let possible = len.is_multiple_of(self.driver().info().limits.page);
        (possible && len * count <= self.room).then_some(len)
    }

    /// Returns the size in bytes and how many handles of it to hold at once, if one is possible.
    fn held(&self, mib: u64) -> Option<(Bytes, u64)> {
        let len = self.handle(mib, 1)?;
        Some((len, (self.room.count() / len.count()).min(HELD)))
    }

    /// Returns how many handles of a size a run has.
    fn handles_in_run(&self, mib: u64) -> u64 {
        let room = RUN_MIB.min(self.room.count() >> 20);
        (room / mib).min(RUN_HANDLES)
    }

    // --- device memory ---

    /// One call of each kind on one handle, never two of a kind in a row.
    ///
    /// A card clears memory that was released before it is created again: on an H200 a creation of
    /// 4 GiB then took 13 ms instead of 30 us. So several are made and held, and the median counts.
    fn alone(&mut self, mib: u64) -> DriverResult<()> {
        let Some((len, held)) = self.held(mib) else { return Ok(()) };
        let range = self.scratch.reserve(len)?;
        let driver = self.driver();
        let mut times = Vec::new();
        for _ in 0..held {
            driver.memory_info()?;
            times.push(timed(driver, || self.scratch.create(len, MemoryLocation::Device))?.0);
        }
        self.note(Key::Alone(Call::Create, mib), median(times));
        let us = timed(driver, || self.scratch.map(range.start, len))?.0;
        self.note(Key::Alone(Call::Map, mib), us);
        let us = timed(driver, || driver.set_access(range, &[]))?.0;
        self.note(Key::Alone(Call::SetAccess, mib), us);
        let us = timed(driver, || self.scratch.unmap(range))?.0;
        self.note(Key::Alone(Call::Unmap, mib), us);
        let us = timed(driver, || self.scratch.release())?.0;
        self.note(Key::Alone(Call::Release, mib), us);
        (1..held).try_for_each(|_| self.scratch.release())
    }

    /// Builds and tears down a range of several handles.
    fn run(&mut self, mib: u64) -> DriverResult<()> {
        let count = self.handles_in_run(mib);
        let Some(len) = self.handle(mib, count).filter(|_| count >= 2) else { return Ok(()) };
        let driver = self.driver();
        // What one call on one handle costs, to subtract.
        self.alone(mib)?;
        let alone = std::mem::take(&mut self.samples);
        let alone = |call| {
            let found = alone.iter().find(|(key, _)| *key == Key::Alone(call, mib));
            found.map_or(0.0, |(_, us)| *us)
        };
        let further = (count - 1) as f64;
        let range = self.scratch.reserve(len * count)?;
        self.scratch.create(len, MemoryLocation::Device)?;
        self.each_further(Call::Create, mib, count, |scratch, _| {
            scratch.create(len, MemoryLocation::Device)
        })?;
        self.scratch.map(range.start, len)?;
        self.each_further(Call::Map, mib, count, |scratch, index| {
            scratch.map(range.start + len * index, len)
        })?;
        let us = timed(driver, || driver.set_access(range, &[]))?.0;
        self.note(Key::Further(Call::SetAccess, mib), (us - alone(Call::SetAccess)) / further);
        let us = timed(driver, || self.scratch.unmap(range))?.0;
        self.note(Key::Further(Call::Unmap, mib), (us - alone(Call::Unmap)) / further);
        self.scratch.release()?;
        self.each_further(Call::Release, mib, count, |scratch, _| scratch.release())
    }

    /// Times each call of a run after the first and notes the median, because a single one may wait
    /// for memory to be cleared.
    fn each_further(
        &mut self,
        call: Call,
        mib: u64,
        count: u64,
        mut make: impl FnMut(&mut Scratch<'a>, u64) -> DriverResult<()>,
    ) -> DriverResult<()> {
        let driver = self.driver();
        let times = (1..count)
            .map(|index| Ok(timed(driver, || make(&mut self.scratch, index))?.0))
            .collect::<DriverResult<Vec<f64>>>()?;
        self.note(Key::Further(call, mib), median(times));
        Ok(())
    }

    fn plain_alone(&mut self, mib: u64) -> DriverResult<()> {
        let Some((len, held)) = self.held(mib) else { return Ok(()) };
        let driver = self.driver();
        let mut times = Vec::new();
        for _ in 0..held {
            driver.memory_info()?;
            times.push(timed(driver, || self.scratch.alloc(len))?.0);
        }
        self.note(Key::Alone(Call::AllocMemory, mib), median(times));
        let us = timed(driver, || self.scratch.free())?.0;
        self.note(Key::Alone(Call::FreeMemory, mib), us);
        (1..held).try_for_each(|_| self.scratch.free())
    }

    fn plain_run(&mut self, mib: u64) -> DriverResult<()> {
        let count = self.handles_in_run(mib).min(BATCH as u64);
        let Some(len) = self.handle(mib, count).filter(|_| count >= 2) else { return Ok(()) };
        self.scratch.alloc(len)?;
        self.each_further(Call::AllocMemory, mib, count, |scratch, _| scratch.alloc(len))?;
        self.scratch.free()?;
        self.each_further(Call::FreeMemory, mib, count, |scratch, _| scratch.free())
    }

    // --- short calls ---

    /// Times a batch of equal calls.
    fn batch<T>(
        &mut self,
        call: Call,
        make: impl Fn(&dyn Driver) -> DriverResult<T>,
    ) -> DriverResult<()> {
        let driver = self.driver();
        self.batch_mut(call, |_| make(driver).map(drop))
    }

    fn batch_mut(
        &mut self,
        call: Call,
        mut make: impl FnMut(&mut Scratch<'a>) -> DriverResult<()>,
    ) -> DriverResult<()> {
        let driver = self.driver();
        let (us, ()) = timed(driver, || (0..BATCH).try_for_each(|_| make(&mut self.scratch)))?;
        self.note(Key::Fixed(call), us / BATCH as f64);
        Ok(())
    }

    fn addresses(&mut self) -> DriverResult<()> {
        let page = self.driver().info().limits.page;
        self.batch_mut(Call::Reserve, |scratch| scratch.reserve(page).map(drop))?;
        self.batch_mut(Call::FreeAddresses, Scratch::free_addresses)
    }

    fn exports(&mut self) -> DriverResult<()> {
        if !self.driver().info().capabilities.posix_fd {
            return Ok(());
        }
        let handle = self.scratch.create_exportable()?;
        self.batch(Call::Export, |d| d.export(handle))?;
        let exported = self.driver().export(handle)?;
        self.batch_mut(Call::Import, |scratch| scratch.import(&exported))?;
        (0..=BATCH).try_for_each(|_| self.scratch.release())
    }

    fn streams_and_events(&mut self) -> DriverResult<()> {
        self.batch_mut(Call::CreateStream, |scratch| scratch.stream().map(drop))?;
        self.batch_mut(Call::CreateEvent, |scratch| scratch.event().map(drop))?;
        let (stream, event) = (self.scratch.stream()?, self.scratch.event()?);
        self.batch(Call::Record, |d| d.record(event, stream))?;
        self.driver().synchronize_stream(stream)?;
        self.batch(Call::Query, |d| d.query(event))?;
        self.batch(Call::Wait, |d| d.wait(stream, event))?;
        self.driver().synchronize_stream(stream)?;
        self.batch(Call::SynchronizeEvent, |d| d.synchronize_event(event))?;
        self.batch(Call::SynchronizeStream, |d| d.synchronize_stream(stream))?;
        self.batch(Call::IsCapturing, |d| d.is_capturing(stream))?;
        self.batch_mut(Call::DestroyEvent, Scratch::destroy_event)?;
        self.batch_mut(Call::DestroyStream, Scratch::destroy_stream)
    }

    fn small_work(&mut self) -> DriverResult<()> {
        let Some(range) = self.plain(2)? else { return Ok(()) };
        let stream = self.scratch.stream()?;
        let (len, half) = (Bytes::kib(4), Bytes::kib(64));
        let small = AddrRange::new(range.start, len);
        self.batch(Call::Fill, |d| d.fill(stream, small, 1))?;
        let copy = DeviceCopy { from: range.start, to: range.start + half, len };
        self.batch(Call::Copy, |d| d.copy(stream, copy))?;
        self.driver().synchronize_stream(stream)
    }

    fn small_copies(&mut self) -> DriverResult<()> {
        let Some(range) = self.plain(2)? else { return Ok(()) };
        let stream = self.scratch.stream()?;
        let len = Bytes::kib(4);
        let buffer = self.scratch.pin(Bytes::mib(2))?;
        let slice = HostSlice { buffer, offset: Bytes::ZERO, len };
        self.batch(Call::CopyToDevice, |d| d.copy_to_device(stream, slice, range.start))?;
        self.batch(Call::CopyToHost, |d| d.copy_to_host(stream, range.start, slice))?;
        self.driver().synchronize_stream(stream)?;
        self.batch(Call::AccessHost, |d| d.write_host(buffer, Bytes::ZERO, &[1; 64]))
    }

    fn graphs(&mut self) -> DriverResult<()> {
        let driver = self.driver();
        let Some(range) = self.plain(2)? else { return Ok(()) };
        let stream = self.scratch.stream()?;
        let range = AddrRange::new(range.start, Bytes::kib(4));
        let us = timed(driver, || self.scratch.begin_capture(stream, CaptureMode::Relaxed))?.0;
        self.note(Key::Fixed(Call::BeginCapture), us);
        driver.fill(stream, range, 1)?;
        let (us, state) = timed(driver, || driver.capture_info(stream))?;
        self.note(Key::Fixed(Call::CaptureInfo), us);
        if let Some(&node) = state.as_ref().and_then(|state| state.dependencies.first()) {
            let us = timed(driver, || driver.node_dependencies(node))?.0;
            self.note(Key::Fixed(Call::NodeDependencies), us);
        }
        let (us, graph) = timed(driver, || self.scratch.end_capture(stream))?;
        self.note(Key::Fixed(Call::EndCapture), us);
        self.batch(Call::GraphNodes, |d| d.graph_nodes(graph))?;
        let (us, exec) = timed(driver, || self.scratch.instantiate(graph))?;
        self.note(Key::Fixed(Call::Instantiate), us);
        self.batch(Call::LaunchGraph, |d| d.launch_graph(exec, stream))?;
        driver.synchronize_stream(stream)?;
        let us = timed(driver, || self.scratch.destroy_exec())?.0;
        self.note(Key::Fixed(Call::DestroyGraphExec), us);
        let us = timed(driver, || self.scratch.destroy_graph())?.0;
        self.note(Key::Fixed(Call::DestroyGraph), us);
        Ok(())
    }

    /// The device's own pool: growth, hits, and queries.
    fn pool(&mut self) -> DriverResult<()> {
        let driver = self.driver();
        if driver.info().limits.pool_step > self.room {
            return Ok(());
        }
        let stream = self.scratch.stream()?;
        // Also where this fails the pool is trimmed.
        self.scratch.keep_pool(Bytes::new(u64::MAX))?;
        self.batch(Call::SetPoolThreshold, |d| d.set_pool_threshold(Bytes::new(u64::MAX)))?;
        driver.trim_pool(Bytes::ZERO)?;
        self.batch(Call::TrimPool, |d| d.trim_pool(Bytes::ZERO))?;
        self.batch(Call::PoolUsage, |d| d.pool_usage())?;
        let before = driver.pool_usage()?.reserved;
        self.scratch.malloc_async(stream, Bytes::kib(4))?;
        let granule = driver.pool_usage()?.reserved.saturating_sub(before);
        self.scratch.free_async()?;
        let mut hits = [0.0; 2];
        for _ in 0..BATCH {
            hits[0] += timed(driver, || self.scratch.malloc_async(stream, Bytes::kib(4)))?.0;
            hits[1] += timed(driver, || self.scratch.free_async())?.0;
        }
        let [malloc, free] = hits.map(|us| us / BATCH as f64);
        self.note(Key::Fixed(Call::MallocAsync), malloc);
        self.note(Key::Fixed(Call::FreeAsync), free);
        driver.synchronize_stream(stream)?;
        driver.trim_pool(Bytes::ZERO)?;
        let count = 8;
        if granule.count() >> 20 > 0 && granule * count <= self.room {
            self.note(Key::Other(Other::GranuleMib), (granule.count() >> 20) as f64);
            let us = timed(driver, || self.scratch.malloc_async(stream, granule * count))?.0;
            self.note(Key::Other(Other::GrowthUs), (us - malloc) / count as f64);
            self.scratch.free_async()?;
        }
        driver.synchronize_stream(stream)
    }

    // --- host memory ---

    fn pinned(&mut self) -> DriverResult<()> {
        let driver = self.driver();
        let us = timed(driver, || self.scratch.pin(HOST))?.0;
        self.note(Key::Other(Other::AllocHost), per_mib(us, HOST));
        let us = timed(driver, || self.scratch.unpin())?.0;
        self.note(Key::Other(Other::FreeHost), per_mib(us, HOST));
        Ok(())
    }

    fn registered(&mut self) -> DriverResult<()> {
        let Ok(memory) = HostMemory::new(HOST, None, PageKind::Transparent) else { return Ok(()) };
        // Touched before, or the kernel's time to find the pages would count.
        let mut at = Bytes::ZERO;
        while at < HOST {
            if memory.write(at, &[1]).is_err() {
                return Ok(());
            }
            at += Bytes::kib(4);
        }
        let driver = self.driver();
        let us = timed(driver, || self.scratch.register(&memory))?.0;
        self.note(Key::Other(Other::RegisterHost), per_mib(us, HOST));
        self.scratch.unpin()
    }

    /// Host memory that is mapped for the device, and copies from it.
    fn host_numa(&mut self) -> DriverResult<()> {
        let driver = self.driver();
        let node = driver.info().host_numa.unwrap_or(0);
        if HOST * 2 > self.room {
            return Ok(());
        }
        let Some(device) = self.plain(HOST.count() >> 20)? else { return Ok(()) };
        let range = self.scratch.reserve(HOST)?;
        // What set-access costs for device memory of that size.
        self.scratch.create(HOST, MemoryLocation::Device)?;
        self.scratch.map(range.start, HOST)?;
        let on_card = timed(driver, || driver.set_access(range, &[]))?.0;
        self.scratch.unmap(range)?;
        self.scratch.release()?;
        let us = timed(driver, || self.scratch.create(HOST, MemoryLocation::HostNuma(node)))?.0;
        self.note(Key::Other(Other::CreateHostNuma), per_mib(us, HOST));
        self.scratch.map(range.start, HOST)?;
        let us = timed(driver, || driver.set_access(range, &[]))?.0;
        self.note(Key::Other(Other::SetAccessHostNuma), per_mib(us - on_card, HOST));
        let stream = self.scratch.stream()?;
        self.rate(Other::HostNumaCopy, HOST_PART, HOST, |d, len| {
            d.copy(stream, DeviceCopy { from: range.start, to: device.start, len })?;
            d.synchronize_stream(stream)
        })
    }

    // --- rates ---

    fn bus(&mut self) -> DriverResult<()> {
        let Some(range) = self.plain(HOST.count() >> 20)? else { return Ok(()) };
        let stream = self.scratch.stream()?;
        let buffer = self.scratch.pin(HOST)?;
        let slice = |len| HostSlice { buffer, offset: Bytes::ZERO, len };
        self.rate(Other::ToDevice, HOST_PART, HOST, |d, len| {
            d.copy_to_device(stream, slice(len), range.start)?;
            d.synchronize_stream(stream)
        })?;
        self.rate(Other::ToHost, HOST_PART, HOST, |d, len| {
            d.copy_to_host(stream, range.start, slice(len))?;
            d.synchronize_stream(stream)
        })
    }

    fn on_card(&mut self) -> DriverResult<()> {
        let whole = (self.room.count() >> 20).clamp(4, 2048) / 4 * 4;
        let Some(range) = self.plain(whole)? else { return Ok(()) };
        let stream = self.scratch.stream()?;
        let (quarter, half) = (Bytes::mib(whole / 4), Bytes::mib(whole / 2));
        self.rate(Other::Fill, quarter, range.len, |d, len| {
            d.fill(stream, AddrRange::new(range.start, len), 1)?;
            d.synchronize_stream(stream)
        })?;
        self.rate(Other::Copy, quarter, half, |d, len| {
            let to: DeviceAddr = range.start + half;
            d.copy(stream, DeviceCopy { from: range.start, to, len })?;
            d.synchronize_stream(stream)
        })
    }

    /// Notes a rate: the bytes that a larger size has more, by the time that it takes more.
    fn rate(
        &mut self,
        key: Other,
        less: Bytes,
        more: Bytes,
        work: impl Fn(&dyn Driver, Bytes) -> DriverResult<()>,
    ) -> DriverResult<()> {
        let driver = self.driver();
        // The first access of memory may cost more.
        work(driver, more)?;
        let short = timed(driver, || work(driver, less))?.0;
        let long = timed(driver, || work(driver, more))?.0;
        if long > short {
            let ns = (long - short) * 1000.0;
            self.note(Key::Other(key), (more - less).count() as f64 / ns);
        }
        Ok(())
    }

    /// Allocates plain memory of so many MiB. `None` if there is no room.
    fn plain(&mut self, mib: u64) -> DriverResult<Option<AddrRange>> {
        let len = Bytes::mib(mib);
        if len > self.room {
            return Ok(None);
        }
        self.scratch.alloc(len)?;
        Ok(Some(AddrRange::new(self.scratch.last(), len)))
    }
}

fn per_mib(us: f64, len: Bytes) -> f64 {
    us / (len.count() >> 20) as f64
}
