//! `cargo xtask adversary`: the bounds of the hostile patterns, and their table.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::shell;

/// The file that CI holds the default allocator's counts to.
const BOUNDS: &str = "bench/adversary-bounds.toml";
const PAGE: &str = "docs/background/adversary.md";
/// The table lies between these lines of the page.
const BEGIN: &str = "<!-- cargo xtask adversary -->";
const END: &str = "<!-- end of cargo xtask adversary -->";

/// Runs all quick patterns on all allocators, and writes both files.
pub fn run(root: &Path) -> Result<()> {
    let mut bench = Command::new("cargo");
    bench.current_dir(root);
    bench.args(["run", "--release", "--locked", "--quiet", "-p", "vramp-cli", "--"]);
    bench.args(["bench", "adversary", "--device", "sim:h200", "--markdown"]);
    bench.args(["--bounds", BOUNDS, "--write"]);
    let table = shell::output(&mut bench)?;
    let page = std::fs::read_to_string(root.join(PAGE))?;
    let page = with_table(&page, &table)
        .with_context(|| format!("{PAGE} lacks the line {BEGIN} or {END}"))?;
    std::fs::write(root.join(PAGE), page)?;
    println!("wrote {BOUNDS} and {PAGE}");
    Ok(())
}

/// Returns the page with the table between its two lines; `None` if it lacks them.
fn with_table(page: &str, table: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}\n{}\n{END}{after}", table.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_replaced_and_nothing_else() {
        let page = format!("before\n{BEGIN}\nold\n{END}\nafter\n");
        let written = with_table(&page, "| new |\n\n").unwrap();
        assert_eq!(written, format!("before\n{BEGIN}\n| new |\n{END}\nafter\n"));
        assert_eq!(with_table(&written, "| new |").unwrap(), written);
        assert_eq!(with_table("before", "| new |"), None);
    }
}
