//! What precedes the publisher's bytes in the layout of kept memory.

use vramp_core::{Bytes, DeviceAddr};

/// First bytes of a layout that this module wrote, with the version.
const MAGIC: [u8; 8] = *b"vramp-k1";
/// Bytes before the publisher's.
const HEADER: usize = 24;

/// Where the memory was mapped when it was made, and how much of it is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Placed {
    pub at: DeviceAddr,
    pub used: Bytes,
}

/// Returns the layout that a keeper holds.
pub(super) fn encode(placed: Placed, layout: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + layout.len());
    bytes.extend(MAGIC);
    bytes.extend(placed.at.number().to_le_bytes());
    bytes.extend(placed.used.count().to_le_bytes());
    bytes.extend(layout);
    bytes
}

/// Returns both parts of a layout; `None` if other software wrote it.
pub(super) fn decode(bytes: &[u8]) -> Option<(Placed, &[u8])> {
    let (magic, rest) = bytes.split_first_chunk::<8>()?;
    let (at, rest) = rest.split_first_chunk::<8>()?;
    let (used, layout) = rest.split_first_chunk::<8>()?;
    let placed = Placed {
        at: DeviceAddr::new(u64::from_le_bytes(*at)),
        used: Bytes::new(u64::from_le_bytes(*used)),
    };
    (*magic == MAGIC).then_some((placed, layout))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_read_as_it_was_written_and_others_are_refused() {
        let placed = Placed { at: DeviceAddr::new(0x7f00_0000_0000), used: Bytes::mib(3) };
        for text in [&b""[..], b"{}"] {
            let bytes = encode(placed, text);
            assert_eq!(decode(&bytes), Some((placed, text)));
            assert_eq!(decode(&bytes[..HEADER - 1]), None);
        }
        assert_eq!(decode(&[0; HEADER]), None);
    }
}
