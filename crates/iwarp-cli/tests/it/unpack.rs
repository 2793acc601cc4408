//! `iwarp unpack`: a program that has only the printed environment gets our libraries and sees the
//! devices, from a folder that it cannot write to.

use crate::common::{Scratch, compile, iwarp, text};
use std::path::Path;
use std::process::Command;

/// The program prints a text of each library, and the first line of a file of the first device.
const PROGRAM: &str = "#include <stdio.h>
    const char *one(void);
    int main(void) {
        char line[80] = \"\";
        FILE *file = fopen(\"/sys/class/infiniband/iwarp0/node_type\", \"r\");
        puts(one());
        if (file && fgets(line, sizeof line, file)) fputs(line, stdout);
        return 0;
    }";

/// Unpacks into a folder and returns the printed variables. A small library replaces ours.
fn unpack(scratch: &Scratch, options: &[&str]) -> Vec<(String, String)> {
    let library = scratch.path("libiwarp_verbs.so");
    let source = "const char *one(void) { return \"unpacked\"; }";
    let soname = ["-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1"];
    compile(&library, source, &soname);
    // The real library: `cargo test` builds it, because it is a dependency of these tests.
    let test = std::env::current_exe().unwrap();
    let paths = test.with_file_name("libiwarp_paths.so");
    std::fs::copy(paths, scratch.path("libiwarp_paths.so")).unwrap();
    let to = scratch.path("to");
    let out = iwarp(&["unpack"])
        .args(options)
        .arg(&to)
        .env("IWARP_LIBRARY", &library)
        .env_remove("LD_LIBRARY_PATH")
        .env_remove("LD_PRELOAD")
        .env_remove("LD_AUDIT")
        .env_remove("GLIBC_TUNABLES")
        .env_remove("VALGRIND_OPTS")
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let said = text(&out.stdout);
    let pair = |line: &str| {
        let (name, value) = line.split_once('=').expect(line);
        (name.to_owned(), value.to_owned())
    };
    said.lines().map(pair).collect()
}

#[test]
fn environment_alone_shows_unpacked_libraries() {
    let scratch = Scratch::new();
    let variables = unpack(&scratch, &["--as", "roce", "--bind", "127.0.0.1"]);
    let program = scratch.path("program");
    let library = scratch.path("libiwarp_verbs.so");
    compile(
        &program,
        PROGRAM,
        &["-Wl,--no-as-needed", library.to_str().unwrap()],
    );
    // What the program loads must not depend on the files that were copied.
    std::fs::remove_file(&library).unwrap();
    let out = Command::new(&program)
        .env_remove("XDG_RUNTIME_DIR")
        .env("TMPDIR", "/nonexistent")
        .envs(variables)
        .output()
        .unwrap();
    assert_eq!(
        text(&out.stdout),
        "unpacked\n1: CA\n",
        "{}",
        text(&out.stderr)
    );
}

/// The manifests set the environment, so it must be the one that the command prints.
#[test]
fn manifest_has_printed_environment() {
    let scratch = Scratch::new();
    let options = ["--as", "roce", "--bind", "eth0"];
    let printed = unpack(&scratch, &options);
    let folder = scratch.path("to");
    let in_pod = |text: String| text.replace(folder.to_str().unwrap(), "/opt/iwarp");
    let mut printed: Vec<String> = printed
        .into_iter()
        .map(|(name, value)| in_pod(format!("{name}: {value}")))
        .collect();
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../packaging/kubernetes/environment.yaml"
    );
    let text = std::fs::read_to_string(file).unwrap();
    let (_, data) = text.split_once("\ndata:\n").unwrap();
    let mut written: Vec<String> = data.lines().map(|line| line.trim().to_owned()).collect();
    printed.sort();
    written.sort();
    assert_eq!(printed, written);
}

#[test]
fn unpacked_folder_is_an_installation() {
    let scratch = Scratch::new();
    // The second call replaces the files, as when a container starts again.
    for _ in 0..2 {
        unpack(&scratch, &[]);
    }
    let to = scratch.path("to");
    let link = std::fs::read_link(to.join("lib/iwarp/librdmacm.so.1")).unwrap();
    assert_eq!(link, Path::new("libibverbs.so.1"));
    for name in ["libiwarp_paths.so", "libiwarp_audit.so"] {
        assert!(to.join("lib/iwarp").join(name).is_file(), "{name}");
    }
    // The copied command finds the libraries without `IWARP_LIBRARY`.
    let out = Command::new(to.join("bin/iwarp"))
        .args(["env"])
        .env_remove("IWARP_LIBRARY")
        .output()
        .unwrap();
    let said = text(&out.stdout);
    let folder = to.join("lib/iwarp").canonicalize().unwrap();
    assert!(said.contains(folder.to_str().unwrap()), "{said}");
}

#[test]
fn bundle_unpacks_without_its_libraries() {
    let scratch = Scratch::new();
    let bundle = scratch.path("bundle");
    let command = std::fs::read(env!("CARGO_BIN_EXE_iwarp")).unwrap();
    let mut bytes = command.clone();
    bytes.extend(b"verbsname");
    for len in [5_u64, 4, 0, 0] {
        bytes.extend(len.to_le_bytes());
    }
    bytes.extend(b"iwarplib");
    std::fs::write(scratch.path("written"), bytes).unwrap();
    // `cp` creates the file, because a child of another test could inherit our descriptor.
    let copied = Command::new("cp")
        .args([scratch.path("written"), bundle.clone()])
        .status();
    assert!(copied.unwrap().success());
    let chmod = Command::new("chmod").arg("755").arg(&bundle).status();
    assert!(chmod.unwrap().success());
    let out = Command::new(&bundle)
        .arg("unpack")
        .arg(scratch.path("to"))
        .env_remove("IWARP_LIBRARY")
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let unpacked = scratch.path("to/bin/iwarp");
    assert!(
        std::fs::read(unpacked).unwrap() == command,
        "not the command alone"
    );
    let verbs = scratch.path("to/lib/iwarp/libibverbs.so.1");
    assert_eq!(std::fs::read(verbs).unwrap(), b"verbs");
}
