//! The thread that does what no program thread is there to do: it answers requests to connect, and sends the messages
//! of `SO_KEEPALIVE`. It starts when there is something to do, and sleeps in between.

use crate::errno::Result;
use crate::fork;
use crate::socket::Socket;
use parking_lot::{Condvar, Mutex};
use std::mem::MaybeUninit;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

struct Service {
    /// The process whose thread it is.
    generation: Option<u32>,
    kicked: bool,
    listeners: Vec<Weak<Socket>>,
    alive: Vec<KeepAlive>,
}

struct KeepAlive {
    socket: Weak<Socket>,
    every: Duration,
    due: Instant,
}

static SERVICE: Mutex<Service> = Mutex::new(Service {
    generation: None,
    kicked: false,
    listeners: Vec::new(),
    alive: Vec::new(),
});
static CHANGED: Condvar = Condvar::new();

/// A listener has something to answer.
pub(crate) fn kick() {
    SERVICE.lock().kicked = true;
    CHANGED.notify_all();
}

/// Answers for a listener from now on.
///
/// # Errors
/// No thread can be started.
pub(crate) fn watch_listener(socket: &Arc<Socket>) -> Result<()> {
    let mut service = running()?;
    service.listeners.retain(|l| l.strong_count() > 0);
    service.listeners.push(Arc::downgrade(socket));
    // A request may have come before it was listed.
    service.kicked = true;
    drop(service);
    CHANGED.notify_all();
    Ok(())
}

/// Sends a message on an otherwise silent connection every so often; `None` ends it.
///
/// # Errors
/// No thread can be started.
pub(crate) fn keep_alive(socket: &Arc<Socket>, every: Option<Duration>) -> Result<()> {
    let mut service = running()?;
    let this = Arc::downgrade(socket);
    service.alive.retain(|k| !k.socket.ptr_eq(&this));
    if let Some(every) = every {
        service.alive.push(KeepAlive {
            socket: this,
            every,
            due: Instant::now() + every,
        });
    }
    drop(service);
    CHANGED.notify_all();
    Ok(())
}

/// The service with its thread running.
fn running() -> Result<parking_lot::MutexGuard<'static, Service>> {
    let mut service = SERVICE.lock();
    if service.generation != Some(fork::generation()) {
        // What a parent of this process had is none of our business.
        for old in service.listeners.drain(..) {
            std::mem::forget(old);
        }
        for old in service.alive.drain(..) {
            std::mem::forget(old);
        }
        spawn_without_signals()?;
        service.generation = Some(fork::generation());
    }
    Ok(service)
}

/// The program's signal handlers run on the program's threads only.
fn spawn_without_signals() -> Result<()> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are valid to write, and the first is filled before it is read.
    let masked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr())
    };
    let spawned = std::thread::Builder::new()
        .name("iwarp-rsocket".into())
        .spawn(run);
    if masked == 0 {
        // SAFETY: the call above has filled the set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    }
    spawned?;
    Ok(())
}

fn run() {
    loop {
        let (listeners, alive) = {
            let mut service = SERVICE.lock();
            let now = Instant::now();
            if !std::mem::take(&mut service.kicked) {
                match service.alive.iter().map(|k| k.due).min() {
                    Some(due) if due <= now => {}
                    Some(due) => {
                        CHANGED.wait_until(&mut service, due);
                        continue;
                    }
                    None => {
                        CHANGED.wait(&mut service);
                        continue;
                    }
                }
            }
            service.alive.retain(|k| k.socket.strong_count() > 0);
            let due: Vec<_> = service
                .alive
                .iter_mut()
                .filter(|k| k.due <= now)
                .filter_map(|k| {
                    k.due = now + k.every;
                    k.socket.upgrade()
                })
                .collect();
            let listeners: Vec<_> = service.listeners.iter().filter_map(Weak::upgrade).collect();
            (listeners, due)
        };
        for listener in listeners {
            listener.serve();
        }
        for socket in alive {
            socket.keep_alive();
        }
    }
}
