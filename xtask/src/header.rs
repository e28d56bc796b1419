//! `cargo xtask header`: writes `vramp.h` from the sources of `vramp-capi`.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result};

/// The header, relative to the root. `python/vramp/include/vramp.h` is a link to it: the Python package compiles
/// against it, and wheels have its contents.
pub const PATH: &str = "crates/vramp-capi/include/vramp.h";

/// The headers for C++, written by hand, relative to the root.
pub const CPP_PATH: &str = "crates/vramp-capi/include/vramp.hpp";
pub const HOST_PATH: &str = "crates/vramp-capi/include/vramp/host.hpp";
pub const RMM_PATH: &str = "crates/vramp-capi/include/vramp/rmm.hpp";

/// Sources of the functions and types of the header, in its order. Modules of a source are read with it.
const SOURCES: [&str; 25] = [
    "src/abi.rs",
    "src/interface.rs",
    "src/queries.rs",
    "src/graphs.rs",
    "src/sharing.rs",
    "src/tiers/abi.rs",
    "src/tiers.rs",
    "src/tiers/spaces.rs",
    "src/tiers/reservations.rs",
    "src/tiers/paying.rs",
    "src/tiers/buffers.rs",
    "src/tiers/leases.rs",
    "src/tiers/observing.rs",
    "src/sleep/abi.rs",
    "src/sleep.rs",
    "src/sleep/callbacks.rs",
    "src/kv/abi.rs",
    "src/kv.rs",
    "src/host.rs",
    "src/budget/abi.rs",
    "src/budget.rs",
    "src/kept/abi.rs",
    "src/kept.rs",
    "src/kept/locks.rs",
    "src/torch/mod.rs",
];

/// Writes the header anew.
pub fn write(root: &Path) -> Result<()> {
    let path = root.join(PATH);
    std::fs::write(&path, generate(root)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}

/// What to do if the header is not as the sources would have it.
pub fn difference(root: &Path) -> Result<Option<String>> {
    let header = generate(root)?;
    let written = std::fs::read_to_string(root.join(PATH)).unwrap_or_default();
    let message = "the header is not as the sources say: run `cargo xtask header`";
    Ok((written != header).then(|| message.to_owned()))
}

fn generate(root: &Path) -> Result<String> {
    let own = root.join("crates/vramp-capi");
    let config = cbindgen::Config::from_file(own.join("cbindgen.toml"));
    let mut config = config.map_err(anyhow::Error::msg).context("cannot read cbindgen.toml")?;
    config.after_includes = Some(Version::read(root)?.macros());
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(own.join(source));
    }
    let bindings = builder.generate().context("the sources of vramp-capi cannot be read")?;
    let mut header = Vec::new();
    bindings.write(&mut header);
    // The heading that clippy asks for says nothing to a C programmer.
    let header =
        String::from_utf8(header)?.replace("// # Safety\n", "// What the caller promises:\n");
    Ok(for_c89(&header))
}

/// Rewrites what C89 does not have: comments of one line, and the comma after the last name of an enum.
fn for_c89(header: &str) -> String {
    let lines: Vec<&str> = header.lines().collect();
    let comment = |nth: usize| lines.get(nth).and_then(|line| comment_of(line));
    let mut text = String::new();
    for (nth, &line) in lines.iter().enumerate() {
        let before = nth.checked_sub(1).and_then(comment);
        let next = comment(nth + 1);
        match comment(nth) {
            Some((indent, words)) => match (before.is_some(), next.is_some()) {
                (false, false) => text += &format!("{indent}/* {words} */"),
                (false, true) => text += format!("{indent}/*\n{indent} * {words}").trim_end(),
                (true, true) => text += format!("{indent} * {words}").trim_end(),
                (true, false) => text += &format!("{indent} * {words}\n{indent} */"),
            },
            None => {
                let code = line.split("//").next().unwrap_or(line).trim_end();
                let is_last = lines.get(nth + 1).is_some_and(|next| next.starts_with("} "));
                text += code.strip_suffix(',').filter(|_| is_last).unwrap_or(code);
            }
        }
        text.push('\n');
    }
    text
}

/// The indentation and the words of a line that is a comment.
fn comment_of(line: &str) -> Option<(&str, &str)> {
    let (indent, words) = line.split_once("//")?;
    indent.trim().is_empty().then(|| (indent, words.trim()))
}

/// The version of the workspace, which is that of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl Version {
    /// Reads the version from the manifest of the workspace.
    pub fn read(root: &Path) -> Result<Version> {
        let manifest: toml::Table = std::fs::read_to_string(root.join("Cargo.toml"))?.parse()?;
        let text = manifest["workspace"]["package"]["version"].as_str();
        let text = text.context("the workspace has no version")?;
        Version::parse(text).with_context(|| {
            format!("the version {text} is not of the form 1.2.3 with parts below 1000")
        })
    }

    fn parse(text: &str) -> Option<Version> {
        let parts: Option<Vec<u32>> = text.split('.').map(|part| part.parse().ok()).collect();
        match parts?.as_slice() {
            &[major, minor, patch] if minor < 1000 && patch < 1000 && major < 4000 => {
                Some(Version { major, minor, patch })
            }
            _ => None,
        }
    }

    /// The part of the version within which the ABI only grows, as in the name by which programs
    /// find the library: the major version, and before 1.0 the minor version too.
    pub fn abi(self) -> String {
        match self.major {
            0 => format!("0.{}", self.minor),
            major => major.to_string(),
        }
    }

    fn macros(self) -> String {
        let Version { major, minor, patch } = self;
        format!(
            "
// Version of this header. VRAMP_VERSION is major * 1000000 + minor * 1000 + patch.
// vramp_check_version(VRAMP_VERSION) checks the library that was loaded.
#define VRAMP_VERSION_MAJOR {major}
#define VRAMP_VERSION_MINOR {minor}
#define VRAMP_VERSION_PATCH {patch}
#define VRAMP_VERSION {}
#define VRAMP_VERSION_STRING \"{self}\"",
            major * 1_000_000 + minor * 1_000 + patch
        )
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_three_numbers_and_an_abi() {
        let version = Version::parse("0.12.3").unwrap();
        assert_eq!((version.abi().as_str(), version.to_string().as_str()), ("0.12", "0.12.3"));
        assert!(version.macros().contains("#define VRAMP_VERSION 12003\n"));
        assert_eq!(Version::parse("2.0.1").unwrap().abi(), "2");
        for wrong in ["", "1", "1.2", "1.2.3.4", "1.2.x", "1.1000.0", "1.2.3-beta"] {
            assert_eq!(Version::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_only_newer_c_allows_is_rewritten() {
        let written = "// One.\ntypedef enum {\n  // Two,\n  //\n  // three.\n  A = 0,\n  B = 1,\n} \
                       c_t;\nvoid f(int a,\n       int b);\n#endif // __cplusplus\n";
        let expected = "/* One. */\ntypedef enum {\n  /*\n   * Two,\n   *\n   * three.\n   */\n  \
                        A = 0,\n  B = 1\n} c_t;\nvoid f(int a,\n       int b);\n#endif\n";
        assert_eq!(for_c89(written), expected);
    }
}
