//! `iwarp cp` between two processes: both directions, resuming, refusals, several clients.

use crate::common::{Running, Scratch, fail, finish, noise, serve, start, str, succeed, text};
use sha2::{Digest as _, Sha256};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

fn server(dir: &Path, ip: &str) -> (Running, String) {
    let (server, at) = serve(&[
        "cp",
        "serve",
        str(dir),
        "--overwrite",
        "--bind",
        ip,
        "-p",
        "0",
        "-q",
    ]);
    (server, at.port().to_string())
}

#[test]
fn all_sizes_are_copied_both_ways() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::create_dir(dir.join("deep")).unwrap();
    for (ip, host) in [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")] {
        let (_server, port) = server(&dir, ip);
        for (size, crc) in [(0, "on"), (1, "on"), (524_288, "off"), (5_000_001, "on")] {
            let data = noise(size);
            let source = t.path("source");
            fs::write(&source, &data).unwrap();
            let remote = format!("{host}:deep/f");
            let up = ["cp", "-p", &port, "--crc", crc, str(&source), &remote];
            let out = succeed(&up);
            let sums: String = Sha256::digest(&data)
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect();
            assert!(out.starts_with(&format!("{size} octets in ")), "{out}");
            assert!(!out.contains("already had"), "{out}");
            assert!(
                out.contains(&format!("SHA-256 {sums}, equal at both ends")),
                "{out}"
            );
            assert!(fs::read(dir.join("deep/f")).unwrap() == data);
            let back = t.path("back");
            let _ = fs::remove_file(&back);
            let out = succeed(&["cp", "-p", &port, "--crc", crc, "-q", &remote, str(&back)]);
            assert_eq!(out, "");
            assert!(fs::read(back).unwrap() == data);
        }
        // A download into a folder keeps the file's name.
        let into = t.sub("into");
        succeed(&[
            "cp",
            "-p",
            &port,
            "-q",
            &format!("{host}:deep/f"),
            str(&into),
        ]);
        assert_eq!(fs::metadata(into.join("f")).unwrap().len(), 5_000_001);
        fs::remove_dir_all(into).unwrap();
    }
}

#[test]
fn interrupted_copy_continues() {
    let t = Scratch::new();
    let dir = t.sub("served");
    let (_server, port) = server(&dir, "127.0.0.1");
    let source = t.path("big");
    let data = noise(1 << 20);
    fs::write(&source, &data).unwrap();
    // A sparse file, large enough that the copy can be interrupted.
    let len = 512 << 20;
    fs::File::options()
        .write(true)
        .open(&source)
        .unwrap()
        .set_len(len)
        .unwrap();
    let args = ["cp", "-p", &port, str(&source), "127.0.0.1:big"];
    let client = start(&args);
    let part = dir.join(".big.iwarp-part");
    let deadline = Instant::now() + Duration::from_secs(60);
    while fs::metadata(&part).map_or(0, |m| m.len()) < 4 << 20 {
        assert!(Instant::now() < deadline, "nothing arrives");
        std::thread::sleep(Duration::from_millis(1));
    }
    // Kill the client.
    drop(client);
    assert!(
        !dir.join("big").exists(),
        "the copy ended before the client was killed"
    );
    // The server unlocks the partial file when it detects that the client was killed.
    let out = loop {
        let out = finish(start(&args), &args);
        if out.status.success() {
            break text(&out.stdout);
        }
        let err = text(&out.stderr);
        assert!(
            err.contains("another copy") && Instant::now() < deadline,
            "{err}"
        );
        std::thread::sleep(Duration::from_millis(20));
    };
    let number_after = |text: &str| -> u64 {
        let rest = &out[out.find(text).expect(text) + text.len()..];
        rest.split(' ').next().unwrap().parse().unwrap()
    };
    let (moved, resumed) = (number_after(""), number_after("already had "));
    assert_eq!(moved + resumed, len, "{out}");
    assert!(resumed >= 4 << 20, "{out}");
    let copied = fs::read(dir.join("big")).unwrap();
    assert_eq!(copied.len() as u64, len);
    assert!(copied[..1 << 20] == data && copied[1 << 20..].iter().all(|b| *b == 0));
}

#[test]
fn several_clients_at_once() {
    let t = Scratch::new();
    let dir = t.sub("served");
    let (_server, port) = server(&dir, "127.0.0.1");
    let data = noise(3_000_000);
    let source = t.path("s");
    fs::write(&source, &data).unwrap();
    fs::write(dir.join("d"), &data).unwrap();
    let calls: Vec<Vec<String>> = (0..6)
        .map(|i| {
            let (from, to) = if i % 2 == 0 {
                (str(&source).to_owned(), format!("127.0.0.1:up{i}"))
            } else {
                (
                    "127.0.0.1:d".to_owned(),
                    str(&t.path(&format!("down{i}"))).to_owned(),
                )
            };
            ["cp", "-p", &port, "-q", &from, &to]
                .map(str::to_owned)
                .to_vec()
        })
        .collect();
    let calls: Vec<Vec<&str>> = calls
        .iter()
        .map(|c| c.iter().map(String::as_str).collect())
        .collect();
    let clients: Vec<_> = calls.iter().map(|c| start(c)).collect();
    for (client, call) in clients.into_iter().zip(&calls) {
        let out = finish(client, call);
        assert!(out.status.success(), "{call:?}: {}", text(&out.stderr));
    }
    for i in 0..6 {
        let path = if i % 2 == 0 {
            dir.join(format!("up{i}"))
        } else {
            t.path(&format!("down{i}"))
        };
        assert!(fs::read(path).unwrap() == data, "{i}");
    }
}

#[test]
fn server_explains_refusals() {
    let t = Scratch::new();
    let dir = t.sub("served");
    fs::write(t.path("secret"), "x").unwrap();
    std::os::unix::fs::symlink("../secret", dir.join("link")).unwrap();
    let (mut server, port) = server(&dir, "127.0.0.1");
    let target = t.path("out");
    for (path, reason) in [
        ("../secret", "refused"),
        ("link", "link"),
        ("missing", "No such file"),
    ] {
        let from = format!("127.0.0.1:{path}");
        let err = fail(&["cp", "-p", &port, &from, str(&target)], 1);
        assert!(
            err.contains("the peer says") && err.contains(reason),
            "{err}"
        );
        assert!(!err.contains("received data"), "{err}");
        assert!(!target.exists());
    }
    let source = t.path("secret");
    let err = fail(&["cp", "-p", &port, str(&source), "127.0.0.1:../up"], 1);
    assert!(err.contains("refused"), "{err}");
    let err = fail(
        &["cp", "-p", &port, str(&t.path("nothing")), "127.0.0.1:x"],
        1,
    );
    assert!(err.contains("No such file"), "{err}");
    succeed(&["cp", "-p", &port, "-q", str(&source), "127.0.0.1:fine"]);
    assert!(server.0.try_wait().unwrap().is_none());
    fail(&["cp", str(&source), "127.0.0.1:x", "-p", "0"], 2);
    let err = fail(&["cp", "-p", "1", str(&source), "127.0.0.1:x"], 1);
    assert!(err.contains("nobody listens"), "{err}");
    let err = fail(&["cp", "serve", str(&t.path("nothing")), "-p", "0"], 1);
    assert!(err.contains("No such file"), "{err}");
}

#[test]
fn killed_server_is_detected() {
    let t = Scratch::new();
    let dir = t.sub("served");
    let (server, port) = server(&dir, "127.0.0.1");
    let source = t.path("big");
    fs::File::create(&source).unwrap().set_len(1 << 30).unwrap();
    let args = ["cp", "-p", &port, "-q", str(&source), "127.0.0.1:big"];
    let client = start(&args);
    let part = dir.join(".big.iwarp-part");
    let deadline = Instant::now() + Duration::from_secs(60);
    while fs::metadata(&part).map_or(0, |m| m.len()) < 1 << 20 {
        assert!(Instant::now() < deadline, "nothing arrives");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(server);
    let start = Instant::now();
    let out = finish(client, &args);
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{err}");
    assert!(
        err.contains("clos") || err.contains("lost") || err.contains("reset"),
        "{err}"
    );
    assert!(start.elapsed() < Duration::from_secs(20));
}
