//! Tests of the simulator and of the faults that it finds, in one program: separate programs would
//! each link the whole crate.

mod blackwell;
mod blackwell_faults;
mod clusters;
mod communication;
mod faults;
mod hopper;
mod hopper_faults;
mod instructions;
mod mailboxes;
mod multicast;
mod schedule;
