//! Names the shared library as programs link to it, whatever cargo calls the file.
#![forbid(unsafe_code)]

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libvramp.so");
}
