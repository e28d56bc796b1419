//! A value for each stream that has not left, by the stream's id.
//!
//! Ids are given in order and never again: one that is kept too long names a stream that left, not
//! another one. A server that makes a stream for each request gives out millions, of which few exist at
//! a time. So values lie in pages of 64 ids, and only pages with values exist.
//!
//! Growth: nothing stays of a stream that left. Finding is O(1) while each page up to the last has a value,
//! else O(log pages). Walking costs the values there are, and at most 64 looks for each.

use crate::ids::StreamId;

/// Ids of a page.
const PAGE: usize = 64;

/// Values by stream.
#[derive(Clone, Debug)]
pub struct StreamTable<T> {
    /// Those with values, by number.
    pages: Vec<Page<T>>,
    /// Number of ids given out.
    ids: usize,
    /// Number of values.
    present: usize,
}

#[derive(Clone, Debug)]
struct Page<T> {
    /// The page of ids from 64 times this number on.
    number: usize,
    values: Vec<Option<T>>,
    present: u32,
}

impl<T> Default for StreamTable<T> {
    fn default() -> StreamTable<T> {
        StreamTable::new()
    }
}

impl<T> StreamTable<T> {
    /// A table without streams.
    pub const fn new() -> StreamTable<T> {
        StreamTable { pages: Vec::new(), ids: 0, present: 0 }
    }

    /// The id of the stream that is added next.
    ///
    /// # Panics
    /// If four billion ids were given out.
    pub fn next_id(&self) -> StreamId {
        // The last number stands for no stream.
        let number = u32::try_from(self.ids).ok().filter(|&number| number < u32::MAX);
        StreamId::new(number.expect("fewer than four billion streams"))
    }

    /// Number of ids given out, also to streams that left.
    pub fn ids(&self) -> usize {
        self.ids
    }

    /// True if the id was given out, also to a stream that left.
    #[inline]
    pub fn knows(&self, id: StreamId) -> bool {
        id.index() < self.ids
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.present
    }

    /// True if there is no value.
    pub fn is_empty(&self) -> bool {
        self.present == 0
    }

    /// Adds the value of the next stream.
    pub fn push(&mut self, value: T) -> StreamId {
        let id = self.next_id();
        self.insert(id, value);
        id
    }

    /// Sets a stream's value and returns the one before. Ids below it that were not given out before
    /// are those of streams that left.
    pub fn insert(&mut self, id: StreamId, value: T) -> Option<T> {
        let (number, slot) = place(id);
        self.skip_to(id.index() + 1);
        let place = self.find(number).unwrap_or_else(|place| {
            self.pages.insert(place, Page { number, values: Vec::new(), present: 0 });
            place
        });
        let page = &mut self.pages[place];
        if page.values.len() <= slot {
            page.values.resize_with(slot + 1, || None);
        }
        let before = page.values[slot].replace(value);
        if before.is_none() {
            page.present += 1;
            self.present += 1;
        }
        before
    }

    /// Gives out ids up to this number of them, to streams that left.
    pub fn skip_to(&mut self, ids: usize) {
        self.ids = self.ids.max(ids);
    }

    /// The place of a page, or where it is to be inserted.
    #[inline]
    fn find(&self, number: usize) -> Result<usize, usize> {
        match self.pages.get(number) {
            // All pages before it exist.
            Some(page) if page.number == number => Ok(number),
            _ => self.pages.binary_search_by_key(&number, |page| page.number),
        }
    }

    /// Removes a stream's value.
    pub fn remove(&mut self, id: StreamId) -> Option<T> {
        let (number, slot) = place(id);
        let place = self.find(number).ok()?;
        let page = &mut self.pages[place];
        let value = page.values.get_mut(slot)?.take()?;
        page.present -= 1;
        self.present -= 1;
        if page.present == 0 {
            self.pages.remove(place);
        }
        Some(value)
    }

    /// A stream's value; `None` if it left, or if the id was not given out.
    #[inline]
    pub fn get(&self, id: StreamId) -> Option<&T> {
        let (number, slot) = place(id);
        self.pages[self.find(number).ok()?].values.get(slot)?.as_ref()
    }

    /// The same to change it.
    #[inline]
    pub fn get_mut(&mut self, id: StreamId) -> Option<&mut T> {
        let (number, slot) = place(id);
        let place = self.find(number).ok()?;
        self.pages[place].values.get_mut(slot)?.as_mut()
    }

    /// Every value with its stream, in the order of ids.
    pub fn iter(&self) -> impl Iterator<Item = (StreamId, &T)> {
        self.iter_from(0)
    }

    /// The values of streams whose ids are not below this number, in the order of ids.
    pub fn iter_from(&self, first: usize) -> impl Iterator<Item = (StreamId, &T)> {
        let (Ok(from) | Err(from)) = self.find(first / PAGE);
        let all = self.pages[from..].iter().flat_map(|page| {
            let slots = page.values.iter().enumerate();
            slots.filter_map(|(slot, value)| Some((page.number * PAGE + slot, value.as_ref()?)))
        });
        all.skip_while(move |&(index, _)| index < first)
            .map(|(index, value)| (StreamId::new(index as u32), value))
    }
}

#[inline]
fn place(id: StreamId) -> (usize, usize) {
    (id.index() / PAGE, id.index() % PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_found_until_it_is_removed_and_its_id_is_not_given_again() {
        let mut table = StreamTable::default();
        let ids: Vec<StreamId> = (0..200).map(|value| table.push(value)).collect();
        for &id in ids.iter().filter(|id| id.index() % 3 == 0) {
            assert_eq!(table.remove(id), Some(id.index()));
            assert_eq!(table.remove(id), None);
        }
        for (index, &id) in ids.iter().enumerate() {
            assert_eq!(table.get(id).copied(), (index % 3 != 0).then_some(index));
            assert!(table.knows(id));
        }
        let rest: Vec<usize> = table.iter().map(|(id, _)| id.index()).collect();
        assert_eq!(rest, (0..200).filter(|index| index % 3 != 0).collect::<Vec<_>>());
        assert_eq!((table.len(), table.push(0).index()), (rest.len(), 200));
    }

    #[test]
    fn streams_that_left_before_a_value_was_added_are_known() {
        let mut table = StreamTable::default();
        table.insert(StreamId::new(130), 'a');
        assert!(table.knows(StreamId::new(7)) && !table.knows(StreamId::new(131)));
        assert_eq!((table.get(StreamId::new(7)), table.len()), (None, 1));
        table.skip_to(500);
        assert_eq!(table.push('b').index(), 500);
        let from = |first| table.iter_from(first).map(|(id, _)| id.index()).collect::<Vec<_>>();
        assert_eq!((from(0), from(130), from(131)), (vec![130, 500], vec![130, 500], vec![500]));
    }

    #[test]
    fn streams_that_left_keep_nothing() {
        let mut table = StreamTable::default();
        let stays = table.push([0_u64; 16]);
        for _ in 0..100_000 {
            let id = table.push([1; 16]);
            table.remove(id);
        }
        let last = table.push([2; 16]);
        table.skip_to(1_000_000);
        let slots: usize = table.pages.iter().map(|page| page.values.capacity()).sum();
        assert!(slots <= 2 * PAGE, "{slots} slots for two values");
        assert!(table.pages.len() == 2 && table.pages.capacity() <= 8, "{}", table.pages.len());
        assert_eq!(table.iter().map(|(id, _)| id).collect::<Vec<_>>(), [stays, last]);
        assert_eq!(table.iter_from(1).map(|(id, _)| id).collect::<Vec<_>>(), [last]);
        assert!(table.get(stays).is_some() && table.get(StreamId::new(99_999)).is_none());
    }
}
