//! How fast data moves between spaces, for strategies that choose among equals.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use super::SpaceId;

/// From where to where data moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkKey {
    /// Where it is.
    pub from: SpaceId,
    /// Where it goes.
    pub to: SpaceId,
}

/// Bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rate {
    /// So many in a second.
    pub bytes_per_s: u64,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} GB/s", self.bytes_per_s as f64 / 1e9)
    }
}

/// How far a space is by the rate of its link: the space itself, then the faster ones, then those
/// whose rate is unknown. Of equals a [`Strategy`](super::Strategy) takes the smallest index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// It is the space itself.
    Here,
    /// The faster, the nearer.
    Link(Reverse<Rate>),
    /// Nobody has measured it.
    Unknown,
}

/// The known rates between spaces, in each direction on its own. Spaces need not exist.
///
/// ```
/// use crate::ledger::core::{Links, Rate, LinkKey, SpaceId, Strategy};
/// let (gpu, near, far) = (SpaceId::gpu(0), SpaceId::host(1), SpaceId::host(0));
/// let mut links = Links::default();
/// links.set(LinkKey { from: gpu, to: near }, Rate { bytes_per_s: 55_000_000_000 });
/// let down = Strategy::Downgrade(gpu).candidates(&[gpu, far, near], links.distance_from(gpu))?;
/// assert_eq!(down.as_slice(), [near, far]);
/// # Ok::<(), crate::ledger::core::StrategyError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    rates: BTreeMap<LinkKey, Rate>,
}

impl Links {
    /// Notes a rate, in place of the one known so far.
    pub fn set(&mut self, hop: LinkKey, rate: Rate) {
        self.rates.insert(hop, rate);
    }

    /// Forgets a rate, and returns it.
    pub fn forget(&mut self, hop: LinkKey) -> Option<Rate> {
        self.rates.remove(&hop)
    }

    /// The rate of a hop; `None` if it is unknown. O(log n).
    pub fn rate(&self, hop: LinkKey) -> Option<Rate> {
        self.rates.get(&hop).copied()
    }

    /// All that is known, in the order of the spaces.
    pub fn iter(&self) -> impl Iterator<Item = (LinkKey, Rate)> {
        self.rates.iter().map(|(&hop, &rate)| (hop, rate))
    }

    /// For [`Strategy::candidates`](super::Strategy::candidates): how far each space is from one.
    pub fn distance_from(&self, from: SpaceId) -> impl Fn(SpaceId) -> Distance {
        move |to| match self.rate(LinkKey { from, to }) {
            _ if from == to => Distance::Here,
            Some(rate) => Distance::Link(Reverse(rate)),
            None => Distance::Unknown,
        }
    }
}

impl FromIterator<(LinkKey, Rate)> for Links {
    fn from_iter<I: IntoIterator<Item = (LinkKey, Rate)>>(rates: I) -> Links {
        Links { rates: rates.into_iter().collect() }
    }
}
