//! Regions whose contents go to a disk. The disk is of the process, so one test has it.

use std::ffi::CString;
use std::ptr::{null, null_mut};

use crate::common::sleep::*;
use crate::common::tiers::{MIB, open_mapped};
use crate::common::*;
use vramp_capi::abi::vramp_status_t::*;
use vramp_capi::interface::*;
use vramp_capi::sleep::abi::*;
use vramp_capi::sleep::*;

#[test]
fn a_region_backs_up_to_a_disk_is_read_there_and_ahead() {
    let allocator = open_mapped(256);
    let stream = stream(allocator);
    let options = region_options(VRAMP_BACKUP_DISK, false);
    // No disk was named.
    assert_eq!(begin_with(allocator, "optimizer", &options), Err(VRAMP_ERROR_OPTION));

    let folder = tempfile::tempdir().unwrap();
    let name = CString::new(folder.path().to_str().unwrap()).unwrap();
    let nowhere = CString::new(folder.path().join("nowhere").to_str().unwrap()).unwrap();
    // SAFETY: the texts end with a zero, or are null.
    let set = |name: &CString, limit| unsafe { vramp_region_set_disk(name.as_ptr(), limit) };
    // SAFETY: as above.
    assert_eq!(unsafe { vramp_region_set_disk(null(), 0) }, VRAMP_ERROR_NULL);
    assert_ne!(set(&nowhere, 0), VRAMP_OK);
    assert_eq!(set(&name, 64 * MIB), VRAMP_OK, "{}", last_error());

    let scope = begin_with(allocator, "optimizer", &options).unwrap();
    let size = 20 << 20;
    let block = malloc(allocator, size, stream).unwrap();
    assert_eq!(vramp_region_end(scope), VRAMP_OK);
    // SAFETY: the card stores what is written to the block, which has as many bytes.
    let bytes = unsafe { std::slice::from_raw_parts_mut(block.cast::<u8>(), size) };
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8 ^ (at >> 8) as u8);
    let expected = bytes.to_vec();

    let mut part = vec![0; 5 << 20];
    let mut read = |offset: usize| {
        // SAFETY: the address is a number, and the result has as many bytes.
        let status = unsafe {
            let at = block.cast::<u8>().add(offset).cast();
            vramp_region_read_backup(allocator, at, part.as_mut_ptr().cast(), part.len())
        };
        (status, part.clone())
    };
    assert_eq!(read(0).0, VRAMP_ERROR_REGION, "it is awake");
    for round in 0..2 {
        assert_eq!(pause(allocator, &["optimizer"]), VRAMP_OK, "{}", last_error());
        let asleep = state(allocator, "optimizer");
        assert_eq!((asleep.backup, asleep.on_card, asleep.on_host), (VRAMP_BACKUP_DISK, 0, 0));
        assert!(asleep.on_disk >= size as u64, "{asleep:?}");
        let offset = 3 << 20;
        let (status, found) = read(offset);
        assert_eq!(status, VRAMP_OK, "{}", last_error());
        assert!(found == expected[offset..][..found.len()], "round {round}");
        assert_eq!(read(size - 1).0, VRAMP_ERROR_REGION, "it ends behind the block");
        assert_eq!(prefetch(allocator, &["nothing"]), VRAMP_ERROR_REGION);
        assert_eq!(prefetch(allocator, &["optimizer"]), VRAMP_OK, "{}", last_error());
        assert!(state(allocator, "optimizer").on_host >= size as u64);
        assert_eq!(resume(allocator, &["optimizer"]), VRAMP_OK, "{}", last_error());
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(block.cast::<u8>(), size) };
        assert!(bytes == expected, "round {round}");
    }
    // SAFETY: null is refused.
    let status = unsafe { vramp_region_read_backup(allocator, block, null_mut(), 1) };
    assert_eq!(status, VRAMP_ERROR_NULL);
    assert_eq!(vramp_free(allocator, block, stream), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    assert!(left <= 1, "{left} files are left of a closed allocator");
}
