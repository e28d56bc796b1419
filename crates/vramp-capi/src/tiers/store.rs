//! A store of the caller in place of files.
//!
//! 1. [`Store::open`] checks the caller's struct and copies it.
//! 2. Once the tiers are open the store is theirs ([`Store::accept`]). `write` and `read` run on threads of
//!    the disk tier, `remove` on the thread that drops a copy, perhaps inside its vramp_malloc. No lock is
//!    held.
//! 3. The tiers' last reference drops the store, which calls `release`.
//!
//! Moves wait for these functions, and so may a malloc that needs room. A call that a function makes
//! itself could wait for its own end, so each call with an allocator is refused there
//! ([`InStore`]).

use std::ffi::{CStr, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vramp_alloc::Bytes;
use vramp_defer::ObjectTier;
use vramp_tiers::disk::{ObjectStore, ObjectStoreConfig, StoreError};

use crate::abi::vramp_status_t::*;
use crate::interface::{User, vramp_status_name};
use crate::status::{Failure, Kind, Result};
use crate::threads::InStore;
use crate::tiers::abi::vramp_store_t;

/// Functions of a caller.
#[derive(Debug)]
pub(crate) struct Store {
    write: unsafe extern "C" fn(*mut c_void, u64, *const c_void, usize) -> i32,
    read: unsafe extern "C" fn(*mut c_void, u64, *mut c_void, usize) -> i32,
    remove: unsafe extern "C" fn(*mut c_void, u64) -> i32,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
    user: User,
    capacity: Bytes,
    config: ObjectStoreConfig,
    is_accepted: AtomicBool,
}

impl Store {
    /// Returns the store of a caller.
    pub fn open(store: &vramp_store_t) -> Result<Arc<Store>> {
        let vramp_store_t { capacity, user, write, read, remove, release, threads, .. } = *store;
        let (Some(write), Some(read), Some(remove)) = (write, read, remove) else {
            let text = "a store needs write, read and remove, and one of them is null";
            return Err(Failure::new(Kind::Null, text));
        };
        if capacity == 0 {
            let text = "the store has a capacity of 0 bytes: set the most that it may hold";
            return Err(Failure::new(Kind::Option, text));
        }
        let mut config = ObjectStoreConfig::default();
        match usize::try_from(threads) {
            Ok(0) => {}
            Ok(threads @ 1..=64) => config.threads = threads,
            _ => {
                let text = format!("{threads} threads of a store: use 1 to 64, or 0 for 4");
                return Err(Failure::new(Kind::Option, text));
            }
        }
        let (capacity, user) = (Bytes::new(capacity), User(user));
        let is_accepted = AtomicBool::new(false);
        Ok(Arc::new(Store { write, read, remove, release, user, capacity, config, is_accepted }))
    }

    /// Returns the tier of the store.
    pub fn tier(self: &Arc<Store>) -> ObjectTier {
        let store = Arc::clone(self) as Arc<dyn ObjectStore>;
        ObjectTier { store, capacity: self.capacity, config: self.config }
    }

    /// Says that the tiers are open: from now on the end of the store calls `release`.
    pub fn accept(&self) {
        self.is_accepted.store(true, Ordering::Relaxed);
    }
}

impl ObjectStore for Store {
    fn put(&self, key: u64, bytes: &[u8]) -> std::result::Result<(), StoreError> {
        let _refuses_calls = InStore::enter();
        // SAFETY: allowed by the contract of `vramp_tiers_open_with`; the bytes outlive the call.
        check(unsafe { (self.write)(self.user.get(), key, bytes.as_ptr().cast(), bytes.len()) })
    }

    fn get(&self, key: u64, into: &mut [u8]) -> std::result::Result<(), StoreError> {
        let _refuses_calls = InStore::enter();
        // SAFETY: as above.
        check(unsafe { (self.read)(self.user.get(), key, into.as_mut_ptr().cast(), into.len()) })
    }

    fn delete(&self, key: u64) -> std::result::Result<(), StoreError> {
        let _refuses_calls = InStore::enter();
        // SAFETY: as above.
        check(unsafe { (self.remove)(self.user.get(), key) })
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let (true, Some(release)) = (*self.is_accepted.get_mut(), self.release) {
            // SAFETY: allowed by the contract of `vramp_tiers_open_with`, once.
            unsafe { release(self.user.get()) };
        }
    }
}

/// Converts what a function of the store returned.
fn check(status: i32) -> std::result::Result<(), StoreError> {
    let text = || {
        // SAFETY: the name of a status is a constant.
        let name = unsafe { CStr::from_ptr(vramp_status_name(status)) };
        format!("it returned {status} ({})", name.to_string_lossy())
    };
    match status {
        _ if status == VRAMP_OK as i32 => Ok(()),
        _ if status == VRAMP_ERROR_OUT_OF_MEMORY as i32 => Err(StoreError::full(text())),
        _ => Err(StoreError::failed(text())),
    }
}
