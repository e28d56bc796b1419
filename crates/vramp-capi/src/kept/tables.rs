//! The keepers and the kept memory of one allocator, looked up by id.
//!
//! An id is unique in the process, so that of another allocator, or of memory that was closed, is unknown. Messages and
//! driver calls are made without a lock: a draft is taken out of its place for a call, and open memory is shared.
//!
//! Growth: O(1) for each call, whatever number of handles there is.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;
use vramp_alloc::sharing::Imported;
use vramp_alloc::sharing::kept::{Keeper, KeptDraft, KeptMemory};

use crate::ids::{next_id, unknown};
use crate::status::{Failure, Kind, Result};

/// Tables of keepers and of kept memory.
#[derive(Default)]
pub(crate) struct KeptTables {
    pub keepers: Mutex<FxHashMap<u64, Keeper>>,
    kept: Mutex<FxHashMap<u64, Arc<Kept>>>,
}

/// Memory of a name.
pub(crate) struct Kept {
    name: String,
    state: Mutex<State>,
}

pub(crate) enum State {
    Draft(Box<KeptDraft>),
    /// A call has the draft.
    InCall,
    Open(Arc<KeptMemory>),
    /// A commit failed.
    Private(Imported),
    Closed,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn unknown_keeper(id: u64) -> Failure {
    unknown(Kind::UnknownKept, "keeper", "vramp_keeper_open", id)
}

fn unknown_kept(id: u64) -> Failure {
    unknown(Kind::UnknownKept, "kept memory", "vramp_kept_draft or vramp_kept_open", id)
}

impl KeptTables {
    pub fn keeper(&self, id: u64) -> Result<Keeper> {
        lock(&self.keepers).get(&id).cloned().ok_or_else(|| unknown_keeper(id))
    }

    pub fn get(&self, id: u64) -> Result<Arc<Kept>> {
        lock(&self.kept).get(&id).cloned().ok_or_else(|| unknown_kept(id))
    }

    /// Keeps memory and returns its id.
    pub fn add(&self, name: &str, state: State) -> u64 {
        let id = next_id();
        let kept = Kept { name: name.to_owned(), state: Mutex::new(state) };
        lock(&self.kept).insert(id, Arc::new(kept));
        id
    }

    /// Takes memory out, and returns what its owner ends. Calls in progress have their own share of open memory.
    pub fn remove(&self, id: u64) -> Result<State> {
        let kept = self.get(id)?;
        let mut state = kept.lock();
        if let State::InCall | State::Closed = &*state {
            return Err(kept.refusal(&state));
        }
        lock(&self.kept).remove(&id);
        Ok(std::mem::replace(&mut *state, State::Closed))
    }
}

/// The end of the allocator, also for memory that calls wait for.
impl Drop for KeptTables {
    fn drop(&mut self) {
        let kept = self.kept.get_mut().unwrap_or_else(PoisonError::into_inner);
        kept.values().for_each(|kept| kept.put(State::Closed));
    }
}

impl Kept {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Takes the draft for a call, which puts a state back with [`Kept::put`].
    pub fn take_draft(&self) -> Result<Box<KeptDraft>> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::InCall) {
            State::Draft(draft) => Ok(draft),
            other => {
                let refusal = self.refusal(&other);
                *state = other;
                Err(refusal)
            }
        }
    }

    pub fn put(&self, state: State) {
        *self.lock() = state;
    }

    /// Returns a share of open memory.
    pub fn open(&self) -> Result<Arc<KeptMemory>> {
        match &*self.lock() {
            State::Open(memory) => Ok(Arc::clone(memory)),
            other => Err(self.refusal(other)),
        }
    }

    /// Returns an error once it was closed.
    pub fn check_open(&self) -> Result<()> {
        match &*self.lock() {
            State::Closed => Err(self.refusal(&State::Closed)),
            _ => Ok(()),
        }
    }

    /// Returns the error of a call that needs memory in another state.
    #[cold]
    pub fn refusal(&self, state: &State) -> Failure {
        let name = &self.name;
        let (kind, text) = match state {
            State::InCall => {
                (Kind::Busy, format!("another call uses the draft of `{name}`: call after it"))
            }
            State::Closed => (Kind::UnknownKept, format!("`{name}` is closed: open it again")),
            State::Draft(_) => (Kind::Keeper, format!("`{name}` is a draft: commit it first")),
            State::Open(_) => {
                (Kind::Keeper, format!("`{name}` is no draft any more: begin another one"))
            }
            State::Private(_) => {
                (Kind::Keeper, format!("the commit of `{name}` failed: close it and begin again"))
            }
        };
        Failure::new(kind, text)
    }
}
