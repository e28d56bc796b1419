//! Does nothing. Without it cargo would leave out the dependencies of builds.

fn main() {}
