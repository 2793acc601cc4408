//! Tests of the queue pair, by subject. `harness` has the rig: a queue pair, a table, a host, and FPDUs made by hand.

mod acknowledged;
mod aligning;
mod blamed;
mod bounded;
mod cut;
mod ending;
mod harness;
mod input;
mod memory;
mod numbered;
mod on_demand;
mod pages;
mod receiving;
mod refused;
mod refused_access;
mod regions;
mod segments;
mod sending;
mod startup;
mod stream;
mod summed;
mod timing;
mod told;
mod unreliable;
mod users;
mod vectors;
