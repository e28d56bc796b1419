//! What the library has to say without a caller to return it to, on stderr.

/// Writes to stderr without its lock, which in a forked child a thread of the parent may hold. A
/// failure to write is ignored.
pub(crate) fn write_line(text: &str) {
    // SAFETY: `text` is valid for reading its length.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}
