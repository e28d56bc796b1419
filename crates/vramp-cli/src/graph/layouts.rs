//! A job captured into arenas, one for each way of placing blocks.

use std::collections::HashMap;
use std::time::Instant;

use vramp_alloc::Bytes;
use vramp_alloc::graph::{ArenaAllocError, ArenaPolicy};
use vramp_core::{
    Arena, ArenaBlockId, ArenaCaptureError, ArenaFreeError, ArenaId, ArenaResetError, LayoutError,
    NodeId, Recording, UnknownArenaBlock, pack,
};

use super::{Job, Step};

/// Addresses enough for any job.
const CAPACITY: Bytes = Bytes::tib(1 << 17);

/// What a job needs, placed in each way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layouts {
    /// Blocks that the capture takes.
    pub blocks: usize,
    /// Blocks that outlive it.
    pub escaped: usize,
    /// The most that is live at once: no layout needs less.
    pub lower_bound: Bytes,
    /// The most that the streams may have in use at once in any order of a replay: that, or more.
    pub conflict_bound: Bytes,
    /// Nothing serves twice.
    pub monotone: Bytes,
    /// What the first capture takes, block by block.
    pub reusing: Bytes,
    /// What the plan made of that one takes.
    pub planned: Bytes,
    /// What the same capture takes when it follows the plan.
    pub second: Bytes,
    /// True if it could follow to the end.
    pub followed: bool,
    /// Host time that the plan took.
    pub pack_ns: u64,
}

/// Why a job could not be captured. None of these can come from a recording.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// No block.
    #[error(transparent)]
    Alloc(#[from] ArenaAllocError),
    /// No node, no use, or no free.
    #[error(transparent)]
    Free(#[from] ArenaFreeError),
    /// A block that escaped is gone.
    #[error(transparent)]
    Escaped(#[from] UnknownArenaBlock),
    /// No capture.
    #[error(transparent)]
    Capture(#[from] ArenaCaptureError),
    /// No new start.
    #[error(transparent)]
    Reset(#[from] ArenaResetError),
    /// The plan puts two blocks in one place.
    #[error("the plan is wrong: {0}")]
    Plan(#[from] LayoutError),
}

/// Captures a job in each way. Planning takes up to a second, the rest O(blocks) times the free
/// pieces.
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

    // As though the first graph and its results were gone.
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

/// What came of one capture.
struct Captured {
    recording: Recording,
    escaped: Vec<ArenaBlockId>,
    followed: bool,
}

fn capture(arena: &mut Arena, job: &Job) -> Result<Captured, GraphError> {
    arena.begin()?;
    let mut chains = Chains::new(job.streams);
    let mut held: HashMap<u32, (ArenaBlockId, usize)> = HashMap::new();
    for step in &job.steps {
        match *step {
            Step::Alloc { block, size, stream } => {
                let made = arena.alloc(size, chains.tip(stream))?;
                held.insert(block, (made.id, stream));
                chains.work(arena, stream)?;
            }
            Step::Free { block, used_elsewhere } => {
                let (id, stream) = held.remove(&block).expect("a job frees what it took, once");
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
    let mut escaped: Vec<ArenaBlockId> = held.into_values().map(|(id, _)| id).collect();
    escaped.sort_unstable();
    Ok(Captured { recording: arena.end()?, escaped, followed })
}

/// The captured work of each stream: one node behind the other.
struct Chains {
    tips: Vec<Option<NodeId>>,
    nodes: u64,
}

impl Chains {
    fn new(streams: usize) -> Chains {
        Chains { tips: vec![None; streams], nodes: 0 }
    }

    /// What the stream's next node will depend on.
    fn tip(&self, stream: usize) -> &[NodeId] {
        self.tips[stream].as_slice()
    }

    /// A kernel is captured.
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
        let (name, events) = ("made".to_owned(), 0..steps.len());
        Job { name, device: 0, events, streams, steps, older_freed: 0, recorded: None }
    }

    fn alloc(block: u32, mib: u64, stream: usize) -> Step {
        Step::Alloc { block, size: Bytes::mib(mib), stream }
    }

    fn free(block: u32) -> Step {
        Step::Free { block, used_elsewhere: false }
    }

    #[test]
    fn what_a_stream_freed_serves_it_again() {
        let found = layouts(&job(1, vec![alloc(0, 4, 0), free(0), alloc(1, 4, 0)])).unwrap();
        assert_eq!((found.blocks, found.escaped), (2, 1));
        assert_eq!(found.monotone, Bytes::mib(8));
        for taken in [found.lower_bound, found.reusing, found.planned, found.second] {
            assert_eq!(taken, Bytes::mib(4));
        }
        assert!(found.followed);
    }

    #[test]
    fn streams_without_order_share_nothing() {
        let found = layouts(&job(2, vec![alloc(0, 4, 0), free(0), alloc(1, 4, 1)])).unwrap();
        assert_eq!((found.lower_bound, found.conflict_bound), (Bytes::mib(4), Bytes::mib(8)));
        for taken in [found.monotone, found.reusing, found.planned, found.second] {
            assert_eq!(taken, Bytes::mib(8));
        }
    }

    #[test]
    fn what_another_stream_used_serves_nobody_again() {
        let used = Step::Free { block: 0, used_elsewhere: true };
        let steps = vec![alloc(0, 4, 0), used, alloc(1, 4, 0), free(1), alloc(2, 4, 0)];
        let found = layouts(&job(2, steps)).unwrap();
        assert_eq!((found.reusing, found.planned), (Bytes::mib(8), Bytes::mib(8)));
    }

    #[test]
    fn a_plan_needs_less_than_placing_block_by_block() {
        // The small block in the first gap keeps the large one from it.
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
