//! Programs that the dynamic linker loads no further library into.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use object::elf::{FileHeader64, PT_INTERP};
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, FileKind};
use rustix::process::{getegid, geteuid, getgid, getuid};

use crate::exit::Unstartable;

/// Longest first line of a script that Linux reads.
const SCRIPT_LINE: usize = 256;

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = object::elf::EM_X86_64;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = object::elf::EM_AARCH64;

/// Checks that a preloaded library would be loaded into a program, or into the interpreter of a script.
///
/// # Errors
/// [`Unstartable`] with the reason.
pub(super) fn check(path: &Path) -> Result<(), Unstartable> {
    let checked = interpreter(path).unwrap_or_else(|| path.to_owned());
    let reason = refusal(&checked);
    match reason {
        None => Ok(()),
        Some(reason) => Err(Unstartable::refused(format!(
            "vramp exec cannot stand in front of {}: {reason}",
            checked.display()
        ))),
    }
}

/// Returns the interpreter that a script names in its first line.
fn interpreter(path: &Path) -> Option<PathBuf> {
    let mut line = Vec::new();
    File::open(path).ok()?.take(SCRIPT_LINE as u64).read_to_end(&mut line).ok()?;
    let line = line.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let name = line.trim_ascii().split(|byte| b" \t".contains(byte)).next()?;
    Some(PathBuf::from(OsStr::from_bytes(name)))
}

fn refusal(path: &Path) -> Option<String> {
    if let Some(reason) = privileges(path) {
        return Some(format!(
            "it is {reason}, and the dynamic linker loads no further library into such a program. Copy it to a file \
             without that, or run it as the user that it becomes"
        ));
    }
    // What cannot be read as a program may still be one for /bin/sh.
    let cache = ReadCache::new(File::open(path).ok()?);
    match FileKind::parse(&cache).ok()? {
        FileKind::Elf64 => {}
        FileKind::Elf32 => return Some("it is a program of 32 bits".to_owned()),
        _ => return None,
    }
    let header = FileHeader64::<Endianness>::parse(&cache).ok()?;
    let endian = header.endian().ok()?;
    if header.e_machine(endian) != MACHINE {
        return Some(format!("it is not a program for {}", std::env::consts::ARCH));
    }
    let parts = header.program_headers(endian, &cache).ok()?;
    let has_interpreter = parts.iter().any(|part| part.p_type(endian) == PT_INTERP);
    // The dynamic linker may be run as a program.
    let is_linker = path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"ld"));
    (!has_interpreter && !is_linker).then(|| {
        "it is statically linked, so that the dynamic linker loads nothing into it. Link it dynamically (of CUDA's \
         runtime the static library is fine)"
            .to_owned()
    })
}

/// Returns what gives the program other rights than its user has.
fn privileges(path: &Path) -> Option<&'static str> {
    const SET_UID: u32 = 0o4000;
    const SET_GID: u32 = 0o2010;
    let found = fs::metadata(path).ok()?;
    let is_other_user = found.uid() != getuid().as_raw() && getuid() == geteuid();
    let is_other_group = found.gid() != getgid().as_raw() && getgid() == getegid();
    if found.mode() & SET_UID != 0 && is_other_user {
        return Some("setuid");
    }
    if found.mode() & SET_GID == SET_GID && is_other_group {
        return Some("setgid");
    }
    let mut value = [0_u8; 64];
    let has_capabilities = rustix::fs::getxattr(path, "security.capability", &mut value[..])
        .is_ok_and(|bytes| bytes > 0);
    (has_capabilities && !getuid().is_root()).then_some("given file capabilities")
}
