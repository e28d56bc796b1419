//! The allocators of PyTorch's devices: each is opened by the first request for memory of its device.
//!
//! Opening creates a CUDA context, which takes memory of the device and time. So nothing else opens a device:
//! what is chosen for one before (fraction, recording, observer) is kept and takes effect when it is opened.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};

use vramp_alloc::Bytes;
use vramp_alloc::sharing::{AccessError, Peers};

use super::settings::Settings;
use super::{DEVICES, TORCH, Torch};
use crate::abi::vramp_allocator_t;
use crate::abi::vramp_status_t;
use crate::environment::variable;
use crate::handles;
use crate::session::{Session, check_events};
use crate::status::{Failure, Kind, Result, check_fork, status_of};

/// Registers an observer with an allocator. Returns the number of the registration.
pub(super) type Register = Box<dyn Fn(&Session) -> u64 + Send>;

/// What was chosen for a device.
pub(super) struct DeviceOptions {
    /// Part of its memory that the process may use, chosen before it was opened.
    fraction: Option<f64>,
    /// Number of events that are recorded, chosen before it was opened.
    events: u32,
    /// The observer of PyTorch's class.
    register: Option<Register>,
    /// The observer's registration, once the device is open.
    registration: Option<u64>,
    /// Devices that may access its memory, chosen before it was opened.
    peers: BTreeSet<u32>,
}

impl DeviceOptions {
    pub const NONE: DeviceOptions = DeviceOptions {
        fraction: None,
        events: 0,
        register: None,
        registration: None,
        peers: BTreeSet::new(),
    };
}

impl Torch {
    /// Returns the allocator of a device. The first call that succeeds opens it, with the settings of
    /// that moment.
    #[inline]
    pub(super) fn session(&self, device: c_int) -> Result<&Arc<Session>> {
        match self.slot(device)?.get() {
            Some(session) => Ok(session),
            None => self.open(device as usize),
        }
    }

    /// Returns the allocator of a device. `None` if it is not open.
    pub(super) fn opened_on(&self, device: c_int) -> Result<Option<&Arc<Session>>> {
        Ok(self.slot(device)?.get())
    }

    #[inline]
    pub(super) fn slot(&self, device: c_int) -> Result<&OnceLock<Arc<Session>>> {
        check_fork()?;
        let slot = usize::try_from(device).ok().and_then(|device| self.devices.get(device));
        slot.ok_or_else(|| Failure::new(Kind::Range, format!("there is no device number {device}")))
    }

    #[cold]
    fn open(&self, device: usize) -> Result<&Arc<Session>> {
        let mut options = self.options();
        if let Some(session) = self.devices[device].get() {
            return Ok(session);
        }
        let options = &mut options[device];
        let settings = self.read_settings()?;
        let session = Session::open_on(
            settings.device(device)?,
            &settings.options,
            options.fraction,
            variable,
        )?;
        if options.events > 0 {
            session.record_history(options.events)?;
        }
        for &peer in &options.peers {
            session.allocator().grant_access(peer).map_err(not_granted)?;
        }
        options.registration = options.register.as_ref().map(|register| register(&session));
        Ok(self.devices[device].get_or_init(|| Arc::new(session.kept_open(device as u16))))
    }

    pub(super) fn read_settings(&self) -> Result<Settings> {
        self.settings.get().cloned().unwrap_or_else(Settings::read)
    }

    fn options(&self) -> MutexGuard<'_, [DeviceOptions; DEVICES]> {
        self.options.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// With a fraction of 0 all requests fail that need new memory of the device.
    pub(super) fn set_fraction(&self, fraction: f64, device: c_int) -> Result<()> {
        let slot = self.slot(device)?;
        let mut options = self.options();
        if let Some(opened) = slot.get() {
            drop(options);
            return opened.set_fraction(fraction);
        }
        if !(0.0..=1.0).contains(&fraction) {
            let text = format!("{fraction} is not a valid fraction: use a number from 0 to 1");
            return Err(Failure::new(Kind::Range, text));
        }
        options[device as usize].fraction = Some(fraction);
        Ok(())
    }

    /// Records the last `events` events of a device from now on, or from its first one on. Zero stops
    /// the recording.
    pub(super) fn record_history(&self, device: c_int, events: u32) -> Result<()> {
        let slot = self.slot(device)?;
        check_events(events)?;
        let mut options = self.options();
        if let Some(opened) = slot.get() {
            drop(options);
            return opened.record_history(events);
        }
        options[device as usize].events = events;
        Ok(())
    }

    /// Grants a device access to the memory of device `owner`, now or when that is opened.
    pub(super) fn enable_peer(&self, device: c_int, owner: c_int) -> Result<()> {
        self.slot(device)?;
        let slot = self.slot(owner)?;
        let peer = device as u32;
        let mut options = self.options();
        if let Some(opened) = slot.get() {
            drop(options);
            opened.allocator().grant_access(peer).map_err(not_granted)?;
            return self.grant_opened(owner, peer);
        }
        // An allocator that is opened must not fail because of what was asked before.
        let config = self.read_settings()?.options.config(Bytes::tib(1), None);
        let is_allowed = match &config.base.sharing.peers {
            Peers::None => false,
            Peers::OnDemand | Peers::All => true,
            Peers::These(listed) => listed.contains(&peer),
        };
        if !is_allowed {
            return Err(not_granted(AccessError::Excluded { ordinal: peer }));
        }
        options[owner as usize].peers.insert(peer);
        Ok(())
    }

    /// Replaces the observer of PyTorch's class, and waits for calls in progress of the one before.
    pub(super) fn observe(&self, device: c_int, register: Option<Register>) -> Result<()> {
        let slot = self.slot(device)?;
        let mut options = self.options();
        let of = &mut options[device as usize];
        let before = of.registration.take();
        if let (Some(opened), Some(register)) = (slot.get(), &register) {
            of.registration = Some(register(opened));
        }
        of.register = register;
        // The observer before may wait for what a thread holds that opens a device.
        drop(options);
        if let (Some(opened), Some(before)) = (slot.get(), before) {
            opened.unobserve(before);
        }
        Ok(())
    }

    /// Returns the handle of a device's allocator.
    pub(super) fn handle(&self, device: c_int) -> Result<vramp_allocator_t> {
        let session = self.session(device)?;
        let mut handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = &mut handles[device as usize];
        if handle.id == 0 {
            *handle = handles::insert(Arc::clone(session))?;
        }
        Ok(*handle)
    }
}

fn not_granted(error: AccessError) -> Failure {
    match error {
        // The cards are named in the settings.
        AccessError::NoPeer { .. } | AccessError::Excluded { .. } => {
            Failure::new(Kind::Option, error.to_string())
        }
        error => error.into(),
    }
}

/// Grants device `device` access to the memory of device `owner`: what it has now and later, and what is open of
/// other processes. Opens no device. VRAMP_ERROR_OPTION where the option `peers` excludes it.
#[unsafe(no_mangle)]
pub extern "C" fn vramp_torch_enable_peer(device: c_int, owner: c_int) -> vramp_status_t {
    status_of(|| TORCH.enable_peer(device, owner))
}

/// Returns the handle of a device's allocator, for callers in this process that are not PyTorch.
pub(crate) fn shared_allocator(device: c_int) -> Result<vramp_allocator_t> {
    if TORCH.opened_on(device)?.is_none() {
        TORCH.open(device as usize)?;
    }
    TORCH.handle(device)
}

/// Returns the handle of a device's allocator. `None` if it is not open.
pub(crate) fn opened_allocator(device: c_int) -> Result<Option<vramp_allocator_t>> {
    match TORCH.opened_on(device)? {
        Some(_) => TORCH.handle(device).map(Some),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use vramp_alloc::observe::Event;

    use super::*;
    use crate::abi::vramp_status_t::*;

    fn torch() -> Torch {
        let torch = Torch::new();
        torch.settings.set(Settings::of("sim", "")).unwrap();
        torch
    }

    fn malloc(torch: &Torch, device: c_int, size: u64) {
        // SAFETY: on the simulator any value is a stream.
        unsafe { torch.malloc_block(size, device, std::ptr::null_mut()) }.unwrap();
    }

    fn opened(torch: &Torch) -> Vec<c_int> {
        torch.opened_by_device().map(|(device, _)| device).collect()
    }

    /// Returns what registers an observer that adds the bytes by which memory grows to `grown`.
    fn sum_of_growth(grown: &Arc<AtomicU64>) -> Register {
        let grown = Arc::clone(grown);
        Box::new(move |session| {
            let grown = Arc::clone(&grown);
            session.observe(move |event| {
                if let Event::Grown { bytes, .. } = event {
                    grown.fetch_add(bytes.count(), Ordering::Relaxed);
                }
            })
        })
    }

    #[test]
    fn only_a_request_for_memory_opens_a_device() {
        let torch = torch();
        for device in 0..8 {
            assert_eq!(torch.memory(device).unwrap().reserved, 0);
            assert_eq!(torch.memory(device).unwrap().device_total, 0);
            assert_eq!(torch.parts(device).unwrap(), Vec::new());
            torch.set_fraction(0.5, device).unwrap();
            torch.record_history(device, 100).unwrap();
            torch.observe(device, Some(sum_of_growth(&Arc::default()))).unwrap();
            torch.observe(device, None).unwrap();
        }
        assert_eq!(opened(&torch).len(), 0);
        malloc(&torch, 5, 1 << 20);
        assert_eq!(opened(&torch), [5]);
        assert!(torch.memory(5).unwrap().device_total > 0);
    }

    #[test]
    fn a_device_is_granted_access_now_or_when_the_other_is_opened() {
        let torch = Torch::new();
        torch.settings.set(Settings::of("sim:h200x3", "")).unwrap();
        malloc(&torch, 0, 1 << 20);
        torch.enable_peer(1, 0).unwrap();
        torch.enable_peer(0, 1).unwrap();
        torch.enable_peer(0, 1).unwrap();
        assert_eq!(opened(&torch), [0]);
        malloc(&torch, 1, 1 << 20);
        let peers = |device| torch.session(device).unwrap().allocator().sharing().peers;
        assert_eq!((peers(0), peers(1)), (vec![1], vec![0]));
        let refused = torch.enable_peer(7, 0).unwrap_err();
        assert_eq!(refused.status(), VRAMP_ERROR_OPTION);
    }

    #[test]
    fn the_option_peers_excludes_devices_before_they_are_opened() {
        let torch = Torch::new();
        torch.settings.set(Settings::of("sim:h200x4", "peers=[1]")).unwrap();
        torch.enable_peer(1, 0).unwrap();
        assert_eq!(torch.enable_peer(2, 0).unwrap_err().status(), VRAMP_ERROR_OPTION);
        malloc(&torch, 0, 1 << 20);
        assert_eq!(torch.enable_peer(2, 0).unwrap_err().status(), VRAMP_ERROR_OPTION);
        assert_eq!(opened(&torch), [0]);
    }

    #[test]
    fn an_observer_sees_the_growth_of_the_first_request() {
        let torch = torch();
        let (first, second) = (Arc::default(), Arc::default());
        torch.observe(3, Some(sum_of_growth(&first))).unwrap();
        malloc(&torch, 3, 40 << 20);
        let reserved = torch.memory(3).unwrap().reserved;
        assert_eq!(first.load(Ordering::Relaxed), reserved);
        torch.observe(3, Some(sum_of_growth(&second))).unwrap();
        malloc(&torch, 3, 80 << 20);
        let grown = torch.memory(3).unwrap().reserved - reserved;
        assert!(grown > 0);
        assert_eq!(
            (first.load(Ordering::Relaxed), second.load(Ordering::Relaxed)),
            (reserved, grown)
        );
        torch.observe(3, None).unwrap();
        malloc(&torch, 3, 80 << 20);
        assert_eq!(second.load(Ordering::Relaxed), grown);
    }

    #[test]
    fn a_recording_begins_with_the_first_request() {
        let torch = torch();
        torch.record_history(0, 50).unwrap();
        torch.record_history(1, 50).unwrap();
        torch.record_history(1, 0).unwrap();
        let events = |device| {
            malloc(&torch, device, 1 << 20);
            torch.session(device).unwrap().snapshot().unwrap().events.len()
        };
        assert_eq!((events(0) > 0, events(1)), (true, 0));
        let refused = torch.record_history(2, u32::MAX).unwrap_err();
        assert_eq!(refused.status(), VRAMP_ERROR_RANGE);
        assert_eq!(torch.record_history(64, 1).unwrap_err().status(), VRAMP_ERROR_RANGE);
    }
}
