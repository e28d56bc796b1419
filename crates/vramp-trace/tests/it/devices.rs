//! Recordings of several devices: workloads of all, selections, and several recordings in one.

use vramp_core::{Bytes, DeviceAddr};
use vramp_trace::{
    Annotation, Block, BlockState, Event, EventKind, Frame, Label, PoolId, ReadLimits, Segment,
    Stage, StreamIndex, Trace, UnknownDevice, Workload, read,
};

fn event(kind: EventKind, device: u16, address: u64, size: u64) -> Event {
    Event {
        kind,
        device,
        stream: StreamIndex(0),
        address: DeviceAddr::new(address),
        size: Bytes::new(size),
        time_us: 0,
        stack: None,
    }
}

fn segment(device: u16, blocks: &[(u64, u64)]) -> Segment {
    let block = |&(address, size): &(u64, u64)| Block {
        address: DeviceAddr::new(address),
        size: Bytes::new(size),
        requested_size: Some(Bytes::new(size)),
        state: BlockState::Active,
        stack: None,
    };
    Segment {
        device,
        stream: StreamIndex(0),
        address: DeviceAddr::new(1 << 20),
        total_size: Bytes::mib(64),
        segment_type: "large".to_owned(),
        is_expandable: false,
        stack: None,
        blocks: blocks.iter().map(block).collect(),
    }
}

/// Random events on `devices`, grouped by device, with labels, stacks and annotations on some.
fn random(random: &mut fastrand::Rng, devices: &[u16], events: usize) -> Trace {
    let mut trace = Trace {
        name: "several".to_owned(),
        device_count: u32::from(devices.iter().max().copied().unwrap_or(0)) + 1,
        streams: vec![0, 0x70, 0x80],
        actions: vec!["one".to_owned(), "two".to_owned()],
        ..Trace::default()
    };
    let frame = |line| Frame { name: "f", filename: "a.py", line };
    let stacks: Vec<_> = (1..9).map(|line| trace.stacks.add([frame(line)])).collect();
    for &device in devices {
        for _ in 0..events {
            let kind = match random.u32(0..10) {
                0 => EventKind::SegmentAlloc,
                1..5 => EventKind::Alloc,
                5..7 => EventKind::FreeRequested,
                7..9 => EventKind::FreeCompleted,
                _ => EventKind::Unknown(vramp_trace::ActionId(random.u16(0..2))),
            };
            // The same addresses on every device.
            let made = event(kind, device, random.u64(1..20) << 12, random.u64(0..9000));
            let stream = StreamIndex(random.u32(0..3));
            let stack = stacks[random.usize(0..stacks.len())];
            trace.events.push(Event { stream, stack, ..made });
            if random.u32(0..8) == 0 {
                let pool = PoolId(i64::from(device), random.i64(1..4));
                let label = Label { pool, category: "input", ..Label::default() };
                trace.labels.label_event(trace.events.len() - 1, label);
            }
        }
        let place = trace.segments.len();
        trace.segments.push(segment(device, &[(1 << 21, 77), (1 << 22, 99)]));
        trace.labels.label_segment(place, Label { metadata: "s", ..Label::default() });
        trace.labels.label_block(place, 1, Label { metadata: "b", ..Label::default() });
        let name = format!("step {device}").into();
        trace.annotations.push(Annotation {
            stage: Stage::Start,
            name,
            device: Some(device),
            time_us: 5,
        });
    }
    trace
}

/// The part of a trace on one device, event by event, as a trace of its own.
fn naive_part(trace: &Trace, device: u16) -> Trace {
    let mut part = Trace {
        name: trace.name.clone(),
        device_count: trace.device_count,
        streams: trace.streams.clone(),
        actions: trace.actions.clone(),
        stacks: trace.stacks.clone(),
        allocator_settings: trace.allocator_settings.clone(),
        ..Trace::default()
    };
    for (index, event) in trace.events.iter().enumerate().filter(|(_, it)| it.device == device) {
        part.labels.label_event(part.events.len(), trace.labels.of_event(index));
        part.events.push(*event);
    }
    for (index, segment) in trace.segments.iter().enumerate().filter(|(_, it)| it.device == device)
    {
        let place = part.segments.len();
        part.labels.label_segment(place, trace.labels.of_segment(index));
        for block in 0..segment.blocks.len() {
            part.labels.label_block(place, block, trace.labels.of_block(index, block));
        }
        part.segments.push(segment.clone());
    }
    let own = trace.annotations.iter().filter(|it| it.device.is_none_or(|on| on == device));
    part.annotations = own.cloned().collect();
    part
}

#[test]
fn every_device_has_the_workload_that_it_would_have_alone() {
    let mut rng = fastrand::Rng::with_seed(3);
    for devices in [&[0][..], &[0, 1], &[2], &[1, 4, 7], &[0, 1, 2, 3, 4, 5, 6, 7]] {
        let trace = random(&mut rng, devices, 200);
        let all = Workload::all(&trace);
        let found: Vec<u32> = all.iter().map(|workload| workload.device).collect();
        assert_eq!(found, devices.iter().copied().map(u32::from).collect::<Vec<_>>());
        for (workload, &device) in all.iter().zip(devices) {
            assert_eq!(*workload, Workload::from_trace(&trace, u32::from(device)));
            let part = naive_part(&trace, device);
            let alone = &Workload::all(&part)[0];
            assert_eq!(workload.requests, alone.requests);
            assert_eq!(workload.repairs, alone.repairs);
            assert_eq!(workload.coverage(), alone.coverage());
            for request in 0..workload.requests.len() {
                assert_eq!(workload.device_event_of(request), alone.event_of(request));
            }
            for block in 0..workload.blocks {
                let labels = [&trace, &part].map(|it| &it.labels);
                assert_eq!(workload.label_of(labels[0], block), alone.label_of(labels[1], block));
            }
            assert!(workload.device_events(&trace).map(|(_, it)| it).eq(&part.events));
            assert!(workload.device_segments(&trace).map(|(_, it)| it).eq(&part.segments));
        }
    }
}

#[test]
fn events_that_are_not_grouped_are_found_too() {
    let mut rng = fastrand::Rng::with_seed(5);
    let mut trace = random(&mut rng, &[0, 3, 5], 100);
    trace.labels = Default::default();
    rng.shuffle(&mut trace.events);
    for workload in Workload::all(&trace) {
        let part = naive_part(&trace, workload.device as u16);
        assert_eq!(workload.requests, Workload::all(&part)[0].requests);
    }
}

#[test]
fn the_work_is_one_pass_whatever_the_number_of_devices() {
    for devices in [1u16, 2, 8, 100] {
        let per_device = 100_000 / usize::from(devices);
        let numbers: Vec<u16> = (0..devices).map(|number| number * 3).collect();
        let trace = random(&mut fastrand::Rng::with_seed(1), &numbers, per_device);
        let all = Workload::all(&trace);
        // What a workload's pass visits: its range of events and its segments.
        let events: usize = all.iter().map(|workload| workload.event_range().len()).sum();
        let segments: usize = all.iter().map(|it| it.device_segments(&trace).count()).sum();
        assert_eq!((events, segments), (trace.events.len(), usize::from(devices)));
    }
}

#[test]
fn a_device_whose_events_refer_to_nothing_live_is_repaired_alone() {
    let events = vec![
        event(EventKind::Alloc, 0, 0x1000, 512),
        event(EventKind::FreeRequested, 0, 0x1000, 512),
        event(EventKind::FreeCompleted, 0, 0x1000, 512),
        event(EventKind::FreeRequested, 6, 0x1000, 100),
        event(EventKind::FreeCompleted, 6, 0x2000, 200),
    ];
    let trace = Trace { device_count: 7, streams: vec![0], events, ..Trace::default() };
    let [whole, broken] = &Workload::all(&trace)[..] else { panic!("two devices have events") };
    assert!(whole.repairs.is_empty());
    assert_eq!((whole.blocks, whole.peak_live), (1, Bytes::new(512)));
    assert_eq!(broken.repairs.blocks_known_from_free, 2);
    assert_eq!((broken.device, broken.blocks), (6, 2));
    assert_eq!(broken.peak_live, Bytes::ZERO, "none is allocated after the first event");
}

#[test]
fn a_selection_keeps_labels_and_annotations_of_its_devices() {
    let mut rng = fastrand::Rng::with_seed(7);
    let mut trace = random(&mut rng, &[0, 2, 5], 60);
    let name = "everywhere".into();
    trace.annotations.push(Annotation { stage: Stage::Start, name, device: None, time_us: 9 });
    for device in [0u16, 2, 5] {
        let mut kept = trace.clone();
        kept.retain_devices(&[u32::from(device)]).unwrap();
        let part = naive_part(&trace, device);
        assert_eq!((&kept.events, &kept.segments), (&part.events, &part.segments));
        assert_eq!(kept.annotations, part.annotations);
        for index in 0..part.events.len() {
            assert_eq!(kept.labels.of_event(index), part.labels.of_event(index));
        }
        assert_eq!(kept.labels.of_segment(0).metadata, "s");
        assert_eq!(kept.labels.of_block(0, 1).metadata, "b");
        assert_eq!(kept.devices(), [u32::from(device)]);
        kept.write_snapshot(std::io::sink()).unwrap();
    }
    let mut two = trace.clone();
    two.retain_devices(&[5, 0, 5]).unwrap();
    assert_eq!(two.devices(), [0, 5]);
    assert_eq!(two.events.len(), 120);
}

#[test]
fn a_device_that_was_not_recorded_is_an_error_that_names_the_others() {
    let mut trace = random(&mut fastrand::Rng::with_seed(9), &[0, 2, 5], 5);
    let before = trace.clone();
    for device in [1, 6, u32::MAX] {
        let error = trace.retain_devices(&[0, device]).unwrap_err();
        assert_eq!(error, UnknownDevice { device, known: vec![0, 2, 5] });
        assert!(error.to_string().contains("it has devices 0, 2, 5"), "{error}");
        assert_eq!(trace, before);
    }
    let error = Trace::default().retain_devices(&[0]).unwrap_err();
    assert!(error.to_string().ends_with("it has no events and no segments"), "{error}");
}

#[test]
fn the_parts_of_a_recording_merge_to_the_whole() {
    let mut rng = fastrand::Rng::with_seed(11);
    for devices in [&[3][..], &[0, 1], &[1, 2, 6]] {
        let trace = random(&mut rng, devices, 150);
        let parts: Vec<Trace> = devices
            .iter()
            .map(|&device| {
                let mut part = trace.clone();
                part.retain_devices(&[u32::from(device)]).unwrap();
                part
            })
            .collect();
        assert_eq!(Trace::merge(parts.clone()), trace);
        // In any other order the events and their labels are the same; tables and segments have
        // another order.
        let reversed = Trace::merge(parts.into_iter().rev());
        assert_eq!(reversed.events.len(), trace.events.len());
        for (index, (found, expected)) in reversed.events.iter().zip(&trace.events).enumerate() {
            assert_eq!((found.device, found.address), (expected.device, expected.address));
            assert_eq!(reversed.labels.of_event(index), trace.labels.of_event(index));
        }
    }
    assert_eq!(Trace::merge([]), Trace::default());
}

#[test]
fn a_merge_gives_streams_actions_and_stacks_of_equal_contents_one_number() {
    let frame = |line| Frame { name: "f", filename: "a.py", line };
    let made = |device: u16, raw: u64, action: &str, line| {
        let mut trace = Trace { streams: vec![0, raw], ..Trace::default() };
        trace.actions = vec![action.to_owned()];
        let stack = trace.stacks.add([frame(line)]);
        let kind = EventKind::Unknown(vramp_trace::ActionId(0));
        let first = event(EventKind::Alloc, 0, 0x1000, 8);
        trace.events =
            vec![Event { stack, stream: StreamIndex(1), ..first }, Event { kind, ..first }];
        trace.allocator_settings = vec![
            ("allocator".to_owned(), "vramp".to_owned()),
            ("reserved".to_owned(), raw.to_string()),
        ];
        trace.move_to_device(device);
        trace
    };
    let merged = Trace::merge([made(0, 7, "a", 1), made(3, 9, "b", 1), made(4, 7, "a", 2)]);
    assert_eq!((merged.device_count, &merged.streams[..]), (5, &[0, 7, 9][..]));
    assert_eq!(merged.actions, ["a", "b"]);
    assert_eq!(merged.stacks.len(), 2);
    let raws: Vec<_> = merged.events.iter().map(|it| merged.raw_stream(it.stream)).collect();
    assert_eq!(raws, [Some(7), Some(0), Some(9), Some(0), Some(7), Some(0)]);
    let names: Vec<_> = merged.events.iter().map(|it| merged.action_name(it.kind)).collect();
    assert_eq!(names, ["alloc", "a", "alloc", "b", "alloc", "a"]);
    assert_eq!(merged.events[0].stack, merged.events[2].stack);
    let settings: Vec<(&str, &str)> =
        merged.allocator_settings.iter().map(|(name, value)| (&name[..], &value[..])).collect();
    assert_eq!(
        settings,
        [
            ("allocator", "vramp"),
            ("device_0.reserved", "7"),
            ("device_3.reserved", "9"),
            ("device_4.reserved", "7"),
        ]
    );
}

#[test]
fn a_snapshot_of_eight_devices_comes_back_with_gaps_and_idle_devices() {
    let mut rng = fastrand::Rng::with_seed(13);
    for devices in [&[0, 1][..], &[0, 1, 2, 3, 4, 5, 6, 7], &[1, 5]] {
        let mut trace = random(&mut rng, devices, 40);
        // PyTorch writes a list for every device that it sees.
        trace.device_count = 8;
        let mut file = Vec::new();
        trace.write_snapshot(&mut file).unwrap();
        let found = read(&file[..], &ReadLimits::default()).unwrap();
        assert_eq!(found.device_count, 8);
        assert_eq!(found.devices(), trace.devices());
        let requests = |trace: &Trace| {
            Workload::all(trace).into_iter().map(|it| it.requests).collect::<Vec<_>>()
        };
        assert_eq!(requests(&found), requests(&trace));
        let mut timeline = Vec::new();
        found.write_perfetto(&mut timeline).unwrap();
        let timeline: serde_json::Value = serde_json::from_slice(&timeline).unwrap();
        let entries = timeline["traceEvents"].as_array().unwrap();
        let processes = entries.iter().filter(|entry| entry["name"] == "process_name").count();
        assert_eq!(processes, devices.len());
    }
}
