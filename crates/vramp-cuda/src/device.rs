//! One card: its state, making its context current, and the steps common to all calls.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use vramp_driver::{Call, DeviceInfo, DriverError, DriverResult};

use crate::addresses::AddressTable;
use crate::error::{invalid_id, kind_of};
use crate::load::Cuda;
use crate::node_ids::NodeIds;
use crate::pinned::{Captured, Pinned};
use crate::raw::{Physical, RawExec, RawGraph, RawStream};
use crate::sys::{CUctx_st, CUdevice, CUevent_st, CUmemPoolHandle_st, CUresult, CUstream_st};
use crate::table::{Opaque, Refusal, Table};
use crate::turns::{Alone, Turn, Turns};

/// One CUDA card.
///
/// Any thread may call it. A thread without a CUDA context keeps this card's context after its first
/// call. A thread with another context gets it back after each call.
pub struct CudaDriver {
    pub(crate) cuda: Cuda,
    pub(crate) device: CUdevice,
    pub(crate) context: Opaque<CUctx_st>,
    pub(crate) info: DeviceInfo,
    pub(crate) opened: Instant,
    pub(crate) lost: OnceLock<DriverError>,
    pub(crate) addresses: Mutex<AddressTable>,
    pub(crate) handles: Table<Physical>,
    pub(crate) streams: Table<RawStream>,
    pub(crate) events: Table<Opaque<CUevent_st>>,
    pub(crate) buffers: Table<Pinned>,
    pub(crate) graphs: Table<RawGraph>,
    pub(crate) execs: Table<RawExec>,
    pub(crate) node_ids: Mutex<NodeIds>,
    pub(crate) turns: Turns,
    pub(crate) captured: Mutex<Captured>,
    /// Tail stream: waits for the work of every destroyed stream; see [`crate::teardown`].
    pub(crate) tail: OnceLock<Opaque<CUstream_st>>,
    /// Primary contexts of other cards, retained for copies from and to them.
    pub(crate) peer_contexts: Mutex<BTreeMap<u32, Opaque<CUctx_st>>>,
    /// Pool of this device only. `None` if the card has no such pools.
    pub(crate) pool: Option<Opaque<CUmemPoolHandle_st>>,
}

/// Evaluates to the function of this name, or returns early with "not supported" for `$call`.
macro_rules! symbol {
    ($driver:expr, $call:expr, $name:ident) => {
        match &$driver.cuda.$name {
            Ok(function) => *function,
            Err(_) => return Err($crate::error::missing($call, stringify!($name))),
        }
    };
}
pub(crate) use symbol;

impl CudaDriver {
    /// Makes this card's context current for one call. Fails at once if the device is lost.
    pub(crate) fn enter(&self, call: Call) -> DriverResult<Entered<'_>> {
        self.refuse_if_lost(call)?;
        let current = symbol!(self, call, cuCtxGetCurrent);
        let mut before = std::ptr::null_mut();
        // SAFETY: `before` outlives the call.
        let code = unsafe { current(&mut before) };
        self.settle(call, code, || "cuCtxGetCurrent".into())?;
        if before == self.context.0 {
            return Ok(Entered { driver: self, restore: None });
        }
        let set = symbol!(self, call, cuCtxSetCurrent);
        // SAFETY: the context is retained for as long as this device lives.
        let code = unsafe { set(self.context.0) };
        self.settle(call, code, || "cuCtxSetCurrent".into())?;
        let restore = (!before.is_null()).then_some(Opaque(before));
        Ok(Entered { driver: self, restore })
    }

    /// Returns the primary context of another card, which stays retained until this device is dropped.
    pub(crate) fn peer_context(&self, call: Call, ordinal: u32) -> DriverResult<*mut CUctx_st> {
        let mut contexts = self.peer_contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = contexts.get(&ordinal) {
            return Ok(context.0);
        }
        let retain = symbol!(self, call, cuDevicePrimaryCtxRetain);
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` outlives the call. A `CUdevice` is the ordinal, and the driver checks it.
        let code = unsafe { retain(&mut context, ordinal.cast_signed()) };
        self.settle(call, code, || format!("the primary context of device {ordinal}"))?;
        contexts.insert(ordinal, Opaque(context));
        Ok(context)
    }

    /// Fails `call` if the device is lost.
    pub(crate) fn refuse_if_lost(&self, call: Call) -> DriverResult<()> {
        match self.lost.get() {
            Some(first) => Err(DriverError { call, ..first.clone() }),
            None => Ok(()),
        }
    }

    /// Converts the driver's code for `call` to a result. Records a code that loses the device.
    pub(crate) fn settle(
        &self,
        call: Call,
        code: CUresult,
        detail: impl FnOnce() -> String,
    ) -> DriverResult<()> {
        if code == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let error = DriverError {
            call,
            code: code.0.cast_signed(),
            name: self.cuda.name_of(code).into(),
            kind: kind_of(code),
            detail: detail().into(),
        };
        if error.is_device_lost() {
            // If another thread was first, its error stays.
            let _ = self.lost.set(error.clone());
        }
        Err(error)
    }

    /// Locks the address table. The lock is never held during a driver call.
    pub(crate) fn addresses(&self) -> MutexGuard<'_, AddressTable> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a turn for a call on a stream. Alone while a capture of this device is under way.
    pub(crate) fn turn(&self) -> Turn<'_> {
        self.turns.take()
    }

    /// Takes a turn for a call that no other call on a stream may run beside.
    pub(crate) fn turn_alone(&self) -> Alone<'_> {
        self.turns.take_alone()
    }
}

/// Returns the error for an id that its table refused.
pub(crate) fn refused(call: Call, what: &'static str, id: u64) -> impl Fn(Refusal) -> DriverError {
    move |refusal| invalid_id(call, format!("{what} {id:#x}: {refusal}"))
}

/// Guard: the card's context is current on this thread while it lives.
pub(crate) struct Entered<'a> {
    driver: &'a CudaDriver,
    restore: Option<Opaque<CUctx_st>>,
}

impl Entered<'_> {
    /// Leaves the card's context current and returns the previous one, if it was another.
    pub(crate) fn keep_current(mut self) -> Option<Opaque<CUctx_st>> {
        self.restore.take()
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let (Some(before), Ok(set)) = (&self.restore, &self.driver.cuda.cuCtxSetCurrent) {
            // SAFETY: the context was current on this thread before. If its owner destroyed it
            // since then, the driver refuses, and there is nothing to restore.
            let _ = unsafe { set(before.0) };
        }
    }
}
