//! Memory that the program gives to other processes by `cudaIpcGetMemHandle`.
//!
//! The driver takes no memory of the pool there. So the handle names a file in the folder of the command, in which vramp's
//! ticket for the memory is: processes that run under the same `vramp exec` open each other's memory by it.

use std::ffi::c_uint;
use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::{self, Code, INVALID_VALUE, SUCCESS};
use crate::process::Process;
use crate::report::write_line;

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Handle([u8; 64]);

/// What a handle of this library begins with. The rest is the name of the file, and zeros.
const MAGIC: &[u8; 8] = b"VRAMPIPC";

/// Memory of other processes that is open: its handle, its address, and how often.
static OPEN: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

struct Opened {
    name: String,
    /// The device that uses it.
    device: usize,
    address: u64,
    /// Number of the pool.
    number: u64,
    times: u32,
}

fn opened() -> MutexGuard<'static, Vec<Opened>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Handle {
    fn new(name: &str) -> Handle {
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..8 + name.len()].copy_from_slice(name.as_bytes());
        Handle(bytes)
    }

    /// Returns the name of the file. `None` for a handle of the driver.
    fn name(&self) -> Option<&str> {
        let name = self.0.strip_prefix(MAGIC)?;
        let end = name.iter().position(|&byte| byte == 0)?;
        let name = std::str::from_utf8(&name[..end]).ok()?;
        (!name.contains('/')).then_some(name)
    }
}

/// # Safety
/// As of `cuIpcGetMemHandle`.
pub unsafe fn get(
    process: &Process,
    driver: &dyn Fn() -> Code,
    handle: *mut Handle,
    address: u64,
) -> Code {
    let found = process.ledger.containing(address).filter(|(_, block)| block.is_pooled());
    let (Some(pool), Some((start, _)), Some(folder), false) =
        (process.pool_if_open(), found, &process.settings.report, handle.is_null())
    else {
        return driver();
    };
    let Some(number) = process.ledger.give_ticket(start) else { return driver() };
    let name = name_of(number);
    let shared = if folder.join(&name).exists() {
        Ok(())
    } else {
        pool.share(start).and_then(|ticket| {
            // Whole at once, for the process that reads it.
            let new = folder.join(format!("{name}.new"));
            let written =
                fs::write(&new, ticket).and_then(|()| fs::rename(&new, folder.join(&name)));
            written.map_err(|error| format!("{}: {error}", folder.display()))
        })
    };
    match shared {
        Ok(()) => {
            // SAFETY: as of the driver's function.
            unsafe { *handle = Handle::new(&name) };
            SUCCESS
        }
        Err(why) => {
            write_line(&format!("vramp exec: memory cannot be given to another process: {why}"));
            INVALID_VALUE
        }
    }
}

/// Returns the name of a ticket of this process.
fn name_of(number: u64) -> String {
    format!("{}-{number}.ticket", std::process::id())
}

/// Removes the ticket of a block that is freed. Processes that have opened it keep the memory.
pub fn withdraw(process: &Process, number: u64) {
    if let Some(folder) = &process.settings.report {
        let _ = fs::remove_file(folder.join(name_of(number)));
    }
}

/// # Safety
/// As of `cuIpcOpenMemHandle_v2`.
pub unsafe fn open(
    process: &Process,
    driver: &dyn Fn() -> Code,
    address: *mut u64,
    handle: Handle,
    _: c_uint,
) -> Code {
    let (Some(name), false) = (handle.name(), address.is_null()) else { return driver() };
    let place = driver::current_place();
    let (Some(pool), Some(place), Some(folder)) = (process.pool(), place, &process.settings.report)
    else {
        return driver();
    };
    let mut all = opened();
    let known = all.iter_mut().find(|opened| opened.name == name);
    let found = match known {
        Some(opened) => {
            opened.times += 1;
            Ok(opened.address)
        }
        None => read(folder.join(name)).and_then(|ticket| {
            let (number, address) = pool.open_shared(place.device, &ticket)?;
            all.push(Opened {
                name: name.to_owned(),
                device: place.device,
                address,
                number,
                times: 1,
            });
            Ok(address)
        }),
    };
    match found {
        Ok(found) => {
            // SAFETY: as of the driver's function.
            unsafe { *address = found };
            SUCCESS
        }
        Err(why) => {
            write_line(&format!("vramp exec: memory of another process cannot be opened: {why}"));
            INVALID_VALUE
        }
    }
}

fn read(path: PathBuf) -> Result<Vec<u8>, String> {
    fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))
}

/// # Safety
/// As of `cuIpcCloseMemHandle`.
pub unsafe fn close(process: &Process, driver: &dyn Fn() -> Code, address: u64) -> Code {
    let mut all = opened();
    let Some(place) = all.iter().position(|opened| opened.address == address) else {
        return driver();
    };
    all[place].times -= 1;
    if all[place].times > 0 {
        return SUCCESS;
    }
    let Opened { number, device, .. } = all.swap_remove(place);
    let Some(pool) = process.pool_if_open() else { return INVALID_VALUE };
    let code = driver::synchronize(device);
    pool.close_shared(number);
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_has_its_name_and_others_have_none() {
        let name = format!("{}-{}.ticket", u32::MAX, u64::MAX);
        assert_eq!(Handle::new(&name).name(), Some(name.as_str()));
        assert_eq!(Handle([0; 64]).name(), None);
        assert_eq!(Handle([b'V'; 64]).name(), None);
        assert_eq!(Handle::new("../x").name(), None);
    }
}
