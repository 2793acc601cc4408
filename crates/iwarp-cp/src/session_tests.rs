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

const SLOT_SIZE: u32 = 1000;
const SLOTS: u16 = 3;

/// An in-memory connection: encoded messages in channels, slots in shared memory.
pub(super) struct Memory {
    pub(super) outbound: Option<Sender<Vec<u8>>>,
    inbound: Receiver<Vec<u8>>,
    own_slots: Arc<Mutex<Vec<u8>>>,
    peer_slots: Arc<Mutex<Vec<u8>>>,
    /// The connection breaks after this many sent messages.
    pub(super) budget: usize,
    /// Index of the slot write to corrupt.
    damaged_write: Option<usize>,
    pub(super) writes: usize,
    /// Arguments of the calls of `set_peer_waiting`, in order.
    pub(super) peer_waiting: Vec<bool>,
    /// Send `Working` before each message.
    pub(super) sends_working: bool,
}

pub(super) fn pair() -> (Memory, Memory) {
    let ((a_out, b_in), (b_out, a_in)) = (channel(), channel());
    let slots = || Arc::new(Mutex::new(vec![0; SLOT_SIZE as usize * usize::from(SLOTS)]));
    let (a_slots, b_slots) = (slots(), slots());
    let end = |outbound, inbound, own_slots, peer_slots| Memory {
        outbound: Some(outbound),
        inbound,
        own_slots,
        peer_slots,
        budget: usize::MAX,
        damaged_write: None,
        writes: 0,
        peer_waiting: vec![],
        sends_working: false,
    };
    (
        end(a_out, a_in, a_slots.clone(), b_slots.clone()),
        end(b_out, b_in, b_slots, a_slots),
    )
}

impl Link for Memory {
    fn send(&mut self, message: &Message) -> Result<()> {
        if self.budget == 0 {
            self.outbound = None;
        }
        self.budget = self.budget.saturating_sub(1);
        let broken = || Error::failed("broken");
        let out = self.outbound.as_ref().ok_or_else(broken)?;
        if self.sends_working && !matches!(message, Message::Hello { .. }) {
            out.send(Message::Working.encode()?).map_err(|_| broken())?;
        }
        out.send(message.encode()?).map_err(|_| broken())
    }

    fn recv(&mut self) -> Result<Option<Message>> {
        match self.inbound.recv_timeout(Duration::from_secs(10)) {
            Ok(octets) => Message::decode(&octets).map(Some),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => Err(Error::failed("no message in time")),
        }
    }

    fn try_recv(&mut self) -> Result<Option<Message>> {
        self.inbound
            .try_recv()
            .ok()
            .map(|o| Message::decode(&o))
            .transpose()
    }

    fn set_peer_waiting(&mut self, waiting: bool) {
        self.peer_waiting.push(waiting);
    }

    fn authenticated(&mut self) {}

    fn grant(&mut self) -> Result<Grant> {
        Ok(Grant {
            stag: 1,
            base: 0,
            slot_size: SLOT_SIZE,
            slots: SLOTS,
        })
    }

    fn read_slot(
        &mut self,
        slot: u16,
        len: u32,
        f: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let offset = usize::from(slot) * SLOT_SIZE as usize;
        f(&self.own_slots.lock().unwrap()[offset..offset + len as usize])
    }

    fn max_write_len(&mut self, to: &Grant) -> Result<u32> {
        Ok(to.slot_size)
    }

    fn write_slot(
        &mut self,
        to: &Grant,
        slot: u16,
        len: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let offset = to.slot_at(slot).unwrap() as usize;
        let mut slots = self.peer_slots.lock().unwrap();
        let target = &mut slots[offset..offset + len as usize];
        fill(target)?;
        if self.damaged_write == Some(self.writes) {
            target[0] ^= 1;
        }
        self.writes += 1;
        Ok(())
    }
}

pub(super) fn data(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * i / 7 + i) as u8).collect()
}

/// Runs `client` against a server of the folder `root` that permits everything. `prepare` may
/// change the connection of the client and the server before. Returns the results of both ends.
pub(super) fn with_server<T>(
    t: &TempDir,
    prepare: impl FnOnce(&mut Memory, &mut Memory),
    client: impl FnOnce(&mut Memory) -> T,
) -> (T, Result<()>) {
    let terms = Terms {
        writing: Some(Existing::Replace),
        secret: None,
    };
    with_terms(t, &terms, prepare, client)
}

pub(super) fn with_terms<T>(
    t: &TempDir,
    terms: &Terms,
    prepare: impl FnOnce(&mut Memory, &mut Memory),
    client: impl FnOnce(&mut Memory) -> T,
) -> (T, Result<()>) {
    std::fs::create_dir_all(t.path("root")).unwrap();
    let root = Root::open(&t.path("root")).unwrap();
    let (mut a, mut b) = pair();
    prepare(&mut a, &mut b);
    std::thread::scope(|s| {
        let server = s.spawn(move || serve(&mut b, &root, terms, &mut |_, _| {}));
        let result = client(&mut a);
        drop(a);
        (result, server.join().unwrap())
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
    // The client sends Hello, Put, Start and four slots.
    let (up, served) = with_server(&t, |a, _| a.budget = 7, |l| upload(l, &t, "f", true));
    assert!(up.is_err() && served.is_err());
    assert!(!t.path("root/f").exists());
    let (up, _) = with_server(&t, |_, _| {}, |l| upload(l, &t, "f", true));
    // The server has processed one to four slots; how many is a matter of timing.
    assert!((1000..=4000).contains(&up.unwrap().resumed));
    assert_eq!(std::fs::read(t.path("root/f")).unwrap(), data(10_000));
    // In the other direction, the server sends Hello, Start and two slots.
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
    let (up, served) = with_server(
        &t,
        |a, _| a.damaged_write = Some(2),
        |l| upload(l, &t, "f", true),
    );
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
    // The client's own sending fails as well, but its error would not help the user.
    a.budget = 3;
    let e = upload(&mut a, &t, "f", true).unwrap_err().to_string();
    assert!(e.contains("disk full"), "{e}");
}

/// The peer's error is found behind the messages in flight, but an end does not read more messages
/// than can be in flight.
#[test]
fn error_is_found_behind_messages_in_flight() {
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

/// Sends the messages of a script to the server and returns the server's error.
fn error_for_script(t: &TempDir, script: Vec<Message>) -> String {
    let (_, served) = with_server(
        t,
        |_, _| {},
        |l| {
            for m in &script {
                if l.send(m).is_err() {
                    break;
                }
            }
            l.outbound = None;
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
    let upload = |more: &[Message]| [&[first.clone(), put.clone()], more].concat();
    for (script, why) in [
        (vec![put.clone()], "unexpected"),
        (vec![hello(9)], "version 9"),
        (vec![first.clone(), Message::Free { slot: 0 }], "unexpected"),
        (
            upload(&[Message::Start {
                offset: 0,
                size: 1501,
                mode: 0,
            }]),
            "unexpected",
        ),
        (upload(&[start(700)]), "invalid offset"),
        (upload(&[start(0), fill(SLOTS, 0, 1)]), "do not fit"),
        (upload(&[start(0), fill(0, 0, 0)]), "do not fit"),
        (upload(&[start(0), fill(0, 0, SLOT_SIZE + 1)]), "do not fit"),
        (upload(&[start(0), fill(0, 1, 10)]), "do not fit"),
        (
            upload(&[start(0), fill(0, 0, 1000), fill(1, 1000, 501)]),
            "do not fit",
        ),
        (
            upload(&[start(0), fill(0, 0, 1000), fill(1, 0, 500)]),
            "do not fit",
        ),
        (
            upload(&[start(0), Message::Finish { hash: [0; 32] }]),
            "before the end",
        ),
        (
            upload(&[
                start(0),
                fill(0, 0, 1000),
                fill(0, 1000, 500),
                Message::Finish {
                    hash: Hash::default(),
                },
            ]),
            "SHA-256",
        ),
        (upload(&[start(0), fill(0, 0, 1000)]), "closed"),
        (upload(&[start(0), Message::Done]), "unexpected"),
    ] {
        let error = error_for_script(&t, script.clone());
        assert!(error.contains(why), "{script:?} → {error}");
    }
}

/// A client that downloads must not free slots that are not in use.
#[test]
fn client_frees_only_slots_in_use() {
    let t = TempDir::new();
    std::fs::create_dir_all(t.path("root")).unwrap();
    std::fs::write(t.path("root/g"), data(9000)).unwrap();
    let grant = Grant {
        stag: 1,
        base: 0,
        slot_size: SLOT_SIZE,
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
    let error = error_for_script(
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
                assert_eq!(moved, 0, "refused before data are sent");
                assert_eq!(std::fs::read(t.path("root/old")).unwrap(), b"old");
            }
            None => {
                up.unwrap();
                let contents = std::fs::read(t.path("root").join(path)).unwrap();
                assert_eq!(contents, data(3000));
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
        let client_secret = client.map(|s| secret(&t, &s));
        let place = Place::local(&t.path("back")).unwrap();
        let (down, _) = with_terms(
            &t,
            &terms,
            |_, _| {},
            |l| {
                begin(l, client_secret.as_ref())?;
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
                slot_size: SLOT_SIZE,
                slots: SLOTS,
            },
            path: "f".into(),
        },
    ] {
        for claims_secret in [true, false] {
            let terms = Terms {
                writing: Some(Existing::Replace),
                secret: Some(secret(&t, b"gggggggggggggggg")),
            };
            let hello = Message::Hello {
                version: VERSION,
                secret: claims_secret,
                nonce: [4; 32],
            };
            let (received, served) = with_terms(
                &t,
                &terms,
                |_, _| {},
                |l| {
                    for m in [hello, first.clone()] {
                        let _ = l.send(&m);
                    }
                    l.outbound = None;
                    std::iter::from_fn(|| l.recv().unwrap()).collect::<Vec<_>>()
                },
            );
            let e = served.unwrap_err().to_string();
            if claims_secret && first == Message::Working {
                assert!(e.contains("unexpected"), "gains time: {e}");
            }
            assert!(
                matches!(
                    &received[..],
                    [Message::Hello { secret: true, .. }, Message::Error { .. }]
                ),
                "{received:?}"
            );
            assert!(!t.path("root/x").exists() && !t.path("root/.x.iwarp-part").exists());
        }
    }
}

/// A server that reflects the client's nonce or proof has proved nothing.
#[test]
fn reflected_proof_is_refused() {
    let t = TempDir::new();
    let secret = secret(&t, &[b'g'; 16]);
    let (mut a, mut b) = pair();
    let mirror = std::thread::spawn(move || {
        for _ in 0..2 {
            match b.recv() {
                Ok(Some(m)) => b.send(&m).unwrap(),
                _ => return,
            }
        }
    });
    let e = begin(&mut a, Some(&secret)).unwrap_err();
    assert!(e.to_string().contains("a different secret"), "{e}");
    mirror.join().unwrap();
}
