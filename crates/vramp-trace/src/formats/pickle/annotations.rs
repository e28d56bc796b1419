//! Reads the annotations of a snapshot: ranges that the program marked.

use super::fields::{DICT, INTEGER, Place, key, pairs, take_dict, take_list, unsigned};
use super::snapshot::Snapshot;
use super::values::{Value, Values};
use crate::{Annotation, ReadError, Stage};

impl Snapshot {
    /// Reads the list of annotations, once the pickle has ended.
    pub fn annotations(
        &mut self,
        values: &mut Values,
        annotations: Value,
    ) -> Result<(), ReadError> {
        if annotations == Value::None {
            return Ok(());
        }
        let what = "external_annotations is not a list";
        let items = take_list(values, annotations).ok_or(ReadError::NotASnapshot { what })?;
        for (index, &item) in items.iter().enumerate() {
            let annotation = annotation(values, Place::Annotation { index }, item)?;
            values.meter.push(&mut self.builder.trace.annotations, annotation, 0)?;
        }
        Ok(())
    }
}

fn annotation(values: &mut Values, place: Place, item: Value) -> Result<Annotation, ReadError> {
    let fields = take_dict(values, item)
        .ok_or_else(|| place.bad("the annotation", Some(item), values, DICT))?;
    let (mut stage, mut name, mut device, mut time_us) = ("", "", None, 0);
    for (field, value) in pairs(&fields) {
        match (field, value) {
            (key::STAGE, Value::Text(text)) => stage = values.text(text),
            (key::NAME, Value::Text(text)) => name = values.text(text),
            // PyTorch writes -1 if no device was current.
            (key::DEVICE, value) => {
                device = unsigned(value).and_then(|device| u16::try_from(device).ok());
            }
            (key::TIME_US, value) => {
                time_us = unsigned(value)
                    .ok_or_else(|| place.bad("time_us", Some(value), values, INTEGER))?;
            }
            _ => {}
        }
    }
    let found = Annotation { stage: Stage::from_name(stage), name: name.into(), device, time_us };
    // Two heap blocks at most, with their headers.
    values.meter.take(stage.len() + name.len() + 2 * 32, 0)?;
    values.recycle(fields);
    Ok(found)
}
