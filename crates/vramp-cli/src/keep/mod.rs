//! `vramp keep`: the keeper, and what people ask of one that runs.

pub mod args;
mod list;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use vramp::Bytes;
use vramp::sharing::kept::{Keeper, KeeperConfig, KeeperServer};

use crate::budgets::default_directory;
use args::{Action, Keep, Place};

/// How long a keeper may take for one answer.
const PATIENCE: Duration = Duration::from_secs(5);

impl Place {
    fn directory(&self) -> Result<PathBuf> {
        self.directory.clone().map_or_else(default_directory, Ok)
    }

    fn keeper(&self) -> Result<Keeper> {
        Ok(Keeper::new(&self.directory()?, PATIENCE))
    }
}

pub(crate) fn run(args: &Keep, out: &mut dyn Write) -> Result<()> {
    match &args.action {
        None => serve(args, out),
        Some(Action::List { place, json }) => list::write(&place.keeper()?.entries()?, *json, out),
        Some(Action::Remove { place, names }) => remove(&place.keeper()?, names, out),
        Some(Action::Evict { place, size, card }) => {
            evict(&place.keeper()?, *size, card.as_deref(), out)
        }
        Some(Action::Stop { place }) => {
            place.keeper()?.stop()?;
            Ok(writeln!(out, "stopped")?)
        }
        Some(Action::Service { place, program }) => {
            service(&place.directory()?, program.as_deref(), out)
        }
    }
}

fn serve(args: &Keep, out: &mut dyn Write) -> Result<()> {
    let directory = args.place.directory()?;
    let config = KeeperConfig {
        directory: &directory,
        limit: args.limit.map(Bytes::count),
        idle_exit: args.idle_exit,
    };
    let server = KeeperServer::start(&config)?;
    writeln!(out, "keeps memory in {}", directory.display())?;
    out.flush()?;
    server.wait();
    Ok(())
}

/// Removes all names that can be removed.
fn remove(keeper: &Keeper, names: &[String], out: &mut dyn Write) -> Result<()> {
    let mut failed = Vec::new();
    for name in names {
        match keeper.remove(name) {
            Ok(()) => writeln!(out, "removed {name}")?,
            Err(error) => failed.push(error.to_string()),
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => bail!("{}", failed.join("; ")),
    }
}

fn evict(keeper: &Keeper, size: Bytes, card: Option<&str>, out: &mut dyn Write) -> Result<()> {
    let cards = match card {
        Some(card) => vec![card.to_owned()],
        None => {
            let entries = keeper.entries()?.into_iter();
            let mut cards: Vec<String> =
                entries.filter_map(|entry| Some(entry.current?.device)).collect();
            cards.sort_unstable();
            cards.dedup();
            cards
        }
    };
    for card in cards {
        let freed = Bytes::new(keeper.evict(&card, size.count())?);
        writeln!(out, "{card}: {freed} freed")?;
    }
    Ok(())
}

/// Writes a service file.
fn service(directory: &Path, program: Option<&str>, out: &mut dyn Write) -> Result<()> {
    let program = match program {
        Some(program) => program.to_owned(),
        None => format!("\"{}\"", std::env::current_exe().context("find this program")?.display()),
    };
    // `%` begins a specifier of systemd.
    let directory = directory.display().to_string().replace('%', "%%");
    Ok(write!(
        out,
        "[Unit]\n\
         Description=Keeps GPU memory for processes that end\n\n\
         [Service]\n\
         ExecStart={program} keep --directory \"{directory}\"\n\
         Restart=on-failure\n\
         LimitNOFILE=524288\n\n\
         [Install]\n\
         WantedBy=default.target\n"
    )?)
}
