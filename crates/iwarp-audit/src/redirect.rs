//! Which names are redirected, to which file, and at which step of the loader's search.
//!
//! The target is the file that the variable `IWARP_AUDIT` names, or else `libibverbs.so.1` in the
//! folder of this library. `LD_AUDIT` names that folder, so the target is known wherever this
//! library is loaded.
//!
//! The first request for the target gets its path immediately, so that the loader records that path
//! for debuggers. Later requests are different: the loader then finds that it has loaded the file
//! already, and records the name by which it was opened as another name of the object. If that were
//! the path, symbol versions would be searched in `librdmacm.so.1`, no object would have that name,
//! and an assertion of the loader would end the process. So a later request without a slash keeps
//! its name, and the path replaces the first candidate in the loader's folders.
//!
//! Invariant of the `unsafe` code: the loader passes C strings and the cookies of its objects, and
//! calls with its lock held, so nothing here runs at the same time as anything else.

use core::cell::UnsafeCell;
use core::ffi::{c_char, c_long, c_uint};

/// The variable with the path of the target. It is needed where the target has another name.
const TARGET_VARIABLE: &[u8] = b"IWARP_AUDIT";
/// The loader's variable with the paths of audit libraries, separated by colons.
const AUDIT_VARIABLE: &[u8] = b"LD_AUDIT";
/// Makes glibc's loader resolve all functions at the start.
const NOW_VARIABLE: &[u8] = b"LD_BIND_NOW";
/// Our entry in `LD_AUDIT`.
const OWN_NAME: &[u8] = b"libiwarp_audit.so";
/// The name of the target in the folder of this library.
const TARGET_NAME: &[u8] = b"libibverbs.so.1";
const STEMS: [&[u8]; 2] = [b"libibverbs", b"librdmacm"];
/// Longest path including the final zero: Linux's `PATH_MAX`.
const PATH_MAX: usize = 4096;
/// The most namespaces of a glibc process (`DL_NNS`).
const SPACES: usize = 16;
/// In a cookie: the object is the target. The other bits are the number of its namespace.
const IS_TARGET: usize = 1 << 16;
/// The search begins, with the requested name (`LA_SER_ORIG`).
const ORIGINAL: c_uint = 1;
/// The version of the interface since glibc 2.35.
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
        let mut at = self.0;
        if at.is_null() {
            return &[];
        }
        loop {
            // SAFETY: the promise of `new`. `at` is not beyond the null pointer.
            let entry = unsafe { *at };
            if entry.is_null() {
                return &[];
            }
            // SAFETY: the promise of `new`. The kernel's copy of the strings stays.
            let entry = unsafe { octets(entry) };
            if let Some([b'=', value @ ..]) = without(entry, name) {
                return value;
            }
            // SAFETY: this pointer is not the last.
            at = unsafe { at.add(1) };
        }
    }
}

/// Returns the bytes of a C string.
///
/// # Safety
/// `text` is a C string that does not change during `'a`.
pub(crate) unsafe fn octets<'a>(text: *const c_char) -> &'a [u8] {
    let mut len = 0;
    // SAFETY: the caller's promise: no byte before this one is zero.
    while unsafe { *text.add(len) } != 0 {
        len += 1;
    }
    // SAFETY: `len` bytes were read.
    unsafe { core::slice::from_raw_parts(text.cast(), len) }
}

/// Returns the text after `prefix`. The methods of slices would call the C library's `memcmp`.
pub(crate) fn without<'a>(mut text: &'a [u8], mut prefix: &[u8]) -> Option<&'a [u8]> {
    while let [wanted, later @ ..] = prefix {
        let [octet, behind @ ..] = text else {
            return None;
        };
        if octet != wanted {
            return None;
        }
        (text, prefix) = (behind, later);
    }
    Some(text)
}

pub(crate) fn is(text: &[u8], other: &[u8]) -> bool {
    without(text, other).is_some_and(<[u8]>::is_empty)
}

pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let mut at = path.len();
    while let Some(before) = at.checked_sub(1) {
        if path.get(before) == Some(&b'/') {
            break;
        }
        at = before;
    }
    path.split_at_checked(at).unwrap_or((&[], path))
}

/// Returns `true` for a name of `libibverbs` or `librdmacm`: with or without a version, and with or
/// without the hash that packaging tools put into the names of private copies.
pub(crate) fn is_redirected(name: &[u8]) -> bool {
    let (_, last) = split(name);
    let mut rest = None;
    for stem in STEMS {
        rest = rest.or(without(last, stem));
    }
    let Some(mut rest) = rest else {
        return false;
    };
    if let [b'-', hash @ ..] = rest {
        rest = hash;
        while let [octet, behind @ ..] = rest
            && octet.is_ascii_alphanumeric()
        {
            rest = behind;
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

/// Returns the folder of this library, with the slash at its end, or nothing if `LD_AUDIT` does not
/// name it by a path. The loader expands `$ORIGIN` and the like, which is not done here.
fn own_folder(mut list: &[u8]) -> Option<&[u8]> {
    loop {
        let mut len = 0;
        let mut expanded = false;
        while let Some(octet) = list.get(len)
            && *octet != b':'
        {
            expanded |= *octet == b'$';
            len += 1;
        }
        let (entry, behind) = list.split_at_checked(len)?;
        let (folder, name) = split(entry);
        if is(name, OWN_NAME) && !folder.is_empty() && !expanded {
            return Some(folder);
        }
        let [_, others @ ..] = behind else {
            return None;
        };
        list = others;
    }
}

/// The path of the target as a C string, or an empty one if nothing is redirected.
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

    /// Sets the path to the concatenation of two parts. Stays empty if they are too long.
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
    /// All functions are resolved when a program starts.
    binds_now: bool,
    /// The namespaces in which the target is loaded.
    loaded: [bool; SPACES],
}

#[derive(Debug)]
pub(crate) struct State(UnsafeCell<Inner>);

// SAFETY: the file's invariant.
unsafe impl Sync for State {}

impl State {
    pub(crate) const fn new() -> Self {
        Self(UnsafeCell::new(Inner {
            target: Path::empty(),
            binds_now: false,
            loaded: [false; SPACES],
        }))
    }

    #[expect(
        clippy::mut_from_ref,
        reason = "the loader calls one function at a time, and each uses the reference once"
    )]
    fn inner(&self) -> &mut Inner {
        // SAFETY: the file's invariant.
        unsafe { &mut *self.0.get() }
    }

    pub(crate) fn start(&self, variables: Variables) {
        let inner = self.inner();
        inner.binds_now = !variables.value(NOW_VARIABLE).is_empty();
        let named = variables.value(TARGET_VARIABLE);
        if !named.is_empty() {
            inner.target.set([named, &[]]);
        } else if let Some(folder) = own_folder(variables.value(AUDIT_VARIABLE)) {
            inner.target.set([folder, TARGET_NAME]);
        }
    }

    /// Returns the version of the interface to use, or 0 for none.
    ///
    /// Before version 2, that is glibc 2.35, every audit library costs time at each call of a
    /// function of a shared library, unless all functions are resolved at the start.
    pub(crate) fn version(&self, offered: c_uint) -> c_uint {
        let inner = self.inner();
        if inner.target.len == 0 || (offered < VERSION && !inner.binds_now) {
            return 0;
        }
        offered.min(VERSION)
    }

    /// # Safety
    /// `map` is the object that the loader has opened in this namespace, and `cookie` is its own.
    pub(crate) unsafe fn opened(&self, map: *const LinkMap, space: c_long, cookie: *mut usize) {
        let inner = self.inner();
        let space = usize::try_from(space).unwrap_or(0);
        // SAFETY: the caller's promise. The name of an object is a C string.
        let name = unsafe { octets((*map).name) };
        let target = !name.is_empty() && is(name, inner.target.as_slice());
        let mut value = space;
        if let Some(loaded) = inner.loaded.get_mut(space)
            && target
        {
            *loaded = true;
            value |= IS_TARGET;
        }
        // SAFETY: the caller's promise.
        unsafe { *cookie = value };
    }

    /// # Safety
    /// `cookie` is that of an object that was opened.
    pub(crate) unsafe fn closed(&self, cookie: *const usize) {
        // SAFETY: the caller's promise.
        let value = unsafe { *cookie };
        if value & IS_TARGET != 0
            && let Some(loaded) = self.inner().loaded.get_mut(value & !IS_TARGET)
        {
            *loaded = false;
        }
    }

    /// Returns the name by which the loader goes on: that of the target, or the one that was given.
    ///
    /// # Safety
    /// `name` is a C string, and `cookie` is that of the object that asks.
    pub(crate) unsafe fn search(
        &self,
        name: *const c_char,
        cookie: *const usize,
        flag: c_uint,
    ) -> *const c_char {
        let inner = self.inner();
        // SAFETY: the caller's promise.
        let text = unsafe { octets(name) };
        if !is_redirected(text) {
            return name;
        }
        // SAFETY: the caller's promise.
        let space = unsafe { *cookie } & !IS_TARGET;
        // An object without a cookie of ours belongs to the program's own namespace.
        let loaded = inner.loaded.get(space).unwrap_or(&inner.loaded[0]);
        let bare = split(text).0.is_empty();
        let redirect = match (flag == ORIGINAL, *loaded) {
            (true, true) => !bare,
            (true, false) => true,
            (false, loaded) => loaded,
        };
        match redirect {
            true => inner.target.text.as_ptr().cast(),
            false => name,
        }
    }
}
