//! Detects that a process is the child of a fork.
//!
//! 1. [`watch`] registers a handler, once in a process.
//! 2. In a child forked afterwards the handler counts the fork; children of the child inherit the
//!    count.
//! 3. [`is_forked`] reads whether there was one, [`depth`] how many. An object that keeps the depth
//!    at which it was made finds out whether it was made in this process.
//!
//! A child that only calls `exec`, as a spawned program does, never gets to ask.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

static DEPTH: AtomicU32 = AtomicU32::new(0);

/// Returns true in the child of a process that called [`watch`] before the fork: threads of the
/// parent do not exist here, and a lock that one of them held is never released. One relaxed load.
#[inline]
pub fn is_forked() -> bool {
    depth() != 0
}

/// Returns the number of forks between the first process that called [`watch`] and this one. One
/// relaxed load.
#[inline]
pub fn depth() -> u32 {
    DEPTH.load(Ordering::Relaxed)
}

/// Lets [`is_forked`] find out about forks from now on. If the C library has no memory for its
/// handler, forks are not found out.
pub fn watch() {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if !WATCHED.load(Ordering::Acquire) {
        // Two threads may both register it, which changes nothing.
        // SAFETY: the handler only changes a static, which any thread may do at any time.
        unsafe { libc::pthread_atfork(None, None, Some(note_fork)) };
        WATCHED.store(true, Ordering::Release);
    }
}

unsafe extern "C" fn note_fork() {
    DEPTH.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_knows_that_it_was_forked_and_its_parent_that_it_was_not() {
        watch();
        watch();
        // SAFETY: the child makes no call that needs a lock or memory.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let code = i32::from(!is_forked() || depth() != 1);
            // SAFETY: it ends the child at once.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        assert!(!is_forked());
        assert_eq!(depth(), 0);
    }
}
