//! Rules about whole crates.

use super::{Finding, LAYERS, UNSAFE_CRATES};
use crate::tree::Tree;

/// The tests of the first also run on the second, which depends on it.
const TESTED_ON: [(&str, &str); 1] = [("vramp-alloc", "vramp-peers")];

/// A crate names only crates before it, in all its kinds of dependencies.
pub fn layer_order(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in crate_files(tree, "/Cargo.toml") {
        let name = path.split('/').nth(1).unwrap_or_default();
        let Some(layer) = LAYERS.iter().position(|known| *known == name) else {
            findings.push(Finding::new(path, None, "a crate without a layer: add it to the order"));
            continue;
        };
        let manifest: toml::Table = match text.parse() {
            Ok(manifest) => manifest,
            Err(error) => {
                findings.push(Finding::new(path, None, error.to_string()));
                continue;
            }
        };
        for (kind, dependency) in dependencies(&manifest) {
            let lower = LAYERS[..layer].contains(&dependency.as_str())
                || kind == TESTS && TESTED_ON.contains(&(name, &dependency));
            // A crate names itself to turn on features for its tests; cargo allows it only there.
            if dependency.starts_with("vramp") && !lower && dependency != name {
                let message =
                    format!("{name} may not depend on {dependency}, which is not below it");
                findings.push(Finding::new(path, None, message));
            }
        }
    }
    findings
}

/// Every crate but those of the fence forbids `unsafe`.
pub fn unsafe_fence(tree: &Tree) -> Vec<Finding> {
    let roots = crate_files(tree, "/src/lib.rs")
        .chain(crate_files(tree, "/src/main.rs"))
        .chain(tree.text("xtask/src/main.rs").map(|text| ("xtask/src/main.rs", text)));
    roots
        .filter(|(path, _)| {
            !UNSAFE_CRATES.iter().any(|name| path.starts_with(&format!("crates/{name}/")))
        })
        .filter(|(_, text)| !text.lines().any(|line| line == "#![forbid(unsafe_code)]"))
        .map(|(path, _)| Finding::new(path, None, "`#![forbid(unsafe_code)]` is missing"))
        .collect()
}

/// `crates/NAME` + `end`, for each crate.
fn crate_files<'a>(tree: &'a Tree, end: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    let depth = 1 + end.matches('/').count();
    tree.ending(end)
        .filter(move |(path, _)| path.starts_with("crates/") && path.matches('/').count() == depth)
}

/// The table of what only tests need.
const TESTS: &str = "dev-dependencies";

/// The names in every table of dependencies with the table's, those for one target too.
fn dependencies(manifest: &toml::Table) -> Vec<(&'static str, String)> {
    let kinds = ["dependencies", TESTS, "build-dependencies"];
    let targets = manifest.get("target").and_then(toml::Value::as_table);
    let tables =
        targets.into_iter().flat_map(|targets| targets.values()).filter_map(|t| t.as_table());
    std::iter::once(manifest)
        .chain(tables)
        .flat_map(|table| kinds.map(|kind| (kind, table.get(kind).and_then(|it| it.as_table()))))
        .flat_map(|(kind, table)| table.into_iter().flatten().map(move |entry| (kind, entry)))
        .map(|(kind, (name, value))| {
            // A renamed dependency is still the one in `package`.
            let package = value.get("package").and_then(toml::Value::as_str);
            (kind, package.unwrap_or(name).to_owned())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order_of(name: &str, manifest: &str) -> Vec<String> {
        let path = format!("crates/{name}/Cargo.toml");
        let tree = Tree::of(&[(&path, manifest)]);
        layer_order(&tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_crate_that_names_one_above_it_is_found_in_every_kind_of_table() {
        for planted in [
            "[dependencies]\nvramp-cuda.workspace = true",
            "[dev-dependencies]\nvramp-trace.workspace = true",
            "[build-dependencies]\nvramp = '1'",
            "[target.'cfg(unix)'.dependencies]\nvramp = '1'",
            "[dependencies]\nother = { package = 'vramp' }",
            "[dependencies]\nvramp-alloc = '1'",
        ] {
            assert_eq!(order_of("vramp-driver", planted).len(), 1, "{planted}");
        }
        for allowed in [
            "[dependencies]\nvramp-core = '1'\nserde = '1'",
            "[dev-dependencies]\nvramp-driver = { path = '.', features = ['sim'] }",
        ] {
            assert!(order_of("vramp-driver", allowed).is_empty(), "{allowed}");
        }
    }

    #[test]
    fn only_tests_run_on_what_depends_on_the_crate() {
        assert!(order_of("vramp-alloc", "[dev-dependencies]\nvramp-peers = '1'").is_empty());
        assert_eq!(order_of("vramp-alloc", "[dependencies]\nvramp-peers = '1'").len(), 1);
    }

    #[test]
    fn a_crate_without_a_layer_is_found() {
        assert_eq!(order_of("vramp-extra", "").len(), 1);
    }

    #[test]
    fn a_crate_that_does_not_forbid_unsafe_code_is_found() {
        let tree = Tree::of(&[
            ("crates/vramp/src/lib.rs", "//! No fence.\n"),
            ("crates/vramp-core/src/lib.rs", "#![forbid(unsafe_code)]\n"),
            ("crates/vramp-cuda/src/lib.rs", "//! May.\n"),
            ("xtask/src/main.rs", "//! No fence.\n"),
        ]);
        let found = unsafe_fence(&tree);
        let paths: Vec<&str> = found.iter().map(|finding| finding.path.as_str()).collect();
        assert_eq!(paths, ["crates/vramp/src/lib.rs", "xtask/src/main.rs"]);
    }
}
