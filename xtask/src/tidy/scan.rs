//! What the rules need to know of each Rust source, read with a real parser.

use std::collections::BTreeSet;

use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Meta};

use super::{Finding, GENERATED};
use crate::tree::Tree;

/// Something a source names.
#[derive(Debug)]
pub struct Use {
    /// `std::env::var`, `println!`, `.unwrap()` or `#[ignore]`.
    pub what: String,
    pub line: usize,
    /// Inside a test, or a module only built for tests.
    pub in_test: bool,
}

#[derive(Debug)]
pub struct Function {
    pub name: String,
    pub line: usize,
    pub lines: usize,
}

/// One source.
#[derive(Debug)]
pub struct Source {
    pub path: String,
    pub uses: Vec<Use>,
    pub functions: Vec<Function>,
    /// Public structs, enums, unions, traits and type aliases, each with its line.
    pub public_types: Vec<(String, usize)>,
}

/// Syntax of each source that was not generated, by path.
pub type Parsed<'a> = Vec<(&'a str, syn::File)>;

/// Parses the sources. One that no parser understands is a finding.
pub fn parse(tree: &Tree) -> (Parsed<'_>, Vec<Finding>) {
    let mut findings = Vec::new();
    let mut parsed = Vec::new();
    for (path, text) in tree.ending(".rs").filter(|(path, _)| !GENERATED.contains(path)) {
        match syn::parse_file(text) {
            Ok(file) => parsed.push((path, file)),
            Err(error) => {
                let line = error.span().start().line;
                findings.push(Finding::new(path, line, format!("cannot be parsed: {error}")));
            }
        }
    }
    (parsed, findings)
}

/// Every source that was not generated.
#[derive(Debug)]
pub struct Sources(Vec<Source>);

impl Sources {
    /// Parses the tree and scans it.
    #[cfg(test)]
    pub fn scan(tree: &Tree) -> (Sources, Vec<Finding>) {
        let (parsed, findings) = parse(tree);
        (Sources::of(&parsed), findings)
    }

    /// Scans what was parsed.
    pub fn of(parsed: &Parsed<'_>) -> Sources {
        let test_files: BTreeSet<String> =
            parsed.iter().flat_map(|(path, file)| test_modules(path, file)).collect();
        let sources = parsed.iter().map(|(path, file)| {
            let mut scan = Scan::default();
            if test_files.contains(*path) || in_test_folder(path) {
                scan.depth_in_tests = 1;
            }
            scan.visit_file(file);
            Source {
                path: (*path).to_owned(),
                uses: scan.uses,
                functions: scan.functions,
                public_types: scan.public_types,
            }
        });
        Sources(sources.collect())
    }

    pub fn iter(&self) -> impl Iterator<Item = &Source> {
        self.0.iter()
    }
}

/// Tests, examples and benchmarks have folders of their own.
fn in_test_folder(path: &str) -> bool {
    path.split('/').any(|part| ["tests", "examples", "benches", "fuzz"].contains(&part))
}

/// The files of modules that `file` declares for tests only.
pub fn test_modules(path: &str, file: &syn::File) -> Vec<String> {
    let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
    let own = match name {
        "lib.rs" | "main.rs" | "mod.rs" => folder.to_owned(),
        _ => format!("{folder}/{}", name.trim_end_matches(".rs")),
    };
    file.items
        .iter()
        .filter_map(|item| match item {
            syn::Item::Mod(module) if module.content.is_none() && is_test(&module.attrs) => {
                Some(module.ident.to_string())
            }
            _ => None,
        })
        .flat_map(|module| [format!("{own}/{module}.rs"), format!("{own}/{module}/mod.rs")])
        .collect()
}

/// True for `#[test]` and for `#[cfg(test)]`, alone or within `all`.
pub(super) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string();
            condition == "test" || condition.starts_with("all (test")
        }
        _ => false,
    })
}

#[derive(Default)]
struct Scan {
    depth_in_tests: usize,
    uses: Vec<Use>,
    functions: Vec<Function>,
    public_types: Vec<(String, usize)>,
}

impl Scan {
    fn note(&mut self, what: String, span: Span) {
        let in_test = self.depth_in_tests > 0;
        self.uses.push(Use { what, line: span.start().line, in_test });
    }

    fn public(&mut self, visibility: &syn::Visibility, name: &syn::Ident) {
        if self.depth_in_tests == 0 && matches!(visibility, syn::Visibility::Public(_)) {
            self.public_types.push((name.to_string(), name.span().start().line));
        }
    }

    fn inside(&mut self, attributes: &[Attribute], go_on: impl FnOnce(&mut Scan)) {
        let test = usize::from(is_test(attributes));
        self.depth_in_tests += test;
        go_on(self);
        self.depth_in_tests -= test;
    }

    fn function(&mut self, signature: &syn::Signature, span: Span) {
        let (line, end) = (span.start().line, span.end().line);
        let name = signature.ident.to_string();
        self.functions.push(Function { name, line, lines: end - line + 1 });
    }

    fn imported(&mut self, before: &str, tree: &syn::UseTree) {
        let longer = |name: &dyn ToString| match before {
            "" => name.to_string(),
            _ => format!("{before}::{}", name.to_string()),
        };
        match tree {
            syn::UseTree::Path(path) => self.imported(&longer(&path.ident), &path.tree),
            syn::UseTree::Name(name) => self.note(longer(&name.ident), name.span()),
            syn::UseTree::Rename(name) => self.note(longer(&name.ident), name.span()),
            syn::UseTree::Glob(glob) => self.note(longer(&"*"), glob.span()),
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.imported(before, tree));
            }
        }
    }
}

impl<'ast> Visit<'ast> for Scan {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.inside(&item.attrs, |scan| visit::visit_item_mod(scan, item));
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.inside(&item.attrs, |scan| visit::visit_item_impl(scan, item));
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.public(&item.vis, &item.ident);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.public(&item.vis, &item.ident);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.public(&item.vis, &item.ident);
        visit::visit_item_union(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.public(&item.vis, &item.ident);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.public(&item.vis, &item.ident);
        visit::visit_item_type(self, item);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.function(&item.sig, item.block.span());
        self.inside(&item.attrs, |scan| visit::visit_item_fn(scan, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.function(&item.sig, item.block.span());
        self.inside(&item.attrs, |scan| visit::visit_impl_item_fn(scan, item));
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.inside(&item.attrs, |scan| scan.imported("", &item.tree));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|part| part.ident.to_string()).collect();
        self.note(names.join("::"), path.span());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        if let Some(last) = call.path.segments.last() {
            self.note(format!("{}!", last.ident), call.span());
        }
        visit::visit_macro(self, call);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.note(format!(".{}()", call.method), call.method.span());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Some(name) = attribute.path().get_ident() {
            self.note(format!("#[{name}]"), attribute.span());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_cannot_be_parsed_is_a_finding() {
        let (_, findings) = Sources::scan(&Tree::of(&[("a.rs", "fn (")]));
        assert_eq!(findings.len(), 1);
    }

    #[test]
    fn what_only_tests_build_is_known_as_such() {
        let (sources, _) = Sources::scan(&Tree::of(&[
            ("crates/vramp/src/lib.rs", "#[cfg(test)] mod fake; fn a() { std::env::args(); }"),
            ("crates/vramp/src/fake.rs", "fn b() { std::env::args(); }"),
            ("crates/vramp/tests/c.rs", "fn c() { std::env::args(); }"),
        ]));
        let uses = |nth: usize| {
            let uses = &sources.0[nth].uses;
            uses.iter().find(|used| used.what == "std::env::args").map(|used| used.in_test)
        };
        assert_eq!([uses(0), uses(1), uses(2)], [Some(true), Some(false), Some(true)]);
    }
}
