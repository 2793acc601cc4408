//! `iwarp man DIR`: writes a manual page for the command and for each subcommand.
//!
//! Hidden, because only packages and `cargo xtask install` call it. The pages come from the same
//! definitions as `--help`; headings in a help text (`EXAMPLES:`) become sections of the page. The
//! synopsis has the forms of the usage message, and `man/worked.txt` has one worked example for
//! each page.

use clap::{Args, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use iwarp_cli_common::error::{Context as _, Result};
use std::io::Write as _;
use std::path::PathBuf;

/// Arguments of `iwarp man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Directory for the pages; created if it does not exist
    dir: PathBuf,
}

/// A manual page: file name and text.
struct Page {
    file: String,
    text: Vec<u8>,
}

/// Writes the pages of `command` and of all its subcommands.
pub(crate) fn run(args: &ManArgs, command: Command) -> Result<()> {
    let pages = pages(command).context("cannot make the manual pages")?;
    std::fs::create_dir_all(&args.dir).context(args.dir.display())?;
    for page in pages {
        let path = args.dir.join(page.file);
        let written = std::fs::File::create(&path).and_then(|mut f| f.write_all(&page.text));
        written.context(path.display())?;
    }
    Ok(())
}

/// Returns the pages of the command and of all visible subcommands.
fn pages(command: Command) -> std::io::Result<Vec<Page>> {
    let mut root = command.disable_help_subcommand(true);
    root.build();
    let mut all = Vec::new();
    collect(&root, &mut all);
    let names: Vec<String> = all.iter().map(title).collect();
    all.iter()
        .map(|command| {
            Ok(Page {
                file: format!("{}.1", title(command)),
                text: page(command, &names)?,
            })
        })
        .collect()
}

fn collect(command: &Command, all: &mut Vec<Command>) {
    all.push(command.clone());
    for sub in command.get_subcommands().filter(|s| !s.is_hide_set()) {
        collect(sub, all);
    }
}

/// Returns the page name, such as `iwarp-perf-serve` for `iwarp perf serve`.
fn title(command: &Command) -> String {
    let name = command.get_display_name();
    name.unwrap_or_else(|| command.get_name()).to_owned()
}

fn page(command: &Command, names: &[String]) -> std::io::Result<Vec<u8>> {
    let own = title(command);
    let man = Man::new(command.clone())
        .title(own.to_uppercase())
        .source(concat!("iwarp ", env!("CARGO_PKG_VERSION")))
        .manual("User Commands");
    let mut out = Vec::new();
    man.render_title(&mut out)?;
    man.render_name_section(&mut out)?;
    synopsis(command).to_writer(&mut out)?;
    man.render_description_section(&mut out)?;
    man.render_options_section(&mut out)?;
    if command.get_subcommands().any(|s| !s.is_hide_set()) {
        man.render_subcommands_section(&mut out)?;
    }
    let mut rest = Roff::new();
    if let Some(example) = worked_example(&own) {
        rest.control("SH", ["WORKED EXAMPLE"]);
        filled(&mut rest, example);
    }
    if let Some(text) = command
        .get_after_long_help()
        .or_else(|| command.get_after_help())
    {
        sections(&mut rest, &text.to_string());
    }
    rest.control("SH", ["SEE ALSO"]);
    let others = names.iter().filter(|name| **name != own).enumerate();
    rest.text(
        others
            .flat_map(|(at, name)| {
                let comma = if at == 0 { "" } else { ", " };
                [roman(comma), bold(name.as_str()), roman("(1)")]
            })
            .chain([roman(", "), bold("iwarp"), roman("(7)")])
            .collect::<Vec<_>>(),
    );
    rest.to_writer(&mut out)?;
    Ok(out)
}

/// Returns the section with the forms of the command, each on a line of its own.
fn synopsis(command: &Command) -> Roff {
    let usage = command.clone().render_usage().to_string();
    let mut roff = Roff::new();
    roff.control("SH", ["SYNOPSIS"]);
    for (at, form) in usage.trim_start_matches("Usage:").lines().enumerate() {
        if at > 0 {
            roff.control("br", []);
        }
        let form = form.trim();
        let literal = form.find(['[', '<', '-']).unwrap_or(form.len());
        let (words, arguments) = form.split_at(literal);
        roff.text([bold(words), roman(arguments)]);
    }
    roff
}

/// The worked examples of all pages.
const WORKED: &str = include_str!("man/worked.txt");

/// Returns the worked example of a page, if there is one.
fn worked_example(page: &str) -> Option<&'static str> {
    let (_, text) = WORKED.split_once(&format!("\n[{page}]\n"))?;
    Some(text.split("\n[").next().unwrap_or(text).trim_end())
}

/// Writes text with filled paragraphs. Indented lines are kept as they are, and commands in them,
/// which begin with `$ `, are bold.
fn filled(roff: &mut Roff, text: &str) {
    let mut verbatim = false;
    for line in text.lines() {
        let indented = line.strip_prefix("  ");
        match (line.is_empty(), indented.is_some(), verbatim) {
            (true, _, _) => {
                roff.control(if verbatim { "sp" } else { "PP" }, []);
                continue;
            }
            (_, true, false) => {
                roff.control("RS", []).control("nf", []);
                verbatim = true;
            }
            (_, false, true) => {
                roff.control("fi", []).control("RE", []);
                verbatim = false;
            }
            _ => {}
        }
        match indented {
            Some(line) if line.starts_with("$ ") => roff.text([bold(line)]),
            _ => roff.text([roman(indented.unwrap_or(line))]),
        };
    }
    if verbatim {
        roff.control("fi", []).control("RE", []);
    }
}

/// Writes the text after the options. Indented lines are kept as they are; others are filled.
fn sections(roff: &mut Roff, text: &str) {
    let mut verbatim = false;
    let mut started = false;
    for line in text.lines() {
        let indented = line.starts_with(' ');
        if verbatim && !indented && !line.is_empty() {
            roff.control("fi", []);
            verbatim = false;
        }
        match heading(line) {
            Some(heading) => {
                roff.control("SH", [heading]);
                started = true;
                continue;
            }
            None if !started && !line.is_empty() => {
                roff.control("SH", ["NOTES"]);
                started = true;
            }
            None => {}
        }
        if indented && !verbatim {
            roff.control("nf", []);
            verbatim = true;
        }
        if line.is_empty() {
            roff.control("PP", []);
        } else {
            roff.text([roman(line.strip_prefix("  ").unwrap_or(line))]);
        }
    }
    if verbatim {
        roff.control("fi", []);
    }
}

/// Returns the section name if the line is a heading such as `EXAMPLES:`.
fn heading(line: &str) -> Option<&str> {
    let name = line.strip_suffix(':')?;
    let capitals = |c: char| c.is_ascii_uppercase() || c == ' ';
    (!name.is_empty() && name.chars().all(capitals)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory as _;

    #[test]
    fn each_subcommand_has_a_page() {
        let pages = pages(Cli::command()).unwrap();
        let files: Vec<&str> = pages.iter().map(|page| page.file.as_str()).collect();
        let mut expected = vec!["iwarp.1".to_owned()];
        let visible = Cli::command();
        let visible = visible.get_subcommands().filter(|s| !s.is_hide_set());
        expected.extend(visible.map(|s| format!("iwarp-{}.1", s.get_name())));
        for file in &expected {
            assert!(files.contains(&file.as_str()), "{file} is not in {files:?}");
        }
        assert!(files.contains(&"iwarp-perf-serve.1"), "{files:?}");
        assert!(!files.iter().any(|file| file.contains("-man")), "{files:?}");
        for page in &pages {
            let text = String::from_utf8_lossy(&page.text);
            assert!(text.contains(".TH IWARP"), "{}: {text}", page.file);
            assert_eq!(text.contains("\\fBiwarp\\fR(1)"), page.file != "iwarp.1");
        }
    }

    #[test]
    fn each_page_has_forms_and_worked_example() {
        let pages = pages(Cli::command()).unwrap();
        for page in &pages {
            let text = String::from_utf8_lossy(&page.text);
            let name = page.file.trim_end_matches(".1");
            assert!(
                text.contains(".SH \"WORKED EXAMPLE\"\n"),
                "{name}: add it to man/worked.txt"
            );
            assert!(text.contains(".nf\n\\fB$ "), "{name} shows no command");
            assert!(!text.contains("[subcommands]"), "{name}: {text}");
        }
        let names = WORKED.lines().filter_map(|line| line.strip_prefix('['));
        let names: Vec<&str> = names.filter_map(|name| name.strip_suffix(']')).collect();
        for name in &names {
            let file = format!("{name}.1");
            assert!(
                pages.iter().any(|page| page.file == file),
                "there is no page {name}"
            );
        }
    }

    #[test]
    fn synopsis_lists_each_form() {
        let pages = pages(Cli::command()).unwrap();
        let page = |file: &str| {
            let page = pages.iter().find(|page| page.file == file).unwrap();
            let text = String::from_utf8_lossy(&page.text).into_owned();
            let after = text.split(".SH SYNOPSIS\n").nth(1).unwrap().to_owned();
            after.split(".SH ").next().unwrap().to_owned()
        };
        let perf = page("iwarp-perf.1");
        assert_eq!(perf.matches("\\fBiwarp perf").count(), 3, "{perf}");
        assert!(
            perf.contains("\\fBiwarp perf serve \\fR[OPTIONS]"),
            "{perf}"
        );
        assert_eq!(page("iwarp-cp.1").matches("\\fBiwarp cp").count(), 3);
        assert_eq!(page("iwarp-ping.1").matches("\\fBiwarp ping").count(), 2);
        assert!(page("iwarp-run.1").contains("PROGRAM"));
    }

    #[test]
    fn headings_become_sections() {
        let mut roff = Roff::new();
        sections(
            &mut roff,
            "About it:\nMore.\n\nEXAMPLES:\n  iwarp a\n    .b\n\nLast words: two.",
        );
        let text = roff.render();
        let start = text.find(".SH NOTES").unwrap();
        assert_eq!(
            &text[start..],
            ".SH NOTES\nAbout it:\nMore.\n.PP\n.SH EXAMPLES\n.nf\niwarp a\n  .b\n.PP\n.fi\n\
             Last words: two.\n"
        );
    }
}
