//! `cargo xtask library`: the shared library, its header and the Python module in one folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::{header, shell};

/// What programs link to and load.
pub const NAME: &str = "libvramp.so";

/// Builds for release and fills the folder.
pub fn run(root: &Path, out: &Path) -> Result<()> {
    fs::create_dir_all(out)?;
    copy(&build(root)?, &out.join(NAME))?;
    for file in [header::PATH, "python/vramp_torch.py"] {
        let from = root.join(file);
        let name = from.file_name().context("a file has a name")?;
        copy(&from, &out.join(name))?;
    }
    println!("{NAME}, its header and vramp_torch.py are in {}", out.display());
    Ok(())
}

/// Builds the library for release and tells where it is.
pub fn build(root: &Path) -> Result<PathBuf> {
    let messages = shell::output(Command::new("cargo").current_dir(root).args([
        "build",
        "-p",
        "vramp-capi",
        "--lib",
        "--release",
        "--locked",
        "--message-format=json-render-diagnostics",
    ]))?;
    let built = messages.lines().find_map(shared_object);
    built.context("cargo tells of no shared library of vramp-capi")
}

/// The library that one of cargo's messages tells of, if any.
fn shared_object(message: &str) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    let files = message["filenames"].as_array()?;
    let mut files = files.iter().filter_map(serde_json::Value::as_str);
    files.find(|file| file.ends_with("/libvramp_capi.so")).map(PathBuf::from)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shared_library_is_found_among_cargos_messages() {
        let message = r#"{"filenames":["/t/libvramp_capi.rlib","/t/libvramp_capi.so"]}"#;
        assert_eq!(shared_object(message), Some(PathBuf::from("/t/libvramp_capi.so")));
        assert_eq!(shared_object(r#"{"filenames":["/t/libvramp.rlib"]}"#), None);
        assert_eq!(shared_object(r#"{"reason":"build-finished"}"#), None);
    }
}
