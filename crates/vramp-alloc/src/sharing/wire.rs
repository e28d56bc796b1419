//! The description of exported memory as bytes, between two processes.

use vramp_core::Bytes;

use crate::sharing::export::Description;

/// First byte of a description: its version.
const VERSION: u8 = 1;

/// Writes version, whether handles are fabric ones, offset, length, and for each handle its length and
/// its bytes if it is a fabric one. Integers are little-endian.
pub(super) fn encode(description: &Description, fabric: &[[u8; 64]]) -> Vec<u8> {
    let mut bytes = vec![VERSION, u8::from(!fabric.is_empty())];
    for number in [description.offset, description.len] {
        bytes.extend(number.count().to_le_bytes());
    }
    for (index, len) in description.handles.iter().enumerate() {
        bytes.extend(len.count().to_le_bytes());
        if let Some(handle) = fabric.get(index) {
            bytes.extend(handle);
        }
    }
    bytes
}

/// Reads what [`encode`] wrote: the description, and the fabric handles if it has some. `None` for anything
/// else.
pub(super) fn decode(bytes: &[u8]) -> Option<(Description, Vec<[u8; 64]>)> {
    let (&[version, is_fabric], mut rest) = bytes.split_first_chunk::<2>()?;
    if version != VERSION || is_fabric > 1 {
        return None;
    }
    let number = |rest: &mut &[u8]| {
        let (number, left) = rest.split_first_chunk::<8>()?;
        *rest = left;
        Some(Bytes::new(u64::from_le_bytes(*number)))
    };
    let (offset, len) = (number(&mut rest)?, number(&mut rest)?);
    let (mut handles, mut fabric) = (Vec::new(), Vec::new());
    while !rest.is_empty() {
        handles.push(number(&mut rest)?);
        if is_fabric == 1 {
            let (handle, left) = rest.split_first_chunk::<64>()?;
            fabric.push(*handle);
            rest = left;
        }
    }
    Some((Description { handles, offset, len }, fabric))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_survives_the_way_and_garbage_is_refused() {
        let description = Description {
            handles: vec![Bytes::mib(2), Bytes::mib(32)],
            offset: Bytes::new(512),
            len: Bytes::mib(30),
        };
        for fabric in [vec![], vec![[7; 64], [9; 64]]] {
            let bytes = encode(&description, &fabric);
            assert_eq!(decode(&bytes), Some((description.clone(), fabric)));
            for cut in 1..8 {
                assert_eq!(decode(&bytes[..bytes.len() - cut]), None);
            }
        }
        assert_eq!(decode(&[]), None);
        assert_eq!(decode(&[2, 0]), None);
        assert_eq!(decode(&[1, 2]), None);
    }
}
