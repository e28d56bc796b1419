//! The pure half: what is charged where (`accounts/`), and who is served next (`queue/`).

mod accounts;
mod queue;
mod space;
mod strategy;
#[cfg(test)]
mod tests;

pub use accounts::*;
pub use queue::*;
pub use space::{Level, LevelName, Levels, SpaceConfig, SpaceConfigError, SpaceId, Tier};
pub use strategy::{Candidates, Distance, LinkKey, Links, Rate, Strategy, StrategyError};
