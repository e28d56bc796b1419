//! Captures of graphs on the simulator: what the checker sees of a launch, and what spoils a capture.
use vramp_core::{AddrRange, Bytes};
use vramp_driver::sim::{Contents, Kernel, Simulator};
use vramp_driver::{
    Call, CaptureMode, Driver, DriverError, ErrorKind, Event, GraphExec, HostSlice, MemoryLocation,
    Stream,
};

const PAGE: Bytes = Bytes::mib(2);

struct Scene {
    device: Simulator,
    range: AddrRange,
    a: Stream,
    b: Stream,
}

fn scene() -> Scene {
    let device = Simulator::builder().checked().contents(Contents::Stored).build();
    let range = AddrRange::new(device.reserve(PAGE, PAGE).unwrap(), PAGE);
    let handle = device.create(PAGE, MemoryLocation::Device).unwrap();
    device.map(range.start, handle).unwrap();
    device.set_access(range).unwrap();
    let (a, b) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    Scene { device, range, a, b }
}

impl Scene {
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

    /// Lets `stream` come behind what `of` did so far.
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
    let scene = scene();
    scene.write("outside", scene.b);
    scene.begin(scene.a);
    scene.write("captured", scene.a);
    let exec = scene.ready(scene.a);
    assert_eq!(scene.device.hazards(), []);
    scene.device.launch_graph(exec, scene.a).unwrap();
    assert_eq!(scene.labels(), [("outside".to_owned(), "captured".to_owned())]);
}

#[test]
fn branches_beside_each_other_have_no_order() {
    let scene = scene();
    scene.begin(scene.a);
    scene.follow(scene.b, scene.a);
    scene.write("left", scene.a);
    scene.write("right", scene.b);
    scene.follow(scene.a, scene.b);
    let exec = scene.ready(scene.a);
    scene.device.launch_graph(exec, scene.a).unwrap();
    assert_eq!(scene.labels(), [("left".to_owned(), "right".to_owned())]);
}

#[test]
fn what_the_capture_ordered_is_in_order_at_each_launch() {
    let scene = scene();
    scene.begin(scene.a);
    scene.write("first", scene.a);
    scene.follow(scene.b, scene.a);
    scene.read("left", scene.a);
    scene.read("right", scene.b);
    scene.follow(scene.a, scene.b);
    scene.write("last", scene.a);
    let exec = scene.ready(scene.a);
    for stream in [scene.a, scene.b, scene.a] {
        scene.device.launch_graph(exec, stream).unwrap();
    }
    assert_eq!(scene.device.hazards(), []);
}

#[test]
fn a_join_that_was_recorded_too_early_is_found_at_the_launch() {
    let scene = scene();
    scene.begin(scene.a);
    scene.follow(scene.b, scene.a);
    scene.read("before the event", scene.b);
    let early = scene.after(scene.b);
    scene.write("behind the event", scene.b);
    scene.device.wait(scene.a, early).unwrap();
    scene.read("reader", scene.a);
    scene.follow(scene.a, scene.b);
    let exec = scene.ready(scene.a);
    scene.device.launch_graph(exec, scene.a).unwrap();
    let hazard = scene.labels();
    assert_eq!(hazard.len(), 1, "{hazard:?}");
    assert_eq!(hazard[0], ("behind the event".to_owned(), "reader".to_owned()));
}

#[test]
fn launches_of_two_graphs_on_two_streams_have_no_order() {
    let scene = scene();
    let execs = ["one", "two"].map(|name| {
        scene.begin(scene.a);
        scene.write(name, scene.a);
        scene.ready(scene.a)
    });
    scene.device.launch_graph(execs[0], scene.a).unwrap();
    scene.device.launch_graph(execs[1], scene.b).unwrap();
    assert_eq!(scene.labels(), [("one".to_owned(), "two".to_owned())]);
}

#[test]
fn launches_of_two_graphs_in_order_are_in_order() {
    let scene = scene();
    let execs = ["one", "two"].map(|name| {
        scene.begin(scene.a);
        scene.follow(scene.b, scene.a);
        scene.read(name, scene.a);
        scene.follow(scene.b, scene.a);
        scene.write(name, scene.b);
        scene.follow(scene.a, scene.b);
        scene.ready(scene.a)
    });
    scene.device.launch_graph(execs[0], scene.a).unwrap();
    scene.device.launch_graph(execs[1], scene.a).unwrap();
    scene.follow(scene.b, scene.a);
    scene.device.launch_graph(execs[0], scene.b).unwrap();
    assert_eq!(scene.device.hazards(), []);
}

#[test]
fn work_beside_a_launch_is_found_and_work_behind_it_is_not() {
    let scene = scene();
    scene.begin(scene.a);
    scene.follow(scene.b, scene.a);
    scene.write("side", scene.b);
    scene.follow(scene.a, scene.b);
    let exec = scene.ready(scene.a);
    scene.device.launch_graph(exec, scene.a).unwrap();
    scene.write("behind", scene.a);
    assert_eq!(scene.device.hazards(), []);
    scene.read("beside", scene.b);
    assert_eq!(scene.labels(), [("behind".to_owned(), "beside".to_owned())]);
}

#[test]
fn every_branch_of_a_launch_comes_behind_what_was_on_its_stream() {
    let scene = scene();
    scene.begin(scene.a);
    scene.follow(scene.b, scene.a);
    scene.device.launch(scene.a, Kernel::new("nothing")).unwrap();
    scene.read("side", scene.b);
    scene.follow(scene.a, scene.b);
    let exec = scene.ready(scene.a);
    scene.write("before", scene.a);
    scene.device.launch_graph(exec, scene.a).unwrap();
    assert_eq!(scene.device.hazards(), []);
    scene.write("behind", scene.a);
    scene.device.launch_graph(exec, scene.b).unwrap();
    assert_eq!(scene.labels(), [("behind".to_owned(), "side".to_owned())]);
}

#[test]
fn the_host_sees_a_launch_complete_through_its_stream() {
    let scene = scene();
    scene.begin(scene.a);
    scene.follow(scene.b, scene.a);
    scene.write("side", scene.b);
    scene.follow(scene.a, scene.b);
    let exec = scene.ready(scene.a);
    scene.device.launch_graph(exec, scene.a).unwrap();
    let event = scene.after(scene.a);
    assert_eq!(scene.device.query(event), Ok(false));
    scene.device.synchronize_event(event).unwrap();
    scene.device.unmap(scene.range).unwrap();
    assert_eq!(scene.device.hazards(), []);
}

#[test]
fn memory_unmapped_under_a_launch_loses_the_device() {
    let scene = scene();
    scene.begin(scene.a);
    scene.write("captured", scene.a);
    let exec = scene.ready(scene.a);
    scene.device.launch_graph(exec, scene.a).unwrap();
    assert_eq!(failed(scene.device.unmap(scene.range)), (700, ErrorKind::DeviceLost));
    assert!(scene.device.device_loss().unwrap().explanation.contains("captured"));
}

#[test]
fn a_replay_over_unmapped_memory_or_a_freed_buffer_loses_the_device() {
    let unmapped = scene();
    unmapped.begin(unmapped.a);
    unmapped.write("captured", unmapped.a);
    let exec = unmapped.ready(unmapped.a);
    unmapped.device.unmap(unmapped.range).unwrap();
    unmapped.device.launch_graph(exec, unmapped.a).unwrap();
    let lost = failed(unmapped.device.synchronize_stream(unmapped.a));
    assert_eq!(lost, (700, ErrorKind::DeviceLost));

    let freed = scene();
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
    let scene = scene();
    let nothing = |stream| scene.device.launch(stream, Kernel::new("k").lasting(1_000_000));
    scene.begin(scene.a);
    nothing(scene.a).unwrap();
    scene.follow(scene.b, scene.a);
    nothing(scene.a).unwrap();
    nothing(scene.b).unwrap();
    scene.follow(scene.a, scene.b);
    nothing(scene.a).unwrap();
    let exec = scene.ready(scene.a);
    for _ in 0..3 {
        let begun_ns = scene.device.now_ns();
        scene.device.launch_graph(exec, scene.a).unwrap();
        scene.device.synchronize_stream(scene.a).unwrap();
        let took_ns = scene.device.now_ns() - begun_ns;
        assert!((3_000_000..3_100_000).contains(&took_ns), "{took_ns}");
    }
}

#[test]
fn streams_of_destroyed_graphs_are_used_again_without_a_false_order() {
    let scene = scene();
    let fork = |name: &'static str| {
        scene.begin(scene.a);
        scene.follow(scene.b, scene.a);
        // Takes the first lane, so that the write runs on a stream of the graph's own.
        scene.device.launch(scene.a, Kernel::new("nothing")).unwrap();
        scene.write(name, scene.b);
        scene.follow(scene.a, scene.b);
        scene.ready(scene.a)
    };
    let before = scene.device.create_stream().unwrap().number();
    for _ in 0..100 {
        let exec = fork("seen");
        scene.device.launch_graph(exec, scene.a).unwrap();
        scene.device.synchronize_stream(scene.a).unwrap();
        scene.device.destroy_graph_exec(exec).unwrap();
    }
    let after = scene.device.create_stream().unwrap().number();
    assert_eq!(after - before, 2, "one stream of a graph's own served all hundred");
    // Not seen complete: the next graph may not run as if it came behind.
    let exec = fork("one");
    scene.device.launch_graph(exec, scene.a).unwrap();
    scene.device.advance(1_000_000);
    scene.device.destroy_graph_exec(exec).unwrap();
    let c = scene.device.create_stream().unwrap();
    scene.device.launch_graph(fork("two"), c).unwrap();
    assert_eq!(scene.labels(), [("one".to_owned(), "two".to_owned())]);
}

#[test]
fn each_way_to_spoil_a_capture_counts_once_and_has_its_code() {
    let scene = scene();
    let device = &scene.device;
    let outside = scene.after(scene.b);
    let inside = device.create_event().unwrap();
    let plain = device.alloc_memory(PAGE).unwrap();
    let buffer = device.alloc_host(PAGE).unwrap();
    type Attempt<'a> = (i32, Box<dyn Fn() -> Result<(), DriverError> + 'a>);
    let attempts: [Attempt<'_>; 10] = [
        (900, Box::new(|| device.query(outside).map(drop))),
        (900, Box::new(|| device.synchronize_event(outside))),
        (900, Box::new(|| device.alloc_memory(PAGE).map(drop))),
        (900, Box::new(|| device.free_memory(plain))),
        (900, Box::new(|| device.alloc_host(PAGE).map(drop))),
        (900, Box::new(|| device.free_host(buffer))),
        (900, Box::new(|| device.synchronize_stream(scene.a))),
        (900, Box::new(|| device.destroy_stream(scene.a))),
        (905, Box::new(|| device.wait(scene.a, outside))),
        (907, Box::new(|| device.query(inside).map(drop))),
    ];
    for (n, (code, attempt)) in attempts.iter().enumerate() {
        scene.begin(scene.a);
        device.record(inside, scene.a).unwrap();
        assert_eq!(failed(attempt()), capturing(*code), "attempt {n}");
        let _ = attempt();
        assert_eq!(device.invalidated_captures(), n as u64 + 1);
        assert_eq!(failed(device.record(inside, scene.a)), capturing(901));
        assert_eq!(failed(device.launch(scene.a, Kernel::new("k"))), capturing(901));
        assert_eq!(failed(device.end_capture(scene.a)), capturing(901), "attempt {n}");
        assert_eq!(failed(device.end_capture(scene.a)), (401, ErrorKind::InvalidUse));
    }
    device.free_memory(plain).unwrap();
    device.free_host(buffer).unwrap();
}

#[test]
fn an_event_of_a_capture_that_is_over_must_be_recorded_anew() {
    let scene = scene();
    scene.begin(scene.a);
    let event = scene.after(scene.a);
    let exec = scene.ready(scene.a);
    assert_eq!(failed(scene.device.wait(scene.b, event)), capturing(907));
    assert_eq!(failed(scene.device.query(event)), capturing(907));
    scene.device.launch_graph(exec, scene.a).unwrap();
    scene.device.record(event, scene.a).unwrap();
    scene.device.wait(scene.b, event).unwrap();
    scene.device.synchronize_event(event).unwrap();
}

#[test]
fn what_the_model_lacks_is_not_supported_and_spoils_nothing() {
    let scene = scene();
    scene.begin(scene.a);
    scene.write("captured", scene.a);
    let exec = scene.ready(scene.a);
    let pooled = scene.device.malloc_async(scene.b, PAGE).unwrap();
    scene.begin(scene.a);
    for error in [
        scene.device.malloc_async(scene.a, PAGE).unwrap_err(),
        scene.device.free_async(scene.a, pooled).unwrap_err(),
        scene.device.launch_graph(exec, scene.a).unwrap_err(),
    ] {
        assert_eq!(error.kind, ErrorKind::NotSupported, "{error}");
        assert!(error.detail.contains("model"), "{error}");
    }
    scene.device.free_async(scene.b, pooled).unwrap();
    scene.device.end_capture(scene.a).unwrap();
    assert_eq!(scene.device.invalidated_captures(), 0);
}

#[test]
fn captures_graphs_and_their_like_are_counted_among_what_lives() {
    let scene = scene();
    scene.begin(scene.a);
    assert_eq!(scene.device.live().captures, 1);
    let graph = scene.device.end_capture(scene.a).unwrap();
    let exec = scene.device.instantiate(graph).unwrap();
    let live = scene.device.live();
    assert_eq!((live.captures, live.graphs, live.graph_execs), (0, 1, 1));
    scene.device.destroy_graph(graph).unwrap();
    scene.device.destroy_graph_exec(exec).unwrap();
    let live = scene.device.live();
    assert_eq!((live.graphs, live.graph_execs), (0, 0));
    assert_eq!(scene.device.calls_of(Call::Instantiate), 1);
}
