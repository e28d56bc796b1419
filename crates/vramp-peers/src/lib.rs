//! The GPU allocators that vramp is compared with, behind the interface of its own.
//!
//! ```
//! use vramp_alloc::Bytes;
//! use vramp_peers::{Config, Preset};
//!
//! for preset in Preset::ALL {
//!     let device = vramp_alloc::open("sim:h200")?;
//!     let allocator = Config::preset(preset).open(device)?;
//!     let stream = allocator.create_stream()?;
//!     let block = allocator.malloc(Bytes::mib(64), stream)?;
//!     println!("{}: {} reserved", preset.name(), allocator.stats()?.reserved);
//!     allocator.free(block, stream)?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | preset | what it is |
//! |---|---|
//! | [`Preset::Vramp`] | the virtual pool; reserves 1 to 2 % more than recorded jobs have allocated |
//! | [`Preset::Vpmm`] | OpenVM's pool: a policy of the virtual pool, and the driver's for requests under a page |
//! | [`Preset::StreamOrdered`] | the driver's pool (`cudaMallocAsync`) |
//! | [`Preset::Torch`], [`Preset::TorchExpandable`] | PyTorch's caching allocator |
//!
//! - `preset.rs`: the presets, and the variables that their own projects read;
//! - `core/`: PyTorch's caching allocator as a pure state machine; [`torch`] exports it, with access to
//!   the state behind an allocator;
//! - `caching_pool.rs`: PyTorch's caching allocator on a device;
//! - `driver_pool.rs`: the driver's pool;
//! - [`comm_pool`] and [`plain_pool`]: pools beside an allocator whose memory never moves.
//!
//! Deliberately absent: VPMM's placement, which is a policy of the virtual pool and shares its state
//! (`vramp-core`); streams, threads, limits and statistics, which are those of `vramp-alloc`.
#![forbid(unsafe_code)]

mod caching_pool;
mod core;
mod driver_pool;
mod preset;
pub mod torch;

pub use preset::{Config, EnvError, Preset, UnknownPreset, VariableError};
pub use torch::{comm_pool, plain_pool};
