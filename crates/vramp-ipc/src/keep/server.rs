//! A keeper in this process: its socket, its lock file and its thread.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit};
use vramp_host::PrivateFd;

use super::close::Closer;
use super::error::KeepServeError;
use super::service::{KeepService, ServiceParts, StatusFile, read_status};
use crate::core::ticket::{Address, MAX_PATH, is_path};
use crate::directory;
use crate::server::event_loop::{EventLoop, LoopParts};
use crate::system;

/// Name of the socket in the keeper's directory.
const SOCKET: &str = "keep.sock";
/// Name of the file that a running keeper has locked.
const LOCK: &str = "keep.lock";
/// How long clients of a keeper that ended may restore what they hold, before a new one believes that it
/// knows everything. It does so earlier once there are as many holds as the ended one had.
const SETTLE: Duration = Duration::from_secs(1);
/// Connections that wait to be accepted; the kernel's own limit may be lower.
const BACKLOG: i32 = 4096;

/// How a keeper runs.
#[derive(Clone, Copy, Debug)]
pub struct KeeperConfig<'a> {
    /// Directory of the user in which clients find the keeper. It is made if it is missing.
    pub directory: &'a Path,
    /// Most bytes of each device that versions and drafts have together; `None` for no limit.
    pub limit: Option<u64>,
    /// Ends the keeper after so long without entries and clients; `None` for never.
    pub idle_exit: Option<Duration>,
}

/// Returns the path of the keeper's socket in a directory.
pub fn socket_path(directory: &Path) -> PathBuf {
    directory.join(SOCKET)
}

/// Returns the address of a socket, if its path can be one.
pub fn socket_address(path: &Path) -> Option<Address> {
    let bytes = path.as_os_str().as_bytes();
    is_path(bytes).then(|| Address::Path(bytes.to_vec()))
}

/// A keeper: one thread of this process that keeps the descriptors of other processes. Dropping it ends it.
pub struct KeeperServer {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    connections: Arc<AtomicUsize>,
    /// Locked as long as the keeper runs.
    _lock: PrivateFd,
    /// Forks before it was started. A child has no thread of it.
    depth: u32,
}

impl KeeperServer {
    /// Starts a keeper. It raises this process's soft limit of open files to the hard one.
    ///
    /// # Errors
    /// [`KeepServeError::AlreadyRunning`] if a keeper has the directory.
    pub fn start(config: &KeeperConfig<'_>) -> Result<KeeperServer, KeepServeError> {
        vramp_host::fork::watch();
        drop(directory::open(config.directory, config.directory)?);
        let lock_path = config.directory.join(LOCK);
        let lock = lock(&lock_path)?;
        let path = socket_path(config.directory);
        let text = std::fs::read_to_string(&lock_path).unwrap_or_default();
        let holds = read_status(&text).1.unwrap_or(u64::MAX);
        let settles_in = (path.exists() && holds > 0).then_some((SETTLE, holds));
        let status = open_lock(&lock_path).map_err(system_error("open the lock file"))?;
        let listener = listen(&path)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| system_error("make an event")(error.into()))?;
        let stop = Arc::new(stop);
        let connections = Arc::new(AtomicUsize::new(0));
        let parts = ServiceParts {
            limit: config.limit,
            idle_exit: config.idle_exit,
            settles_in,
            socket_path: path,
            status: StatusFile::new(status),
            most_descriptors: raise_file_limit(),
            closer: Closer::new().map_err(system_error("start a thread"))?,
        };
        let parts = LoopParts {
            listener,
            stop: Arc::clone(&stop),
            admitted_uid: rustix::process::geteuid().as_raw(),
            service: KeepService::new(parts),
            connections: Arc::clone(&connections),
        };
        let event_loop = EventLoop::new(parts).map_err(system_error("make an epoll instance"))?;
        let thread = std::thread::Builder::new()
            .name("vramp-keep".to_owned())
            .spawn(move || event_loop.run())
            .map_err(system_error("start a thread"))?;
        let depth = vramp_host::fork::depth();
        Ok(KeeperServer { stop, thread: Some(thread), connections, _lock: lock, depth })
    }

    /// Waits until the keeper ends: by [`KeeperServer::stop`], by a client's
    /// [`stop`](super::Keeper::stop), or because it was idle for so long as the configuration says.
    pub fn wait(mut self) {
        self.join();
    }

    /// Ends the keeper. What no process has mapped or holds is freed. A keeper that ended already is left.
    pub fn stop(&self) {
        // A counter that is not full takes the value at once.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
    }

    /// Returns the number of connections: drafts, holds, and calls that run.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    fn join(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if vramp_host::fork::depth() != self.depth {
            // The thread does not exist here, so it cannot be joined either.
            return std::mem::forget(thread);
        }
        // Its panic is on standard error, and dropping must not panic.
        let _ = thread.join();
    }
}

/// Ends the thread and all connections. In a forked child it does nothing.
impl Drop for KeeperServer {
    fn drop(&mut self) {
        if vramp_host::fork::depth() == self.depth {
            self.stop();
        }
        self.join();
    }
}

impl fmt::Debug for KeeperServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeeperServer")
            .field("connections", &self.connections())
            .finish_non_exhaustive()
    }
}

fn open_lock(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?)
}

/// Locks the file, and leaves what an earlier keeper wrote into it.
fn lock(path: &Path) -> Result<PrivateFd, KeepServeError> {
    let opened = PrivateFd::open(|| open_lock(path));
    let file = opened.map_err(system_error("open the lock file"))?;
    let descriptor = file.get().ok_or(KeepServeError::Forked)?;
    let is_locked = vramp_host::lock_byte(descriptor, 0).map_err(system_error("lock a file"))?;
    if !is_locked {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        return Err(KeepServeError::AlreadyRunning { pid: read_status(&text).0.unwrap_or(0) });
    }
    Ok(file)
}

/// Listens under another name and then takes the place of the socket of a keeper that ended. So a client finds
/// either that one or a socket that listens.
fn listen(path: &Path) -> Result<OwnedFd, KeepServeError> {
    let new = path.with_extension("new");
    let address = socket_address(&new).ok_or_else(|| KeepServeError::Path {
        path: new.clone(),
        length: new.as_os_str().len(),
        max: MAX_PATH,
    })?;
    let failed =
        |action: &'static str| move |error: rustix::io::Errno| system_error(action)(error.into());
    let name = system::kernel_address(&address).map_err(system_error("use the address"))?;
    let listener = system::socket().map_err(system_error("make a socket"))?;
    // A client that gave up leaves nothing to accept.
    rustix::io::ioctl_fionbio(&listener, true).map_err(failed("make a socket"))?;
    // Of a keeper that was killed between two of these steps.
    let _ = std::fs::remove_file(&new);
    rustix::net::bind(&listener, &name).map_err(failed("bind the socket"))?;
    rustix::fs::chmod(&new, Mode::RUSR | Mode::WUSR)
        .map_err(failed("restrict the socket to its user"))?;
    rustix::net::listen(listener.as_fd(), BACKLOG).map_err(failed("listen"))?;
    std::fs::rename(&new, path).map_err(system_error("name the socket"))?;
    Ok(listener)
}

/// Raises the soft limit of open files to the hard one. Returns how many of them versions may have; the rest is
/// for connections.
fn raise_file_limit() -> usize {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    // Without the right to raise it, the keeper has fewer.
    let _ = rustix::process::setrlimit(Resource::Nofile, raised);
    let limit = usize::try_from(system::open_file_limit()).unwrap_or(usize::MAX);
    limit - limit / 8
}

fn system_error(action: &'static str) -> impl Fn(io::Error) -> KeepServeError {
    move |source| KeepServeError::System { action, source }
}
