//! Build, check and bundle tasks.
fn main() {}
