//! Reads the segments of a snapshot.

use vramp_core::DeviceAddr;

use super::fields::{DICT, INTEGER, LIST, Place, key, pairs, take_dict, take_list, unsigned};
use super::snapshot::{LabelFields, Snapshot};
use super::values::{Value, Values};
use crate::formats::builder::{SIZE_RANGE, charge_label};
use crate::trace::size;
use crate::{Block, BlockState, ReadError, Segment};

impl Snapshot {
    /// Reads the list of segments, once the pickle has ended.
    pub fn segments(&mut self, values: &mut Values, segments: Value) -> Result<(), ReadError> {
        let what = "segments is not a list";
        let items = take_list(values, segments).ok_or(ReadError::NotASnapshot { what })?;
        for (index, &segment) in items.iter().enumerate() {
            let segment = self.segment(values, index, segment)?;
            let devices = u32::from(segment.device) + 1;
            self.builder.trace.device_count = self.builder.trace.device_count.max(devices);
            values.meter.push(&mut self.builder.trace.segments, segment, 0)?;
        }
        Ok(())
    }

    fn segment(
        &mut self,
        values: &mut Values,
        index: usize,
        segment: Value,
    ) -> Result<Segment, ReadError> {
        let place = Place::Segment { index };
        let fields = take_dict(values, segment)
            .ok_or_else(|| place.bad("the segment", Some(segment), values, DICT))?;
        let (mut device, mut stream, mut address, mut total) = (None, None, None, None);
        let (mut segment_type, mut is_expandable, mut blocks, mut frames) = ("", false, None, None);
        for (name, value) in pairs(&fields) {
            match (name, value) {
                (key::DEVICE, _) => device = Some(value),
                (key::STREAM, _) => stream = Some(value),
                (key::ADDRESS, _) => address = Some(value),
                (key::TOTAL_SIZE, _) => total = Some(value),
                (key::SEGMENT_TYPE, Value::Text(text)) => segment_type = values.text(text),
                (key::IS_EXPANDABLE, Value::Bool(flag)) => is_expandable = flag,
                (key::BLOCKS, _) => blocks = Some(value),
                (key::FRAMES, _) => frames = Some(value),
                _ => {}
            }
        }
        let segment_type = segment_type.to_owned();
        values.meter.take(segment_type.len() + 16, 0)?;
        let found = LabelFields::find(values, place, &fields)?;
        let (texts, meter) = values.texts_and_meter();
        let label = found.of(texts);
        let labels = &mut self.builder.trace.labels;
        meter.reserve(&mut labels.segments.0, 1, 0)?;
        charge_label(labels, label, meter, 0)?;
        labels.label_segment(index, label);
        let device = match device {
            None => 0,
            Some(value) => unsigned(value)
                .and_then(|device| u16::try_from(device).ok())
                .ok_or_else(|| place.bad("device", device, values, "a number below 65,536"))?,
        };
        let stream = self.stream(values, place, stream, 0)?;
        let address = address
            .and_then(unsigned)
            .map(DeviceAddr::new)
            .ok_or_else(|| place.bad("address", address, values, INTEGER))?;
        let total_size = total
            .and_then(unsigned)
            .and_then(size)
            .ok_or_else(|| place.bad("total_size", total, values, SIZE_RANGE))?;
        let stack = self.stack(values, place, frames, 0)?;
        let blocks = match blocks {
            None => Vec::new(),
            Some(_) => self.blocks(values, index, address, blocks)?,
        };
        Ok(Segment {
            device,
            stream,
            address,
            total_size,
            segment_type,
            is_expandable,
            stack,
            blocks,
        })
    }

    fn blocks(
        &mut self,
        values: &mut Values,
        segment: usize,
        start: DeviceAddr,
        blocks: Option<Value>,
    ) -> Result<Vec<Block>, ReadError> {
        let items = blocks
            .and_then(|blocks| take_list(values, blocks))
            .ok_or_else(|| Place::Segment { index: segment }.bad("blocks", blocks, values, LIST))?;
        values.meter.take(items.len() * size_of::<Block>(), 0)?;
        let mut found = Vec::with_capacity(items.len());
        // Old snapshots have no addresses of blocks. Each block follows the one before.
        let mut next = Some(start);
        for (index, &block) in items.iter().enumerate() {
            let block = self.block(values, Place::Block { index, segment }, next, block)?;
            next = block.address.checked_add(block.size);
            found.push(block);
        }
        values.recycle(items);
        Ok(found)
    }

    fn block(
        &mut self,
        values: &mut Values,
        place: Place,
        next: Option<DeviceAddr>,
        block: Value,
    ) -> Result<Block, ReadError> {
        let fields = take_dict(values, block)
            .ok_or_else(|| place.bad("the block", Some(block), values, DICT))?;
        let (mut address, mut bytes, mut requested, mut state) = (None, None, None, None);
        let (mut frames, mut history) = (None, None);
        for (name, value) in pairs(&fields) {
            match name {
                key::ADDRESS => address = Some(value),
                key::SIZE => bytes = Some(value),
                key::REQUESTED_SIZE => requested = Some(value),
                key::STATE => state = Some(value),
                key::FRAMES => frames = Some(value),
                key::HISTORY => history = Some(value),
                _ => {}
            }
        }
        let found = LabelFields::find(values, place, &fields)?;
        let (texts, meter) = values.texts_and_meter();
        let label = found.of(texts);
        let labels = &mut self.builder.trace.labels;
        meter.reserve(&mut labels.blocks.0, 1, 0)?;
        charge_label(labels, label, meter, 0)?;
        if let Place::Block { index, segment } = place {
            labels.label_block(segment, index, label);
        }
        values.recycle(fields);
        if let Some(newest) = history.and_then(|history| newest_of(values, history)) {
            requested = requested.or(newest.real_size);
            frames = frames.or(newest.frames);
        }
        let state = match state {
            Some(Value::Text(key::ACTIVE_ALLOCATED)) => BlockState::Active,
            Some(Value::Text(key::ACTIVE_PENDING_FREE | key::ACTIVE_AWAITING_FREE)) => {
                BlockState::PendingFree
            }
            Some(Value::Text(key::INACTIVE)) => BlockState::Inactive,
            _ => {
                let expected = "active_allocated, active_pending_free or inactive";
                return Err(place.bad("state", state, values, expected));
            }
        };
        let address = match address {
            None => next,
            Some(value) => unsigned(value).map(DeviceAddr::new),
        }
        .ok_or_else(|| place.bad("address", address, values, INTEGER))?;
        let size_of_block = bytes
            .and_then(unsigned)
            .and_then(size)
            .ok_or_else(|| place.bad("size", bytes, values, SIZE_RANGE))?;
        let requested_size = requested
            .map(|value| {
                unsigned(value)
                    .and_then(size)
                    .ok_or_else(|| place.bad("requested_size", requested, values, SIZE_RANGE))
            })
            .transpose()?;
        let stack = self.stack(values, place, frames, 0)?;
        Ok(Block { address, size: size_of_block, requested_size, state, stack })
    }
}

/// The last request that was served by a block, as PyTorch up to 2.0 writes it.
struct Newest {
    real_size: Option<Value>,
    frames: Option<Value>,
}

/// Returns the first entry of a block's `history`, the newest.
fn newest_of(values: &mut Values, history: Value) -> Option<Newest> {
    let entries = take_list(values, history)?;
    let first = entries.first().copied();
    values.recycle(entries);
    let fields = take_dict(values, first?)?;
    let (mut real_size, mut frames) = (None, None);
    for (name, value) in pairs(&fields) {
        match name {
            key::REAL_SIZE => real_size = Some(value),
            key::FRAMES => frames = Some(value),
            _ => {}
        }
    }
    values.recycle(fields);
    Some(Newest { real_size, frames })
}
