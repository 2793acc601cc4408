//! Checks that operations of an established connection do not allocate, by counting the calling
//! thread's allocations. This is a separate program, because it replaces the allocator.

use iwarp::{Access, Options};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // While a thread exits, its counter may be destroyed already.
    let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
}

// SAFETY: each call is forwarded to the system's allocator. Counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Number of operations of one kind.
const TIMES: u64 = 2000;
/// Allowed number of allocations, for lists that grow when two threads route completions at the
/// same time for the first time. It does not depend on the number of operations.
const GROWTH: u64 = 16;

fn steady(what: &str, mut operation: impl FnMut()) {
    for _ in 0..200 {
        operation();
    }
    let before = ALLOCATIONS.get();
    for _ in 0..TIMES {
        operation();
    }
    let allocations = ALLOCATIONS.get() - before;
    assert!(allocations <= GROWTH, "{what}: {allocations} in {TIMES}");
}

#[test]
fn operations_allocate_nothing() {
    let listener = Options::new().listen("127.0.0.1:0").bind().unwrap();
    let to = listener.local_addr();
    let server = std::thread::spawn(move || listener.accept().wait().unwrap());
    let a = iwarp::connect(to).wait().unwrap();
    let b = server.join().unwrap();
    let all = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let target = b.share::<u64>(64, all).unwrap();
    let token = target.remote();
    let word = token.at(3).unwrap();
    let region = a.allocate::<u64>(64).unwrap();
    let echo = std::thread::spawn(move || {
        while let Ok(message) = b.recv().wait() {
            b.send(&[message.len() as u8; 8]).wait().unwrap();
        }
    });
    steady("write of a region", || {
        a.write(&region, &token).wait().unwrap()
    });
    steady("write of copies", || {
        a.write(&[1_u64; 64], &token).wait().unwrap()
    });
    steady("read", || a.read_into(&region, &token).wait().unwrap());
    steady("get", || {
        a.get(&token).wait().unwrap();
    });
    steady("fetch_add", || {
        a.fetch_add(&word, 1).wait().unwrap();
    });
    steady("send and recv", || {
        a.send("hello").wait().unwrap();
        assert_eq!(a.recv().wait().unwrap().len(), 8);
    });
    let pool = a.endpoint().pool::<u64>(64, 4, Access::empty()).unwrap();
    steady("buffer of a pool", || {
        let buffer = pool.take().wait().unwrap();
        buffer.set(0, 1).unwrap();
        a.write(&buffer, &token).wait().unwrap();
        assert_eq!(buffer.view().unwrap()[0], 1);
    });
    let mut batch = a.batch();
    steady("batch", || {
        for _ in 0..16 {
            batch.write(&region, &token).unwrap();
        }
        batch.submit().wait().unwrap();
    });
    steady("started", || {
        let two = [(); 2].map(|()| a.write(&region, &token).started());
        two.into_iter().for_each(|write| write.wait().unwrap());
    });
    // Both are handles of the connection.
    drop((a, batch, pool));
    echo.join().unwrap();
}
