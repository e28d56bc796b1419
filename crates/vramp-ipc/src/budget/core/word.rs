//! Numbers of the ledger, each of which changes by one instruction.

/// Bytes of a page, the unit of claims.
pub const PAGE: u64 = 2 << 20;

const PAGE_BITS: u32 = 21;
/// The most pages that a claim or a capacity has: 4 TiB less a page.
pub const MAX_PAGES: u64 = (1 << PAGE_BITS) - 1;
const SEQUENCE_MASK: u64 = u64::MAX >> (2 * PAGE_BITS);
const GENERATION_MASK: u64 = u64::MAX >> PAGE_BITS;
const TIME_MASK: u64 = u64::MAX >> (PAGE_BITS + 1);

/// Returns the pages that have room for `bytes`.
pub fn pages_of(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE)
}

/// What a member has claimed and announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Word {
    /// Pages that it may use.
    pub claimed: u64,
    /// Pages that it announced and was not granted yet.
    pub pending: u64,
    /// Number of changes, which wraps around. No change leaves the word as it was.
    pub sequence: u64,
}

impl Word {
    pub fn unpack(bits: u64) -> Word {
        let (claimed, pending) = (bits & MAX_PAGES, bits >> PAGE_BITS & MAX_PAGES);
        Word { claimed, pending, sequence: bits >> (2 * PAGE_BITS) }
    }

    pub fn pack(self) -> u64 {
        let fits = self.claimed <= MAX_PAGES && self.pending <= MAX_PAGES;
        assert!(fits && self.sequence <= SEQUENCE_MASK, "{self:?} does not fit");
        self.claimed | self.pending << PAGE_BITS | self.sequence << (2 * PAGE_BITS)
    }

    /// Returns the word that follows, with other pages.
    pub fn next(self, claimed: u64, pending: u64) -> Word {
        Word { claimed, pending, sequence: (self.sequence + 1) & SEQUENCE_MASK }
    }

    /// Returns the pages that count against the capacity, of a member with this guarantee.
    pub fn counted(self, guaranteed: u64) -> u64 {
        (self.claimed + self.pending).max(guaranteed)
    }
}

/// What a member is guaranteed, and which member it is: a slot has another generation each time a process
/// takes it. Zero is a slot of no member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Guarantee {
    pub pages: u64,
    pub generation: u64,
}

impl Guarantee {
    pub fn unpack(bits: u64) -> Guarantee {
        Guarantee { pages: bits & MAX_PAGES, generation: bits >> PAGE_BITS }
    }

    pub fn pack(self) -> u64 {
        let fits = self.pages <= MAX_PAGES && self.generation <= GENERATION_MASK;
        assert!(fits, "{self:?} does not fit");
        self.pages | self.generation << PAGE_BITS
    }

    /// Returns a generation made of random bits. It is not zero.
    pub fn generation(random: u64) -> u64 {
        (random & GENERATION_MASK).max(1)
    }
}

/// A request to give pages back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// At least one.
    pub pages: u64,
    /// The handlers of the program may release what it has to make again. Otherwise only what is idle.
    pub may_lose: bool,
    /// When the oldest request that was not answered was made.
    pub since_ms: u64,
}

impl Ask {
    /// Returns the request; `None` if there is none.
    pub fn unpack(bits: u64) -> Option<Ask> {
        let pages = bits & MAX_PAGES;
        let may_lose = bits >> PAGE_BITS & 1 == 1;
        (pages > 0).then_some(Ask { pages, may_lose, since_ms: bits >> (PAGE_BITS + 1) })
    }

    pub fn pack(self) -> u64 {
        let since_ms = self.since_ms & TIME_MASK;
        self.pages.clamp(1, MAX_PAGES)
            | u64::from(self.may_lose) << PAGE_BITS
            | since_ms << (PAGE_BITS + 1)
    }

    /// Returns the request that is both.
    pub fn and(self, other: Option<Ask>) -> Ask {
        let Some(other) = other else { return self };
        Ask {
            pages: self.pages.max(other.pages),
            may_lose: self.may_lose || other.may_lose,
            since_ms: other.since_ms,
        }
    }
}

/// A command to a member, or its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// What is to be done or was done. Not zero, below 8.
    pub code: u64,
    pub pages: u64,
    /// The same of a command and its result.
    pub id: u64,
}

impl Signal {
    /// Returns an id made of random bits.
    pub fn id(random: u64) -> u64 {
        random >> (PAGE_BITS + 3)
    }

    pub fn unpack(bits: u64) -> Option<Signal> {
        let (code, pages) = (bits & 7, bits >> 3 & MAX_PAGES);
        (code != 0).then_some(Signal { code, pages, id: bits >> (PAGE_BITS + 3) })
    }

    pub fn pack(self) -> u64 {
        self.code & 7 | self.pages.min(MAX_PAGES) << 3 | self.id << (PAGE_BITS + 3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unpacked_as_they_were_packed() {
        for pages in [0, 1, MAX_PAGES] {
            let word = Word { claimed: pages, pending: MAX_PAGES - pages, sequence: SEQUENCE_MASK };
            assert_eq!(Word::unpack(word.pack()), word);
            assert_eq!(word.next(pages, 0).sequence, 0);
            let guarantee = Guarantee { pages, generation: GENERATION_MASK };
            assert_eq!(Guarantee::unpack(guarantee.pack()), guarantee);
        }
        assert_eq!(Word::unpack(0), Word::default());
        assert_eq!(Guarantee::unpack(0), Guarantee::default());
        assert_eq!(Guarantee::generation(0), 1);
        assert_eq!(Guarantee::generation(u64::MAX), GENERATION_MASK);
        for may_lose in [false, true] {
            let ask = Ask { pages: MAX_PAGES, may_lose, since_ms: TIME_MASK };
            assert_eq!(Ask::unpack(ask.pack()), Some(ask));
        }
        assert_eq!(Ask::unpack(0), None);
        let signal = Signal { code: 7, pages: MAX_PAGES, id: Signal::id(u64::MAX) };
        assert_eq!(Signal::unpack(signal.pack()), Some(signal));
        assert_eq!(Signal::unpack(0), None);
    }

    #[test]
    fn requests_that_meet_are_one_with_the_older_time() {
        let ask = |pages, may_lose, since_ms| Ask { pages, may_lose, since_ms };
        assert_eq!(ask(5, false, 9).and(None), ask(5, false, 9));
        assert_eq!(ask(5, false, 9).and(Some(ask(3, true, 7))), ask(5, true, 7));
    }

    #[test]
    fn a_guarantee_counts_whether_it_is_claimed_or_not() {
        let word = Word { claimed: 3, pending: 4, sequence: 0 };
        assert_eq!([0, 7, 8].map(|guaranteed| word.counted(guaranteed)), [7, 7, 8]);
    }
}
