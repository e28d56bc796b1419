//! Random captures on the simulator, and on a model that compares all nodes with all.
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use vramp_core::{AddrRange, Bytes};
use vramp_driver::sim::{Kernel, Simulator};
use vramp_driver::{CaptureMode, Driver, Event, GraphNode, MemoryProperties, Stream};

const PAGE: Bytes = Bytes::mib(2);
const PAGES: u64 = 4;
const STREAMS: usize = 4;
const EVENTS: usize = 3;

#[derive(Clone, Copy, Debug)]
enum Step {
    Work { stream: usize, page: u64, writes: bool },
    Record { event: usize, stream: usize },
    Wait { stream: usize, event: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let stream = 0..STREAMS;
    prop_oneof![
        4 => (stream.clone(), 0..PAGES, any::<bool>())
            .prop_map(|(stream, page, writes)| Step::Work { stream, page, writes }),
        2 => (0..EVENTS, stream.clone())
            .prop_map(|(event, stream)| Step::Record { event, stream }),
        2 => (stream, 0..EVENTS).prop_map(|(stream, event)| Step::Wait { stream, event }),
    ]
}

/// A node with all its ancestors.
struct Captured {
    id: GraphNode,
    page: u64,
    writes: bool,
    behind: BTreeSet<usize>,
}

/// A capture as sets: the ancestors of the next work of each stream, and of each event.
#[derive(Default)]
struct Model {
    nodes: Vec<Captured>,
    streams: BTreeMap<usize, BTreeSet<usize>>,
    events: BTreeMap<usize, BTreeSet<usize>>,
}

impl Model {
    /// Returns true if two nodes access one page, at least one writes it, and they are unordered.
    fn has_conflict(&self) -> bool {
        self.nodes.iter().enumerate().any(|(place, node)| {
            self.nodes[..place].iter().enumerate().any(|(earlier, other)| {
                other.page == node.page
                    && (other.writes || node.writes)
                    && !node.behind.contains(&earlier)
            })
        })
    }
}

struct Rig {
    device: Simulator,
    memory: AddrRange,
    streams: Vec<Stream>,
    events: Vec<Event>,
}

fn rig() -> Rig {
    let device = Simulator::builder().checked().build();
    let memory = AddrRange::new(device.reserve(PAGE * PAGES, PAGE).unwrap(), PAGE * PAGES);
    device.map(memory.start, device.create(memory.len, MemoryProperties::DEVICE).unwrap()).unwrap();
    device.set_access(memory, &[]).unwrap();
    let streams = (0..STREAMS).map(|_| device.create_stream().unwrap()).collect();
    let events = (0..EVENTS).map(|_| device.create_event().unwrap()).collect();
    Rig { device, memory, streams, events }
}

impl Rig {
    /// Does one step on both, if it belongs to the capture.
    fn step(&self, model: &mut Model, step: Step) {
        match step {
            Step::Work { stream, page, writes } if model.streams.contains_key(&stream) => {
                self.work(model, stream, page, writes);
            }
            Step::Record { event, stream } if model.streams.contains_key(&stream) => {
                self.device.record(self.events[event], self.streams[stream]).unwrap();
                model.events.insert(event, model.streams[&stream].clone());
            }
            Step::Wait { stream, event } if model.events.contains_key(&event) => {
                self.device.wait(self.streams[stream], self.events[event]).unwrap();
                let behind = model.events[&event].clone();
                model.streams.entry(stream).or_default().extend(behind);
            }
            _ => {}
        }
    }

    fn work(&self, model: &mut Model, stream: usize, page: u64, writes: bool) {
        let range = AddrRange::new(self.memory.start + PAGE * page, PAGE);
        let kernel = Kernel::new("k").lasting(1000);
        let kernel = if writes { kernel.writing(range) } else { kernel.reading(range) };
        self.device.launch(self.streams[stream], kernel).unwrap();
        let info = self.device.capture_info(self.streams[stream]).unwrap().unwrap();
        let [id] = info.dependencies[..] else {
            panic!("work is the one dependency of the next: {info:?}")
        };
        let behind = model.streams[&stream].clone();
        assert_eq!(self.all_before(id), behind.iter().map(|n| model.nodes[*n].id).collect());
        model.streams.entry(stream).or_default().insert(model.nodes.len());
        model.nodes.push(Captured { id, page, writes, behind });
    }

    fn all_before(&self, node: GraphNode) -> BTreeSet<GraphNode> {
        let mut before = BTreeSet::new();
        let mut open = vec![node];
        while let Some(next) = open.pop() {
            let near = self.device.node_dependencies(next).unwrap();
            open.extend(near.into_iter().filter(|node| before.insert(*node)));
        }
        before
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(vramp_testing::cases(200)))]

    #[test]
    fn a_launch_has_the_captured_order_and_no_other(steps in prop::collection::vec(step(), 1..60)) {
        let rig = rig();
        let mut model = Model::default();
        model.streams.insert(0, BTreeSet::new());
        rig.device.begin_capture(rig.streams[0], CaptureMode::Global).unwrap();
        for step in steps {
            rig.step(&mut model, step);
        }
        for stream in 1..STREAMS {
            rig.step(&mut model, Step::Record { event: 0, stream });
            rig.step(&mut model, Step::Wait { stream: 0, event: 0 });
        }
        let graph = rig.device.end_capture(rig.streams[0]).unwrap();
        prop_assert_eq!(rig.device.graph_nodes(graph), Ok(model.nodes.len()));
        let exec = rig.device.instantiate(graph).unwrap();
        rig.device.launch_graph(exec, rig.streams[1]).unwrap();
        prop_assert_eq!(rig.device.hazards_found() > 0, model.has_conflict());

        // Launched again elsewhere, it comes behind itself.
        let found = rig.device.hazards_found();
        rig.device.launch_graph(exec, rig.streams[2]).unwrap();
        prop_assert_eq!(rig.device.hazards_found() > 0, model.has_conflict());
        if found == 0 {
            rig.device.synchronize_stream(rig.streams[2]).unwrap();
            rig.device.unmap(rig.memory).unwrap();
            prop_assert_eq!(rig.device.hazards(), []);
        }
    }

    #[test]
    fn a_capture_ends_well_exactly_if_all_work_is_joined(
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let rig = rig();
        let mut model = Model::default();
        model.streams.insert(0, BTreeSet::new());
        rig.device.begin_capture(rig.streams[0], CaptureMode::Global).unwrap();
        for step in steps {
            rig.step(&mut model, step);
        }
        let joined = model.streams[&0].len() == model.nodes.len();
        let ended = rig.device.end_capture(rig.streams[0]);
        prop_assert_eq!(ended.is_ok(), joined, "{:?}", ended);
        prop_assert_eq!(rig.device.invalidated_captures(), u64::from(!joined));
        for stream in &rig.streams {
            prop_assert_eq!(rig.device.is_capturing(*stream), Ok(false));
        }
    }
}
