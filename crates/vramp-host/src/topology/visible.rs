//! What `CUDA_VISIBLE_DEVICES` shows.
//!
//! The rules, and where they are stated. *Guide* is NVIDIA's CUDA Programming Guide, section
//! "CUDA Environment Variables"; *PyTorch* is what `test_cuda_nvml_based_avail.py` of PyTorch holds
//! the driver to.
//!
//! - Unset shows all cards, the empty text none. (Guide)
//! - Numbers are those of the cards in CUDA's order, from 0. The cards are then numbered in the
//!   order of the list. (Guide)
//! - What is no card hides itself and all behind it: `0,2,-1,1` shows 0 and 2. (Guide)
//! - A card goes by its UUID, too, or by as much of its beginning as no other card has. (Guide)
//! - An ambiguous beginning is no card. (PyTorch)
//! - A number is read as far as its digits go: `1gpu2` is 1. It may have a sign; `-0` is 0. Space
//!   around it does not matter. (PyTorch)
//! - The first entry says of which form all are: one of another form ends the list. (PyTorch)
//! - A card named twice hides all. (PyTorch)
//! - `MIG-<uuid>` and `MIG-GPU-<uuid>/<gpu instance>/<compute instance>` name a part of a card. Only
//!   one such part is shown. (Guide)

use std::fmt;
use std::str::FromStr;

/// A part of a card that is split by MIG.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum MigId {
    /// By its own UUID, or the beginning of it: `MIG-89c850dc`.
    Uuid(String),
    /// By its card: `MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2`.
    Instance {
        /// The card's UUID, with `GPU-` before it.
        gpu: String,
        /// Which part of the card's memory.
        gpu_instance: u32,
        /// Which part of that part's processors.
        compute_instance: u32,
    },
}

/// A text that names no part of a card.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' names no part of a card: write MIG-<uuid> or \
     MIG-GPU-<uuid>/<gpu instance>/<compute instance>"
)]
pub struct ParseMigIdError {
    /// What was given.
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

/// What CUDA shows as one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VisibleDevice {
    /// The card at this place of the list.
    Gpu(usize),
    /// A part of a card.
    Mig {
        /// Which part.
        id: MigId,
        /// The card's place in the list. `None` where the part's name does not tell, or the list
        /// has no such card.
        gpu: Option<usize>,
    },
}

/// An entry that shows nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignored {
    /// Its place in the variable, from 0.
    pub position: usize,
    /// What it says.
    pub text: String,
    /// Why it shows nothing.
    pub reason: IgnoreReason,
}

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' in CUDA_VISIBLE_DEVICES shows nothing: {}", self.text, self.reason)
    }
}

/// Why an entry shows nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IgnoreReason {
    /// It is no number and no UUID.
    NotADevice,
    /// Its number is none of a card.
    OutOfRange {
        /// How many cards there are.
        count: usize,
    },
    /// No card's UUID begins so.
    UnknownUuid,
    /// Several cards' UUIDs begin so.
    AmbiguousUuid {
        /// How many.
        matches: usize,
    },
    /// It is of another form than the first.
    MixedForms,
    /// It comes behind an entry that is no card.
    AfterInvalid,
    /// It comes behind a part of a card, of which only one is shown.
    ExtraMig,
    /// Its card is named before. That hides all cards.
    Duplicate,
    /// Some card is named twice. That hides all cards.
    HiddenByDuplicate,
}

impl fmt::Display for IgnoreReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IgnoreReason::NotADevice => write!(f, "it is no number, no GPU- and no MIG- name"),
            IgnoreReason::OutOfRange { count: 0 } => write!(f, "there is no card"),
            IgnoreReason::OutOfRange { count } => {
                write!(f, "the cards are numbered 0 to {}", count - 1)
            }
            IgnoreReason::UnknownUuid => write!(f, "no card's UUID begins so"),
            IgnoreReason::AmbiguousUuid { matches } => {
                write!(f, "the UUIDs of {matches} cards begin so: write more of it")
            }
            IgnoreReason::MixedForms => write!(f, "the first entry is of another form"),
            IgnoreReason::AfterInvalid => write!(f, "it comes behind an entry that is no card"),
            IgnoreReason::ExtraMig => write!(f, "CUDA shows only one part of a card"),
            IgnoreReason::Duplicate => write!(f, "the card is named twice, which hides all cards"),
            IgnoreReason::HiddenByDuplicate => write!(f, "another card is named twice"),
        }
    }
}

/// What CUDA shows, in its order, and what it does not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VisibleDevices {
    /// What programs see as card 0, 1 and so on.
    pub devices: Vec<VisibleDevice>,
    /// The entries that show nothing.
    pub ignored: Vec<Ignored>,
}

/// How an entry names a card.
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
    /// What CUDA makes of the variable's text, `None` if it is not set, with cards of these UUIDs
    /// in CUDA's order. O(entries times cards).
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
        let mut over = None;
        for (position, &entry) in entries.iter().enumerate() {
            let outcome = match over {
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
                    over = (form == Form::Mig).then_some(IgnoreReason::ExtraMig);
                }
                Err(reason) => {
                    found.ignored.push(Ignored { position, text: entry.to_owned(), reason });
                    over = over.or(Some(IgnoreReason::AfterInvalid));
                }
            }
        }
        found
    }

    /// The places of the cards that are shown whole, in CUDA's order.
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
    // More digits than fit are out of range, and never some other number.
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
