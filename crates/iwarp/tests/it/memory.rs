//! Tests of regions of files, huge pages, vectors and pools, and of reading in place.

use iwarp::bytemuck::{Pod, Zeroable};
use iwarp::connection::{MapError, Refusal};
use iwarp::verbs::WcStatus;
use iwarp::{Access, Config, Device, Endpoint, Error, HugePages, Options, Region, RemoteRegion};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common::alone::alone;
use crate::common::calls::{ALL, LIMIT, pair, pair_with};

/// A length of several pages on all machines.
const LEN: u64 = 1 << 18;

/// Returns an unlinked file of [`LEN`] bytes, each the low byte of its offset divided by 8.
fn file() -> File {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("iwarp-test-memory-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let mut options = File::options();
    options.read(true).write(true).create_new(true);
    let file = options.open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    let octets: Vec<u8> = (0..LEN).map(|i| (i / 8) as u8).collect();
    file.write_all_at(&octets, 0).unwrap();
    file
}

fn local() -> Endpoint {
    Endpoint::local([127, 0, 0, 1].into()).unwrap()
}

fn refusal<T>(result: iwarp::Result<T>) -> Option<Refusal> {
    match result {
        Err(Error::Refused(refusal)) => Some(refusal),
        _ => None,
    }
}

fn map_error<T>(result: iwarp::Result<T>) -> Option<MapError> {
    match result {
        Err(Error::Map(error)) => Some(error),
        _ => None,
    }
}

#[test]
fn peers_read_and_write_files() {
    let (a, b) = pair();
    let file = file();
    // Inside a page, and not to its end.
    let (start, end) = (5_000, 70_008);
    let region = b.endpoint().map_file_mut::<u64>(&file, start..end, ALL);
    let region = region.unwrap();
    assert_eq!((region.len(), region.shared()), (8126, ALL));
    let there = region.remote();
    let word = |n: u64| u64::from_ne_bytes([(start / 8 + n) as u8; 8]);
    assert_eq!(a.get(&there.at(2).unwrap()).wait().unwrap(), word(2));
    assert_eq!(region.get(8125).unwrap(), word(8125));
    a.write(&[7, 8], &there.slice(8124..).unwrap())
        .wait()
        .unwrap();
    let last = there.at(8125).unwrap();
    assert_eq!(a.fetch_add(&last, 2).wait().unwrap(), 8);
    assert_eq!(region.load(8125).unwrap(), 10);
    region.store(0, 1).unwrap();
    assert_eq!(region.fetch_add(0, 41).unwrap(), 1);
    region.write_at(1, &[43]).unwrap();
    assert_eq!(region.slice(..2).unwrap().to_vec().unwrap(), [42, 43]);
    assert_eq!(region.bytes().load(8).unwrap(), 43_u64.to_ne_bytes()[0]);
    let in_file = |at| {
        let mut octets = [0; 8];
        file.read_exact_at(&mut octets, at).unwrap();
        u64::from_ne_bytes(octets)
    };
    let found = [start - 8, start, start + 8, end - 16, end - 8, end].map(in_file);
    let before = u64::from_ne_bytes([(start / 8 - 1) as u8; 8]);
    let after = u64::from_ne_bytes([(end / 8) as u8; 8]);
    assert_eq!(found, [before, 42, 43, 7, 10, after]);
    // Other processes may change it at any time.
    file.write_all_at(&9_u64.to_ne_bytes(), start).unwrap();
    assert_eq!(region.get(0).unwrap(), 9);
    assert_eq!(refusal(region.view()), Some(Refusal::NeverViewed));
}

/// The mapping of a private file is never referred to, either.
#[test]
fn files_are_sent_but_not_referred_to() {
    let (a, b) = pair_with(&Options::new().message_size(LEN as u32));
    let file = file();
    let mut region: Region<u8> = a.endpoint().map_file(&file, 1.., Access::empty()).unwrap();
    drop(file);
    assert_eq!(region.len() as u64, LEN - 1);
    assert!(region.get_mut().is_none());
    assert_eq!(refusal(region.view()), Some(Refusal::NeverViewed));
    a.send(&region).wait().unwrap();
    let message = b.recv().wait_for(LIMIT).unwrap();
    assert!(
        message
            .iter()
            .zip(1..LEN)
            .all(|(octet, i)| *octet == (i / 8) as u8)
    );
}

/// Nothing writes a read-only file, and attempts do not end the connection.
#[test]
fn writes_to_read_only_files_are_refused() {
    let (a, b) = pair();
    let file = file();
    let endpoint = a.endpoint();
    for rights in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC, ALL] {
        let refused = endpoint.map_file::<u64>(&file, .., rights);
        assert_eq!(map_error(refused), Some(MapError::ReadOnly));
    }
    let region = endpoint.map_file::<u64>(&file, .., Access::REMOTE_READ);
    let region = region.unwrap();
    let there = b.share::<u64>(4, ALL).unwrap().remote();
    let mut batch = a.batch();
    for refused in [
        region.set(0, 1),
        region.store(0, 1),
        region.fetch_add(0, 1).map(drop),
        a.read_into(&region, &there).wait(),
        batch.read_into(&region, &there),
        a.bind(&region, Access::REMOTE_WRITE).wait().map(drop),
    ] {
        assert_eq!(map_error(refused), Some(MapError::ReadOnly));
    }
    assert!(batch.is_empty());
    let window = a.bind(&region, Access::REMOTE_READ).wait().unwrap();
    let mine = b.allocate::<u64>(1).unwrap();
    for from in [window.remote(), region.remote()] {
        mine.set(0, 0).unwrap();
        b.read_into(&mine, &from.at(9).unwrap()).wait().unwrap();
        assert_eq!(mine.get(0).unwrap(), u64::from_ne_bytes([9; 8]));
    }
    assert_eq!(region.load(9).unwrap(), u64::from_ne_bytes([9; 8]));
}

#[test]
fn impossible_files_are_refused() {
    let (endpoint, file, none) = (local(), file(), Access::empty());
    let outside = |end| Some(MapError::OutsideFile { end, len: LEN });
    let map = |range: std::ops::Range<u64>| map_error(endpoint.map_file::<u8>(&file, range, none));
    assert_eq!(map(0..LEN + 1), outside(LEN + 1));
    assert_eq!(map(LEN + 1..LEN + 1), outside(LEN + 1));
    assert_eq!(map(LEN..LEN), None);
    let empty = endpoint.map_file::<u64>(&file, LEN.., none).unwrap();
    assert!(empty.is_empty());
    let partial = MapError::PartialElement {
        octets: 12,
        element: 8,
    };
    let refused = endpoint.map_file::<u64>(&file, 0..12, none);
    assert_eq!(map_error(refused), Some(partial));
    #[allow(clippy::reversed_empty_ranges, reason = "it has to be refused")]
    let reversed = endpoint.map_file::<u8>(&file, 2..1, none);
    assert!(matches!(reversed, Err(Error::InvalidArgument(_))));
    let constant = File::open("/proc/self/exe").unwrap();
    let refused = endpoint.map_file_mut::<u8>(&constant, 0..1, none);
    let not_opened = |writable| Some(MapError::NotOpened { writable });
    assert_eq!(map_error(refused), not_opened(true));
    let path = std::env::temp_dir().join(format!("iwarp-test-write-{}", std::process::id()));
    let mut options = File::options();
    let write_only = options.write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    write_only.set_len(1).unwrap();
    let refused = endpoint.map_file::<u8>(&write_only, .., none);
    assert_eq!(map_error(refused), not_opened(false));
    let directory = File::open("/tmp").unwrap();
    assert!(endpoint.map_file::<u8>(&directory, 0..1, none).is_err());
    // Without the handler, a truncated file would end the process.
    let device = Device::by_address([127, 0, 0, 1].into()).unwrap();
    let mut config = Config::default();
    config.memory_guard = false;
    let unguarded = Endpoint::open(&device, config).unwrap();
    let refused = map_error(unguarded.map_file::<u8>(&file, .., none));
    assert_eq!(refused, Some(MapError::Unguarded));
}

/// Accesses to a truncated file fail: calls with an error, those of requests and peers by the end
/// of their connection. The process and other connections continue.
#[test]
fn truncated_files_end_no_process() {
    alone("truncated_files_end_no_process", || {
        let (a, b) = pair();
        let endpoint = a.endpoint().clone();
        let file = file();
        let region = endpoint.map_file_mut::<u64>(&file, .., ALL).unwrap();
        file.set_len(0).unwrap();
        let missing = Some(MapError::NoPage);
        assert_eq!(map_error(region.get(0)), missing);
        assert_eq!(map_error(region.set(0, 1)), missing);
        assert_eq!(map_error(region.load(0)), missing);
        assert_eq!(map_error(region.store(0, 1)), missing);
        assert_eq!(map_error(region.fetch_add(0, 1)), missing);
        assert_eq!(map_error(region.bytes().load(0)), missing);
        assert_eq!(map_error(region.to_vec()), missing);
        // A region, created before, is accessed over connections of the same endpoint.
        let connect = || {
            let listener = endpoint.listen("127.0.0.1:0").bind().unwrap();
            let to = listener.local_addr();
            std::thread::scope(|scope| {
                let accepted = scope.spawn(|| listener.accept().wait().unwrap());
                let connected = iwarp::connect(to).wait().unwrap();
                (connected, accepted.join().unwrap())
            })
        };
        let there = region.remote();
        let status = |result: iwarp::Result<()>| match result {
            Err(Error::Operation(error)) => error.status(),
            other => panic!("{other:?}"),
        };
        let (peer, _own) = connect();
        let mine = peer.allocate::<u64>(100).unwrap();
        let read = peer.read_into(&mine, &there.slice(..100).unwrap());
        assert_eq!(status(read.wait_for(LIMIT)), WcStatus::RemoteAccess);
        let (peer, own) = connect();
        // A Write is not answered, so it completes, unless the end of the connection is noticed
        // first.
        match peer.write(&[1], &there).wait_for(LIMIT) {
            Ok(()) => {}
            failed => assert!(matches!(
                status(failed),
                WcStatus::RemoteAccess | WcStatus::Flushed
            )),
        }
        assert!(!own.closed().wait_for(LIMIT).unwrap().is_graceful());
        for of_file in [true, false] {
            let (peer, own) = connect();
            let target = peer.share::<u64>(LEN as usize / 8, ALL).unwrap();
            let request = match of_file {
                true => own.write(&region, &target.remote()),
                false => own.read_into(&region, &target.remote()),
            };
            let failed = status(request.wait_for(LIMIT));
            assert_eq!(failed, WcStatus::LocalProtection, "{of_file}");
        }
        // A file that grows again has new pages.
        file.set_len(LEN).unwrap();
        assert_eq!(region.get(0).unwrap(), 0);
        region.set(0, 5).unwrap();
        a.send("still here").wait().unwrap();
        assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), *b"still here");
    });
}

#[test]
fn huge_pages_work_or_say_why() {
    let (a, b) = pair();
    let len = (5 << 20) / 8;
    for pages in [HugePages::Transparent, HugePages::Mib2, HugePages::Gib1] {
        let region = match b.endpoint().share_huge::<u64>(len, pages, ALL) {
            Ok(region) => region,
            Err(Error::Map(error)) => {
                let text = error.to_string();
                assert!(text.contains("/sys/kernel/mm/hugepages"), "{text}");
                assert_ne!(pages, HugePages::Transparent);
                continue;
            }
            Err(other) => panic!("{other:?}"),
        };
        assert_eq!((region.len(), region.shared()), (len, ALL));
        let last = region.remote().at(len - 1).unwrap();
        a.write(&[3], &last).wait().unwrap();
        assert_eq!(a.get(&last).wait().unwrap(), 3);
        assert_eq!([0, len - 1].map(|i| region.get(i).unwrap()), [0, 3]);
    }
    let refused = a
        .endpoint()
        .share_huge::<u64>(usize::MAX, HugePages::Mib2, ALL);
    assert!(matches!(refused, Err(Error::InvalidArgument(_))));
    let most = a
        .endpoint()
        .share_huge::<u64>(1 << 47, HugePages::Mib2, ALL);
    let error = map_error(most).expect("no machine has a pebibyte");
    assert!(matches!(
        error,
        MapError::NoHugePages { .. } | MapError::NoSuchHugePage { .. }
    ));
}

/// The elements of vectors, boxed slices and strings stay where they are.
#[test]
fn adopted_elements_are_not_copied() {
    let endpoint = local();
    let vector = vec![1_u32, 2, 3];
    let at = vector.as_ptr();
    let region = endpoint.adopt(vector, Access::REMOTE_READ).unwrap();
    assert_eq!(region.view().unwrap().as_ptr(), at);
    let boxed: Box<[u32]> = (0..1000).collect();
    let at = boxed.as_ptr();
    let mut region = endpoint.adopt(boxed, Access::empty()).unwrap();
    assert_eq!(region.view().unwrap().as_ptr(), at);
    region.get_mut().unwrap()[999] += 1;
    assert_eq!(region.slice(998..).unwrap().to_vec().unwrap(), [998, 1000]);
    let text = String::from("a string");
    let at = text.as_ptr();
    let region = endpoint.adopt(text, Access::empty()).unwrap();
    assert_eq!(region.view().unwrap().as_ptr(), at);
}

#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[bytemuck(crate = "iwarp::bytemuck")]
#[repr(C)]
struct Record {
    key: u64,
    name: [u8; 40],
}

/// Structures, and arrays whose length is not one of bytemuck's usual ones, are elements.
#[test]
fn structures_are_elements() {
    let (a, b) = pair();
    let table = b.share::<Record>(10, ALL).unwrap();
    let record = Record {
        key: 3,
        name: [7; 40],
    };
    let there = RemoteRegion::<Record>::from_bytes(&table.remote().to_bytes()).unwrap();
    a.write(&[record], &there.at(3).unwrap()).wait().unwrap();
    assert_eq!(a.get(&there.at(3).unwrap()).wait().unwrap(), record);
    assert_eq!(table.get(3).unwrap(), record);
    let odd = b.share::<[u16; 37]>(2, ALL).unwrap();
    a.write(&[[9; 37]], &odd.remote()).wait().unwrap();
    assert_eq!(a.read(&odd.remote()).wait().unwrap(), [[9; 37], [0; 37]]);
}

#[test]
fn messages_are_elements_in_place() {
    let (a, b) = pair();
    let words = [1_u64, 2, 3];
    a.send(bytemuck::cast_slice::<_, u8>(&words))
        .wait()
        .unwrap();
    let message = b.recv().wait_for(LIMIT).unwrap();
    assert_eq!(message.elements::<u64>().unwrap(), words);
    let part = message.slice(8..).unwrap();
    assert_eq!(part.elements::<u64>().unwrap(), [2, 3]);
    for range in [0..9, 1..9] {
        let part = message.slice(range).unwrap();
        assert!(matches!(
            refusal(part.elements::<u64>()),
            Some(Refusal::NotElements { element: 8, .. })
        ));
    }
}

/// While a view exists, whatever would write its memory is refused, and the connection continues.
#[test]
fn views_exclude_writers() {
    let (a, b) = pair();
    let there = b.share::<u64>(8, ALL).unwrap();
    there.write_at(0, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    let mut mine = a.allocate::<u64>(8).unwrap();
    a.read_into(&mine, &there.remote()).wait().unwrap();
    let view = mine.view().unwrap();
    assert_eq!(view[..], [1, 2, 3, 4, 5, 6, 7, 8]);
    let part = view.slice(2..4).unwrap();
    assert!(view.slice(2..9).is_err());
    drop(view);
    assert_eq!((&part[..], part.region().len()), (&[3, 4][..], 2));
    let again = part.clone();
    drop(part);
    let mut batch = a.batch();
    for refused in [
        mine.set(7, 1),
        mine.store(7, 1),
        mine.fetch_add(7, 1).map(drop),
        a.read_into(&mine, &there.remote()).wait(),
        batch.read_into(&mine, &there.remote()),
        a.bind(&mine, ALL).wait().map(drop),
    ] {
        assert_eq!(refusal(refused), Some(Refusal::Viewed));
    }
    assert!(mine.get_mut().is_none() && batch.is_empty());
    // Reading is possible: by copies, requests and peers.
    assert_eq!(mine.get(7).unwrap(), 8);
    a.write(again.region(), &there.remote()).wait().unwrap();
    let window = a.bind(&mine, Access::REMOTE_READ).wait().unwrap();
    assert_eq!(b.get(&window.remote()).wait().unwrap(), 1);
    assert_eq!(there.get(1).unwrap(), 4);
    drop((again, window));
    mine.set(0, 9).unwrap();
    a.read_into(&mine, &there.remote()).wait().unwrap();
    assert_eq!(mine.get_mut().unwrap()[1], 4);
}

/// Memory cannot be viewed while an operation, a batch or a window may write it.
#[test]
fn writers_exclude_views() {
    let (a, b) = pair();
    let there = b.share::<u64>(8, ALL).unwrap();
    let mine = a.allocate::<u64>(8).unwrap();
    let written = |mine: &Region<u64>| {
        let refused = refusal(mine.view());
        assert!(matches!(refused, None | Some(Refusal::BeingWritten)));
        refused.is_some()
    };
    let read = a.read_into(&mine, &there.remote());
    assert!(written(&mine), "it may start at any time");
    read.wait().unwrap();
    assert!(!written(&mine));
    let mut batch = a.batch();
    for _ in 0..3 {
        batch.write(&mine, &there.remote()).unwrap();
        assert!(!written(&mine), "it is only read");
        batch.read_into(&mine, &there.remote()).unwrap();
        batch.write(&mine, &there.remote()).unwrap();
        assert!(written(&mine));
        batch.submit().wait().unwrap();
        assert!(!written(&mine));
    }
    batch.read_into(&mine, &there.remote()).unwrap();
    assert!(written(&mine));
    batch.clear();
    assert!(!written(&mine));
    // A request whose operation was dropped writes until it completes.
    for _ in 0..50 {
        drop(a.read_into(&mine, &there.remote()).started());
    }
    a.get(&there.remote()).wait().unwrap();
    assert!(!written(&mine), "later requests complete later");
    // A forgotten operation may write forever.
    std::mem::forget(a.read_into(mine.slice(..1).unwrap(), &there.remote().at(0).unwrap()));
    assert!(written(&mine));
    let shared = a.share::<u64>(1, Access::REMOTE_WRITE).unwrap();
    assert_eq!(refusal(shared.view()), Some(Refusal::NeverViewed));
}

/// A dropped operation's request still writes. It may complete at any time, so the view is refused
/// in most rounds only.
#[test]
fn abandoned_reads_exclude_views() {
    const WORDS: usize = 1 << 17;
    let (a, b) = pair();
    let there = b.share::<u64>(WORDS, Access::REMOTE_READ).unwrap();
    let last = there.remote().at(WORDS - 1).unwrap();
    let mine = a.allocate::<u64>(WORDS).unwrap();
    let mut refused = false;
    for round in 1..=100 {
        there.set(WORDS - 1, round).unwrap();
        drop(a.read_into(&mine, &there.remote()).started());
        refused |= refusal(mine.view()) == Some(Refusal::BeingWritten);
        // Completes after the other Read.
        assert_eq!(a.get(&last).wait_for(LIMIT).unwrap(), round);
        assert_eq!(mine.view().unwrap()[WORDS - 1], round);
    }
    assert!(refused);
}

/// A region that a peer has filled through a window is read in place when the window has ended.
#[test]
fn region_is_viewed_after_its_window() {
    let (a, b) = pair();
    let region = a.allocate::<u64>(3).unwrap();
    let window = a.bind(&region, Access::REMOTE_WRITE).wait().unwrap();
    let token = window.remote();
    b.write(&[1, 2, 3], &token).wait().unwrap();
    b.send_with_invalidate("filled", &token).wait().unwrap();
    let message = a.recv().wait_for(LIMIT).unwrap();
    assert!(window.is_invalidated_by(&message));
    assert_eq!(refusal(region.view()), Some(Refusal::BeingWritten));
    let back = window.into_region();
    assert_eq!(back.view().unwrap()[..], [1, 2, 3]);
    // A window that is invalidated by a request ends with it.
    let window = a.bind(&region, ALL).wait().unwrap();
    assert_eq!(refusal(region.view()), Some(Refusal::BeingWritten));
    a.invalidate(window).wait().unwrap();
    assert_eq!(region.view().unwrap()[..], [1, 2, 3]);
    // A bind that was refused is no window.
    assert!(a.bind(&region, Access::LOCAL_WRITE).wait().is_err());
    assert!(region.view().is_ok());
}

/// A buffer of a pool returns when the last request that uses it has completed, not earlier.
#[test]
fn requests_keep_pool_buffers() {
    let (a, b) = pair_with(&Options::new().send_depth(4));
    let target = b.share::<u64>(1000, ALL).unwrap();
    let pool = a.endpoint().pool::<u64>(1, 20, Access::empty()).unwrap();
    for i in 0..1000 {
        let buffer = pool.take().wait_for(LIMIT).unwrap();
        buffer.set(0, i as u64 + 1).unwrap();
        // The operation and the handle are dropped while the request is queued or in flight.
        drop(a.write(&buffer, &target.remote().at(i).unwrap()).started());
    }
    let buffer = pool.take().wait_for(LIMIT).unwrap();
    a.read_into(&buffer, &target.remote().at(999).unwrap())
        .wait()
        .unwrap();
    assert_eq!(buffer.view().unwrap()[..], [1000]);
    let expected: Vec<u64> = (1..=1000).collect();
    assert_eq!(target.to_vec().unwrap(), expected);
    drop(buffer);
    assert!(pool.buffers() <= 20);
    assert_eq!(pool.in_use(), 0);
}

/// A window on a pool's buffer gives no access to its neighbours.
#[test]
fn pool_buffers_are_sent_and_bound() {
    let (a, b) = pair();
    let pool = a.endpoint().pool::<u8>(64, 3, Access::empty()).unwrap();
    let [first, second] = [(); 2].map(|()| pool.take().wait().unwrap());
    first.write_at(0, b"pooled").unwrap();
    a.send(first.slice(..6).unwrap()).wait().unwrap();
    assert_eq!(*b.recv().wait_for(LIMIT).unwrap(), *b"pooled");
    let window = a.bind(&second, ALL).wait().unwrap();
    let token = window.remote();
    b.write(b"by the peer", &token).wait().unwrap();
    assert_eq!(b.read(&token.slice(..2).unwrap()).wait().unwrap(), b"by");
    let second = {
        drop(second);
        window.into_region()
    };
    assert_eq!(second.view().unwrap()[..11], *b"by the peer");
    assert_eq!(first.slice(..7).unwrap().to_vec().unwrap(), b"pooled\0");
    let other = b.endpoint().pool::<u8>(64, 1, Access::empty()).unwrap();
    let foreign = other.take().wait().unwrap();
    let refused = refusal(a.send(&foreign).wait());
    assert_eq!(refused, Some(Refusal::ForeignRegion));
}

#[tokio::test]
async fn pool_is_awaited() {
    let pool = local().pool::<u8>(10, 2, Access::REMOTE_READ).unwrap();
    assert_eq!(pool.shared(), Access::REMOTE_READ);
    let held = [pool.take().await.unwrap(), pool.take().await.unwrap()];
    let waiting = tokio::spawn(pool.take());
    assert!(pool.take().now().unwrap().is_none());
    drop(held);
    assert_eq!(waiting.await.unwrap().unwrap().len(), 10);
}
