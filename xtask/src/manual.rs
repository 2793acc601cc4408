//! Writes the manual page iwarp(7): the environment variables of docs/options.md.
//!
//! The pages of the command come from the command itself. The variables are read by libraries and
//! by programs that run without the command, so their page comes from the document that lists them.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Result, ensure};

use crate::files;

/// The document with the tables of variables.
const OPTIONS: &str = "docs/options.md";
/// The section that concerns only developers of this project; it is the last one.
const DEVELOPERS: &str = "For work on this project";
const HEAD: &str = r#".SH NAME
iwarp \- environment of the software RNIC
.SH DESCRIPTION
.B iwarp
is an RDMA card made of software. Programs use it through its
.B libibverbs
and
.B librdmacm,
which
.BR iwarp\-run (1)
puts in front of other libraries of these names.
It speaks iWARP (RFC 5040, 5041, 5044 and 6581) over ordinary TCP connections, and needs neither
root nor a kernel module.
.PP
The libraries read the variables below when a program opens a device. An empty value is the same as
no value. If a value is not valid, a message is written to standard error, and the default is used.
A number that is out of range is replaced by the nearest end of the range. A
.I switch
is on, 1, yes, true, or off, 0, no, false.
.PP
Options of
.BR iwarp\-run (1)
set most of the variables.
.SH ENVIRONMENT
"#;
const FOOT: &str = r#".SH EXAMPLES
Switch CRCs off for one program, and write counters to standard error when it ends:
.PP
.nf
.RS
IWARP_CRC=off IWARP_STATS=on iwarp run \-\- ib_write_bw \-R
.RE
.fi
.PP
Set the environment for the rest of a shell session:
.PP
.nf
.RS
eval "$(iwarp env \-\-crc off \-\-stats)"
.RE
.fi
.SH SEE ALSO
.BR iwarp (1),
.BR iwarp\-run (1),
.BR iwarp\-env (1),
.BR iwarp\-stat (1),
.BR rdma_cm (7),
.BR ibv_post_send (3)
"#;

/// Returns the text of the page.
///
/// # Errors
/// If the document cannot be read or contains no table of variables.
pub fn page(root: &Path) -> Result<String> {
    let text = files::read(root, OPTIONS)?;
    let manifest = files::read(root, "Cargo.toml")?;
    let version = manifest
        .lines()
        .find_map(|line| line.strip_prefix("version = \""));
    let version = version.unwrap_or_default().trim_end_matches('"');
    let variables = environment(&text);
    ensure!(!variables.is_empty(), "{OPTIONS} has no table of variables");
    let title = format!(".TH IWARP 7 \"\" \"iwarp {version}\" \"Miscellaneous Information\"");
    Ok(format!("{title}\n{HEAD}{variables}{FOOT}"))
}

/// Returns the sections with the variables.
fn environment(text: &str) -> String {
    let mut out = String::new();
    let mut columns: Vec<String> = Vec::new();
    let mut section = "";
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            section = heading;
        }
        if section == DEVELOPERS {
            break;
        }
        if !line.starts_with('|') {
            columns.clear();
            continue;
        }
        let cells = cells(line);
        if columns.is_empty() {
            columns = cells;
            if columns.first().is_some_and(|name| name == "Variable") {
                let _ = writeln!(out, ".SS {}", inline(section));
            }
        } else if columns[0] == "Variable" && !cells[0].starts_with("---") {
            row(&mut out, &columns, &cells);
        }
    }
    out
}

/// Writes the entry of a variable.
fn row(out: &mut String, columns: &[String], cells: &[String]) {
    let cell = |name: &str| {
        let place = columns.iter().position(|column| column.starts_with(name));
        let text = place
            .and_then(|at| cells.get(at))
            .map_or("", String::as_str);
        if text == "–" { "" } else { text }
    };
    if cell("Variable").is_empty() {
        return; // Only an option of the command, whose page describes it.
    }
    let _ = writeln!(out, ".TP\n{}", inline(cell("Variable")));
    let _ = writeln!(out, "{}", inline(cell("Meaning")));
    for (label, value) in [
        ("Values", cell("Type")),
        ("Unit", cell("Unit")),
        ("Default", cell("Default")),
        ("Option", cell("`iwarp run`")),
    ] {
        if !value.is_empty() {
            let _ = writeln!(out, ".br\n\\fI{label}:\\fR {}", inline(value));
        }
    }
}

/// Returns the cells of a row of a table. `\|` is no border.
fn cells(line: &str) -> Vec<String> {
    let line = line.trim().trim_matches('|').replace("\\|", "\0");
    line.split('|')
        .map(|cell| cell.trim().replace('\0', "|"))
        .collect()
}

/// Returns Markdown text as roff: code and emphasis in bold, links without their targets.
fn inline(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    let mut code = false;
    while let Some(next) = rest.chars().next() {
        if next == '`' || rest.starts_with("**") {
            code = !code;
            out += if code { "\\fB" } else { "\\fR" };
            rest = rest.strip_prefix("**").unwrap_or(&rest[next.len_utf8()..]);
        } else if let (false, Some((name, after))) = (code, link(rest)) {
            out += &inline(name);
            rest = after;
        } else {
            match next {
                '\\' => out += "\\e",
                '-' => out += "\\-",
                '*' if !code => {}
                other => out.push(other),
            }
            rest = &rest[next.len_utf8()..];
        }
    }
    if out.starts_with(['.', '\'']) {
        out.insert_str(0, "\\&");
    }
    out
}

/// Splits text that begins with a link into its name and the text after the link.
fn link(text: &str) -> Option<(&str, &str)> {
    let (name, after) = text.strip_prefix('[')?.split_once("](")?;
    let (_, rest) = after.split_once(')')?;
    (!name.contains('[')).then_some((name, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_rows_become_entries() {
        let text = "# Options\n\n## The wire\n\n\
                    | Variable | `iwarp run` | Type, range | Unit | Default | Meaning |\n\
                    | --- | --- | --- | --- | --- | --- |\n\
                    | `IWARP_X` | `--x on\\|off` | switch | – | `on` | Sets *it*: [more](y.md). |\n\
                    | – | `--z` | flag | – | off | No variable. |\n\n\
                    ## For work on this project\n\n\
                    | Variable | Meaning |\n| --- | --- |\n| `IWARP_TEST` | Hidden. |\n";
        assert_eq!(
            environment(text),
            ".SS The wire\n.TP\n\\fBIWARP_X\\fR\nSets it: more.\n\
             .br\n\\fIValues:\\fR switch\n.br\n\\fIDefault:\\fR \\fBon\\fR\n\
             .br\n\\fIOption:\\fR \\fB\\-\\-x on|off\\fR\n"
        );
    }

    #[test]
    fn every_public_variable_is_in_the_page() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let page = page(&root).unwrap();
        let options = files::read(&root, OPTIONS).unwrap();
        let public = options.split("## For work on").next().unwrap();
        let rows = public
            .lines()
            .filter_map(|line| line.strip_prefix("| `IWARP_"));
        let names: Vec<&str> = rows.filter_map(|row| row.split('`').next()).collect();
        assert!(names.len() > 20);
        for name in names {
            assert!(
                page.contains(&format!(".TP\n\\fBIWARP_{name}\\fR")),
                "{name}"
            );
        }
    }
}
