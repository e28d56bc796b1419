//! Descriptors that forked children do not have.
//!
//! A child of `fork` has all descriptors of its parent, so what the kernel frees with the last
//! descriptor outlives a parent that is killed. A [`PrivateFd`] is closed in the child before `fork`
//! returns there.
//!
//! 1. [`PrivateFd::open`] opens a descriptor and enters its number in a list. No fork runs meanwhile.
//! 2. A fork waits until no thread is between the two steps, and then the child closes what is in the
//!    list.
//! 3. Dropping it removes the number and closes the descriptor. No fork runs meanwhile.
//!
//! Opening is O(private descriptors that were open at once). A fork closes each. The list's nodes are
//! used again and never freed.
//!
//! Deliberately absent: children of `vfork` and of a raw `clone`, which run no handlers. Those that
//! call `exec` close the descriptors there.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicUsize, Ordering::SeqCst};

use crate::fork;

/// The number of a node that is not in use.
const UNUSED: i32 = -1;

/// One descriptor. Nodes are never freed.
struct Node {
    number: AtomicI32,
    next: *const Node,
}

static NODES: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());
/// Threads that change the list and a descriptor together.
static CHANGES: AtomicUsize = AtomicUsize::new(0);
/// Threads that are inside `fork`.
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// A descriptor that forked children do not have.
#[derive(Debug)]
pub struct PrivateFd {
    descriptor: ManuallyDrop<OwnedFd>,
    node: &'static AtomicI32,
    /// Forks before it was opened.
    depth: u32,
}

impl PrivateFd {
    /// Calls `open`, which must not fork, and keeps the descriptor from children of later forks.
    ///
    /// # Errors
    ///
    /// Those of `open`.
    pub fn open(open: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<PrivateFd> {
        watch();
        let _change = Change::begin();
        let descriptor = open()?;
        let node = enter(descriptor.as_raw_fd());
        Ok(PrivateFd { descriptor: ManuallyDrop::new(descriptor), node, depth: fork::depth() })
    }

    /// Returns the descriptor. `None` in a forked child.
    pub fn get(&self) -> Option<BorrowedFd<'_>> {
        (fork::depth() == self.depth).then(|| self.descriptor.as_fd())
    }
}

/// Closes the descriptor. In a forked child it was closed before.
impl Drop for PrivateFd {
    fn drop(&mut self) {
        if fork::depth() != self.depth {
            return;
        }
        let _change = Change::begin();
        self.node.store(UNUSED, SeqCst);
        // SAFETY: it is not used after this.
        unsafe { ManuallyDrop::drop(&mut self.descriptor) };
    }
}

/// While one exists no fork runs.
struct Change;

impl Change {
    fn begin() -> Change {
        loop {
            CHANGES.fetch_add(1, SeqCst);
            if FORKS.load(SeqCst) == 0 {
                return Change;
            }
            CHANGES.fetch_sub(1, SeqCst);
            std::thread::yield_now();
        }
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        CHANGES.fetch_sub(1, SeqCst);
    }
}

/// Returns the node that has the number now.
fn enter(number: i32) -> &'static AtomicI32 {
    let mut at = NODES.load(SeqCst).cast_const();
    // SAFETY: nodes are never freed, and the pointer is null or that of a node.
    while let Some(node) = unsafe { at.as_ref() } {
        if node.number.compare_exchange(UNUSED, number, SeqCst, SeqCst).is_ok() {
            return &node.number;
        }
        at = node.next;
    }
    let node = Box::leak(Box::new(Node { number: AtomicI32::new(number), next: ptr::null() }));
    let mut head = NODES.load(SeqCst);
    loop {
        node.next = head;
        match NODES.compare_exchange(head, node, SeqCst, SeqCst) {
            Ok(_) => return &node.number,
            Err(newer) => head = newer,
        }
    }
}

fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // Handlers of children run in the order of registration: the depth is counted first.
        fork::watch();
        // SAFETY: the handlers use atomics and system calls only, which a forked child may do.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) };
    });
}

unsafe extern "C" fn before_fork() {
    FORKS.fetch_add(1, SeqCst);
    while CHANGES.load(SeqCst) != 0 {
        std::thread::yield_now();
    }
}

unsafe extern "C" fn after_fork() {
    FORKS.fetch_sub(1, SeqCst);
}

unsafe extern "C" fn in_child() {
    // Other threads that were inside `fork`, or about to begin a change, do not exist here.
    FORKS.store(0, SeqCst);
    CHANGES.store(0, SeqCst);
    let mut at = NODES.load(SeqCst).cast_const();
    // SAFETY: nodes are never freed, and the pointer is null or that of a node.
    while let Some(node) = unsafe { at.as_ref() } {
        let number = node.number.swap(UNUSED, SeqCst);
        if number != UNUSED {
            // SAFETY: its owner does not use the number in this process: its depth is another.
            unsafe { libc::close(number) };
        }
        at = node.next;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn pair() -> (PrivateFd, UnixStream) {
        let mut other = None;
        let private = PrivateFd::open(|| {
            let (one, two) = UnixStream::pair()?;
            other = Some(two);
            Ok(one.into())
        });
        (private.unwrap(), other.unwrap())
    }

    /// Forks. The child runs `check`, ends with its answer as a success or failure, and is reaped.
    fn in_fork(check: impl FnOnce() -> bool) {
        // SAFETY: `check` takes no lock that another thread may have held.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let code = i32::from(!check());
            // SAFETY: it ends the child at once.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn a_child_has_no_private_descriptor_and_may_drop_it() {
        let (private, other) = pair();
        let number = private.descriptor.as_raw_fd();
        // SAFETY: it asks about a number, valid or not.
        let is_open = move || unsafe { libc::fcntl(number, libc::F_GETFD) } != -1;
        assert!(is_open());
        in_fork(|| {
            let was_closed = !is_open() && private.get().is_none();
            // The number may belong to another file by then.
            let reused = std::fs::File::open("/dev/null").unwrap();
            drop(private);
            was_closed && (reused.as_raw_fd() != number || is_open())
        });
        drop(other);
    }

    #[test]
    fn no_child_keeps_what_threads_open_and_close_while_others_fork() {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(SeqCst) {
                        let (private, other) = pair();
                        drop(private);
                        // The end of the stream arrives although children live.
                        let mut byte = [0];
                        assert_eq!(rustix::io::read(&other, &mut byte), Ok(0));
                    }
                });
            }
            for _ in 0..300 {
                // SAFETY: the child only sleeps and ends.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: as above.
                    unsafe {
                        libc::usleep(2_000_000);
                    }
                    // SAFETY: as above.
                    unsafe { libc::_exit(0) };
                }
                // SAFETY: it is a child of this test that was not reaped.
                unsafe { libc::kill(child, libc::SIGKILL) };
                // SAFETY: no status is asked for.
                unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
            }
            stop.store(true, SeqCst);
        });
    }

    #[test]
    fn nodes_are_used_again() {
        let nodes = || {
            let (mut count, mut at) = (0, NODES.load(SeqCst).cast_const());
            // SAFETY: nodes are never freed.
            while let Some(node) = unsafe { at.as_ref() } {
                (count, at) = (count + 1, node.next);
            }
            count
        };
        for _ in 0..1000 {
            drop(pair());
        }
        // Other tests of this program have a few open meanwhile.
        assert!(nodes() < 20, "{}", nodes());
    }
}
