//! Decides which names are redirected, to which file, and at which step of the loader's search.
//!
//! The target is the file in the variable `IWARP_AUDIT`. If that is not set, it is
//! `libibverbs.so.1` in the directory of this library, which is known from `LD_AUDIT`.
//!
//! For the first request, the path of the target is returned immediately, so that the loader
//! records that path for debuggers. On a later request, the loader finds that the file is already
//! loaded, and records the name that it opened as another name of the object. The loader checks
//! symbol versions by the name in the program, such as `librdmacm.so.1`. If it had opened the path,
//! no object would have that name, and an assertion in the loader would end the process. So a later
//! request without a slash keeps its name, and the path replaces the first candidate in the
//! loader's search directories.
//!
//! Invariant of the `unsafe` code: the loader passes C strings and the cookies of its objects. It
//! calls with its lock held, so these functions never run concurrently.

use core::cell::UnsafeCell;
use core::ffi::{c_char, c_long, c_uint};

/// The variable with the path of the target, if that is not [`TARGET_NAME`] beside this library.
const TARGET_VARIABLE: &[u8] = b"IWARP_AUDIT";
/// The loader's variable with the paths of audit libraries, separated by colons.
const AUDIT_VARIABLE: &[u8] = b"LD_AUDIT";
/// The variable that makes glibc's loader resolve all functions when the program starts.
const NOW_VARIABLE: &[u8] = b"LD_BIND_NOW";
/// The file name of this library, in `LD_AUDIT`.
const OWN_NAME: &[u8] = b"libiwarp_audit.so";
/// The file name of the target in the directory of this library.
const TARGET_NAME: &[u8] = b"libibverbs.so.1";
const STEMS: [&[u8]; 2] = [b"libibverbs", b"librdmacm"];
/// Longest path including the final zero: Linux's `PATH_MAX`.
const PATH_MAX: usize = 4096;
/// The maximum number of namespaces of a glibc process (`DL_NNS`).
const NAMESPACES: usize = 16;
/// The flag of the target in a cookie. The other bits are the number of the object's namespace.
const IS_TARGET: usize = 1 << 16;
/// The loader passes the requested name, before it searches (`LA_SER_ORIG`).
const ORIGINAL: c_uint = 1;
/// The version of the audit interface since glibc 2.35.
const VERSION: c_uint = 2;

/// The loader's record of an object: the part that `link.h` publishes.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct LinkMap {
    pub(crate) base: usize,
    pub(crate) name: *const c_char,
    pub(crate) dynamic: *const u8,
    pub(crate) next: *const Self,
    pub(crate) previous: *const Self,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Variables(*const *const c_char);

impl Variables {
    /// # Safety
    /// `first` is null, or points to a null-terminated list of pointers to C strings.
    pub(crate) const unsafe fn new(first: *const *const c_char) -> Self {
        Self(first)
    }

    /// Returns the value of a variable, or an empty one if it is not set.
    pub(crate) fn value(self, name: &[u8]) -> &'static [u8] {
        let mut next = self.0;
        if next.is_null() {
            return &[];
        }
        loop {
            // SAFETY: the caller of `new` guarantees that the list ends with a null pointer, and
            // `next` is not beyond it.
            let entry = unsafe { *next };
            if entry.is_null() {
                return &[];
            }
            // SAFETY: the caller of `new` guarantees C strings. The kernel has put them on the
            // stack, where they remain.
            let entry = unsafe { octets(entry) };
            if let Some([b'=', value @ ..]) = without(entry, name) {
                return value;
            }
            // SAFETY: this pointer is not the last one.
            next = unsafe { next.add(1) };
        }
    }
}

/// Returns the bytes of a C string.
///
/// # Safety
/// `text` is a C string that does not change during `'a`.
pub(crate) unsafe fn octets<'a>(text: *const c_char) -> &'a [u8] {
    let mut len = 0;
    // SAFETY: guaranteed by the caller; no byte before this one is zero.
    while unsafe { *text.add(len) } != 0 {
        len += 1;
    }
    // SAFETY: the loop has read these `len` bytes.
    unsafe { core::slice::from_raw_parts(text.cast(), len) }
}

/// Returns the text after `prefix`, if the text starts with it. (The methods of slices would call
/// the C library's `memcmp`.)
pub(crate) fn without<'a>(mut text: &'a [u8], mut prefix: &[u8]) -> Option<&'a [u8]> {
    while let [wanted, rest_of_prefix @ ..] = prefix {
        let [octet, rest_of_text @ ..] = text else {
            return None;
        };
        if octet != wanted {
            return None;
        }
        (text, prefix) = (rest_of_text, rest_of_prefix);
    }
    Some(text)
}

pub(crate) fn equals(text: &[u8], other: &[u8]) -> bool {
    without(text, other).is_some_and(<[u8]>::is_empty)
}

/// Splits a path into its directory, with the final slash, and its file name.
pub(crate) fn split_path(path: &[u8]) -> (&[u8], &[u8]) {
    let mut end = path.len();
    while let Some(last) = end.checked_sub(1) {
        if path.get(last) == Some(&b'/') {
            break;
        }
        end = last;
    }
    path.split_at_checked(end).unwrap_or((&[], path))
}

/// Returns `true` for a name of `libibverbs` or `librdmacm`, with or without a version. The name
/// may contain a hash, which packaging tools add to the names of private copies.
pub(crate) fn is_redirected(name: &[u8]) -> bool {
    let (_, file_name) = split_path(name);
    let mut rest = None;
    for stem in STEMS {
        rest = rest.or(without(file_name, stem));
    }
    let Some(mut rest) = rest else {
        return false;
    };
    if let [b'-', hash @ ..] = rest {
        rest = hash;
        while let [octet, later @ ..] = rest
            && octet.is_ascii_alphanumeric()
        {
            rest = later;
        }
        if rest.len() == hash.len() {
            return false;
        }
    }
    match without(rest, b".so") {
        Some([]) => true,
        Some([b'.', version @ ..]) => !version.is_empty(),
        _ => false,
    }
}

/// Returns the directory of this library, with the final slash, or `None` if `LD_AUDIT` does not
/// contain a path of it. Entries with `$ORIGIN` and other tokens, which the loader expands, are not
/// supported.
fn own_directory(mut list: &[u8]) -> Option<&[u8]> {
    loop {
        let mut len = 0;
        let mut has_token = false;
        while let Some(octet) = list.get(len)
            && *octet != b':'
        {
            has_token |= *octet == b'$';
            len += 1;
        }
        let (entry, rest) = list.split_at_checked(len)?;
        let (directory, name) = split_path(entry);
        if equals(name, OWN_NAME) && !directory.is_empty() && !has_token {
            return Some(directory);
        }
        let [_, others @ ..] = rest else {
            return None;
        };
        list = others;
    }
}

/// The path of the target as a C string. It is empty if nothing is redirected.
#[derive(Debug)]
struct Path {
    text: [u8; PATH_MAX],
    len: usize,
}

impl Path {
    const fn empty() -> Self {
        Self {
            text: [0; PATH_MAX],
            len: 0,
        }
    }

    /// Sets the path to the concatenation of two parts, or to an empty path if they are too long.
    fn set(&mut self, parts: [&[u8]; 2]) {
        self.len = 0;
        let mut len = 0;
        for part in parts {
            for octet in part {
                let Some(place) = self.text.get_mut(len) else {
                    return;
                };
                *place = *octet;
                len += 1;
            }
        }
        let Some(place) = self.text.get_mut(len) else {
            return;
        };
        *place = 0;
        self.len = len;
    }

    fn as_slice(&self) -> &[u8] {
        self.text.get(..self.len).unwrap_or(&[])
    }
}

/// The state between the loader's calls.
#[derive(Debug)]
struct Inner {
    target: Path,
    /// The loader resolves all functions when the program starts.
    binds_now: bool,
    /// For each namespace, whether the target is loaded.
    loaded: [bool; NAMESPACES],
}

#[derive(Debug)]
pub(crate) struct State(UnsafeCell<Inner>);

// SAFETY: the functions never run concurrently (invariant at the head of the file).
unsafe impl Sync for State {}

impl State {
    pub(crate) const fn new() -> Self {
        Self(UnsafeCell::new(Inner {
            target: Path::empty(),
            binds_now: false,
            loaded: [false; NAMESPACES],
        }))
    }

    #[expect(
        clippy::mut_from_ref,
        reason = "the loader calls one function at a time, and each uses the reference once"
    )]
    fn inner(&self) -> &mut Inner {
        // SAFETY: the functions never run concurrently, and each uses one reference.
        unsafe { &mut *self.0.get() }
    }

    pub(crate) fn start(&self, variables: Variables) {
        let inner = self.inner();
        inner.binds_now = !variables.value(NOW_VARIABLE).is_empty();
        let path = variables.value(TARGET_VARIABLE);
        if !path.is_empty() {
            inner.target.set([path, &[]]);
        } else if let Some(directory) = own_directory(variables.value(AUDIT_VARIABLE)) {
            inner.target.set([directory, TARGET_NAME]);
        }
    }

    /// Returns the version of the audit interface to use, or 0 if the loader must ignore this
    /// library.
    ///
    /// Before version 2 (glibc 2.35), an audit library slows down all calls between shared
    /// libraries, unless all functions are resolved when the program starts.
    pub(crate) fn version(&self, offered: c_uint) -> c_uint {
        let inner = self.inner();
        if inner.target.len == 0 || (offered < VERSION && !inner.binds_now) {
            return 0;
        }
        offered.min(VERSION)
    }

    /// # Safety
    /// `map` is the object that the loader has opened in this namespace, and `cookie` points to the
    /// cookie of that object.
    pub(crate) unsafe fn opened(&self, map: *const LinkMap, namespace: c_long, cookie: *mut usize) {
        let inner = self.inner();
        let namespace = usize::try_from(namespace).unwrap_or(0);
        // SAFETY: guaranteed by the caller. The name of an object is a C string.
        let name = unsafe { octets((*map).name) };
        let is_target = !name.is_empty() && equals(name, inner.target.as_slice());
        let mut value = namespace;
        if let Some(loaded) = inner.loaded.get_mut(namespace)
            && is_target
        {
            *loaded = true;
            value |= IS_TARGET;
        }
        // SAFETY: guaranteed by the caller.
        unsafe { *cookie = value };
    }

    /// # Safety
    /// `cookie` points to the cookie of an opened object.
    pub(crate) unsafe fn closed(&self, cookie: *const usize) {
        // SAFETY: guaranteed by the caller.
        let value = unsafe { *cookie };
        if value & IS_TARGET != 0
            && let Some(loaded) = self.inner().loaded.get_mut(value & !IS_TARGET)
        {
            *loaded = false;
        }
    }

    /// Returns the name for which the loader continues its search: the path of the target, or
    /// `name`.
    ///
    /// # Safety
    /// `name` is a C string, and `cookie` points to the cookie of the requesting object.
    pub(crate) unsafe fn search(
        &self,
        name: *const c_char,
        cookie: *const usize,
        flag: c_uint,
    ) -> *const c_char {
        let inner = self.inner();
        // SAFETY: guaranteed by the caller.
        let text = unsafe { octets(name) };
        if !is_redirected(text) {
            return name;
        }
        // SAFETY: guaranteed by the caller.
        let namespace = unsafe { *cookie } & !IS_TARGET;
        // If we have not set the cookie, the object belongs to the program's main namespace.
        let loaded = inner.loaded.get(namespace).unwrap_or(&inner.loaded[0]);
        let has_slash = !split_path(text).0.is_empty();
        let redirect = match (flag == ORIGINAL, *loaded) {
            (true, true) => has_slash,
            (true, false) => true,
            (false, loaded) => loaded,
        };
        match redirect {
            true => inner.target.text.as_ptr().cast(),
            false => name,
        }
    }
}
