//! Tests of processes that fork while they use the C libraries. The child can use the libraries,
//! even if another thread held a process-wide lock at the fork. Calls on inherited objects fail
//! immediately, or destroy the objects.

use crate::abi::cma::{rdma_cm_id, rdma_event_channel};
use crate::abi::verbs::*;
use crate::cm::{channel, event, id};
use crate::cq::queue as cq;
use crate::device::{context, list};
use crate::domain::pd;
use crate::lifecycle::{create, destroy};
use crate::memory::mr;
use crate::open;
use iwarp::runtime::process_lock;
use iwarp_rsocket as rs;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

const SUCCESS: i32 = 7;
/// A child that runs longer is considered to hang.
const CHILD_TIMEOUT: Duration = Duration::from_secs(60);

/// Held by each test that forks, because one of them holds the library's locks for a long time.
static FORKING: Mutex<()> = Mutex::new(());

fn lock_forking() -> MutexGuard<'static, ()> {
    FORKING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `check` in a child. Returns its exit code, or `None` if it hangs.
fn in_child(check: impl FnOnce() -> i32) -> Option<i32> {
    // SAFETY: the child ends by `_exit`.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let code = check();
        // SAFETY: always safe; the child ends without destructors and exit handlers.
        unsafe { libc::_exit(code) };
    }
    let start = Instant::now();
    let mut status = 0;
    loop {
        // SAFETY: `status` is a valid place for the result.
        if unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == child {
            return Some(libc::WEXITSTATUS(status)).filter(|_| libc::WIFEXITED(status));
        }
        if start.elapsed() > CHILD_TIMEOUT {
            // SAFETY: the process is a child that has not been waited for.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, &raw mut status, 0);
            }
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn loopback() -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as _,
        sin_port: 0,
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes([127, 0, 0, 1]),
        },
        sin_zero: [0; 8],
    }
}

struct Objects {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    mr: *mut ibv_mr,
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
    memory: Box<[u8; 4096]>,
}

impl Objects {
    fn new() -> Option<Self> {
        let mut memory = Box::new([0; 4096]);
        // SAFETY: the arguments are as the manual pages require.
        unsafe {
            let mut count = 0;
            let list = list::ibv_get_device_list(&raw mut count);
            let context = open::ibv_open_device(*list);
            list::ibv_free_device_list(list);
            let pd = pd::ibv_alloc_pd(context);
            let mr = mr::ibv_reg_mr(pd, memory.as_mut_ptr().cast(), memory.len(), 7);
            let cq = cq::ibv_create_cq(context, 16, null_mut(), null_mut(), 0);
            let mut attr: ibv_qp_init_attr = zeroed();
            (attr.send_cq, attr.recv_cq, attr.qp_type) = (cq, cq, 2);
            (attr.cap.max_send_wr, attr.cap.max_send_sge) = (4, 1);
            (attr.cap.max_recv_wr, attr.cap.max_recv_sge) = (4, 1);
            let qp = create::ibv_create_qp(pd, &raw mut attr);
            let all = Self {
                context,
                pd,
                mr,
                cq,
                qp,
                memory,
            };
            (!all.qp.is_null() && !all.mr.is_null()).then_some(all)
        }
    }

    fn destroy(self) -> bool {
        // SAFETY: the objects are alive, and each is destroyed once.
        let codes = unsafe {
            [
                destroy::ibv_destroy_qp(self.qp),
                cq::ibv_destroy_cq(self.cq),
                mr::ibv_dereg_mr(self.mr),
                pd::ibv_dealloc_pd(self.pd),
                context::ibv_close_device(self.context),
            ]
        };
        drop(self.memory);
        codes == [0; 5]
    }
}

struct Listener {
    channel: *mut rdma_event_channel,
    id: *mut rdma_cm_id,
}

impl Listener {
    fn new() -> Option<Self> {
        // SAFETY: the arguments are as the manual pages require.
        unsafe {
            let channel = channel::rdma_create_event_channel();
            let mut id = null_mut();
            let mut address = loopback();
            let done = id::rdma_create_id(channel, &raw mut id, null_mut(), 0x106) == 0
                && id::rdma_bind_addr(id, (&raw mut address).cast()) == 0
                && id::rdma_listen(id, 1) == 0;
            done.then_some(Self { channel, id })
        }
    }

    fn destroy(self) -> bool {
        // SAFETY: the objects are alive, and each is destroyed once.
        unsafe {
            let done = id::rdma_destroy_id(self.id) == 0;
            channel::rdma_destroy_event_channel(self.channel);
            done
        }
    }
}

/// Sends a byte between two rsockets of this process, and closes a listener with a pending
/// connection.
fn rsockets() -> rs::Result<bool> {
    let new = || rs::socket(libc::AF_INET, libc::SOCK_STREAM, 0);
    let (listener, client) = (new()?, new()?);
    rs::bind(listener, "127.0.0.1:0".parse().expect("an address"))?;
    rs::listen(listener, 2)?;
    rs::connect(client, rs::local_address(listener)?)?;
    let (server, _) = rs::accept(listener)?;
    rs::send(client, b"x", 0)?;
    let mut got = [0];
    rs::recv(server, &mut got, 0)?;
    // This connection is never accepted, so the library closes it in the background.
    let unaccepted = new()?;
    rs::connect(unaccepted, rs::local_address(listener)?)?;
    for socket in [client, server, listener, unaccepted] {
        rs::close(socket)?;
    }
    Ok(got == *b"x")
}

/// Uses verbs objects, a listener, and rsockets. Returns [`SUCCESS`], or a code for the part that
/// failed.
fn use_everything() -> i32 {
    if !Objects::new().is_some_and(Objects::destroy) {
        return 1;
    }
    if !Listener::new().is_some_and(Listener::destroy) {
        return 2;
    }
    match rsockets() {
        Ok(true) => SUCCESS,
        _ => 3,
    }
}

/// Some of the locks that [`use_everything`] creates.
const LOCKS: &[&str] = &[
    "engine::ENGINES",
    "device::known::KNOWN",
    "conn::linger::LINGERING",
    "objects::stats::OPENED",
    "verbs::object::LIVING",
    "verbs::device::OPEN",
    "rsocket::TABLE",
    "rsocket::service::SERVICE",
];

#[test]
fn child_survives_each_lock() {
    let _forking = lock_forking();
    let mut names = Vec::new();
    let mut missing = Vec::new();
    // The lock for lingering streams exists only after a stream has lingered, which happens only if
    // its peer did not close first. So one round may not be enough.
    for _ in 0..20 {
        assert_eq!(use_everything(), SUCCESS);
        names = process_lock::names();
        missing = LOCKS.iter().filter(|name| !names.contains(name)).collect();
        if missing.is_empty() {
            break;
        }
    }
    assert!(missing.is_empty(), "{missing:?} are not in {names:?}");
    for name in names {
        let (locked_sender, locked) = mpsc::channel();
        let (done_sender, done) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                process_lock::while_locked(name, || {
                    locked_sender.send(()).unwrap();
                    let _ = done.recv();
                })
            });
            locked.recv().unwrap();
            let code = in_child(use_everything);
            drop(done_sender);
            assert_eq!(code, Some(SUCCESS), "{name} was held at the fork");
        });
    }
    assert_eq!(use_everything(), SUCCESS, "in the parent");
}

/// Other threads of the parent use the libraries during the forks.
#[test]
fn child_works_after_fork_under_load() {
    let _forking = lock_forking();
    use std::sync::atomic::{AtomicBool, Ordering};
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    assert_eq!(use_everything(), SUCCESS);
                }
            });
        }
        let codes: Vec<_> = (0..20).map(|_| in_child(use_everything)).collect();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(codes, [Some(SUCCESS); 20]);
    });
}

#[test]
fn inherited_listener_fails_immediately() {
    let _forking = lock_forking();
    let listener = Listener::new().unwrap();
    let socket = rs::socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
    rs::bind(socket, "127.0.0.1:0".parse().unwrap()).unwrap();
    rs::listen(socket, 1).unwrap();
    let code = in_child(|| {
        let mut event = null_mut();
        // SAFETY: the pointers are to live objects.
        let got = unsafe { event::rdma_get_cm_event(listener.channel, &raw mut event) };
        let refused = std::io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP);
        if got != -1 || !refused {
            return 1;
        }
        // SAFETY: the identifier is alive.
        if unsafe { id::rdma_listen(listener.id, 1) } != -1 {
            return 2;
        }
        let mut set = [libc::pollfd {
            fd: socket,
            events: libc::POLLIN,
            revents: 0,
        }];
        if rs::poll(&mut set, None) != Ok(1) || set[0].revents & libc::POLLERR == 0 {
            return 3;
        }
        if rs::accept(socket) != Err(rs::Errno::NOTSUP) || rs::close(socket).is_err() {
            return 4;
        }
        if listener.destroy() { SUCCESS } else { 5 }
    });
    assert_eq!(code, Some(SUCCESS));
    rs::close(socket).unwrap();
}

#[test]
fn child_destroys_inherited_objects() {
    let _forking = lock_forking();
    let objects = Objects::new().unwrap();
    let code = in_child(|| if objects.destroy() { SUCCESS } else { 1 });
    assert_eq!(code, Some(SUCCESS));
}
