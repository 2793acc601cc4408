//! `iwarp man DIR`: writes a manual page for the command and for each subcommand.
//!
//! Hidden, because only packages and `cargo xtask install` call it. The pages come from the same
//! definitions as `--help`; headings in a help text (`EXAMPLES:`) become sections of the page.

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
    man.render_synopsis_section(&mut out)?;
    man.render_description_section(&mut out)?;
    man.render_options_section(&mut out)?;
    if command.get_subcommands().any(|s| !s.is_hide_set()) {
        man.render_subcommands_section(&mut out)?;
    }
    let mut rest = Roff::new();
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
            .collect::<Vec<_>>(),
    );
    rest.to_writer(&mut out)?;
    Ok(out)
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
    fn headings_become_sections() {
        let mut roff = Roff::new();
        sections(
            &mut roff,
            "About it.\nMore.\n\nEXAMPLES:\n  iwarp a\n    .b\n\nLast words: two.",
        );
        let text = roff.render();
        let start = text.find(".SH NOTES").unwrap();
        assert_eq!(
            &text[start..],
            ".SH NOTES\nAbout it.\nMore.\n.PP\n.SH EXAMPLES\n.nf\niwarp a\n  .b\n.PP\n.fi\n\
             Last words: two.\n"
        );
    }
}
