//! What holds the memory at one moment: by line of the program, by stack, by category, block by block.

use std::collections::HashMap;

use serde::Serialize;
use vramp_trace::StackId;

use crate::blocks::RequestIndex;
use crate::category::Category;
use crate::frames::{self, SiteId};
use crate::job::Job;

/// What is allocated just before one request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Moment {
    /// Number of the next request's event among those of the device; `None` at the end.
    pub event: Option<u64>,
    /// Index of the next request in the workload.
    pub request: RequestIndex,
    /// Allocated bytes.
    pub live_bytes: u64,
    /// Allocated blocks.
    pub blocks: u64,
    /// By line of the user's program, the largest first.
    pub sites: Vec<SiteShare>,
    /// By recorded call stack, the largest first.
    pub stacks: Vec<StackShare>,
    /// By category, the largest first.
    pub categories: Vec<CategoryShare>,
    /// By stream, the largest first.
    pub streams: Vec<StreamShare>,
    /// The largest blocks.
    pub largest: Vec<LargeBlock>,
}

/// What one line of the user's program holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SiteShare {
    /// The line: see [`mod@crate::frames`].
    pub site: String,
    /// Allocated bytes.
    pub bytes: u64,
    /// Allocated blocks.
    pub blocks: u64,
    /// The operations that it called, with the bytes they allocated, the largest first.
    pub operations: Vec<(String, u64)>,
}

/// What one recorded call stack holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StackShare {
    /// Index of the stack in the recording; `None` for blocks without one.
    pub stack: Option<u32>,
    /// Allocated bytes.
    pub bytes: u64,
    /// Allocated blocks.
    pub blocks: u64,
    /// Its frames, outermost first, frameworks folded.
    pub frames: Vec<String>,
}

/// What one category holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CategoryShare {
    /// The category.
    pub category: Category,
    /// Allocated bytes.
    pub bytes: u64,
    /// Allocated blocks.
    pub blocks: u64,
}

/// What was allocated on one stream.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StreamShare {
    /// Raw handle of the stream.
    pub stream: u64,
    /// Allocated bytes.
    pub bytes: u64,
}

/// One block.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LargeBlock {
    /// Requested bytes.
    pub bytes: u64,
    /// Number of the event that allocated it; `None` if it is older than the recording.
    pub event: Option<u64>,
    /// The line of the user's program.
    pub site: String,
    /// The innermost frame.
    pub operation: String,
    /// Its category.
    pub category: Category,
}

#[derive(Clone, Copy, Default)]
struct Sum {
    bytes: u64,
    blocks: u64,
}

impl Sum {
    fn add(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.blocks += 1;
    }
}

impl Moment {
    /// Returns the largest blocks, those of one size, line, operation and category as one, each with their
    /// number. The first of them stands for all. O(n^2) in the length of the list.
    pub fn largest_alike(&self) -> Vec<(u64, &LargeBlock)> {
        let mut groups: Vec<(u64, &LargeBlock)> = Vec::new();
        for block in &self.largest {
            let key = |it: &LargeBlock| (it.bytes, it.category);
            let is_alike = |(_, first): &&mut (u64, &LargeBlock)| {
                key(first) == key(block)
                    && (&first.site, &first.operation) == (&block.site, &block.operation)
            };
            match groups.iter_mut().find(is_alike) {
                Some((blocks, _)) => *blocks += 1,
                None => groups.push((1, block)),
            }
        }
        groups
    }

    /// Sums up what is live just before the request at `moment`, with the `top` largest blocks and
    /// stacks. All sites and categories are listed. O(blocks allocated before it).
    pub fn before(job: &Job<'_>, moment: RequestIndex, top: usize) -> Moment {
        let mut total = Sum::default();
        let mut stacks: HashMap<Option<StackId>, Sum> = HashMap::new();
        let mut categories = [Sum::default(); Category::ALL.len()];
        let mut streams: HashMap<u32, Sum> = HashMap::new();
        let mut live: Vec<u32> = Vec::new();
        for (number, block) in job.blocks.live_before(moment) {
            let bytes = block.size.count();
            total.add(bytes);
            stacks.entry(block.stack).or_default().add(bytes);
            categories[job.categories[number as usize] as usize].add(bytes);
            streams.entry(block.stream).or_default().add(bytes);
            live.push(number);
        }
        let by_size = |&number: &u32| (std::cmp::Reverse(job.blocks.get(number).size), number);
        let largest = top.min(live.len());
        if largest > 0 {
            live.select_nth_unstable_by_key(largest - 1, by_size);
        }
        live.truncate(largest);
        live.sort_by_key(by_size);
        Moment {
            event: job.workload.device_event_of(moment as usize).map(|event| event as u64),
            request: moment,
            live_bytes: total.bytes,
            blocks: total.blocks,
            sites: sites(job, &stacks),
            stacks: stack_shares(job, &stacks, top),
            categories: category_shares(&categories),
            streams: stream_shares(job, &streams),
            largest: live.into_iter().map(|number| large_block(job, number)).collect(),
        }
    }
}

fn sites(job: &Job<'_>, stacks: &HashMap<Option<StackId>, Sum>) -> Vec<SiteShare> {
    let mut sums: HashMap<SiteId, (Sum, HashMap<&str, u64>)> = HashMap::new();
    for (&stack, sum) in stacks {
        let (total, operations) = sums.entry(job.labels.site_of(stack)).or_default();
        total.bytes = total.bytes.saturating_add(sum.bytes);
        total.blocks += sum.blocks;
        let operation = operations.entry(job.labels.operation_of(stack)).or_default();
        *operation = operation.saturating_add(sum.bytes);
    }
    let mut shares: Vec<SiteShare> = sums
        .into_iter()
        .map(|(site, (sum, operations))| {
            let mut operations: Vec<(String, u64)> =
                operations.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect();
            operations.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
            let site = job.labels.site(site).to_owned();
            SiteShare { site, bytes: sum.bytes, blocks: sum.blocks, operations }
        })
        .collect();
    shares.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.site.cmp(&b.site)));
    shares
}

fn stack_shares(
    job: &Job<'_>,
    stacks: &HashMap<Option<StackId>, Sum>,
    top: usize,
) -> Vec<StackShare> {
    let mut sorted: Vec<(Option<StackId>, Sum)> =
        stacks.iter().map(|(stack, sum)| (*stack, *sum)).collect();
    sorted.sort_by_key(|(stack, sum)| (std::cmp::Reverse(sum.bytes), stack.map(StackId::index)));
    sorted.truncate(top);
    let share = |(stack, sum): (Option<StackId>, Sum)| StackShare {
        stack: stack.and_then(|id| u32::try_from(id.index()).ok()),
        bytes: sum.bytes,
        blocks: sum.blocks,
        frames: frames::folded(&job.trace.stacks, stack),
    };
    sorted.into_iter().map(share).collect()
}

fn category_shares(sums: &[Sum]) -> Vec<CategoryShare> {
    let all = Category::ALL.into_iter().zip(sums).filter(|(_, sum)| sum.blocks > 0);
    let mut shares: Vec<CategoryShare> = all
        .map(|(category, sum)| CategoryShare { category, bytes: sum.bytes, blocks: sum.blocks })
        .collect();
    shares.sort_by_key(|share| (std::cmp::Reverse(share.bytes), share.category));
    shares
}

fn stream_shares(job: &Job<'_>, sums: &HashMap<u32, Sum>) -> Vec<StreamShare> {
    let raw = |stream: u32| job.workload.streams.get(stream as usize).copied().unwrap_or_default();
    let mut shares: Vec<StreamShare> = sums
        .iter()
        .map(|(&stream, sum)| StreamShare { stream: raw(stream), bytes: sum.bytes })
        .collect();
    shares.sort_by_key(|share| (std::cmp::Reverse(share.bytes), share.stream));
    shares
}

fn large_block(job: &Job<'_>, number: u32) -> LargeBlock {
    let block = job.blocks.get(number);
    LargeBlock {
        bytes: block.size.count(),
        event: job.workload.device_event_of(block.alloc as usize).map(|event| event as u64),
        site: job.labels.site(job.labels.site_of(block.stack)).to_owned(),
        operation: job.labels.operation_of(block.stack).to_owned(),
        category: job.categories[number as usize],
    }
}

#[cfg(test)]
mod tests {
    use vramp_trace::Frame;

    use super::*;
    use crate::testing::{alloc, alloc_by, free, trace};

    #[test]
    fn live_bytes_are_summed_by_line_stack_and_category() {
        let mut made = trace(&[]);
        let frame = |filename, line| Frame { name: "f", filename, line };
        let inner = frame("/v/site-packages/torch/nn/functional.py", 5);
        let first = made.stacks.add([inner, frame("job.py", 1)]);
        let second = made.stacks.add([frame("job.py", 1)]);
        made.events = vec![
            alloc_by(first, 1, 100),
            alloc_by(second, 2, 30),
            alloc(3, 1000),
            free(3),
            alloc_by(first, 4, 50),
            alloc_by(second, 5, 7),
        ];
        let job = Job::of(&made, 0);
        let found = Moment::before(&job, 5, 2);
        assert_eq!((found.live_bytes, found.blocks, found.event), (180, 3, Some(5)));
        assert_eq!(found.sites.len(), 1);
        assert_eq!((found.sites[0].site.as_str(), found.sites[0].bytes), ("job.py:1 f", 180));
        assert_eq!(found.sites[0].operations[0].1, 150);
        assert_eq!(found.stacks.iter().map(|share| share.bytes).collect::<Vec<_>>(), [150, 30]);
        assert_eq!(found.largest.iter().map(|it| it.bytes).collect::<Vec<_>>(), [100, 50]);
        assert_eq!(found.categories[0].category, Category::Unknown);
        let end = Moment::before(&job, 6, 10);
        assert_eq!((end.live_bytes, end.event), (187, None));
    }
}
