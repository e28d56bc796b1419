//! Gives the shared library the name by which programs find it, where `cargo xtask` asks for one.
//!
//! Cargo passes this argument to the shared libraries of all crates above too, so it is not the
//! default: a Python module that contains this crate has its own name.
#![forbid(unsafe_code)]

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=VRAMP_SONAME");
    if let Ok(name) = std::env::var("VRAMP_SONAME") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{name}");
    }
}
