//! Both ends of a copy against each other, and against malicious peers, over an in-memory
//! transport.

use crate::auth::Secret;
use crate::confine::{Place, Root};
use crate::part::tests::{TempDir, sha};
use crate::part::{Existing, Hash, Source};
use crate::protocol::{Grant, Have, Message, VERSION};
use crate::session::{Request, Summary, Terms, begin, get, put, serve};
use crate::transport::Link;
use iwarp_cli_common::error::{Error, Result};
use std::fs::File;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SLOT: u32 = 1000;
const SLOTS: u16 = 3;

/// An in-memory connection: encoded messages in channels, slots in shared memory.
pub(super) struct Memory {
    pub(super) out: Option<Sender<Vec<u8>>>,
    inn: Receiver<Vec<u8>>,
    mine: Arc<Mutex<Vec<u8>>>,
    theirs: Arc<Mutex<Vec<u8>>>,
    /// The connection breaks after this many sent messages.
    pub(super) budget: usize,
    /// Index of the slot write to corrupt.
    damage: Option<usize>,
    pub(super) writes: usize,
    /// Arguments of the calls of `peer_waits`, in order.
    pub(super) waits: Vec<bool>,
    /// Send `Working` before each message.
    pub(super) works: bool,
}

pub(super) fn pair() -> (Memory, Memory) {
    let ((a_out, b_in), (b_out, a_in)) = (channel(), channel());
    let ring = || Arc::new(Mutex::new(vec![0; SLOT as usize * usize::from(SLOTS)]));
    let (a_ring, b_ring) = (ring(), ring());
    let end = |out, inn, mine, theirs| Memory {
        out: Some(out),
        inn,
        mine,
        theirs,
        budget: usize::MAX,
        damage: None,
        writes: 0,
        waits: vec![],
        works: false,
    };
    (
        end(a_out, a_in, a_ring.clone(), b_ring.clone()),
        end(b_out, b_in, b_ring, a_ring),
    )
}

impl Link for Memory {
    fn send(&mut self, message: &Message) -> Result<()> {
        if self.budget == 0 {
            self.out = None;
        }
        self.budget = self.budget.saturating_sub(1);
        let broken = || Error::failed("broken");
        let out = self.out.as_ref().ok_or_else(broken)?;
        if self.works && !matches!(message, Message::Hello { .. }) {
            out.send(Message::Working.encode()?).map_err(|_| broken())?;
        }
        out.send(message.encode()?).map_err(|_| broken())
    }

    fn recv(&mut self) -> Result<Option<Message>> {
        match self.inn.recv_timeout(Duration::from_secs(10)) {
            Ok(octets) => Message::decode(&octets).map(Some),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => Err(Error::failed("time is over")),
        }
    }

    fn try_recv(&mut self) -> Result<Option<Message>> {
        self.inn
            .try_recv()
            .ok()
            .map(|o| Message::decode(&o))
            .transpose()
    }

    fn peer_waits(&mut self, yes: bool) {
        self.waits.push(yes);
    }

    fn authenticated(&mut self) {}

    fn grant(&mut self) -> Result<Grant> {
        Ok(Grant {
            stag: 1,
            base: 0,
            slot_size: SLOT,
            slots: SLOTS,
        })
    }

    fn read_slot(
        &mut self,
        slot: u16,
        len: u32,
        f: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let at = usize::from(slot) * SLOT as usize;
        f(&self.mine.lock().unwrap()[at..at + len as usize])
    }

    fn chunk(&mut self, to: &Grant) -> Result<u32> {
        Ok(to.slot_size)
    }

    fn write_slot(
        &mut self,
        to: &Grant,
        slot: u16,
        len: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let at = to.slot_at(slot).unwrap() as usize;
        let mut ring = self.theirs.lock().unwrap();
        let target = &mut ring[at..at + len as usize];
        fill(target)?;
        if self.damage == Some(self.writes) {
            target[0] ^= 1;
        }
        self.writes += 1;
        Ok(())
    }
}

pub(super) fn data(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * i / 7 + i) as u8).collect()
}

/// Runs `client` against a server of `root` that accepts everything. Returns both results.
pub(super) fn with_server<T>(
    t: &TempDir,
    fix: impl FnOnce(&mut Memory, &mut Memory),
    client: impl FnOnce(&mut Memory) -> T,
) -> (T, Result<()>) {
    let terms = Terms {
        writing: Some(Existing::Replace),
        secret: None,
    };
    with_terms(t, &terms, fix, client)
}

pub(super) fn with_terms<T>(
    t: &TempDir,
    terms: &Terms,
    fix: impl FnOnce(&mut Memory, &mut Memory),
    client: impl FnOnce(&mut Memory) -> T,
) -> (T, Result<()>) {
    std::fs::create_dir_all(t.path("root")).unwrap();
    let root = Root::open(&t.path("root")).unwrap();
    let (mut a, mut b) = pair();
    fix(&mut a, &mut b);
    std::thread::scope(|s| {
        let server = s.spawn(move || serve(&mut b, &root, terms, &mut |_, _| {}));
        let mine = client(&mut a);
        drop(a);
        (mine, server.join().unwrap())
    })
}

pub(super) fn upload(link: &mut Memory, t: &TempDir, path: &str, resume: bool) -> Result<Summary> {
    let source = Source::new(File::open(t.path("src")).unwrap()).unwrap();
    begin(link, None)?;
    put(link, source, request(path, resume), &mut |_, _| {})
}

pub(super) fn download(link: &mut Memory, t: &TempDir, path: &str) -> Result<Summary> {
    begin(link, None)?;
    get(
        link,
        Place::local(&t.path("back")).unwrap(),
        request(path, true),
        &mut |_, _| {},
    )
}

pub(super) const fn request(path: &str, resume: bool) -> Request<'_> {
    Request { path, resume }
}

pub(super) const fn hello(version: u16) -> Message {
    Message::Hello {
        version,
        secret: false,
        nonce: [4; 32],
    }
}

#[test]
fn all_lengths_are_copied_both_ways() {
    for n in [0, 1, 999, 1000, 1001, 3000, 12_345] {
        let t = TempDir::new();
        std::fs::write(t.path("src"), data(n)).unwrap();
        let (up, served) = with_server(&t, |_, _| {}, |l| upload(l, &t, "f", true));
        assert_eq!(
            up.unwrap(),
            Summary {
                size: n as u64,
                resumed: 0,
                hash: sha(&data(n))
            }
        );
        served.unwrap();
        let mut seen = Vec::new();
        let place = Place::local(&t.path("back")).unwrap();
        let (down, served) = with_server(
            &t,
            |_, _| {},
            |l| {
                begin(l, None)?;
                get(l, place, request("f", true), &mut |done, all| {
                    seen.push((done, all))
                })
            },
        );
        assert_eq!(down.unwrap().hash, sha(&data(n)));
        served.unwrap();
        assert_eq!(std::fs::read(t.path("back")).unwrap(), data(n));
        assert_eq!(seen.last(), Some(&(n as u64, n as u64)));
        assert!(seen.is_sorted());
    }
}

#[test]
fn broken_copies_are_continued() {
    let t = TempDir::new();
    std::fs::write(t.path("src"), data(10_000)).unwrap();
    // Hello, Put, Start and four slots are transferred.
    let (up, served) = with_server(&t, |a, _| a.budget = 7, |l| upload(l, &t, "f", true));
    assert!(up.is_err() && served.is_err());
    assert!(!t.path("root/f").exists());
    let (up, _) = with_server(&t, |_, _| {}, |l| upload(l, &t, "f", true));
    // How many the server processed before it detected the end is a matter of timing.
    assert!((1000..=4000).contains(&up.unwrap().resumed));
    assert_eq!(std::fs::read(t.path("root/f")).unwrap(), data(10_000));
    // The other direction: Hello, Start and two slots.
    let (down, _) = with_server(&t, |_, b| b.budget = 4, |l| download(l, &t, "f"));
    assert!(down.is_err());
    let (down, _) = with_server(&t, |_, _| {}, |l| download(l, &t, "f"));
    assert!((1000..=2000).contains(&down.unwrap().resumed));
    assert_eq!(std::fs::read(t.path("back")).unwrap(), data(10_000));
}

#[test]
fn foreign_parts_are_not_continued() {
    let t = TempDir::new();
    std::fs::create_dir_all(t.path("root")).unwrap();
    std::fs::write(t.path("src"), data(5000)).unwrap();
    for (junk, resume, resumed) in [
        (data(2000), false, 0),
        (vec![1; 2000], true, 0),
        (data(6000), true, 0),
        (data(5000), true, 5000),
    ] {
        std::fs::write(t.path("root/.f.iwarp-part"), junk).unwrap();
        let (up, _) = with_server(&t, |_, _| {}, |l| upload(l, &t, "f", resume));
        assert_eq!(up.unwrap().resumed, resumed);
        assert_eq!(std::fs::read(t.path("root/f")).unwrap(), data(5000));
    }
}

#[test]
fn damage_is_reported_to_both_ends() {
    let t = TempDir::new();
    std::fs::write(t.path("src"), data(5000)).unwrap();
    let (up, served) = with_server(&t, |a, _| a.damage = Some(2), |l| upload(l, &t, "f", true));
    assert!(up.unwrap_err().to_string().contains("SHA-256"));
    assert!(served.unwrap_err().to_string().contains("SHA-256"));
    assert!(!t.path("root/f").exists() && !t.path("root/.f.iwarp-part").exists());
}

#[test]
fn refusals_reach_the_client() {
    let t = TempDir::new();
    std::fs::write(t.path("src"), data(10)).unwrap();
    std::fs::write(t.path("outside"), "x").unwrap();
    for bad in ["../outside", "/etc/passwd", "nodir/f", ".f.iwarp-part"] {
        let (up, _) = with_server(&t, |_, _| {}, |l| upload(l, &t, bad, true));
        assert!(
            up.unwrap_err().to_string().contains("the peer says"),
            "{bad}"
        );
        let (down, _) = with_server(&t, |_, _| {}, |l| download(l, &t, bad));
        assert!(
            down.unwrap_err().to_string().contains("the peer says"),
            "{bad}"
        );
    }
    assert_eq!(std::fs::read(t.path("outside")).unwrap(), b"x");
}

#[test]
fn pending_error_explains_broken_connection() {
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
    for m in [
        hello(VERSION),
        ready,
        Message::Free { slot: 9 },
        Message::Error {
            text: "disk full".into(),
        },
    ] {
        b.send(&m).unwrap();
    }
    // The client's own sending fails at the same time; "broken" would not help the user.
    a.budget = 3;
    let e = upload(&mut a, &t, "f", true).unwrap_err().to_string();
    assert!(e.contains("disk full"), "{e}");
}

/// The peer's reason follows its earlier messages. A peer that keeps sending is not read forever.
#[test]
fn reason_is_found_after_messages_in_flight() {
    let in_flight = 2 * 256 + 3;
    for (others, found) in [(in_flight, true), (in_flight + 1, false)] {
        let (mut a, mut b) = pair();
        b.send(&Message::Done).unwrap();
        for slot in 0..others {
            b.send(&Message::Free { slot }).unwrap();
        }
        let text = "disk full".to_owned();
        b.send(&Message::Error { text }).unwrap();
        let e = begin(&mut a, None).unwrap_err().to_string();
        assert_eq!(e.contains("disk full"), found, "{others}: {e}");
    }
}

/// Plays a script against the server and returns the server's error.
fn lie(t: &TempDir, script: Vec<Message>) -> String {
    let (_, served) = with_server(
        t,
        |_, _| {},
        |l| {
            for m in &script {
                if l.send(m).is_err() {
                    break;
                }
            }
            l.out = None;
            while let Ok(Some(_)) = l.recv() {}
        },
    );
    assert!(!t.path("root/f").exists());
    served.unwrap_err().to_string()
}

#[test]
fn malicious_clients_are_refused() {
    let t = TempDir::new();
    let first = hello(VERSION);
    let put = Message::Put {
        size: 1500,
        mode: 0o644,
        resume: false,
        path: "f".into(),
    };
    let start = |offset| Message::Start {
        offset,
        size: 1500,
        mode: 0o644,
    };
    let fill = |slot, offset, len| Message::Filled { slot, offset, len };
    let up = |more: &[Message]| [&[first.clone(), put.clone()], more].concat();
    for (script, why) in [
        (vec![put.clone()], "unexpected"),
        (vec![hello(9)], "version 9"),
        (vec![first.clone(), Message::Free { slot: 0 }], "unexpected"),
        (
            up(&[Message::Start {
                offset: 0,
                size: 1501,
                mode: 0,
            }]),
            "unexpected",
        ),
        (up(&[start(700)]), "invalid offset"),
        (up(&[start(0), fill(SLOTS, 0, 1)]), "do not fit"),
        (up(&[start(0), fill(0, 0, 0)]), "do not fit"),
        (up(&[start(0), fill(0, 0, SLOT + 1)]), "do not fit"),
        (up(&[start(0), fill(0, 1, 10)]), "do not fit"),
        (
            up(&[start(0), fill(0, 0, 1000), fill(1, 1000, 501)]),
            "do not fit",
        ),
        (
            up(&[start(0), fill(0, 0, 1000), fill(1, 0, 500)]),
            "do not fit",
        ),
        (
            up(&[start(0), Message::Finish { hash: [0; 32] }]),
            "before the end",
        ),
        (
            up(&[
                start(0),
                fill(0, 0, 1000),
                fill(0, 1000, 500),
                Message::Finish {
                    hash: Hash::default(),
                },
            ]),
            "SHA-256",
        ),
        (up(&[start(0), fill(0, 0, 1000)]), "closed"),
        (up(&[start(0), Message::Done]), "unexpected"),
    ] {
        let error = lie(&t, script.clone());
        assert!(error.contains(why), "{script:?} → {error}");
    }
}

/// If a reader could free unused slots, the server would overwrite data that it has not read.
#[test]
fn readers_free_only_used_slots() {
    let t = TempDir::new();
    std::fs::create_dir_all(t.path("root")).unwrap();
    std::fs::write(t.path("root/g"), data(9000)).unwrap();
    let grant = Grant {
        stag: 1,
        base: 0,
        slot_size: SLOT,
        slots: SLOTS,
    };
    let have = Have {
        len: 0,
        hash: sha(b""),
    };
    let get = Message::Get {
        have,
        grant,
        path: "g".into(),
    };
    let error = lie(
        &t,
        vec![
            hello(VERSION),
            get,
            Message::Free { slot: 0 },
            Message::Free { slot: 0 },
            Message::Free { slot: 99 },
        ],
    );
    assert!(error.contains("not in use"), "{error}");
}

#[test]
fn malicious_servers_are_refused() {
    let t = TempDir::new();
    for (start, why) in [
        (
            Message::Start {
                offset: 5,
                size: 10,
                mode: 0,
            },
            "invalid offset",
        ),
        (
            Message::Start {
                offset: 10,
                size: 1,
                mode: 0,
            },
            "invalid offset",
        ),
        (hello(VERSION), "unexpected"),
        (
            Message::Error {
                text: "full\u{7}".into(),
            },
            "the peer says: full\\u{7}",
        ),
    ] {
        let (mut a, mut b) = pair();
        b.send(&hello(VERSION)).unwrap();
        b.send(&start).unwrap();
        let e = download(&mut a, &t, "f").unwrap_err().to_string();
        assert!(e.contains(why), "{e}");
        assert!(!t.path("back").exists());
    }
}

/// The server's rules decide which files a client may write.
#[test]
fn servers_accept_only_permitted_files() {
    let t = TempDir::new();
    std::fs::create_dir_all(t.path("root")).unwrap();
    std::fs::write(t.path("src"), data(3000)).unwrap();
    std::fs::write(t.path("root/old"), "old").unwrap();
    for (writing, path, refused) in [
        (None, "new", Some("--writable")),
        (None, "old", Some("--writable")),
        (Some(Existing::Keep), "old", Some("exists already")),
        (Some(Existing::Keep), "new", None),
        (Some(Existing::Replace), "old", None),
    ] {
        let terms = Terms {
            writing,
            secret: None,
        };
        let mut moved = 0;
        let (up, served) = with_terms(
            &t,
            &terms,
            |_, _| {},
            |l| {
                let source = Source::new(File::open(t.path("src")).unwrap()).unwrap();
                begin(l, None)?;
                let up = put(l, source, request(path, true), &mut |_, _| {});
                moved = l.writes;
                up
            },
        );
        match refused {
            Some(why) => {
                let e = up.unwrap_err().to_string();
                assert!(e.contains("the peer says") && e.contains(why), "{e}");
                assert!(served.is_err());
                assert_eq!(moved, 0, "refused before any data move");
                assert_eq!(std::fs::read(t.path("root/old")).unwrap(), b"old");
            }
            None => {
                up.unwrap();
                let there = std::fs::read(t.path("root").join(path)).unwrap();
                assert_eq!(there, data(3000));
            }
        }
        let parts = std::fs::read_dir(t.path("root")).unwrap();
        assert!(
            !parts
                .flatten()
                .any(|f| f.file_name().to_string_lossy().contains("part"))
        );
        // Reading is always allowed.
        let (down, _) = with_terms(&t, &terms, |_, _| {}, |l| download(l, &t, "old"));
        down.unwrap();
    }
}

pub(super) fn secret(t: &TempDir, octets: &[u8]) -> Secret {
    let path = t.path("secret");
    std::fs::write(&path, octets).unwrap();
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&path, private).unwrap();
    Secret::read(&path).unwrap()
}

/// Both ends need the same secret, and nothing is granted or opened before the proof.
#[test]
fn wrong_secret_gives_no_access() {
    let t = TempDir::new();
    std::fs::create_dir_all(t.path("root")).unwrap();
    std::fs::write(t.path("root/f"), data(3000)).unwrap();
    let (good, bad) = ([b'g'; 16], [b'b'; 16]);
    for (server, client, why) in [
        (Some(good), Some(good), None),
        (None, None, None),
        (Some(good), Some(bad), Some("a different secret")),
        (Some(good), None, Some("--secret-file")),
        (None, Some(good), Some("the server has no secret")),
    ] {
        let terms = Terms {
            writing: Some(Existing::Replace),
            secret: server.map(|s| secret(&t, &s)),
        };
        let mine = client.map(|s| secret(&t, &s));
        let place = Place::local(&t.path("back")).unwrap();
        let (down, _) = with_terms(
            &t,
            &terms,
            |_, _| {},
            |l| {
                begin(l, mine.as_ref())?;
                get(l, place, request("f", false), &mut |_, _| {})
            },
        );
        match why {
            None => assert_eq!(down.unwrap().hash, sha(&data(3000))),
            Some(why) => {
                let e = down.unwrap_err().to_string();
                assert!(e.contains(why), "{e}");
                assert!(!t.path("back").exists() && !t.path(".back.iwarp-part").exists());
            }
        }
        let _ = std::fs::remove_file(t.path("back"));
    }
}

/// A client that skips the proof gets neither a grant nor a file.
#[test]
fn missing_proof_gives_no_access() {
    let t = TempDir::new();
    std::fs::create_dir_all(t.path("root")).unwrap();
    std::fs::write(t.path("root/f"), data(3000)).unwrap();
    for first in [
        Message::Working,
        Message::Proof { proof: [0; 32] },
        Message::Put {
            size: 1,
            mode: 0o644,
            resume: false,
            path: "x".into(),
        },
        Message::Get {
            have: Have {
                len: 0,
                hash: sha(b""),
            },
            grant: Grant {
                stag: 1,
                base: 0,
                slot_size: SLOT,
                slots: SLOTS,
            },
            path: "f".into(),
        },
    ] {
        for claims in [true, false] {
            let terms = Terms {
                writing: Some(Existing::Replace),
                secret: Some(secret(&t, b"gggggggggggggggg")),
            };
            let hello = Message::Hello {
                version: VERSION,
                secret: claims,
                nonce: [4; 32],
            };
            let (heard, served) = with_terms(
                &t,
                &terms,
                |_, _| {},
                |l| {
                    for m in [hello, first.clone()] {
                        let _ = l.send(&m);
                    }
                    l.out = None;
                    std::iter::from_fn(|| l.recv().unwrap()).collect::<Vec<_>>()
                },
            );
            let e = served.unwrap_err().to_string();
            if claims && first == Message::Working {
                assert!(e.contains("unexpected"), "gains time: {e}");
            }
            assert!(
                matches!(
                    &heard[..],
                    [Message::Hello { secret: true, .. }, Message::Error { .. }]
                ),
                "{heard:?}"
            );
            assert!(!t.path("root/x").exists() && !t.path("root/.x.iwarp-part").exists());
        }
    }
}

/// A server that reflects the client's nonce or proof has proved nothing.
#[test]
fn reflected_proof_is_refused() {
    let t = TempDir::new();
    let mine = secret(&t, &[b'g'; 16]);
    let (mut a, mut b) = pair();
    let mirror = std::thread::spawn(move || {
        for _ in 0..2 {
            match b.recv() {
                Ok(Some(m)) => b.send(&m).unwrap(),
                _ => return,
            }
        }
    });
    let e = begin(&mut a, Some(&mine)).unwrap_err();
    assert!(e.to_string().contains("a different secret"), "{e}");
    mirror.join().unwrap();
}
