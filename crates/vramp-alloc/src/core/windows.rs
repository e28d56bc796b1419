//! Which memory of other processes is mapped, and which of it may be unmapped.
//!
//! A window mirrors a part of an exporter's addresses: a handle of the exporter is mapped here at the same
//! distance from the window's start as there. So blocks that lie side by side there do so here, whichever blocks
//! were opened before, and no handle is mapped twice.
//!
//! 1. [`Windows::acquire`] counts the handles of a block that are mapped, and names the missing ones.
//! 2. The shell maps those, after what [`Windows::in_the_way`] names is unmapped: handles that the exporter moved
//!    elsewhere since. An open block's handles stay where they are, so these are never in use.
//! 3. [`Windows::release`] ends a use. A handle without a use is *idle*: it stays mapped for the next open.
//! 4. Idle handles are taken out to be unmapped: the longest idle beyond a limit, those idle for long, those of a
//!    watch that ended, all of them.
//!
//! Growth: O(log n) for each handle, with n mapped ones.

use std::collections::BTreeMap;

use vramp_core::{AddrRange, Bytes};

/// A window: the watch of its exporter, and which part of the exporter's addresses it mirrors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WindowId {
    pub watch: u64,
    /// Number of the exporter's pool.
    pub pool: u64,
    /// Number of the reservation in that pool.
    pub span: u64,
    /// Number of the part of the reservation.
    pub part: u64,
}

/// A handle of an exporter, and where it lies in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Number of the handle at the exporter, never used for another.
    pub key: u64,
    pub at: Bytes,
    pub len: Bytes,
}

impl Piece {
    fn end(&self) -> Bytes {
        self.at + self.len
    }
}

/// A handle that is to be unmapped and released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gone<H> {
    pub range: AddrRange,
    pub handle: H,
}

/// Windows of one importing pool, with the importer's handles `H`.
#[derive(Debug)]
pub(crate) struct Windows<H> {
    windows: BTreeMap<WindowId, Window<H>>,
    /// Idle handles by the order in which they became idle.
    idle: BTreeMap<u64, (WindowId, Bytes)>,
    idle_bytes: Bytes,
    last_idle: u64,
}

#[derive(Debug)]
struct Window<H> {
    range: AddrRange,
    /// By distance from the start.
    mapped: BTreeMap<Bytes, Mapped<H>>,
}

#[derive(Debug)]
struct Mapped<H> {
    piece: Piece,
    handle: H,
    users: usize,
    /// Since when it is idle: its number among the idle ones, and the time in milliseconds.
    idle: Option<(u64, u64)>,
    /// Cards with access, beside the pool's own.
    peers: Vec<u32>,
}

impl<H> Default for Windows<H> {
    fn default() -> Windows<H> {
        let (windows, idle) = (BTreeMap::new(), BTreeMap::new());
        Windows { windows, idle, idle_bytes: Bytes::ZERO, last_idle: 0 }
    }
}

impl<H: Copy> Windows<H> {
    /// Adds a window without memory.
    pub(crate) fn add(&mut self, id: WindowId, range: AddrRange) {
        self.windows.insert(id, Window { range, mapped: BTreeMap::new() });
    }

    /// Returns the addresses of a window.
    pub(crate) fn range(&self, id: WindowId) -> Option<AddrRange> {
        self.windows.get(&id).map(|window| window.range)
    }

    /// Returns the numbers of these handles that are not mapped, and counts a use of the others. `None`, and
    /// nothing is counted, if memory in use is in their way.
    pub(crate) fn acquire(&mut self, id: WindowId, pieces: &[Piece]) -> Option<Vec<usize>> {
        let window = self.windows.get(&id).expect("the window was added");
        let mut missing = Vec::new();
        for (index, piece) in pieces.iter().enumerate() {
            if window.holds(piece) {
                continue;
            }
            if window.overlapping(piece).any(|mapped| mapped.users > 0) {
                return None;
            }
            missing.push(index);
        }
        let mut left_out = missing.iter().peekable();
        for (index, piece) in pieces.iter().enumerate() {
            match left_out.next_if_eq(&&index) {
                Some(_) => {}
                None => self.add_use(id, piece.at),
            }
        }
        Some(missing)
    }

    /// Counts a use of a handle if it is mapped.
    pub(crate) fn acquire_one(&mut self, id: WindowId, piece: &Piece) -> bool {
        let holds = self.windows.get(&id).is_some_and(|window| window.holds(piece));
        if holds {
            self.add_use(id, piece.at);
        }
        holds
    }

    fn add_use(&mut self, id: WindowId, at: Bytes) {
        let mapped = self.mapped_mut(id, at);
        mapped.users += 1;
        let len = mapped.piece.len;
        if let Some((number, _)) = mapped.idle.take() {
            self.idle.remove(&number);
            self.idle_bytes -= len;
        }
    }

    fn mapped_mut(&mut self, id: WindowId, at: Bytes) -> &mut Mapped<H> {
        let window = self.windows.get_mut(&id).expect("a window with a use exists");
        window.mapped.get_mut(&at).expect("a handle with a use is mapped")
    }

    /// Takes out the idle handles in the way of a handle. `None` if one of them is in use.
    pub(crate) fn in_the_way(&mut self, id: WindowId, piece: &Piece) -> Option<Vec<Gone<H>>> {
        let window = self.windows.get(&id).expect("the window was added");
        if window.overlapping(piece).any(|mapped| mapped.users > 0) {
            return None;
        }
        let places: Vec<Bytes> = window.overlapping(piece).map(|mapped| mapped.piece.at).collect();
        Some(places.into_iter().map(|at| self.take(id, at)).collect())
    }

    /// Adds a handle that was mapped where it belongs, with one use.
    pub(crate) fn insert(&mut self, id: WindowId, piece: Piece, handle: H, peers: &[u32]) {
        let window = self.windows.get_mut(&id).expect("the window was added");
        debug_assert!(window.overlapping(&piece).next().is_none());
        let mapped = Mapped { piece, handle, users: 1, idle: None, peers: peers.to_vec() };
        window.mapped.insert(piece.at, mapped);
    }

    /// Takes a handle out that has one use, after a failure.
    pub(crate) fn remove(&mut self, id: WindowId, at: Bytes) -> Gone<H> {
        debug_assert_eq!(self.mapped_mut(id, at).users, 1);
        self.take(id, at)
    }

    /// Returns the first of these handles that a card has no access to.
    pub(crate) fn without_access(&self, id: WindowId, pieces: &[Piece], peer: u32) -> bool {
        let window = self.windows.get(&id).expect("a window with a use exists");
        pieces.iter().any(|piece| !window.mapped[&piece.at].peers.contains(&peer))
    }

    /// Notes that a card has access to these handles.
    pub(crate) fn note_access(&mut self, id: WindowId, pieces: &[Piece], peer: u32) {
        for piece in pieces {
            let peers = &mut self.mapped_mut(id, piece.at).peers;
            if !peers.contains(&peer) {
                peers.push(peer);
            }
        }
    }

    /// Ends a use of each of these handles. Those without a use are idle from `now` on, in milliseconds.
    pub(crate) fn release<'a>(
        &mut self,
        id: WindowId,
        pieces: impl IntoIterator<Item = &'a Piece>,
        now: u64,
    ) {
        for piece in pieces {
            let number = self.last_idle + 1;
            let mapped = self.mapped_mut(id, piece.at);
            mapped.users -= 1;
            if mapped.users == 0 {
                mapped.idle = Some((number, now));
                self.last_idle = number;
                self.idle.insert(number, (id, piece.at));
                self.idle_bytes += piece.len;
            }
        }
    }

    fn take(&mut self, id: WindowId, at: Bytes) -> Gone<H> {
        let window = self.windows.get_mut(&id).expect("the window was added");
        let mapped = window.mapped.remove(&at).expect("it is mapped");
        let range = AddrRange::new(window.range.start + at, mapped.piece.len);
        if let Some((number, _)) = mapped.idle {
            self.idle.remove(&number);
            self.idle_bytes -= mapped.piece.len;
        }
        Gone { range, handle: mapped.handle }
    }

    /// Takes out the longest idle handles, until no more than so many bytes and handles are idle.
    pub(crate) fn take_beyond(&mut self, bytes: Bytes, handles: usize) -> Vec<Gone<H>> {
        self.take_idle(|windows, _| windows.idle_bytes > bytes || windows.idle.len() > handles)
    }

    /// Takes out the handles that are idle since a time or longer. The time since which the next one is.
    pub(crate) fn take_idle_since(&mut self, time: u64) -> (Vec<Gone<H>>, Option<u64>) {
        let gone = self.take_idle(|_, since| since <= time);
        (gone, self.idle_since_first())
    }

    /// Returns since when the longest idle handle is.
    pub(crate) fn idle_since_first(&self) -> Option<u64> {
        self.idle.values().next().map(|&(id, at)| self.idle_since(id, at))
    }

    /// Takes out the idle handles from the longest idle one on, while a condition holds.
    fn take_idle(&mut self, is_to_go: impl Fn(&Windows<H>, u64) -> bool) -> Vec<Gone<H>> {
        let mut gone = Vec::new();
        while let Some(&(id, at)) = self.idle.values().next() {
            if !is_to_go(self, self.idle_since(id, at)) {
                break;
            }
            gone.push(self.take(id, at));
        }
        gone
    }

    fn idle_since(&self, id: WindowId, at: Bytes) -> u64 {
        self.windows[&id].mapped[&at].idle.expect("it is in the list of idle ones").1
    }

    /// Takes out all idle handles.
    pub(crate) fn take_all_idle(&mut self) -> Vec<Gone<H>> {
        self.take_idle(|_, _| true)
    }

    /// Takes out all idle handles of a watch.
    pub(crate) fn take_idle_of(&mut self, watch: u64) -> Vec<Gone<H>> {
        let of_watch: Vec<_> =
            self.idle.values().filter(|(id, _)| id.watch == watch).copied().collect();
        of_watch.into_iter().map(|(id, at)| self.take(id, at)).collect()
    }

    /// Removes the windows in which nothing is mapped, and returns their addresses.
    pub(crate) fn take_empty(&mut self) -> Vec<AddrRange> {
        let mut empty = Vec::new();
        self.windows.retain(|_, window| {
            let is_empty = window.mapped.is_empty();
            empty.extend(is_empty.then_some(window.range));
            !is_empty
        });
        empty
    }

    /// Returns true if something of a watch is mapped.
    pub(crate) fn has(&self, watch: u64) -> bool {
        self.windows.keys().any(|id| id.watch == watch)
    }

    /// Returns the bytes that are idle.
    pub(crate) fn idle_bytes(&self) -> Bytes {
        self.idle_bytes
    }
}

impl<H> Window<H> {
    fn holds(&self, piece: &Piece) -> bool {
        self.mapped.get(&piece.at).is_some_and(|mapped| mapped.piece == *piece)
    }

    fn overlapping(&self, piece: &Piece) -> impl Iterator<Item = &Mapped<H>> {
        let before = self.mapped.range(..piece.at).next_back();
        let before =
            before.map(|(_, mapped)| mapped).filter(|mapped| mapped.piece.end() > piece.at);
        let within = self.mapped.range(piece.at..piece.end()).map(|(_, mapped)| mapped);
        before.into_iter().chain(within)
    }
}

/// Joins ranges that lie side by side. They are sorted first.
pub(crate) fn stretches(mut ranges: Vec<AddrRange>) -> Vec<AddrRange> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<AddrRange> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.start + last.len == range.start => last.len += range.len,
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use vramp_core::DeviceAddr;

    use super::*;

    const ID: WindowId = WindowId { watch: 1, pool: 2, span: 0, part: 0 };

    fn piece(key: u64, at: u64, len: u64) -> Piece {
        Piece { key, at: Bytes::mib(at), len: Bytes::mib(len) }
    }

    fn windows() -> Windows<u64> {
        let mut windows = Windows::default();
        windows.add(ID, AddrRange::new(DeviceAddr::new(1 << 40), Bytes::gib(1)));
        windows
    }

    fn open(windows: &mut Windows<u64>, pieces: &[Piece]) -> Vec<usize> {
        let missing = windows.acquire(ID, pieces).unwrap();
        for &index in &missing {
            assert_eq!(windows.in_the_way(ID, &pieces[index]), Some(vec![]));
            windows.insert(ID, pieces[index], pieces[index].key, &[]);
        }
        missing
    }

    fn keys(gone: Vec<Gone<u64>>) -> Vec<u64> {
        gone.iter().map(|gone| gone.handle).collect()
    }

    #[test]
    fn blocks_that_overlap_map_each_handle_once() {
        let mut windows = windows();
        let all = [piece(1, 0, 32), piece(2, 32, 32), piece(3, 64, 64)];
        assert_eq!(open(&mut windows, &all[..2]), [0, 1]);
        assert_eq!(open(&mut windows, &all[1..]), [1], "the second handle is there");
        windows.release(ID, &all[..2], 0);
        assert_eq!(windows.idle_bytes(), Bytes::mib(32), "the second is in use");
        assert_eq!(open(&mut windows, &all), [] as [usize; 0]);
        windows.release(ID, &all[1..], 1);
        windows.release(ID, &all, 2);
        assert_eq!(windows.idle_bytes(), Bytes::mib(128));
        assert_eq!(keys(windows.take_all_idle()), [1, 2, 3]);
        assert_eq!(windows.take_empty().len(), 1);
        assert!(!windows.has(1));
    }

    #[test]
    fn an_idle_handle_makes_way_for_one_that_took_its_place_and_one_in_use_does_not() {
        let mut windows = windows();
        let old = [piece(1, 0, 32), piece(2, 32, 32)];
        open(&mut windows, &old);
        let new = [piece(7, 16, 32)];
        assert_eq!(windows.acquire(ID, &new), None, "both are in use");
        windows.release(ID, &old[..1], 0);
        assert_eq!(windows.acquire(ID, &new), None, "the second is in use");
        windows.release(ID, &old[1..], 0);
        assert_eq!(windows.acquire(ID, &new), Some(vec![0]));
        assert_eq!(windows.in_the_way(ID, &new[0]).map(keys), Some(vec![1, 2]));
        windows.insert(ID, new[0], 7, &[]);
        // The same place and length with another key is another handle.
        windows.release(ID, &new, 0);
        assert_eq!(windows.acquire(ID, &[piece(8, 16, 32)]), Some(vec![0]));
    }

    #[test]
    fn idle_handles_go_by_bytes_number_time_and_watch() {
        let mut windows = windows();
        let other = WindowId { watch: 9, ..ID };
        windows.add(other, AddrRange::new(DeviceAddr::new(1 << 41), Bytes::gib(1)));
        let pieces: Vec<Piece> = (0..8).map(|n| piece(n, 32 * n, 32)).collect();
        open(&mut windows, &pieces);
        windows.insert(other, piece(100, 0, 32), 100, &[]);
        for (now, piece) in pieces.iter().enumerate() {
            windows.release(ID, [piece], now as u64);
        }
        windows.release(other, [&piece(100, 0, 32)], 8);
        assert_eq!(keys(windows.take_beyond(Bytes::mib(256), 100)), [0]);
        assert_eq!(keys(windows.take_beyond(Bytes::gib(1), 7)), [1]);
        let (gone, next) = windows.take_idle_since(3);
        assert_eq!((keys(gone), next), (vec![2, 3], Some(4)));
        assert_eq!(keys(windows.take_idle_of(9)), [100]);
        assert_eq!(windows.take_empty().len(), 1, "that of the other watch");
        assert_eq!(keys(windows.take_all_idle()), [4, 5, 6, 7]);
        assert_eq!(windows.idle_bytes(), Bytes::ZERO);
    }

    /// Random opens and closes of blocks, whose handles the exporter moves while they are not open, against a
    /// list of what is mapped.
    #[test]
    fn random_opens_map_each_handle_once_and_unmap_only_what_is_idle() {
        for seed in vramp_testing::seeds(40) {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut windows = windows();
            // Where each handle of 32 MiB lies at the exporter, by place; and the open blocks.
            let mut keys: Vec<u64> = (0..12).collect();
            let mut open: Vec<Vec<Piece>> = Vec::new();
            let mut mapped: BTreeMap<u64, u64> = BTreeMap::new();
            for now in 0..400 {
                match random.u8(..8) {
                    0..=3 => {
                        let first = random.usize(..12);
                        let places = first..random.usize(first..12) + 1;
                        let block: Vec<Piece> =
                            places.map(|place| piece(keys[place], 32 * place as u64, 32)).collect();
                        let missing = windows.acquire(ID, &block).expect("what is open stays");
                        for (index, one) in block.iter().enumerate() {
                            let is_missing = mapped.get(&one.key) != Some(&one.at.count());
                            assert_eq!(missing.contains(&index), is_missing, "{one:?}");
                        }
                        for index in missing {
                            for gone in windows.in_the_way(ID, &block[index]).expect("idle") {
                                mapped.remove(&gone.handle).expect("it was mapped");
                            }
                            let Piece { key, at, .. } = block[index];
                            windows.insert(ID, block[index], key, &[]);
                            assert_eq!(mapped.insert(key, at.count()), None, "mapped twice");
                        }
                        open.push(block);
                    }
                    4..=5 if !open.is_empty() => {
                        let closed = open.swap_remove(random.usize(..open.len()));
                        windows.release(ID, &closed, now);
                    }
                    6 => {
                        // A handle that is not open is released, and another one takes its place.
                        let place = random.usize(..12);
                        let at = Bytes::mib(32 * place as u64);
                        if !open.iter().flatten().any(|piece| piece.at == at) {
                            keys[place] = 1000 + now;
                        }
                    }
                    _ => {
                        let most = Bytes::mib(32 * random.u64(..8));
                        for gone in windows.take_beyond(most, 100) {
                            mapped.remove(&gone.handle).expect("it was mapped");
                        }
                        assert!(windows.idle_bytes() <= most);
                    }
                }
                for piece in open.iter().flatten() {
                    assert_eq!(mapped.get(&piece.key), Some(&piece.at.count()), "it is open");
                }
            }
        }
    }

    #[test]
    fn ranges_side_by_side_are_joined() {
        let range = |at, len| AddrRange::new(DeviceAddr::new(at), Bytes::new(len));
        let ranges = vec![range(8, 4), range(0, 4), range(4, 4), range(20, 4)];
        assert_eq!(stretches(ranges), [range(0, 12), range(20, 4)]);
        assert_eq!(stretches(vec![]), []);
    }
}
