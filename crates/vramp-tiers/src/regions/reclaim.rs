//! Host memory of blocks that are freed while their region sleeps.
//!
//! A copy has the contents one behind the other. What is left of it is moved together in place, towards its front, and
//! the blocks behind it are returned: O(bytes that are left), and no memory besides.
//!
//! Deliberately absent: copies on a disk, which keep what was freed until the region is resumed, unless nothing is left.

use vramp_core::Bytes;

use super::copies::{Contents, Copy, Place, ends};
use super::region::{Asleep, Region, State};
use super::set::Regions;
use crate::movers::Stored;

impl Regions {
    /// Frees host memory of blocks that were freed since their regions fell asleep. Waits for no move: a region that
    /// is being moved is left out. O(bytes of the copies of regions with such blocks).
    pub fn reclaim(&self) {
        for region in self.shared.all() {
            region.reclaim();
        }
    }
}

impl Region {
    /// Notes that a block of so many bytes was freed. Frees its host memory if the region sleeps and a quarter of its
    /// copy was freed since the last time, or all of it: so each byte freed has at most three copied. O(1) besides.
    pub fn note_free(&self, bytes: Bytes) {
        let Some(copied) = self.copied_while_asleep() else { return };
        if self.add_freed(bytes) * 4 >= copied || self.allocator.live().is_zero() {
            self.reclaim();
        }
    }

    /// Returns true if it sleeps with a copy, of which a free may return some memory. O(1).
    pub fn keeps_copy_asleep(&self) -> bool {
        self.copied_while_asleep().is_some()
    }

    /// Frees host memory of blocks that were freed since the region fell asleep, unless it is awake or being moved.
    pub(super) fn reclaim(&self) {
        let Some(mut state) = self.try_state() else { return };
        let State::Asleep(asleep) = &mut *state else { return };
        self.take_freed();
        if asleep.copy.is_some() && asleep.settle().is_ok() {
            asleep.drop_freed();
            self.note(&state);
        }
    }
}

impl Asleep {
    fn drop_freed(&mut self) {
        let left = Contents::new(&self.sleep.contents_left());
        if left.len() == self.contents.len() {
            return;
        }
        match &mut self.copy {
            Some(_) if left.len().is_zero() => self.copy = None,
            Some(Copy {
                contents, place: Place { stored: Stored::Host(host), .. }, valid, ..
            }) => {
                let mut kept = Bytes::ZERO;
                for &range in left.ranges() {
                    let from =
                        self.contents.find(range).expect("a pool that sleeps allocates nothing");
                    if from >= *valid {
                        break; // not copied yet
                    }
                    let len = range.len.min(*valid - from);
                    host.copy_down(from, kept, len).expect("what is valid lies in the copy");
                    kept += len;
                }
                drop(host.split_off(kept));
                *valid = kept;
                *contents = left.clone();
            }
            _ => return,
        }
        self.ends = ends(&left, self.sleep.chunks());
        self.contents = left;
    }
}
