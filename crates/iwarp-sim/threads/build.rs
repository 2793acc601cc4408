//! Sets `cfg(shuttle)`, so that the runtime's modules in this crate use the locks and atomics of
//! the scheduler.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cfg=shuttle");
}
