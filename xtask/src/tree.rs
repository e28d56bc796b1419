//! The files of the project: what git tracks, and what it would.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::shell;

/// Texts by path, relative to the root, with forward slashes. A file that is no text is an empty
/// one.
#[derive(Debug, Default)]
pub struct Tree {
    files: BTreeMap<String, String>,
}

impl Tree {
    /// The files below `root` that git does not ignore.
    pub fn read(root: &Path) -> Result<Tree> {
        let listed = shell::output(
            Command::new("git")
                .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
                .current_dir(root),
        )?;
        let files = listed
            .split_terminator('\0')
            // A link is another name of a file that is read anyway.
            .filter(|path| root.join(path).symlink_metadata().is_ok_and(|data| data.is_file()))
            .map(|path| {
                let bytes = std::fs::read(root.join(path))?;
                Ok((path.to_owned(), String::from_utf8(bytes).unwrap_or_default()))
            })
            .collect::<Result<_>>()?;
        Ok(Tree { files })
    }

    /// Files made for a test.
    #[cfg(test)]
    pub fn of(files: &[(&str, &str)]) -> Tree {
        let own = |(path, text): &(&str, &str)| ((*path).to_owned(), (*text).to_owned());
        Tree { files: files.iter().map(own).collect() }
    }

    /// Every file whose path ends with `end`, in the order of paths.
    pub fn ending<'a>(&'a self, end: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files
            .iter()
            .filter(move |(path, _)| path.ends_with(end))
            .map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// The text of one file.
    pub fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(String::as_str)
    }

    /// True for a file, and for a folder that holds one.
    pub fn has(&self, path: &str) -> bool {
        let folder = format!("{}/", path.trim_end_matches('/'));
        path.is_empty()
            || self.files.contains_key(path)
            || self
                .files
                .range(folder.clone()..)
                .next()
                .is_some_and(|(f, _)| f.starts_with(&folder))
    }
}
