//! The permissions of `iwarp cp serve`: who may connect, which files clients may write, and which
//! options are refused.

use crate::common::{
    Running, Scratch, fail, finish, iwarp, noise, run, serve, serve_as, start, str, succeed, text,
};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

fn server(dir: &Path, args: &[&str]) -> (Running, String) {
    let (server, at) = serve(&[&["cp", "serve", str(dir), "-p", "0", "-q"], args].concat());
    assert!(
        at.ip().is_loopback(),
        "other hosts can reach the server: {at}"
    );
    (server, at.port().to_string())
}

#[test]
fn defaults_serve_this_host_read_only() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("existing"), "old").unwrap();
    let (_server, port) = server(&dir, &[]);
    let source = t.path("source");
    fs::write(&source, "new").unwrap();
    for name in ["existing", "new"] {
        let to = format!("127.0.0.1:{name}");
        let err = fail(&["cp", "-p", &port, "-q", str(&source), &to], 1);
        assert!(err.contains("--writable"), "{err}");
    }
    assert_eq!(fs::read(dir.join("existing")).unwrap(), b"old");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    succeed(&[
        "cp",
        "-p",
        &port,
        "-q",
        "127.0.0.1:existing",
        str(&t.path("back")),
    ]);
    assert_eq!(fs::read(t.path("back")).unwrap(), b"old");
}

#[test]
fn writable_does_not_replace_files() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("existing"), "old").unwrap();
    let source = t.path("source");
    fs::write(&source, "new").unwrap();
    let upload = |port: &str, name: &str| {
        let to = format!("127.0.0.1:{name}");
        run(&["cp", "-p", port, "-q", str(&source), &to])
    };
    let (_one, port) = server(&dir, &["--writable"]);
    assert!(upload(&port, "new").status.success());
    let out = upload(&port, "existing");
    assert_eq!(out.status.code(), Some(1));
    assert!(
        text(&out.stderr).contains("exists already"),
        "{}",
        text(&out.stderr)
    );
    assert_eq!(fs::read(dir.join("existing")).unwrap(), b"old");
    assert_eq!(fs::read(dir.join("new")).unwrap(), b"new");
    let (_two, port) = server(&dir, &["--overwrite"]);
    assert!(upload(&port, "existing").status.success());
    assert_eq!(fs::read(dir.join("existing")).unwrap(), b"new");
}

/// The sender requests its file's permissions; the receiver's umask applies, as for any program.
#[test]
fn receivers_umask_applies() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("a"), "data").unwrap();
    fs::set_permissions(dir.join("a"), fs::Permissions::from_mode(0o777)).unwrap();
    let (_server, port) = server(&dir, &[]);
    let back = t.path("back");
    for (umask, mode) in [("022", 0o755), ("077", 0o700), ("0", 0o777)] {
        let _ = fs::remove_file(&back);
        let client = iwarp(&["cp", "-q", "-p", &port, "127.0.0.1:a", str(&back)]);
        let mut shell = std::process::Command::new("sh");
        shell
            .args(["-c", &format!("umask {umask}; exec \"$0\" \"$@\"")])
            .arg(client.get_program())
            .args(client.get_args());
        for (name, _) in client.get_envs() {
            shell.env_remove(name);
        }
        assert!(shell.status().unwrap().success());
        let got = fs::metadata(&back).unwrap().permissions().mode() & 0o7777;
        assert_eq!(got, mode, "umask {umask}: {got:o}");
    }
}

/// Directories and links cannot be replaced, even with `--overwrite`.
#[test]
fn directories_and_links_are_not_replaced() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::create_dir(dir.join("directory")).unwrap();
    fs::write(t.path("outside"), "outside").unwrap();
    std::os::unix::fs::symlink(t.path("outside"), dir.join("link")).unwrap();
    let source = t.path("source");
    fs::write(&source, noise(100_000)).unwrap();
    let (_server, port) = server(&dir, &["--overwrite"]);
    for name in ["directory", "link"] {
        let to = format!("127.0.0.1:{name}");
        let err = fail(&["cp", "-p", &port, "-q", str(&source), &to], 1);
        assert!(err.contains("not a regular file"), "{err}");
    }
    // The client checks its own file before it connects, and does not block on a FIFO.
    let fifo = t.path("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.unwrap().success());
    let err = fail(&["cp", "-p", "1", str(&fifo), "127.0.0.1:x"], 1);
    assert!(err.contains("not a regular file"), "{err}");
    let err = fail(&["cp", "-p", "1", "127.0.0.1:x", str(&dir.join("link"))], 1);
    assert!(err.contains("not a regular file"), "{err}");
    assert_eq!(fs::read(t.path("outside")).unwrap(), b"outside");
    assert!(dir.join("link").is_symlink() && dir.join("directory").is_dir());
    assert_eq!(
        fs::read_dir(&dir).unwrap().count(),
        2,
        "no partial files remain"
    );
}

#[test]
fn other_hosts_need_a_secret_or_anonymous() {
    let t = Scratch::new();
    let dir = t.sub("served");
    for wildcard in ["0.0.0.0", "::"] {
        let err = fail(
            &["cp", "serve", str(&dir), "-p", "0", "--bind", wildcard],
            2,
        );
        assert!(
            err.contains("--secret-file") && err.contains("--anonymous"),
            "{err}"
        );
    }
    fs::write(dir.join("f"), "x").unwrap();
    for (more, warning) in [
        (&[][..], "can read the files"),
        (&["--writable"], "can read and write the files"),
    ] {
        let open = ["cp", "serve", str(&dir), "-p", "0", "--bind", "0.0.0.0"];
        let mut command = iwarp(&[&open[..], &["--anonymous"], more].concat());
        command.stderr(Stdio::piped());
        let (mut server, at) = serve_as(command);
        let port = at.port().to_string();
        succeed(&["cp", "-p", &port, "-q", "127.0.0.1:f", str(&t.path("back"))]);
        let stderr = server.0.stderr.take().unwrap();
        drop(server);
        let said = std::io::read_to_string(stderr).unwrap();
        assert!(said.contains("warning") && said.contains(warning), "{said}");
    }
}

fn secret(t: &Scratch, name: &str, content: &str, mode: u32) -> PathBuf {
    let path = t.path(name);
    fs::write(&path, content).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    path
}

#[test]
fn both_ends_need_the_same_secret() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(dir.join("f"), "content").unwrap();
    let good = secret(&t, "good", "correct horse battery staple\n", 0o600);
    let bad = secret(&t, "bad", "incorrect horse battery staple\n", 0o600);
    let open = secret(&t, "open", "correct horse battery staple\n", 0o644);
    let short = secret(&t, "short", "horse\n", 0o600);
    let (_server, port) = server(&dir, &["--secret-file", str(&good)]);
    let back = t.path("back");
    let get = |file: Option<&Path>| {
        let mut args = vec!["cp", "-p", &port, "-q", "127.0.0.1:f", str(&back)];
        if let Some(file) = file {
            args.extend(["--secret-file", str(file)]);
        }
        run(&args)
    };
    for (file, why) in [
        (None, "--secret-file"),
        (Some(&bad), "a different secret"),
        (Some(&open), "chmod 600"),
        (Some(&short), "5 octets"),
    ] {
        let out = get(file.map(PathBuf::as_path));
        assert_eq!(out.status.code(), Some(1));
        assert!(text(&out.stderr).contains(why), "{}", text(&out.stderr));
        assert!(!back.exists());
    }
    assert!(get(Some(&good)).status.success());
    assert_eq!(fs::read(&back).unwrap(), b"content");
    // A client with a secret refuses a server without one.
    let (_other, port) = server(&dir, &[]);
    let err = fail(
        &[
            "cp",
            "-p",
            &port,
            "--secret-file",
            str(&good),
            "127.0.0.1:f",
            str(&back),
        ],
        1,
    );
    assert!(err.contains("the server has no secret"), "{err}");
    let serve = ["cp", "serve", str(&dir), "-p", "0", "--secret-file"];
    for file in [&open, &short] {
        fail(&[&serve[..], &[str(file)]].concat(), 1);
    }
    fail(&[&serve[..], &[str(&good), "--anonymous"]].concat(), 2);
}

/// Starts a server. Returns its output after the first line, and its port.
fn server_with_output(args: &[&str]) -> (Running, impl std::io::BufRead + use<>, String) {
    let mut server = start(args);
    let mut out = std::io::BufReader::new(server.0.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    let port = line.trim().rsplit(':').next().unwrap().to_owned();
    (server, out, port)
}

/// File names reach terminals and logs, so control and bidirectional characters are escaped.
#[test]
fn control_characters_in_names_are_escaped() {
    let t = Scratch::new();
    let dir = t.sub("served");
    let name = "gpj.\u{202e}exe";
    fs::write(dir.join(name), "x").unwrap();
    let back = t.path("back");
    let get = |port: &str| {
        succeed(&["cp", "-p", port, &format!("127.0.0.1:{name}"), str(&back)]);
    };
    let (mut quiet, mut out, port) =
        server_with_output(&["cp", "serve", str(&dir), "-p", "0", "-q"]);
    get(&port);
    quiet.0.kill().unwrap();
    assert_eq!(std::io::read_to_string(&mut out).unwrap(), "");
    let (_server, mut out, port) = server_with_output(&["cp", "serve", str(&dir), "-p", "0"]);
    get(&port);
    let mut line = String::new();
    std::io::BufRead::read_line(&mut out, &mut line).unwrap();
    assert!(line.ends_with(" 'gpj.\\u{202e}exe' 1 octets\n"), "{line}");
    // The client escapes names in messages of the peer and in its own messages.
    for (from, to) in [
        (format!("127.0.0.1:{name}.no"), str(&back).to_owned()),
        (
            str(&t.path(&format!("{name}.no"))).to_owned(),
            "127.0.0.1:x".to_owned(),
        ),
    ] {
        let err = fail(&["cp", "-p", &port, &from, &to], 1);
        assert!(
            err.contains("gpj.\\u{202e}exe") && !err.contains(name),
            "{err}"
        );
    }
}

#[test]
fn interrupted_copy_says_how_to_continue() {
    let t = Scratch::new();
    let dir = t.sub("served");
    let (server, port) = server(&dir, &["--writable"]);
    let source = t.path("big");
    fs::File::create(&source).unwrap().set_len(1 << 30).unwrap();
    let part = dir.join(".big.iwarp-part");
    let arrived = |n: u64| {
        let end = std::time::Instant::now() + Duration::from_secs(60);
        while fs::metadata(&part).map_or(0, |m| m.len()) < n {
            assert!(std::time::Instant::now() < end, "nothing arrives");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let args = ["cp", "-p", &port, str(&source), "127.0.0.1:big"];
    let client = start(&args);
    arrived(1 << 20);
    let id = rustix::process::Pid::from_child(&client.0);
    rustix::process::kill_process(id, rustix::process::Signal::INT).unwrap();
    let out = finish(client, &args);
    assert_eq!(out.status.code(), Some(130));
    let said = text(&out.stderr);
    assert!(said.contains("repeat the command to continue"), "{said}");
    // After a lost connection, the message is the same, except that it advises against --no-resume
    // if that was given. The server unlocks the partial file a moment after the first client ended.
    let args = [&["cp", "--no-resume"], &args[1..]].concat();
    let have = fs::metadata(&part).unwrap().len();
    let end = std::time::Instant::now() + Duration::from_secs(60);
    let client = loop {
        let mut client = start(&args);
        let failed = loop {
            if fs::metadata(&part).unwrap().len() > have + (1 << 20) {
                break false;
            }
            if client.0.try_wait().unwrap().is_some() {
                break true;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        if !failed {
            break client;
        }
        assert!(
            std::time::Instant::now() < end,
            "the partial file stays locked"
        );
    };
    drop(server);
    let out = finish(client, &args);
    assert_eq!(out.status.code(), Some(1));
    let said = text(&out.stderr);
    let hint = "repeat the command without --no-resume to continue";
    assert!(said.contains(hint), "{said}");
}
