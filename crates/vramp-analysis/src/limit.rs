//! A limit of memory, which keeps the name of the card that it was given as.

use std::fmt;

use serde::Serialize;
use vramp::Bytes;
use vramp::device::sim::CardModel;

/// Memory that a job may reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Limit {
    /// The amount.
    pub bytes: u64,
    /// Short name of the card that a process can use as much of, if the limit was given so.
    pub card: Option<&'static str>,
}

impl From<Bytes> for Limit {
    fn from(bytes: Bytes) -> Limit {
        Limit { bytes: bytes.count(), card: None }
    }
}

impl From<&CardModel> for Limit {
    fn from(card: &CardModel) -> Limit {
        Limit { bytes: card.usable().count(), card: Some(card.id) }
    }
}

impl Limit {
    /// Returns the amount.
    pub fn bytes(self) -> Bytes {
        Bytes::new(self.bytes)
    }
}

impl fmt::Display for Limit {
    /// `16.00 GiB`, or `l4 (21.49 GiB)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.card {
            Some(card) => f.pad(&format!("{card} ({})", self.bytes())),
            None => f.pad(&self.bytes().to_string()),
        }
    }
}
