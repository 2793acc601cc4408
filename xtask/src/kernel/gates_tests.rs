//! Each gate fails for code that violates it. The tests assemble small functions and read them with
//! `objdump`, as for the engine.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::*;
use crate::context::find_program;
use crate::process::Log;

/// The code before the body of the test. The set-up function `rk_qp_start` shows that set-up may
/// panic and may have a large frame; [`base`] defines the other set-up functions.
const BASE: &str = "
.type rk_qp_start, @function
rk_qp_start:
    sub $0x1000,%rsp
    call _ZN4core9panicking5panic17h0123456789abcdefE
    add $0x1000,%rsp
    jmp __x86_return_thunk
.type _ZN4core9panicking5panic17h0123456789abcdefE, @function
_ZN4core9panicking5panic17h0123456789abcdefE:
    call iwarp_panic
    ud2
.type _ZN5alloc7raw_vec8grow_one17h0123456789abcdefE, @function
_ZN5alloc7raw_vec8grow_one17h0123456789abcdefE:
    call iwarp_alloc
    jmp __x86_return_thunk
.globl rk_post_send
.type rk_post_send, @function
rk_post_send:
";

/// Returns an object without findings, to which the body of the test is appended: all set-up
/// functions, and calls of all functions of the runtime.
fn base() -> String {
    let mut text =
        String::from(".text\nset_up: jmp __x86_return_thunk\n.type rk_device_new, @function\n");
    for &name in SET_UP {
        text.push_str(&format!(".globl {name}\n"));
        if name != "rk_qp_start" {
            text.push_str(&format!("{name}:\n"));
        }
    }
    for name in RUNTIME.iter().filter(|&&name| name != PANIC) {
        text.push_str(&format!("    call {name}\n"));
    }
    text.push_str("    call memcpy\n    jmp __x86_return_thunk\n");
    text + BASE
}

/// Assembles `body`, which starts with the body of `rk_post_send`, and checks the object. Returns
/// `None` if there is no assembler.
fn found(body: &str) -> Option<BTreeSet<Finding>> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) || find_program("as").is_none() {
        return None;
    }
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("xtask-gates-{}-{number}", std::process::id());
    let file = |end: &str| -> PathBuf { std::env::temp_dir().join(format!("{name}.{end}")) };
    let (source, object) = (file("s"), file("o"));
    std::fs::write(&source, format!("{}{body}\n", base())).unwrap();
    let mut log = Log::create(&file("log"), Duration::from_secs(60)).unwrap();
    log.run(Command::new("as").arg("-o").arg(&object).arg(&source))
        .unwrap();
    let listing = Listing::read(&object, &mut log).unwrap();
    for end in ["s", "o", "log"] {
        std::fs::remove_file(file(end)).unwrap();
    }
    Some(check(&listing).findings)
}

/// Asserts that the body has exactly one finding: for this gate and this function.
fn assert_finding(gate: Gate, function: &str, what: &str, body: &str) {
    let Some(findings) = found(body) else { return };
    let seen: Vec<_> = findings
        .iter()
        .map(|one| (one.gate, one.function.as_str(), one.what.as_str()))
        .collect();
    assert_eq!(seen, [(gate, function, what)], "{body}");
}

const RETURN: &str = "jmp __x86_return_thunk";

#[test]
fn code_for_a_kernel_passes() {
    let body = "push %rbx; sub $0x1f0,%rsp; mov 0x8(%rsp),%rax; lea -0x8(%rsp),%rsp; call memcpy
        call *%rax; jmp __x86_return_thunk";
    // Only the indirect call is a finding.
    assert_finding(Gate::Thunks, "rk_post_send", "call", body);
    let body = "push %rbx; sub $0x1f8,%rsp; mov 0x8(%rsp),%rax; call __x86_indirect_thunk_r11
        lock xadd %rax,(%rdi); crc32q (%rsi),%rax; add $0x1f8,%rsp; pop %rbx
        jmp __x86_return_thunk";
    if let Some(findings) = found(body) {
        assert_eq!(findings, BTreeSet::new());
    }
}

#[test]
fn vector_registers_are_found() {
    for instruction in [
        "movaps %xmm0,(%rdi)",
        "vpxor %ymm1,%ymm1,%ymm1",
        "vmovdqu64 %zmm2,(%rdi)",
        "fldl (%rdi)",
        "fxch %st(1)",
        "movd %eax,%mm0",
        "kmovq %k1,%rax",
        "ldmxcsr (%rdi)",
        "vzeroupper",
    ] {
        let what = instruction.split(' ').next().unwrap_or_default();
        // Compare only the gates, because the assembler changes some mnemonics.
        let Some(findings) = found(&format!("{instruction}; {RETURN}")) else {
            return;
        };
        let gates: Vec<_> = findings.iter().map(|one| one.gate).collect();
        assert_eq!(gates, [Gate::VectorRegisters], "{what}");
    }
}

#[test]
fn red_zone_accesses_are_found() {
    for access in ["mov %rax,-0x8(%rsp)", "lea -0x80(%rsp,%rcx,8),%rax"] {
        let what = access.split(' ').next().unwrap_or_default();
        assert_finding(
            Gate::RedZone,
            "rk_post_send",
            what,
            &format!("{access}; {RETURN}"),
        );
    }
}

#[test]
fn missing_thunks_are_found() {
    for (what, body) in [
        ("ret", "ret"),
        ("call", "call *%rax; jmp __x86_return_thunk"),
        ("jmp", "jmp *0x8(%rdi)"),
        ("jmp", "notrack jmp *%rax"),
    ] {
        assert_finding(Gate::Thunks, "rk_post_send", what, body);
    }
}

#[test]
fn foreign_symbols_are_found() {
    assert_finding(
        Gate::Symbols,
        "",
        "printk",
        &format!("call printk; {RETURN}"),
    );
    assert_finding(
        Gate::Symbols,
        "",
        "__udivti3",
        &format!("call __udivti3; {RETURN}"),
    );
    let visible = format!("{RETURN}; .globl other; .type other, @function; other: {RETURN}");
    assert_finding(Gate::Symbols, "", "other", &visible);
}

#[test]
fn indirect_panics_are_found() {
    let panic = "_ZN4core9panicking5panic17h0123456789abcdefE";
    let direct = format!("jc {panic}; {RETURN}");
    assert_finding(Gate::Panics, "rk_post_send", "panicking::panic", &direct);
    let inner = "_ZN10iwarp_rnic2qp4step17h0123456789abcdefE";
    let behind = format!("call {inner}; {RETURN}; .type {inner}, @function; {inner}: call {panic}");
    assert_finding(Gate::Panics, "qp::step", "panicking::panic", &behind);
    let pointed =
        format!("mov ${inner},%rdi; {RETURN}; .type {inner}, @function; {inner}: call {panic}");
    assert_finding(Gate::Panics, "qp::step", "panicking::panic", &pointed);
    let in_data = format!(
        "{RETURN}; .type {inner}, @function; {inner}: call {panic}; .section .rodata; .quad {inner}"
    );
    assert_finding(Gate::Panics, "qp::step", "panicking::panic", &in_data);
}

#[test]
fn allocations_are_found() {
    let grow = "call _ZN5alloc7raw_vec8grow_one17h0123456789abcdefE; jmp __x86_return_thunk";
    assert_finding(Gate::Allocations, "rk_post_send", "raw_vec::grow_one", grow);
    let free = format!("call iwarp_free; {RETURN}");
    assert_finding(Gate::Allocations, "rk_post_send", "iwarp_free", &free);
}

#[test]
fn large_frames_are_found() {
    let large = format!("push %rbx; sub $0x200,%rsp; add $0x200,%rsp; pop %rbx; {RETURN}");
    assert_finding(Gate::Frames, "rk_post_send", "", &large);
    let variable = format!("sub %rax,%rsp; {RETURN}");
    assert_finding(Gate::Frames, "rk_post_send", "", &variable);
}

#[test]
fn recursion_is_found() {
    let own = format!("call rk_post_send; {RETURN}");
    assert_finding(Gate::Recursion, "rk_post_send", "", &own);
    let inner = "_ZN10iwarp_rnic2qp4step17h0123456789abcdefE";
    let mutual =
        format!("call {inner}; {RETURN}; .type {inner}, @function; {inner}: jmp rk_post_send");
    let Some(findings) = found(&mutual) else {
        return;
    };
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(findings.first().unwrap().gate, Gate::Recursion);
}
