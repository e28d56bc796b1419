//! Access to inaccessible memory. The driver may refuse the call or lose the device.

use vramp_core::AddrRange;

use super::rig::Rig;
use super::{Checked, ensure, rules};
use vramp_driver::{Capabilities, ErrorKind};

const VIRTUAL: fn(&Capabilities) -> bool = |can| can.virtual_memory;

rules! {
    memory_without_access_cannot_be_touched: VIRTUAL,
    unmapped_memory_cannot_be_touched: VIRTUAL,
    a_new_mapping_does_not_inherit_access: VIRTUAL,
    memory_for_reading_cannot_be_written: VIRTUAL,
}

fn memory_without_access_cannot_be_touched(rig: &Rig) -> Checked {
    let range = rig.reserve(rig.page)?;
    rig.map(range, rig.create(rig.page)?)?;
    touching_fails(rig, range)
}

fn unmapped_memory_cannot_be_touched(rig: &Rig) -> Checked {
    let range = rig.reserve(rig.page)?;
    touching_fails(rig, range)
}

fn a_new_mapping_does_not_inherit_access(rig: &Rig) -> Checked {
    let range = rig.memory(&[rig.page])?;
    rig.unmap(range)?;
    rig.map(range, rig.create(rig.page)?)?;
    touching_fails(rig, range)
}

fn memory_for_reading_cannot_be_written(rig: &Rig) -> Checked {
    let range = rig.memory(&[rig.page])?;
    rig.device.set_read_only(range)?;
    touching_fails(rig, range)
}

/// Checks that the fill is refused, or that the device is lost and stays lost.
fn touching_fails(rig: &Rig, range: AddrRange) -> Checked {
    let stream = rig.stream()?;
    let event = rig.event()?;
    let refusal = match rig.device.fill(stream, range, 1) {
        Err(error) => error,
        Ok(()) => match rig.device.synchronize_stream(stream) {
            Err(error) => error,
            Ok(()) => {
                return Err(super::Failure(format!("{range} was filled")));
            }
        },
    };
    match refusal.kind {
        ErrorKind::InvalidUse => Ok(()),
        ErrorKind::DeviceLost => {
            let later = rig.device.query(event);
            let stays_lost = matches!(&later, Err(error) if error.is_device_lost());
            ensure!(stays_lost, "after {refusal}, a query answered {later:?}");
            Ok(())
        }
        _ => Err(super::Failure(format!("expected a refusal or a lost device, got {refusal}"))),
    }
}
