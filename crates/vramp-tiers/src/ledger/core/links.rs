//! Transfer rates between spaces, for strategies that choose among equal spaces.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use super::SpaceId;

/// Source and destination of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkKey {
    /// Source space.
    pub from: SpaceId,
    /// Destination space.
    pub to: SpaceId,
}

/// A transfer rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rate {
    /// Bytes per second.
    pub bytes_per_s: u64,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} GB/s", self.bytes_per_s as f64 / 1e9)
    }
}

/// Distance of a space by the rate of its link: the space itself, then faster before slower links,
/// then links of unknown rate. Of equals a [`Strategy`](super::Strategy) takes the smallest index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// The space itself.
    Here,
    /// A link of known rate: the faster, the nearer.
    Link(Reverse<Rate>),
    /// A link of unknown rate.
    Unknown,
}

/// Known transfer rates between spaces, for each direction. The spaces need not exist.
///
/// ```
/// use vramp_tiers::links::{LinkKey, Links, Rate};
/// use vramp_tiers::{SpaceId, Strategy};
/// let (gpu, near, far) = (SpaceId::gpu(0), SpaceId::host(1), SpaceId::host(0));
/// let mut links = Links::default();
/// links.set(LinkKey { from: gpu, to: near }, Rate { bytes_per_s: 55_000_000_000 });
/// let down = Strategy::Downgrade(gpu).candidates(&[gpu, far, near], links.distance_from(gpu))?;
/// assert_eq!(down.as_slice(), [near, far]);
/// # Ok::<(), vramp_tiers::reserve::StrategyError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    rates: BTreeMap<LinkKey, Rate>,
}

impl Links {
    /// Sets the rate of a link.
    pub fn set(&mut self, link: LinkKey, rate: Rate) {
        self.rates.insert(link, rate);
    }

    /// Removes a rate and returns it.
    pub fn forget(&mut self, link: LinkKey) -> Option<Rate> {
        self.rates.remove(&link)
    }

    /// Returns the rate of a link; `None` if it is unknown. O(log n).
    pub fn rate(&self, link: LinkKey) -> Option<Rate> {
        self.rates.get(&link).copied()
    }

    /// All known rates, in the order of the spaces.
    pub fn iter(&self) -> impl Iterator<Item = (LinkKey, Rate)> {
        self.rates.iter().map(|(&link, &rate)| (link, rate))
    }

    /// Returns the distance of each space from `from`, for
    /// [`Strategy::candidates`](super::Strategy::candidates).
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
