//! Link arguments of the C library: version nodes, name, and that it is never unloaded.

fn main() {
    let dir = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    // The whole path: a checkout that was moved must not look for the file where it was.
    println!("cargo:rerun-if-changed={dir}/symbols.map");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--version-script={dir}/symbols.map");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
    // The progress thread must outlive a dlclose by a plug-in.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
