//! What has to hold of the engine's object before a kernel may load it.
//!
//! *Set-up* is what runs in process context, where code may sleep: objects are made, started and
//! freed there, and it may allocate. All other entry points are the *data path*. A work request or
//! the peer drives it, mostly in softirq, so it never allocates or panics, its frames are small,
//! and it does not call itself.

use std::collections::{BTreeMap, BTreeSet};

use super::frame;
use super::listing::{Instruction, Listing};
use super::names::short;

/// Entry points that run in process context.
pub(crate) const SET_UP: &[&str] = &[
    "rk_device_new",
    "rk_device_free",
    "rk_slots_new",
    "rk_slots_free",
    "rk_slots_make",
    "rk_slots_attach",
    "rk_register",
    "rk_register_pages",
    "rk_allocate_fast",
    "rk_deregister",
    "rk_area_new",
    "rk_area_free",
    "rk_qp_new",
    "rk_qp_free",
    "rk_qp_start",
    "rk_qp_begin",
    "rk_mpa_new",
    "rk_mpa_free",
    "rk_mpa_connecting",
    "rk_mpa_request",
    "rk_mpa_request_sent",
    "rk_mpa_retry",
    "rk_mpa_missing",
    "rk_mpa_push",
    "rk_mpa_poll_at",
    "rk_mpa_on_time",
    "rk_mpa_accept",
    "rk_mpa_reject",
];
/// Entry points begin like this.
const ENTRY: &str = "rk_";
/// The functions of the runtime, which the C code of a module brings along.
const RUNTIME: &[&str] = &[
    ALLOC,
    FREE,
    PANIC,
    "iwarp_complete",
    "iwarp_take_receive",
    "iwarp_crc32c",
];
const ALLOC: &str = "iwarp_alloc";
const FREE: &str = "iwarp_free";
const PANIC: &str = "iwarp_panic";
/// What the kernel has for code that a compiler has generated.
const COMPILER: &[&str] = &["memcpy", "memmove", "memset", "memcmp", "bcmp"];
const THUNKS: &[&str] = &["__x86_return_thunk", "__x86_indirect_thunk_"];
/// The most octets of stack that a function of the data path takes. A kernel's stack has 16 KiB,
/// which TCP and interrupts share.
pub(crate) const FRAME_MAX: u64 = 512;

/// What is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Gate {
    /// No SSE, AVX or x87: the kernel does not save these registers when it is entered.
    VectorRegisters,
    /// Nothing below the stack pointer: an interrupt writes there.
    RedZone,
    /// Returns and indirect branches go through the kernel's thunks, which stop speculation.
    Thunks,
    /// Undefined symbols are those of the runtime and of compilers.
    Symbols,
    /// No function of the data path can panic.
    Panics,
    /// No function of the data path allocates or frees.
    Allocations,
    /// Frames of the data path are at most [`FRAME_MAX`].
    Frames,
    /// No function of the data path calls itself, also by way of others.
    Recursion,
}

/// A gate that does not hold somewhere.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    pub(crate) gate: Gate,
    /// The function, in short.
    pub(crate) function: String,
    /// The function that is called, the symbol, or the instruction. Empty if the function says it
    /// all.
    pub(crate) what: String,
    /// How much, for people.
    pub(crate) note: String,
}

/// What was found in an object, and figures for people.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) findings: BTreeSet<Finding>,
    pub(crate) functions: usize,
    pub(crate) data_path: usize,
    /// The largest frame of the data path, and the function that has it.
    pub(crate) frame: (u64, String),
    /// The most stack that calls from an entry point of the data path add up to, and the entry
    /// point.
    pub(crate) stack: (u64, String),
}

/// Checks everything.
pub(crate) fn check(listing: &Listing) -> Report {
    let mut findings = BTreeSet::new();
    for (name, code) in &listing.functions {
        findings.extend(instructions(name, code));
    }
    findings.extend(symbols(listing));
    let calls = Calls::new(listing);
    let (path, forbidden) = calls.data_path(listing);
    findings.extend(forbidden);
    let frames: BTreeMap<&str, u64> = listing
        .functions
        .iter()
        .map(|(name, code)| (name.as_str(), frame::size(code)))
        .collect();
    for &name in &path {
        let size = frames[name];
        if size > FRAME_MAX {
            findings.insert(Finding {
                gate: Gate::Frames,
                function: short(name),
                what: String::new(),
                note: octets(size),
            });
        }
    }
    let (stack, recursion) = calls.stack(&path, &frames);
    findings.extend(recursion);
    let largest = path.iter().map(|&name| (frames[name], short(name))).max();
    Report {
        findings,
        functions: listing.functions.len(),
        data_path: path.len(),
        frame: largest.unwrap_or_default(),
        stack,
    }
}

fn octets(size: u64) -> String {
    match size {
        frame::UNBOUNDED => "no bound".into(),
        size => format!("{size} octets"),
    }
}

/// The gates that hold for each instruction.
fn instructions(name: &str, code: &[Instruction]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for instruction in code {
        let gate = if uses_vectors(instruction) {
            Gate::VectorRegisters
        } else if is_below_stack(instruction) {
            Gate::RedZone
        } else if is_naked(instruction) {
            Gate::Thunks
        } else {
            continue;
        };
        findings.push(Finding {
            gate,
            function: short(name),
            what: instruction.mnemonic.clone(),
            note: format!("at {:x}: {}", instruction.at, instruction.operands),
        });
    }
    findings
}

/// Registers and instructions of SSE, AVX, MMX, AVX-512 masks and the x87.
fn uses_vectors(instruction: &Instruction) -> bool {
    let mnemonic = instruction.mnemonic.as_str();
    // Every instruction of the x87 begins with an f, and none else does.
    mnemonic.starts_with('f')
        || matches!(mnemonic, "emms" | "ldmxcsr" | "stmxcsr")
        || mnemonic.starts_with("vzero")
        || instruction.operands.split('%').skip(1).any(|register| {
            ["xmm", "ymm", "zmm", "st", "mm", "k"]
                .iter()
                .any(|kind| is_numbered(register, kind))
        })
}

/// Returns `true` for the kind followed by a number, and for the top of the x87's stack, which has
/// none.
fn is_numbered(register: &str, kind: &str) -> bool {
    register.strip_prefix(kind).is_some_and(|rest| {
        rest.starts_with(|c: char| c.is_ascii_digit())
            || (kind == "st" && !rest.starts_with(char::is_alphanumeric))
    })
}

/// An access at a negative offset from the stack pointer. Moving the stack pointer by `lea` is
/// none.
fn is_below_stack(instruction: &Instruction) -> bool {
    let moves = instruction.mnemonic.starts_with("lea") && instruction.operands.ends_with(",%rsp");
    let below = instruction.operands.match_indices("(%rsp").any(|(at, _)| {
        let before = &instruction.operands[..at];
        let start = before.rfind([',', ' ', ':', '*']).map_or(0, |at| at + 1);
        before[start..].starts_with("-0x")
    });
    below && !moves
}

fn is_naked(instruction: &Instruction) -> bool {
    let mnemonic = instruction.mnemonic.as_str();
    let branch = mnemonic.starts_with("call") || mnemonic.starts_with("jmp");
    matches!(
        mnemonic,
        "ret" | "retq" | "lret" | "lretq" | "iret" | "iretq"
    ) || (branch && instruction.operands.starts_with('*'))
        || matches!(mnemonic, "lcall" | "ljmp")
}

/// The symbols of the object against those that a module has.
fn symbols(listing: &Listing) -> Vec<Finding> {
    let known = |name: &str| {
        RUNTIME.contains(&name)
            || COMPILER.contains(&name)
            || THUNKS.iter().any(|start| name.starts_with(start))
    };
    let finding = |function: &str, what: &str, note: &str| Finding {
        gate: Gate::Symbols,
        function: function.into(),
        what: what.into(),
        note: note.into(),
    };
    let undefined = listing.undefined.iter().filter(|name| !known(name));
    let unused = RUNTIME
        .iter()
        // Once nothing can panic any more, nobody refers to it.
        .filter(|&&name| name != PANIC && !listing.undefined.contains(name));
    let foreign = listing
        .exported
        .iter()
        .filter(|name| !name.starts_with(ENTRY));
    let missing = SET_UP
        .iter()
        .filter(|&&name| !listing.exported.contains(name));
    undefined
        .map(|name| finding("", &short(name), "undefined, and not of the runtime"))
        .chain(unused.map(|name| finding("", name, "of the runtime, but not used")))
        .chain(foreign.map(|name| finding("", &short(name), "visible to other modules")))
        .chain(missing.map(|name| finding("", name, "a set-up function that is not there")))
        .collect()
}

/// Which function refers to which: calls, jumps, and addresses that are taken.
struct Calls<'a> {
    of: BTreeMap<&'a str, BTreeSet<&'a str>>,
}

impl<'a> Calls<'a> {
    fn new(listing: &'a Listing) -> Self {
        let mut of: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (name, code) in &listing.functions {
            let symbols = code.iter().filter_map(|one| one.symbol.as_deref());
            // A jump within a function may be named by the function itself; only a call is a call.
            let own = |one: &Instruction| {
                one.symbol.as_deref() == Some(name) && one.mnemonic.starts_with("call")
            };
            let mut targets: BTreeSet<&str> = symbols.filter(|symbol| symbol != name).collect();
            if code.iter().any(own) {
                targets.insert(name);
            }
            of.insert(name, targets);
        }
        Self { of }
    }

    fn targets(&self, name: &str) -> impl Iterator<Item = &'a str> {
        self.of.get(name).into_iter().flatten().copied()
    }

    /// The functions from which one of these can be reached, themselves included.
    fn reaching(&self, ends: &[&'a str]) -> BTreeSet<&'a str> {
        let mut found: BTreeSet<&str> = ends.iter().copied().collect();
        loop {
            let more: Vec<&str> = self
                .of
                .iter()
                .filter(|(name, targets)| {
                    !found.contains(*name) && targets.iter().any(|one| found.contains(one))
                })
                .map(|(name, _)| *name)
                .collect();
            if more.is_empty() {
                return found;
            }
            found.extend(more);
        }
    }

    /// The functions of the data path, and the calls in it that lead to a panic or to the
    /// allocator.
    ///
    /// Such a call is one from a function of ours to the language's library. What is behind it is
    /// not looked at further: it is judged by the call.
    fn data_path(&self, listing: &'a Listing) -> (BTreeSet<&'a str>, Vec<Finding>) {
        let panics = self.reaching(&[PANIC]);
        let allocates = self.reaching(&[ALLOC, FREE]);
        let mut findings = Vec::new();
        let mut path: BTreeSet<&str> = BTreeSet::new();
        let entries = listing.exported.iter().map(String::as_str);
        let mut queue: Vec<&str> = entries
            .filter(|name| name.starts_with(ENTRY) && !SET_UP.contains(name))
            // Nobody sees where a function is called whose address is in data.
            .chain(
                listing
                    .in_data
                    .iter()
                    .map(String::as_str)
                    .filter(|name| is_ours(name)),
            )
            .collect();
        while let Some(name) = queue.pop() {
            if !self.of.contains_key(name) || !path.insert(name) {
                continue;
            }
            for target in self.targets(name) {
                let forbidden = |gate| Finding {
                    gate,
                    function: short(name),
                    what: short(target),
                    note: String::new(),
                };
                let (may_panic, may_allocate) =
                    (panics.contains(target), allocates.contains(target));
                if is_ours(target) || !(may_panic || may_allocate) {
                    queue.push(target);
                    continue;
                }
                findings.extend(may_panic.then(|| forbidden(Gate::Panics)));
                findings.extend(may_allocate.then(|| forbidden(Gate::Allocations)));
            }
        }
        (path, findings)
    }

    /// The deepest stack of an entry point, and the functions that call themselves.
    fn stack(
        &self,
        path: &BTreeSet<&'a str>,
        frames: &BTreeMap<&str, u64>,
    ) -> ((u64, String), Vec<Finding>) {
        let mut walk = Walk {
            calls: self,
            path,
            frames,
            depths: BTreeMap::new(),
            recursion: BTreeSet::new(),
        };
        let mut deepest = (0, String::new());
        for &name in path {
            let depth = walk.depth(name, &mut Vec::new());
            if name.starts_with(ENTRY) && depth > deepest.0 {
                deepest = (depth, name.to_owned());
            }
        }
        let findings = walk.recursion.iter().map(|name| Finding {
            gate: Gate::Recursion,
            function: short(name),
            what: String::new(),
            note: String::new(),
        });
        (deepest, findings.collect())
    }
}

/// Goes through calls to their ends.
struct Walk<'a, 'b> {
    calls: &'b Calls<'a>,
    path: &'b BTreeSet<&'a str>,
    frames: &'b BTreeMap<&'b str, u64>,
    depths: BTreeMap<&'a str, u64>,
    recursion: BTreeSet<&'a str>,
}

impl<'a> Walk<'a, '_> {
    fn depth(&mut self, name: &'a str, above: &mut Vec<&'a str>) -> u64 {
        if let Some(&depth) = self.depths.get(name) {
            return depth;
        }
        if above.contains(&name) {
            self.recursion.insert(name);
            return 0;
        }
        above.push(name);
        let mut most = 0;
        for target in self.calls.targets(name) {
            if self.path.contains(target) {
                most = self.depth(target, above).max(most);
            }
        }
        above.pop();
        // The return address is part of it.
        let depth = most.saturating_add(self.frames[name]).saturating_add(8);
        self.depths.insert(name, depth);
        depth
    }
}

/// Returns `true` for functions of the engine and of its border. Others are the language's library
/// or the runtime.
fn is_ours(name: &str) -> bool {
    let plain = format!("{:#}", rustc_demangle::demangle(name));
    let start = plain.trim_start_matches(['<', '&']);
    let start = start.strip_prefix("mut ").unwrap_or(start);
    name.starts_with(ENTRY)
        || ["iwarp_rnic::", "iwarp_proto::", "iwarp_kernel::"]
            .iter()
            .any(|krate| start.starts_with(krate))
}

#[cfg(test)]
#[path = "gates_tests.rs"]
mod tests;
