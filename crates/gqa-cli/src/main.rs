//! The `gqa` program.
fn main() {}
