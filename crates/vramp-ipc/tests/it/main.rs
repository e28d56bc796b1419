//! Opens, closes, ends of processes and limits, with real sockets and processes.
