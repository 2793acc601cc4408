//! Reads the machine code of an object file from the output of `objdump`: functions, instructions,
//! and references between them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::process::Log;

/// One instruction.
#[derive(Debug)]
pub(crate) struct Instruction {
    /// The address in the section.
    pub(crate) at: u64,
    pub(crate) mnemonic: String,
    /// In AT&T order: the destination comes last.
    pub(crate) operands: String,
    /// The function or symbol to which the instruction refers.
    pub(crate) symbol: Option<String>,
}

impl Instruction {
    /// Returns the target of a direct jump within the function.
    pub(crate) fn jump(&self) -> Option<u64> {
        if self.symbol.is_some() || !self.mnemonic.starts_with('j') {
            return None;
        }
        u64::from_str_radix(self.operands.split_whitespace().next()?, 16).ok()
    }

    /// Returns `true` if execution never continues at the next instruction.
    pub(crate) fn ends(&self) -> bool {
        matches!(
            self.mnemonic.as_str(),
            "jmp" | "ret" | "retq" | "ud2" | "int3"
        )
    }
}

/// The contents of an object file.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    /// The instructions of each function.
    pub(crate) functions: BTreeMap<String, Vec<Instruction>>,
    /// Symbols that other objects may use.
    pub(crate) exported: BTreeSet<String>,
    /// Symbols that other objects must define.
    pub(crate) undefined: BTreeSet<String>,
    /// Functions whose addresses are in data.
    pub(crate) in_data: BTreeSet<String>,
}

impl Listing {
    /// Reads an object file with `objdump` and `nm`.
    ///
    /// # Errors
    /// If one of the programs fails, or if the file contains no function.
    pub(crate) fn read(object: &Path, log: &mut Log) -> Result<Self> {
        let symbols = log.run_and_read(Command::new("nm").args(["--format=posix"]).arg(object))?;
        let code = log.run_and_read(
            Command::new("objdump")
                .args(["-dr", "--no-show-raw-insn"])
                .arg(object),
        )?;
        let data = log.run_and_read(Command::new("objdump").arg("-r").arg(object))?;
        let listing = Self::parse(&symbols, &code, &data)?;
        if listing.functions.is_empty() {
            bail!("{} has no functions", object.display());
        }
        Ok(listing)
    }

    fn parse(symbols: &str, code: &str, data: &str) -> Result<Self> {
        let mut listing = Self::default();
        // Functions by their offset in the only section of code.
        let mut functions_at: BTreeMap<u64, String> = BTreeMap::new();
        for line in symbols.lines() {
            let mut words = line.split(' ');
            let (Some(name), Some(kind)) = (words.next(), words.next()) else {
                continue;
            };
            match kind {
                "U" | "w" => {
                    listing.undefined.insert(name.to_owned());
                }
                "T" | "t" | "W" => {
                    let at = words.next().context("a symbol without a value")?;
                    functions_at.insert(u64::from_str_radix(at, 16)?, name.to_owned());
                }
                _ => {}
            }
            if kind.chars().all(char::is_uppercase) && kind != "U" {
                listing.exported.insert(name.to_owned());
            }
        }
        listing.code(code, &functions_at);
        listing.data(data, &functions_at);
        Ok(listing)
    }

    fn code(&mut self, text: &str, functions_at: &BTreeMap<u64, String>) {
        let mut current: &mut Vec<Instruction> = &mut Vec::new();
        for line in text.lines() {
            if let Some((_, name)) = line
                .strip_suffix(">:")
                .and_then(|heading| heading.split_once(" <"))
            {
                current = self.functions.entry(name.to_owned()).or_default();
            } else if let Some((_, target)) = relocation(line) {
                if let Some(last) = current.last_mut() {
                    last.symbol = resolve(target, true, functions_at);
                }
            } else if let Some(instruction) = instruction(line, functions_at) {
                current.push(instruction);
            }
        }
    }

    fn data(&mut self, text: &str, functions_at: &BTreeMap<u64, String>) {
        let mut section = "";
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("RELOCATION RECORDS FOR [") {
                section = rest.trim_end_matches("]:");
            }
            let mut words = line.split_whitespace();
            if let (Some(_), Some(kind), Some(target)) = (words.next(), words.next(), words.next())
                && kind.starts_with("R_X86_64_")
                && !section.starts_with(".text")
                && let Some(name) = resolve(target, false, functions_at)
                && self.functions.contains_key(&name)
            {
                self.in_data.insert(name);
            }
        }
    }
}

/// Returns kind and target if the line of a disassembly is a relocation, such as
/// `5a: R_X86_64_PLT32 memcpy-0x4`.
fn relocation(line: &str) -> Option<(&str, &str)> {
    let (_, rest) = line.split_once(": R_X86_64_")?;
    rest.split_once('\t')
}

/// Returns the symbol to which a relocation refers, by name or as an offset in the section of code.
/// The offset in an instruction (`in_code`) is relative to the end of its field of four octets.
fn resolve(target: &str, in_code: bool, functions_at: &BTreeMap<u64, String>) -> Option<String> {
    let (name, addend) = match target.rfind(['+', '-']) {
        Some(at) if target[at + 1..].starts_with("0x") => {
            let value = i64::from_str_radix(&target[at + 3..], 16).ok()?;
            let sign = if target[at..].starts_with('-') { -1 } else { 1 };
            (&target[..at], sign * value)
        }
        _ => (target, 0),
    };
    if name == ".text" {
        let at = addend + if in_code { 4 } else { 0 };
        return function_at(u64::try_from(at).ok()?, functions_at);
    }
    (!name.starts_with('.')).then(|| name.to_owned())
}

/// Returns the function that contains an address.
fn function_at(at: u64, functions_at: &BTreeMap<u64, String>) -> Option<String> {
    functions_at
        .range(..=at)
        .next_back()
        .map(|(_, name)| name.clone())
}

/// Parses a line such as `4b: add    $0x38,%rsp`. The target of a branch without a relocation is in
/// the text.
fn instruction(line: &str, functions_at: &BTreeMap<u64, String>) -> Option<Instruction> {
    let (at, text) = line.split_once(":\t")?;
    let at = u64::from_str_radix(at.trim(), 16).ok()?;
    let mut words = text.split_whitespace();
    let mut mnemonic = words.next()?;
    while matches!(
        mnemonic,
        "lock" | "rep" | "repz" | "repnz" | "notrack" | "bnd" | "cs" | "ds"
    ) {
        mnemonic = words.next()?;
    }
    let operands = words.collect::<Vec<_>>().join(" ");
    let branch = mnemonic.starts_with("call") || mnemonic.starts_with('j');
    let symbol = operands
        .split(' ')
        .next()
        .filter(|_| branch)
        .and_then(|target| function_at(u64::from_str_radix(target, 16).ok()?, functions_at))
        // A jump within the function is not a reference, but a call of the function itself is.
        .filter(|name| {
            mnemonic.starts_with("call") || Some(name) != function_at(at, functions_at).as_ref()
        });
    Some(Instruction {
        at,
        mnemonic: mnemonic.to_owned(),
        operands,
        symbol,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYMBOLS: &str = "a t 0 20\nrk_b T 20 20\nmemcpy U         \n.L T\n";
    const CODE: &str = "
0000000000000000 <a>:
   0:	push   %rbx
   1:	jmp    8 <a+0x8>
   3:	call   8 <a+0x8>
			4: R_X86_64_PLT32	.text+0x1c
   8:	lock cmpxchg %rcx,(%rdi)
   d:	jmp    12 <a+0x12>
			e: R_X86_64_PLT32	__x86_return_thunk-0x4

0000000000000020 <rk_b>:
  20:	call   0 <a>
  25:	mov    $0x0,%rdi
			28: R_X86_64_32S	.rodata+0x10
";
    const DATA: &str = "RELOCATION RECORDS FOR [.text]:\n0 R_X86_64_64 rk_b\n\
        RELOCATION RECORDS FOR [.rodata]:\nOFFSET TYPE VALUE\n0 R_X86_64_64 .text+0x20\n";

    #[test]
    fn code_is_read_with_its_targets() {
        let symbols = SYMBOLS.replace(".L T\n", "");
        let listing = Listing::parse(&symbols, CODE, DATA).unwrap();
        let a = &listing.functions["a"];
        assert_eq!(a.len(), 5);
        assert_eq!(a[1].jump(), Some(8));
        assert!(a[1].ends() && !a[0].ends());
        assert_eq!(a[2].symbol.as_deref(), Some("rk_b"));
        assert_eq!(a[3].mnemonic, "cmpxchg");
        assert_eq!(a[4].symbol.as_deref(), Some("__x86_return_thunk"));
        assert_eq!(a[4].jump(), None);
        let b = &listing.functions["rk_b"];
        assert_eq!(b[0].symbol.as_deref(), Some("a"));
        assert_eq!(b[1].symbol, None);
        assert_eq!(listing.in_data.iter().collect::<Vec<_>>(), ["rk_b"]);
        assert_eq!(listing.exported.iter().collect::<Vec<_>>(), ["rk_b"]);
        assert_eq!(listing.undefined.iter().collect::<Vec<_>>(), ["memcpy"]);
    }

    #[test]
    fn symbol_without_value_is_refused() {
        assert!(Listing::parse(SYMBOLS, CODE, DATA).is_err());
    }
}
