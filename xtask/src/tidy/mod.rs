//! The step `tidy`: checks rules of this project that rustc and clippy do not know.

mod attacks;
mod code;
mod functions;
mod markdown;
mod messages;
mod options;
mod rooms;
mod rules;
mod text;
pub(crate) mod unsafe_doc;

use anyhow::{Result, anyhow, bail};

use rules::UnsafeModules;
use xtask::context::Context;
use xtask::documents;
use xtask::files;
use xtask::outcome::Outcome;
use xtask::process::Log;

/// The table of modules that may contain `unsafe`.
const UNSAFE_MODULES: &str = "xtask/unsafe-modules.txt";

/// Whether a finding fails the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Severity {
    Warning,
    Error,
}

/// A violation of a rule.
struct Finding {
    severity: Severity,
    place: String,
    text: String,
}

/// Prints the rooms of all crates and which rooms each names, in the format of [`rooms::FILE`].
///
/// # Errors
/// If git cannot list the files, or a file cannot be read.
pub(crate) fn print_rooms(context: &Context) -> Result<()> {
    let mut crates = rooms::Crates::default();
    for file in files::listed(&context.root)? {
        if file.ends_with(".rs") {
            crates.add(&file, &files::read(&context.root, &file)?);
        }
    }
    print!("{}", crates.print());
    Ok(())
}

/// Checks every file that git tracks or would add.
pub(crate) fn run(context: &Context, log: &mut Log) -> Result<Outcome> {
    let root = &context.root;
    let table = files::read(root, UNSAFE_MODULES)?;
    let modules =
        UnsafeModules::parse(&table).map_err(|error| anyhow!("{UNSAFE_MODULES}: {error}"))?;
    let mut findings = Vec::new();
    let mut variables = options::Variables::default();
    let mut sources = messages::Sources::default();
    let mut evidence = attacks::Evidence::default();
    let mut crates = rooms::Crates::default();
    let mut count = 0;
    for file in files::own_texts(root)? {
        count += 1;
        let text = files::read(root, &file)?;
        findings.extend(rules::any_text(&file, &text));
        findings.extend(text::check(&file, &text));
        findings.extend(functions::check(&file, &text));
        if file.ends_with(".rs") {
            findings.extend(rules::rust(&file, &text, &modules));
            variables.add(&file, &text);
            sources.add(&text);
            evidence.add(&file, &text);
            crates.add(&file, &text);
        }
        if file.ends_with(".md") {
            findings.extend(markdown::links(root, &file, &text)?);
        }
    }
    let readme = files::read(root, "README.md")?;
    findings.extend(variables.compare(&files::read(root, options::FILE)?));
    findings.extend(evidence.compare(&files::read(root, attacks::FILE)?));
    let rooms = rooms::Table::parse(&files::read(root, rooms::FILE)?)
        .map_err(|error| anyhow!("{}: {error}", rooms::FILE))?;
    findings.extend(crates.compare(&rooms));
    findings.extend(sources.compare(&files::read(root, messages::FILE)?));
    findings.extend(unsafe_doc::check(context, &table)?);
    let contents = files::read(root, markdown::CONTENTS)?;
    findings.extend(markdown::contents(&documents::published(root)?, &contents));
    findings.extend(markdown::readme(&readme, &files::read(root, "Cargo.toml")?));

    let mut errors = 0;
    for Finding {
        severity,
        place,
        text,
    } in &findings
    {
        match severity {
            Severity::Warning => log.say(format!("warning: {place}: {text}")),
            Severity::Error => {
                errors += 1;
                log.line(format!("{place}: {text}"));
            }
        }
    }
    if errors > 0 {
        bail!("{errors} findings in {count} files");
    }
    log.say(format!("{count} files"));
    Ok(Outcome::Passed)
}
