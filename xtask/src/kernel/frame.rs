//! Computes the size of a function's stack frame from its instructions.

use std::collections::BTreeMap;

use super::listing::Instruction;

/// The size of a frame that is known only at run time.
pub(crate) const UNBOUNDED: u64 = u64::MAX;

/// Returns the largest size of a function's frame, in octets, without the return address.
pub(crate) fn size(code: &[Instruction]) -> u64 {
    let mut depth: i64 = 0;
    let mut deepest = 0;
    // The depth at jump targets.
    let mut depth_at: BTreeMap<u64, i64> = BTreeMap::new();
    for (index, instruction) in code.iter().enumerate() {
        if index > 0 && code[index - 1].ends() {
            // If no earlier instruction jumps to this one, a later one does. Assume the whole
            // frame.
            depth = depth_at.get(&instruction.at).copied().unwrap_or(deepest);
        }
        match depth_change(instruction) {
            Some(change) => depth += change,
            None => return UNBOUNDED,
        }
        deepest = deepest.max(depth);
        if let Some(target) = instruction.jump() {
            depth_at.entry(target).or_insert(depth);
        }
    }
    u64::try_from(deepest).unwrap_or(0)
}

/// Returns by how much an instruction changes the depth, or `None` if that depends on a register.
fn depth_change(instruction: &Instruction) -> Option<i64> {
    let operands = instruction.operands.as_str();
    let to_stack = operands.ends_with(",%rsp");
    match instruction.mnemonic.trim_end_matches('q') {
        "push" | "pushf" => Some(8),
        "pop" | "popf" => Some(-8),
        "sub" if to_stack => immediate(operands),
        "add" if to_stack => Some(-immediate(operands)?),
        // Aligning the stack pointer changes it by less than the alignment.
        "and" if to_stack => Some(-immediate(operands)? - 1),
        "lea" if to_stack => {
            let (offset, base) = operands.split_once('(')?;
            (base == "%rsp),%rsp").then_some(-number(offset)?)
        }
        "enter" => None,
        // An epilogue that restores the stack pointer from the frame pointer.
        "mov" if to_stack => operands.starts_with("%rbp").then_some(0),
        "xchg" if to_stack => None,
        _ => Some(0),
    }
}

fn immediate(operands: &str) -> Option<i64> {
    number(operands.strip_prefix('$')?.split(',').next()?)
}

/// Parses a number as `objdump` writes it: `0x10`, `-0x10`, or, for a negative number,
/// `0xffffffffffffff80`.
fn number(text: &str) -> Option<i64> {
    match text.strip_prefix("-0x") {
        Some(digits) => Some(-i64::from_str_radix(digits, 16).ok()?),
        None => {
            let digits = text.strip_prefix("0x")?;
            Some(u64::from_str_radix(digits, 16).ok()?.cast_signed())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of(code: &[(u64, &str, &str)]) -> u64 {
        let code: Vec<_> = code
            .iter()
            .map(|&(at, mnemonic, operands)| Instruction {
                at,
                mnemonic: mnemonic.into(),
                operands: operands.into(),
                symbol: None,
            })
            .collect();
        size(&code)
    }

    #[test]
    fn pushes_and_reserved_bytes_add_up() {
        let code = [
            (0, "push", "%rbx"),
            (1, "sub", "$0x1d8,%rsp"),
            (8, "push", "$0x1"),
            (9, "add", "$0x8,%rsp"),
            (10, "push", "$0x1"),
            (11, "add", "$0x8,%rsp"),
            (12, "add", "$0x1d8,%rsp"),
            (19, "pop", "%rbx"),
        ];
        assert_eq!(size_of(&code), 8 + 0x1d8 + 8);
        assert_eq!(size_of(&[(0, "sub", "$0xffffffffffffff80,%rsp")]), 0);
        assert_eq!(size_of(&[(0, "add", "$0xffffffffffffff80,%rsp")]), 128);
        assert_eq!(size_of(&[(0, "lea", "-0x100(%rsp),%rsp")]), 256);
        assert_eq!(size_of(&[(0, "and", "$0xffffffffffffffc0,%rsp")]), 63);
    }

    #[test]
    fn early_return_keeps_later_depth() {
        let code = [
            (0, "push", "%rbx"),
            (1, "je", "20 <f+0x20>"),
            (2, "pop", "%rbx"),
            (3, "jmp", "8 <f+0x8>"),
            (32, "sub", "$0x40,%rsp"),
        ];
        assert_eq!(size_of(&code), 8 + 64);
    }

    #[test]
    fn variable_frame_is_unbounded() {
        assert_eq!(size_of(&[(0, "sub", "%rax,%rsp")]), UNBOUNDED);
        assert_eq!(size_of(&[(0, "mov", "%rcx,%rsp")]), UNBOUNDED);
        assert_eq!(size_of(&[(0, "mov", "%rbp,%rsp")]), 0);
    }
}
