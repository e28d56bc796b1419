//! The variables of the environment that say what the library in front of the driver does.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use anyhow::{Result, bail};
use vramp::Bytes;

use super::Folders;
use super::args::Exec;
use super::find::{POOL, PRELOAD};
use crate::budgets::default_directory;

/// What the library does: pairs `key=value` with `;` between them.
const SETTINGS: &str = "VRAMP_EXEC";
/// Options of the pool.
const OPTIONS: &str = "VRAMP_CONF";
const LD_PRELOAD: &str = "LD_PRELOAD";

/// Variables with their values.
pub(super) type Variables = Vec<(&'static str, OsString)>;

/// Returns the variables of the program that differ from this process's.
///
/// # Errors
/// A library is not found, or its path cannot be written in a variable.
pub(super) fn variables(args: &Exec, folders: &Folders) -> Result<Variables> {
    let library = PRELOAD.find()?;
    let has_separator = library.as_os_str().as_bytes().iter().any(|byte| b" :".contains(byte));
    if has_separator {
        bail!(
            "the dynamic linker cannot load '{}', whose path has a space or a colon: copy it, and name the copy in \
             {}",
            library.display(),
            PRELOAD.variable
        );
    }
    let mut settings = Settings::default();
    settings.add("report", folders.reports.path().as_os_str());
    if let Some(folder) = &folders.records {
        settings.add("record", folder.path().as_os_str());
        settings.add("stacks", OsStr::new(&args.stacks.to_string()));
    }
    if let Some(limit) = args.limit {
        settings.add("limit", OsStr::new(&limit.count().to_string()));
    }
    if args.pool {
        settings.add("pool", OsStr::new("1"));
        settings.add("library", POOL.find()?.as_os_str());
        group(args, &mut settings)?;
    }
    let mut variables = vec![
        (SETTINGS, settings.0),
        (LD_PRELOAD, in_front(library.as_os_str(), env::var_os(LD_PRELOAD))),
    ];
    variables.extend(options(args, env::var(OPTIONS).ok()).map(|text| (OPTIONS, text.into())));
    Ok(variables)
}

/// Adds the group, if the program is in one.
fn group(args: &Exec, settings: &mut Settings) -> Result<()> {
    let name = args.group.as_deref().or(args.sleepable.then_some("exec"));
    let Some(name) = name else {
        if args.capacity.is_some() || args.guaranteed.is_some() || args.priority != 0 {
            bail!("--capacity, --guaranteed and --priority are of a group: give --group NAME");
        }
        return Ok(());
    };
    if name.is_empty() {
        bail!("--group needs a name");
    }
    settings.add("group", OsStr::new(name));
    settings.add("directory", default_directory()?.as_os_str());
    let amount = |bytes: Option<Bytes>| bytes.unwrap_or_default().count().to_string();
    settings.add("capacity", OsStr::new(&amount(args.capacity)));
    settings.add("guaranteed", OsStr::new(&amount(args.guaranteed)));
    settings.add("priority", OsStr::new(&args.priority.to_string()));
    if args.sleepable {
        settings.add("sleepable", OsStr::new("1"));
    }
    Ok(())
}

#[derive(Default)]
struct Settings(OsString);

impl Settings {
    fn add(&mut self, key: &str, value: &OsStr) {
        let mut text = std::mem::take(&mut self.0).into_vec();
        if !text.is_empty() {
            text.push(b';');
        }
        text.extend_from_slice(key.as_bytes());
        text.push(b'=');
        for &byte in value.as_bytes() {
            match byte {
                b'%' | b';' | b'\n' => text.extend_from_slice(format!("%{byte:02X}").as_bytes()),
                byte => text.push(byte),
            }
        }
        self.0 = OsString::from_vec(text);
    }
}

/// Returns the libraries to preload: this one first, then those of the user, each once.
fn in_front(library: &OsStr, others: Option<OsString>) -> OsString {
    let others = others.unwrap_or_default();
    let others = others.as_bytes().split(|byte| b" :".contains(byte));
    let others = others.filter(|path| !path.is_empty() && *path != library.as_bytes());
    let all: Vec<&[u8]> = std::iter::once(library.as_bytes()).chain(others).collect();
    OsString::from_vec(all.join(&b':'))
}

/// Returns the options of the pool: those of the user's variable, and those of the command line.
fn options(args: &Exec, others: Option<String>) -> Option<String> {
    let preset = args.preset.map(|preset| format!("preset={}", preset.name()));
    // What the pool keeps counts too, not only what the program requests.
    let limit = args.limit.filter(|_| args.pool).map(|limit| format!("limit={}", limit.count()));
    let given: Vec<&String> = preset.iter().chain(&limit).chain(&args.option).collect();
    (!given.is_empty()).then(|| joined(&given, &others.unwrap_or_default()))
}

/// Returns options in one text. Those of `given` replace others of their names, also where this program runs under
/// `vramp exec` itself.
fn joined(given: &[&String], others: &str) -> String {
    fn name(option: &str) -> &str {
        option.split('=').next().unwrap_or_default().trim()
    }
    let is_given = |option: &str| given.iter().any(|given| name(given) == name(option));
    let mut depth = 0;
    let others = others.split(|c| {
        depth += i32::from(c == '[') - i32::from(c == ']');
        c == ',' && depth <= 0
    });
    let others = others.filter(|option| !option.trim().is_empty() && !is_given(option));
    let all: Vec<&str> = others.chain(given.iter().map(|option| option.as_str())).collect();
    all.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_would_end_a_pair_are_escaped() {
        let mut settings = Settings::default();
        settings.add("record", OsStr::new("/a;b%c\nd"));
        settings.add("limit", OsStr::new("5"));
        assert_eq!(settings.0, "record=/a%3Bb%25c%0Ad;limit=5");
    }

    #[test]
    fn libraries_that_are_preloaded_already_stay_behind() {
        let library = OsStr::new("/lib/libvramp_preload.so");
        for (others, expected) in [
            (None, "/lib/libvramp_preload.so"),
            (Some(""), "/lib/libvramp_preload.so"),
            (Some("a.so b.so:c.so"), "/lib/libvramp_preload.so:a.so:b.so:c.so"),
            (Some("a.so:/lib/libvramp_preload.so"), "/lib/libvramp_preload.so:a.so"),
        ] {
            assert_eq!(in_front(library, others.map(OsString::from)), expected);
        }
    }

    #[test]
    fn options_that_are_given_replace_others_of_their_names() {
        let given = ["limit=1GiB".to_owned(), "preset=vramp".to_owned()];
        let given: Vec<&String> = given.iter().collect();
        for (others, expected) in [
            ("", "limit=1GiB,preset=vramp"),
            (" , ", "limit=1GiB,preset=vramp"),
            ("limit=2GiB", "limit=1GiB,preset=vramp"),
            ("ipc=off, limit = 2GiB,peers=[0,1]", "ipc=off,peers=[0,1],limit=1GiB,preset=vramp"),
        ] {
            assert_eq!(joined(&given, others), expected, "{others:?}");
        }
    }
}
