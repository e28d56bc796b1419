//! PCI address and UUID of a card, as other programs print them.

use crate::load::Cuda;
use crate::sys::{CUdevice, CUresult, CUuuid};

/// Returns the PCI address. A failure is no error, because no call needs the address.
pub(crate) fn pci_address(cuda: &Cuda, device: CUdevice) -> Option<String> {
    let ask = cuda.cuDeviceGetPCIBusId.as_ref().ok()?;
    let mut text = [0u8; 32];
    // SAFETY: the driver writes at most the given number of bytes, all inside `text`.
    let code = unsafe { ask(text.as_mut_ptr().cast(), text.len() as i32, device) };
    let address = text.split(|&byte| byte == 0).next().unwrap_or_default();
    let known = code == CUresult::CUDA_SUCCESS && !address.is_empty();
    // The kernel prints lower case.
    known.then(|| String::from_utf8_lossy(address).to_ascii_lowercase())
}

/// Returns the UUID as `nvidia-smi` prints it.
pub(crate) fn uuid(cuda: &Cuda, device: CUdevice) -> Option<String> {
    let ask = cuda.cuDeviceGetUuid_v2.as_ref().ok()?;
    let mut uuid = CUuuid::default();
    // SAFETY: `uuid` outlives the call; the driver made `device`.
    let code = unsafe { ask(&mut uuid, device) };
    if code != CUresult::CUDA_SUCCESS {
        return None;
    }
    let digits: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    let part = |from: usize, to: usize| &digits[from..to];
    Some(format!(
        "GPU-{}-{}-{}-{}-{}",
        part(0, 8),
        part(8, 12),
        part(12, 16),
        part(16, 20),
        part(20, 32)
    ))
}
