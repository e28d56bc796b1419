//! What captured work is, and what launching it does.

use vramp_core::{AddrRange, Bytes};

use super::bench::{Bench, pattern, refused};
use super::{Checked, Failure, ensure, rules};
use crate::{
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
    nodes_tell_the_order_of_one_stream: VIRTUAL,
    nodes_tell_forks_and_joins: VIRTUAL,
    nodes_are_known_until_the_graph_is_destroyed: VIRTUAL,
    graphs_are_destroyed_once_and_in_any_order: WITH_HOST,
    a_graph_destroyed_in_flight_still_completes: WITH_HOST,
}

/// Memory that a fill takes a while to write.
fn large(bench: &Bench) -> Checked<AddrRange> {
    Ok(bench.memory(&[bench.whole_pages(Bytes::mib(32))])?)
}

fn page(bench: &Bench) -> Checked<AddrRange> {
    Ok(bench.memory(&[bench.page])?)
}

fn first_page(bench: &Bench, of: AddrRange) -> AddrRange {
    AddrRange::new(of.start, bench.page)
}

/// What `work` captures on `stream`.
fn captured(bench: &Bench, stream: Stream, work: impl FnOnce() -> Checked) -> Checked<Graph> {
    bench.begin_capture(stream, CaptureMode::Global)?;
    work()?;
    Ok(bench.end_capture(stream)?)
}

/// The same, ready to launch.
fn ready(bench: &Bench, stream: Stream, work: impl FnOnce() -> Checked) -> Checked<GraphExec> {
    Ok(bench.instantiate(captured(bench, stream, work)?)?)
}

fn copy(from: AddrRange, to: AddrRange) -> DeviceCopy {
    DeviceCopy { from: from.start, to: to.start, len: to.len }
}

fn captured_work_runs_at_each_launch_and_not_before(bench: &Bench) -> Checked {
    let range = page(bench)?;
    let stream = bench.stream()?;
    bench.device.fill(stream, range, 1)?;
    let exec = ready(bench, stream, || Ok(bench.device.fill(stream, range, 2)?))?;
    bench.expect_filled(stream, range, 1)?;
    for _ in 0..3 {
        bench.device.launch_graph(exec, stream)?;
        bench.expect_filled(stream, range, 2)?;
        bench.device.fill(stream, range, 3)?;
        bench.expect_filled(stream, range, 3)?;
    }
    Ok(())
}

fn a_replay_reads_its_input_anew(bench: &Bench) -> Checked {
    let (input, output) = (page(bench)?, page(bench)?);
    let stream = bench.stream()?;
    let exec = ready(bench, stream, || Ok(bench.device.copy(stream, copy(input, output))?))?;
    for seed in [11, 12, 13] {
        let bytes = pattern(seed, input.len);
        bench.write(stream, input.start, &bytes)?;
        bench.device.launch_graph(exec, stream)?;
        bench.expect_bytes(stream, output, &bytes)?;
    }
    Ok(())
}

fn a_replay_copies_from_and_to_pinned_memory(bench: &Bench) -> Checked {
    let range = page(bench)?;
    let stream = bench.stream()?;
    let len = bench.page;
    let (from, to) = (bench.host(len)?, bench.host(len)?);
    let slice = |buffer| HostSlice { buffer, offset: Bytes::ZERO, len };
    let exec = ready(bench, stream, || {
        bench.device.copy_to_device(stream, slice(from), range.start)?;
        Ok(bench.device.copy_to_host(stream, range.start, slice(to))?)
    })?;
    for seed in [21, 22] {
        let bytes = pattern(seed, len);
        bench.device.write_host(from, Bytes::ZERO, &bytes)?;
        bench.device.launch_graph(exec, stream)?;
        bench.device.synchronize_stream(stream)?;
        let mut seen = vec![0; bytes.len()];
        bench.device.read_host(to, Bytes::ZERO, &mut seen)?;
        ensure!(seen == bytes, "pattern {seed} did not come back");
    }
    Ok(())
}

fn a_replay_writes_the_pages_that_are_mapped_when_it_runs(bench: &Bench) -> Checked {
    let range = bench.reserve(bench.page)?;
    let (first, second) = (bench.create(bench.page)?, bench.create(bench.page)?);
    let stream = bench.stream()?;
    bench.map(range, first)?;
    bench.device.set_access(range)?;
    let exec = ready(bench, stream, || Ok(bench.device.fill(stream, range, 0x31)?))?;
    bench.device.launch_graph(exec, stream)?;
    bench.expect_filled(stream, range, 0x31)?;
    bench.device.fill(stream, range, 0x41)?;
    bench.device.synchronize_stream(stream)?;
    bench.unmap(range)?;
    bench.map(range, second)?;
    bench.device.set_access(range)?;
    bench.device.fill(stream, range, 0x51)?;
    bench.device.launch_graph(exec, stream)?;
    bench.expect_filled(stream, range, 0x31)?;
    // The pages that were there before are as they were.
    let elsewhere = bench.mapped_again(first, bench.page)?;
    bench.expect_filled(stream, elsewhere, 0x41)
}

fn a_launch_comes_in_order_of_its_stream(bench: &Bench) -> Checked {
    let (a, b, c) = (large(bench)?, large(bench)?, large(bench)?);
    let stream = bench.stream()?;
    let exec = ready(bench, stream, || Ok(bench.device.copy(stream, copy(a, b))?))?;
    for byte in 1..=8 {
        bench.device.fill(stream, a, byte)?;
        bench.device.launch_graph(exec, stream)?;
        bench.device.copy(stream, copy(b, c))?;
        bench.device.fill(stream, a, 0xee)?;
        bench.device.fill(stream, b, 0xdd)?;
        bench.expect_filled(stream, first_page(bench, c), byte)?;
    }
    Ok(())
}

fn launches_of_one_graph_come_one_after_the_other(bench: &Bench) -> Checked {
    let (a, b) = (large(bench)?, large(bench)?);
    let (first, second) = (bench.stream()?, bench.stream()?);
    // A launch that began before the one ahead of it was over would copy what that one wrote first.
    let exec = ready(bench, first, || {
        bench.device.copy(first, copy(a, b))?;
        bench.device.fill(first, a, 0x77)?;
        Ok(bench.device.fill(first, a, 0x78)?)
    })?;
    bench.device.fill(first, a, 1)?;
    bench.device.synchronize_stream(first)?;
    for _ in 0..4 {
        bench.device.launch_graph(exec, first)?;
        bench.device.launch_graph(exec, second)?;
    }
    bench.expect_filled(second, first_page(bench, b), 0x78)?;
    bench.expect_filled(second, first_page(bench, a), 0x78)
}

fn a_graph_is_captured_on_one_stream_and_launched_on_another(bench: &Bench) -> Checked {
    let range = page(bench)?;
    let (captures, launches) = (bench.stream()?, bench.stream()?);
    let exec = ready(bench, captures, || Ok(bench.device.fill(captures, range, 9)?))?;
    bench.destroy_stream(captures)?;
    bench.device.launch_graph(exec, launches)?;
    bench.expect_filled(launches, range, 9)
}

/// Lets `stream` come behind what `of` did so far.
fn follow(bench: &Bench, stream: Stream, of: Stream) -> Checked {
    let event = bench.event()?;
    bench.device.record(event, of)?;
    bench.device.wait(stream, event)?;
    Ok(())
}

fn work_of_a_joined_stream_runs_in_the_captured_order(bench: &Bench) -> Checked {
    let (a, b, c, d) = (large(bench)?, large(bench)?, large(bench)?, large(bench)?);
    let (origin, side) = (bench.stream()?, bench.stream()?);
    let exec = ready(bench, origin, || {
        bench.device.fill(origin, a, 0x61)?;
        follow(bench, side, origin)?;
        // Both branches read what was before the fork.
        bench.device.copy(side, copy(a, b))?;
        bench.device.copy(origin, copy(a, c))?;
        follow(bench, origin, side)?;
        bench.device.copy(origin, copy(b, d))?;
        Ok(bench.device.fill(origin, a, 0x62)?)
    })?;
    for byte in 1..=4 {
        for range in [b, c, d] {
            bench.device.fill(origin, range, byte)?;
        }
        bench.device.launch_graph(exec, origin)?;
        for range in [b, c, d] {
            bench.expect_filled(origin, first_page(bench, range), 0x61)?;
        }
        bench.expect_filled(origin, first_page(bench, a), 0x62)?;
    }
    Ok(())
}

/// The one node that the next work of `stream` will come behind.
fn last_node(bench: &Bench, stream: Stream) -> Checked<GraphNode> {
    match dependencies(bench, stream)?[..] {
        [node] => Ok(node),
        ref dependencies => Err(Failure(format!("expected one dependency, got {dependencies:?}"))),
    }
}

fn dependencies(bench: &Bench, stream: Stream) -> Checked<Vec<GraphNode>> {
    let info = bench.device.capture_info(stream)?;
    Ok(info.ok_or_else(|| Failure("the stream is said not to capture".to_owned()))?.dependencies)
}

/// True if `node` is one of `dependencies`, or any of them comes behind it.
fn reaches(bench: &Bench, node: GraphNode, dependencies: &[GraphNode]) -> Checked<bool> {
    let mut open = dependencies.to_vec();
    while let Some(next) = open.pop() {
        if next == node {
            return Ok(true);
        }
        open.extend(bench.device.node_dependencies(next)?);
    }
    Ok(false)
}

fn nodes_tell_the_order_of_one_stream(bench: &Bench) -> Checked {
    let range = page(bench)?;
    let stream = bench.stream()?;
    let mut seen: Vec<GraphNode> = Vec::new();
    bench.begin_capture(stream, CaptureMode::Global)?;
    for byte in 0..4 {
        bench.device.fill(stream, range, byte)?;
        let node = last_node(bench, stream)?;
        ensure!(!seen.contains(&node), "{node:?} stands for two fills");
        let before = bench.device.node_dependencies(node)?;
        let last = seen.last().copied();
        ensure!(before.iter().copied().eq(last), "{node:?} is behind {before:?}, not {last:?}");
        seen.push(node);
    }
    let nodes = bench.device.graph_nodes(bench.end_capture(stream)?)?;
    ensure!(nodes == 4, "four fills are {nodes} nodes");
    Ok(())
}

fn nodes_tell_forks_and_joins(bench: &Bench) -> Checked {
    let (a, b, c) = (page(bench)?, page(bench)?, page(bench)?);
    let (origin, side) = (bench.stream()?, bench.stream()?);
    let device = bench.device;
    bench.begin_capture(origin, CaptureMode::Global)?;
    device.fill(origin, a, 1)?;
    let root = last_node(bench, origin)?;
    ensure!(device.capture_info(side)?.is_none(), "a stream captures before it is drawn in");
    follow(bench, side, origin)?;
    ensure!(device.is_capturing(side)?, "a wait for a captured event draws no stream in");
    ensure!(
        dependencies(bench, side)? == [root],
        "the fork begins at {:?}",
        dependencies(bench, side)?
    );
    let same = device.capture_info(side)?.map(|info| info.capture)
        == device.capture_info(origin)?.map(|info| info.capture);
    ensure!(same, "both streams are part of one capture");
    device.fill(side, b, 2)?;
    device.fill(origin, c, 3)?;
    let (left, right) = (last_node(bench, side)?, last_node(bench, origin)?);
    ensure!(!reaches(bench, left, &[right])?, "the branches are in order");
    ensure!(!reaches(bench, right, &[left])?, "the branches are in order");
    follow(bench, origin, side)?;
    let joined = dependencies(bench, origin)?;
    ensure!(reaches(bench, left, &joined)?, "the join does not reach what was joined");
    ensure!(reaches(bench, right, &joined)?, "the join does not reach its own stream");
    device.fill(origin, a, 4)?;
    let last = last_node(bench, origin)?;
    for before in [root, left, right] {
        ensure!(reaches(bench, before, &[last])?, "{last:?} is not behind {before:?}");
    }
    ensure!(!reaches(bench, last, &[left, right])?, "an earlier node is behind {last:?}");
    let nodes = device.graph_nodes(bench.end_capture(origin)?)?;
    ensure!(nodes == 4, "four fills are {nodes} nodes");
    Ok(())
}

fn nodes_are_known_until_the_graph_is_destroyed(bench: &Bench) -> Checked {
    let range = page(bench)?;
    let stream = bench.stream()?;
    let device = bench.device;
    bench.begin_capture(stream, CaptureMode::Global)?;
    device.fill(stream, range, 1)?;
    device.fill(stream, range, 2)?;
    let last = last_node(bench, stream)?;
    let before = device.node_dependencies(last)?;
    let graph = bench.end_capture(stream)?;
    ensure!(device.node_dependencies(last)? == before, "the end changed the order");
    bench.destroy_graph(graph)?;
    let gone = device.node_dependencies(last);
    refused("a node of a destroyed graph", ErrorKind::InvalidUse, gone)?;

    bench.begin_capture(stream, CaptureMode::Relaxed)?;
    device.fill(stream, range, 3)?;
    let anew = last_node(bench, stream)?;
    ensure!(anew != last, "a node has the name of one that is gone");
    refused("synchronise", ErrorKind::Capturing, device.synchronize_stream(stream))?;
    refused("the end", ErrorKind::Capturing, bench.end_capture(stream))?;
    let gone = device.node_dependencies(anew);
    refused("a node of a spoilt capture", ErrorKind::InvalidUse, gone)
}

fn graphs_are_destroyed_once_and_in_any_order(bench: &Bench) -> Checked {
    let range = page(bench)?;
    let stream = bench.stream()?;
    let device = bench.device;
    let invalid = ErrorKind::InvalidUse;
    for graph_first in [true, false] {
        let graph = captured(bench, stream, || Ok(device.fill(stream, range, 6)?))?;
        let (exec, again) = (bench.instantiate(graph)?, bench.instantiate(graph)?);
        if graph_first {
            bench.destroy_graph(graph)?;
            bench.destroy_graph_exec(again)?;
        } else {
            bench.destroy_graph_exec(again)?;
            bench.destroy_graph(graph)?;
        }
        refused("destroy a graph twice", invalid, bench.destroy_graph(graph))?;
        refused("make a dead graph ready", invalid, bench.instantiate(graph))?;
        refused("count a dead graph", invalid, device.graph_nodes(graph))?;
        refused("launch what is dead", invalid, device.launch_graph(again, stream))?;
        device.launch_graph(exec, stream)?;
        bench.expect_filled(stream, range, 6)?;
        bench.destroy_graph_exec(exec)?;
        refused("destroy twice", invalid, bench.destroy_graph_exec(exec))?;
        device.fill(stream, range, 7)?;
    }
    Ok(())
}

fn a_graph_destroyed_in_flight_still_completes(bench: &Bench) -> Checked {
    let (a, b) = (large(bench)?, large(bench)?);
    let (origin, side) = (bench.stream()?, bench.stream()?);
    let graph = captured(bench, origin, || {
        bench.device.fill(origin, a, 1)?;
        follow(bench, side, origin)?;
        bench.device.copy(side, copy(a, b))?;
        follow(bench, origin, side)
    })?;
    let exec = bench.instantiate(graph)?;
    for byte in 2..10 {
        bench.device.fill(origin, b, byte)?;
    }
    bench.device.launch_graph(exec, origin)?;
    bench.destroy_graph_exec(exec)?;
    bench.destroy_graph(graph)?;
    bench.expect_filled(origin, first_page(bench, b), 1)
}
