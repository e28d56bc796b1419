//! Where the program and the libraries are.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use rustix::fs::{Access, access};

use crate::exit::Unstartable;

/// A library that the program is run with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library {
    pub variable: &'static str,
    pub what: &'static str,
    pub names: &'static [&'static str],
}

/// The library in front of the driver.
pub(super) const PRELOAD: Library = Library {
    variable: "VRAMP_PRELOAD_LIBRARY",
    what: "the library that vramp exec puts in front of the CUDA driver",
    names: &["libvramp_preload.so"],
};

/// The library of the pool.
pub(super) const POOL: Library = Library {
    variable: "VRAMP_LIBRARY",
    what: "the library of the pool",
    names: &["libvramp.so", "libvramp_capi.so"],
};

impl Library {
    /// Returns its path: that of the variable, or else the first that exists of those beside this program,
    /// and in `../lib` and `../lib/vramp` from there.
    ///
    /// # Errors
    /// It is at none of these places, which the error names.
    pub fn find(&self) -> Result<PathBuf> {
        let named = env::var_os(self.variable).filter(|path| !path.is_empty()).map(PathBuf::from);
        let places = match &named {
            Some(path) => vec![path.clone()],
            None => self.places(),
        };
        let found = places.iter().find_map(|path| fs::canonicalize(path).ok());
        if let Some(path) = found.filter(|path| path.is_file()) {
            return Ok(path);
        }
        let places: Vec<_> = places.iter().map(|path| path.display().to_string()).collect();
        let origin = if named.is_some() { format!(" ({})", self.variable) } else { String::new() };
        bail!(
            "{} is not at {}{origin}: build it with cargo build --release -p vramp-preload -p vramp-capi, or say \
             where it is with {}=PATH",
            self.what,
            places.join(", nor at "),
            self.variable
        )
    }

    fn places(&self) -> Vec<PathBuf> {
        // A symbolic link to the program leads to where it is installed.
        let program = env::current_exe().and_then(fs::canonicalize).unwrap_or_default();
        let beside = program.parent().unwrap_or(Path::new("."));
        let lib = beside.parent().unwrap_or(beside).join("lib");
        let folders = [beside.to_owned(), lib.clone(), lib.join("vramp")];
        let in_folder =
            |folder: &PathBuf| self.names.iter().map(|name| folder.join(name)).collect::<Vec<_>>();
        folders.iter().flat_map(in_folder).collect()
    }
}

/// Returns the path of a program as the shell finds it.
///
/// # Errors
/// [`Unstartable`] with 127 if there is none, and with 126 if it is not executable.
pub(super) fn program(command: &[OsString]) -> Result<PathBuf> {
    let name = command.first().map_or(OsStr::new(""), |name| name);
    let shown = || name.to_string_lossy().into_owned();
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        return match executable(&path) {
            Ok(()) => Ok(path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Unstartable::missing(format!("{}: no such file", shown())).into())
            }
            Err(error) => {
                Err(Unstartable::refused(format!("{} cannot be run: {error}", shown())).into())
            }
        };
    }
    let folders = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut refused = None;
    for folder in env::split_paths(&folders).filter(|_| !name.is_empty()) {
        // An empty folder is the current one.
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { &folder };
        let path = folder.join(name);
        match executable(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                refused.get_or_insert((path, error));
            }
            Err(_) => {}
        }
    }
    let error = match refused {
        Some((path, error)) => {
            Unstartable::refused(format!("{} cannot be run: {error}", path.display()))
        }
        None if name.as_bytes().starts_with(b"-") => Unstartable::missing(format!(
            "there is no option {0} and no program of this name: see vramp exec --help; a program whose name begins \
             with a dash is ./{0}",
            shown()
        )),
        None => {
            Unstartable::missing(format!("there is no program {} in the folders of PATH", shown()))
        }
    };
    Err(error.into())
}

fn executable(path: &Path) -> io::Result<()> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(access(path, Access::EXEC_OK)?)
}
