//! Arenas for caches and their pages.

use std::collections::BTreeSet;
use std::ops::Range;

use vramp::Bytes;
use vramp::peers::Preset;
use vramp_core::AddrRange;

use super::model::{Cache, CachePage, User, later_than, note};
use super::{Done, Finding, World, byte_of, way_of};
use crate::lifecycle::subject::{CacheChoice, Why};

impl World {
    pub(super) fn cache(&mut self, pool: u64, cache: u64, pages: u64, shape: u64) -> Done {
        if !self.pools.has(pool) {
            return Ok(false);
        }
        let choice = CacheChoice {
            tensors: 1 + (shape % 3) as u32,
            pages: pages.clamp(1, 32) as u32,
            interleaved: shape / 3 % 2 == 1,
            superpage: 1 << (shape / 6 % 3),
            limit: (shape / 18 % 4 == 3).then_some(pages.div_ceil(2) as u32),
        };
        let made = self.subject.cache(pool, cache, choice);
        if self.preset != Preset::Vramp {
            return self.expect(made, &[Why::NotSupported]);
        }
        if let Some(whole) = self.allow(made, &[Why::OutOfMemory])? {
            let pages = (0..choice.pages).map(|_| None).collect();
            let state = Cache { pool, whole, choice, pages, noted: BTreeSet::new() };
            self.caches.add(cache, state);
        }
        Ok(true)
    }

    /// Commits the pages of a mask.
    pub(super) fn commit(&mut self, cache: u64, stream: u64, mask: u64) -> Done {
        let (Some(state), Some(on)) = (self.caches.get(cache), self.streams.get(stream)) else {
            return Ok(false);
        };
        let pages = state.of_mask(mask);
        let committed = pages.iter().any(|&page| state.pages[page as usize].is_some());
        let (closed, open) = (!self.pools.has(state.pool), on.is_open());
        if on.capture.is_some() || pages.is_empty() || self.pools.len() == 0 {
            return Ok(false);
        }
        let done = self.subject.commit(cache, &ranges(&pages), stream);
        if closed {
            return self.expect(done, &[Why::Closed]);
        }
        if !open {
            return self.expect(done, &[Why::UnknownStream]);
        }
        if committed {
            return self.expect(done, &[Why::Occupied]);
        }
        if self.allow(done, self.commit_allows())?.is_some() {
            self.caches.get_mut(cache).expect("it was found above").committed(&pages, stream);
        }
        Ok(true)
    }

    /// Work that pages were parked behind cannot be waited for while its stream captures, in another thread's
    /// program too.
    fn commit_allows(&self) -> &'static [Why] {
        match self.captures.len() {
            0 if !self.shared => &[Why::OutOfMemory],
            _ => &[Why::OutOfMemory, Why::Capturing],
        }
    }

    pub(super) fn take(&mut self, cache: u64, stream: u64, count: u64) -> Done {
        let (Some(state), Some(_)) = (self.caches.get(cache), self.runs(stream)) else {
            return Ok(false);
        };
        if !self.pools.has(state.pool) {
            return Ok(false);
        }
        let left = state.pages.iter().filter(|page| page.is_none()).count() as u64;
        let taken = self.subject.take(cache, count as u32, stream);
        if left < count {
            return self.expect(taken, &[Why::Occupied]);
        }
        if let Some(taken) = self.allow(taken, self.commit_allows())? {
            let pages: Vec<u32> = taken.into_iter().flatten().collect();
            let state = self.caches.get_mut(cache).expect("it was found above");
            let committed =
                |&page: &u32| state.pages.get(page as usize).is_none_or(Option::is_some);
            if pages.len() as u64 != count || pages.iter().any(committed) {
                return Err(format!("{pages:?} were taken for {count} pages"));
            }
            state.committed(&pages, stream);
        }
        Ok(true)
    }

    /// Queues work on the committed pages of a mask: as on a block, and 4 compares their bytes.
    pub(super) fn work_cache(
        &mut self,
        cache: u64,
        stream: u64,
        mask: u64,
        (kind, ns): (u64, u64),
    ) -> Done {
        let (Some(state), Some(raw)) = (self.caches.get(cache), self.runs(stream)) else {
            return Ok(false);
        };
        if !self.pools.has(state.pool) {
            return Ok(false);
        }
        let writes = !matches!(kind, 0 | 4);
        let mut done = false;
        for page in state.of_mask(mask) {
            let state = self.caches.get(cache).expect("it was found above");
            let Some(CachePage { users, byte }) = &state.pages[page as usize] else { continue };
            let (parts, known) = (state.parts(page), *byte);
            let after = later_than(users, writes);
            if kind == 4 && (known.is_none() || !self.stores || self.slots.is_empty()) {
                continue;
            }
            for user in after {
                self.order(user, stream)?;
            }
            match known {
                Some(byte) if kind == 4 => {
                    let last = *parts.last().expect("a page has a part at least");
                    self.copy_back(last, raw, byte, cache)?;
                }
                _ => {
                    for part in parts {
                        self.queue(raw, part, kind, ns, byte_of(cache + u64::from(page), ns))?;
                    }
                }
            }
            let fills = kind != 4 && self.fills(kind);
            let state = self.caches.get_mut(cache).expect("it was found above");
            let page_state = state.pages[page as usize].as_mut().expect("it was found above");
            note(&mut page_state.users, stream, writes);
            if fills {
                page_state.byte = Some(byte_of(cache + u64::from(page), ns));
            }
            done = true;
        }
        Ok(done)
    }

    /// Parks the pages of a mask behind a stream, on which the work of others is ordered first; 1 behind all.
    pub(super) fn park(&mut self, cache: u64, stream: u64, mask: u64, way: u64) -> Done {
        let Some(state) = self.caches.get(cache).filter(|state| self.pools.has(state.pool)) else {
            return Ok(false);
        };
        let pages = state.of_mask(mask);
        if pages.is_empty() || !self.streams.has(stream) {
            return Ok(false);
        }
        let mut users: BTreeSet<u64> = BTreeSet::new();
        for page in &pages {
            let Some(CachePage { users: of_page, .. }) = &state.pages[*page as usize] else {
                let parked = self.subject.park(cache, &ranges(&pages), Some(stream));
                return self.expect(parked, &[Why::Occupied]);
            };
            // Recorded uses count when the arena is dropped, and not here.
            let others = of_page.iter().filter(|user| user.worked && user.stream != stream);
            users.extend(others.map(|user| user.stream));
        }
        let behind = (way != 1).then_some(stream);
        if behind.is_some() && !users.is_empty() {
            if self.runs(stream).is_none() {
                return Ok(false);
            }
            for user in users {
                self.order(user, stream)?;
            }
        }
        let parked = self.subject.park(cache, &ranges(&pages), behind);
        if self.allow(parked, &[])?.is_some() {
            let state = self.caches.get_mut(cache).expect("it was found above");
            state.noted.extend(behind);
            pages.iter().for_each(|&page| state.pages[page as usize] = None);
        }
        Ok(true)
    }

    pub(super) fn release_cache(&mut self, cache: u64, keep: u64) -> Done {
        let Some(state) = self.caches.get(cache).filter(|state| self.pools.has(state.pool)) else {
            return Ok(false);
        };
        let committed = state.pages.iter().flatten().count();
        let released = self.subject.release(cache, Bytes::new(keep));
        self.allow(released, &[])?;
        let (now, _) = self.subject.cache_pages(cache);
        if now as usize != committed {
            return Err(format!("{committed} pages are committed, and {now} after a release"));
        }
        Ok(true)
    }

    /// Records the work of streams that neither committed nor parked: those are noted anyway.
    pub(super) fn record_cache_uses(&mut self, cache: u64, of: Option<u64>) -> Result<(), Finding> {
        let Some(state) = self.caches.get_mut(cache) else { return Ok(()) };
        let mut users: BTreeSet<u64> = BTreeSet::new();
        for user in state.pages.iter_mut().flatten().flat_map(|page| &mut page.users) {
            let wanted = of.is_none_or(|stream| stream == user.stream);
            if wanted && user.worked && !user.recorded && !state.noted.contains(&user.stream) {
                user.recorded = true;
                users.insert(user.stream);
            }
        }
        for stream in users {
            let used = self.subject.use_cache(cache, stream);
            self.allow(used, &[])?;
        }
        Ok(())
    }

    pub(super) fn drop_cache(&mut self, cache: u64, way: u64) -> Done {
        let Some(state) = self.caches.get(cache) else { return Ok(false) };
        if self.pools.has(state.pool) {
            let mut users = state.pages.iter().flatten().flat_map(|page| &page.users);
            if users.any(|user| self.capture_of(user.stream).is_some()) {
                return Ok(false);
            }
            self.record_cache_uses(cache, None)?;
        }
        self.caches.take(cache);
        let dropped = self.subject.drop_cache(cache, way_of(way));
        self.allow(dropped, &[]).map(|_| true)
    }

    /// Checks that arenas have as many committed pages as the program has.
    pub(super) fn check_caches(&self) -> Result<(), Finding> {
        for (name, state) in self.caches.0.iter().filter(|(_, state)| self.pools.has(state.pool)) {
            let ours = state.pages.iter().flatten().count();
            let (committed, moving) = self.subject.cache_pages(*name);
            if (committed as usize, moving) != (ours, 0) {
                return Err(format!(
                    "the program has {ours} pages of cache {name}, and {committed} are committed, {moving} moving"
                ));
            }
        }
        Ok(())
    }
}

impl Cache {
    /// Returns the pages of a mask that there are.
    pub fn of_mask(&self, mask: u64) -> Vec<u32> {
        (0..self.choice.pages).filter(|page| mask >> page & 1 == 1).collect()
    }

    fn committed(&mut self, pages: &[u32], stream: u64) {
        self.noted.insert(stream);
        for &page in pages {
            let users = vec![User { stream, worked: false, writes: true, recorded: false }];
            self.pages[page as usize] = Some(CachePage { users, byte: None });
        }
    }

    /// Returns the addresses of a page in all tensors.
    fn parts(&self, page: u32) -> Vec<AddrRange> {
        let CacheChoice { tensors, pages, interleaved, .. } = self.choice;
        let place = |tensor: u32| match interleaved {
            true => page * tensors + tensor,
            false => tensor * pages + page,
        };
        let part = |tensor| {
            AddrRange::new(
                self.whole.start + CacheChoice::PAGE * u64::from(place(tensor)),
                CacheChoice::PAGE,
            )
        };
        (0..tensors).map(part).collect()
    }
}

/// Returns sorted pages as ranges, neighbours together.
fn ranges(pages: &[u32]) -> Vec<Range<u32>> {
    let runs = pages.chunk_by(|page, next| page + 1 == *next);
    runs.map(|run| run[0]..run[run.len() - 1] + 1).collect()
}
