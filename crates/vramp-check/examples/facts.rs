//! Measures the numbers of the cost table and the rules of capture on a card, and prints JSON.
//!
//! `cargo run --release -p vramp-check --example facts [ordinal]`. Exits with 1 if a rule does not hold. Times are
//! medians in microseconds of the host clock, of single calls unless a group is named.

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use serde::Serialize;
use vramp_core::{AddrRange, Bytes, DeviceAddr};
use vramp_cuda::CudaDriver;
use vramp_driver::{
    CaptureMode, Driver, DriverError, ErrorKind, HostMemory, MemoryProperties, Stream,
};
use vramp_host::PageKind;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Number of times that each single call is timed.
const REPEATS: usize = 31;
/// Memory that each group builds.
const GROUP: Bytes = Bytes::gib(2);

#[derive(Serialize)]
struct Facts {
    card: String,
    driver: String,
    page_bytes: u64,
    recommended_page_bytes: u64,
    calls_us: Vec<(&'static str, f64)>,
    one_handle: Vec<HandleCosts>,
    two_gib_in_handles: Vec<HandleCosts>,
    pinning_ms: Vec<Pinning>,
    capture: Vec<Probe>,
}

/// Time to pin memory and to free it.
#[derive(Serialize)]
struct Pinning {
    bytes: u64,
    /// Allocated by the driver.
    alloc_host: f64,
    free_host: f64,
    /// Touched by eight threads, registered, unregistered.
    large_pages: [f64; 3],
    small_pages: [f64; 3],
}

/// Costs of the calls on handles of one size.
#[derive(Serialize)]
struct HandleCosts {
    handle_bytes: u64,
    create_us: f64,
    map_us: f64,
    set_access_us: f64,
    unmap_us: f64,
    release_us: f64,
}

/// Result of one call during a capture.
#[derive(Serialize)]
struct Probe {
    mode: String,
    thread: &'static str,
    call: &'static str,
    legal: bool,
    /// `None` if the design does not rely on the result.
    expected: Option<bool>,
    capture_survived: bool,
}

impl Probe {
    fn holds(&self) -> bool {
        self.expected
            .is_none_or(|expected| expected == self.legal && expected == self.capture_survived)
    }
}

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

fn run() -> Outcome<ExitCode> {
    let ordinal = std::env::args().nth(1).map_or(Ok(0), |text| text.parse())?;
    let driver = CudaDriver::open(ordinal)?;
    let info = driver.info().clone();
    let room = driver.memory_info()?.free;
    let facts = Facts {
        card: info.name,
        driver: info.driver,
        page_bytes: info.limits.page.count(),
        recommended_page_bytes: info.limits.recommended_page.count(),
        calls_us: small_calls(&driver)?,
        one_handle: [2, 32, 128, 512, 1024, 4096]
            .into_iter()
            .map(Bytes::mib)
            .filter(|handle| *handle <= room)
            .map(|handle| handle_costs(&driver, handle, 1, 11))
            .collect::<Outcome<_>>()?,
        two_gib_in_handles: [2, 8, 32, 128, 512, 2048]
            .into_iter()
            .map(|mib| {
                let handle = Bytes::mib(mib);
                handle_costs(&driver, handle, GROUP.count() / handle.count(), 5)
            })
            .collect::<Outcome<_>>()?,
        pinning_ms: [Bytes::mib(128), Bytes::gib(1)]
            .into_iter()
            .map(|len| pinning(&driver, len))
            .collect::<Outcome<_>>()?,
        capture: capture_probes(&driver)?,
    };
    println!("{}", serde_json::to_string_pretty(&facts)?);
    let broken: Vec<&Probe> = facts.capture.iter().filter(|probe| !probe.holds()).collect();
    for probe in &broken {
        eprintln!("does not hold: {}", serde_json::to_string(probe)?);
    }
    Ok(if broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn timed<T, E: Into<Box<dyn Error>>>(
    times: &mut Vec<f64>,
    call: impl FnOnce() -> Result<T, E>,
) -> Outcome<T> {
    let start = Instant::now();
    let result = call();
    times.push(start.elapsed().as_nanos() as f64 / 1000.0);
    result.map_err(Into::into)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

fn pinning(driver: &CudaDriver, len: Bytes) -> Outcome<Pinning> {
    const TIMES: usize = 5;
    let (mut alloc, mut free) = (Vec::new(), Vec::new());
    for _ in 0..TIMES {
        let buffer = timed(&mut alloc, || driver.alloc_host(len))?;
        timed(&mut free, || driver.free_host(buffer))?;
    }
    let own = |pages| -> Outcome<[f64; 3]> {
        let mut times: [Vec<f64>; 3] = Default::default();
        for _ in 0..TIMES {
            let memory = timed(&mut times[0], || {
                HostMemory::new(len, None, pages).inspect(|memory| memory.prefault(8))
            })?;
            let buffer = timed(&mut times[1], || driver.register_host(&memory))?;
            timed(&mut times[2], || driver.free_host(buffer))?;
        }
        Ok(times.map(|times| median(times) / 1000.0))
    };
    Ok(Pinning {
        bytes: len.count(),
        alloc_host: median(alloc) / 1000.0,
        free_host: median(free) / 1000.0,
        large_pages: own(PageKind::Transparent)?,
        small_pages: own(PageKind::Small)?,
    })
}

fn small_calls(driver: &CudaDriver) -> Outcome<Vec<(&'static str, f64)>> {
    let page = driver.info().limits.page;
    let stream = driver.create_stream()?;
    let other = driver.create_stream()?;
    let mut times: [Vec<f64>; 11] = Default::default();
    driver.set_pool_threshold(Bytes::gib(8))?;
    for len in [Bytes::mib(2), Bytes::mib(2)] {
        let at = driver.malloc_async(stream, len)?;
        driver.free_async(stream, at)?;
    }
    for _ in 0..REPEATS {
        let at = timed(&mut times[0], || driver.reserve(Bytes::tib(8), page))?;
        let range = AddrRange::new(at, Bytes::tib(8));
        timed(&mut times[1], || driver.free_addresses(range))?;
        let event = timed(&mut times[2], || driver.create_event())?;
        timed(&mut times[3], || driver.record(event, stream))?;
        timed(&mut times[4], || driver.wait(other, event))?;
        timed(&mut times[5], || driver.query(event))?;
        driver.synchronize_event(event)?;
        timed(&mut times[6], || driver.destroy_event(event))?;
        let at = timed(&mut times[7], || driver.malloc_async(stream, Bytes::mib(2)))?;
        timed(&mut times[8], || driver.free_async(stream, at))?;
        timed(&mut times[9], || driver.memory_info())?;
        timed(&mut times[10], || driver.pool_usage())?;
    }
    driver.synchronize_stream(stream)?;
    driver.trim_pool(Bytes::ZERO)?;
    driver.destroy_stream(stream)?;
    driver.destroy_stream(other)?;
    let names = [
        "reserve-8tib",
        "free-addresses",
        "create-event",
        "record",
        "wait",
        "query",
        "destroy-event",
        "malloc-async",
        "free-async",
        "memory-info",
        "pool-usage",
    ];
    Ok(names.into_iter().zip(times.map(median)).collect())
}

/// `count` handles of `len` each: created, mapped side by side, opened, unmapped and released.
///
/// Set-access and unmap are one call over the whole range; the others are summed over the handles.
fn handle_costs(
    driver: &CudaDriver,
    len: Bytes,
    count: u64,
    repeats: usize,
) -> Outcome<HandleCosts> {
    let whole = len * count;
    let at = driver.reserve(whole, driver.info().limits.page)?;
    let range = AddrRange::new(at, whole);
    let mut times: [Vec<f64>; 5] = Default::default();
    for _ in 0..repeats {
        let handles = timed(&mut times[0], || {
            (0..count)
                .map(|_| driver.create(len, MemoryProperties::DEVICE))
                .collect::<Result<Vec<_>, _>>()
        })?;
        timed(&mut times[1], || {
            (0..).zip(&handles).try_for_each(|(nth, &handle)| driver.map(at + len * nth, handle))
        })?;
        timed(&mut times[2], || driver.set_access(range, &[]))?;
        timed(&mut times[3], || driver.unmap(range))?;
        timed(&mut times[4], || handles.iter().try_for_each(|&handle| driver.release(handle)))?;
    }
    driver.free_addresses(range)?;
    let [create_us, map_us, set_access_us, unmap_us, release_us] = times.map(median);
    let handle_bytes = len.count();
    Ok(HandleCosts { handle_bytes, create_us, map_us, set_access_us, unmap_us, release_us })
}

/// A call that is made during a capture.
struct Trial {
    call: &'static str,
    /// Whether the design relies on it being legal, in this mode and from this thread.
    expected: fn(CaptureMode, Thread) -> Option<bool>,
    run: fn(&CudaDriver, Rig) -> Result<(), DriverError>,
}

#[derive(Clone, Copy, PartialEq)]
enum Thread {
    Capturing,
    Other,
}

/// Objects that the trials use, created before the capture began.
#[derive(Clone, Copy)]
struct Rig {
    at: DeviceAddr,
    page: Bytes,
    beside: Stream,
    event: vramp_driver::Event,
}

fn always(_: CaptureMode, _: Thread) -> Option<bool> {
    Some(true)
}

fn unknown(_: CaptureMode, _: Thread) -> Option<bool> {
    None
}

const TRIALS: [Trial; 7] = [
    Trial {
        call: "create, map, set-access, unmap, release",
        expected: always,
        run: |driver, rig| {
            let range = AddrRange::new(rig.at, rig.page);
            let handle = driver.create(rig.page, MemoryProperties::DEVICE)?;
            driver.map(rig.at, handle)?;
            driver.set_access(range, &[])?;
            driver.unmap(range)?;
            driver.release(handle)
        },
    },
    Trial {
        call: "record on another stream",
        expected: always,
        run: |driver, rig| driver.record(rig.event, rig.beside),
    },
    Trial { call: "query", expected: always, run: |driver, rig| driver.query(rig.event).map(drop) },
    Trial {
        call: "query, thread relaxed",
        expected: unknown,
        run: |driver, rig| {
            driver.relaxed(|| driver.query(rig.event).map(drop)).unwrap_or_else(|error| {
                eprintln!("cannot set the capture mode of the thread: {error}");
                driver.query(rig.event).map(drop)
            })
        },
    },
    Trial {
        call: "alloc-host, free-host",
        expected: unknown,
        run: |driver, rig| driver.free_host(driver.alloc_host(rig.page)?),
    },
    Trial {
        call: "register-host, free-host",
        expected: always,
        run: |driver, rig| {
            let memory = HostMemory::new(rig.page, None, PageKind::Transparent);
            let memory = memory.expect("the host has a page");
            driver.free_host(driver.register_host(&memory)?)
        },
    },
    Trial {
        call: "malloc-async, free-async on another stream",
        expected: unknown,
        run: |driver, rig| {
            let at = driver.malloc_async(rig.beside, rig.page)?;
            driver.free_async(rig.beside, at)
        },
    },
];

fn capture_probes(driver: &CudaDriver) -> Outcome<Vec<Probe>> {
    let page = driver.info().limits.page;
    let at = driver.reserve(page * 2, page)?;
    let kept = driver.create(page, MemoryProperties::DEVICE)?;
    let target = AddrRange::new(at + page, page);
    driver.map(target.start, kept)?;
    driver.set_access(target, &[])?;
    let captured = driver.create_stream()?;
    let beside = driver.create_stream()?;
    let event = driver.create_event()?;
    driver.record(event, beside)?;
    driver.synchronize_event(event)?;
    let rig = Rig { at, page, beside, event };

    let mut probes = Vec::new();
    for mode in CaptureMode::ALL {
        for thread in [Thread::Capturing, Thread::Other] {
            for trial in &TRIALS {
                driver.begin_capture(captured, mode)?;
                driver.fill(captured, target, 1)?;
                let outcome = match thread {
                    Thread::Capturing => (trial.run)(driver, rig),
                    Thread::Other => on_another_thread(|| (trial.run)(driver, rig)),
                };
                let capture_survived = match driver.end_capture(captured) {
                    Ok(graph) => {
                        let exec = driver.instantiate(graph)?;
                        driver.launch_graph(exec, captured)?;
                        driver.synchronize_stream(captured)?;
                        driver.destroy_graph_exec(exec)?;
                        driver.destroy_graph(graph)?;
                        true
                    }
                    Err(error) if error.kind == ErrorKind::Capturing => false,
                    Err(error) => return Err(error.into()),
                };
                let legal = match outcome {
                    Ok(()) => true,
                    Err(error) if error.kind == ErrorKind::Capturing => false,
                    Err(error) => return Err(error.into()),
                };
                probes.push(Probe {
                    mode: format!("{mode:?}"),
                    thread: if thread == Thread::Capturing {
                        "the capturing one"
                    } else {
                        "another"
                    },
                    call: trial.call,
                    legal,
                    expected: (trial.expected)(mode, thread),
                    capture_survived,
                });
            }
        }
    }
    driver.unmap(target)?;
    driver.release(kept)?;
    driver.free_addresses(AddrRange::new(at, page * 2))?;
    Ok(probes)
}

fn on_another_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        scope.spawn(work).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
