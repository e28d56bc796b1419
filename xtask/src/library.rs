//! `cargo xtask library`: the shared library and its header in one folder.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::header::{self, Version};
use crate::shell;

/// What programs link to and load.
pub const NAME: &str = "libvramp.so";

/// Builds for release and fills the folder.
pub fn run(root: &Path, out: &Path) -> Result<()> {
    fs::create_dir_all(out)?;
    copy(&build(root, "release")?.shared, &out.join(NAME))?;
    let header = root.join(header::PATH);
    copy(&header, &out.join(header.file_name().context("a file has a name")?))?;
    // The name by which programs that were linked to it find it.
    let link = out.join(soname(Version::read(root)?));
    if link.symlink_metadata().is_ok() {
        fs::remove_file(&link)?;
    }
    symlink(NAME, &link)?;
    println!("{NAME} and its header are in {}", out.display());
    Ok(())
}

/// Returns the name by which programs find the library when they start: that of its ABI.
pub fn soname(version: Version) -> String {
    format!("{NAME}.{}", version.abi())
}

/// The libraries that cargo built.
pub struct Built {
    /// The shared library.
    pub shared: PathBuf,
    /// The archive, with the symbols of all its parts.
    pub archive: PathBuf,
}

/// Builds the libraries with a profile of cargo.
pub fn build(root: &Path, profile: &str) -> Result<Built> {
    let soname = soname(Version::read(root)?);
    let mut cargo = Command::new("cargo");
    cargo.current_dir(root).args(["rustc", "-p", "vramp-capi", "--lib", "--locked"]);
    cargo.args(["--profile", profile, "--crate-type", "cdylib,staticlib"]);
    // The build script passes it on to the linker.
    cargo.env("VRAMP_SONAME", &soname);
    let messages = shell::output(cargo.arg("--message-format=json-render-diagnostics"))?;
    let built = messages.lines().find_map(built).context("cargo names no library of vramp-capi")?;
    let dynamic = shell::output(Command::new("readelf").args(["-W", "-d"]).arg(&built.shared))?;
    ensure!(
        dynamic.contains(&format!("soname: [{soname}]")),
        "{} does not have the soname {soname}: run `cargo clean -p vramp-capi` and repeat",
        built.shared.display()
    );
    Ok(built)
}

/// The libraries that one of cargo's messages names, if any.
fn built(message: &str) -> Option<Built> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    let files = message["filenames"].as_array()?;
    let file = |end: &str| {
        let mut files = files.iter().filter_map(serde_json::Value::as_str);
        files.find(|file| file.ends_with(end)).map(PathBuf::from)
    };
    Some(Built { shared: file("/libvramp_capi.so")?, archive: file("/libvramp_capi.a")? })
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
    fn the_libraries_are_found_among_cargos_messages() {
        let found = built(r#"{"filenames":["/t/libvramp_capi.so","/t/libvramp_capi.a"]}"#).unwrap();
        assert_eq!(found.shared, Path::new("/t/libvramp_capi.so"));
        assert_eq!(found.archive, Path::new("/t/libvramp_capi.a"));
        assert!(built(r#"{"filenames":["/t/libvramp_capi.rlib"]}"#).is_none());
        assert!(built(r#"{"reason":"build-finished"}"#).is_none());
    }
}
