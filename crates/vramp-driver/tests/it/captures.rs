//! Captures on the simulator: races found at a launch, calls that invalidate a capture, and random captures beside
//! a model that compares all nodes with all.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use vramp_core::{AddrRange, Bytes};
use vramp_driver::sim::{Contents, Kernel, Simulator};
use vramp_driver::{
    Call, CaptureMode, Driver, DriverError, ErrorKind, Event, GraphExec, GraphNode, HostSlice,
    MemoryProperties, Stream,
};

// --- Captures on the simulator: races found at a launch, and calls that invalidate a capture ---

const PAGE: Bytes = Bytes::mib(2);

struct Rig {
    device: Simulator,
    range: AddrRange,
    a: Stream,
    b: Stream,
}

fn rig() -> Rig {
    let device = Simulator::builder().checked().contents(Contents::Stored).build();
    let range = AddrRange::new(device.reserve(PAGE, PAGE).unwrap(), PAGE);
    let handle = device.create(PAGE, MemoryProperties::DEVICE).unwrap();
    device.map(range.start, handle).unwrap();
    device.set_access(range, &[]).unwrap();
    let (a, b) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    Rig { device, range, a, b }
}

impl Rig {
    fn begin(&self, stream: Stream) {
        self.device.begin_capture(stream, CaptureMode::Global).unwrap();
    }

    fn ready(&self, stream: Stream) -> GraphExec {
        let graph = self.device.end_capture(stream).unwrap();
        let exec = self.device.instantiate(graph).unwrap();
        self.device.destroy_graph(graph).unwrap();
        exec
    }

    fn write(&self, name: &'static str, stream: Stream) {
        self.device.launch(stream, Kernel::new(name).writing(self.range).lasting(1000)).unwrap();
    }

    fn read(&self, name: &'static str, stream: Stream) {
        self.device.launch(stream, Kernel::new(name).reading(self.range).lasting(1000)).unwrap();
    }

    fn after(&self, stream: Stream) -> Event {
        let event = self.device.create_event().unwrap();
        self.device.record(event, stream).unwrap();
        event
    }

    /// Orders later work on `stream` after the work on `of`.
    fn follow(&self, stream: Stream, of: Stream) {
        self.device.wait(stream, self.after(of)).unwrap();
    }

    fn labels(&self) -> Vec<(String, String)> {
        let hazards = self.device.hazards();
        hazards.into_iter().map(|hazard| (hazard.earlier.label, hazard.later.label)).collect()
    }
}

fn failed<T: std::fmt::Debug>(result: Result<T, DriverError>) -> (i32, ErrorKind) {
    let error = result.unwrap_err();
    (error.code, error.kind)
}

fn capturing(code: i32) -> (i32, ErrorKind) {
    (code, ErrorKind::Capturing)
}

#[test]
fn captured_work_is_seen_only_when_it_is_launched() {
    let rig = rig();
    rig.write("outside", rig.b);
    rig.begin(rig.a);
    rig.write("captured", rig.a);
    let exec = rig.ready(rig.a);
    assert_eq!(rig.device.hazards(), []);
    rig.device.launch_graph(exec, rig.a).unwrap();
    assert_eq!(rig.labels(), [("outside".to_owned(), "captured".to_owned())]);
}

#[test]
fn branches_beside_each_other_have_no_order() {
    let rig = rig();
    rig.begin(rig.a);
    rig.follow(rig.b, rig.a);
    rig.write("left", rig.a);
    rig.write("right", rig.b);
    rig.follow(rig.a, rig.b);
    let exec = rig.ready(rig.a);
    rig.device.launch_graph(exec, rig.a).unwrap();
    assert_eq!(rig.labels(), [("left".to_owned(), "right".to_owned())]);
}

#[test]
fn what_the_capture_ordered_is_in_order_at_each_launch() {
    let rig = rig();
    rig.begin(rig.a);
    rig.write("first", rig.a);
    rig.follow(rig.b, rig.a);
    rig.read("left", rig.a);
    rig.read("right", rig.b);
    rig.follow(rig.a, rig.b);
    rig.write("last", rig.a);
    let exec = rig.ready(rig.a);
    for stream in [rig.a, rig.b, rig.a] {
        rig.device.launch_graph(exec, stream).unwrap();
    }
    assert_eq!(rig.device.hazards(), []);
}

#[test]
fn a_join_that_was_recorded_too_early_is_found_at_the_launch() {
    let rig = rig();
    rig.begin(rig.a);
    rig.follow(rig.b, rig.a);
    rig.read("before the event", rig.b);
    let early = rig.after(rig.b);
    rig.write("behind the event", rig.b);
    rig.device.wait(rig.a, early).unwrap();
    rig.read("reader", rig.a);
    rig.follow(rig.a, rig.b);
    let exec = rig.ready(rig.a);
    rig.device.launch_graph(exec, rig.a).unwrap();
    let hazard = rig.labels();
    assert_eq!(hazard.len(), 1, "{hazard:?}");
    assert_eq!(hazard[0], ("behind the event".to_owned(), "reader".to_owned()));
}

#[test]
fn launches_of_two_graphs_on_two_streams_have_no_order() {
    let rig = rig();
    let execs = ["one", "two"].map(|name| {
        rig.begin(rig.a);
        rig.write(name, rig.a);
        rig.ready(rig.a)
    });
    rig.device.launch_graph(execs[0], rig.a).unwrap();
    rig.device.launch_graph(execs[1], rig.b).unwrap();
    assert_eq!(rig.labels(), [("one".to_owned(), "two".to_owned())]);
}

#[test]
fn launches_of_two_graphs_in_order_are_in_order() {
    let rig = rig();
    let execs = ["one", "two"].map(|name| {
        rig.begin(rig.a);
        rig.follow(rig.b, rig.a);
        rig.read(name, rig.a);
        rig.follow(rig.b, rig.a);
        rig.write(name, rig.b);
        rig.follow(rig.a, rig.b);
        rig.ready(rig.a)
    });
    rig.device.launch_graph(execs[0], rig.a).unwrap();
    rig.device.launch_graph(execs[1], rig.a).unwrap();
    rig.follow(rig.b, rig.a);
    rig.device.launch_graph(execs[0], rig.b).unwrap();
    assert_eq!(rig.device.hazards(), []);
}

#[test]
fn work_beside_a_launch_is_found_and_work_behind_it_is_not() {
    let rig = rig();
    rig.begin(rig.a);
    rig.follow(rig.b, rig.a);
    rig.write("side", rig.b);
    rig.follow(rig.a, rig.b);
    let exec = rig.ready(rig.a);
    rig.device.launch_graph(exec, rig.a).unwrap();
    rig.write("behind", rig.a);
    assert_eq!(rig.device.hazards(), []);
    rig.read("beside", rig.b);
    assert_eq!(rig.labels(), [("behind".to_owned(), "beside".to_owned())]);
}

#[test]
fn every_branch_of_a_launch_comes_behind_what_was_on_its_stream() {
    let rig = rig();
    rig.begin(rig.a);
    rig.follow(rig.b, rig.a);
    rig.device.launch(rig.a, Kernel::new("nothing")).unwrap();
    rig.read("side", rig.b);
    rig.follow(rig.a, rig.b);
    let exec = rig.ready(rig.a);
    rig.write("before", rig.a);
    rig.device.launch_graph(exec, rig.a).unwrap();
    assert_eq!(rig.device.hazards(), []);
    rig.write("behind", rig.a);
    rig.device.launch_graph(exec, rig.b).unwrap();
    assert_eq!(rig.labels(), [("behind".to_owned(), "side".to_owned())]);
}

#[test]
fn the_host_sees_a_launch_complete_through_its_stream() {
    let rig = rig();
    rig.begin(rig.a);
    rig.follow(rig.b, rig.a);
    rig.write("side", rig.b);
    rig.follow(rig.a, rig.b);
    let exec = rig.ready(rig.a);
    rig.device.launch_graph(exec, rig.a).unwrap();
    let event = rig.after(rig.a);
    assert_eq!(rig.device.query(event), Ok(false));
    rig.device.synchronize_event(event).unwrap();
    rig.device.unmap(rig.range).unwrap();
    assert_eq!(rig.device.hazards(), []);
}

#[test]
fn memory_unmapped_under_a_launch_loses_the_device() {
    let rig = rig();
    rig.begin(rig.a);
    rig.write("captured", rig.a);
    let exec = rig.ready(rig.a);
    rig.device.launch_graph(exec, rig.a).unwrap();
    assert_eq!(failed(rig.device.unmap(rig.range)), (700, ErrorKind::DeviceLost));
    assert!(rig.device.device_loss().unwrap().explanation.contains("captured"));
}

#[test]
fn a_replay_over_unmapped_memory_or_a_freed_buffer_loses_the_device() {
    let unmapped = rig();
    unmapped.begin(unmapped.a);
    unmapped.write("captured", unmapped.a);
    let exec = unmapped.ready(unmapped.a);
    unmapped.device.unmap(unmapped.range).unwrap();
    unmapped.device.launch_graph(exec, unmapped.a).unwrap();
    let lost = failed(unmapped.device.synchronize_stream(unmapped.a));
    assert_eq!(lost, (700, ErrorKind::DeviceLost));

    let freed = rig();
    let buffer = freed.device.alloc_host(PAGE).unwrap();
    freed.begin(freed.a);
    let from = HostSlice { buffer, offset: Bytes::ZERO, len: PAGE };
    freed.device.copy_to_device(freed.a, from, freed.range.start).unwrap();
    let exec = freed.ready(freed.a);
    freed.device.free_host(buffer).unwrap();
    freed.device.launch_graph(exec, freed.a).unwrap();
    let lost = failed(freed.device.synchronize_stream(freed.a));
    assert_eq!(lost, (700, ErrorKind::DeviceLost));
    assert!(freed.device.device_loss().unwrap().explanation.contains("freed"));
}

#[test]
fn branches_run_at_the_same_time_and_order_takes_its_time() {
    let rig = rig();
    let nothing = |stream| rig.device.launch(stream, Kernel::new("k").lasting(1_000_000));
    rig.begin(rig.a);
    nothing(rig.a).unwrap();
    rig.follow(rig.b, rig.a);
    nothing(rig.a).unwrap();
    nothing(rig.b).unwrap();
    rig.follow(rig.a, rig.b);
    nothing(rig.a).unwrap();
    let exec = rig.ready(rig.a);
    for _ in 0..3 {
        let begun_ns = rig.device.now_ns();
        rig.device.launch_graph(exec, rig.a).unwrap();
        rig.device.synchronize_stream(rig.a).unwrap();
        let took_ns = rig.device.now_ns() - begun_ns;
        assert!((3_000_000..3_100_000).contains(&took_ns), "{took_ns}");
    }
}

#[test]
fn streams_of_destroyed_graphs_are_used_again_without_a_false_order() {
    let rig = rig();
    let fork = |name: &'static str| {
        rig.begin(rig.a);
        rig.follow(rig.b, rig.a);
        // Takes the first lane, so that the write runs on a stream of the graph's own.
        rig.device.launch(rig.a, Kernel::new("nothing")).unwrap();
        rig.write(name, rig.b);
        rig.follow(rig.a, rig.b);
        rig.ready(rig.a)
    };
    let before = rig.device.create_stream().unwrap().number();
    for _ in 0..100 {
        let exec = fork("seen");
        rig.device.launch_graph(exec, rig.a).unwrap();
        rig.device.synchronize_stream(rig.a).unwrap();
        rig.device.destroy_graph_exec(exec).unwrap();
    }
    let after = rig.device.create_stream().unwrap().number();
    assert_eq!(after - before, 2, "one stream of a graph's own served all hundred");
    // Not seen complete: the next graph may not run as if it came behind.
    let exec = fork("one");
    rig.device.launch_graph(exec, rig.a).unwrap();
    rig.device.advance(1_000_000);
    rig.device.destroy_graph_exec(exec).unwrap();
    let c = rig.device.create_stream().unwrap();
    rig.device.launch_graph(fork("two"), c).unwrap();
    assert_eq!(rig.labels(), [("one".to_owned(), "two".to_owned())]);
}

#[test]
fn each_way_to_invalidate_a_capture_counts_once_and_has_its_code() {
    let rig = rig();
    let device = &rig.device;
    let outside = rig.after(rig.b);
    let inside = device.create_event().unwrap();
    let plain = device.alloc_memory(PAGE).unwrap();
    let buffer = device.alloc_host(PAGE).unwrap();
    type Attempt<'a> = (i32, Box<dyn Fn() -> Result<(), DriverError> + 'a>);
    let attempts: [Attempt<'_>; 6] = [
        (900, Box::new(|| device.alloc_memory(PAGE).map(drop))),
        (900, Box::new(|| device.free_memory(plain))),
        (900, Box::new(|| device.alloc_host(PAGE).map(drop))),
        (900, Box::new(|| device.free_host(buffer))),
        (905, Box::new(|| device.wait(rig.a, outside))),
        (907, Box::new(|| device.query(inside).map(drop))),
    ];
    for (n, (code, attempt)) in attempts.iter().enumerate() {
        rig.begin(rig.a);
        device.record(inside, rig.a).unwrap();
        assert_eq!(failed(attempt()), capturing(*code), "attempt {n}");
        let _ = attempt();
        assert_eq!(device.invalidated_captures(), n as u64 + 1);
        assert_eq!(failed(device.record(inside, rig.a)), capturing(901));
        assert_eq!(failed(device.launch(rig.a, Kernel::new("k"))), capturing(901));
        assert_eq!(failed(device.end_capture(rig.a)), capturing(901), "attempt {n}");
        assert_eq!(failed(device.end_capture(rig.a)), (401, ErrorKind::InvalidUse));
    }
    device.free_memory(plain).unwrap();
    device.free_host(buffer).unwrap();
}

#[test]
fn an_event_of_a_capture_that_is_over_must_be_recorded_anew() {
    let rig = rig();
    rig.begin(rig.a);
    let event = rig.after(rig.a);
    let exec = rig.ready(rig.a);
    assert_eq!(failed(rig.device.wait(rig.b, event)), capturing(907));
    assert_eq!(failed(rig.device.query(event)), capturing(907));
    rig.device.launch_graph(exec, rig.a).unwrap();
    rig.device.record(event, rig.a).unwrap();
    rig.device.wait(rig.b, event).unwrap();
    rig.device.synchronize_event(event).unwrap();
}

#[test]
fn what_the_model_lacks_is_not_supported_and_invalidates_nothing() {
    let rig = rig();
    rig.begin(rig.a);
    rig.write("captured", rig.a);
    let exec = rig.ready(rig.a);
    let pooled = rig.device.malloc_async(rig.b, PAGE).unwrap();
    rig.begin(rig.a);
    for error in [
        rig.device.malloc_async(rig.a, PAGE).unwrap_err(),
        rig.device.free_async(rig.a, pooled).unwrap_err(),
        rig.device.launch_graph(exec, rig.a).unwrap_err(),
    ] {
        assert_eq!(error.kind, ErrorKind::NotSupported, "{error}");
        assert!(error.detail.contains("model"), "{error}");
    }
    rig.device.free_async(rig.b, pooled).unwrap();
    rig.device.end_capture(rig.a).unwrap();
    assert_eq!(rig.device.invalidated_captures(), 0);
}

#[test]
fn captures_and_graphs_are_counted_as_live_objects() {
    let rig = rig();
    rig.begin(rig.a);
    assert_eq!(rig.device.live().captures, 1);
    let graph = rig.device.end_capture(rig.a).unwrap();
    let exec = rig.device.instantiate(graph).unwrap();
    let live = rig.device.live();
    assert_eq!((live.captures, live.graphs, live.graph_execs), (0, 1, 1));
    rig.device.destroy_graph(graph).unwrap();
    rig.device.destroy_graph_exec(exec).unwrap();
    let live = rig.device.live();
    assert_eq!((live.graphs, live.graph_execs), (0, 0));
    assert_eq!(rig.device.calls_of(Call::Instantiate), 1);
}

// --- Random captures on the simulator, and on a model that compares all nodes with all ---

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

struct RandomRig {
    device: Simulator,
    memory: AddrRange,
    streams: Vec<Stream>,
    events: Vec<Event>,
}

fn random_rig() -> RandomRig {
    let device = Simulator::builder().checked().build();
    let memory = AddrRange::new(device.reserve(PAGE * PAGES, PAGE).unwrap(), PAGE * PAGES);
    device.map(memory.start, device.create(memory.len, MemoryProperties::DEVICE).unwrap()).unwrap();
    device.set_access(memory, &[]).unwrap();
    let streams = (0..STREAMS).map(|_| device.create_stream().unwrap()).collect();
    let events = (0..EVENTS).map(|_| device.create_event().unwrap()).collect();
    RandomRig { device, memory, streams, events }
}

impl RandomRig {
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
        let rig = random_rig();
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
        let rig = random_rig();
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
