//! Selects the scheduler's locks and atomics for the modules of the runtime that are compiled into
//! this crate.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cfg=shuttle");
}
