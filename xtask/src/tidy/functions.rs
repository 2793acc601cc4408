//! The rule for the length of functions, in Rust and in C.

use super::code::code_only;
use super::{Finding, Severity};

/// A function with more lines is an error. The lines count from the signature to the closing brace,
/// with comments, but without quotations of RFCs: these are long, and nobody reads them as code.
const LINES_MAX: usize = 70;

/// A function of a file.
#[derive(Debug, PartialEq, Eq)]
struct Function {
    name: String,
    /// Line number of the signature, from 1.
    line: usize,
    lines: usize,
}

/// Finds the functions of a `.rs`, `.c` or `.h` file that are too long.
pub(crate) fn check(file: &str, text: &str) -> Vec<Finding> {
    let functions = match file.rsplit_once('.') {
        Some((_, "rs")) => of_rust(text),
        Some((_, "c" | "h")) => of_c(text),
        _ => return Vec::new(),
    };
    functions
        .into_iter()
        .filter(|function| function.lines > LINES_MAX)
        .map(|Function { name, line, lines }| Finding {
            severity: Severity::Error,
            place: format!("{file}:{line}"),
            text: format!("{name} has {lines} lines, more than {LINES_MAX}: split it"),
        })
        .collect()
}

/// Counts the lines of `text` from `start` to `end` that are no quotations.
fn count(text: &str, start: usize, end: usize) -> usize {
    let quotes = |line: &&str| {
        ["//=", "//#"]
            .iter()
            .any(|mark| line.trim().starts_with(mark))
    };
    let lines = text.lines().skip(start).take(end - start + 1);
    lines.filter(|line| !quotes(line)).count()
}

fn of_rust(text: &str) -> Vec<Function> {
    let code = code_only(text);
    let line_of = |at: usize| code[..at].matches('\n').count();
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let mut functions = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let name = code[at + 3..].split(|c| !is_part(c)).next().unwrap_or("");
        // A type `fn (…)` has no name, and `fn` may be the end of another word.
        if name.is_empty() || code[..at].ends_with(is_part) {
            continue;
        }
        if let Some(end) = body_end(&code[at..]) {
            let (first, last) = (line_of(at), line_of(at + end));
            functions.push(Function {
                name: name.to_owned(),
                line: first + 1,
                lines: count(text, first, last),
            });
        }
    }
    functions
}

/// Returns the position of the brace that closes the body of the function at the start of `code`,
/// or `None` if the function has no body.
fn body_end(code: &str) -> Option<usize> {
    let mut in_signature = true;
    let mut depth = 0_usize;
    for (at, c) in code.char_indices() {
        match c {
            ';' if in_signature && depth == 0 => return None,
            '{' if depth == 0 => {
                in_signature = false;
                depth = 1;
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 && !in_signature {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

/// Finds the functions of a C file. Their braces are alone in a line, at its start.
fn of_c(text: &str) -> Vec<Function> {
    let code = code_only(text);
    let lines: Vec<&str> = code.lines().collect();
    let mut functions = Vec::new();
    for (open, _) in lines.iter().enumerate().filter(|(_, line)| **line == "{") {
        let is_before = |line: &&str| {
            let line = line.trim();
            line.is_empty() || line.ends_with([';', '}']) || line.starts_with('#')
        };
        let signature = lines[..open].iter().rposition(is_before);
        let first = signature.map_or(0, |before| before + 1);
        let Some(length) = lines[open..].iter().position(|line| line.starts_with('}')) else {
            continue;
        };
        let head = lines[first..open].join(" ");
        let name = head.split('(').next().unwrap_or("");
        let name = name.rsplit([' ', '*']).next().unwrap_or("");
        functions.push(Function {
            name: name.to_owned(),
            line: first + 1,
            lines: count(text, first, open + length),
        });
    }
    functions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function(name: &str, line: usize, lines: usize) -> Function {
        Function {
            name: name.to_owned(),
            line,
            lines,
        }
    }

    #[test]
    fn rust_functions_are_measured() {
        let text = "//! Head.\n\
            type A = fn (u8) -> u8;\n\
            trait T { fn none(&self) -> [u8; 2]; }\n\
            pub fn one<F: Fn()>(\n    f: F,\n) -> u8 {\n    f(\"}\"); // }\n}\n\
            impl B {\n    //# not inside\n    fn two() {\n        //= rfc5044\n\
            //# quoted\n        // counted\n        { fn inner() {} }\n    }\n}\n";
        assert_eq!(
            of_rust(text),
            [
                function("one", 4, 5),
                function("two", 11, 4),
                function("inner", 15, 1)
            ]
        );
    }

    #[test]
    fn c_functions_are_measured() {
        let text = "#include <a.h>\nint a;\n\n/* Head. */\n\
            static struct b *one(int c,\n\t\t     int d)\n\
            {\n\tif (c) {\n\t\td();\n\t}\n}\nstruct e {\n\tint f;\n};\nvoid two(void)\n{\n}\n";
        assert_eq!(of_c(text), [function("one", 5, 7), function("two", 15, 3)]);
    }

    #[test]
    fn long_functions_are_errors() {
        let rust = |lines| format!("fn f() {{\n{}}}\n", "x;\n".repeat(lines - 2));
        assert!(check("a.rs", &rust(LINES_MAX)).is_empty());
        let found = check("a.rs", &rust(LINES_MAX + 1));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].severity, Severity::Error);
        let c = |lines| format!("int f(void)\n{{\n{}}}\n", "x;\n".repeat(lines - 3));
        assert!(check("a.c", &c(LINES_MAX)).is_empty());
        assert_eq!(check("a.c", &c(LINES_MAX + 1)).len(), 1);
        assert!(check("a.md", &c(LINES_MAX + 1)).is_empty());
    }
}
