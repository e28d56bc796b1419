//! Validates a trace before it is written.

use std::io;

use crate::labels::Sparse;
use crate::trace::SIZE_MAX;
use crate::{EventKind, StackId, StreamIndex, Trace};

/// Refuses a trace with an index out of range or a size that readers refuse.
pub(crate) fn validate(trace: &Trace) -> io::Result<()> {
    let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    let stream = |stream: StreamIndex| (stream.0 as usize) < trace.streams.len();
    let stack = |stack: Option<StackId>| stack.is_none_or(|id| id.index() < trace.stacks.len());
    for (index, event) in trace.events.iter().enumerate() {
        let known = match event.kind {
            EventKind::Unknown(action) => usize::from(action.0) < trace.actions.len(),
            _ => true,
        };
        let inside = u32::from(event.device) < trace.device_count
            && stream(event.stream)
            && stack(event.stack)
            && known
            && event.size.count() <= SIZE_MAX;
        if !inside {
            return invalid(format!("event {index} cannot be written: {event:?}"));
        }
    }
    for (index, segment) in trace.segments.iter().enumerate() {
        let inside = u32::from(segment.device) < trace.device_count
            && stream(segment.stream)
            && stack(segment.stack)
            && segment.total_size.count() <= SIZE_MAX
            && segment.blocks.iter().all(|block| {
                let sizes = [Some(block.size), block.requested_size];
                stack(block.stack)
                    && sizes.into_iter().flatten().all(|size| size.count() <= SIZE_MAX)
            });
        if !inside {
            return invalid(format!("segment {index} cannot be written"));
        }
    }
    let labels = &trace.labels;
    let last = |places: &Sparse<u32>| places.0.last().map_or(0, |&(place, _)| place as usize + 1);
    let block = |&((segment, block), _): &((u32, u32), u32)| {
        let segment = trace.segments.get(segment as usize);
        segment.is_some_and(|segment| (block as usize) < segment.blocks.len())
    };
    let inside = last(&labels.events) <= trace.events.len()
        && last(&labels.segments) <= trace.segments.len()
        && labels.blocks.0.iter().all(block);
    if !inside {
        return invalid("labels of events, segments or blocks that are not there".to_owned());
    }
    if trace.device_count > 1 << 16 {
        return invalid(format!("{} devices are too many", trace.device_count));
    }
    Ok(())
}
