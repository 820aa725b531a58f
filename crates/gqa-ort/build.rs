//! Keeps the library in the process once it is there: ONNX Runtime closes it with the last session,
//! but threads that compute, and what is kept for the next session, live in it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
