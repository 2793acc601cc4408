//! Tests of pools: growth, reuse, the order of waiters, and exclusive use.

use super::*;
use crate::connection::Endpoint;
use crate::connection::testing::LIMIT;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::task::Wake;

fn pool<T: Pod>(len: usize, limit: usize) -> Pool<T> {
    let endpoint = Endpoint::local([127, 0, 0, 1].into()).unwrap();
    endpoint.pool(len, limit, Access::empty()).unwrap()
}

fn now<T: Pod>(pool: &Pool<T>) -> Option<Region<T>> {
    pool.take().now().unwrap()
}

#[derive(Default)]
struct Calls(AtomicUsize);

impl Wake for Calls {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn pool_grows_to_limit() {
    let pool = pool::<u32>(3, 40);
    assert_eq!((pool.len(), pool.limit(), pool.buffers()), (3, 40, 0));
    assert!(pool.shared().is_empty() && !pool.is_empty());
    let mut buffers = Vec::new();
    for (taken, registered) in [(1, 16), (16, 16), (17, 32), (33, 40), (40, 40)] {
        while buffers.len() < taken {
            buffers.push(now(&pool).expect("below the limit"));
        }
        assert_eq!((pool.in_use(), pool.buffers()), (taken, registered));
    }
    assert!(now(&pool).is_none());
    assert!(matches!(
        pool.take().wait_for(Duration::from_millis(1)),
        Err(Error::TimedOut(_))
    ));
    // Each buffer has its own memory, in a cache line of its own.
    for (i, buffer) in buffers.iter().enumerate() {
        buffer.write_at(0, &[i as u32; 3]).unwrap();
    }
    for (i, buffer) in buffers.iter().enumerate() {
        assert_eq!(buffer.to_vec().unwrap(), [i as u32; 3]);
        let at = buffer.view().unwrap().as_ptr() as usize;
        assert!(at.is_multiple_of(CACHE_LINE));
    }
    drop(buffers);
    assert_eq!((pool.in_use(), pool.buffers()), (0, 40));
}

#[test]
fn last_handle_returns_buffer() {
    let pool = pool::<u64>(4, 1);
    let buffer = now(&pool).unwrap();
    buffer.write_at(0, &[1, 2, 3, 4]).unwrap();
    let parts = [buffer.slice(1..2).unwrap(), buffer.clone()];
    drop(buffer);
    let view = parts[0].view().unwrap();
    drop(parts);
    assert!(now(&pool).is_none(), "the view uses it");
    assert_eq!((&view[..], pool.in_use()), (&[2][..], 1));
    drop(view);
    let again = now(&pool).unwrap();
    assert_eq!(again.to_vec().unwrap(), [1, 2, 3, 4], "the same buffer");
}

/// A buffer can be changed in place although others of its block are in use.
#[test]
fn only_handle_gets_elements() {
    let pool = pool::<u64>(2, 2);
    let (mut first, second) = (now(&pool).unwrap(), now(&pool).unwrap());
    first.get_mut().unwrap().copy_from_slice(&[5, 6]);
    let clone = first.clone();
    assert!(first.get_mut().is_none());
    drop(clone);
    assert_eq!(first.get_mut().unwrap(), [5, 6]);
    assert_eq!(second.to_vec().unwrap(), [0, 0]);
    // The next user gets the memory exclusively, too.
    drop(first);
    assert_eq!(now(&pool).unwrap().get_mut().unwrap(), [5, 6]);
}

#[test]
fn waiters_get_buffers_in_order() {
    let pool = pool::<u8>(1, 1);
    let buffer = now(&pool).unwrap();
    let calls: [Arc<Calls>; 3] = Default::default();
    let wakers: Vec<Waker> = calls.iter().map(|c| Waker::from(Arc::clone(c))).collect();
    let mut waits: Vec<_> = wakers.iter().map(|_| Some(pool.take())).collect();
    for (wait, waker) in waits.iter_mut().zip(&wakers) {
        assert!(wait.as_mut().unwrap().poll_with(waker).is_pending());
    }
    let count = |i: usize| calls[i].0.load(Ordering::SeqCst);
    drop(buffer);
    assert_eq!([count(0), count(1), count(2)], [1, 0, 0]);
    // The second one is not served before the first one, which was woken.
    assert!(now(&pool).is_none(), "others wait");
    // The first one gives up, and passes the buffer on.
    waits[0] = None;
    assert_eq!([count(0), count(1), count(2)], [1, 1, 0]);
    let Poll::Ready(Ok(buffer)) = waits[1].as_mut().unwrap().poll_with(&wakers[1]) else {
        panic!("the second waiter was woken");
    };
    waits[1] = None;
    assert_eq!(count(2), 0);
    drop(buffer);
    assert_eq!(count(2), 1);
    assert!(waits[2].as_mut().unwrap().poll_with(&wakers[2]).is_ready());
}

#[test]
fn blocked_thread_gets_returned_buffer() {
    let pool = pool::<u8>(1, 1);
    let buffer = now(&pool).unwrap();
    std::thread::scope(|scope| {
        let (send, receive) = channel();
        let waiting = &pool;
        scope.spawn(move || send.send(waiting.take().wait_for(LIMIT).unwrap().len()));
        while pool.inner.state.lock().waiters.is_empty() {
            std::thread::yield_now();
        }
        drop(buffer);
        assert_eq!(receive.recv_timeout(LIMIT), Ok(1));
    });
}

/// Threads take and return buffers at the same time. No two have the same one.
#[test]
fn threads_use_buffers_exclusively() {
    let pool = pool::<u64>(8, 5);
    std::thread::scope(|scope| {
        for number in 0..8 {
            let pool = pool.clone();
            scope.spawn(move || {
                for round in 0..200 {
                    let mut buffer = pool.take().wait_for(LIMIT).unwrap();
                    let mark = number << 32 | round;
                    buffer.get_mut().expect("no one else has it").fill(mark);
                    let view = buffer.view().unwrap();
                    std::thread::yield_now();
                    assert_eq!(view[..], [mark; 8]);
                }
            });
        }
    });
    assert_eq!((pool.in_use(), pool.buffers()), (0, 5));
}

#[test]
fn buffers_outlive_pool() {
    let pool = pool::<u8>(100, 20);
    let buffers: Vec<_> = (0..20).map(|_| now(&pool).unwrap()).collect();
    drop(pool);
    for buffer in &buffers {
        buffer.set(99, 7).unwrap();
    }
    let last = buffers.into_iter().next_back().unwrap();
    assert_eq!(last.get(99).unwrap(), 7);
}

#[test]
fn impossible_pools_are_refused() {
    let endpoint = Endpoint::local([127, 0, 0, 1].into()).unwrap();
    let none = Access::empty();
    for refused in [
        endpoint.pool::<u64>(1, 0, none),
        endpoint.pool::<u64>(usize::MAX, 1, none),
        endpoint.pool::<u64>(usize::MAX / 8, 1, none),
        endpoint.pool::<u64>(1, 1, Access::LOCAL_WRITE),
    ] {
        assert!(matches!(refused, Err(Error::InvalidArgument(_))));
    }
    let sizeless = endpoint.pool::<[u8; 0]>(1, 1, none);
    assert!(matches!(sizeless, Err(Error::InvalidArgument(_))));
    let huge = endpoint.pool::<u8>(1 << 50, 100, none).unwrap();
    assert!(matches!(huge.take().now(), Err(Error::OutOfMemory)));
    let empty = endpoint.pool::<u8>(0, 2, none).unwrap();
    assert!(now(&empty).is_some_and(|buffer| buffer.is_empty()));
}
