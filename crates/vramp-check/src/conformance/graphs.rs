//! Nodes of captured work, and launches of graphs.

use vramp_core::{AddrRange, Bytes};

use super::rig::{Rig, pattern, refused};
use super::{Checked, Failure, ensure, rules};
use vramp_driver::{
    Capabilities, CaptureMode, DeviceCopy, ErrorKind, Graph, GraphExec, GraphNode, HostSlice,
    Stream,
};

const VIRTUAL: fn(&Capabilities) -> bool = |can| can.graphs && can.virtual_memory;
const WITH_HOST: fn(&Capabilities) -> bool = |can| VIRTUAL(can) && can.pinned_host;

rules! {
    captured_work_runs_at_each_launch_and_not_before: WITH_HOST,
    a_replay_reads_its_input_anew: WITH_HOST,
    a_replay_copies_from_and_to_pinned_memory: WITH_HOST,
    a_replay_writes_the_pages_that_are_mapped_when_it_runs: WITH_HOST,
    a_launch_comes_in_order_of_its_stream: WITH_HOST,
    launches_of_one_graph_come_one_after_the_other: WITH_HOST,
    a_graph_is_captured_on_one_stream_and_launched_on_another: WITH_HOST,
    work_of_a_joined_stream_runs_in_the_captured_order: WITH_HOST,
    dependencies_follow_the_order_of_one_stream: VIRTUAL,
    dependencies_show_forks_and_joins: VIRTUAL,
    a_graph_is_ready_only_while_the_memory_of_its_fills_is_mapped: VIRTUAL,
    nodes_are_valid_until_the_graph_is_destroyed: VIRTUAL,
    graphs_are_destroyed_once_and_in_any_order: WITH_HOST,
    a_graph_destroyed_in_flight_still_completes: WITH_HOST,
}

/// Allocates memory that takes a fill some time.
fn large(rig: &Rig) -> Checked<AddrRange> {
    Ok(rig.memory(&[rig.whole_pages(Bytes::mib(32))])?)
}

fn page(rig: &Rig) -> Checked<AddrRange> {
    Ok(rig.memory(&[rig.page])?)
}

fn first_page(rig: &Rig, of: AddrRange) -> AddrRange {
    AddrRange::new(of.start, rig.page)
}

/// Captures `work` on `stream`.
fn captured(rig: &Rig, stream: Stream, work: impl FnOnce() -> Checked) -> Checked<Graph> {
    rig.begin_capture(stream, CaptureMode::Global)?;
    work()?;
    Ok(rig.end_capture(stream)?)
}

/// Captures `work` on `stream` and instantiates the graph.
fn instantiated(rig: &Rig, stream: Stream, work: impl FnOnce() -> Checked) -> Checked<GraphExec> {
    Ok(rig.instantiate(captured(rig, stream, work)?)?)
}

fn copy(from: AddrRange, to: AddrRange) -> DeviceCopy {
    DeviceCopy { from: from.start, to: to.start, len: to.len }
}

fn captured_work_runs_at_each_launch_and_not_before(rig: &Rig) -> Checked {
    let range = page(rig)?;
    let stream = rig.stream()?;
    rig.device.fill(stream, range, 1)?;
    let exec = instantiated(rig, stream, || Ok(rig.device.fill(stream, range, 2)?))?;
    rig.expect_filled(stream, range, 1)?;
    for _ in 0..3 {
        rig.device.launch_graph(exec, stream)?;
        rig.expect_filled(stream, range, 2)?;
        rig.device.fill(stream, range, 3)?;
        rig.expect_filled(stream, range, 3)?;
    }
    Ok(())
}

fn a_replay_reads_its_input_anew(rig: &Rig) -> Checked {
    let (input, output) = (page(rig)?, page(rig)?);
    let stream = rig.stream()?;
    let exec = instantiated(rig, stream, || Ok(rig.device.copy(stream, copy(input, output))?))?;
    for seed in [11, 12, 13] {
        let bytes = pattern(seed, input.len);
        rig.write(stream, input.start, &bytes)?;
        rig.device.launch_graph(exec, stream)?;
        rig.expect_bytes(stream, output, &bytes)?;
    }
    Ok(())
}

fn a_replay_copies_from_and_to_pinned_memory(rig: &Rig) -> Checked {
    let range = page(rig)?;
    let stream = rig.stream()?;
    let len = rig.page;
    let (from, to) = (rig.host(len)?, rig.host(len)?);
    let slice = |buffer| HostSlice { buffer, offset: Bytes::ZERO, len };
    let exec = instantiated(rig, stream, || {
        rig.device.copy_to_device(stream, slice(from), range.start)?;
        Ok(rig.device.copy_to_host(stream, range.start, slice(to))?)
    })?;
    for seed in [21, 22] {
        let bytes = pattern(seed, len);
        rig.device.write_host(from, Bytes::ZERO, &bytes)?;
        rig.device.launch_graph(exec, stream)?;
        rig.device.synchronize_stream(stream)?;
        let mut seen = vec![0; bytes.len()];
        rig.device.read_host(to, Bytes::ZERO, &mut seen)?;
        ensure!(seen == bytes, "pattern {seed} did not come back");
    }
    Ok(())
}

fn a_replay_writes_the_pages_that_are_mapped_when_it_runs(rig: &Rig) -> Checked {
    let range = rig.reserve(rig.page)?;
    let (first, second) = (rig.create(rig.page)?, rig.create(rig.page)?);
    let stream = rig.stream()?;
    rig.map(range, first)?;
    rig.device.set_access(range, &[])?;
    let exec = instantiated(rig, stream, || Ok(rig.device.fill(stream, range, 0x31)?))?;
    rig.device.launch_graph(exec, stream)?;
    rig.expect_filled(stream, range, 0x31)?;
    rig.device.fill(stream, range, 0x41)?;
    rig.device.synchronize_stream(stream)?;
    rig.unmap(range)?;
    rig.map(range, second)?;
    rig.device.set_access(range, &[])?;
    rig.device.fill(stream, range, 0x51)?;
    rig.device.launch_graph(exec, stream)?;
    rig.expect_filled(stream, range, 0x31)?;
    // The pages that were mapped before are unchanged.
    let elsewhere = rig.mapped_again(first, rig.page)?;
    rig.expect_filled(stream, elsewhere, 0x41)
}

fn a_launch_comes_in_order_of_its_stream(rig: &Rig) -> Checked {
    let (a, b, c) = (large(rig)?, large(rig)?, large(rig)?);
    let stream = rig.stream()?;
    let exec = instantiated(rig, stream, || Ok(rig.device.copy(stream, copy(a, b))?))?;
    for byte in 1..=8 {
        rig.device.fill(stream, a, byte)?;
        rig.device.launch_graph(exec, stream)?;
        rig.device.copy(stream, copy(b, c))?;
        rig.device.fill(stream, a, 0xee)?;
        rig.device.fill(stream, b, 0xdd)?;
        rig.expect_filled(stream, first_page(rig, c), byte)?;
    }
    Ok(())
}

fn launches_of_one_graph_come_one_after_the_other(rig: &Rig) -> Checked {
    let (a, b) = (large(rig)?, large(rig)?);
    let (first, second) = (rig.stream()?, rig.stream()?);
    // A launch that overlapped the previous one would copy what that one wrote first.
    let exec = instantiated(rig, first, || {
        rig.device.copy(first, copy(a, b))?;
        rig.device.fill(first, a, 0x77)?;
        Ok(rig.device.fill(first, a, 0x78)?)
    })?;
    rig.device.fill(first, a, 1)?;
    rig.device.synchronize_stream(first)?;
    for _ in 0..4 {
        rig.device.launch_graph(exec, first)?;
        rig.device.launch_graph(exec, second)?;
    }
    rig.expect_filled(second, first_page(rig, b), 0x78)?;
    rig.expect_filled(second, first_page(rig, a), 0x78)
}

fn a_graph_is_captured_on_one_stream_and_launched_on_another(rig: &Rig) -> Checked {
    let range = page(rig)?;
    let (captures, launches) = (rig.stream()?, rig.stream()?);
    let exec = instantiated(rig, captures, || Ok(rig.device.fill(captures, range, 9)?))?;
    rig.destroy_stream(captures)?;
    rig.device.launch_graph(exec, launches)?;
    rig.expect_filled(launches, range, 9)
}

/// Orders later work on `stream` after the work on `of`.
fn follow(rig: &Rig, stream: Stream, of: Stream) -> Checked {
    let event = rig.event()?;
    rig.device.record(event, of)?;
    rig.device.wait(stream, event)?;
    Ok(())
}

fn work_of_a_joined_stream_runs_in_the_captured_order(rig: &Rig) -> Checked {
    let (a, b, c, d) = (large(rig)?, large(rig)?, large(rig)?, large(rig)?);
    let (origin, side) = (rig.stream()?, rig.stream()?);
    let exec = instantiated(rig, origin, || {
        rig.device.fill(origin, a, 0x61)?;
        follow(rig, side, origin)?;
        // Both branches read what was written before the fork.
        rig.device.copy(side, copy(a, b))?;
        rig.device.copy(origin, copy(a, c))?;
        follow(rig, origin, side)?;
        rig.device.copy(origin, copy(b, d))?;
        Ok(rig.device.fill(origin, a, 0x62)?)
    })?;
    for byte in 1..=4 {
        for range in [b, c, d] {
            rig.device.fill(origin, range, byte)?;
        }
        rig.device.launch_graph(exec, origin)?;
        for range in [b, c, d] {
            rig.expect_filled(origin, first_page(rig, range), 0x61)?;
        }
        rig.expect_filled(origin, first_page(rig, a), 0x62)?;
    }
    Ok(())
}

/// Returns the only dependency of the next work of `stream`.
fn last_node(rig: &Rig, stream: Stream) -> Checked<GraphNode> {
    match dependencies(rig, stream)?[..] {
        [node] => Ok(node),
        ref dependencies => Err(Failure(format!("expected one dependency, got {dependencies:?}"))),
    }
}

fn dependencies(rig: &Rig, stream: Stream) -> Checked<Vec<GraphNode>> {
    let info = rig.device.capture_info(stream)?;
    Ok(info
        .ok_or_else(|| Failure("the stream is reported as not capturing".to_owned()))?
        .dependencies)
}

/// Returns true if `node` is one of `dependencies` or of their ancestors.
fn reaches(rig: &Rig, node: GraphNode, dependencies: &[GraphNode]) -> Checked<bool> {
    let mut open = dependencies.to_vec();
    while let Some(next) = open.pop() {
        if next == node {
            return Ok(true);
        }
        open.extend(rig.device.node_dependencies(next)?);
    }
    Ok(false)
}

fn dependencies_follow_the_order_of_one_stream(rig: &Rig) -> Checked {
    let range = page(rig)?;
    let stream = rig.stream()?;
    let mut seen: Vec<GraphNode> = Vec::new();
    rig.begin_capture(stream, CaptureMode::Global)?;
    for byte in 0..4 {
        rig.device.fill(stream, range, byte)?;
        let node = last_node(rig, stream)?;
        ensure!(!seen.contains(&node), "{node:?} is the node of two fills");
        let before = rig.device.node_dependencies(node)?;
        let last = seen.last().copied();
        ensure!(before.iter().copied().eq(last), "{node:?} depends on {before:?}, not on {last:?}");
        seen.push(node);
    }
    let nodes = rig.device.graph_nodes(rig.end_capture(stream)?)?;
    ensure!(nodes == 4, "four fills are {nodes} nodes");
    Ok(())
}

fn dependencies_show_forks_and_joins(rig: &Rig) -> Checked {
    let (a, b, c) = (page(rig)?, page(rig)?, page(rig)?);
    let (origin, side) = (rig.stream()?, rig.stream()?);
    let device = rig.device;
    rig.begin_capture(origin, CaptureMode::Global)?;
    device.fill(origin, a, 1)?;
    let root = last_node(rig, origin)?;
    ensure!(device.capture_info(side)?.is_none(), "a stream captures before it joins");
    follow(rig, side, origin)?;
    ensure!(device.is_capturing(side)?, "a wait for a captured event adds no stream");
    ensure!(
        dependencies(rig, side)? == [root],
        "the fork begins at {:?}",
        dependencies(rig, side)?
    );
    let same = device.capture_info(side)?.map(|info| info.capture)
        == device.capture_info(origin)?.map(|info| info.capture);
    ensure!(same, "the streams are in different captures");
    device.fill(side, b, 2)?;
    device.fill(origin, c, 3)?;
    let (left, right) = (last_node(rig, side)?, last_node(rig, origin)?);
    ensure!(!reaches(rig, left, &[right])?, "the branches are ordered");
    ensure!(!reaches(rig, right, &[left])?, "the branches are ordered");
    follow(rig, origin, side)?;
    let joined = dependencies(rig, origin)?;
    ensure!(reaches(rig, left, &joined)?, "the join does not depend on the joined stream");
    ensure!(reaches(rig, right, &joined)?, "the join does not depend on its own stream");
    device.fill(origin, a, 4)?;
    let last = last_node(rig, origin)?;
    for before in [root, left, right] {
        ensure!(reaches(rig, before, &[last])?, "{last:?} does not depend on {before:?}");
    }
    ensure!(!reaches(rig, last, &[left, right])?, "an earlier node depends on {last:?}");
    let nodes = device.graph_nodes(rig.end_capture(origin)?)?;
    ensure!(nodes == 4, "four fills are {nodes} nodes");
    Ok(())
}

fn a_graph_is_ready_only_while_the_memory_of_its_fills_is_mapped(rig: &Rig) -> Checked {
    let range = page(rig)?;
    let stream = rig.stream()?;
    rig.begin_capture(stream, CaptureMode::Relaxed)?;
    rig.device.fill(stream, range, 1)?;
    let graph = rig.end_capture(stream)?;
    rig.instantiate(graph)?;
    rig.unmap(range)?;
    if let Ok(exec) = rig.device.instantiate(graph) {
        rig.device.destroy_graph_exec(exec)?;
        ensure!(false, "a graph whose memory is not mapped is ready to launch");
    }
    Ok(())
}

fn nodes_are_valid_until_the_graph_is_destroyed(rig: &Rig) -> Checked {
    let range = page(rig)?;
    let stream = rig.stream()?;
    let device = rig.device;
    rig.begin_capture(stream, CaptureMode::Global)?;
    device.fill(stream, range, 1)?;
    device.fill(stream, range, 2)?;
    let last = last_node(rig, stream)?;
    let before = device.node_dependencies(last)?;
    let graph = rig.end_capture(stream)?;
    ensure!(device.node_dependencies(last)? == before, "the end changed the dependencies");
    rig.destroy_graph(graph)?;
    let gone = device.node_dependencies(last);
    refused("a node of a destroyed graph", ErrorKind::InvalidUse, gone)?;

    rig.begin_capture(stream, CaptureMode::Global)?;
    device.fill(stream, range, 3)?;
    let anew = last_node(rig, stream)?;
    ensure!(anew != last, "a destroyed node has the same id");
    refused("allocate", ErrorKind::Capturing, device.alloc_memory(rig.page))?;
    refused("the end", ErrorKind::Capturing, rig.end_capture(stream))?;
    let gone = device.node_dependencies(anew);
    refused("a node of an invalidated capture", ErrorKind::InvalidUse, gone)
}

fn graphs_are_destroyed_once_and_in_any_order(rig: &Rig) -> Checked {
    let range = page(rig)?;
    let stream = rig.stream()?;
    let device = rig.device;
    let invalid = ErrorKind::InvalidUse;
    for graph_first in [true, false] {
        let graph = captured(rig, stream, || Ok(device.fill(stream, range, 6)?))?;
        let (exec, again) = (rig.instantiate(graph)?, rig.instantiate(graph)?);
        if graph_first {
            rig.destroy_graph(graph)?;
            rig.destroy_graph_exec(again)?;
        } else {
            rig.destroy_graph_exec(again)?;
            rig.destroy_graph(graph)?;
        }
        refused("destroy a graph twice", invalid, rig.destroy_graph(graph))?;
        refused("instantiate a destroyed graph", invalid, rig.instantiate(graph))?;
        refused("count a destroyed graph", invalid, device.graph_nodes(graph))?;
        refused("launch a destroyed graph", invalid, device.launch_graph(again, stream))?;
        device.launch_graph(exec, stream)?;
        rig.expect_filled(stream, range, 6)?;
        rig.destroy_graph_exec(exec)?;
        refused("destroy twice", invalid, rig.destroy_graph_exec(exec))?;
        device.fill(stream, range, 7)?;
    }
    Ok(())
}

fn a_graph_destroyed_in_flight_still_completes(rig: &Rig) -> Checked {
    let (a, b) = (large(rig)?, large(rig)?);
    let (origin, side) = (rig.stream()?, rig.stream()?);
    let graph = captured(rig, origin, || {
        rig.device.fill(origin, a, 1)?;
        follow(rig, side, origin)?;
        rig.device.copy(side, copy(a, b))?;
        follow(rig, origin, side)
    })?;
    let exec = rig.instantiate(graph)?;
    for byte in 2..10 {
        rig.device.fill(origin, b, byte)?;
    }
    rig.device.launch_graph(exec, origin)?;
    rig.destroy_graph_exec(exec)?;
    rig.destroy_graph(graph)?;
    rig.expect_filled(origin, first_page(rig, b), 1)
}
