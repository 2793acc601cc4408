//! The gates: properties that the engine's object must have before a kernel may load it.
//!
//! *Set-up* functions run in process context, where code may sleep. They create, start and free
//! objects, and may allocate. All other entry points are the *data path*, which work requests and
//! the peer drive, mostly in softirq. The data path must not allocate, panic or call itself
//! recursively, and its frames must be small.

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
/// Prefix of the names of entry points.
const ENTRY: &str = "rk_";
/// The functions of the runtime, which the C code of a module defines.
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
/// Functions of the kernel that compilers generate calls to.
const COMPILER: &[&str] = &["memcpy", "memmove", "memset", "memcmp", "bcmp"];
const THUNKS: &[&str] = &["__x86_return_thunk", "__x86_indirect_thunk_"];
/// Largest frame of a function of the data path, in octets. A kernel's stack has 16 KiB, which TCP
/// and interrupts share.
pub(crate) const FRAME_MAX: u64 = 512;

/// A property that is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Gate {
    /// No instruction uses SSE, AVX or x87, because the kernel does not save these registers when
    /// it is entered.
    VectorRegisters,
    /// No instruction accesses memory below the stack pointer, because interrupts write there.
    RedZone,
    /// Returns and indirect branches use the kernel's thunks, which stop speculation.
    Thunks,
    /// All undefined symbols belong to the runtime or are known to compilers.
    Symbols,
    /// No function of the data path can panic.
    Panics,
    /// No function of the data path allocates or frees.
    Allocations,
    /// Frames of the data path have at most [`FRAME_MAX`] octets.
    Frames,
    /// No function of the data path calls itself, directly or indirectly.
    Recursion,
}

/// A violation of a gate.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    pub(crate) gate: Gate,
    /// The short name of the function.
    pub(crate) function: String,
    /// The called function, the symbol, or the instruction. Empty if the gate concerns the function
    /// as a whole.
    pub(crate) what: String,
    /// Details for the message.
    pub(crate) note: String,
}

/// The findings in an object, and figures for the log.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) findings: BTreeSet<Finding>,
    pub(crate) functions: usize,
    pub(crate) data_path: usize,
    /// The largest frame of the data path, and its function.
    pub(crate) frame: (u64, String),
    /// The largest stack of a call of the data path, and its entry point.
    pub(crate) stack: (u64, String),
}

/// Checks all gates.
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

/// Returns the violations of the gates for single instructions.
fn instructions(name: &str, code: &[Instruction]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for instruction in code {
        let gate = if uses_vectors(instruction) {
            Gate::VectorRegisters
        } else if is_below_stack(instruction) {
            Gate::RedZone
        } else if bypasses_thunk(instruction) {
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

/// Returns `true` for registers and instructions of SSE, AVX, MMX, AVX-512 masks and the x87.
fn uses_vectors(instruction: &Instruction) -> bool {
    let mnemonic = instruction.mnemonic.as_str();
    // The instructions of the x87, and no others, begin with an f.
    mnemonic.starts_with('f')
        || matches!(mnemonic, "emms" | "ldmxcsr" | "stmxcsr")
        || mnemonic.starts_with("vzero")
        || instruction.operands.split('%').skip(1).any(|register| {
            ["xmm", "ymm", "zmm", "st", "mm", "k"]
                .iter()
                .any(|kind| is_numbered(register, kind))
        })
}

/// Returns `true` for a register of this kind: the kind followed by a number, or `st`, the top of
/// the x87's stack.
fn is_numbered(register: &str, kind: &str) -> bool {
    register.strip_prefix(kind).is_some_and(|rest| {
        rest.starts_with(|c: char| c.is_ascii_digit())
            || (kind == "st" && !rest.starts_with(char::is_alphanumeric))
    })
}

/// Returns `true` for an access at a negative offset from the stack pointer. `lea` that changes the
/// stack pointer is not an access.
fn is_below_stack(instruction: &Instruction) -> bool {
    let moves = instruction.mnemonic.starts_with("lea") && instruction.operands.ends_with(",%rsp");
    let below = instruction.operands.match_indices("(%rsp").any(|(at, _)| {
        let before = &instruction.operands[..at];
        let start = before.rfind([',', ' ', ':', '*']).map_or(0, |at| at + 1);
        before[start..].starts_with("-0x")
    });
    below && !moves
}

/// Returns `true` for a return or an indirect branch without a thunk.
fn bypasses_thunk(instruction: &Instruction) -> bool {
    let mnemonic = instruction.mnemonic.as_str();
    let branch = mnemonic.starts_with("call") || mnemonic.starts_with("jmp");
    matches!(
        mnemonic,
        "ret" | "retq" | "lret" | "lretq" | "iret" | "iretq"
    ) || (branch && instruction.operands.starts_with('*'))
        || matches!(mnemonic, "lcall" | "ljmp")
}

/// Compares the symbols of the object with those of a module.
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
        // If nothing can panic, nothing refers to it.
        .filter(|&&name| name != PANIC && !listing.undefined.contains(name));
    let foreign = listing
        .exported
        .iter()
        .filter(|name| !name.starts_with(ENTRY));
    let missing = SET_UP
        .iter()
        .filter(|&&name| !listing.exported.contains(name));
    undefined
        .map(|name| finding("", &short(name), "undefined, and not part of the runtime"))
        .chain(unused.map(|name| finding("", name, "part of the runtime, but not used")))
        .chain(foreign.map(|name| finding("", &short(name), "visible to other modules")))
        .chain(missing.map(|name| finding("", name, "set-up function is missing")))
        .collect()
}

/// The references between functions: calls, jumps, and addresses that are taken.
struct Calls<'a> {
    /// By function.
    targets: BTreeMap<&'a str, BTreeSet<&'a str>>,
}

impl<'a> Calls<'a> {
    fn new(listing: &'a Listing) -> Self {
        let mut all: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (name, code) in &listing.functions {
            let symbols = code.iter().filter_map(|one| one.symbol.as_deref());
            // A jump within the function may refer to the function's own symbol. Only a call of it
            // is recursion.
            let calls_itself = |one: &Instruction| {
                one.symbol.as_deref() == Some(name) && one.mnemonic.starts_with("call")
            };
            let mut targets: BTreeSet<&str> = symbols.filter(|symbol| symbol != name).collect();
            if code.iter().any(calls_itself) {
                targets.insert(name);
            }
            all.insert(name, targets);
        }
        Self { targets: all }
    }

    fn targets(&self, name: &str) -> impl Iterator<Item = &'a str> {
        self.targets.get(name).into_iter().flatten().copied()
    }

    /// Returns the functions from which one of `ends` can be reached, including `ends`.
    fn reaching(&self, ends: &[&'a str]) -> BTreeSet<&'a str> {
        let mut found: BTreeSet<&str> = ends.iter().copied().collect();
        loop {
            let more: Vec<&str> = self
                .targets
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

    /// Returns the functions of the data path, and findings for its calls that lead to a panic or
    /// to the allocator.
    ///
    /// A finding is a call from one of our functions to Rust's library. The called function does
    /// not become part of the data path, so that the call has only one finding.
    fn data_path(&self, listing: &'a Listing) -> (BTreeSet<&'a str>, Vec<Finding>) {
        let panics = self.reaching(&[PANIC]);
        let allocates = self.reaching(&[ALLOC, FREE]);
        let mut findings = Vec::new();
        let mut path: BTreeSet<&str> = BTreeSet::new();
        let entries = listing.exported.iter().map(String::as_str);
        let mut queue: Vec<&str> = entries
            .filter(|name| name.starts_with(ENTRY) && !SET_UP.contains(name))
            // A function whose address is in data may be called from anywhere.
            .chain(
                listing
                    .in_data
                    .iter()
                    .map(String::as_str)
                    .filter(|name| is_ours(name)),
            )
            .collect();
        while let Some(name) = queue.pop() {
            if !self.targets.contains_key(name) || !path.insert(name) {
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

    /// Returns the deepest stack and its entry point, and findings for functions that call
    /// themselves.
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

/// A depth-first walk through the calls.
struct Walk<'a, 'b> {
    calls: &'b Calls<'a>,
    path: &'b BTreeSet<&'a str>,
    frames: &'b BTreeMap<&'b str, u64>,
    /// The stack of each function that was visited, including the functions that it calls.
    depths: BTreeMap<&'a str, u64>,
    recursion: BTreeSet<&'a str>,
}

impl<'a> Walk<'a, '_> {
    fn depth(&mut self, name: &'a str, callers: &mut Vec<&'a str>) -> u64 {
        if let Some(&depth) = self.depths.get(name) {
            return depth;
        }
        if callers.contains(&name) {
            self.recursion.insert(name);
            return 0;
        }
        callers.push(name);
        let mut deepest = 0;
        for target in self.calls.targets(name) {
            if self.path.contains(target) {
                deepest = self.depth(target, callers).max(deepest);
            }
        }
        callers.pop();
        // 8 octets are the return address.
        let depth = deepest.saturating_add(self.frames[name]).saturating_add(8);
        self.depths.insert(name, depth);
        depth
    }
}

/// Returns `true` for functions of the engine and its entry points, and `false` for those of Rust's
/// library or of the runtime.
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
