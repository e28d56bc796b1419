//! Free memory of other cards, and reads in place.

use std::ffi::{CString, c_int};
use std::ptr::null_mut;

use vramp_alloc::{Bytes, Config};
use vramp_capi::abi::vramp_allocator_t;
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::vramp_stream_t;
use vramp_capi::interface::*;
use vramp_capi::tiers::abi::*;
use vramp_capi::tiers::buffers::*;
use vramp_capi::tiers::leases::*;
use vramp_capi::tiers::*;

use crate::common::*;

const LEN: usize = 24 << 20;

/// An allocator of 64 MiB on the first of two simulated cards.
fn first_of_two() -> vramp_allocator_t {
    let mut opened = vramp_alloc::device::open_ordinals_mapped("sim:h200x2", &[0]).unwrap();
    let config = Config { limit: Some(Bytes::mib(64)), ..Config::default() };
    vramp_capi::testing::open_on(opened.remove(0), config).unwrap()
}

fn open_toml(allocator: vramp_allocator_t, peers: &str) -> vramp_status_t {
    let text = format!("[[host]]\nindex = 0\ncapacity = '256MiB'\nblocks_per_pool = 16\n{peers}");
    let text = CString::new(text).unwrap();
    // SAFETY: the text outlives the call.
    unsafe { vramp_tiers_open(allocator, text.as_ptr()) }
}

fn lease_in_place(
    allocator: vramp_allocator_t,
    uses: &[(vramp_buffer_t, u32)],
    stream: vramp_stream_t,
) -> (vramp_buffer_lease_t, Vec<usize>, Vec<c_int>) {
    let uses: Vec<_> =
        uses.iter().map(|&(buffer, access)| vramp_buffer_use_t { buffer, access }).collect();
    let mut addresses = vec![null_mut(); uses.len()];
    let mut lease = vramp_buffer_lease_t::default();
    let (from, to) = (uses.as_ptr(), addresses.as_mut_ptr());
    // SAFETY: the arrays have as many elements, and the results outlive the call.
    let status = unsafe {
        vramp_buffers_lease_in_place(allocator, from, uses.len(), stream, 0, to, &mut lease)
    };
    assert_eq!(status, VRAMP_OK, "{}", last_error());
    let is_in_place = |index| {
        let mut found = -1;
        // SAFETY: the result outlives the call.
        let status = unsafe { vramp_buffer_lease_is_in_place(allocator, lease, index, &mut found) };
        assert_eq!(status, VRAMP_OK);
        found
    };
    let in_place = (0..uses.len()).map(is_in_place).collect();
    (lease, addresses.iter().map(|address| address.addr()).collect(), in_place)
}

#[test]
fn contents_go_to_free_memory_of_another_card_and_come_back() {
    for toml in [true, false] {
        let allocator = first_of_two();
        let status = match toml {
            true => open_toml(allocator, "[[peer]]\nindex = 1\nlimit = '64MiB'"),
            false => {
                let mut all = options(0, 256 * MIB);
                all.peer_bytes = 64 * MIB;
                open_tiers(allocator, &all)
            }
        };
        assert_eq!(status, VRAMP_OK, "{}", last_error());
        let buffers: Vec<_> = (0..5).map(|_| buffer(allocator, LEN as u64).unwrap()).collect();
        for (byte, &buffer) in (1..).zip(&buffers) {
            write(allocator, buffer, &vec![byte; LEN]).unwrap();
        }
        assert_eq!(info(allocator, buffers[0]).unwrap().peer_bytes, LEN as u64);
        // Two chunks of 32 MiB are the limit. What has no room there goes to the host.
        let stats = tiers_stats(allocator);
        assert_eq!(stats.to_peer, 2 * LEN as u64);
        assert_eq!(stats.to_host, LEN as u64);
        for (byte, &buffer) in (1..).zip(&buffers) {
            assert!(vramp_testing::is_filled(&read(allocator, buffer, LEN).unwrap(), byte));
        }
        assert!(tiers_stats(allocator).from_peer >= LEN as u64);
        assert_eq!(vramp_audit(allocator), VRAMP_OK);
        assert_eq!(vramp_close(allocator), VRAMP_OK);
    }
}

#[test]
fn a_card_that_is_no_peer_is_refused_and_no_card_is_its_own_peer() {
    let allocator = first_of_two();
    let refused = open_toml(allocator, "[[peer]]\nindex = 5\nlimit = '64MiB'");
    assert_eq!(refused, VRAMP_ERROR_OPTION);
    assert!(last_error().contains("[[peer]] with index 5: card 5 is no peer"), "{}", last_error());
    let peer = "[[peer]]\nindex = 1\nlimit = '64MiB'\n";
    assert_eq!(open_toml(allocator, &peer.repeat(2)), VRAMP_ERROR_OPTION);
    assert!(last_error().contains("index 1 occurs twice"), "{}", last_error());
    assert_eq!(open_toml(allocator, "[[peer]]\nindex = 0\nlimit = '64MiB'"), VRAMP_OK);
    let one = buffer(allocator, LEN as u64).unwrap();
    write(allocator, one, &vec![1; LEN]).unwrap();
    assert_eq!(evict(allocator, LEN as u64), LEN as u64);
    assert_eq!((tiers_stats(allocator).to_peer, tiers_stats(allocator).to_host), (0, LEN as u64));
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn a_readable_buffer_is_read_where_it_lies_and_a_written_one_comes_back() {
    let allocator = open_with_tiers(64, 256 * MIB);
    let stream = stream(allocator);
    let (column, table) =
        (buffer(allocator, LEN as u64).unwrap(), buffer(allocator, LEN as u64).unwrap());
    assert_eq!(vramp_buffer_set_readable(allocator, column), VRAMP_OK, "{}", last_error());
    for (byte, buffer) in [(7, column), (8, table)] {
        write(allocator, buffer, &vec![byte; LEN]).unwrap();
    }
    assert_eq!(evict(allocator, 2 * LEN as u64), 2 * LEN as u64);
    let set = [(column, VRAMP_ACCESS_READ), (table, VRAMP_ACCESS_WRITE)];
    for round in 0..3 {
        let (lease, addresses, in_place) = lease_in_place(allocator, &set, stream);
        assert_eq!(in_place, [1, 0], "round {round}");
        assert_eq!(addresses[0], info(allocator, column).unwrap().address.addr());
        assert_eq!(info(allocator, column).unwrap().device_bytes, 0);
        assert_eq!(vramp_buffer_lease_end(allocator, lease), VRAMP_OK);
    }
    assert_eq!(tiers_stats(allocator).reads_in_place, 3);
    // After three reads in place the buffer is restored.
    let (lease, _, in_place) = lease_in_place(allocator, &set[..1], stream);
    assert_eq!((in_place, tiers_stats(allocator).promotions), (vec![0], 1));
    assert_eq!(vramp_buffer_lease_end(allocator, lease), VRAMP_OK);
    for (byte, buffer) in [(7, column), (8, table)] {
        assert!(vramp_testing::is_filled(&read(allocator, buffer, LEN).unwrap(), byte));
    }
    assert_eq!(vramp_audit(allocator), VRAMP_OK);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}

#[test]
fn what_is_not_readable_is_restored_and_wrong_arguments_are_refused() {
    let allocator = open_with_tiers(64, 256 * MIB);
    let stream = stream(allocator);
    let plain = buffer(allocator, LEN as u64).unwrap();
    write(allocator, plain, &vec![3; LEN]).unwrap();
    assert_eq!(evict(allocator, LEN as u64), LEN as u64);
    let (lease, _, in_place) = lease_in_place(allocator, &[(plain, VRAMP_ACCESS_READ)], stream);
    assert_eq!(in_place, [0]);
    let mut found = -1;
    let ask = |lease, index, found: *mut c_int| {
        // SAFETY: the result outlives the call, or is null.
        unsafe { vramp_buffer_lease_is_in_place(allocator, lease, index, found) }
    };
    assert_eq!(ask(lease, 1, &mut found), VRAMP_ERROR_RANGE);
    assert_eq!(ask(lease, 0, null_mut()), VRAMP_ERROR_NULL);
    assert_eq!(vramp_buffer_lease_end(allocator, lease), VRAMP_OK);
    assert_eq!(ask(lease, 0, &mut found), VRAMP_ERROR_UNKNOWN_LEASE);
    assert_eq!(found, -1, "a failure writes nothing");
    let none = vramp_buffer_t::default();
    assert_eq!(vramp_buffer_set_readable(allocator, none), VRAMP_ERROR_UNKNOWN_BUFFER);
    assert_eq!(vramp_close(allocator), VRAMP_OK);
}
