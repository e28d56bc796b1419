//! The one exchange of memory of this process, which C, Python and PyTorch share.
//!
//! `VRAMP_IPC_DIRECTORY` names a directory for its socket, for processes in other network namespaces;
//! without it the socket has an abstract address.

use std::path::Path;
use std::sync::OnceLock;

use vramp_alloc::sharing::Exchange;

use crate::environment::variable;

static EXCHANGE: OnceLock<Exchange> = OnceLock::new();

/// Returns the exchange. Its server starts with the first export. A process that was forked after CUDA
/// was used is refused before.
pub(crate) fn exchange() -> &'static Exchange {
    EXCHANGE.get_or_init(|| match variable("VRAMP_IPC_DIRECTORY") {
        Some(directory) => Exchange::in_directory(Path::new(&directory)),
        None => Exchange::new(),
    })
}
