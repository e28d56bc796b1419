//! What `vramp exec` asks of this library: the variable `VRAMP_EXEC`.

use std::ffi::CStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The variable: pairs `key=value`, with `;` between them. In values `%XX` is a byte.
const VARIABLE: &str = "VRAMP_EXEC";

/// Frames of a stack where the settings do not say how many.
const DEFAULT_FRAMES: usize = 24;

/// What to do, read once for each process.
#[derive(Debug, Default)]
pub struct Settings {
    /// Folder for the recording.
    pub record: Option<PathBuf>,
    /// Frames of each recorded stack; 0 records none.
    pub frames: usize,
    /// Bytes that a device may give.
    pub limit: Option<u64>,
    pub pool: Option<PoolSettings>,
    /// The group of processes whose budgets the pool shares.
    pub group: Option<Group>,
    /// True if the program's memory can leave the card, and calls that use it wait meanwhile.
    pub is_sleepable: bool,
    /// Folder for what the process has to say at its end.
    pub report: Option<PathBuf>,
}

/// Processes that share a card by budgets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    pub directory: PathBuf,
    pub name: String,
    /// Bytes that the group shares; zero for [what is left for it](crate::sleep::capacity_of).
    pub capacity: u64,
    pub guaranteed: u64,
    pub priority: u32,
}

/// Where the pool is.
#[derive(Debug)]
pub struct PoolSettings {
    /// libvramp, or the native module of the Python package.
    pub library: PathBuf,
}

impl PoolSettings {
    /// Returns true if a loaded library of this name is the pool's.
    pub fn is_library(&self, name: &CStr) -> bool {
        let path = Path::new(std::ffi::OsStr::from_bytes(name.to_bytes()));
        path == self.library
            || is_python_module(path)
            || std::fs::canonicalize(path).is_ok_and(|path| path == self.library)
    }
}

/// Returns true for the native module of the Python package, which has a pool of its own: in a process that has loaded
/// it, all share that one.
pub fn is_python_module(path: &Path) -> bool {
    let is_native = path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"_native."));
    is_native && path.parent().and_then(Path::file_name).is_some_and(|folder| folder == "vramp")
}

/// Returns the settings. Without the variable they ask for nothing.
pub fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| match std::env::var_os(VARIABLE) {
        Some(text) => parse(text.as_bytes()).unwrap_or_else(|wrong| {
            crate::report::write_line(&format!(
                "vramp exec: {VARIABLE} has {wrong:?}, which this library does not know: the program and \
                 libvramp_preload.so are of different versions. Nothing is recorded, limited or pooled"
            ));
            Settings::default()
        }),
        None => Settings::default(),
    })
}

/// Returns true if there is something to do.
pub fn is_active() -> bool {
    let settings = settings();
    settings.record.is_some() || settings.limit.is_some() || settings.pool.is_some()
}

/// Returns the pair that cannot be read as the error.
fn parse(text: &[u8]) -> Result<Settings, String> {
    let mut settings = Settings { frames: DEFAULT_FRAMES, ..Settings::default() };
    let mut library = None;
    let mut is_pool = false;
    let mut group = Group::default();
    for pair in text.split(|&byte| byte == b';').filter(|pair| !pair.is_empty()) {
        let wrong = || String::from_utf8_lossy(pair).into_owned();
        let equals = pair.iter().position(|&byte| byte == b'=').ok_or_else(wrong)?;
        let value = decoded(&pair[equals + 1..]).ok_or_else(wrong)?;
        let number = || std::str::from_utf8(&value).ok()?.parse::<u64>().ok();
        let text = || String::from_utf8(value.clone()).map_err(|_| wrong());
        let path = || PathBuf::from(std::ffi::OsString::from_vec(value.clone()));
        match &pair[..equals] {
            b"record" => settings.record = Some(path()),
            b"stacks" => settings.frames = number().ok_or_else(wrong)?.min(64) as usize,
            b"limit" => settings.limit = Some(number().ok_or_else(wrong)?),
            b"pool" => is_pool = number().ok_or_else(wrong)? != 0,
            b"library" => library = Some(path()),
            b"group" => group.name = text()?,
            b"directory" => group.directory = path(),
            b"capacity" => group.capacity = number().ok_or_else(wrong)?,
            b"guaranteed" => group.guaranteed = number().ok_or_else(wrong)?,
            b"priority" => group.priority = number().ok_or_else(wrong)?.min(255) as u32,
            // Calls wait by code for this processor.
            b"sleepable" if cfg!(target_arch = "x86_64") => {
                settings.is_sleepable = number().ok_or_else(wrong)? != 0;
            }
            b"report" => settings.report = Some(path()),
            // A later version's command may say more than this one can do.
            _ => return Err(wrong()),
        }
    }
    if is_pool {
        let library = library.ok_or("pool without library")?;
        settings.pool = Some(PoolSettings { library });
    }
    settings.group = (!group.name.is_empty()).then_some(group);
    Ok(settings)
}

/// Replaces `%XX`. `None` if two hexadecimal digits do not follow a `%`.
fn decoded(text: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        if first == b'%' {
            let digits = std::str::from_utf8(tail.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &tail[2..];
        } else {
            bytes.push(first);
            rest = tail;
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_read_and_bytes_decoded() {
        let settings = parse(b"record=/tmp/a%3bb;stacks=8;limit=4096;pool=1;library=/lib/x.so;")
            .expect("valid");
        assert_eq!(settings.record.as_deref(), Some(Path::new("/tmp/a;b")));
        assert_eq!((settings.frames, settings.limit), (8, Some(4096)));
        assert_eq!(settings.pool.expect("a pool").library, Path::new("/lib/x.so"));
    }

    #[test]
    fn the_module_of_the_python_package_is_the_pool_too() {
        let pool = PoolSettings { library: PathBuf::from("/opt/lib/libvramp.so") };
        assert!(pool.is_library(c"/opt/lib/libvramp.so"));
        assert!(pool.is_library(c"/venv/lib/python3.12/site-packages/vramp/_native.abi3.so"));
        assert!(!pool.is_library(c"/venv/lib/python3.12/site-packages/torch/_native.abi3.so"));
        assert!(!pool.is_library(c"libcudart.so.13"));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (text, wrong) in [
            (&b"limit=x"[..], "limit=x"),
            (b"record=%4", "record=%4"),
            (b"later=1", "later=1"),
            (b"nothing", "nothing"),
            (b"pool=1", "pool without library"),
        ] {
            assert_eq!(parse(text).expect_err("invalid"), wrong);
        }
    }
}
