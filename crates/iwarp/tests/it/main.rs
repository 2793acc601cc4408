//! The integration tests of this crate. They are one program, because linking a program takes
//! seconds. A test that counts or limits resources of its process runs in its own process
//! (`common::alone`).

mod channel;
mod common;
mod connection;
mod connection_awaits;
mod connection_misuse;
mod datagrams;
mod driving;
mod engines;
mod examples;
mod faults_connect;
mod faults_end;
mod faults_local;
mod faults_process;
mod faults_setup;
mod faults_stream;
mod faults_wire;
mod guess;
mod hardware;
mod lossy;
mod numbered;
mod on_demand;
mod outage;
mod portmap;
mod raw;
mod resolve;
mod service;
mod siw_replay;
mod stat;
mod tags;
mod tokio;
mod values;
mod verbs;
mod waiting;
mod xrc;
