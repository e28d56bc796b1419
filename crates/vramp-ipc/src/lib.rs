//! File descriptors that one process publishes and other processes of the same user open and close.
//!
//! [`turns`] lets processes take turns at a card, and [`budget`] lets them share its memory at the same
//! time. Both use files and no server. [`keep`] is a server that has descriptors under names, so that memory
//! outlives the process that made it.
//!
//! The rest is the transport with which processes share memory. It carries descriptors and a description,
//! bytes with a meaning for the two programs, and counts who has them open. It knows no GPU.
//!
//! ```
//! use std::io::Read;
//! use std::os::fd::OwnedFd;
//! use std::sync::Arc;
//! use std::time::{Duration, Instant};
//!
//! use vramp_ipc::{Connections, Offer, OpenOptions, Server, Source, Ticket};
//!
//! /// Files stand for memory here.
//! struct Files(&'static str);
//!
//! impl Source for Files {
//!     fn open(&self) -> Result<Offer, String> {
//!         Ok(Offer { description: b"two copies".to_vec(), descriptors: 2 })
//!     }
//!
//!     fn descriptor(&self, _index: usize) -> std::io::Result<OwnedFd> {
//!         Ok(std::fs::File::open(self.0)?.into())
//!     }
//!
//!     fn released(&self) {} // The memory may be changed and freed again.
//! }
//!
//! // In the exporting process:
//! let server = Server::new()?;
//! let published = server.publish(Arc::new(Files("/proc/version")))?;
//! let bytes = published.grant()?.to_bytes(); // For a queue, a pipe, a file.
//!
//! // In the importing process:
//! let connections = Connections::new(OpenOptions::default());
//! let mut opened = connections.open(&Ticket::from_bytes(&bytes)?)?;
//! assert_eq!(opened.description(), b"two copies");
//! while let Some(batch) = opened.next_batch()? {
//!     for descriptor in batch.descriptors {
//!         let mut text = String::new();
//!         std::fs::File::from(descriptor).read_to_string(&mut text)?; // Import it, close it.
//!         assert!(text.starts_with("Linux"));
//!     }
//! }
//! drop(opened); // The exporter may reuse the memory.
//!
//! // In the exporting process again:
//! assert!(published.wait_released(Instant::now() + Duration::from_secs(30)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Life of an export
//!
//! 1. A process makes one [`Server`], and publishes a [`Source`] for each piece of memory that it
//!    shares. [`Published::ticket`] returns a [`Ticket`], a value of at most 160 bytes.
//! 2. A ticket can be sent any number of times. One of [`Published::grant`] counts as a holder from
//!    then on; for the others the caller keeps the export published until they were opened.
//! 3. Another process, or the same one, opens the ticket through its [`Connections`]. It receives the
//!    description and then the descriptors, one batch at a time, and closes each after it imported it.
//! 4. [`Opened`] holds the memory. Its process may send the ticket on to a third one, which opens it at
//!    the exporter. The forwarding process keeps its `Opened` until then.
//! 5. Dropping the last [`Opened`] calls [`Source::released`]. So does the end of an importer, by
//!    SIGKILL too, and although a forked child of it may have the socket.
//! 6. Memory that was closed may stay mapped while its importer watches the exporter ([`Watcher`]). Before the
//!    exporter frees memory for good, [`Watchers::notify`] ends the watches.
//! 7. Dropping [`Published`] withdraws the export. [`Published::withdraw`] says whether the memory can
//!    be freed at once or in [`Source::ended`]. If the exporter ends, importers find out with
//!    [`Opened::is_exporter_gone`]; what they imported stays theirs.
//!
//! # Costs
//!
//! | call | messages | system calls of the caller | of the server |
//! |---|---|---|---|
//! | [`Server::publish`] | 0 | 1 | 0 |
//! | [`Published::ticket`], [`Published::grant`] | 0 | 0 | 0 |
//! | first [`Connections::open`] for an exporter | | 5 more | 4 more |
//! | [`Connections::open`] | 1 each way | 4 (send, receive, poll, receive) | 4 (wait, receive, send, receive) |
//! | each further 32 KiB of the description | 1 each way | 4 | 4 |
//! | each further batch of descriptors | 1 each way | 4 | 4, and those of the source |
//! | dropping [`Opened`] | 1 | 1 | 3 (wait, receive, receive) |
//!
//! The server counts in a table: a message is O(1) in exports, opens and connections, the end of a
//! connection O(its opens). It has one thread, three descriptors, and two for each connection: the
//! socket and the importing process. A watch is a connection of its own; its end takes a system call on either
//! side. An importer has as many for each exporter. Descriptors of an
//! export are made for one batch and closed after it was sent, so 4,096 of them need 64 free numbers
//! in either process, and fewer where fewer are free.
//!
//! # Safety
//!
//! Both processes run as the same effective user, which each checks; a ticket has a secret of 128
//! random bits. Packets that break a rule end the connection that sent them. The server never waits for
//! an importer: a reply that does not fit into its queue is made again when there is space. Limits:
//! [`MAX_DESCRIPTION`], [`MAX_DESCRIPTORS`], [`MAX_OPENS`] and [`MAX_CONNECTIONS`].
//!
//! A forked child has no part of its parent's server and connections. [`Server::publish`] fails in it
//! with [`ServeError::Forked`]; [`Connections::open`] connects anew; dropping what it inherited sends
//! nothing.
//!
//! # Containers
//!
//! Abstract addresses are separate in each network namespace, paths in each mount namespace; the error
//! is [`OpenError::Unreachable`], or [`OpenError::ExporterGone`] if the process is invisible too.
//! [`Server::in_directory`] has a socket in a directory that both mount at the same path. Where no
//! socket can be reached but processes may trace each other, [`fetch_descriptor`] takes a descriptor by
//! its number.
//!
//! Deliberately absent: GPUs, the meaning of a description, global servers, a queue for tickets, and a
//! cache of what is open: a process that opens a ticket twice has two opens.
#![forbid(unsafe_code)]

pub mod budget;
mod client;
mod core;
mod directory;
mod error;
pub mod keep;
mod server;
mod system;
mod ticket;
pub mod turns;

pub use client::{Batch, Connections, OpenOptions, Opened, Watcher, Watching};
pub use directory::SharedDirectoryError;
pub use error::{FetchError, OpenError, Refusal, ServeError, Side, TicketError};
pub use server::{
    MAX_CONNECTIONS, MAX_DESCRIPTION, MAX_DESCRIPTORS, MAX_OPENS, Offer, Published, Server, Source,
    Watchers, Withdrawn,
};
pub use system::fetch_descriptor;
pub use ticket::Ticket;
