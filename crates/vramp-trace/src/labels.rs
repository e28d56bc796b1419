//! What few events, segments and blocks have besides: pools, metadata, compile contexts, categories.
//!
//! Most recordings have none, so labels are in tables of their own, sorted by index, and an
//! [`crate::Event`] stays as small as it is. Each text and each combination is stored once.

use indexmap::IndexSet;

/// Id of a memory pool, as PyTorch writes it. The default, `(0, 0)`, is the pool of requests outside
/// of captures and `MemPool`s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub i64, pub i64);

/// The labels of one event, segment or block. A text is empty if there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label<'a> {
    /// The memory pool.
    pub pool: PoolId,
    /// Text that the program attached (PyTorch's `user_metadata`).
    pub metadata: &'a str,
    /// Compiled region that requested the memory (PyTorch's `compile_context`).
    pub compile_context: &'a str,
    /// Purpose of the memory, such as `parameter` or `activation`, as memory profilers write it.
    pub category: &'a str,
}

/// The labels of all events, segments and blocks of a trace.
///
/// ```
/// use vramp_trace::{Label, Labels, PoolId};
///
/// let mut labels = Labels::default();
/// labels.label_event(7, Label { metadata: "step 1", pool: PoolId(0, 3), ..Label::default() });
/// assert_eq!(labels.of_event(7).metadata, "step 1");
/// assert_eq!(labels.of_event(8), Label::default());
/// ```
#[derive(Clone, Debug, Default)]
pub struct Labels {
    pub(crate) texts: IndexSet<Box<str>>,
    pub(crate) kinds: IndexSet<LabelKey>,
    pub(crate) events: Sparse<u32>,
    pub(crate) segments: Sparse<u32>,
    /// By segment and block.
    pub(crate) blocks: Sparse<(u32, u32)>,
}

/// A label: indices of texts plus one, 0 for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LabelKey {
    pub pool: PoolId,
    pub metadata: u32,
    pub compile_context: u32,
    pub category: u32,
}

impl PartialEq for Labels {
    /// Compares contents and ids. Equality of the sets alone would ignore the order.
    fn eq(&self, other: &Labels) -> bool {
        self.texts.iter().eq(&other.texts)
            && self.kinds.iter().eq(&other.kinds)
            && self.events == other.events
            && self.segments == other.segments
            && self.blocks == other.blocks
    }
}

impl Labels {
    /// Returns true if no event, segment or block has a label.
    pub fn is_empty(&self) -> bool {
        self.events.0.is_empty() && self.segments.0.is_empty() && self.blocks.0.is_empty()
    }

    /// Returns the labels of the event at `index` in [`crate::Trace::events`]. O(log n) in the
    /// number of labelled events.
    pub fn of_event(&self, index: usize) -> Label<'_> {
        self.at(u32::try_from(index).ok().and_then(|index| self.events.get(index)))
    }

    /// Returns the labels of the segment at `index` in [`crate::Trace::segments`].
    pub fn of_segment(&self, index: usize) -> Label<'_> {
        self.at(u32::try_from(index).ok().and_then(|index| self.segments.get(index)))
    }

    /// Returns the labels of a block of the segment at `segment`.
    pub fn of_block(&self, segment: usize, block: usize) -> Label<'_> {
        self.at(self.index_of_block(segment, block))
    }

    /// Returns the index of the label of an event, for [`Labels::at`].
    pub(crate) fn index_of_event(&self, event: u32) -> Option<u32> {
        self.events.get(event)
    }

    /// Returns the index of the label of a block, for [`Labels::at`].
    pub(crate) fn index_of_block(&self, segment: usize, block: usize) -> Option<u32> {
        let place = (u32::try_from(segment).ok()?, u32::try_from(block).ok()?);
        self.blocks.get(place)
    }

    /// Sets the labels of an event. O(1) if no later event has labels.
    ///
    /// # Panics
    /// If `index` exceeds 2^32 - 1.
    pub fn label_event(&mut self, index: usize, label: Label<'_>) {
        let label = self.add(label);
        self.events.set(number(index), label);
    }

    /// Sets the labels of a segment. O(1) if no later segment has labels.
    ///
    /// # Panics
    /// If `index` exceeds 2^32 - 1.
    pub fn label_segment(&mut self, index: usize, label: Label<'_>) {
        let label = self.add(label);
        self.segments.set(number(index), label);
    }

    /// Sets the labels of a block. O(1) if no later block has labels.
    ///
    /// # Panics
    /// If an index exceeds 2^32 - 1.
    pub fn label_block(&mut self, segment: usize, block: usize, label: Label<'_>) {
        let label = self.add(label);
        self.blocks.set((number(segment), number(block)), label);
    }

    /// Returns true if this combination occurs already.
    #[cfg(feature = "formats")]
    pub(crate) fn has(&self, label: Label<'_>) -> bool {
        let text = |text: &str| match text {
            "" => Some(0),
            text => self.texts.get_index_of(text).map(|index| number(index + 1)),
        };
        let key = (|| {
            Some(LabelKey {
                pool: label.pool,
                metadata: text(label.metadata)?,
                compile_context: text(label.compile_context)?,
                category: text(label.category)?,
            })
        })();
        key.is_some_and(|key| self.kinds.contains(&key))
    }

    /// Returns the index of a label, or `None` for the default.
    fn add(&mut self, label: Label<'_>) -> Option<u32> {
        if label == Label::default() {
            return None;
        }
        let key = LabelKey {
            pool: label.pool,
            metadata: self.text_number(label.metadata),
            compile_context: self.text_number(label.compile_context),
            category: self.text_number(label.category),
        };
        Some(number(self.kinds.insert_full(key).0))
    }

    fn text_number(&mut self, text: &str) -> u32 {
        if text.is_empty() {
            return 0;
        }
        let index = match self.texts.get_index_of(text) {
            Some(index) => index,
            None => self.texts.insert_full(text.into()).0,
        };
        number(index + 1)
    }

    pub(crate) fn at(&self, index: Option<u32>) -> Label<'_> {
        let Some(key) = index.and_then(|index| self.kinds.get_index(index as usize)) else {
            return Label::default();
        };
        let text = |number: u32| match number {
            0 => "",
            number => self.texts.get_index(number as usize - 1).map_or("", |text| text),
        };
        Label {
            pool: key.pool,
            metadata: text(key.metadata),
            compile_context: text(key.compile_context),
            category: text(key.category),
        }
    }

    /// Gives the event at `order[i]` the index `i`. Events that are not in `order` lose their labels.
    pub(crate) fn reorder_events(&mut self, order: &[u32]) {
        let old = std::mem::take(&mut self.events);
        if old.0.is_empty() {
            return;
        }
        let moved = (0..).zip(order).filter_map(|(new, &index)| Some((new, old.get(index)?)));
        self.events.0.extend(moved);
    }

    /// Gives the segment at `order[i]` and its blocks the index `i`. Segments that are not in `order`
    /// lose their labels.
    pub(crate) fn reorder_segments(&mut self, order: &[u32]) {
        let segments = std::mem::take(&mut self.segments);
        let blocks = std::mem::take(&mut self.blocks);
        for (new, &index) in (0..).zip(order) {
            self.segments.0.extend(segments.get(index).map(|label| (new, label)));
            let from = blocks.0.partition_point(|&((segment, _), _)| segment < index);
            let own = blocks.0[from..].iter().take_while(|&&((segment, _), _)| segment == index);
            self.blocks.0.extend(own.map(|&((_, block), label)| ((new, block), label)));
        }
    }

    /// Adds the labels of another trace, whose first event and segment have these indices here.
    pub(crate) fn append(&mut self, other: &Labels, first_event: usize, first_segment: usize) {
        for &(event, label) in &other.events.0 {
            self.label_event(first_event + event as usize, other.at(Some(label)));
        }
        for &(segment, label) in &other.segments.0 {
            self.label_segment(first_segment + segment as usize, other.at(Some(label)));
        }
        for &((segment, block), label) in &other.blocks.0 {
            let segment = first_segment + segment as usize;
            self.label_block(segment, block as usize, other.at(Some(label)));
        }
    }
}

fn number(index: usize) -> u32 {
    u32::try_from(index).expect("a trace has fewer than 2^32 events, segments, blocks and labels")
}

/// Indices of labels by place, sorted by place.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sparse<K>(pub Vec<(K, u32)>);

impl<K> Default for Sparse<K> {
    fn default() -> Sparse<K> {
        Sparse(Vec::new())
    }
}

impl<K: Copy + Ord> Sparse<K> {
    fn get(&self, place: K) -> Option<u32> {
        let found = self.0.binary_search_by_key(&place, |&(place, _)| place).ok()?;
        Some(self.0[found].1)
    }

    fn set(&mut self, place: K, label: Option<u32>) {
        // Readers go from front to back.
        let found = match self.0.last() {
            Some((last, _)) if *last >= place => {
                self.0.binary_search_by_key(&place, |&(place, _)| place)
            }
            _ => Err(self.0.len()),
        };
        match (found, label) {
            (Ok(at), Some(label)) => self.0[at].1 = label,
            (Ok(at), None) => drop(self.0.remove(at)),
            (Err(at), Some(label)) => self.0.insert(at, (place, label)),
            (Err(_), None) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_set_replaced_and_removed_in_any_order() {
        let mut labels = Labels::default();
        let named = |metadata| Label { metadata, ..Label::default() };
        for (index, text) in [(5, "a"), (9, "b"), (2, "c"), (5, "d"), (9, "")] {
            labels.label_event(index, named(text));
        }
        let found: Vec<&str> = (0..10).map(|index| labels.of_event(index).metadata).collect();
        assert_eq!(found, ["", "", "c", "", "", "d", "", "", "", ""]);
        assert!(!labels.is_empty());
        labels.label_event(2, Label::default());
        labels.label_event(5, Label::default());
        assert!(labels.is_empty());
    }
}
