//! Only `pool/state/` changes a pool.

use syn::visit::{self, Visit};

use super::Finding;
use super::scan::Parsed;

const ROOT: &str = "crates/vramp-core/src/";
/// The folder that changes the pool. Its files are one module with private fields.
const WRITER: &str = "pool/state/";

/// No file outside of `pool/state/` can change a pool: its fields are private to that folder, no
/// other file has a method of `Pool` that takes `&mut self`, and no file of the pool takes
/// `&mut Pool`.
pub fn pool_is_closed(parsed: &Parsed<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, file) in parsed {
        let Some(path) = path.strip_prefix(ROOT) else { continue };
        let mut scan = Mutations { path, findings: Vec::new() };
        scan.visit_file(file);
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

#[cfg(test)]
mod tests {
    use super::super::scan::parse;
    use super::*;
    use crate::tree::Tree;

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
        let found = pool_is_closed(&parse(&planted).0);
        assert_eq!(
            paths(&found),
            ["pool/plan/build.rs", "pool/plan/sites.rs", "pool/state/mod.rs"]
        );
    }
}
