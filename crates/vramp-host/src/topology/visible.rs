//! The rules of `CUDA_VISIBLE_DEVICES`.
//!
//! Sources: *Guide* is NVIDIA's CUDA Programming Guide, section "CUDA Environment Variables".
//! *PyTorch* is PyTorch's test `test_cuda_nvml_based_avail.py`.
//!
//! - Unset shows all GPUs. The empty text shows none. (Guide)
//! - Numbers are GPU ordinals in CUDA's order, from 0. The visible GPUs are renumbered in the order
//!   of the list. (Guide)
//! - An invalid entry hides itself and all entries after it: `0,2,-1,1` shows 0 and 2. (Guide)
//! - A GPU can be named by its UUID or by a unique prefix of it. (Guide)
//! - An ambiguous prefix is invalid. (PyTorch)
//! - A number ends at the first character that is not a digit: `1gpu2` is 1. It may have a sign;
//!   `-0` is 0. Space around it is ignored. (PyTorch)
//! - All entries must have the form of the first. An entry of another form is invalid. (PyTorch)
//! - A duplicate entry hides all GPUs. (PyTorch)
//! - `MIG-<uuid>` and `MIG-GPU-<uuid>/<gpu instance>/<compute instance>` name a MIG device. Only
//!   one   MIG device is visible. (Guide)

use std::fmt;
use std::str::FromStr;

/// Identifier of a MIG device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum MigId {
    /// UUID of the MIG device or a prefix of it: `MIG-89c850dc`.
    Uuid(String),
    /// GPU and instances: `MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2`.
    Instance {
        /// UUID of the GPU, with its prefix `GPU-`.
        gpu: String,
        /// GPU instance.
        gpu_instance: u32,
        /// Compute instance in the GPU instance.
        compute_instance: u32,
    },
}

/// A text is not the identifier of a MIG device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' is not a MIG device: write MIG-<uuid> or \
     MIG-GPU-<uuid>/<gpu instance>/<compute instance>"
)]
pub struct ParseMigIdError {
    /// The text.
    pub text: String,
}

impl FromStr for MigId {
    type Err = ParseMigIdError;

    fn from_str(text: &str) -> Result<MigId, ParseMigIdError> {
        let refuse = || ParseMigIdError { text: text.to_owned() };
        let rest = text.strip_prefix("MIG-").ok_or_else(refuse)?;
        let is_uuid = |text: &str| {
            !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
        };
        let Some(gpu) = rest.strip_prefix("GPU-") else {
            return is_uuid(rest).then(|| MigId::Uuid(text.to_owned())).ok_or_else(refuse);
        };
        let parts: Vec<&str> = gpu.split('/').collect();
        let &[gpu, gpu_instance, compute_instance] = parts.as_slice() else { return Err(refuse()) };
        let number = |text: &str| {
            let digits = text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse().ok().filter(|_| digits).ok_or_else(refuse)
        };
        if !is_uuid(gpu) {
            return Err(refuse());
        }
        Ok(MigId::Instance {
            gpu: format!("GPU-{gpu}"),
            gpu_instance: number(gpu_instance)?,
            compute_instance: number(compute_instance)?,
        })
    }
}

impl fmt::Display for MigId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MigId::Uuid(uuid) => f.pad(uuid),
            MigId::Instance { gpu, gpu_instance, compute_instance } => {
                f.pad(&format!("MIG-{gpu}/{gpu_instance}/{compute_instance}"))
            }
        }
    }
}

/// A device that CUDA shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VisibleDevice {
    /// The GPU at this index of the list.
    Gpu(usize),
    /// A MIG device.
    Mig {
        /// Identifier of the MIG device.
        id: MigId,
        /// Index of its GPU in the list. `None` if the identifier has no GPU, or the list does not
        /// contain it.
        gpu: Option<usize>,
    },
}

/// An entry that shows no device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignored {
    /// Index in the variable, from 0.
    pub position: usize,
    /// Text of the entry.
    pub text: String,
    /// Reason why it is ignored.
    pub reason: IgnoreReason,
}

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' in CUDA_VISIBLE_DEVICES is ignored: {}", self.text, self.reason)
    }
}

/// Reason why an entry is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IgnoreReason {
    /// It is not a number and not a UUID.
    NotADevice,
    /// No GPU has this number.
    OutOfRange {
        /// Number of GPUs.
        count: usize,
    },
    /// No GPU has a UUID with this prefix.
    UnknownUuid,
    /// Several GPUs have a UUID with this prefix.
    AmbiguousUuid {
        /// Number of these GPUs.
        matches: usize,
    },
    /// It has another form than the first entry.
    MixedForms,
    /// It comes after an invalid entry.
    AfterInvalid,
    /// It comes after a MIG device, of which only one is visible.
    ExtraMig,
    /// It is a duplicate, which hides all GPUs.
    Duplicate,
    /// Another entry is a duplicate, which hides all GPUs.
    HiddenByDuplicate,
}

impl fmt::Display for IgnoreReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IgnoreReason::NotADevice => write!(f, "it is not a number, GPU-<uuid> or MIG-<id>"),
            IgnoreReason::OutOfRange { count: 0 } => write!(f, "there is no GPU"),
            IgnoreReason::OutOfRange { count } => {
                write!(f, "the GPUs are numbered 0 to {}", count - 1)
            }
            IgnoreReason::UnknownUuid => write!(f, "no GPU has a UUID with this prefix"),
            IgnoreReason::AmbiguousUuid { matches } => {
                write!(f, "{matches} GPUs have a UUID with this prefix: write a longer prefix")
            }
            IgnoreReason::MixedForms => write!(f, "the first entry has another form"),
            IgnoreReason::AfterInvalid => write!(f, "it comes after an invalid entry"),
            IgnoreReason::ExtraMig => write!(f, "CUDA shows only one MIG device"),
            IgnoreReason::Duplicate => write!(f, "the GPU is named twice, which hides all GPUs"),
            IgnoreReason::HiddenByDuplicate => write!(f, "another GPU is named twice"),
        }
    }
}

/// The devices that CUDA shows, and the entries that it ignores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VisibleDevices {
    /// Visible devices in the order of their ordinals.
    pub devices: Vec<VisibleDevice>,
    /// Entries that show no device.
    pub ignored: Vec<Ignored>,
}

/// Form of an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Number,
    Gpu,
    Mig,
}

impl Form {
    fn of(entry: &str) -> Form {
        match entry {
            _ if entry.starts_with("GPU-") => Form::Gpu,
            _ if entry.starts_with("MIG-") => Form::Mig,
            _ => Form::Number,
        }
    }
}

impl VisibleDevices {
    /// Applies the variable's value, `None` if it is not set, to GPUs with these UUIDs in CUDA's
    /// order. O(entries times GPUs).
    ///
    /// ```
    /// use vramp_host::topology::{VisibleDevice, VisibleDevices};
    /// let visible = VisibleDevices::parse(Some("2,0,7,1"), &[None; 3]);
    /// assert_eq!(visible.devices, [VisibleDevice::Gpu(2), VisibleDevice::Gpu(0)]);
    /// assert_eq!(visible.ignored.len(), 2);
    /// ```
    pub fn parse(variable: Option<&str>, uuids: &[Option<&str>]) -> VisibleDevices {
        let Some(text) = variable else {
            let devices = (0..uuids.len()).map(VisibleDevice::Gpu).collect();
            return VisibleDevices { devices, ignored: Vec::new() };
        };
        let mut found = VisibleDevices::default();
        if text.is_empty() {
            return found;
        }
        let entries: Vec<&str> = text.split(',').map(str::trim).collect();
        let form = Form::of(entries[0]);
        let mut ended = None;
        for (position, &entry) in entries.iter().enumerate() {
            let outcome = match ended {
                Some(why) => Err(why),
                None if Form::of(entry) != form => Err(IgnoreReason::MixedForms),
                None => device(entry, form, uuids),
            };
            match outcome {
                Ok(device) if found.devices.contains(&device) => {
                    return hide_all(&entries, position);
                }
                Ok(device) => {
                    found.devices.push(device);
                    ended = (form == Form::Mig).then_some(IgnoreReason::ExtraMig);
                }
                Err(reason) => {
                    found.ignored.push(Ignored { position, text: entry.to_owned(), reason });
                    ended = ended.or(Some(IgnoreReason::AfterInvalid));
                }
            }
        }
        found
    }

    /// Returns the indices of the visible GPUs, without MIG devices, in CUDA's order.
    pub fn gpus(&self) -> impl Iterator<Item = usize> + '_ {
        self.devices.iter().filter_map(|device| match device {
            VisibleDevice::Gpu(place) => Some(*place),
            VisibleDevice::Mig { .. } => None,
        })
    }
}

fn device(entry: &str, form: Form, uuids: &[Option<&str>]) -> Result<VisibleDevice, IgnoreReason> {
    match form {
        Form::Number => number(entry, uuids.len()).map(VisibleDevice::Gpu),
        Form::Gpu => with_uuid(entry, uuids).map(VisibleDevice::Gpu),
        Form::Mig => {
            let id: MigId = entry.parse().map_err(|_| IgnoreReason::NotADevice)?;
            let gpu = match &id {
                MigId::Uuid(_) => None,
                MigId::Instance { gpu, .. } => with_uuid(gpu, uuids).ok(),
            };
            Ok(VisibleDevice::Mig { id, gpu })
        }
    }
}

fn number(entry: &str, count: usize) -> Result<usize, IgnoreReason> {
    let negative = entry.starts_with('-');
    let unsigned = entry.strip_prefix(['+', '-']).unwrap_or(entry);
    let end = unsigned.find(|c: char| !c.is_ascii_digit()).unwrap_or(unsigned.len());
    let digits = &unsigned[..end];
    if digits.is_empty() {
        return Err(IgnoreReason::NotADevice);
    }
    // A number that overflows is out of range.
    let number = digits.parse().unwrap_or(usize::MAX);
    let good = number < count && (!negative || number == 0);
    good.then_some(number).ok_or(IgnoreReason::OutOfRange { count })
}

fn with_uuid(beginning: &str, uuids: &[Option<&str>]) -> Result<usize, IgnoreReason> {
    let begins = |uuid: &Option<&str>| uuid.is_some_and(|uuid| uuid.starts_with(beginning));
    let mut matching = (0..uuids.len()).filter(|&place| begins(&uuids[place]));
    match (matching.next(), matching.count()) {
        (None, _) => Err(IgnoreReason::UnknownUuid),
        (Some(place), 0) => Ok(place),
        (Some(_), more) => Err(IgnoreReason::AmbiguousUuid { matches: more + 1 }),
    }
}

fn hide_all(entries: &[&str], twice: usize) -> VisibleDevices {
    let reason = |position| match position == twice {
        true => IgnoreReason::Duplicate,
        false => IgnoreReason::HiddenByDuplicate,
    };
    let ignored = entries.iter().enumerate().map(|(position, entry)| Ignored {
        position,
        text: (*entry).to_owned(),
        reason: reason(position),
    });
    VisibleDevices { devices: Vec::new(), ignored: ignored.collect() }
}
