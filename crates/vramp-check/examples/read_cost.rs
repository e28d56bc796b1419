//! Reads a trace, and prints its contents, and the time and the peak memory that it took:
//! `cargo run --release -p vramp-check --example read_cost -- run.pickle.gz [out.vtrace]`.

use std::error::Error;
use std::fs::File;
use std::io::BufWriter;
use std::time::Instant;

use vramp_trace::{ReadLimits, Workload, read_trace};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let path = arguments.next().ok_or("usage: read_cost TRACE [OUT.vtrace]")?;

    let start = Instant::now();
    let trace = read_trace(path, &ReadLimits::default())?;
    println!(
        "{}: {} events, {} devices, {} streams, {} stacks, {} segments, read in {:.3} s, {}",
        trace.name,
        trace.events.len(),
        trace.device_count,
        trace.streams.len(),
        trace.stacks.len(),
        trace.segments.len(),
        start.elapsed().as_secs_f64(),
        peak_memory()
    );
    for device in 0..trace.device_count {
        let start = Instant::now();
        let workload = Workload::from_trace(&trace, device);
        println!(
            "device {device}: {} requests on {} blocks and {} streams, peak {}, made in {:.3} s, {:?}",
            workload.requests.len(),
            workload.blocks,
            workload.streams.len(),
            workload.peak_live,
            start.elapsed().as_secs_f64(),
            workload.repairs
        );
    }
    if let Some(out) = arguments.next() {
        let start = Instant::now();
        trace.write_vtrace(BufWriter::new(File::create(out)?))?;
        println!("written in {:.3} s", start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Returns the line of Linux that has the largest resident memory so far.
fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM"));
    line.unwrap_or("VmHWM: unknown").split_whitespace().collect::<Vec<&str>>().join(" ")
}
