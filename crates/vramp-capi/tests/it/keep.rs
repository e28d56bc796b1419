//! Kept memory through the C interface: two allocators on one simulated card stand for two processes. `keep.c` and the
//! examples have processes.

use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vramp_alloc::device::Driver;
use vramp_alloc::sharing::kept::{KeeperConfig, KeeperServer};
use vramp_alloc::{Bytes, Config};
use vramp_capi::abi::vramp_status_t::{self, *};
use vramp_capi::abi::{vramp_allocator_t, vramp_shortage_t};
use vramp_capi::interface::*;
use vramp_capi::kept::abi::vramp_kept_phase_t::*;
use vramp_capi::kept::abi::*;
use vramp_capi::kept::locks::*;
use vramp_capi::kept::*;
use vramp_capi::queries::vramp_on_shortage;
use vramp_capi::testing;
use vramp_driver::sim::Simulator;

use crate::common::*;

/// A long wait, in nanoseconds.
const LONG: u64 = 20_000_000_000;
const PART: u64 = 2 * MIB;

/// A keeper in a directory of its own, and a card with two allocators.
struct Machine {
    server: Option<KeeperServer>,
    directory: CString,
    card: Arc<Simulator>,
    allocators: [vramp_allocator_t; 2],
    keepers: [vramp_keeper_t; 2],
    _folder: tempfile::TempDir,
}

impl Machine {
    fn new() -> Machine {
        Machine::with_limit(None)
    }

    fn with_limit(limit: Option<u64>) -> Machine {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("vramp");
        let config = KeeperConfig { directory: &directory, limit, idle_exit: None };
        let server = Some(KeeperServer::start(&config).unwrap());
        let card = Arc::new(Simulator::builder().memory(Bytes::gib(1)).build());
        let driver = || Arc::clone(&card) as Arc<dyn Driver>;
        let open = || testing::open_on(driver(), Config::default()).unwrap();
        let allocators = [open(), open()];
        let directory = CString::new(directory.to_str().unwrap()).unwrap();
        let keepers = allocators.map(|allocator| keeper(allocator, &directory).unwrap());
        Machine { server, directory, card, allocators, keepers, _folder: folder }
    }

    fn draft(&self, nth: usize, name: &str, timeout_ns: u64) -> Result<Memory, vramp_status_t> {
        self.draft_with(nth, name, &options(8 * MIB), timeout_ns)
    }

    fn draft_with(
        &self,
        nth: usize,
        name: &str,
        options: &vramp_kept_options_t,
        timeout_ns: u64,
    ) -> Result<Memory, vramp_status_t> {
        let (allocator, keeper) = (self.allocators[nth], self.keepers[nth]);
        let (name, mut kept) = (CString::new(name).unwrap(), vramp_kept_t::default());
        // SAFETY: the text, the struct and the result outlive the call.
        let status = unsafe {
            vramp_kept_draft(allocator, keeper, name.as_ptr(), options, timeout_ns, &mut kept)
        };
        outcome(status, Memory { allocator, kept })
    }

    fn open(&self, nth: usize, name: &str) -> Result<Memory, vramp_status_t> {
        self.open_with(nth, name, &opening(0, VRAMP_KEPT_READ), LONG)
    }

    fn open_with(
        &self,
        nth: usize,
        name: &str,
        options: &vramp_kept_open_options_t,
        timeout_ns: u64,
    ) -> Result<Memory, vramp_status_t> {
        let (allocator, keeper) = (self.allocators[nth], self.keepers[nth]);
        let (name, mut kept) = (CString::new(name).unwrap(), vramp_kept_t::default());
        // SAFETY: the text, the struct and the result outlive the call.
        let status = unsafe {
            vramp_kept_open(allocator, keeper, name.as_ptr(), options, timeout_ns, &mut kept)
        };
        outcome(status, Memory { allocator, kept })
    }

    /// Publishes 4 MiB of a name, and closes it.
    fn publish(&self, name: &str, layout: &str) {
        self.publish_from(0, name, layout);
    }

    fn publish_from(&self, nth: usize, name: &str, layout: &str) {
        let draft = self.draft(nth, name, LONG).unwrap();
        draft.place(4 << 20).unwrap();
        assert_eq!(draft.commit(layout, 0), VRAMP_OK, "{}", last_error());
        assert_eq!(draft.close(), VRAMP_OK);
    }

    fn entries(&self) -> Vec<vramp_kept_entry_t> {
        let (mut found, mut count) = ([no_entry(); 8], 0);
        let (allocator, keeper) = (self.allocators[0], self.keepers[0]);
        let to = found.as_mut_ptr();
        // SAFETY: the array has as many structs, and the results outlive the call.
        let status = unsafe { vramp_keeper_entries(allocator, keeper, to, 8, &mut count) };
        assert_eq!(status, VRAMP_OK, "{}", last_error());
        found[..count].to_vec()
    }

    fn remove(&self, name: &str) -> vramp_status_t {
        let name = CString::new(name).unwrap();
        // SAFETY: the text outlives the call.
        unsafe { vramp_keeper_remove(self.allocators[0], self.keepers[0], name.as_ptr()) }
    }

    fn evict(&self, bytes: u64) -> u64 {
        let mut freed = 0;
        // SAFETY: the result outlives the call.
        let status =
            unsafe { vramp_keeper_evict(self.allocators[0], self.keepers[0], bytes, &mut freed) };
        assert_eq!(status, VRAMP_OK, "{}", last_error());
        freed
    }

    fn close(self) {
        for allocator in self.allocators {
            assert_eq!(vramp_close(allocator), VRAMP_OK);
        }
    }
}

/// Kept memory of an allocator.
#[derive(Clone, Copy, Debug)]
struct Memory {
    allocator: vramp_allocator_t,
    kept: vramp_kept_t,
}

impl Memory {
    fn place(self, size: usize) -> Result<*mut c_void, vramp_status_t> {
        let mut address = std::ptr::dangling_mut();
        // SAFETY: the result outlives the call.
        let status = unsafe { vramp_kept_place(self.allocator, self.kept, size, &mut address) };
        assert!(status == VRAMP_OK || address.is_null(), "a failure leaves no address behind");
        outcome(status, address)
    }

    fn commit(self, layout: &str, writable: i32) -> vramp_status_t {
        let (from, digest) = (layout.as_ptr().cast(), [7; 32].as_ptr());
        // SAFETY: layout and digest outlive the call.
        unsafe {
            vramp_kept_commit(self.allocator, self.kept, from, layout.len(), digest, writable)
        }
    }

    fn state(self) -> Result<vramp_kept_state_t, vramp_status_t> {
        let mut state = no_kept_state();
        // SAFETY: the struct is as large as it says.
        outcome(unsafe { vramp_kept_state(self.allocator, self.kept, &mut state) }, ())?;
        Ok(state)
    }

    fn layout(self) -> Result<String, vramp_status_t> {
        let (mut bytes, mut length) = ([0_u8; 64], 0);
        let to = bytes.as_mut_ptr().cast();
        // SAFETY: the results outlive the call.
        let status = unsafe { vramp_kept_layout(self.allocator, self.kept, to, 64, &mut length) };
        outcome(status, ())?;
        Ok(String::from_utf8(bytes[..length.min(64)].to_vec()).unwrap())
    }

    fn read(self, timeout_ns: u64) -> Result<u64, vramp_status_t> {
        let mut epoch = 0;
        // SAFETY: the result outlives the call.
        let status = unsafe { vramp_kept_read(self.allocator, self.kept, timeout_ns, &mut epoch) };
        outcome(status, ()).map(|()| epoch)
    }

    fn write(self, timeout_ns: u64) -> Result<u64, vramp_status_t> {
        let mut epoch = 0;
        // SAFETY: the result outlives the call.
        let status = unsafe { vramp_kept_write(self.allocator, self.kept, timeout_ns, &mut epoch) };
        outcome(status, ()).map(|()| epoch)
    }

    fn give_way(self) -> Result<u64, vramp_status_t> {
        let (mut epoch, kept) = (0, self.kept);
        // SAFETY: the result outlives the call.
        let status = unsafe { vramp_kept_yield_to_writer(self.allocator, kept, LONG, &mut epoch) };
        outcome(status, ()).map(|()| epoch)
    }

    fn commit_update(self, then: u32) -> Result<u64, vramp_status_t> {
        let mut epoch = 0;
        // SAFETY: the result outlives the call.
        let status =
            unsafe { vramp_kept_commit_update(self.allocator, self.kept, then, &mut epoch) };
        outcome(status, ()).map(|()| epoch)
    }

    fn wait_newer(self, than: u64, timeout_ns: u64) -> Result<u64, vramp_status_t> {
        let (mut epoch, kept) = (0, self.kept);
        // SAFETY: the result outlives the call.
        let status =
            unsafe { vramp_kept_wait_newer(self.allocator, kept, than, timeout_ns, &mut epoch) };
        outcome(status, ()).map(|()| epoch)
    }

    fn close(self) -> vramp_status_t {
        vramp_kept_close(self.allocator, self.kept)
    }
}

fn keeper(
    allocator: vramp_allocator_t,
    directory: &CString,
) -> Result<vramp_keeper_t, vramp_status_t> {
    let mut keeper = vramp_keeper_t::default();
    // SAFETY: the text and the result outlive the call.
    let status = unsafe { vramp_keeper_open(allocator, directory.as_ptr(), LONG, &mut keeper) };
    outcome(status, keeper)
}

fn options(bytes: u64) -> vramp_kept_options_t {
    let struct_size = size_of::<vramp_kept_options_t>() as u64;
    vramp_kept_options_t { struct_size, bytes, part: PART, ..vramp_kept_options_t::default() }
}

fn opening(writable: i32, lock: u32) -> vramp_kept_open_options_t {
    let struct_size = size_of::<vramp_kept_open_options_t>() as u64;
    vramp_kept_open_options_t {
        struct_size,
        lock,
        writable,
        ..vramp_kept_open_options_t::default()
    }
}

/// Returns the text of an array of characters.
fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn memory_outlives_its_allocator_and_is_opened_in_another_one() {
    let machine = Machine::new();
    let draft = machine.draft(0, "model/0", LONG).unwrap();
    let state = draft.state().unwrap();
    assert_eq!((state.phase, state.bytes, state.epoch), (VRAMP_KEPT_DRAFT, 0, 0));
    let first = draft.place(3 << 20).unwrap();
    let second = draft.place(100).unwrap();
    assert_eq!(first, state.address);
    assert_eq!(second, first.wrapping_byte_add(3 << 20));
    assert_eq!(draft.place(8 << 20), Err(VRAMP_ERROR_RANGE));
    assert!(last_error().contains("begin it with more"), "{}", last_error());
    assert_eq!(draft.layout(), Err(VRAMP_ERROR_KEEPER), "it is a draft");
    let entries = machine.entries();
    assert_eq!((entries.len(), entries[0].epoch), (1, 0));
    assert_eq!(entries[0].drafter, std::process::id());
    assert_eq!(machine.open(1, "model/0").unwrap_err(), VRAMP_ERROR_NOT_KEPT);

    assert_eq!(draft.commit("two tensors", 0), VRAMP_OK, "{}", last_error());
    assert_eq!(draft.commit("two tensors", 0), VRAMP_ERROR_KEEPER, "it is no draft any more");
    assert_eq!(draft.place(1), Err(VRAMP_ERROR_KEEPER));
    let state = draft.state().unwrap();
    assert_eq!((state.phase, state.epoch, state.address), (VRAMP_KEPT_OPEN, 1, first));
    assert_eq!((state.bytes, state.writable), ((3 << 20) + 512, 0));
    assert_eq!((state.lock, state.digest), (VRAMP_KEPT_READ, [7; 32]));
    assert_eq!(vramp_close(machine.allocators[0]), VRAMP_OK);

    let opened = machine.open(1, "model/0").unwrap();
    let state = opened.state().unwrap();
    assert_eq!((state.epoch, state.bytes, state.digest), (1, (3 << 20) + 512, [7; 32]));
    assert_eq!(state.address, first, "the publisher's addresses are free");
    assert_eq!((state.layout_bytes, opened.layout().as_deref()), (11, Ok("two tensors")));
    assert_eq!((state.torn, state.superseded, state.adrift, state.writer_waits), (0, 0, 0, 0));
    assert_eq!(opened.write(0), Err(VRAMP_ERROR_UNSUPPORTED), "it is mapped for reading only");
    assert_eq!(opened.close(), VRAMP_OK);
    assert_eq!(opened.close(), VRAMP_ERROR_UNKNOWN_KEPT);
    assert_eq!(vramp_close(machine.allocators[1]), VRAMP_OK);
}

#[test]
fn writers_and_readers_hand_epochs_over_in_place() {
    let machine = Machine::new();
    machine.publish("policy", "");
    let trainer = machine.open_with(0, "policy", &opening(1, VRAMP_KEPT_UNLOCKED), LONG).unwrap();
    let engine = machine.open(1, "policy").unwrap();
    assert_eq!(trainer.write(1_000_000), Err(VRAMP_ERROR_KEPT_BUSY));
    let named = format!("process {}", std::process::id());
    assert!(last_error().contains(&named), "{}", last_error());
    assert_eq!(trainer.state().unwrap().lock, VRAMP_KEPT_UNLOCKED);
    assert_eq!(engine.give_way(), Ok(1), "no writer waits");

    let writing = std::thread::spawn(move || {
        assert_eq!(trainer.write(LONG), Ok(1), "{}", last_error());
        trainer.commit_update(VRAMP_KEPT_UNLOCKED)
    });
    until(|| engine.state().unwrap().writer_waits == 1);
    assert_eq!(engine.give_way(), Ok(2));
    assert_eq!(writing.join().unwrap(), Ok(2));
    assert_eq!(trainer.wait_newer(1, 0), Ok(2), "no wait");
    assert_eq!(trainer.wait_newer(2, 1_000_000), Err(VRAMP_ERROR_KEPT_BUSY));

    assert_eq!(vramp_kept_unlock(engine.allocator, engine.kept), VRAMP_OK);
    assert_eq!(trainer.write(LONG), Ok(2));
    assert_eq!(trainer.read(LONG), Err(VRAMP_ERROR_KEEPER), "commit first");
    assert_eq!(machine.entries()[0].writer, std::process::id());
    assert_eq!(vramp_kept_release_unchanged(trainer.allocator, trainer.kept), VRAMP_OK);
    assert_eq!(trainer.commit_update(VRAMP_KEPT_READ), Err(VRAMP_ERROR_KEEPER), "no lock");
    assert_eq!(engine.read(LONG), Ok(2), "nothing was written");

    // A version that replaces it: who has the old one sees that, and keeps it.
    machine.publish("policy", "new");
    let state = engine.state().unwrap();
    assert_eq!((state.superseded, state.epoch), (1, 2));
    assert_eq!(engine.wait_newer(2, LONG), Ok(3));
    assert_eq!(machine.open(1, "policy").unwrap().layout().as_deref(), Ok("new"));
    machine.close();
}

#[test]
fn memory_that_was_closed_while_it_was_written_is_torn() {
    let machine = Machine::new();
    machine.publish("cache", "");
    let reader = machine.open_with(1, "cache", &opening(0, VRAMP_KEPT_UNLOCKED), LONG).unwrap();
    let writer = machine.open_with(0, "cache", &opening(1, VRAMP_KEPT_WRITE), LONG).unwrap();
    // The close of the allocator closes its memory too.
    assert_eq!(vramp_close(machine.allocators[0]), VRAMP_OK);
    assert_eq!(writer.state(), Err(VRAMP_ERROR_UNKNOWN_ALLOCATOR));
    assert_eq!(reader.read(LONG), Err(VRAMP_ERROR_TORN));
    assert_eq!((reader.state().unwrap().torn, reader.state().unwrap().epoch), (1, 1));
    assert_eq!(machine.open(1, "cache").unwrap_err(), VRAMP_ERROR_TORN);

    let repair = machine.open_with(1, "cache", &opening(1, VRAMP_KEPT_WRITE), LONG).unwrap();
    assert_eq!(repair.commit_update(VRAMP_KEPT_READ), Ok(2));
    assert_eq!(reader.read(LONG), Ok(2));
    assert_eq!(vramp_close(machine.allocators[1]), VRAMP_OK);
}

#[test]
fn a_second_draft_waits_and_sees_what_the_first_has_committed() {
    let machine = Machine::new();
    let first = machine.draft(0, "model", LONG).unwrap();
    assert_eq!(machine.draft(1, "model", 1_000_000).unwrap_err(), VRAMP_ERROR_KEPT_BUSY);
    first.place(1000).unwrap();
    let second = std::thread::scope(|scope| {
        let second = scope.spawn(|| machine.draft(1, "model", LONG));
        assert_eq!(first.commit("", 1), VRAMP_OK);
        second.join().unwrap().unwrap()
    });
    let state = second.state().unwrap();
    assert_eq!((state.phase, state.epoch, state.digest), (VRAMP_KEPT_DRAFT, 1, [7; 32]));
    assert_eq!(first.state().unwrap().lock, VRAMP_KEPT_WRITE, "it may write on");
    assert_eq!(first.commit_update(VRAMP_KEPT_UNLOCKED), Ok(2));
    assert_eq!(second.close(), VRAMP_OK, "a draft is given up");
    assert_eq!(machine.entries()[0].drafter, 0);
    machine.close();
}

#[test]
fn a_commit_that_fails_leaves_private_memory() {
    let mut machine = Machine::new();
    let empty = machine.draft(0, "empty", LONG).unwrap();
    assert_eq!(empty.commit("", 0), VRAMP_ERROR_RANGE);
    assert!(last_error().contains("place something"), "{}", last_error());
    assert_eq!(empty.state().unwrap().phase, VRAMP_KEPT_PRIVATE);
    let draft = machine.draft(0, "model", LONG).unwrap();
    let address = draft.place(1 << 20).unwrap();
    machine.server.take();
    let mut keeper_ = vramp_keeper_t::default();
    let directory = machine.directory.as_ptr();
    // It is not waited for long.
    // SAFETY: the text and the result outlive the call.
    let opened =
        unsafe { vramp_keeper_open(machine.allocators[1], directory, 1_000_000, &mut keeper_) };
    assert_eq!(opened, VRAMP_OK, "no message is sent");
    machine.keepers[1] = keeper_;
    assert_eq!(machine.open(1, "model").unwrap_err(), VRAMP_ERROR_KEEPER);
    assert!(last_error().contains("start `vramp keep`"), "{}", last_error());
    assert_eq!(vramp_close(machine.allocators[1]), VRAMP_OK);
    let state = draft.state().unwrap();
    assert_eq!((state.phase, state.address), (VRAMP_KEPT_DRAFT, address));
    assert_eq!(empty.read(0), Err(VRAMP_ERROR_KEEPER));
    assert!(last_error().contains("close it and begin again"), "{}", last_error());
    assert_eq!((empty.close(), draft.close()), (VRAMP_OK, VRAMP_OK));
    assert_eq!(vramp_close(machine.allocators[0]), VRAMP_OK);
    until_the_card_is_empty(&machine);
}

#[test]
fn names_are_listed_evicted_and_removed() {
    let machine = Machine::with_limit(Some(20 * MIB));
    assert!(machine.entries().is_empty());
    machine.publish("b", "");
    machine.publish("a", "");
    let open = machine.open(1, "b").unwrap();
    let entries = machine.entries();
    assert_eq!((text(&entries[0].name), text(&entries[1].name)), ("a".into(), "b".into()));
    for entry in &entries {
        assert_eq!((entry.bytes, entry.epoch, entry.torn), (4 * MIB, 1, 0));
        assert_eq!(entry.struct_size, size_of::<vramp_kept_entry_t>() as u64);
        assert!(!text(&entry.device).is_empty());
    }
    assert_eq!((entries[0].holders, entries[1].holders), (0, 1));
    assert!(entries[0].idle_ns > 0 && entries[1].idle_ns == 0);
    let full = machine.draft_with(0, "c", &options(17 * MIB), 0);
    assert_eq!(full.unwrap_err(), VRAMP_ERROR_OUT_OF_MEMORY);
    assert_eq!(machine.evict(64 * MIB), 4 * MIB, "the other one is open");
    assert_eq!(machine.remove("a"), VRAMP_ERROR_NOT_KEPT);
    assert_eq!(machine.remove("b"), VRAMP_OK);
    assert_eq!(open.state().unwrap().superseded, 1, "who has it open keeps it");
    assert_eq!(open.close(), VRAMP_OK);
    assert!(machine.entries().is_empty());
    machine.close();
}

/// If the wait kept the allocator open, the close would wait for an hour.
#[test]
fn a_wait_for_a_lock_does_not_hold_up_a_close() {
    const HOUR: u64 = 3600 * 1_000_000_000;
    let machine = Machine::new();
    machine.publish("model", "");
    let reader = machine.open(1, "model").unwrap();
    for closes_the_allocator in [false, true] {
        let writer = machine.open_with(0, "model", &opening(1, VRAMP_KEPT_UNLOCKED), LONG).unwrap();
        let waiting = std::thread::spawn(move || writer.write(HOUR));
        until(|| reader.state().unwrap().writer_waits == 1);
        match closes_the_allocator {
            true => assert_eq!(vramp_close(machine.allocators[0]), VRAMP_OK),
            false => assert_eq!(writer.close(), VRAMP_OK),
        }
        // The lock that comes afterwards is given back: the memory is not torn.
        assert_eq!(vramp_kept_unlock(reader.allocator, reader.kept), VRAMP_OK);
        assert_eq!(waiting.join().unwrap(), Err(VRAMP_ERROR_UNKNOWN_KEPT));
        assert_eq!(reader.read(LONG), Ok(1), "{}", last_error());
    }
    assert_eq!(vramp_close(machine.allocators[1]), VRAMP_OK);
    assert_eq!(machine.card.live().handles, 0, "the call has ended its memory");
}

/// A keeper closes descriptors on a thread of its own, and so does a child that another test forks.
fn until_the_card_is_empty(machine: &Machine) {
    until(|| machine.card.live().device_bytes == Bytes::ZERO);
    let left = machine.card.live();
    assert_eq!((left.handles, left.reservations), (0, 0));
}

fn until(is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "it takes too long");
        std::thread::yield_now();
    }
}

#[test]
fn handles_belong_to_one_allocator_and_end_once() {
    let machine = Machine::new();
    machine.publish("model", "");
    let mine = machine.open(0, "model").unwrap();
    let theirs = machine.open(1, "model").unwrap();
    let foreign = Memory { allocator: mine.allocator, kept: theirs.kept };
    for wrong in [foreign, Memory { kept: vramp_kept_t { id: u64::MAX }, ..mine }] {
        assert_eq!(wrong.state(), Err(VRAMP_ERROR_UNKNOWN_KEPT));
        assert_eq!(wrong.close(), VRAMP_ERROR_UNKNOWN_KEPT);
    }
    assert_eq!(theirs.state().unwrap().epoch, 1, "it is as before");
    let (allocator, keeper) = (machine.allocators[0], machine.keepers[0]);
    assert_eq!(vramp_keeper_close(machine.allocators[1], keeper), VRAMP_ERROR_UNKNOWN_KEPT);
    assert_eq!(vramp_keeper_close(allocator, keeper), VRAMP_OK);
    assert_eq!(vramp_keeper_close(allocator, keeper), VRAMP_ERROR_UNKNOWN_KEPT);
    assert_eq!(machine.open(0, "model").unwrap_err(), VRAMP_ERROR_UNKNOWN_KEPT);
    assert_eq!(vramp_kept_unlock(mine.allocator, mine.kept), VRAMP_OK, "memory stays open");
    machine.close();
}

struct Seen {
    memory: Memory,
    statuses: Vec<vramp_status_t>,
}

unsafe extern "C" fn use_the_draft(_: *const vramp_shortage_t, user: *mut c_void) -> i32 {
    // SAFETY: the test gives a struct that outlives the allocator, and one thread calls.
    let seen = unsafe { &mut *user.cast::<Seen>() };
    let memory = seen.memory;
    let place = memory.place(1).unwrap_err();
    let state = memory.state().unwrap_err();
    seen.statuses.extend([place, state, memory.commit("", 0), memory.close()]);
    0
}

#[test]
fn a_handler_that_a_draft_calls_cannot_use_the_draft() {
    let machine = Machine::new();
    let memory = machine.draft_with(0, "large", &options(1 << 40), LONG).unwrap();
    let mut seen = Seen { memory, statuses: Vec::new() };
    let user = (&raw mut seen).cast::<c_void>();
    let mut registration = 0;
    // SAFETY: the struct outlives the allocator, which the test closes.
    let observed = unsafe {
        vramp_on_shortage(memory.allocator, Some(use_the_draft), user, &mut registration)
    };
    assert_eq!(observed, VRAMP_OK);
    // More than the card has.
    assert_eq!(memory.place(1 << 39), Err(VRAMP_ERROR_OUT_OF_MEMORY));
    assert_eq!(vramp_unobserve(memory.allocator, registration), VRAMP_OK);
    assert!(!seen.statuses.is_empty(), "the handler was called");
    assert!(seen.statuses.iter().all(|&status| status == VRAMP_ERROR_BUSY), "{:?}", seen.statuses);
    assert_eq!(memory.state().unwrap().phase, VRAMP_KEPT_DRAFT);
    assert!(memory.place(1 << 20).is_ok(), "it is a draft as before");
    assert_eq!(memory.close(), VRAMP_OK);
    machine.close();
}

#[test]
fn a_hundred_lives_leave_nothing() {
    let machine = Machine::new();
    for nth in 0..100 {
        machine.publish("life", "");
        let reader = machine.open(1, "life").unwrap();
        let writer = machine.open_with(0, "life", &opening(1, VRAMP_KEPT_UNLOCKED), LONG).unwrap();
        assert_eq!(reader.close(), VRAMP_OK);
        assert_eq!(writer.write(LONG).map(|_| ()), Ok(()), "{nth}: {}", last_error());
        assert!(writer.commit_update(VRAMP_KEPT_UNLOCKED).is_ok());
        let given_up = machine.draft(1, "life", LONG).unwrap();
        given_up.place(3 << 20).unwrap();
        assert_eq!((given_up.close(), writer.close()), (VRAMP_OK, VRAMP_OK));
    }
    assert_eq!(machine.entries()[0].epoch, 200);
    assert_eq!(machine.remove("life"), VRAMP_OK);
    for allocator in machine.allocators {
        assert_eq!((stats(allocator).reserved, vramp_audit(allocator)), (0, VRAMP_OK));
    }
    until_the_card_is_empty(&machine);
    assert!(machine.entries().is_empty());
    machine.close();
}

#[test]
fn a_forked_child_is_refused_and_its_parent_keeps_its_lock() {
    let machine = Machine::new();
    machine.publish("model", "");
    let memory = machine.open_with(0, "model", &opening(1, VRAMP_KEPT_WRITE), LONG).unwrap();
    let draft = machine.draft(0, "other", LONG).unwrap();
    let forked = VRAMP_ERROR_FORKED;
    let ended = crate::threads::forked(|| {
        memory.state() == Err(forked)
            && memory.commit_update(VRAMP_KEPT_READ) == Err(forked)
            && memory.close() == forked
            && draft.place(1) == Err(forked)
            && draft.commit("", 0) == forked
            && draft.close() == forked
            && matches!(machine.open(0, "model"), Err(VRAMP_ERROR_FORKED))
            && machine.remove("model") == forked
            && vramp_keeper_close(machine.allocators[0], machine.keepers[0]) == forked
    });
    assert_eq!(ended, 0, "the child got another answer, or hung");
    assert_eq!(memory.commit_update(VRAMP_KEPT_READ), Ok(2));
    assert!(draft.place(1).is_ok());
    machine.close();
}

/// One call of any kind on a handle that other threads use and close.
fn call_at_random(
    machine: &Machine,
    handles: &std::sync::Mutex<Vec<Memory>>,
    rng: &mut fastrand::Rng,
) -> vramp_status_t {
    let nth = rng.usize(..2);
    let name = ["a", "b"][rng.usize(..2)];
    let made = match rng.u32(..10) {
        0 => Some(machine.draft(nth, name, 1_000_000)),
        1 => Some(machine.open_with(nth, name, &opening(1, rng.u32(..4)), 1_000_000)),
        2 => return machine.remove(name),
        _ => None,
    };
    if let Some(made) = made {
        return made.map_or_else(
            |status| status,
            |made| {
                handles.lock().unwrap().push(made);
                VRAMP_OK
            },
        );
    }
    let all = handles.lock().unwrap();
    let Some(&one) = rng.choice(all.iter()) else { return VRAMP_OK };
    drop(all);
    let status = |outcome: Result<u64, vramp_status_t>| outcome.err().unwrap_or(VRAMP_OK);
    match rng.u32(..10) {
        0 | 1 => one.place(1 << 19).err().unwrap_or(VRAMP_OK),
        2 => one.commit("", rng.i32(..2)),
        3 => status(one.read(1_000_000)),
        4 => status(one.write(1_000_000)),
        5 => status(one.commit_update(rng.u32(..4))),
        6 => status(one.wait_newer(1, 1_000_000)),
        7 => vramp_kept_release_unchanged(one.allocator, one.kept),
        8 => one.state().err().unwrap_or(VRAMP_OK),
        _ => one.close(),
    }
}

#[test]
fn threads_call_at_random_and_nothing_is_left() {
    let machine = Machine::new();
    let handles = std::sync::Mutex::default();
    let seed = fastrand::u64(..);
    let known = [
        VRAMP_OK,
        VRAMP_ERROR_RANGE,
        VRAMP_ERROR_UNSUPPORTED,
        VRAMP_ERROR_BUSY,
        VRAMP_ERROR_NOT_KEPT,
        VRAMP_ERROR_KEPT_BUSY,
        VRAMP_ERROR_TORN,
        VRAMP_ERROR_KEEPER,
        VRAMP_ERROR_UNKNOWN_KEPT,
    ];
    let done: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|nth| {
                let (machine, handles, known) = (&machine, &handles, &known);
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed + nth);
                    let statuses = (0..300).map(|_| call_at_random(machine, handles, &mut rng));
                    let check = |status: &vramp_status_t| {
                        assert!(
                            known.contains(status),
                            "seed {seed}: {status:?}: {}",
                            last_error()
                        );
                        *status == VRAMP_OK
                    };
                    statuses.filter(check).count()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(done > 40, "seed {seed}: {done} calls did something");
    for one in handles.into_inner().unwrap() {
        let ended = one.close();
        assert!([VRAMP_OK, VRAMP_ERROR_UNKNOWN_KEPT].contains(&ended), "seed {seed}: {ended:?}");
    }
    for name in ["a", "b"] {
        assert!([VRAMP_OK, VRAMP_ERROR_NOT_KEPT].contains(&machine.remove(name)), "seed {seed}");
    }
    // A writer that closes with a reply that it did not read is not waited for.
    until(|| machine.entries().is_empty());
    until_the_card_is_empty(&machine);
    machine.close();
}
