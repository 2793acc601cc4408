//! Tests of the results for the loader. The tests create the environment and the objects.

use crate::redirect::{LinkMap, State, Variables, is_redirected};
use std::ffi::{CStr, CString};
use std::ptr;

const ORIGINAL: u32 = 1;
const LIBRARY_PATH: u32 = 2;

fn started(environment: &[&str]) -> State {
    let strings: Vec<CString> = environment
        .iter()
        .map(|entry| CString::new(*entry).unwrap())
        .collect();
    let mut pointers: Vec<_> = strings.iter().map(|entry| entry.as_ptr()).collect();
    pointers.push(ptr::null());
    let state = State::new();
    // SAFETY: the strings outlive the call, and the last pointer is null.
    state.start(unsafe { Variables::new(pointers.as_ptr()) });
    state
}

fn search(state: &State, name: &str, mut cookie: usize, flag: u32) -> String {
    let name = CString::new(name).unwrap();
    // SAFETY: the name is a C string. The result points to it, or into `state`.
    unsafe {
        let result = state.search(name.as_ptr(), &raw mut cookie, flag);
        CStr::from_ptr(result).to_str().unwrap().to_owned()
    }
}

/// Passes a new object to the state. Returns its cookie.
fn open(state: &State, name: &str, namespace: i64) -> usize {
    let name = CString::new(name).unwrap();
    let map = LinkMap {
        base: 0,
        name: name.as_ptr(),
        dynamic: ptr::null(),
        next: ptr::null(),
        previous: ptr::null(),
    };
    let mut cookie = (&raw const map).addr();
    // SAFETY: the object and its name outlive the call.
    unsafe { state.opened(&raw const map, namespace, &raw mut cookie) };
    cookie
}

const TARGET: &str = "/opt/lib/libibverbs.so.1";

fn with_target() -> State {
    started(&[
        "PATH=/bin",
        "LD_AUDIT=/x/other.so:/opt/lib/libiwarp_audit.so",
        "Z=1",
    ])
}

#[test]
fn only_the_two_libraries_are_redirected() {
    for name in [
        "libibverbs.so",
        "libibverbs.so.1",
        "libibverbs.so.1.14.44.0",
        "libibverbs-ab12cd.so.1.14.44.0",
        "libibverbs-AB12cd34.so",
        "librdmacm.so.1",
        "librdmacm-00ff.so.1",
        "/usr/lib/librdmacm.so.1.3.44.0",
        "../x.libs/librdmacm.so",
    ] {
        assert!(is_redirected(name.as_bytes()), "{name}");
    }
    for name in [
        "",
        "libibverbs",
        "libibverbs.so.",
        "libibverbs.so1",
        "libibverbs-.so.1",
        "libibverbs-ab_cd.so.1",
        "libibverbs_foo.so",
        "libibverbsx.so.1",
        "libibverbs.a",
        "libibverbs/libmlx5-rdmav34.so",
        "/usr/lib/libibverbs/libsiw-rdmav34.so",
        "libibverbs.so/libc.so.6",
        "myliblibibverbs.so.1",
        "librdmac.so.1",
        "libibverb",
    ] {
        assert!(!is_redirected(name.as_bytes()), "{name}");
    }
}

#[test]
fn target_is_beside_audit_library() {
    for (environment, wanted) in [
        (&["LD_AUDIT=/opt/lib/libiwarp_audit.so"][..], TARGET),
        (&["LD_AUDIT=/a.so:/opt/lib/libiwarp_audit.so:/b.so"], TARGET),
        (
            &["LD_AUDIT=", "IWARP_AUDIT=/proc/7/fd/100"],
            "/proc/7/fd/100",
        ),
        (
            &["IWARP_AUDIT=/y", "LD_AUDIT=/opt/lib/libiwarp_audit.so"],
            "/y",
        ),
        // A variable with an empty value counts as not set.
        (
            &["IWARP_AUDIT=", "LD_AUDIT=/opt/lib/libiwarp_audit.so"],
            TARGET,
        ),
        (&["LD_AUDIT=lib/libiwarp_audit.so"], "lib/libibverbs.so.1"),
    ] {
        let state = started(environment);
        assert_eq!(state.version(2), 2, "{environment:?}");
        assert_eq!(search(&state, "librdmacm.so.1", 0, ORIGINAL), wanted);
    }
}

#[test]
fn library_is_ignored_without_target() {
    let long = format!("LD_AUDIT=/{}/libiwarp_audit.so", "x".repeat(4090));
    for environment in [
        &[][..],
        &["LD_AUDIT=libiwarp_audit.so"],
        &["LD_AUDIT=/opt/libiwarp_audit.so.1:::"],
        &["LD_AUDIT=$ORIGIN/libiwarp_audit.so"],
        &["LD_AUDITS=/opt/libiwarp_audit.so"],
        &[&long],
    ] {
        assert_eq!(started(environment).version(2), 0, "{environment:?}");
    }
}

/// With version 1 (glibc before 2.35), function calls are slow unless they are resolved when the
/// program starts.
#[test]
fn version_1_requires_bind_now() {
    let own = "LD_AUDIT=/opt/lib/libiwarp_audit.so";
    assert_eq!(started(&[own]).version(1), 0);
    assert_eq!(started(&[own, "LD_BIND_NOW="]).version(1), 0);
    assert_eq!(started(&[own, "LD_BIND_NOW=1"]).version(1), 1);
    assert_eq!(started(&[own]).version(3), 2);
}

#[test]
fn first_request_gets_path() {
    let state = with_target();
    let main = open(&state, "", 0);
    for name in ["libibverbs.so.1", "/usr/lib/librdmacm.so.1"] {
        assert_eq!(search(&state, name, main, ORIGINAL), TARGET);
        assert_eq!(search(&state, name, main, LIBRARY_PATH), name);
    }
    assert_eq!(search(&state, "libc.so.6", main, ORIGINAL), "libc.so.6");
}

#[test]
fn later_request_without_slash_keeps_name() {
    let state = with_target();
    let main = open(&state, "", 0);
    let target = open(&state, TARGET, 0);
    let name = "librdmacm.so.1";
    assert_eq!(search(&state, name, main, ORIGINAL), name);
    assert_eq!(
        search(&state, "/lib/librdmacm.so.1", main, LIBRARY_PATH),
        TARGET
    );
    assert_eq!(
        search(&state, "/lib/librdmacm.so.1", main, ORIGINAL),
        TARGET
    );
    assert_eq!(
        search(&state, "/lib/libc.so.6", main, LIBRARY_PATH),
        "/lib/libc.so.6"
    );
    // The target itself may be the requesting object.
    assert_eq!(search(&state, name, target, ORIGINAL), name);
    let mut cookie = target;
    // SAFETY: the pointer is to a valid cookie.
    unsafe { state.closed(&raw mut cookie) };
    assert_eq!(search(&state, name, main, ORIGINAL), TARGET);
}

#[test]
fn namespaces_are_separate() {
    let state = with_target();
    let (main, other) = (open(&state, "", 0), open(&state, "", 15));
    open(&state, TARGET, 15);
    let name = "libibverbs.so.1";
    assert_eq!(search(&state, name, main, ORIGINAL), TARGET);
    assert_eq!(search(&state, name, other, ORIGINAL), name);
    // An invalid namespace, and an object that was not passed to `opened`.
    let invalid = open(&state, TARGET, 16);
    assert_eq!(search(&state, name, invalid, ORIGINAL), TARGET);
    assert_eq!(search(&state, name, usize::MAX, ORIGINAL), TARGET);
}

/// The loader would load a second copy of each dependency.
#[test]
fn library_has_no_dependencies() {
    let file = std::env::temp_dir().join(format!("iwarp-audit-{}.so", std::process::id()));
    std::fs::write(&file, crate::LIBRARY).unwrap();
    let out = std::process::Command::new("readelf")
        .arg("-dW")
        .arg(&file)
        .output();
    let Ok(out) = out else {
        eprintln!("skipped: `readelf` is not installed");
        std::fs::remove_file(&file).unwrap();
        return;
    };
    std::fs::remove_file(&file).unwrap();
    let output = String::from_utf8_lossy(&out.stdout);
    assert!(output.contains("INIT_ARRAY"), "{output}");
    assert!(!output.contains("NEEDED"), "{output}");
}
