//! What newer and older versions of PyTorch write besides: labels, annotations, histories of blocks.

use std::path::Path;

use vramp_core::{Bytes, DeviceAddr};
use vramp_trace::{
    Annotation, BlockState, Label, PoolId, ReadLimits, Stage, Trace, read, read_trace,
};

fn load(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    read_trace(path, &ReadLimits::default()).unwrap()
}

#[test]
fn labels_of_events_segments_and_blocks_are_read() {
    let labels = load("labelled.pickle").labels;
    let expected = [
        Label::default(),
        Label { metadata: "layer 1", ..Label::default() },
        Label { pool: PoolId(0, 7), compile_context: "0/1", ..Label::default() },
        Label { category: "activation", ..Label::default() },
        Label { metadata: "layer 1", ..Label::default() },
        Label::default(),
    ];
    let found: Vec<Label<'_>> = (0..6).map(|event| labels.of_event(event)).collect();
    assert_eq!(found, expected);
    assert_eq!(labels.of_segment(0), Label { pool: PoolId(3, -1), ..Label::default() });
    assert_eq!(labels.of_block(0, 0), Label { category: "parameter", ..Label::default() });
    assert_eq!(labels.of_block(0, 1), Label::default());
    assert_eq!(labels.of_event(usize::MAX), Label::default());
}

#[test]
fn annotations_are_read() {
    let step = |stage, time_us| Annotation { stage, name: "step".into(), device: Some(0), time_us };
    let mark = Stage::Other("MARK".into());
    assert_eq!(
        load("labelled.pickle").annotations,
        [
            step(Stage::Start, 5),
            step(Stage::Start, 15),
            step(Stage::End, 35),
            Annotation { stage: mark, name: "load".into(), device: None, time_us: 45 },
        ]
    );
    assert_eq!(load("protocol4.pickle").annotations, [step(Stage::Start, 1)]);
    assert_eq!(load("protocol4.pickle").labels.of_event(7).metadata, "step 1");
}

#[test]
fn both_formats_keep_labels_and_annotations() {
    let trace = load("labelled.pickle");
    let mut file = Vec::new();
    trace.write_vtrace(&mut file).unwrap();
    assert_eq!(read(&file[..], &ReadLimits::default()).unwrap(), trace);
    file.clear();
    trace.write_snapshot(&mut file).unwrap();
    let found = read(&file[..], &ReadLimits::default()).unwrap();
    assert_eq!(Trace { name: trace.name.clone(), ..found }, trace);
}

#[test]
fn labels_stay_with_their_events_when_devices_are_out_of_order() {
    let mut trace = load("labelled.pickle");
    let labels = |trace: &Trace| -> Vec<(u64, String)> {
        let events = trace.events.iter().enumerate();
        let label = |index| trace.labels.of_event(index).metadata.to_owned();
        let mut found: Vec<(u64, String)> =
            events.map(|(index, event)| (event.address.number(), label(index))).collect();
        found.sort();
        found
    };
    trace.device_count = 2;
    trace.events[0].device = 1;
    trace.events[2].device = 1;
    let mut file = Vec::new();
    trace.write_snapshot(&mut file).unwrap();
    let found = read(&file[..], &ReadLimits::default()).unwrap();
    assert!(found.events.is_sorted_by_key(|event| event.device));
    assert_eq!(labels(&found), labels(&trace));
}

#[test]
fn a_label_of_an_event_that_is_not_there_is_refused() {
    let mut trace = load("labelled.pickle");
    trace.events.truncate(2);
    let error = trace.write_vtrace(std::io::sink()).unwrap_err();
    assert!(error.to_string().contains("labels of events"), "{error}");
}

#[test]
fn blocks_of_torch_2_0_have_the_stack_and_size_of_their_last_request() {
    let trace = load("torch_2_0.pickle");
    let [segment] = &trace.segments[..] else { panic!("{:?}", trace.segments) };
    let [first, second, third] = &segment.blocks[..] else { panic!("{:?}", segment.blocks) };
    assert_eq!(first.requested_size, Some(Bytes::new(1000)));
    let frames: Vec<&str> =
        trace.stacks.frames(first.stack.unwrap()).map(|frame| frame.name).collect();
    assert_eq!(frames, ["forward"]);
    assert_eq!((second.state, second.stack), (BlockState::PendingFree, None));
    assert_eq!(second.requested_size, Some(Bytes::new(7)));
    assert_eq!((third.requested_size, third.state), (None, BlockState::Inactive));
    assert_eq!(third.address, DeviceAddr::new(0x7f2e_4000_0000 + 1536));
}
