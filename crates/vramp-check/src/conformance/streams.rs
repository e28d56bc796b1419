//! Order of work: along a stream, across streams, and as the host observes it.

use vramp_core::{AddrRange, Bytes};

use super::rig::{Rig, refused};
use super::{Checked, ensure, rules};
use vramp_driver::{Capabilities, DeviceCopy, ErrorKind, Event, StreamThread};

const WITH_HOST: fn(&Capabilities) -> bool = |can| can.virtual_memory && can.pinned_host;

/// Timeout for work that takes milliseconds.
const TIMEOUT_NS: u64 = 20_000_000_000;

rules! {
    work_on_one_stream_runs_in_order: WITH_HOST,
    a_waiting_stream_sees_what_was_before_the_event: WITH_HOST,
    a_wait_goes_by_the_last_record: WITH_HOST,
    waiting_for_an_event_never_recorded_does_nothing: WITH_HOST,
    an_event_never_recorded_is_complete: |_| true,
    a_true_query_means_that_the_bytes_are_there: WITH_HOST,
    a_synchronised_event_means_that_the_bytes_are_there: WITH_HOST,
    a_synchronised_device_means_that_the_work_of_all_streams_is_complete: WITH_HOST,
    work_of_a_destroyed_stream_still_runs: WITH_HOST,
    work_on_a_threads_default_stream_is_ordered_for_every_thread: WITH_HOST,
    every_thread_has_a_default_stream_of_its_own: |_| true,
    work_of_a_thread_that_ended_still_runs: WITH_HOST,
    streams_and_events_are_destroyed_once: |_| true,
}

/// Allocates memory so large that work on it takes longer than the calls that queue it.
fn large(rig: &Rig) -> Checked<AddrRange> {
    Ok(rig.memory(&[rig.whole_pages(Bytes::mib(128))])?)
}

/// Returns the last page, which fills write last.
fn last_page(rig: &Rig, of: AddrRange) -> AddrRange {
    AddrRange::new(of.start + (of.len - rig.page), rig.page)
}

fn work_on_one_stream_runs_in_order(rig: &Rig) -> Checked {
    let (a, b) = (large(rig)?, large(rig)?);
    let stream = rig.stream()?;
    for byte in [1, 2, 3] {
        rig.device.fill(stream, a, byte)?;
        rig.device.copy(stream, DeviceCopy { from: a.start, to: b.start, len: a.len })?;
    }
    rig.device.fill(stream, a, 4)?;
    rig.expect_filled(stream, last_page(rig, b), 3)?;
    rig.expect_filled(stream, last_page(rig, a), 4)
}

fn a_waiting_stream_sees_what_was_before_the_event(rig: &Rig) -> Checked {
    let (a, b) = (large(rig)?, large(rig)?);
    let (first, second) = (rig.stream()?, rig.stream()?);
    let event = rig.event()?;
    for round in 0..8 {
        for byte in [0x10, 0x20, 0x30 + round] {
            rig.device.fill(first, a, byte)?;
        }
        rig.device.record(event, first)?;
        rig.device.wait(second, event)?;
        rig.device.copy(second, DeviceCopy { from: a.start, to: b.start, len: a.len })?;
        rig.expect_filled(second, last_page(rig, b), 0x30 + round)?;
    }
    Ok(())
}

fn a_wait_goes_by_the_last_record(rig: &Rig) -> Checked {
    let (a, b) = (large(rig)?, large(rig)?);
    let (first, second) = (rig.stream()?, rig.stream()?);
    let event = rig.event()?;
    rig.device.fill(first, a, 1)?;
    rig.device.record(event, first)?;
    rig.device.fill(first, a, 2)?;
    rig.device.record(event, first)?;
    rig.device.wait(second, event)?;
    rig.device.copy(second, DeviceCopy { from: a.start, to: b.start, len: a.len })?;
    rig.expect_filled(second, last_page(rig, b), 2)
}

fn waiting_for_an_event_never_recorded_does_nothing(rig: &Rig) -> Checked {
    let range = rig.memory(&[rig.page])?;
    let stream = rig.stream()?;
    rig.device.wait(stream, rig.event()?)?;
    rig.device.fill(stream, range, 7)?;
    rig.expect_filled(stream, range, 7)
}

fn an_event_never_recorded_is_complete(rig: &Rig) -> Checked {
    let event = rig.event()?;
    ensure!(rig.device.query(event)?, "a new event is not complete");
    rig.device.synchronize_event(event)?;
    Ok(())
}

fn a_true_query_means_that_the_bytes_are_there(rig: &Rig) -> Checked {
    let range = large(rig)?;
    let stream = rig.stream()?;
    let buffer = rig.host(rig.page)?;
    let event = rig.event()?;
    for byte in 1..=32 {
        rig.device.fill(stream, range, byte)?;
    }
    let to = vramp_driver::HostSlice { buffer, offset: Bytes::ZERO, len: rig.page };
    rig.device.copy_to_host(stream, last_page(rig, range).start, to)?;
    rig.device.record(event, stream)?;
    poll(rig, event)?;
    let mut bytes = vec![0; rig.page.count() as usize];
    rig.device.read_host(buffer, Bytes::ZERO, &mut bytes)?;
    ensure!(bytes.iter().all(|byte| *byte == 32), "the event was complete before the work");
    ensure!(rig.device.query(event)?, "a complete event is not complete any more");
    Ok(())
}

fn poll(rig: &Rig, event: Event) -> Checked {
    let begun_ns = rig.device.now_ns();
    while !rig.device.query(event)? {
        let waited_ns = rig.device.now_ns() - begun_ns;
        ensure!(waited_ns < TIMEOUT_NS, "the event was not complete after {waited_ns} ns");
    }
    Ok(())
}

fn a_synchronised_event_means_that_the_bytes_are_there(rig: &Rig) -> Checked {
    let range = large(rig)?;
    let stream = rig.stream()?;
    let buffer = rig.host(rig.page)?;
    let event = rig.event()?;
    for byte in 1..=8 {
        rig.device.fill(stream, range, byte)?;
    }
    let to = vramp_driver::HostSlice { buffer, offset: Bytes::ZERO, len: rig.page };
    rig.device.copy_to_host(stream, last_page(rig, range).start, to)?;
    rig.device.record(event, stream)?;
    rig.device.synchronize_event(event)?;
    let mut bytes = vec![0; rig.page.count() as usize];
    rig.device.read_host(buffer, Bytes::ZERO, &mut bytes)?;
    ensure!(bytes.iter().all(|byte| *byte == 8), "synchronising returned before the work");
    ensure!(rig.device.query(event)?, "a synchronised event is not complete");
    Ok(())
}

fn a_synchronised_device_means_that_the_work_of_all_streams_is_complete(rig: &Rig) -> Checked {
    let mut events = Vec::new();
    for _ in 0..3 {
        let (range, stream, event) = (large(rig)?, rig.stream()?, rig.event()?);
        (1..=8).try_for_each(|byte| rig.device.fill(stream, range, byte))?;
        rig.device.record(event, stream)?;
        events.push(event);
    }
    rig.device.synchronize_device()?;
    for event in events {
        ensure!(rig.device.query(event)?, "synchronising returned before the work");
    }
    Ok(())
}

fn work_of_a_destroyed_stream_still_runs(rig: &Rig) -> Checked {
    let range = large(rig)?;
    let (doomed, reader) = (rig.stream()?, rig.stream()?);
    let event = rig.event()?;
    rig.device.fill(doomed, range, 0x61)?;
    rig.device.record(event, doomed)?;
    rig.destroy_stream(doomed)?;
    rig.device.synchronize_event(event)?;
    rig.expect_filled(reader, last_page(rig, range), 0x61)
}

/// Allocates memory for which the simulator copies little.
fn short(rig: &Rig) -> Checked<AddrRange> {
    Ok(rig.memory(&[rig.whole_pages(Bytes::mib(8))])?)
}

/// Runs `work` on another thread.
fn elsewhere<R: Send>(work: impl FnOnce() -> R + Send) -> Checked<R> {
    let ran = std::thread::scope(|scope| scope.spawn(work).join());
    ran.map_err(|_| super::Failure("the other thread panicked".to_owned()))
}

fn work_on_a_threads_default_stream_is_ordered_for_every_thread(rig: &Rig) -> Checked {
    let (a, b, c) = (short(rig)?, short(rig)?, short(rig)?);
    let (own, side) = (rig.thread_stream()?, rig.stream()?);
    let (before, after) = (rig.event()?, rig.event()?);
    let device = rig.device;
    (1..=64).try_for_each(|byte| device.fill(own, a, byte))?;
    elsewhere(move || -> vramp_driver::DriverResult<()> {
        device.record(before, own)?;
        device.wait(side, before)?;
        device.copy(side, DeviceCopy { from: a.start, to: b.start, len: a.len })?;
        device.record(after, side)?;
        device.wait(own, after)
    })??;
    device.copy(own, DeviceCopy { from: b.start, to: c.start, len: b.len })?;
    rig.expect_filled(own, last_page(rig, c), 64)?;
    elsewhere(move || device.synchronize_stream(own))??;
    Ok(())
}

fn every_thread_has_a_default_stream_of_its_own(rig: &Rig) -> Checked {
    use StreamThread::{Any, Other, This};
    let (own, made) = (rig.thread_stream()?, rig.stream()?);
    let device = rig.device;
    let seen = [own, made].map(|stream| device.stream_thread(stream));
    ensure!(seen == [This, Any], "the thread that got the first sees {seen:?}");
    let seen = elsewhere(move || [own, made].map(|stream| device.stream_thread(stream)))?;
    ensure!(seen == [Other, Any], "another thread sees {seen:?}");
    rig.destroy_stream(own)?;
    refused("use an ended id", ErrorKind::InvalidUse, device.record(rig.event()?, own))
}

fn work_of_a_thread_that_ended_still_runs(rig: &Rig) -> Checked {
    let range = short(rig)?;
    let (reader, event) = (rig.stream()?, rig.event()?);
    let device = rig.device;
    elsewhere(move || -> vramp_driver::DriverResult<()> {
        let own = device.thread_stream()?;
        let filled = (1..=64).try_for_each(|byte| device.fill(own, range, byte));
        let recorded = filled.and_then(|()| device.record(event, own));
        // Without the event nothing waits for the work.
        let waited = if recorded.is_err() { device.synchronize_stream(own) } else { Ok(()) };
        recorded.and(waited).and(device.destroy_stream(own))
    })??;
    device.wait(reader, event)?;
    rig.expect_filled(reader, last_page(rig, range), 64)
}

fn streams_and_events_are_destroyed_once(rig: &Rig) -> Checked {
    let invalid = ErrorKind::InvalidUse;
    let (stream, event) = (rig.stream()?, rig.event()?);
    let (live_stream, live_event) = (rig.stream()?, rig.event()?);
    rig.destroy_stream(stream)?;
    rig.destroy_event(event)?;
    let device = rig.device;
    refused("destroy a stream twice", invalid, rig.destroy_stream(stream))?;
    refused("destroy an event twice", invalid, rig.destroy_event(event))?;
    refused("synchronise a destroyed stream", invalid, device.synchronize_stream(stream))?;
    refused("query a destroyed event", invalid, device.query(event))?;
    refused("record a destroyed event", invalid, device.record(event, live_stream))?;
    refused("record on a destroyed stream", invalid, device.record(live_event, stream))?;
    refused("wait for a destroyed event", invalid, device.wait(live_stream, event))?;
    refused("wait on a destroyed stream", invalid, device.wait(stream, live_event))
}
