//! What the simulator does for kernels, and the faults that it finds. One program: each of its
//! modules would else be linked with the whole crate.

mod clusters;
mod communication;
mod faults;
mod hopper;
mod hopper_faults;
mod instructions;
mod mailboxes;
mod schedule;
