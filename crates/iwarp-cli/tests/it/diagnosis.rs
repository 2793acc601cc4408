//! `iwarp run` reports why a program cannot load the libraries, and `iwarp run --check` prints
//! which libraries it would load.

use crate::common::{Scratch, compile, installed, iwarp, str, text};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A library with the functions of both libraries, and a program that is linked with both.
const LIBRARY: &str = "int one(void) { return 1; } int two(void) { return 2; }";
const PROGRAM: &str = "int one(void); int two(void); int main(void) { return one() + two() - 3; }";

/// A folder with our library in `ours`, the system's in `system`, and a program `linked` that finds
/// the system's by `DT_RPATH`.
struct Fixture(Scratch);

impl Fixture {
    fn new() -> Self {
        let fixture = Self(Scratch::new());
        let shared = |to: &Path, name: &str| {
            let soname = format!("-Wl,-soname,{name}");
            compile(to, LIBRARY, &["-shared", "-fPIC", &soname]);
        };
        let names = ["libibverbs.so.1", "librdmacm.so.1"];
        shared(&fixture.0.sub("ours").join("libiwarp_verbs.so"), names[0]);
        let system = fixture.0.sub("system");
        for name in names {
            shared(&system.join(name), name);
        }
        let [one, two] = names.map(|name| system.join(name));
        let rpath = format!("-Wl,--disable-new-dtags,-rpath,{}", system.display());
        let args = ["-Wl,--no-as-needed", str(&one), str(&two), &rpath];
        compile(&fixture.0.path("linked"), PROGRAM, &args);
        fixture
    }

    fn run(&self, arguments: &[&str]) -> Output {
        iwarp(&[&["run"], arguments].concat())
            .env("IWARP_LIBRARY", self.0.path("ours/libiwarp_verbs.so"))
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("LD_AUDIT")
            .output()
            .unwrap()
    }

    /// Checks that `--check` fails for a program with this reason.
    fn check_fails(&self, command: &[&str], reason: &str) {
        let out = self.run(&[&["--check", "--"], command].concat());
        let error = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{command:?}: {error}");
        assert!(error.contains(reason), "{command:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }

    fn script(&self, name: &str, first_line: &str) -> PathBuf {
        let path = self.0.path(name);
        // `cp` creates the file; see `missing_libraries_have_instructions` in `run.rs`.
        let draft = self.0.path("draft");
        std::fs::write(&draft, format!("{first_line}\nexit 0\n")).unwrap();
        std::fs::set_permissions(&draft, PermissionsExt::from_mode(0o755)).unwrap();
        let copied = Command::new("cp").arg(&draft).arg(&path).status().unwrap();
        assert!(copied.success());
        path
    }
}

#[test]
fn check_prints_what_the_loader_takes() {
    let fixture = Fixture::new();
    let program = fixture.0.path("linked");
    let out = fixture.run(&["--check", "--", str(&program), "--option"]);
    let said = text(&out.stdout);
    assert!(out.status.success(), "{said}{}", text(&out.stderr));
    let folder = fixture.0.path("ours/iwarp-lib").canonicalize().unwrap();
    for line in [
        format!("program      {}", program.display()),
        format!("DT_RPATH     {}", fixture.0.path("system").display()),
        "DT_NEEDED    libibverbs.so.1".to_owned(),
        "DT_NEEDED    librdmacm.so.1".to_owned(),
        format!("loads        {}/libibverbs.so.1", folder.display()),
        "libibverbs and librdmacm are iwarp's".to_owned(),
    ] {
        assert!(said.lines().any(|other| other == line), "{line}\n{said}");
    }
    let system = fixture.0.path("system/lib").display().to_string();
    assert!(!said.contains(&system), "{said}");
}

#[test]
fn check_names_scripts_and_programs_without_verbs() {
    let fixture = Fixture::new();
    let script = fixture.script("script", "#!/usr/bin/env -S A=1 sh -eu");
    let out = fixture.run(&["--check", "--", str(&script)]);
    let said = text(&out.stdout);
    assert!(out.status.success(), "{said}{}", text(&out.stderr));
    assert!(
        said.starts_with(&format!("script       {}\n", script.display())),
        "{said}"
    );
    assert!(
        said.contains("if it loads them at run time, it gets /"),
        "{said}"
    );
}

/// Without the audit library, `DT_RPATH` takes precedence over `LD_LIBRARY_PATH`.
#[test]
fn check_fails_for_other_libraries() {
    let fixture = Fixture::new();
    let prefix = fixture.0.sub("prefix");
    let (bin, lib) = (
        fixture.0.sub("prefix/bin"),
        fixture.0.sub("prefix/lib/iwarp"),
    );
    let copies = [
        (
            PathBuf::from(env!("CARGO_BIN_EXE_iwarp")),
            bin.join("iwarp"),
        ),
        (
            fixture.0.path("ours/libiwarp_verbs.so"),
            lib.join("libibverbs.so.1"),
        ),
    ];
    for (from, to) in copies {
        assert!(
            Command::new("cp")
                .args([from, to])
                .status()
                .unwrap()
                .success()
        );
    }
    std::os::unix::fs::symlink("libibverbs.so.1", lib.join("librdmacm.so.1")).unwrap();
    let out = Command::new(prefix.join("bin/iwarp"))
        .args(["run", "--check", "--", str(&fixture.0.path("linked"))])
        .env_remove("IWARP_LIBRARY")
        .env_remove("LD_AUDIT")
        .env_remove("LD_LIBRARY_PATH")
        .output()
        .unwrap();
    let error = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{error}");
    assert!(error.contains("which is not iwarp's library"), "{error}");
}

#[test]
fn missing_programs_and_libraries_are_named() {
    let fixture = Fixture::new();
    fixture.check_fails(&["no-such-program"], "neither a program nor a script");
    fixture.check_fails(&["/etc/passwd"], "neither a program nor a script");
    let other = fixture.0.path("libother.so");
    compile(
        &other,
        LIBRARY,
        &["-shared", "-fPIC", "-Wl,-soname,libother.so"],
    );
    compile(&fixture.0.path("needy"), PROGRAM, &[str(&other)]);
    std::fs::remove_file(&other).unwrap();
    fixture.check_fails(&[str(&fixture.0.path("needy"))], "libother.so => not found");
}

#[test]
fn foreign_and_musl_programs_are_diagnosed() {
    let fixture = Fixture::new();
    let simple = "int main(void) { return 0; }";
    let musl = fixture.0.path("musl");
    compile(
        &musl,
        simple,
        &["-Wl,--dynamic-linker=/nonexistent/ld-musl-test.so.1"],
    );
    fixture.check_fails(&[str(&musl)], "linked with musl");
    let mut octets = std::fs::read(&musl).unwrap();
    // Damage the class of the ELF file, and then its machine.
    for (at, name) in [(4, "class"), (18, "machine")] {
        let old = std::mem::replace(&mut octets[at], 1);
        let draft = fixture.0.path("draft");
        std::fs::write(&draft, &octets).unwrap();
        std::fs::set_permissions(&draft, PermissionsExt::from_mode(0o755)).unwrap();
        octets[at] = old;
        fixture.check_fails(&[str(&draft)], "another processor or for 32 bits");
        std::fs::rename(&draft, fixture.0.path(name)).unwrap();
    }
}

/// The diagnosis is one line, and the program runs nevertheless.
#[test]
fn static_programs_run_with_a_diagnosis() {
    let fixture = Fixture::new();
    let program = fixture.0.path("static");
    let source = "void _start(void) { for (;;) {
        #if defined(__x86_64__)
        __asm__ volatile(\"syscall\" : : \"a\"(60), \"D\"(7) : \"rcx\", \"r11\", \"memory\");
        #elif defined(__aarch64__)
        register long number __asm__(\"x8\") = 93, code __asm__(\"x0\") = 7;
        __asm__ volatile(\"svc 0\" : : \"r\"(number), \"r\"(code) : \"memory\");
        #endif
    } }";
    compile(&program, source, &["-static", "-nostdlib"]);
    let script = fixture.script("script", &format!("#!{}", program.display()));
    for command in [&program, &script] {
        let out = fixture.run(&["--", str(command)]);
        let error = text(&out.stderr);
        assert_eq!(out.status.code(), Some(7), "{error}");
        let wanted = format!(
            "iwarp: {} cannot load iwarp's libraries: it is linked statically; \
             use a dynamically linked build\n",
            command.display()
        );
        assert_eq!(error, wanted);
    }
}

#[test]
fn cleared_environments_are_diagnosed() {
    let fixture = Fixture::new();
    for command in [&["env", "-i", "true"][..], &["env", "-", "A=1", "true"]] {
        let out = fixture.run(&[&["--"], command].concat());
        let error = text(&out.stderr);
        assert!(out.status.success(), "{error}");
        assert!(error.contains("`env -i` removes LD_AUDIT"), "{error}");
    }
    let out = fixture.run(&["--", "env", "A=1", "true"]);
    assert_eq!(text(&out.stderr), "");
}

/// Only root can give a file to another user and make it run as that user.
#[test]
fn setuid_programs_are_diagnosed() {
    let fixture = Fixture::new();
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root");
        return;
    }
    for (mode, diagnosed) in [
        (0o4755, true),
        (0o2755, true),
        (0o755, false),
        (0o2745, false),
    ] {
        let program = fixture.0.path(&format!("program-{mode:o}"));
        compile(&program, "int main(void) { return 0; }", &[]);
        std::os::unix::fs::chown(&program, Some(65534), Some(65534)).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(mode)).unwrap();
        let out = fixture.run(&["--", str(&program)]);
        let error = text(&out.stderr);
        assert!(out.status.success(), "{error}");
        assert_eq!(
            error.contains("setuid or setgid"),
            diagnosed,
            "{mode:o}: {error}"
        );
    }
}

/// Only other users' programs gain rights by capabilities: root has all of them anyway.
#[test]
fn programs_with_capabilities_are_diagnosed() {
    let fixture = Fixture::new();
    let root = rustix::process::geteuid().is_root();
    if !root || !installed("setpriv") || !Path::new("/sbin/setcap").exists() {
        println!("skipped: needs root, setpriv and setcap");
        return;
    }
    let program = fixture.0.path("program");
    compile(&program, "int main(void) { return 0; }", &[]);
    let out = Command::new("/sbin/setcap")
        .arg("cap_net_raw+ep")
        .arg(&program)
        .output()
        .unwrap();
    if !out.status.success() {
        println!("skipped: {}", text(&out.stderr));
        return;
    }
    // The other user may not be able to enter the folder of the built command.
    let command = fixture.0.path("iwarp");
    let copied = Command::new("cp")
        .arg(env!("CARGO_BIN_EXE_iwarp"))
        .arg(&command)
        .status();
    assert!(copied.unwrap().success());
    let library = fixture.0.path("ours/libiwarp_verbs.so");
    let tmp = fixture.0.sub("tmp");
    std::os::unix::fs::chown(&tmp, Some(65534), Some(65534)).unwrap();
    for (user, diagnosed) in [("65534", true), ("0", false)] {
        let out = Command::new("setpriv")
            .args([
                "--reuid",
                user,
                "--clear-groups",
                str(&command),
                "run",
                "--check",
                "--",
            ])
            .arg(&program)
            .env("IWARP_LIBRARY", &library)
            .env("TMPDIR", &tmp)
            .env_remove("XDG_RUNTIME_DIR")
            .output()
            .unwrap();
        let error = text(&out.stderr);
        assert_eq!(
            error.contains("its file has capabilities"),
            diagnosed,
            "{user}: {error}"
        );
    }
}
