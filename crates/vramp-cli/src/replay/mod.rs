//! `vramp replay`: recorded jobs on several allocators, as a table or as lines of JSON.

mod command;
mod table;

pub(crate) use command::run;
