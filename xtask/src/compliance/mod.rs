//! The step and command `compliance`: checks that every quoted rule is in its RFC, and counts which
//! rules of the RFCs are quoted in code and in tests.
//!
//! [`annotations`] describes the form of an annotation. The idea and the comment marks come from
//! the program `duvet`, which would have to be compiled on every new machine: its 200 crates take
//! minutes. If the references were written as `rfcs/rfc5040.txt#section-4.1`, duvet could read our
//! annotations.

mod annotations;
mod report;
mod rfc;

use anyhow::{Context as _, Result, bail};

use report::Document;
use xtask::context::Context;
use xtask::files;
use xtask::outcome::Outcome;
use xtask::process::Log;

/// The RFCs that we claim to follow; their texts are in `rfcs/`.
const RFCS: &[u16] = &[5040, 5041, 5044, 6581, 7306];

/// The committed snapshot.
const SNAPSHOT: &str = "docs/compliance.md";

/// The command that updates the snapshot.
const BLESS: &str = "cargo xtask compliance --bless";

/// Compares all annotations with the RFCs. The strings describe wrong annotations.
fn analyse(context: &Context) -> Result<(Vec<Document>, Vec<String>)> {
    let mut errors = Vec::new();
    let mut found = Vec::new();
    for file in files::listed(&context.root)? {
        let exceptions = file.starts_with("rfcs/exceptions/") && file.ends_with(".txt");
        // The tests in xtask contain annotations that are wrong on purpose.
        let source = file.ends_with(".rs") && !file.starts_with("xtask/");
        if source || exceptions {
            let text = files::read(&context.root, &file)?;
            found.extend(annotations::collect(&file, &text, &mut errors));
        }
    }
    for annotation in &found {
        if !RFCS.contains(&annotation.rfc) {
            errors.push(format!(
                "{}: RFC {} is not in rfcs/",
                annotation.place(),
                annotation.rfc
            ));
        }
    }
    let mut documents = Vec::new();
    for &number in RFCS {
        let text = files::read(&context.root, &format!("rfcs/rfc{number}.txt"))?;
        documents.push(Document::new(
            number,
            rfc::parse(&text),
            &found,
            &mut errors,
        ));
    }
    Ok((documents, errors))
}

/// Runs the step. It fails if a quote is wrong, a requirement is missing, or the snapshot is out of
/// date.
pub(crate) fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    let (documents, errors) = analyse(context)?;
    write_report(context, &documents)?;
    let missing = report::missing(&documents);
    for problem in errors.iter().chain(&missing) {
        log.line(problem);
    }
    check_complete(&errors, &missing)?;
    for document in &documents {
        let counts = document.total();
        log.say(format!(
            "RFC {}: {} requirements, {} in code, {} in tests, {} exceptions, {} missing",
            document.number,
            counts.total,
            counts.implemented,
            counts.tested,
            counts.exception,
            counts.missing
        ));
    }
    let committed = std::fs::read_to_string(context.root.join(SNAPSHOT)).unwrap_or_default();
    if committed != report::snapshot(&documents) {
        bail!("{SNAPSHOT} is out of date: run `{BLESS}` and commit it");
    }
    Ok(Outcome::Passed)
}

/// Fails if an annotation is wrong or a requirement is missing.
fn check_complete(errors: &[String], missing: &[String]) -> Result<()> {
    if !errors.is_empty() {
        bail!("{} annotations are wrong", errors.len());
    }
    if let Some(first) = missing.first() {
        bail!("{} requirements are missing: {first}", missing.len());
    }
    Ok(())
}

/// Runs the command: writes the report and, with `bless`, the committed snapshot. Returns `false`
/// if an annotation is wrong or a requirement is missing.
///
/// # Errors
/// If files cannot be read or written.
pub(crate) fn command(context: &Context, bless: bool) -> Result<bool> {
    let (documents, errors) = analyse(context)?;
    let path = write_report(context, &documents)?;
    let missing = report::missing(&documents);
    for problem in errors.iter().chain(&missing) {
        eprintln!("error: {problem}");
    }
    println!("full report: {}", path.display());
    if bless {
        std::fs::write(context.root.join(SNAPSHOT), report::snapshot(&documents))?;
        println!("snapshot: {SNAPSHOT}");
    }
    Ok(check_complete(&errors, &missing).is_ok())
}

fn write_report(context: &Context, documents: &[Document]) -> Result<std::path::PathBuf> {
    std::fs::create_dir_all(&context.target)?;
    let path = context.target.join("compliance.txt");
    std::fs::write(&path, report::full(documents))
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_annotations_and_gaps_fail() {
        let some = |text: &str| vec![text.to_owned()];
        assert!(check_complete(&[], &[]).is_ok());
        let wrong = check_complete(&some("a.rs:1: wrong"), &[]).unwrap_err();
        assert_eq!(wrong.to_string(), "1 annotations are wrong");
        let missing = check_complete(&[], &some("RFC 9999 section 1: A MUST hold.")).unwrap_err();
        assert_eq!(
            missing.to_string(),
            "1 requirements are missing: RFC 9999 section 1: A MUST hold."
        );
    }

    /// The RFCs do not change, so these counts must not change. The test fails if the parser misses
    /// sections or requirements.
    #[test]
    fn rfcs_are_read_completely() {
        let context = Context::new(true, false).unwrap();
        let mut found = Vec::new();
        for &number in RFCS {
            let text = files::read(&context.root, &format!("rfcs/rfc{number}.txt")).unwrap();
            let sections = rfc::parse(&text);
            let all: String = sections
                .iter()
                .map(|section| section.text.as_str())
                .collect();
            assert!(!all.contains("[Page "), "RFC {number} keeps a page footer");
            let all = || sections.iter().flat_map(|section| &section.requirements);
            let keywords: usize = all().map(|one| one.keywords.len()).sum();
            found.push((number, sections.len(), keywords, all().count()));
        }
        // RFC, sections, keywords, requirements. Headings and keywords were counted with other
        // tools. Not counted are the seven keywords of the paragraph that defines the keywords, and
        // a "NOT REQUIRED" in RFC 5041.
        let expected = [
            (5040, 56, 152 - 7, 142),
            (5041, 44, 135 - 8, 120),
            (5044, 63, 124 - 7, 110),
            (6581, 28, 56 - 7, 47),
            (7306, 37, 69 - 7, 60),
        ];
        assert_eq!(found, expected);
    }
}
