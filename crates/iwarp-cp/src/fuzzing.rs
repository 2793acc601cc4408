//! Fuzz targets for the messages of `iwarp cp` and for its server, built with `--cfg fuzzing`.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;

use sha2::{Digest as _, Sha256};

use crate::confine::Root;
use crate::part::{Existing, Hash};
use crate::protocol::{Grant, MAX_MESSAGE, MAX_SLOT_SIZE, MAX_SLOTS, Message};
use crate::session::{Terms, serve};
use crate::transport::Link;
use iwarp_cli_common::error::{Error, Result};

/// Decodes one message. A valid message encodes to the same bytes, except for escaped text.
pub fn message(data: &[u8]) {
    let Ok(message) = Message::decode(data) else {
        return;
    };
    if let Message::Ready { grant, .. } | Message::Get { grant, .. } = &message {
        assert!(grant.slots > 0 && grant.slots <= MAX_SLOTS);
        assert!(grant.slot_size > 0 && grant.slot_size <= MAX_SLOT_SIZE);
        assert_eq!(grant.slot_at(grant.slots), None);
    }
    let encoded = message.encode().expect("decoded messages can be encoded");
    assert!(encoded.len() <= MAX_MESSAGE);
    if !matches!(message, Message::Hello { .. } | Message::Error { .. }) {
        assert_eq!(encoded, data);
    }
}

/// Size and number of the slots that the server grants.
const SLOT_SIZE: u32 = 64;
const SLOTS: u16 = 3;
const FILE: (&str, &[u8]) = (
    "file",
    b"the contents of the server's file, a few octets of different values",
);

/// A client that sends the messages of the input, each after its length in one byte, and never
/// reads.
#[derive(Debug)]
struct Client<'a> {
    input: &'a [u8],
    /// Data that the server has read from its slots for the current file.
    read: Vec<u8>,
}

impl Client<'_> {
    fn next(&mut self) -> Result<Option<Message>> {
        let Some((&len, rest)) = self.input.split_first() else {
            return Ok(None);
        };
        let (octets, rest) = rest.split_at(usize::from(len).min(rest.len()));
        self.input = rest;
        let message = match Message::decode(octets)? {
            // The fuzzer cannot find a hash, so replace a zero one with the correct value.
            Message::Finish { hash } if hash == Hash::default() => Message::Finish {
                hash: Sha256::digest(&self.read).into(),
            },
            other => other,
        };
        if matches!(message, Message::Put { .. }) {
            self.read.clear();
        }
        Ok(Some(message))
    }
}

impl Link for Client<'_> {
    fn send(&mut self, message: &Message) -> Result<()> {
        let octets = message.encode()?;
        assert!(octets.len() <= MAX_MESSAGE);
        Message::decode(&octets).map(|_| ())
    }

    fn recv(&mut self) -> Result<Option<Message>> {
        self.next()
    }

    fn try_recv(&mut self) -> Result<Option<Message>> {
        self.next()
    }

    fn set_peer_waiting(&mut self, _: bool) {}

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
        assert!(
            slot < SLOTS && len <= SLOT_SIZE,
            "slot {slot}, {len} octets"
        );
        let data: Vec<u8> = (0..len).map(|i| (i * 7 + u32::from(slot)) as u8).collect();
        self.read.extend_from_slice(&data);
        f(&data)
    }

    fn max_write_len(&mut self, to: &Grant) -> Result<u32> {
        Ok(to.slot_size.min(SLOT_SIZE))
    }

    fn write_slot(
        &mut self,
        to: &Grant,
        slot: u16,
        len: u32,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        assert!(len > 0 && len <= to.slot_size && slot < to.slots);
        if to.slot_at(slot).is_none() {
            return Err(Error::failed("no such address"));
        }
        fill(&mut vec![0; len as usize])
    }
}

static FOLDER: OnceLock<PathBuf> = OnceLock::new();

/// Removes the folder of this process.
pub fn end() {
    if let Some(dir) = FOLDER.get() {
        let _ = fs::remove_dir_all(dir);
    }
}

/// Returns the folder of this process: `served`, and `secret`, which clients must not reach.
fn folder() -> &'static PathBuf {
    FOLDER.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("iwarp-fuzz-cp-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("served/folder")).expect("a folder");
        fs::write(dir.join("secret"), b"secret").expect("a file");
        fs::write(dir.join("served").join(FILE.0), FILE.1).expect("a file");
        dir
    })
}

/// Runs a server against a client that sends arbitrary messages. Checks that nothing outside of the
/// served folder changes, and that a file that the server reports as complete has the right size.
pub fn session(data: &[u8]) {
    let Some((&writing, input)) = data.split_first() else {
        return;
    };
    let dir = folder();
    let root = Root::open(&dir.join("served")).expect("the folder exists");
    let terms = Terms {
        writing: match writing & 3 {
            0 => None,
            1 => Some(Existing::Keep),
            _ => Some(Existing::Replace),
        },
        secret: None,
    };
    let mut client = Client {
        input,
        read: Vec::new(),
    };
    let mut done = Vec::new();
    let _ = serve(&mut client, &root, &terms, &mut |path, summary| {
        done.push((path.to_owned(), summary));
    });
    // Check only the last file, because it may have replaced earlier ones.
    if let Some((path, summary)) = done.last() {
        let file = fs::read(dir.join("served").join(path));
        assert_eq!(
            file.map_or(0, |file| file.len() as u64),
            summary.size,
            "{path}"
        );
    }
    check_and_restore(dir, terms.writing == Some(Existing::Replace));
}

/// Checks the files beside the served folder, and restores the folder.
fn check_and_restore(dir: &std::path::Path, may_replace: bool) {
    let secret = fs::read(dir.join("secret")).expect("the file exists");
    assert_eq!(secret, b"secret");
    assert_eq!(
        fs::read_dir(dir).expect("a folder").count(),
        2,
        "a new entry beside the served folder"
    );
    let served = dir.join("served");
    let mut entries = Vec::new();
    for entry in fs::read_dir(&served).expect("a folder") {
        entries.push(entry.expect("an entry").path());
    }
    let file = fs::read(served.join(FILE.0)).expect("the file exists");
    assert!(
        may_replace || file == FILE.1,
        "a file that must not be replaced has changed"
    );
    if entries.len() == 2 && file == FILE.1 && is_empty(&served.join("folder")) {
        return;
    }
    for path in entries {
        let removed = match path.is_dir() {
            true => fs::remove_dir_all(&path),
            false => fs::remove_file(&path),
        };
        removed.expect("the entry can be removed");
    }
    fs::create_dir(served.join("folder")).expect("a folder");
    fs::write(served.join(FILE.0), FILE.1).expect("a file");
}

fn is_empty(dir: &std::path::Path) -> bool {
    fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}
