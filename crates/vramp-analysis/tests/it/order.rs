//! Uses on other streams: no memory is reused too early, and the audit detects it if it is.
use vramp::device::Device;
use vramp::peers::{Config, Preset};
use vramp::{Bytes, DeviceAddr};
use vramp_analysis::replay::{Options, Outcome, ReplayError, replay};
use vramp_trace::{Event, EventKind, StreamIndex, Trace, Workload};

const AUDIT: Options<'static> = Options {
    audit: true,
    skip_record_use: false,
    compare_with: None,
    releases_of: None,
    curve: false,
};

fn event(kind: EventKind, stream: u32, address: u64, size: Bytes) -> Event {
    Event {
        kind,
        device: 0,
        stream: StreamIndex(stream),
        address: DeviceAddr::new(address),
        size,
        time_us: 0,
        stack: None,
    }
}

fn workload(streams: u64, events: Vec<Event>) -> Workload {
    let trace = Trace {
        name: "synthetic".to_owned(),
        device_count: 1,
        streams: (0..streams).collect(),
        events,
        ..Trace::default()
    };
    Workload::from_trace(&trace, 0)
}

/// A block that another stream still uses after its free, while its own stream allocates as much
/// again. The uses end late, or never.
fn late_uses(uses_end: bool) -> Workload {
    use EventKind::{Alloc, FreeCompleted, FreeRequested};
    let (a, b, c, d) = (0x1000, 0x2000, 0x3000, 0x4000);
    let large = Bytes::mib(64);
    let mut events = vec![
        event(Alloc, 0, a, large),
        event(Alloc, 1, b, Bytes::mib(4)),
        event(FreeRequested, 0, a, large),
        event(Alloc, 0, c, large),
        event(Alloc, 1, d, large),
        event(FreeRequested, 0, c, large),
        event(FreeCompleted, 0, c, large),
        event(FreeRequested, 1, d, large),
    ];
    if uses_end {
        events.push(event(FreeCompleted, 0, a, large));
        events.push(event(FreeCompleted, 1, d, large));
    }
    for round in 0..20 {
        let (stream, address) = (round % 2, 0x10_000 + u64::from(round) * 0x1000);
        let size = Bytes::mib(16 + 24 * u64::from(round % 5));
        events.push(event(Alloc, stream, address, size));
        events.push(event(FreeRequested, stream, address, size));
        if round > 2 {
            let earlier = 0x10_000 + u64::from(round - 3) * 0x1000;
            events.push(event(FreeCompleted, (round - 3) % 2, earlier, size));
        }
    }
    workload(2, events)
}

fn run(
    workload: &Workload,
    preset: Preset,
    options: Options,
    limit: Option<Bytes>,
) -> Result<Outcome, ReplayError> {
    let device = Device::open("sim:h200").expect("the test has set this up");
    let mut config = Config::preset(preset);
    config.base.limit = limit;
    replay(workload, &device, config, options, |_| {})
}

#[test]
fn memory_that_another_stream_still_uses_is_not_reused() {
    for uses_end in [true, false] {
        for preset in Preset::ALL {
            let outcome =
                run(&late_uses(uses_end), preset, AUDIT, None).expect("the test has set this up");
            assert_eq!(outcome.hazards, Some(0), "{}", preset.name());
            assert_eq!(outcome.oom_at_event, None);
        }
    }
}

#[test]
fn the_audit_detects_memory_that_was_reused_too_early() {
    let options = Options { skip_record_use: true, ..AUDIT };
    for preset in Preset::ALL {
        match run(&late_uses(true), preset, options, None) {
            Err(ReplayError::Hazards { found, first: Some(first) }) => {
                assert!(found > 0);
                let text = first.to_string();
                assert!(text.contains("use on another stream"), "{text}");
                assert!(text.contains("unordered"), "{text}");
            }
            other => panic!("{}: {other:?}", preset.name()),
        }
    }
}

#[test]
fn the_audit_changes_no_decision() {
    // The driver's own pool decides by the progress of the device, which the audit changes.
    for preset in [Preset::Vramp, Preset::Vpmm] {
        let audited = run(&late_uses(true), preset, AUDIT, None).expect("the test has set this up");
        let plain = run(&late_uses(true), preset, Options::default(), None)
            .expect("the test has set this up");
        assert_eq!(audited.decisions_sha256, plain.decisions_sha256, "{}", preset.name());
        assert_eq!(audited.driver_calls, plain.driver_calls, "{}", preset.name());
        assert_eq!(audited.calls, plain.calls, "{}", preset.name());
    }
}

#[test]
fn a_tight_limit_reuses_memory_of_other_streams_in_order() {
    // Too little for both streams' blocks: memory has to change its stream.
    for limit in [140, 150, 180, 220].map(Bytes::mib) {
        for preset in [Preset::Vramp, Preset::Vpmm] {
            let outcome = run(&late_uses(true), preset, AUDIT, Some(limit))
                .expect("the test has set this up");
            assert_eq!(outcome.hazards, Some(0), "{} under {limit}", preset.name());
        }
    }
}

#[test]
fn a_use_without_a_known_stream_counts_as_one_on_another_stream() {
    use EventKind::{Alloc, FreeCompleted, FreeRequested};
    let size = Bytes::mib(8);
    let workload = workload(
        1,
        vec![
            event(Alloc, 0, 0x1000, size),
            event(FreeRequested, 0, 0x1000, size),
            event(Alloc, 0, 0x2000, size),
            event(FreeCompleted, 0, 0x1000, size),
            event(Alloc, 0, 0x3000, size),
        ],
    );
    let outcome = run(&workload, Preset::Vramp, AUDIT, None).expect("the test has set this up");
    assert_eq!(outcome.hazards, Some(0));
    assert!(outcome.peak_reserved_bytes >= 2 * size.count(), "{outcome:?}");
}

#[test]
fn a_request_that_failed_is_made_again() {
    let events = |size| {
        let oom = event(EventKind::Oom, 0, u64::MAX, size);
        vec![event(EventKind::Alloc, 0, 0x1000, Bytes::mib(8)), oom]
    };
    for preset in Preset::ALL {
        let run = |size, limit| {
            run(&workload(1, events(size)), preset, AUDIT, limit).expect("the test has set this up")
        };
        let fits = run(Bytes::mib(48), None);
        assert_eq!((fits.oom_at_event, fits.peak_demand_bytes), (None, 56 << 20), "{preset:?}");
        assert!(fits.peak_reserved_bytes >= 56 << 20, "{fits:?}");
        let limited = run(Bytes::mib(48), Some(Bytes::mib(40)));
        assert_eq!((limited.oom_at_event, limited.overhead), (Some(1), None));
        assert_eq!(run(Bytes::tib(1), None).oom_at_event, Some(1), "{preset:?}");
    }
}

/// Returns the time of a replay of `blocks` blocks whose uses never end.
fn time_of(blocks: u64) -> std::time::Duration {
    use EventKind::{Alloc, FreeRequested};
    let alloc = (1..=blocks).map(|at| event(Alloc, 0, at << 21, Bytes::mib(1)));
    let free = (1..=blocks).map(|at| event(FreeRequested, 0, at << 21, Bytes::mib(1)));
    let workload = workload(1, alloc.chain(free).collect());
    let begun = std::time::Instant::now();
    run(&workload, Preset::Torch, Options::default(), None).expect("the test has set this up");
    begun.elapsed()
}

#[test]
fn uses_that_never_end_take_linear_time() {
    // Eight times as many took 64 times as long.
    let ratio = || time_of(16_000).as_secs_f64() / time_of(2_000).as_secs_f64();
    let least = (0..3).map(|_| ratio()).fold(f64::INFINITY, f64::min);
    assert!(least < 24.0, "eight times as many blocks take {least:.1} times as long");
}
