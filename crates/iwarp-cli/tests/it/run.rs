//! `iwarp run`: its exit codes, and its error messages when the program or a library is missing.

use crate::common;
use crate::common::{Scratch, iwarp, text};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Output};

/// Runs `iwarp run -- PROGRAM…` with an empty library, which no program of these tests loads.
fn run(command: &[&str]) -> Output {
    let scratch = Scratch::new();
    let library = scratch.path("libiwarp_verbs.so");
    std::fs::write(&library, b"").unwrap();
    iwarp(&[&["run", "--"], command].concat())
        .env("IWARP_LIBRARY", &library)
        .output()
        .unwrap()
}

#[test]
fn exit_code_and_signal_are_the_programs() {
    assert_eq!(run(&["true"]).status.code(), Some(0));
    assert_eq!(run(&["sh", "-c", "exit 77"]).status.code(), Some(77));
    assert_eq!(
        run(&["sh", "-c", "kill -TERM $$"]).status.signal(),
        Some(15)
    );
}

/// The codes are those of a shell: 127 if the program was not found, 126 if it cannot be executed.
#[test]
fn failed_start_has_shell_exit_codes() {
    for (program, code) in [("/nonexistent/program", 127), ("/etc/passwd", 126)] {
        let out = run(&[program, "argument"]);
        let error = text(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{error}");
        assert!(
            error.starts_with(&format!("iwarp: cannot run {program}: ")),
            "{error}"
        );
    }
}

/// The program gets the settings in its environment, with absolute paths. The user's own libraries
/// follow ours.
#[test]
fn program_gets_options_and_user_settings() {
    let scratch = Scratch::new();
    let dir = scratch.sub("here");
    for name in ["libiwarp_verbs.so", "librspreload.so"] {
        std::fs::write(dir.join(name), b"").unwrap();
    }
    let show = r#"cd /; printf '%s\n' "$IWARP_CAPTURE" "$LD_PRELOAD" "$LD_LIBRARY_PATH" \
        "$IWARP_CRC" "$IWARP_AS""#;
    let options = [
        "--capture",
        "a trace.pcapng",
        "--crc",
        "off",
        "--as",
        "rnic",
    ];
    let command = [
        &["run", "--rsockets"],
        &options[..],
        &["--", "sh", "-c", show],
    ];
    let out = iwarp(&command.concat())
        .env("IWARP_LIBRARY", dir.join("libiwarp_verbs.so"))
        // The loader ignores missing files.
        .env("LD_PRELOAD", "/nonexistent/mine.so")
        .env("LD_LIBRARY_PATH", "/nonexistent")
        .current_dir(&dir)
        .output()
        .unwrap();
    let output = text(&out.stdout);
    let [capture, preload, libraries, crc, face] = output.lines().collect::<Vec<_>>()[..] else {
        panic!("{output} {}", text(&out.stderr));
    };
    let here = dir.canonicalize().unwrap();
    assert_eq!(Path::new(capture), here.join("a trace.pcapng"));
    let preload: Vec<&str> = preload.split(':').collect();
    assert!(preload[0].ends_with("librspreload.so"), "{preload:?}");
    assert_eq!(preload.last(), Some(&"/nonexistent/mine.so"));
    assert!(libraries.ends_with(":/nonexistent"), "{libraries}");
    assert_eq!((crc, face), ("off", "rnic"));
}

/// A shell that evaluates the output of `iwarp env` gets each value unchanged.
#[test]
fn env_output_is_for_a_shell() {
    let scratch = Scratch::new();
    let library = scratch.path("libiwarp_verbs.so");
    std::fs::write(&library, b"").unwrap();
    let file = "/tmp/it's \"$HOME\" `x` \\ and\nmore";
    let out = iwarp(&["env", "--capture", file])
        .env("IWARP_LIBRARY", &library)
        .output()
        .unwrap();
    let script = format!("{}\nprintf %s \"$IWARP_CAPTURE\"", text(&out.stdout));
    let shell = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(text(&shell.stdout), file, "{script}");
}

/// The list shows the devices with the face that programs see.
#[test]
fn devices_have_indices_of_their_face() {
    for (face, indices) in [("rnic", "[0]"), ("roce", "[0,1]")] {
        let mut command = iwarp(&["devices", "--json"]);
        let out = command.env("IWARP_AS", face).output().unwrap();
        let mut json = text(&out.stdout);
        json.retain(|c| !c.is_whitespace());
        let wanted = format!(r#"{{"address":"127.0.0.1","gid_indices":{indices}}}"#);
        assert!(json.contains(&wanted), "{face}: {json}");
    }
}

/// An unknown option is not mistaken for the name of a program.
#[test]
fn misspelt_option_is_wrong_usage() {
    for args in [
        &["run", "--capure", "x", "--", "true"][..],
        &["run", "--crc", "off", "-v", "--", "true"],
    ] {
        let error = common::fail(args, 2);
        assert!(
            error.contains("is neither an option of `iwarp run`"),
            "{error}"
        );
    }
}

#[test]
fn wrong_library_is_named() {
    let scratch = Scratch::new();
    let missing = scratch.path("missing.so");
    for path in [missing, scratch.path("")] {
        let out = iwarp(&["run", "--", "true"])
            .env("IWARP_LIBRARY", &path)
            .output()
            .unwrap();
        let error = text(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{error}");
        assert!(
            error.contains("IWARP_LIBRARY=") && error.contains(path.to_str().unwrap()),
            "{error}"
        );
    }
}

/// `--rsockets` uses the preload library in the folder of the verbs library.
#[test]
fn preload_library_is_in_library_folder() {
    let scratch = Scratch::new();
    let env = || {
        let out = iwarp(&["env", "--rsockets"])
            .env("IWARP_LIBRARY", scratch.path("libiwarp_verbs.so"))
            .output()
            .unwrap();
        (out.status.success(), text(&out.stdout))
    };
    std::fs::write(scratch.path("libiwarp_verbs.so"), b"").unwrap();
    assert!(!env().0);
    std::fs::write(scratch.path("librspreload.so"), b"").unwrap();
    let (success, said) = env();
    assert!(success && said.contains("/librspreload.so'"), "{said}");
}

#[test]
fn wrong_log_filter_is_named() {
    let out = iwarp(&["devices"])
        .env("RUST_LOG", "iwarp=loud")
        .output()
        .unwrap();
    let error = text(&out.stderr);
    assert!(
        out.status.success() && error.contains("RUST_LOG is ignored"),
        "{error}"
    );
}

/// `cargo install` installs the command without libraries. The error names a command that installs
/// them, and `iwarp` finds them where that command puts them.
#[test]
fn missing_libraries_have_instructions() {
    let scratch = Scratch::new();
    let bin = scratch.path("prefix/bin");
    std::fs::create_dir_all(&bin).unwrap();
    let command = bin.join("iwarp");
    // `cp` creates the copy. If this process wrote it, a child of another test could inherit the
    // descriptor, and executing the file would fail with ETXTBSY.
    let copied = Command::new("cp")
        .args([env!("CARGO_BIN_EXE_iwarp").as_ref(), command.as_os_str()])
        .status()
        .unwrap();
    assert!(copied.success());
    let run = || {
        Command::new(&command)
            .args(["run", "--", "true"])
            .env_remove("IWARP_LIBRARY")
            .env_remove("RUST_LOG")
            .output()
            .unwrap()
    };
    let out = run();
    let error = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{error}");
    let prefix = bin.parent().unwrap().canonicalize().unwrap();
    for part in [
        format!("cargo xtask install --prefix {}\n", prefix.display()),
        format!("git clone --branch v{} https://", env!("CARGO_PKG_VERSION")),
        "IWARP_LIBRARY".to_owned(),
    ] {
        assert!(error.contains(&part), "{part:?} is not in: {error}");
    }
    // Create the libraries where `cargo xtask install --prefix` puts them.
    let lib = prefix.join("lib/iwarp");
    std::fs::create_dir_all(&lib).unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1"] {
        std::fs::write(lib.join(name), b"").unwrap();
    }
    let out = run();
    assert_eq!(out.status.code(), Some(0), "{}", text(&out.stderr));
}
