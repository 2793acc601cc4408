//! `iwarp run` with programs that do not find their libraries by `LD_LIBRARY_PATH`: the audit
//! library redirects them to ours.
//!
//! Small libraries that the tests compile replace the system's and ours. They have the symbol
//! versions of the real libraries, because the loader treats unversioned libraries differently.
//! Their functions return who owns the library.

use crate::common::{Scratch, compile, installed, iwarp, str, text};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A library; `OWNER` is a macro. `TEST_LOADED` says whether the process has loaded one such
/// library or several.
const LIBRARY: &str = r#"#include <stdio.h>
    #include <stdlib.h>
    __attribute__((constructor)) static void count(void) {
        const char *old = getenv("TEST_LOADED");
        setenv("TEST_LOADED", old ? "several" : "once", 1);
    }
    const char *one(void) { return "one of " OWNER; }
    const char *two(void) { return "two of " OWNER; }"#;
/// The symbol versions of the real libraries. The system's libraries have one each; ours has both.
const VERSIONS: &str = "IBVERBS_1.0 { global: one; local: *; };\nRDMACM_1.0 { global: two; };\n";
/// A program that is linked with both libraries.
const LINKED: &str = r#"#include <stdio.h>
    #include <stdlib.h>
    const char *one(void); const char *two(void);
    int main(void) { printf("%s, %s, %s\n", one(), two(), getenv("TEST_LOADED")); return 0; }"#;
/// A program that loads the libraries that its arguments name.
const LOADS: &str = r#"#include <dlfcn.h>
    #include <stdio.h>
    #include <stdlib.h>
    int main(int count, char **names) {
        for (int i = 1; i < count; i++) {
            void *library = dlopen(names[i], RTLD_NOW);
            if (!library) { printf("%s\n", dlerror()); return 1; }
            const char *(*one)(void) = (const char *(*)(void))dlsym(library, "one");
            printf("%s, %s\n", one ? one() : "no symbol", getenv("TEST_LOADED"));
        }
        return 0;
    }"#;
const BOTH: &str = "one of iwarp, two of iwarp, once\n";
const ONE: &str = "one of iwarp, once\n";

/// A folder with our library in `ours`, and with those of the system in `system`.
struct Fixture(Scratch);

impl Fixture {
    fn new() -> Self {
        let fixture = Self(Scratch::new());
        let versions = fixture.0.path("versions");
        std::fs::write(&versions, VERSIONS).unwrap();
        let ours = fixture.0.sub("ours").join("libiwarp_verbs.so");
        fixture.install(&ours, "iwarp", "libibverbs.so.1");
        for name in ["libibverbs.so.1", "librdmacm.so.1"] {
            fixture.install(&fixture.0.sub("system").join(name), "the system", name);
        }
        fixture
    }

    fn install(&self, to: &Path, owner: &str, soname: &str) {
        let args = [
            "-shared",
            "-fPIC",
            &format!("-DOWNER=\"{owner}\""),
            &format!("-Wl,-soname,{soname}"),
            &format!("-Wl,--version-script={}", self.0.path("versions").display()),
        ];
        compile(to, LIBRARY, &args);
    }

    /// Compiles a program that is linked with these libraries, and finds them by `DT_RPATH`.
    fn linked(&self, name: &str, libraries: &[PathBuf], more: &[&str]) -> PathBuf {
        let program = self.0.path(name);
        let folder = libraries[0].parent().unwrap();
        let rpath = format!("-Wl,--disable-new-dtags,-rpath,{}", folder.display());
        let mut args = vec!["-Wl,--no-as-needed"];
        args.extend(libraries.iter().map(|library| str(library)));
        args.push(&rpath);
        args.extend(more);
        compile(&program, LINKED, &args);
        program
    }

    fn system(&self) -> [PathBuf; 2] {
        ["libibverbs.so.1", "librdmacm.so.1"].map(|name| self.0.path("system").join(name))
    }

    /// Runs a command with our library.
    fn run(&self, command: &[&str]) -> Output {
        iwarp(&[&["run", "--"], command].concat())
            .env("IWARP_LIBRARY", self.0.path("ours/libiwarp_verbs.so"))
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("LD_AUDIT")
            .output()
            .unwrap()
    }

    /// Checks the output of a command, which must succeed without error messages.
    fn check_output(&self, command: &[&str], wanted: &str) {
        let out = self.run(command);
        assert_eq!(
            (text(&out.stdout).as_str(), text(&out.stderr).as_str()),
            (wanted, ""),
            "{command:?}"
        );
        assert!(out.status.success(), "{command:?}: {}", out.status);
    }
}

/// Either library may be loaded first. The loader opens the same file again for the second name,
/// and looks for the symbol versions by that name.
#[test]
fn rpath_does_not_hide_our_library() {
    let fixture = Fixture::new();
    let mut libraries = fixture.system();
    let program = fixture.linked("forward", &libraries, &[]);
    let out = Command::new(&program).output().unwrap();
    assert_eq!(
        text(&out.stdout),
        "one of the system, two of the system, several\n"
    );
    fixture.check_output(&[str(&program)], BOTH);
    libraries.reverse();
    let program = fixture.linked("backward", &libraries, &[]);
    fixture.check_output(&[str(&program)], BOTH);
}

/// Python wheels contain private copies of libraries, with a hash in their names.
#[test]
fn renamed_copies_are_replaced() {
    let fixture = Fixture::new();
    let names = ["libibverbs-ab12cd34.so.1.14.44.0", "librdmacm-0f00.so.1"];
    let libraries = names.map(|name| fixture.0.sub("wheel.libs").join(name));
    for (library, name) in libraries.iter().zip(names) {
        fixture.install(library, "the wheel", name);
    }
    let program = fixture.linked("program", &libraries, &[]);
    fixture.check_output(&[str(&program)], BOTH);
}

#[test]
fn dlopen_gets_our_library_by_any_name() {
    let fixture = Fixture::new();
    let program = fixture.0.path("loads");
    compile(&program, LOADS, &["-ldl"]);
    let absolute = fixture.system();
    for name in [
        "libibverbs.so",
        "libibverbs.so.1",
        "librdmacm.so",
        "librdmacm.so.1",
        "libibverbs-ab12cd34.so.1",
        str(&absolute[0]),
        str(&absolute[1]),
    ] {
        fixture.check_output(&[str(&program), name], ONE);
        // The second request finds the library that the first has loaded.
        fixture.check_output(&[str(&program), "librdmacm-0a.so.1", name], &ONE.repeat(2));
    }
    // Libraries with merely similar names are not redirected.
    let other = fixture.0.path("system/libibverbs_other.so");
    fixture.install(&other, "another", "libibverbs_other.so");
    fixture.check_output(&[str(&program), str(&other)], "one of another, once\n");
}

#[test]
fn children_keep_our_library_without_library_path() {
    let fixture = Fixture::new();
    let program = fixture.linked("program", &fixture.system(), &[]);
    let system = fixture.0.path("system");
    for script in [
        "LD_LIBRARY_PATH=$1 $0",
        "unset LD_LIBRARY_PATH; $0",
        "env -u LD_LIBRARY_PATH sh -c $0",
    ] {
        fixture.check_output(&["sh", "-c", script, str(&program), str(&system)], BOTH);
    }
}

/// The inner command's library takes precedence, as with `LD_LIBRARY_PATH`.
#[test]
fn inner_run_replaces_the_outer_library() {
    let fixture = Fixture::new();
    let program = fixture.linked("program", &fixture.system(), &[]);
    let inner = fixture.0.sub("inner").join("libiwarp_verbs.so");
    fixture.install(&inner, "the inner", "libibverbs.so.1");
    let script = "IWARP_LIBRARY=$1 $2 run -- $0; LD_AUDIT=/none.so:$LD_AUDIT; \
                  IWARP_LIBRARY=$1 $2 run -- sh -c 'echo $LD_AUDIT' 2>/dev/null";
    let command = env!("CARGO_BIN_EXE_iwarp");
    let out = fixture.run(&["sh", "-c", script, str(&program), str(&inner), command]);
    let folder = inner.parent().unwrap().canonicalize().unwrap();
    let audit = folder.join("iwarp-lib/libiwarp_audit.so");
    assert_eq!(
        text(&out.stdout),
        format!(
            "one of the inner, two of the inner, once\n{}:/none.so\n",
            audit.display()
        )
    );
}

#[test]
fn env_sets_the_audit_library() {
    let fixture = Fixture::new();
    let program = fixture.linked("program", &fixture.system(), &[]);
    let script = format!(
        "eval \"$({} env)\"; unset LD_LIBRARY_PATH; {}",
        env!("CARGO_BIN_EXE_iwarp"),
        str(&program)
    );
    let out = Command::new("sh")
        .args(["-c", &script])
        .env("IWARP_LIBRARY", fixture.0.path("ours/libiwarp_verbs.so"))
        .env_remove("LD_AUDIT")
        .output()
        .unwrap();
    assert_eq!(text(&out.stdout), BOTH, "{}", text(&out.stderr));
}

/// The sanitizer's runtime must be the first library of the process.
#[test]
fn address_sanitizer_works() {
    let fixture = Fixture::new();
    let program = fixture.0.path("probe");
    let source = fixture.0.path("probe.c");
    std::fs::write(&source, "int main(void) { return 0; }").unwrap();
    let built = Command::new("cc")
        .args(["-fsanitize=address", str(&source), "-o", str(&program)])
        .output()
        .unwrap();
    if !built.status.success() {
        println!("skipped: the C compiler has no address sanitizer");
        return;
    }
    let program = fixture.linked("sanitized", &fixture.system(), &["-fsanitize=address"]);
    fixture.check_output(&[str(&program)], BOTH);
}

#[test]
fn valgrind_works() {
    if !installed("valgrind") {
        return;
    }
    let fixture = Fixture::new();
    let program = fixture.linked("program", &fixture.system(), &[]);
    fixture.check_output(
        &["valgrind", "-q", "--error-exitcode=9", str(&program)],
        BOTH,
    );
}

/// gdb finds the functions of our library, whose path the loader has recorded.
#[test]
fn gdb_works() {
    if !installed("gdb") {
        return;
    }
    let fixture = Fixture::new();
    let program = fixture.linked("program", &fixture.system(), &["-g"]);
    let commands = [
        "set breakpoint pending on",
        "break one",
        "run",
        "info sharedlibrary",
        "continue",
    ];
    let mut command = vec!["gdb", "-q", "-nx", "-batch"];
    for line in &commands {
        command.extend(["-ex", line]);
    }
    command.push(str(&program));
    let out = fixture.run(&command);
    let said = text(&out.stdout);
    if said.contains("ptrace: Operation not permitted") {
        println!("skipped: this machine does not allow ptrace");
        return;
    }
    assert!(
        said.contains("Breakpoint 1, "),
        "{said}{}",
        text(&out.stderr)
    );
    assert!(said.contains("iwarp-lib/libibverbs.so.1\n"), "{said}");
    assert!(said.contains(BOTH), "{said}");
}

#[test]
fn python_gets_our_library() {
    if !installed("python3") {
        return;
    }
    let fixture = Fixture::new();
    let script = "import ctypes, sys\n\
                  for name in sys.argv[1:]:\n\
                  \x20   one = ctypes.CDLL(name).one\n\
                  \x20   one.restype = ctypes.c_char_p\n\
                  \x20   print(one().decode())";
    let system = fixture.system();
    let command = [
        "python3",
        "-c",
        script,
        "libibverbs.so",
        "librdmacm.so.1",
        str(&system[0]),
    ];
    fixture.check_output(&command, &"one of iwarp\n".repeat(3));
}

/// A program that loads neither library is not affected, nor are its error messages.
#[test]
fn other_programs_are_not_disturbed() {
    let fixture = Fixture::new();
    fixture.check_output(&["true"], "");
    let program = fixture.0.path("loads");
    compile(&program, LOADS, &["-ldl"]);
    let out = fixture.run(&[str(&program), "libnone.so.7"]);
    assert_eq!(
        text(&out.stdout),
        "libnone.so.7: cannot open shared object file: No such file or directory\n"
    );
}
