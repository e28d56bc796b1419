//! Amounts of memory on the command line.

use vramp::Bytes;

/// Amounts below this need a unit.
const UNIT_NEEDED_BELOW: Bytes = Bytes::mib(1);

/// Error for an amount of memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AmountError {
    /// Not an amount.
    #[error(transparent)]
    Malformed(#[from] vramp_core::ParseBytesError),
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
    let amount: Bytes = text.parse()?;
    let has_unit = text.trim().ends_with(|last: char| last.is_ascii_alphabetic());
    match amount {
        Bytes::ZERO => Err(AmountError::Zero),
        amount if !has_unit && amount < UNIT_NEEDED_BELOW => {
            Err(AmountError::NoUnit(text.trim().to_owned()))
        }
        amount => Ok(amount),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
