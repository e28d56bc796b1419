//! Captures and graphs.
//!
//! Calls on graphs hold one lock, because the driver requires calls on one graph to be serialised. A
//! capture is a graph that calls on its streams extend: [`crate::turns`] serialises those.
//!
//! Locks are taken in this order: the turn, the node ids, the tables.

use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vramp_driver::{
    Call, CaptureInfo, CaptureMode, DriverResult, Graph, GraphExec, GraphNode, Stream,
};

use crate::capture_mode::{CaptureNow, capture_now, raw_mode};
use crate::device::{CudaDriver, refused, symbol};
use crate::error::invalid_id;
use crate::node_ids::{NodeIds, RawNode};
use crate::raw::{RawExec, RawGraph, RawStream};
use crate::sys::{CUgraphEdgeData, CUresult, CUstreamCaptureStatus};
use crate::table::Opaque;
use crate::turns::Alone;
use crate::uses;

pub(crate) fn begin_capture(
    driver: &CudaDriver,
    stream: Stream,
    mode: CaptureMode,
) -> DriverResult<()> {
    let call = Call::BeginCapture;
    let _entered = driver.enter(call)?;
    let begin = symbol!(driver, call, cuStreamBeginCapture_v2);
    let id = stream.number();
    let stream = driver.streams.get(id).map_err(refused(call, "stream", id))?;
    let mut turn = driver.turn_alone();
    // SAFETY: the stream is held, so it is live.
    let code = unsafe { begin(stream.raw(), raw_mode(mode)) };
    driver.settle(call, code, || format!("stream {id:#x}"))?;
    // The driver does not report the number of an invalidated capture.
    let capture = match capture_now(driver, &stream) {
        CaptureNow::In(capture) => Some(capture),
        CaptureNow::Outside | CaptureNow::Unknown => None,
    };
    turn.begun(id, capture);
    if capture.is_some() {
        driver.node_ids().observe(id, capture);
    }
    Ok(())
}

pub(crate) fn end_capture(driver: &CudaDriver, stream: Stream) -> DriverResult<Graph> {
    let call = Call::EndCapture;
    let _entered = driver.enter(call)?;
    let end = symbol!(driver, call, cuStreamEndCapture);
    let id = stream.number();
    let stream = driver.streams.get(id).map_err(refused(call, "stream", id))?;
    let mut turn = driver.turn_alone();
    let mut nodes = driver.node_ids();
    let capture = nodes.capture_of(id);
    let mut raw = null_mut();
    // SAFETY: the stream is held; `raw` outlives the call.
    let code = unsafe { end(stream.raw(), &mut raw) };
    let code = match code {
        // NVIDIA's manual describes this result for an invalidated capture; drivers return the code.
        CUresult::CUDA_SUCCESS if raw.is_null() => CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        code => code,
    };
    let ended = driver.settle(call, code, || format!("stream {id:#x}"));
    // A capture goes on if its end was refused because of the stream.
    let over = ended.is_ok() || matches!(capture_now(driver, &stream), CaptureNow::Outside);
    let mut buffers = Vec::new();
    if over {
        if let Some(begun) = turn.ended(id) {
            let kept = driver.captured().remove(&begun).unwrap_or_default();
            buffers.extend(kept.into_values());
        }
        match (capture, &ended) {
            (Some(capture), Ok(())) => nodes.keep(capture),
            (Some(capture), Err(_)) => nodes.remove(capture),
            (None, _) => {}
        }
    }
    ended?;
    let graph = RawGraph { raw: Opaque(raw), capture, buffers: buffers.into() };
    Ok(Graph::from_number(driver.graphs.insert(graph)))
}

/// State of a stream with regard to captures.
enum CaptureState {
    Outside,
    Valid { capture: u64, dependencies: Vec<RawNode> },
    Invalidated,
}

/// Returns the state of a stream. No other call on a stream runs while `_alone` lives.
fn capture_state(
    driver: &CudaDriver,
    call: Call,
    stream: &RawStream,
    _alone: &Alone<'_>,
) -> DriverResult<CaptureState> {
    let get = symbol!(driver, call, cuStreamGetCaptureInfo_v3);
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut capture, mut count) = (0, 0);
    let (mut nodes, mut edges) = (std::ptr::null(), std::ptr::null());
    // SAFETY: the stream is held; all outputs outlive the call. Null skips the graph, which is not
    // needed.
    let code = unsafe {
        get(stream.raw(), &mut status, &mut capture, null_mut(), &mut nodes, &mut edges, &mut count)
    };
    driver.settle(call, code, String::new)?;
    match status {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(CaptureState::Outside),
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE if nodes.is_null() => {
            Ok(CaptureState::Valid { capture, dependencies: Vec::new() })
        }
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => {
            // SAFETY: the driver's array of `count` nodes is valid until the next call on the stream
            // or the end of the capture. This call runs alone, and the contract of `adopt_stream`
            // excludes calls of other code.
            let dependencies = unsafe { std::slice::from_raw_parts(nodes, count) };
            Ok(CaptureState::Valid {
                capture,
                dependencies: dependencies.iter().map(|node| *node as RawNode).collect(),
            })
        }
        _ => Ok(CaptureState::Invalidated),
    }
}

pub(crate) fn capture_info(
    driver: &CudaDriver,
    stream: Stream,
) -> DriverResult<Option<CaptureInfo>> {
    let call = Call::CaptureInfo;
    let _entered = driver.enter(call)?;
    let id = stream.number();
    let stream = driver.streams.get(id).map_err(refused(call, "stream", id))?;
    let turn = driver.turn_alone();
    let mut nodes = driver.node_ids();
    let (capture, dependencies) = match capture_state(driver, call, &stream, &turn)? {
        CaptureState::Outside => {
            nodes.observe(id, None);
            return Ok(None);
        }
        CaptureState::Valid { capture, dependencies } => (capture, dependencies),
        CaptureState::Invalidated => {
            let code = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
            return driver.settle(call, code, || format!("stream {id:#x}")).map(|()| None);
        }
    };
    nodes.observe(id, Some(capture));
    let mut read = |node| read_dependencies(driver, call, node);
    let dependencies = dependencies.into_iter().map(|node| nodes.id_of(capture, node, &mut read));
    Ok(Some(CaptureInfo { capture, dependencies: dependencies.collect::<DriverResult<_>>()? }))
}

/// Reads the direct dependencies of a node of a valid capture.
fn read_dependencies(driver: &CudaDriver, call: Call, node: RawNode) -> DriverResult<Vec<RawNode>> {
    let get = symbol!(driver, call, cuGraphNodeGetDependencies_v2);
    let node = node as crate::sys::CUgraphNode;
    // Most nodes have one or two dependencies. A full array may have been too short.
    let mut room = 8;
    let before = loop {
        let mut before = vec![null_mut(); room];
        let mut edges = vec![CUgraphEdgeData::default(); room];
        let mut count = room;
        // SAFETY: the capture is valid, so its nodes are live, and no other call extends it, because
        // the caller runs alone; both arrays have `count` elements.
        let code = unsafe { get(node, before.as_mut_ptr(), edges.as_mut_ptr(), &mut count) };
        driver.settle(call, code, || "cuGraphNodeGetDependencies".into())?;
        if count < room {
            before.truncate(count);
            break before;
        }
        room *= 4;
    };
    let mut before: Vec<RawNode> = before.into_iter().map(|node| node as RawNode).collect();
    // Two edges of different types may lead to one node.
    before.sort_unstable();
    before.dedup();
    Ok(before)
}

pub(crate) fn node_dependencies(
    driver: &CudaDriver,
    node: GraphNode,
) -> DriverResult<Vec<GraphNode>> {
    let call = Call::NodeDependencies;
    driver.refuse_if_lost(call)?;
    let nodes = driver.node_ids();
    let unknown =
        || invalid_id(call, format!("graph node {:#x}: unknown or destroyed", node.number()));
    Ok(nodes.dependencies(node).ok_or_else(unknown)?.to_vec())
}

pub(crate) fn graph_nodes(driver: &CudaDriver, graph: Graph) -> DriverResult<usize> {
    let call = Call::GraphNodes;
    let _entered = driver.enter(call)?;
    let get = symbol!(driver, call, cuGraphGetNodes);
    let id = graph.number();
    let graph = driver.graphs.get(id).map_err(refused(call, "graph", id))?;
    let _one_at_a_time = driver.node_ids();
    let mut count = 0;
    // SAFETY: the graph is held, so it is live; null requests only the number.
    let code = unsafe { get(graph.raw.0, null_mut(), &mut count) };
    driver.settle(call, code, || format!("graph {id:#x}"))?;
    Ok(count)
}

pub(crate) fn instantiate(driver: &CudaDriver, graph: Graph) -> DriverResult<GraphExec> {
    let call = Call::Instantiate;
    let _entered = driver.enter(call)?;
    let instantiate = symbol!(driver, call, cuGraphInstantiateWithFlags);
    let id = graph.number();
    let graph = driver.graphs.get(id).map_err(refused(call, "graph", id))?;
    let _one_at_a_time = driver.node_ids();
    // While another stream captures, it is refused to a thread that is not relaxed.
    let (code, ready) = driver.beside_captures(|| {
        let mut ready = null_mut();
        // SAFETY: the graph is held; `ready` outlives the call; zero is no flag.
        let code = unsafe { instantiate(&mut ready, graph.raw.0, 0) };
        (code, ready)
    });
    driver.settle(call, code, || format!("graph {id:#x}"))?;
    let buffers = Arc::clone(&graph.buffers);
    let exec = RawExec { raw: Opaque(ready), buffers, launching: Mutex::default() };
    Ok(GraphExec::from_number(driver.execs.insert(exec)))
}

pub(crate) fn launch_graph(
    driver: &CudaDriver,
    exec: GraphExec,
    stream: Stream,
) -> DriverResult<()> {
    let call = Call::LaunchGraph;
    let _entered = driver.enter(call)?;
    let launch = symbol!(driver, call, cuGraphLaunch);
    let (exec_id, stream_id) = (exec.number(), stream.number());
    let stream = driver.streams.get(stream_id).map_err(refused(call, "stream", stream_id))?;
    let exec = driver.execs.get(exec_id).map_err(refused(call, "instantiated graph", exec_id))?;
    // A panic while it was held left nothing half done.
    let _one_at_a_time = exec.launching.lock().unwrap_or_else(PoisonError::into_inner);
    uses::queue_using(driver, call, (stream_id, &stream), &exec.buffers, || {
        // SAFETY: both are held, so they are live, and no other thread launches this graph now.
        // `queue_using` keeps the host memory that it copies from or to.
        let code = unsafe { launch(exec.raw.0, stream.raw()) };
        driver.settle(call, code, || format!("graph {exec_id:#x} on stream {stream_id:#x}"))
    })
}

pub(crate) fn destroy_graph(driver: &CudaDriver, graph: Graph) -> DriverResult<()> {
    let call = Call::DestroyGraph;
    let _entered = driver.enter(call)?;
    let destroy = symbol!(driver, call, cuGraphDestroy);
    let id = graph.number();
    let mut nodes = driver.node_ids();
    let claim = driver.graphs.claim(id).map_err(refused(call, "graph", id))?;
    // Another stream may capture: a thread that is not relaxed would invalidate its capture.
    // SAFETY: the claim proves that the graph is live and in no other call.
    let code = driver.beside_captures(|| unsafe { destroy(claim.object().raw.0) });
    driver.settle(call, code, || format!("graph {id:#x}"))?;
    if let Some(capture) = claim.object().capture {
        nodes.remove(capture);
    }
    claim.destroyed();
    Ok(())
}

pub(crate) fn destroy_graph_exec(driver: &CudaDriver, exec: GraphExec) -> DriverResult<()> {
    let call = Call::DestroyGraphExec;
    let _entered = driver.enter(call)?;
    let destroy = symbol!(driver, call, cuGraphExecDestroy);
    let id = exec.number();
    let claim = driver.execs.claim(id).map_err(refused(call, "instantiated graph", id))?;
    // As above.
    // SAFETY: the claim proves that the graph is live and in no other call.
    let code = driver.beside_captures(|| unsafe { destroy(claim.object().raw.0) });
    driver.settle(call, code, || format!("instantiated graph {id:#x}"))?;
    claim.destroyed();
    Ok(())
}

impl CudaDriver {
    /// Locks the node ids, and with them all calls on graphs.
    fn node_ids(&self) -> MutexGuard<'_, NodeIds> {
        // A panic leaves at worst a node without an id.
        self.node_ids.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
