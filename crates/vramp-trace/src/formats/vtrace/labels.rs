//! Annotations and labels in a `.vtrace`, from version 3 on.

use std::io::Read;

use super::read::Body;
use super::write;
use crate::labels::{LabelKey, Sparse};
use crate::{Annotation, Labels, PoolId, ReadError, Stage};

impl write::Body {
    pub fn annotations(&mut self, annotations: &[Annotation]) {
        self.all(annotations, |body, annotation| {
            match &annotation.stage {
                Stage::Start => body.number(0),
                Stage::End => body.number(1),
                Stage::Other(name) => {
                    body.number(2);
                    body.text(name);
                }
            }
            body.text(&annotation.name);
            body.number(annotation.device.map_or(0, |device| u64::from(device) + 1));
            body.number(annotation.time_us);
        });
    }

    pub fn labels(&mut self, labels: &Labels) {
        self.all(&labels.texts, |body, text| body.text(text));
        self.all(&labels.kinds, |body, key| {
            body.step(0, key.pool.0.cast_unsigned());
            body.step(0, key.pool.1.cast_unsigned());
            for text in [key.metadata, key.compile_context, key.category] {
                body.number(u64::from(text));
            }
        });
        self.sparse(&labels.events);
        self.sparse(&labels.segments);
        let mut before = (0, 0);
        self.all(&labels.blocks.0, |body, &((segment, block), label)| {
            body.number(u64::from(segment - before.0));
            body.number(u64::from(if segment == before.0 { block - before.1 } else { block }));
            body.number(u64::from(label));
            before = (segment, block);
        });
    }

    fn sparse(&mut self, places: &Sparse<u32>) {
        let mut before = 0;
        self.all(&places.0, |body, &(place, label)| {
            body.number(u64::from(place - before));
            body.number(u64::from(label));
            before = place;
        });
    }
}

impl<R: Read> Body<R> {
    pub fn annotations(&mut self) -> Result<(), ReadError> {
        for _ in 0..self.count()? {
            let stage = match self.number()? {
                0 => Stage::Start,
                1 => Stage::End,
                2 => Stage::Other(self.text()?.into()),
                _ => return Err(self.malformed("an annotation of an unknown stage")),
            };
            let name = self.text()?.into();
            let device = match self.number_up_to(1 << 16, "a device above 65,535")? {
                0 => None,
                device => Some((device - 1) as u16),
            };
            let annotation = Annotation { stage, name, device, time_us: self.number()? };
            self.push(|trace| &mut trace.annotations, annotation)?;
        }
        Ok(())
    }

    pub fn labels(&mut self) -> Result<(), ReadError> {
        let twice = "a duplicate or empty label";
        for _ in 0..self.count()? {
            let text = self.text()?;
            let is_new = !text.is_empty() && self.trace.labels.texts.insert(text.into());
            if !is_new {
                return Err(self.malformed(twice));
            }
        }
        for _ in 0..self.count()? {
            let texts = self.trace.labels.texts.len() + 1;
            let pool = PoolId(self.step(0)?.cast_signed(), self.step(0)?.cast_signed());
            let key = LabelKey {
                pool,
                metadata: self.index(texts)?,
                compile_context: self.index(texts)?,
                category: self.index(texts)?,
            };
            self.charge_entry(size_of::<LabelKey>())?;
            let none =
                LabelKey { pool: PoolId::default(), metadata: 0, compile_context: 0, category: 0 };
            if key == none || !self.trace.labels.kinds.insert(key) {
                return Err(self.malformed(twice));
            }
        }
        self.sparse(self.trace.events.len(), |labels| &mut labels.events)?;
        self.sparse(self.trace.segments.len(), |labels| &mut labels.segments)?;
        self.blocks()
    }

    /// Reads the labels of places below `len`.
    fn sparse(
        &mut self,
        len: usize,
        list: impl Fn(&mut Labels) -> &mut Sparse<u32>,
    ) -> Result<(), ReadError> {
        let mut before = None;
        for _ in 0..self.count()? {
            let place = self.after(before, len)?;
            let label = self.index(self.trace.labels.kinds.len())?;
            self.push(|trace| &mut list(&mut trace.labels).0, (place, label))?;
            before = Some(place);
        }
        Ok(())
    }

    fn blocks(&mut self) -> Result<(), ReadError> {
        let mut before: Option<(u32, u32)> = None;
        for _ in 0..self.count()? {
            let step = self.number_up_to(u32::MAX, "a place out of range")?;
            let segment = before.map_or(Some(step), |(segment, _)| segment.checked_add(step));
            let segment = segment.filter(|&segment| (segment as usize) < self.trace.segments.len());
            let segment = segment.ok_or_else(|| self.malformed("a label of no segment"))?;
            let blocks = self.trace.segments[segment as usize].blocks.len();
            let last = before.filter(|&(last, _)| last == segment).map(|(_, block)| block);
            let block = self.after(last, blocks)?;
            let label = self.index(self.trace.labels.kinds.len())?;
            self.push(|trace| &mut trace.labels.blocks.0, ((segment, block), label))?;
            before = Some((segment, block));
        }
        Ok(())
    }

    /// Reads a place above `before` and below `len`, as the step from it, or from 0.
    fn after(&mut self, before: Option<u32>, len: usize) -> Result<u32, ReadError> {
        let step = self.number_up_to(u32::MAX, "a place out of range")?;
        let place = match before {
            None => Some(step),
            Some(before) => before.checked_add(step).filter(|_| step > 0),
        };
        let place = place.filter(|&place| (place as usize) < len);
        place.ok_or_else(|| self.malformed("labels out of order or out of range"))
    }
}
