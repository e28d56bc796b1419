//! Rules about the inside of `vramp-core`: only `pool/state/` changes a pool, and the files of the
//! pool and the heap depend on each other in one direction.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::Finding;
use crate::tree::Tree;

const ROOT: &str = "crates/vramp-core/src/";
/// Folders whose files may not import each other in a circle.
const ONE_WAY: [&str; 2] = ["pool/", "heap/"];
/// The folder that changes the pool. Its files are one module with private fields.
const WRITER: &str = "pool/state/";

/// Sources of the core by path within its `src`.
fn core_files(tree: &Tree) -> BTreeMap<&str, syn::File> {
    tree.ending(".rs")
        .filter_map(|(path, text)| Some((path.strip_prefix(ROOT)?, syn::parse_file(text).ok()?)))
        .collect()
}

/// No file outside of `pool/state/` can change a pool: its fields are private to that folder, no
/// other file has a method of `Pool` that takes `&mut self`, and no file of the pool takes
/// `&mut Pool`.
pub fn pool_is_closed(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in core_files(tree) {
        let mut scan = Mutations { path, findings: Vec::new() };
        scan.visit_file(&file);
        findings.append(&mut scan.findings);
    }
    findings
}

struct Mutations<'a> {
    path: &'a str,
    findings: Vec<Finding>,
}

impl Mutations<'_> {
    fn find(&mut self, span: proc_macro2::Span, message: &str) {
        let path = format!("{ROOT}{}", self.path);
        self.findings.push(Finding::new(&path, span.start().line, message));
    }

    fn may_write(&self) -> bool {
        self.path.starts_with(WRITER)
    }
}

fn is_pool(ty: &syn::Type) -> bool {
    matches!(ty, syn::Type::Path(ty)
        if ty.path.segments.last().is_some_and(|last| last.ident == "Pool"))
}

impl<'ast> Visit<'ast> for Mutations<'_> {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        if item.ident == "Pool" {
            for field in &item.fields {
                if !matches!(field.vis, syn::Visibility::Inherited) {
                    let span = field.ident.as_ref().map_or(item.ident.span(), |name| name.span());
                    self.find(span, "a field of Pool is open: make it private to pool/state/");
                }
            }
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if is_pool(&item.self_ty) && !self.may_write() {
            for part in &item.items {
                if let syn::ImplItem::Fn(method) = part
                    && let Some(receiver) = method.sig.receiver()
                    && receiver.mutability.is_some()
                {
                    self.find(method.sig.ident.span(), "changes a pool outside of pool/state/");
                }
            }
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_type_reference(&mut self, reference: &'ast syn::TypeReference) {
        let in_pool = self.path.starts_with("pool/") && !self.may_write();
        if reference.mutability.is_some() && is_pool(&reference.elem) && in_pool {
            let span = reference.and_token.spans[0];
            self.find(span, "takes `&mut Pool` outside of pool/state/: return a plan instead");
        }
        visit::visit_type_reference(self, reference);
    }
}

/// The files of the pool and the heap import each other in one direction.
pub fn imports_form_no_circle(tree: &Tree) -> Vec<Finding> {
    let files = core_files(tree);
    let by_module: BTreeMap<Vec<String>, &str> =
        files.keys().map(|&path| (module_of(path), path)).collect();
    let mut imports: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (&path, file) in &files {
        if !ONE_WAY.iter().any(|folder| path.starts_with(folder)) {
            continue;
        }
        let mut scan =
            Imports { module: module_of(path), by_module: &by_module, found: BTreeSet::new() };
        scan.visit_file(file);
        scan.found.remove(path);
        imports.insert(path, scan.found);
    }
    // What imports nothing that is left is part of no circle.
    loop {
        let left: BTreeSet<&str> = imports.keys().copied().collect();
        imports.retain(|_, found| found.iter().any(|found| left.contains(found)));
        if imports.len() == left.len() {
            break;
        }
    }
    let Some(&start) = imports.keys().next() else { return Vec::new() };
    let mut circle = vec![start];
    while let Some(next) =
        imports[circle[circle.len() - 1]].iter().find(|&f| imports.contains_key(f))
    {
        if let Some(first) = circle.iter().position(|file| file == next) {
            circle.drain(..first);
            break;
        }
        circle.push(next);
    }
    let message = format!("these files import each other in a circle: {}", circle.join(" -> "));
    vec![Finding::new(&format!("{ROOT}{}", circle[0]), None, message)]
}

/// `pool/plan/mod.rs` is `pool::plan`, `pool/view.rs` is `pool::view`.
fn module_of(path: &str) -> Vec<String> {
    let path = path.trim_end_matches(".rs");
    let path = path.strip_suffix("/mod").unwrap_or(path);
    path.split('/').filter(|part| *part != "lib").map(str::to_owned).collect()
}

struct Imports<'a> {
    module: Vec<String>,
    by_module: &'a BTreeMap<Vec<String>, &'a str>,
    found: BTreeSet<&'a str>,
}

impl Imports<'_> {
    /// Notes the file that a path leads to: that of its longest part that is a module.
    fn note(&mut self, path: &[String]) {
        let mut names = match path.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("self") => self.module.clone(),
            Some("super") => self.module[..self.module.len().saturating_sub(1)].to_vec(),
            _ => [&self.module[..], &path[..1]].concat(),
        };
        names.extend(path.iter().skip(1).cloned());
        while !names.is_empty() {
            if let Some(file) = self.by_module.get(&names) {
                self.found.insert(file);
                return;
            }
            names.pop();
        }
    }

    fn imported(&mut self, before: &[String], tree: &syn::UseTree) {
        let longer = |name: String| [before, &[name]].concat();
        match tree {
            syn::UseTree::Path(path) => self.imported(&longer(path.ident.to_string()), &path.tree),
            syn::UseTree::Name(name) => self.note(&longer(name.ident.to_string())),
            syn::UseTree::Rename(name) => self.note(&longer(name.ident.to_string())),
            syn::UseTree::Glob(_) => self.note(before),
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.imported(before, tree));
            }
        }
    }
}

impl<'ast> Visit<'ast> for Imports<'_> {
    fn visit_item_mod(&mut self, _: &'ast syn::ItemMod) {}

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.imported(&[], &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|part| part.ident.to_string()).collect();
        if ["crate", "super"].contains(&names[0].as_str()) {
            self.note(&names);
        }
        visit::visit_path(self, path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> Tree {
        let files: Vec<(String, &str)> =
            files.iter().map(|(path, text)| (format!("{ROOT}{path}"), *text)).collect();
        let files: Vec<(&str, &str)> =
            files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        Tree::of(&files)
    }

    fn paths(findings: &[Finding]) -> Vec<&str> {
        findings.iter().map(|finding| finding.path.trim_start_matches(ROOT)).collect()
    }

    #[test]
    fn a_pool_that_is_open_or_changed_elsewhere_is_found() {
        let planted = tree(&[
            ("pool/state/mod.rs", "pub struct Pool { pub(crate) open: u32, closed: u32 }"),
            ("pool/state/free.rs", "impl Pool { fn change(&mut self) {} }"),
            ("pool/plan/build.rs", "impl Pool { fn change(&mut self) {} fn look(&self) {} }"),
            ("pool/plan/sites.rs", "fn change(pool: &mut Pool) {} fn look(pool: &Pool) {}"),
            ("heap/shed.rs", "fn shed(pool: &mut Pool) {}"),
        ]);
        let found = pool_is_closed(&planted);
        assert_eq!(
            paths(&found),
            ["pool/plan/build.rs", "pool/plan/sites.rs", "pool/state/mod.rs"]
        );
    }

    #[test]
    fn a_circle_of_imports_is_found_and_named() {
        let planted = tree(&[
            ("lib.rs", "mod pool; mod heap;"),
            ("pool/mod.rs", "mod view; mod state; pub use state::Pool;"),
            ("pool/view.rs", "use crate::heap::Slab;"),
            ("pool/state.rs", "use crate::pool::view::View;"),
            ("heap/mod.rs", "fn shed(pool: &crate::pool::Pool) {}"),
        ]);
        let found = imports_form_no_circle(&planted);
        assert_eq!(paths(&found), ["heap/mod.rs"]);
        let circle = "heap/mod.rs -> pool/mod.rs -> pool/state.rs -> pool/view.rs";
        assert!(found[0].message.ends_with(circle), "{}", found[0].message);
    }

    #[test]
    fn imports_in_one_direction_pass() {
        let clean = tree(&[
            ("pool/mod.rs", "mod view; mod state; pub use state::Pool;"),
            ("pool/view.rs", "pub(in crate::pool) struct View;"),
            ("pool/state.rs", "use super::view::View; #[cfg(test)] mod tests { use super::*; }"),
            ("heap/mod.rs", "use crate::pool::Pool; use crate::Bytes;"),
        ]);
        assert!(imports_form_no_circle(&clean).is_empty());
    }
}
