//! The integration tests of this crate. They are one program, because each program takes seconds to
//! link.

mod alignment;
mod bundle;
mod common;
mod cp;
mod cp_serve;
mod crowds;
mod diagnosis;
mod doctor;
mod iproute2;
mod loading;
mod output;
mod perf;
mod ping;
mod run;
mod stat;
mod stat_serve;
mod stat_watch;
mod sysfs;
mod tshark;
mod unpack;
