//! Order of work: along a stream, across streams, and as the host sees it.

use vramp_core::{AddrRange, Bytes};

use super::bench::{Bench, refused};
use super::{Checked, ensure, rules};
use crate::{Capabilities, DeviceCopy, ErrorKind, Event};

const WITH_HOST: fn(&Capabilities) -> bool = |can| can.virtual_memory && can.pinned_host;

/// How long a case may wait for work that takes milliseconds.
const PATIENCE_NS: u64 = 20_000_000_000;

rules! {
    work_on_one_stream_runs_in_order: WITH_HOST,
    a_waiting_stream_sees_what_was_before_the_event: WITH_HOST,
    a_wait_goes_by_the_last_record: WITH_HOST,
    waiting_for_an_event_never_recorded_does_nothing: WITH_HOST,
    an_event_never_recorded_is_reached: |_| true,
    a_true_query_means_that_the_bytes_are_there: WITH_HOST,
    a_synchronised_event_means_that_the_bytes_are_there: WITH_HOST,
    work_of_a_destroyed_stream_still_runs: WITH_HOST,
    streams_and_events_are_destroyed_once: |_| true,
}

/// Memory large enough that work on it outlasts the calls that queue it.
fn large(bench: &Bench) -> Checked<AddrRange> {
    Ok(bench.memory(&[bench.whole_pages(Bytes::mib(128))])?)
}

/// A page at the end, which fills reach last.
fn last_page(bench: &Bench, of: AddrRange) -> AddrRange {
    AddrRange::new(of.start + (of.len - bench.page), bench.page)
}

fn work_on_one_stream_runs_in_order(bench: &Bench) -> Checked {
    let (a, b) = (large(bench)?, large(bench)?);
    let stream = bench.stream()?;
    for byte in [1, 2, 3] {
        bench.device.fill(stream, a, byte)?;
        bench.device.copy(stream, DeviceCopy { from: a.start, to: b.start, len: a.len })?;
    }
    bench.device.fill(stream, a, 4)?;
    bench.expect_filled(stream, last_page(bench, b), 3)?;
    bench.expect_filled(stream, last_page(bench, a), 4)
}

fn a_waiting_stream_sees_what_was_before_the_event(bench: &Bench) -> Checked {
    let (a, b) = (large(bench)?, large(bench)?);
    let (first, second) = (bench.stream()?, bench.stream()?);
    let event = bench.event()?;
    for round in 0..8 {
        for byte in [0x10, 0x20, 0x30 + round] {
            bench.device.fill(first, a, byte)?;
        }
        bench.device.record(event, first)?;
        bench.device.wait(second, event)?;
        bench.device.copy(second, DeviceCopy { from: a.start, to: b.start, len: a.len })?;
        bench.expect_filled(second, last_page(bench, b), 0x30 + round)?;
    }
    Ok(())
}

fn a_wait_goes_by_the_last_record(bench: &Bench) -> Checked {
    let (a, b) = (large(bench)?, large(bench)?);
    let (first, second) = (bench.stream()?, bench.stream()?);
    let event = bench.event()?;
    bench.device.fill(first, a, 1)?;
    bench.device.record(event, first)?;
    bench.device.fill(first, a, 2)?;
    bench.device.record(event, first)?;
    bench.device.wait(second, event)?;
    bench.device.copy(second, DeviceCopy { from: a.start, to: b.start, len: a.len })?;
    bench.expect_filled(second, last_page(bench, b), 2)
}

fn waiting_for_an_event_never_recorded_does_nothing(bench: &Bench) -> Checked {
    let range = bench.memory(&[bench.page])?;
    let stream = bench.stream()?;
    bench.device.wait(stream, bench.event()?)?;
    bench.device.fill(stream, range, 7)?;
    bench.expect_filled(stream, range, 7)
}

fn an_event_never_recorded_is_reached(bench: &Bench) -> Checked {
    let event = bench.event()?;
    ensure!(bench.device.query(event)?, "a fresh event was not reached");
    bench.device.synchronize_event(event)?;
    Ok(())
}

fn a_true_query_means_that_the_bytes_are_there(bench: &Bench) -> Checked {
    let range = large(bench)?;
    let stream = bench.stream()?;
    let buffer = bench.host(bench.page)?;
    let event = bench.event()?;
    for byte in 1..=32 {
        bench.device.fill(stream, range, byte)?;
    }
    let to = crate::HostSlice { buffer, offset: Bytes::ZERO, len: bench.page };
    bench.device.copy_to_host(stream, last_page(bench, range).start, to)?;
    bench.device.record(event, stream)?;
    poll(bench, event)?;
    let mut bytes = vec![0; bench.page.count() as usize];
    bench.device.read_host(buffer, Bytes::ZERO, &mut bytes)?;
    ensure!(bytes.iter().all(|byte| *byte == 32), "the event was reached before the work");
    ensure!(bench.device.query(event)?, "an event that was reached is not reached any more");
    Ok(())
}

fn poll(bench: &Bench, event: Event) -> Checked {
    let begun_ns = bench.device.now_ns();
    while !bench.device.query(event)? {
        let waited_ns = bench.device.now_ns() - begun_ns;
        ensure!(waited_ns < PATIENCE_NS, "the event was not reached in {waited_ns} ns");
    }
    Ok(())
}

fn a_synchronised_event_means_that_the_bytes_are_there(bench: &Bench) -> Checked {
    let range = large(bench)?;
    let stream = bench.stream()?;
    let buffer = bench.host(bench.page)?;
    let event = bench.event()?;
    for byte in 1..=8 {
        bench.device.fill(stream, range, byte)?;
    }
    let to = crate::HostSlice { buffer, offset: Bytes::ZERO, len: bench.page };
    bench.device.copy_to_host(stream, last_page(bench, range).start, to)?;
    bench.device.record(event, stream)?;
    bench.device.synchronize_event(event)?;
    let mut bytes = vec![0; bench.page.count() as usize];
    bench.device.read_host(buffer, Bytes::ZERO, &mut bytes)?;
    ensure!(bytes.iter().all(|byte| *byte == 8), "synchronising returned before the work");
    ensure!(bench.device.query(event)?, "a synchronised event is not reached");
    Ok(())
}

fn work_of_a_destroyed_stream_still_runs(bench: &Bench) -> Checked {
    let range = large(bench)?;
    let (doomed, reader) = (bench.stream()?, bench.stream()?);
    let event = bench.event()?;
    bench.device.fill(doomed, range, 0x61)?;
    bench.device.record(event, doomed)?;
    bench.destroy_stream(doomed)?;
    bench.device.synchronize_event(event)?;
    bench.expect_filled(reader, last_page(bench, range), 0x61)
}

fn streams_and_events_are_destroyed_once(bench: &Bench) -> Checked {
    let invalid = ErrorKind::InvalidUse;
    let (stream, event) = (bench.stream()?, bench.event()?);
    let (live_stream, live_event) = (bench.stream()?, bench.event()?);
    bench.destroy_stream(stream)?;
    bench.destroy_event(event)?;
    let device = bench.device;
    refused("destroy a stream twice", invalid, bench.destroy_stream(stream))?;
    refused("destroy an event twice", invalid, bench.destroy_event(event))?;
    refused("synchronise a dead stream", invalid, device.synchronize_stream(stream))?;
    refused("query a dead event", invalid, device.query(event))?;
    refused("record a dead event", invalid, device.record(event, live_stream))?;
    refused("record on a dead stream", invalid, device.record(live_event, stream))?;
    refused("wait for a dead event", invalid, device.wait(live_stream, event))?;
    refused("wait on a dead stream", invalid, device.wait(stream, live_event))
}
