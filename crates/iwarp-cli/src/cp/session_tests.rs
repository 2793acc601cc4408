//! Both ends of a copy against each other, and against liars, over a transport in memory.

use super::confine::{Place, Root};
use super::part::tests::{TempDir, sha};
use super::part::{Hash, Source};
use super::protocol::{Grant, Have, Message};
use super::session::{Link, Summary, get, put, serve};
use crate::error::{Error, Result};
use std::fs::File;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SLOT: u32 = 1000;
const SLOTS: u16 = 3;

/// A connection in memory: encoded messages in channels, slots in shared memory.
struct Memory {
    out: Option<Sender<Vec<u8>>>,
    inn: Receiver<Vec<u8>>,
    mine: Arc<Mutex<Vec<u8>>>,
    theirs: Arc<Mutex<Vec<u8>>>,
    /// Breaks after this many messages sent.
    budget: usize,
    /// Damages this slot write (counted from 0).
    damage: Option<usize>,
    writes: usize,
}

fn pair() -> (Memory, Memory) {
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
        self.out
            .as_ref()
            .ok_or_else(broken)?
            .send(message.encode()?)
            .map_err(|_| broken())
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

fn data(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * i / 7 + i) as u8).collect()
}

/// Runs `client` against a server of `root`; gives both outcomes.
fn with_server<T>(
    t: &TempDir,
    fix: impl FnOnce(&mut Memory, &mut Memory),
    client: impl FnOnce(&mut Memory) -> T,
) -> (T, Result<()>) {
    std::fs::create_dir_all(t.path("root")).unwrap();
    let root = Root::open(&t.path("root")).unwrap();
    let (mut a, mut b) = pair();
    fix(&mut a, &mut b);
    std::thread::scope(|s| {
        let server = s.spawn(move || serve(&mut b, &root, &mut |_, _| {}));
        let mine = client(&mut a);
        drop(a);
        (mine, server.join().unwrap())
    })
}

fn upload(link: &mut Memory, t: &TempDir, path: &str, resume: bool) -> Result<Summary> {
    let source = Source::new(File::open(t.path("src")).unwrap()).unwrap();
    put(link, source, path, resume, &mut |_, _| {})
}

fn download(link: &mut Memory, t: &TempDir, path: &str) -> Result<Summary> {
    get(
        link,
        Place::local(&t.path("back")).unwrap(),
        path,
        true,
        &mut |_, _| {},
    )
}

#[test]
fn files_of_all_lengths_go_there_and_back() {
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
            |l| get(l, place, "f", true, &mut |done, all| seen.push((done, all))),
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
    // Hello, Put, Start and four slots get through.
    let (up, served) = with_server(&t, |a, _| a.budget = 7, |l| upload(l, &t, "f", true));
    assert!(up.is_err() && served.is_err());
    assert!(!t.path("root/f").exists());
    let (up, _) = with_server(&t, |_, _| {}, |l| upload(l, &t, "f", true));
    // How many the server took before it noticed is a matter of timing.
    assert!((1000..=4000).contains(&up.unwrap().resumed));
    assert_eq!(std::fs::read(t.path("root/f")).unwrap(), data(10_000));
    // The same for the other direction: Hello, Start and two slots.
    let (down, _) = with_server(&t, |_, b| b.budget = 4, |l| download(l, &t, "f"));
    assert!(down.is_err());
    let (down, _) = with_server(&t, |_, _| {}, |l| download(l, &t, "f"));
    assert!((1000..=2000).contains(&down.unwrap().resumed));
    assert_eq!(std::fs::read(t.path("back")).unwrap(), data(10_000));
}

#[test]
fn foreign_or_damaged_parts_are_not_continued() {
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
fn damage_on_the_way_is_told_to_both() {
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
fn a_broken_connection_is_explained_by_what_came_before() {
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
        Message::Hello { version: 1 },
        ready,
        Message::Free { slot: 9 },
        Message::Error {
            text: "disk full".into(),
        },
    ] {
        b.send(&m).unwrap();
    }
    // The client's own end breaks at the same time; "broken" would help nobody.
    a.budget = 3;
    let e = upload(&mut a, &t, "f", true).unwrap_err().to_string();
    assert!(e.contains("disk full"), "{e}");
}

/// Plays a script against the server and gives how it ended.
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
fn lying_clients_achieve_nothing() {
    let t = TempDir::new();
    let hello = Message::Hello { version: 1 };
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
    let up = |more: &[Message]| [&[hello.clone(), put.clone()], more].concat();
    for (script, why) in [
        (vec![put.clone()], "unexpected"),
        (vec![Message::Hello { version: 2 }], "version 2"),
        (vec![hello.clone(), Message::Free { slot: 0 }], "unexpected"),
        (
            up(&[Message::Start {
                offset: 0,
                size: 1501,
                mode: 0,
            }]),
            "unexpected",
        ),
        (up(&[start(700)]), "where nothing ends"),
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
    // A reader that frees slots which are not in use would make the server overwrite what it has not read.
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
            hello,
            get,
            Message::Free { slot: 0 },
            Message::Free { slot: 0 },
            Message::Free { slot: 99 },
        ],
    );
    assert!(error.contains("not in use"), "{error}");
}

#[test]
fn lying_servers_achieve_nothing() {
    let t = TempDir::new();
    for (start, why) in [
        (
            Message::Start {
                offset: 5,
                size: 10,
                mode: 0,
            },
            "where nothing ends",
        ),
        (
            Message::Start {
                offset: 10,
                size: 1,
                mode: 0,
            },
            "where nothing ends",
        ),
        (Message::Hello { version: 1 }, "unexpected"),
        (
            Message::Error {
                text: "full\u{7}".into(),
            },
            "the peer says: full",
        ),
    ] {
        let (mut a, mut b) = pair();
        b.send(&Message::Hello { version: 1 }).unwrap();
        b.send(&start).unwrap();
        let e = download(&mut a, &t, "f").unwrap_err().to_string();
        assert!(e.contains(why), "{e}");
        assert!(!t.path("back").exists());
    }
}
