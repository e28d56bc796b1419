//! A job captured into arenas, one for each layout policy.

use std::collections::HashMap;
use std::time::Instant;

use vramp::Bytes;
use vramp::graph::{ArenaAllocError, ArenaPolicy};
use vramp_core::{
    Arena, ArenaBlockId, ArenaCaptureError, ArenaFreeError, ArenaId, ArenaResetError,
    CaptureRecording, LayoutError, NodeId, UnknownArenaBlock, pack,
};

use super::{Job, Step};

/// Enough addresses for any job.
const CAPACITY: Bytes = Bytes::tib(1 << 17);

/// Memory of a job by each layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layouts {
    /// Blocks that the capture allocates.
    pub blocks: usize,
    /// Blocks that outlive it.
    pub escaped: usize,
    /// Peak of the live bytes: no layout needs less.
    pub lower_bound: Bytes,
    /// Peak of the bytes that unordered streams may use at once in a replay; at least the lower
    /// bound.
    pub conflict_bound: Bytes,
    /// Memory without any reuse.
    pub monotone: Bytes,
    /// Memory of the first capture, which places block by block.
    pub reusing: Bytes,
    /// Memory of the plan made of that capture.
    pub planned: Bytes,
    /// Memory of a second capture, which follows the plan.
    pub second: Bytes,
    /// True if the second capture followed the plan to its end.
    pub followed: bool,
    /// Host time of planning.
    pub pack_ns: u64,
}

/// Why a capture of a job failed. No recording can cause it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// An allocation failed.
    #[error(transparent)]
    Alloc(#[from] ArenaAllocError),
    /// A node, a use or a free was refused.
    #[error(transparent)]
    Free(#[from] ArenaFreeError),
    /// A block that outlived its capture is unknown.
    #[error(transparent)]
    Escaped(#[from] UnknownArenaBlock),
    /// The capture was refused.
    #[error(transparent)]
    Capture(#[from] ArenaCaptureError),
    /// The arena could not be reset.
    #[error(transparent)]
    Reset(#[from] ArenaResetError),
    /// The plan is inconsistent.
    #[error("the plan is inconsistent: {0}")]
    Plan(#[from] LayoutError),
}

/// Captures a job with each layout policy. Planning takes milliseconds, the rest O(blocks * free extents).
///
/// # Errors
/// None that a recording could cause.
pub fn layouts(job: &Job) -> Result<Layouts, GraphError> {
    let mut arena = Arena::new(ArenaId::new(0), ArenaPolicy::Monotone, CAPACITY);
    let monotone = capture(&mut arena, job)?.recording.high_water();

    let mut arena = Arena::new(ArenaId::new(1), ArenaPolicy::Reusing, CAPACITY);
    let first = capture(&mut arena, job)?;
    let begun = Instant::now();
    let layout = pack(&first.recording);
    let pack_ns = begun.elapsed().as_nanos().try_into().unwrap_or(u64::MAX);
    layout.check(&first.recording)?;
    let planned = layout.high_water();

    // As if the first graph and its results were destroyed.
    first.escaped.iter().try_for_each(|&id| arena.free_outside(id).map(drop))?;
    arena.reset()?;
    arena.set_plan(Some(layout));
    let second = capture(&mut arena, job)?;
    Ok(Layouts {
        blocks: first.recording.blocks(),
        escaped: first.recording.escaped(),
        lower_bound: first.recording.lower_bound(),
        conflict_bound: first.recording.conflict_bound(),
        monotone,
        reusing: first.recording.high_water(),
        planned,
        second: second.recording.high_water(),
        followed: second.followed,
        pack_ns,
    })
}

/// One finished capture.
struct Captured {
    recording: CaptureRecording,
    escaped: Vec<ArenaBlockId>,
    followed: bool,
}

fn capture(arena: &mut Arena, job: &Job) -> Result<Captured, GraphError> {
    arena.begin()?;
    let mut chains = Chains::new(job.streams);
    let mut live: HashMap<u32, (ArenaBlockId, usize)> = HashMap::new();
    for step in &job.steps {
        match *step {
            Step::Alloc { block, size, stream } => {
                let allocated = arena.alloc(size, chains.tip(stream))?;
                live.insert(block, (allocated.id, stream));
                chains.work(arena, stream)?;
            }
            Step::Free { block, used_elsewhere } => {
                let (id, stream) =
                    live.remove(&block).expect("a job frees each of its blocks once");
                if used_elsewhere {
                    for other in (0..job.streams).filter(|&other| other != stream) {
                        chains.work(arena, other)?;
                        arena.record_use(id, chains.tip(other))?;
                    }
                }
                arena.free(id, chains.tip(stream))?;
            }
        }
    }
    let followed = arena.follows_plan();
    let mut escaped: Vec<ArenaBlockId> = live.into_values().map(|(id, _)| id).collect();
    escaped.sort_unstable();
    Ok(Captured { recording: arena.end()?, escaped, followed })
}

/// The captured work of each stream: a chain of nodes.
struct Chains {
    tips: Vec<Option<NodeId>>,
    nodes: u64,
}

impl Chains {
    fn new(streams: usize) -> Chains {
        Chains { tips: vec![None; streams], nodes: 0 }
    }

    /// Returns the nodes that the stream's next node will depend on.
    fn tip(&self, stream: usize) -> &[NodeId] {
        self.tips[stream].as_slice()
    }

    /// Captures a kernel on the stream.
    fn work(&mut self, arena: &mut Arena, stream: usize) -> Result<(), ArenaFreeError> {
        let node = NodeId(self.nodes);
        arena.add_node(node, self.tip(stream))?;
        self.nodes += 1;
        self.tips[stream] = Some(node);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(streams: usize, steps: Vec<Step>) -> Job {
        let (name, events) = ("synthetic".to_owned(), 0..steps.len());
        Job { name, device: 0, events, streams, steps, older_freed: 0, recorded: None }
    }

    fn alloc(block: u32, mib: u64, stream: usize) -> Step {
        Step::Alloc { block, size: Bytes::mib(mib), stream }
    }

    fn free(block: u32) -> Step {
        Step::Free { block, used_elsewhere: false }
    }

    #[test]
    fn a_stream_reuses_its_freed_memory() {
        let found = layouts(&job(1, vec![alloc(0, 4, 0), free(0), alloc(1, 4, 0)])).unwrap();
        assert_eq!((found.blocks, found.escaped), (2, 1));
        assert_eq!(found.monotone, Bytes::mib(8));
        for memory in [found.lower_bound, found.reusing, found.planned, found.second] {
            assert_eq!(memory, Bytes::mib(4));
        }
        assert!(found.followed);
    }

    #[test]
    fn unordered_streams_share_no_memory() {
        let found = layouts(&job(2, vec![alloc(0, 4, 0), free(0), alloc(1, 4, 1)])).unwrap();
        assert_eq!((found.lower_bound, found.conflict_bound), (Bytes::mib(4), Bytes::mib(8)));
        for memory in [found.monotone, found.reusing, found.planned, found.second] {
            assert_eq!(memory, Bytes::mib(8));
        }
    }

    #[test]
    fn a_block_used_on_another_stream_is_not_reused() {
        let used = Step::Free { block: 0, used_elsewhere: true };
        let steps = vec![alloc(0, 4, 0), used, alloc(1, 4, 0), free(1), alloc(2, 4, 0)];
        let found = layouts(&job(2, steps)).unwrap();
        assert_eq!((found.reusing, found.planned), (Bytes::mib(8), Bytes::mib(8)));
    }

    #[test]
    fn a_plan_needs_less_than_placing_block_by_block() {
        // Block by block, the small block is placed in the first gap, where the large one no longer
        // fits.
        let steps = vec![
            alloc(0, 8, 0),
            alloc(1, 1, 0),
            free(0),
            alloc(2, 1, 0),
            alloc(3, 8, 0),
            free(1),
            free(2),
            free(3),
        ];
        let found = layouts(&job(1, steps)).unwrap();
        assert_eq!(found.lower_bound, Bytes::mib(10));
        assert_eq!(
            (found.planned, found.second, found.followed),
            (Bytes::mib(10), Bytes::mib(10), true)
        );
        assert!(found.reusing > found.planned && found.reusing <= found.monotone, "{found:?}");
    }
}
