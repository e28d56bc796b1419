//! The project's own commands: `cargo xtask --help`.
#![forbid(unsafe_code)]

mod bindings;
mod shell;

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "The project's own commands")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Writes the declarations of libcuda anew from NVIDIA's header.
    Bindings,
}

fn main() -> Result<()> {
    let root = root();
    match Args::parse().task {
        Task::Bindings => bindings::run(&root),
    }
}

/// The folder of the workspace.
fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().expect("xtask lies in the workspace").to_owned()
}
