//! Tests of segments that are plain allocations, for `cudaIpcGetMemHandle`.

use vramp_tiers::regions::PauseOptions;

use super::*;
use crate::regions::{Tagged, Target, begin, end};

fn reserved(torch: &Torch) -> u64 {
    torch.memory(0).unwrap().reserved
}

fn plain_count(torch: &Torch) -> u64 {
    let session = torch.session(0).unwrap();
    session.plain_pool_if_any().map_or(0, |plain| plain.stats().unwrap().reserved.count())
}

#[test]
fn a_plain_segment_counts_as_any_other_and_leaves_the_card_with_its_free() {
    let torch = torch("limit=100MiB");
    let tensor = torch.get(4 << 20, 0).unwrap();
    let mapped = reserved(&torch);
    let segment = torch.plain_malloc(0, 20 << 20).unwrap().number();
    assert_eq!((reserved(&torch), plain_count(&torch)), (mapped + (20 << 20), 20 << 20));
    assert_eq!(torch.segment_device(segment), Some(0));
    let parts = torch.parts(0).unwrap();
    let of_segment = parts.iter().find(|part| part.address == segment).expect("it is listed");
    assert_eq!((of_segment.size, of_segment.state), (20 << 20, 3));
    let stats = torch.session(0).unwrap().memory_stats().unwrap();
    assert_eq!(stats.reserved_bytes.all.current, reserved(&torch));
    let snapshot = torch.session(0).unwrap().snapshot().unwrap();
    assert!(snapshot.segments.iter().any(|known| known.address.number() == segment));
    // Both kinds share the limit.
    assert_eq!(status(torch.plain_malloc(0, 90 << 20)), VRAMP_ERROR_OUT_OF_MEMORY);
    assert_eq!(status(torch.get(90 << 20, 0)), VRAMP_ERROR_OUT_OF_MEMORY);
    torch.audit();
    torch.segment_free(segment, false).unwrap();
    assert_eq!((reserved(&torch), plain_count(&torch)), (mapped, 0));
    torch.put(tensor, 0).unwrap();
    torch.audit();
}

#[test]
fn idle_memory_of_tensors_makes_room_for_a_plain_segment() {
    let torch = torch("limit=100MiB");
    let tensor = torch.get(80 << 20, 0).unwrap();
    torch.put(tensor, 0).unwrap();
    let segment = torch.plain_malloc(0, 80 << 20).unwrap().number();
    assert_eq!(reserved(&torch), 80 << 20);
    torch.segment_free(segment, false).unwrap();
    torch.audit();
}

#[test]
fn a_plain_segment_that_may_be_in_use_stays_until_it_is_not() {
    let torch = torch("");
    let block = torch.get(4 << 20, SIDE).unwrap();
    let segment = torch.plain_malloc(0, 40 << 20).unwrap().number();
    let range = AddrRange::new(DeviceAddr::new(segment), Bytes::mib(40));
    torch.driver().fill(torch.queue(SIDE), range, 1).unwrap();
    torch.segment_free(segment, true).unwrap();
    assert_eq!(plain_count(&torch), 40 << 20, "a stream may still use it");
    torch.driver().synchronize_stream(torch.queue(SIDE)).unwrap();
    let again = torch.plain_malloc(0, 40 << 20).unwrap().number();
    assert_eq!(again, segment);
    torch.segment_free(again, false).unwrap();
    assert_eq!(plain_count(&torch), 0);
    torch.put(block, SIDE).unwrap();
    torch.audit();
}

#[test]
fn a_thread_in_a_region_gets_memory_that_sleeps_with_it_and_plain_memory_stays() {
    let torch = torch("");
    let plain = torch.plain_malloc(0, 20 << 20).unwrap().number();
    let number = torch.session(0).unwrap().allocator().number();
    let tagged = Tagged { tag: "weights".to_owned(), options: Default::default() };
    let scope = begin(Target::Allocator(number), Some(tagged)).unwrap();
    let inside = torch.plain_malloc(0, 20 << 20).unwrap().number();
    end(Some(scope)).unwrap();
    assert_eq!((reserved(&torch), plain_count(&torch)), (40 << 20, 20 << 20));
    let regions = torch.session(0).unwrap().regions_if_any().expect("a thread was in one");
    regions.pause(&["weights"], PauseOptions::default()).unwrap();
    assert_eq!((reserved(&torch), plain_count(&torch)), (20 << 20, 20 << 20));
    regions.resume(&["weights"]).unwrap();
    for segment in [plain, inside] {
        torch.segment_free(segment, false).unwrap();
    }
    torch.audit();
}
