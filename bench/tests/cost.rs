//! The program that compares the costs of calls and verbs runs. Its ratios are not checked.

use std::process::Command;

#[test]
fn cost_prints_four_ratios() {
    let mut cost = Command::new(env!("CARGO_BIN_EXE_iwarp-cost"));
    let out = cost.args(["1", "2000"]).output().expect("it runs");
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success());
    assert_eq!(text.matches("ratio").count(), 4, "{text}");
}
