//! Reads two figures from callgrind's output: the instructions in our own object file, and the
//! number of calls from it to other object files.
//!
//! The Valgrind manual describes the format in "Callgrind Format Specification". Names are
//! compressed: `ob=(1) name` defines the name that a later `ob=(1)` refers to. The line after
//! `calls=` contains the cost of the called function.

use std::collections::HashMap;

use anyhow::{Context as _, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Counts {
    /// Number of instructions in our own object file.
    pub(super) own: u64,
    /// Number of calls from our own object file to others.
    pub(super) calls: u64,
}

/// Adds up the counts of a profile. Our own object file is the one with the file name `program`.
pub(super) fn parse(text: &str, program: &str) -> Result<Counts> {
    let mut names: HashMap<&str, &str> = HashMap::new();
    let mut counts = Counts::default();
    let is_own = |name: Option<&str>| name.and_then(|n| n.rsplit('/').next()) == Some(program);
    let mut own = false;
    let mut callee_own = None;
    let mut cost_of_call = false;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("ob=") {
            own = is_own(resolve(&mut names, name));
        } else if let Some(name) = line.strip_prefix("cob=") {
            callee_own = Some(is_own(resolve(&mut names, name)));
        } else if let Some(call) = line.strip_prefix("calls=") {
            let times: u64 = first(call)?;
            // Without a `cob=` line, the callee is in the caller's object file.
            if own && !callee_own.take().unwrap_or(own) {
                counts.calls += times;
            }
            callee_own = None;
            cost_of_call = true;
        } else if line.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '*')) {
            let is_own_cost = !std::mem::take(&mut cost_of_call);
            if own && is_own_cost {
                let cost = line.split_whitespace().nth(1);
                counts.own += cost.context("a cost line has no cost")?.parse::<u64>()?;
            }
        }
    }
    Ok(counts)
}

fn first(text: &str) -> Result<u64> {
    let word = text.split_whitespace().next();
    Ok(word.context("a number is missing")?.parse()?)
}

/// Resolves a compressed name: `(1) name` defines it, `(1)` refers to it.
fn resolve<'a>(names: &mut HashMap<&'a str, &'a str>, text: &'a str) -> Option<&'a str> {
    match text.split_once(' ') {
        Some((number, name)) => {
            names.insert(number, name);
            Some(name)
        }
        None if text.starts_with('(') => names.get(text).copied(),
        None => Some(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = "\
version: 1
events: Ir
ob=(1) /somewhere/prog
fl=(1) a.rs
fn=(1) main
10 5
+1 7
cob=(2) /lib/libc.so.6
cfi=(2) memcpy.S
cfn=(2) memcpy
calls=3 0
* 300
cfn=(3) helper
calls=2 20
11 40

fn=(3)
20 40
ob=(2)
fl=(2)
fn=(2)
0 300
cob=(1)
cfn=(3)
calls=1 20
0 9
ob=(1)
fn=(3)
-2 1
totals: 353
";

    #[test]
    fn own_instructions_and_outgoing_calls_are_counted() {
        let want = Counts { own: 53, calls: 3 };
        assert_eq!(parse(PROFILE, "prog").unwrap(), want);
        assert_eq!(
            parse(PROFILE, "libc.so.6").unwrap(),
            Counts { own: 300, calls: 1 }
        );
        assert_eq!(parse(PROFILE, "other").unwrap(), Counts::default());
    }

    #[test]
    fn malformed_numbers_are_errors() {
        assert!(parse("ob=(1) /x/prog\n10 x\n", "prog").is_err());
        assert!(parse("calls=x\n", "prog").is_err());
    }
}
