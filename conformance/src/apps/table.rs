//! The table of programs in `docs/programs.md`. `--bless` updates it with the results of a run; a
//! unit test compares it with the cases.

use std::path::Path;

use anyhow::{Context as _, Result, bail};

use super::stage::Stage;
use crate::case::{Case, Verdict};
use crate::rows::Row;

const FILE: &str = "docs/programs.md";
const BEGIN: &str = "<!-- begin: cargo xtask interop apps --all --bless -->";
const END: &str = "<!-- end -->";
const HEAD: &str = "| Program | What ran | Result |\n| --- | --- | --- |\n";
/// The mark of long cases, and the explanation below the table.
const LONG: &str = " \\*";
const LEGEND: &str = "\n\\* takes long: runs with `--all`, not in `cargo xtask test`.\n";

/// Returns each program with the descriptions of all its cases, in the order of the first cases.
fn programs(cases: &[Case<Stage>]) -> Vec<(&str, String)> {
    let mut out: Vec<(&str, String)> = Vec::new();
    for case in cases {
        let mut what = case.what().replace('|', "\\|");
        if case.long {
            what.push_str(LONG);
        }
        match out.iter_mut().find(|(name, _)| *name == case.program()) {
            Some((_, all)) => {
                all.push_str("; ");
                all.push_str(&what);
            }
            None => out.push((case.program(), what)),
        }
    }
    out
}

/// Returns how the committed table differs from the cases, or `None` if they agree.
#[cfg(test)]
fn compare(document: &str, cases: &[Case<Stage>]) -> Option<String> {
    let Some((_, rows, _)) = split(document) else {
        return Some(format!("has no {BEGIN} … {END}"));
    };
    let wanted = programs(cases);
    if !rows.ends_with(LEGEND) {
        return Some(format!(
            "does not say what{LONG} means in the table of programs"
        ));
    }
    let found: Vec<[&str; 3]> = rows.lines().filter_map(cells).collect();
    for (name, what) in &wanted {
        let row = found.iter().find(|row| row[0] == *name);
        if row.is_none_or(|row| row[1] != what) {
            return Some(format!(
                "the row of {name} is out of date; \
                 `cargo xtask interop apps --all --bless` writes it"
            ));
        }
    }
    let extra = found
        .iter()
        .find(|row| wanted.iter().all(|(name, _)| row[0] != *name))?;
    Some(format!("no case runs {}", extra[0]))
}

/// Replaces the rows of programs whose cases all ran. Keeps the other rows.
///
/// Fails if the document contains no table, or if a case failed, because failures are not
/// published.
pub(super) fn bless(root: &Path, cases: &[Case<Stage>], rows: &[Row]) -> Result<()> {
    if let Some(row) = rows.iter().find(|row| row.result.is_err()) {
        bail!(
            "{FILE} is not updated, because this case failed: {}",
            row.name
        );
    }
    let path = root.join(FILE);
    let text = std::fs::read_to_string(&path)?;
    let (before, old, after) =
        split(&text).with_context(|| format!("{FILE} has no {BEGIN} … {END}"))?;
    let old: Vec<[&str; 3]> = old.lines().filter_map(cells).collect();
    let mut table = String::from(HEAD);
    for (name, what) in programs(cases) {
        let complete = cases
            .iter()
            .filter(|case| case.program() == name)
            .all(|case| rows.iter().any(|row| row.name == case.name));
        if complete {
            let result = result(
                rows.iter()
                    .filter(|row| row.name.split(": ").next() == Some(name)),
            );
            table.push_str(&format!("| {name} | {what} | {result} |\n"));
        } else if let Some([name, what, result]) = old.iter().find(|row| row[0] == name) {
            table.push_str(&format!("| {name} | {what} | {result} |\n"));
        }
    }
    std::fs::write(
        &path,
        format!("{before}{BEGIN}\n{table}{LEGEND}{END}{after}"),
    )?;
    Ok(())
}

/// Returns the table's cell with the results of all cases of a program.
fn result<'a>(rows: impl Iterator<Item = &'a Row>) -> String {
    let mut passed = 0;
    let mut skipped = Vec::new();
    for row in rows {
        match &row.result {
            Ok(Verdict::Skipped(why)) => {
                let what = row.name.split_once(": ").map_or("", |(_, what)| what);
                skipped.push(format!("{what} ({why})"));
            }
            _ => passed += 1,
        }
    }
    match (passed, skipped.is_empty()) {
        (_, true) => "passed".into(),
        (0, false) => format!("not run: {}", skipped.join("; ")),
        (_, false) => format!("passed; not run: {}", skipped.join("; ")),
    }
    .replace('|', "\\|")
}

/// Splits a document into the text before the table, the table, and the text after it.
fn split(document: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = document.split_once(BEGIN)?;
    let (rows, after) = rest.split_once(END)?;
    Some((before, rows, after))
}

/// Returns the cells of a row, or `None` for the heading and for other lines.
fn cells(line: &str) -> Option<[&str; 3]> {
    if HEAD.lines().any(|head| head == line) {
        return None;
    }
    let inner = line.strip_prefix("| ")?.strip_suffix(" |")?;
    let mut parts = inner.split(" | ");
    let row = [parts.next()?, parts.next()?, parts.next()?];
    parts.next().is_none().then_some(row)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn case(program: &'static str, what: &str) -> Case<Stage> {
        Case::new(program, what, |_| Ok(Verdict::passed("")))
    }

    fn row(program: &'static str, what: &str, result: Result<Verdict>) -> Row {
        Row {
            name: format!("{program}: {what}"),
            result,
            time: Duration::ZERO,
        }
    }

    fn document(rows: &str) -> String {
        format!("before\n{BEGIN}\n{HEAD}{rows}{LEGEND}{END}\nafter\n")
    }

    #[test]
    fn table_comparison_finds_differences() {
        let cases = [
            case("a", "one"),
            case("b", "x | y"),
            case("a", "two").long(),
        ];
        let good = "| a | one; two \\* | passed |\n| b | x \\| y | passed |\n";
        assert_eq!(compare(&document(good), &cases), None);
        for bad in [
            "",
            "| a | one | passed |\n| b | x \\| y | passed |\n",
            "| a | one; two | passed |\n| b | x \\| y | passed |\n",
            "| a | one; two \\* | passed |\n",
            "| a | one; two \\* | passed |\n| b | x \\| y | passed |\n| c | z | passed |\n",
        ] {
            assert!(compare(&document(bad), &cases).is_some(), "{bad}");
        }
        assert!(compare(&document(good).replace(LEGEND, ""), &cases).is_some());
        assert!(compare("nothing", &cases).is_some());
    }

    #[test]
    fn committed_table_lists_all_cases() {
        let root = xtask::context::Context::new(false, false).unwrap().root;
        let text = std::fs::read_to_string(root.join(FILE)).unwrap();
        assert_eq!(compare(&text, &crate::apps::all()), None, "{FILE}");
    }

    #[test]
    fn blessing_replaces_complete_programs() {
        let dir = std::env::temp_dir().join(format!("conformance-table-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("docs")).unwrap();
        let old = document("| a | old | passed |\n| b | old | passed |\n| gone | x | passed |\n");
        std::fs::write(dir.join(FILE), old).unwrap();
        let cases = [
            case("a", "one"),
            case("a", "two"),
            case("b", "x"),
            case("b", "y"),
        ];
        let rows = [
            row("a", "one", Ok(Verdict::passed("note"))),
            row("a", "two", Ok(Verdict::skipped("why"))),
            row("b", "x", Ok(Verdict::passed(""))),
        ];
        bless(&dir, &cases, &rows).unwrap();
        let new = std::fs::read_to_string(dir.join(FILE)).unwrap();
        assert_eq!(
            new,
            document("| a | one; two | passed; not run: two (why) |\n| b | old | passed |\n")
        );
        let failed = [row("a", "one", Err(anyhow::anyhow!("no")))];
        assert!(bless(&dir, &cases, &failed).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
