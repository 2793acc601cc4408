//! What each end reports to the peer, the log and the user. Uses the transport of `session_tests`.

use crate::confine::{Place, Root};
use crate::part::tests::{TempDir, sha};
use crate::part::{Existing, Source};
use crate::protocol::{Have, Message, VERSION};
use crate::session::{Terms, at_work_every, begin, get, put, serve};
use crate::session_tests::{
    Memory, data, download, hello, pair, request, secret, upload, with_server, with_terms,
};
use crate::transport::Link as _;
use iwarp_cli_common::error::Error;
use std::fs::File;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// An end may send `Working` at any time.
#[test]
fn working_does_not_disturb_the_copy() {
    let t = TempDir::new();
    std::fs::write(t.path("src"), data(10_000)).unwrap();
    let both = |a: &mut Memory, b: &mut Memory| (a.sends_working, b.sends_working) = (true, true);
    let (up, served) = with_server(&t, both, |l| upload(l, &t, "f", true));
    assert_eq!(up.unwrap().hash, sha(&data(10_000)));
    served.unwrap();
    let (down, served) = with_server(&t, both, |l| download(l, &t, "f"));
    assert_eq!(down.unwrap().hash, sha(&data(10_000)));
    served.unwrap();
}

#[test]
fn uploads_report_progress() {
    let t = TempDir::new();
    std::fs::create_dir_all(t.path("root")).unwrap();
    std::fs::write(t.path("src"), data(2500)).unwrap();
    for (resumed, steps) in [(0, &[0, 1000, 2000, 2500][..]), (700, &[700, 1700, 2500])] {
        std::fs::write(t.path("root/.f.iwarp-part"), data(resumed)).unwrap();
        let mut seen = vec![];
        let (up, _) = with_server(
            &t,
            |_, _| {},
            |l| {
                let source = Source::new(File::open(t.path("src")).unwrap()).unwrap();
                begin(l, None)?;
                put(l, source, request("f", true), &mut |done, all| {
                    assert_eq!(all, 2500);
                    seen.push(done);
                })
            },
        );
        assert_eq!(up.unwrap().resumed, resumed as u64);
        assert_eq!(seen, steps);
    }
}

/// The server logs how many bytes each copy moved.
#[test]
fn server_logs_each_copy() {
    let t = TempDir::new();
    std::fs::create_dir_all(t.path("root")).unwrap();
    std::fs::write(t.path("src"), data(2500)).unwrap();
    std::fs::write(t.path("root/.f.iwarp-part"), data(700)).unwrap();
    let root = Root::open(&t.path("root")).unwrap();
    let terms = Terms {
        writing: Some(Existing::Replace),
        secret: None,
    };
    let (mut a, mut b) = pair();
    let mut logged = vec![];
    std::thread::scope(|s| {
        let server = s.spawn(|| {
            serve(&mut b, &root, &terms, &mut |path, done| {
                logged.push((path.to_owned(), done.size, done.resumed));
            })
        });
        upload(&mut a, &t, "f", true).unwrap();
        let place = Place::local(&t.path("back")).unwrap();
        get(&mut a, place, request("f", true), &mut |_, _| {}).unwrap();
        drop(a);
        server.join().unwrap().unwrap();
    });
    let f = || "f".to_owned();
    assert_eq!(logged, [(f(), 2500, 700), (f(), 2500, 0)]);
}

/// Both directions preserve the permissions. Checks those of the owner, which do not depend on the
/// umask.
#[test]
fn permissions_are_copied() {
    let mode = |path| {
        let all = std::fs::metadata(path).unwrap().permissions();
        std::os::unix::fs::PermissionsExt::mode(&all) & 0o700
    };
    for owner in [0o600, 0o700] {
        let t = TempDir::new();
        std::fs::write(t.path("src"), "x").unwrap();
        let wanted = std::os::unix::fs::PermissionsExt::from_mode(owner);
        std::fs::set_permissions(t.path("src"), wanted).unwrap();
        let (up, _) = with_server(&t, |_, _| {}, |l| upload(l, &t, "f", true));
        up.unwrap();
        assert_eq!(mode(t.path("root/f")), owner);
        let (down, _) = with_server(&t, |_, _| {}, |l| download(l, &t, "f"));
        down.unwrap();
        assert_eq!(mode(t.path("back")), owner);
    }
}

/// `--no-resume` has the same meaning in both directions.
#[test]
fn download_restarts_without_resume() {
    let t = TempDir::new();
    std::fs::create_dir_all(t.path("root")).unwrap();
    std::fs::write(t.path("root/f"), data(5000)).unwrap();
    for (resume, resumed) in [(false, 0), (true, 2000)] {
        std::fs::write(t.path(".back.iwarp-part"), data(2000)).unwrap();
        let place = Place::local(&t.path("back")).unwrap();
        let (down, _) = with_server(
            &t,
            |_, _| {},
            |l| {
                begin(l, None)?;
                get(l, place, request("f", resume), &mut |_, _| {})
            },
        );
        assert_eq!(down.unwrap().resumed, resumed);
        assert_eq!(std::fs::read(t.path("back")).unwrap(), data(5000));
    }
}

/// An error of the receiver stops the sender immediately, not only when all slots are in use.
#[test]
fn error_stops_the_sender_immediately() {
    let t = TempDir::new();
    std::fs::write(t.path("src"), data(5000)).unwrap();
    let (mut a, mut b) = pair();
    let ready = Message::Ready {
        have: Have {
            len: 0,
            hash: sha(b""),
        },
        grant: b.grant().unwrap(),
    };
    let text = "disk full".to_owned();
    for m in [hello(VERSION), ready, Message::Error { text }] {
        b.send(&m).unwrap();
    }
    let e = upload(&mut a, &t, "f", true).unwrap_err().to_string();
    assert!(e.contains("the peer says: disk full"), "{e}");
    assert_eq!(a.writes, 0);
}

/// The client has more data than the server's file.
#[test]
fn resume_after_the_end_fails() {
    let t = TempDir::new();
    std::fs::write(t.path(".back.iwarp-part"), data(10)).unwrap();
    let (mut a, mut b) = pair();
    b.send(&hello(VERSION)).unwrap();
    b.send(&Message::Start {
        offset: 10,
        size: 9,
        mode: 0,
    })
    .unwrap();
    let e = download(&mut a, &t, "f").unwrap_err().to_string();
    assert!(e.contains("after the end"), "{e}");
    // The partial file may still be correct, so it is kept.
    assert_eq!(std::fs::read(t.path(".back.iwarp-part")).unwrap(), data(10));
}

/// If the client closes the connection, the work for it ends early, which frees its place.
#[test]
fn work_ends_when_client_closes() {
    let (mut a, b) = pair();
    drop(b);
    let mut stopped = false;
    let outcome = at_work_every(&mut a, Duration::from_millis(10), |gone| {
        let end = Instant::now() + Duration::from_secs(60);
        while !gone.load(Ordering::Relaxed) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        stopped = gone.load(Ordering::Relaxed);
        Ok(())
    });
    assert!(outcome.unwrap_err().to_string().contains("broken"));
    assert!(stopped, "the work was not stopped");
}

/// While an end works, it sends `Working` to the peer, which does not count as idle meanwhile.
#[test]
fn peer_is_notified_of_work() {
    let (mut a, mut b) = pair();
    let outcome = at_work_every(&mut a, Duration::from_millis(5), |gone| {
        for _ in 0..3 {
            assert_eq!(b.recv()?, Some(Message::Working));
        }
        assert!(!gone.load(Ordering::Relaxed));
        Ok(7)
    });
    assert_eq!(outcome.unwrap(), 7);
    assert_eq!(a.peer_waiting, [true, false]);
    // Failing work returns its error and ends the wait, too.
    let outcome = at_work_every(&mut a, Duration::from_secs(60), |_| {
        Err::<(), _>(Error::failed("no disk"))
    });
    assert!(outcome.unwrap_err().to_string().contains("no disk"));
    assert_eq!(a.peer_waiting, [true, false, true, false]);
}

/// A server continues after a client that connects and closes, before its hello or its proof.
#[test]
fn client_may_close_without_message() {
    let t = TempDir::new();
    let ((), served) = with_server(&t, |_, _| {}, |_| ());
    served.unwrap();
    let terms = Terms {
        writing: None,
        secret: Some(secret(&t, &[b'g'; 16])),
    };
    let hello = Message::Hello {
        version: VERSION,
        secret: true,
        nonce: [4; 32],
    };
    let ((), served) = with_terms(
        &t,
        &terms,
        |_, _| {},
        |l| {
            l.send(&hello).unwrap();
            l.outbound = None;
            while let Ok(Some(_)) = l.recv() {}
        },
    );
    let e = served.unwrap_err().to_string();
    assert!(e.contains("instead of sending a proof"), "{e}");
}
