//! Amounts of memory on the command line.

use vramp::Bytes;
use vramp::device::sim::{CardModel, UnknownCard};
use vramp_analysis::limit::Limit;

/// Amounts below this need a unit.
const UNIT_NEEDED_BELOW: Bytes = Bytes::mib(1);

/// Error for an amount of memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AmountError {
    /// Not an amount.
    #[error(
        "'{0}' is not an amount of memory below 16 EiB: write a number and a unit, such as 64MiB, \
         1.5GiB or 80GB"
    )]
    Malformed(String),
    /// A small number without a unit, which is more likely meant in GiB.
    #[error("'{0}' has no unit: write {0}GiB or {0}MiB, or {0}B if you mean bytes")]
    NoUnit(String),
    /// Nothing fits into no memory.
    #[error("it is 0: give more, such as 16GiB")]
    Zero,
}

/// Reads an amount of memory such as `16GiB` or `80GB`. A number without a unit is in bytes, and has
/// to be at least 1 MiB.
pub(crate) fn memory(text: &str) -> Result<Bytes, AmountError> {
    let malformed = |_: vramp_core::ParseBytesError| AmountError::Malformed(text.to_owned());
    let amount: Bytes = text.parse().map_err(malformed)?;
    let has_unit = text.trim().ends_with(|last: char| last.is_ascii_alphabetic());
    match amount {
        Bytes::ZERO => Err(AmountError::Zero),
        amount if !has_unit && amount < UNIT_NEEDED_BELOW => {
            Err(AmountError::NoUnit(text.trim().to_owned()))
        }
        amount => Ok(amount),
    }
}

/// Reads what an allocator may reserve: an amount of memory, or the name of a card, of which a process
/// can use all but the context and libraries.
pub(crate) fn limit(text: &str) -> Result<Limit, LimitError> {
    let is_name = text.trim().starts_with(|first: char| first.is_ascii_alphabetic());
    match is_name {
        true => Ok(Limit::from(CardModel::find(text)?)),
        false => Ok(Limit::from(memory(text)?)),
    }
}

/// Error for a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LimitError {
    /// Not an amount.
    #[error(transparent)]
    Amount(#[from] AmountError),
    /// Not a card.
    #[error("it is neither an amount such as 16GiB nor a card: {0}")]
    Card(#[from] UnknownCard),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_may_be_a_card() {
        let card = limit("H200").unwrap();
        assert_eq!(card.bytes(), CardModel::find("h200").unwrap().usable());
        assert_eq!(card.to_string(), "h200 (139.12 GiB)");
        assert_eq!(limit("24GiB"), Ok(Limit::from(Bytes::gib(24))));
        let error = limit("voodoo").unwrap_err().to_string();
        assert!(error.contains("16GiB") && error.contains("h200"), "{error}");
        assert!(matches!(limit("24"), Err(LimitError::Amount(_))));
    }

    #[test]
    fn small_numbers_need_a_unit() {
        assert_eq!(memory("16GiB"), Ok(Bytes::gib(16)));
        assert_eq!(memory("17179869184"), Ok(Bytes::gib(16)));
        assert_eq!(memory("512B"), Ok(Bytes::new(512)));
        assert_eq!(memory("0GiB"), Err(AmountError::Zero));
        let error = memory("16").unwrap_err().to_string();
        assert!(error.contains("16GiB"), "{error}");
        assert!(matches!(memory("lots"), Err(AmountError::Malformed(_))));
    }
}
