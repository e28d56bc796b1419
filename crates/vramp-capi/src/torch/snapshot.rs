//! History and snapshots of all devices of the process at once.
//!
//! 1. [`record_history_of_devices`] starts a recording on each open device, and notes the number of events
//!    for devices that are opened later.
//! 2. [`snapshot_of_devices`] writes one file, in which each device has its own events and segments under
//!    the number that PyTorch gives it.
//!
//! O(blocks + events) of all devices. A device that is not open is not in the file, and keeps its place:
//! the list of events at its number is empty.

use std::ffi::c_int;

use vramp_alloc::history::Trace;

use super::{DEVICES, TORCH, Torch};
use crate::status::{Result, check_fork};
use crate::writing::write_trace;

impl Torch {
    /// Starts to record the last `events` events of each device, also of those that are opened later. Zero
    /// stops the recordings.
    pub(super) fn record_all(&self, events: u32) -> Result<()> {
        (0..DEVICES as c_int).try_for_each(|device| self.record_history(device, events))
    }

    /// Returns blocks, segments and recorded events of all open devices.
    pub(super) fn snapshot(&self) -> Result<Trace> {
        check_fork()?;
        let traces: Result<Vec<Trace>> = self.opened().map(|session| session.snapshot()).collect();
        let mut merged = Trace::merge(traces?);
        merged.name = String::new();
        Ok(merged)
    }
}

/// Starts to record the last `events` events of each device that PyTorch, Python and C share.
pub(crate) fn record_history_of_devices(events: u32) -> Result<()> {
    TORCH.record_all(events)
}

/// Writes blocks, segments and recorded events of all these devices to a file.
pub(crate) fn snapshot_of_devices(path: &str) -> Result<()> {
    write_trace(&TORCH.snapshot()?, path)
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use vramp_alloc::history::BlockState;
    use vramp_trace::{EventKind, ReadLimits, Workload, read};

    use vramp_alloc::history::HistorySize;

    use super::*;
    use crate::abi::vramp_status_t::VRAMP_ERROR_RANGE;
    use crate::torch::Settings;

    fn torch() -> Torch {
        let torch = Torch::new();
        torch.settings.set(Settings::of("sim", "")).unwrap();
        torch
    }

    fn malloc(torch: &Torch, size: isize, device: i32) -> u64 {
        // SAFETY: on the simulator any value is a stream.
        unsafe { torch.malloc(size, device, null_mut()) }.unwrap().number()
    }

    fn free(torch: &Torch, addr: u64, device: i32) {
        // SAFETY: on the simulator any value is a stream.
        unsafe { torch.free(addr, device, null_mut()) }.unwrap();
    }

    /// The sizes of the live blocks on each device, by the segments.
    fn held(trace: &Trace) -> Vec<(u16, Vec<u64>)> {
        let mut found: Vec<(u16, Vec<u64>)> = Vec::new();
        for segment in &trace.segments {
            let live = segment.blocks.iter().filter(|block| block.state == BlockState::Active);
            let sizes = live.filter_map(|block| Some(block.requested_size?.count()));
            match found.iter_mut().find(|(device, _)| *device == segment.device) {
                Some((_, all)) => all.extend(sizes),
                None => found.push((segment.device, sizes.collect())),
            }
        }
        found.iter_mut().for_each(|(_, sizes)| sizes.sort_unstable());
        found
    }

    #[test]
    fn a_snapshot_has_the_events_and_blocks_of_each_device_under_its_number() {
        let torch = torch();
        malloc(&torch, 3 << 20, 0);
        torch.record_all(100).unwrap();
        malloc(&torch, 4 << 20, 0);
        // Opened after the recording began.
        let freed = malloc(&torch, 5 << 20, 6);
        malloc(&torch, 6 << 20, 6);
        free(&torch, freed, 6);
        malloc(&torch, 7 << 20, 2);
        let trace = torch.snapshot().unwrap();
        assert_eq!((trace.devices(), trace.device_count), (vec![0, 2, 6], 7));
        let kinds = |device: u16| {
            let own = trace.events.iter().filter(move |event| event.device == device);
            own.map(|event| event.kind).filter(|kind| *kind != EventKind::SegmentMap)
        };
        assert!(kinds(0).eq([EventKind::Alloc]));
        assert!(kinds(2).eq([EventKind::Alloc]));
        assert!(kinds(6).eq([
            EventKind::Alloc,
            EventKind::Alloc,
            EventKind::FreeRequested,
            EventKind::FreeCompleted
        ]));
        let expected = [(0, vec![3 << 20, 4 << 20]), (2, vec![7 << 20]), (6, vec![6 << 20])];
        assert_eq!(held(&trace), expected);

        let mut file = Vec::new();
        trace.write_snapshot(&mut file).unwrap();
        let found = read(&file[..], &ReadLimits::default()).unwrap();
        assert_eq!((found.devices(), found.device_count), (vec![0, 2, 6], 7));
        let live: Vec<u64> =
            Workload::all(&found).iter().map(|workload| workload.peak_live.count()).collect();
        assert_eq!(live, [7 << 20, 7 << 20, 11 << 20]);

        // The snapshot of one allocator has the number of its device.
        let alone = torch.session(6).unwrap().snapshot().unwrap();
        assert_eq!(alone.devices(), [6]);

        torch.record_all(0).unwrap();
        malloc(&torch, 8 << 20, 6);
        let after = torch.snapshot().unwrap();
        assert!(after.events.is_empty(), "the recordings have ended");
        assert_eq!(held(&after)[2], (6, vec![6 << 20, 8 << 20]));
    }

    #[test]
    fn too_many_events_are_refused_and_no_open_device_is_an_empty_snapshot() {
        let torch = torch();
        let error = torch.record_all(HistorySize::EVENTS_MAX + 1).unwrap_err();
        assert_eq!(error.status(), VRAMP_ERROR_RANGE);
        assert!(torch.snapshot().unwrap().devices().is_empty());
        malloc(&torch, 1 << 20, 1);
        assert!(torch.snapshot().unwrap().events.is_empty(), "nothing is recorded");
    }

    #[test]
    fn a_snapshot_of_many_events_has_each_once() {
        let torch = torch();
        torch.record_all(20_000).unwrap();
        for device in 0..8 {
            for _ in 0..5_000 {
                let block = malloc(&torch, 2 << 20, device);
                free(&torch, block, device);
            }
        }
        let trace = torch.snapshot().unwrap();
        for workload in Workload::all(&trace) {
            let allocs =
                workload.device_events(&trace).filter(|(_, it)| it.kind == EventKind::Alloc);
            assert_eq!((allocs.count(), workload.blocks), (5_000, 5_000));
        }
        assert_eq!(trace.devices().len(), 8);
    }
}
