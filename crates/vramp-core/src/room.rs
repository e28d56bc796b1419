//! Room in tables that double.
//!
//! A failed allocation aborts the process, and a table of a million entries doubles at once. So a
//! request makes room before it changes anything, and is refused if the host has no memory for it.
//! The records of freed entries need as much room as the table has: it is made at the same time, so
//! that a free never allocates.

/// Makes room for `wanted` more entries in a table of `slots` with a list of its vacant ones. Returns
/// false if the host has no memory for them. O(1) on average.
#[inline]
pub(crate) fn make_room<T, K>(slots: &mut Vec<T>, vacant: &mut Vec<K>, wanted: usize) -> bool {
    vacant.len() + (slots.capacity() - slots.len()) >= wanted || grow(slots, vacant, wanted)
}

#[cold]
fn grow<T, K>(slots: &mut Vec<T>, vacant: &mut Vec<K>, wanted: usize) -> bool {
    slots.try_reserve(wanted).is_ok() && vacant.try_reserve(slots.capacity() - vacant.len()).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_with_room_neither_grows_nor_allocates_for_its_vacant_entries() {
        let (mut slots, mut vacant) = (Vec::new(), Vec::new());
        let mut growths = 0;
        for entry in 0..100_000_u32 {
            let before = slots.capacity();
            assert!(make_room(&mut slots, &mut vacant, 2));
            growths += usize::from(slots.capacity() != before);
            slots.push(entry);
        }
        assert!(growths < 20, "{growths} growths");
        let room = (slots.capacity(), vacant.capacity());
        vacant.extend(0..slots.len() as u32);
        assert!(make_room(&mut slots, &mut vacant, 50_000));
        assert_eq!((slots.capacity(), vacant.capacity()), room);
    }

    #[test]
    fn room_that_no_host_has_is_refused_and_nothing_changes() {
        let (mut slots, mut vacant) = (vec![1_u64], Vec::<u32>::new());
        assert!(!make_room(&mut slots, &mut vacant, usize::MAX / 16));
        assert_eq!(slots, [1]);
    }
}
