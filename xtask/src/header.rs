//! `cargo xtask header`: writes `vramp.h` from the sources of `vramp-capi`.

use std::path::Path;

use anyhow::{Context, Result};

/// The header, relative to the root.
pub const PATH: &str = "crates/vramp-capi/include/vramp.h";

/// The copy in the Python package, which compiles against it.
const COPY: &str = "python/vramp/include/vramp.h";

/// Writes the header anew, and its copy.
pub fn write(root: &Path) -> Result<()> {
    let header = generate(root)?;
    for path in [PATH, COPY].map(|path| root.join(path)) {
        std::fs::write(&path, &header)
            .with_context(|| format!("cannot write {}", path.display()))?;
        println!("wrote {}", path.display());
    }
    Ok(())
}

/// What to do if the header is not as the sources would have it.
pub fn difference(root: &Path) -> Result<Option<String>> {
    let header = generate(root)?;
    let written = |path| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let message = "the header is not as the sources say: run `cargo xtask header`";
    let differs = [PATH, COPY].into_iter().any(|path| written(path) != header);
    Ok(differs.then(|| message.to_owned()))
}

fn generate(root: &Path) -> Result<String> {
    let own = root.join("crates/vramp-capi");
    let config = cbindgen::Config::from_file(own.join("cbindgen.toml"));
    let config = config.map_err(anyhow::Error::msg).context("cannot read cbindgen.toml")?;
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in [
        "src/abi.rs",
        "src/interface.rs",
        "src/graphs.rs",
        "src/torch/mod.rs",
        "src/torch/dropin.rs",
    ] {
        builder = builder.with_src(own.join(source));
    }
    let bindings = builder.generate().context("the sources of vramp-capi cannot be read")?;
    let mut header = Vec::new();
    bindings.write(&mut header);
    // The heading that clippy asks for says nothing to a C programmer.
    Ok(String::from_utf8(header)?.replace("// # Safety\n", "// What the caller promises:\n"))
}
