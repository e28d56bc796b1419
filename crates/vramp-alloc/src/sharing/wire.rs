//! The description of exported memory as bytes, between two processes.

use vramp_core::Bytes;

use crate::sharing::export::{Description, Place};

/// First byte of a description: its version.
const VERSION: u8 = 2;

/// The handles are fabric ones: their bytes follow.
const FABRIC: u8 = 1;
/// The exporter says where the handles lie: pool, span and distance follow, and a key of each handle.
const PLACED: u8 = 2;

/// What is sent about an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sent {
    pub description: Description,
    /// None if the handles are descriptors.
    pub fabric: Vec<[u8; 64]>,
    pub place: Option<Place>,
}

/// Writes version, what is there, offset, length, the place if there is one, and for each handle its length,
/// its key if it has a place, and its bytes if it is a fabric one. Integers are little-endian.
pub(super) fn encode(
    description: &Description,
    fabric: &[[u8; 64]],
    place: Option<&Place>,
) -> Vec<u8> {
    let fabric_flag = if fabric.is_empty() { 0 } else { FABRIC };
    let place_flag = if place.is_some() { PLACED } else { 0 };
    let mut bytes = vec![VERSION, fabric_flag | place_flag];
    let mut number = |number: u64| bytes.extend(number.to_le_bytes());
    number(description.offset.count());
    number(description.len.count());
    if let Some(Place { pool, span, at, .. }) = place {
        [*pool, *span, at.count()].into_iter().for_each(&mut number);
    }
    for (index, len) in description.handles.iter().enumerate() {
        bytes.extend(len.count().to_le_bytes());
        if let Some(place) = place {
            bytes.extend(place.keys[index].to_le_bytes());
        }
        if let Some(handle) = fabric.get(index) {
            bytes.extend(handle);
        }
    }
    bytes
}

/// Reads what [`encode`] wrote. `None` for anything else.
pub(super) fn decode(bytes: &[u8]) -> Option<Sent> {
    let (&[version, flags], mut rest) = bytes.split_first_chunk::<2>()?;
    if version != VERSION || flags > FABRIC | PLACED {
        return None;
    }
    let number = |rest: &mut &[u8]| {
        let (number, left) = rest.split_first_chunk::<8>()?;
        *rest = left;
        Some(u64::from_le_bytes(*number))
    };
    let (offset, len) = (Bytes::new(number(&mut rest)?), Bytes::new(number(&mut rest)?));
    let mut place = None;
    if flags & PLACED != 0 {
        let (pool, span) = (number(&mut rest)?, number(&mut rest)?);
        let at = Bytes::new(number(&mut rest)?);
        place = Some(Place { pool, span, at, keys: Vec::new() });
    }
    let (mut handles, mut fabric) = (Vec::new(), Vec::new());
    while !rest.is_empty() {
        handles.push(Bytes::new(number(&mut rest)?));
        if let Some(place) = &mut place {
            place.keys.push(number(&mut rest)?);
        }
        if flags & FABRIC != 0 {
            let (handle, left) = rest.split_first_chunk::<64>()?;
            fabric.push(*handle);
            rest = left;
        }
    }
    Some(Sent { description: Description { handles, offset, len }, fabric, place })
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
        let place = Place { pool: 3, span: 1, at: Bytes::mib(64), keys: vec![5, 6] };
        for fabric in [vec![], vec![[7; 64], [9; 64]]] {
            for place in [None, Some(place.clone())] {
                let bytes = encode(&description, &fabric, place.as_ref());
                for cut in 1..8 {
                    assert_eq!(decode(&bytes[..bytes.len() - cut]), None);
                }
                let (description, fabric) = (description.clone(), fabric.clone());
                assert_eq!(decode(&bytes), Some(Sent { description, fabric, place }));
            }
        }
        assert_eq!(decode(&[]), None);
        assert_eq!(decode(&[1, 0]), None);
        assert_eq!(decode(&[2, 4]), None);
    }
}
