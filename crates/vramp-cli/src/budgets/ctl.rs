//! `vramp ctl`: commands to members of groups.

use std::io::Write;

use anyhow::{Result, bail};
use vramp::Bytes;
use vramp::budget::{BudgetGroup, Command, Member, Outcome};

use super::args::{Action, Ctl, Limit, Recipient};

pub(crate) fn run(args: &Ctl, out: &mut dyn Write) -> Result<()> {
    let (to, command) = match &args.action {
        Action::Limit { to, limit: Limit(limit) } => {
            (to, Command::Limit(limit.map_or(u64::MAX, Bytes::count)))
        }
        Action::GiveBack { to, size } => (to, Command::GiveBack(size.count())),
        Action::Pause { to } => (to, Command::Pause),
        Action::Resume { to } => (to, Command::Resume),
    };
    let mut failed = Vec::new();
    for (group, member) in recipients(to)? {
        let outcome = group.send(member.id, command, to.timeout)?;
        match done(command, outcome) {
            Ok(what) => writeln!(out, "{member}: {what}")?,
            Err(why) => failed.push(format!("{member} {why}")),
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => bail!("{}", failed.join("; ")),
    }
}

/// Finds the members that a command is for: of several, only with `--all`.
fn recipients(to: &Recipient) -> Result<Vec<(BudgetGroup, Member)>> {
    let pid: Option<u32> = to.process.parse().ok();
    let mut found = Vec::new();
    for one in to.chosen.open()? {
        let is_meant = |member: &Member| match pid {
            Some(pid) => member.is_pid_valid && member.pid == pid,
            None => member.program == to.process,
        };
        for member in one.group.status()?.members.into_iter().filter(is_meant) {
            let directory = to.chosen.directory()?;
            found.push((BudgetGroup::open(&directory, &one.name.card, &one.name.group)?, member));
        }
    }
    match found.len() {
        0 => bail!(
            "no process {} has a budget{}; `vramp top --once` shows those that have",
            to.process,
            to.chosen.place()?
        ),
        1 => Ok(found),
        _ if to.all => Ok(found),
        count => {
            let names: Vec<_> = found.iter().map(|(_, member)| member.pid.to_string()).collect();
            bail!(
                "{} means {count} members, of processes {}: give one of these, choose a --group or \
                 --card, or pass --all",
                to.process,
                names.join(", ")
            )
        }
    }
}

/// Returns what was done, or what was not and why.
fn done(command: Command, outcome: Outcome) -> Result<String, String> {
    match (outcome, command) {
        (Outcome::Done(0), Command::Limit(_)) => Ok("limit set".to_owned()),
        (Outcome::Done(bytes), Command::Limit(_)) => {
            Ok(format!("limit set, {} given back", Bytes::new(bytes)))
        }
        (Outcome::Done(bytes), Command::GiveBack(_)) => {
            Ok(format!("{} given back", Bytes::new(bytes)))
        }
        (Outcome::Done(_), Command::Pause) => Ok("paused".to_owned()),
        (Outcome::Done(_), Command::Resume) => Ok("resumed".to_owned()),
        (Outcome::CannotDo, Command::Limit(_)) => {
            Err("has its new limit, but no handler that gives back what is above".to_owned())
        }
        (Outcome::CannotDo, _) => Err("has no handler for this".to_owned()),
        (Outcome::Failed(bytes), Command::Limit(_) | Command::GiveBack(_)) => {
            Err(format!("gave back only {}", Bytes::new(bytes)))
        }
        (Outcome::Failed(_), _) => Err("could not; its own messages say why".to_owned()),
        (Outcome::NoAnswer, _) => Err("did not answer in time: it is stopped, or busy".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_outcome_has_a_sentence() {
        let commands = [Command::Limit(5), Command::GiveBack(5), Command::Pause, Command::Resume];
        for command in commands {
            assert!(done(command, Outcome::Done(0)).is_ok());
            for outcome in [Outcome::CannotDo, Outcome::Failed(1 << 30), Outcome::NoAnswer] {
                assert!(done(command, outcome).is_err());
            }
        }
        let given = done(Command::Limit(5), Outcome::Done(1 << 30)).expect("it is done");
        assert_eq!(given, "limit set, 1.00 GiB given back");
    }
}
