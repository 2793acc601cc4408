//! `cargo xtask site`: builds the site from the documents with mdBook, and checks its links.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use xtask::context::{Context, find_program};
use xtask::documents::{self, Copies};
use xtask::files;
use xtask::process::run;

/// Documents outside of `docs/` that the site contains. The first one is its front page.
const OTHERS: [&str; 6] = [
    "README.md",
    "ARCHITECTURE.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "RELEASING.md",
    "CHANGELOG.md",
];
/// The table of contents.
const CONTENTS: &str = "docs/SUMMARY.md";
/// The configuration of mdBook.
const CONFIGURATION: &str = "docs/book.toml";

/// Builds the site in `target/site/book`.
///
/// # Errors
/// If mdBook is not installed or fails, or if a link of the site leads nowhere.
pub(crate) fn command() -> Result<bool> {
    let context = Context::new(false, false)?;
    let mdbook = find_program("mdbook").context("mdbook is not installed: cargo install mdbook")?;
    let folder = context.target.join("site");
    let _ = fs::remove_dir_all(&folder);
    prepare(&context.root, &folder)?;
    run(Command::new(mdbook).arg("build").arg(&folder))?;
    let pages = check(&folder.join("book"))?;
    println!(
        "{}: {pages} pages, all links work",
        folder.join("book").display()
    );
    Ok(true)
}

/// Copies the documents to `folder/src`, with links that work there.
fn prepare(root: &Path, folder: &Path) -> Result<()> {
    let source = folder.join("src");
    let copies = copies(root)?;
    // mdBook makes the table of contents a part of each page, and no page of its own.
    let mut pages = copies.clone();
    pages.remove(CONTENTS);
    let site = documents::site(root)?;
    for (from, to) in &copies {
        let path = source.join(to);
        fs::create_dir_all(path.parent().unwrap_or(&source))?;
        let mut text = files::read(root, from)?;
        if from.ends_with(".md") {
            let known = if from == CONTENTS { &copies } else { &pages };
            text = documents::relinked(from, &text, known, &site);
        }
        if from == CONTENTS {
            text = text.replacen("# Contents\n", "# Contents\n\n[iwarp](index.md)\n", 1);
        }
        fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    fs::write(folder.join("book.toml"), files::read(root, CONFIGURATION)?)?;
    Ok(())
}

/// Returns the documents and pictures of the site: those of `docs/`, at the top of the site.
fn copies(root: &Path) -> Result<Copies> {
    let mut copies = Copies::new();
    for file in documents::published(root)? {
        let to = page(file.trim_start_matches("docs/"));
        copies.insert(file, to);
    }
    for file in OTHERS {
        copies.insert(file.to_owned(), page(file));
    }
    let names: BTreeSet<&String> = copies.values().collect();
    ensure!(
        names.len() == copies.len(),
        "two documents have the same name on the site"
    );
    Ok(copies)
}

/// Returns the path on the site. mdBook would rename a `README.md`, but not the links to it.
fn page(file: &str) -> String {
    match file.strip_suffix("README.md") {
        Some(folder) => format!("{folder}index.md"),
        None => file.to_owned(),
    }
}

/// Checks that each link inside the site leads to a file, and to an element with that name. Returns
/// the number of pages.
fn check(book: &Path) -> Result<usize> {
    let mut pages = Vec::new();
    collect(book, &mut pages)?;
    let mut dead = Vec::new();
    for page in &pages {
        let text = fs::read_to_string(page)?;
        for link in attributes(&text, "href").chain(attributes(&text, "src")) {
            if let Some(why) = defect(page, link)? {
                dead.push(format!("{}: {why}", page.display()));
            }
        }
    }
    ensure!(!pages.is_empty(), "mdBook has written no pages");
    if !dead.is_empty() {
        bail!("{}", dead.join("\n"));
    }
    Ok(pages.len())
}

fn collect(folder: &Path, pages: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, pages)?;
        // The error page has links relative to the site's root.
        } else if path.extension().is_some_and(|end| end == "html") && !path.ends_with("404.html") {
            pages.push(path);
        }
    }
    Ok(())
}

/// Returns the values of an attribute.
fn attributes<'a>(text: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let parts = text
        .split(&format!(" {name}=\""))
        .skip(1)
        .collect::<Vec<_>>();
    parts.into_iter().filter_map(|rest| rest.split('"').next())
}

/// Returns what is wrong with a link of a page, if anything.
fn defect(page: &Path, link: &str) -> Result<Option<String>> {
    let (path, fragment) = link.split_once('#').unwrap_or((link, ""));
    if path.contains(':') {
        return Ok(None);
    }
    let target = match path {
        "" => page.to_owned(),
        _ => page.parent().unwrap_or(page).join(path),
    };
    if !target.exists() {
        return Ok(Some(format!("there is no {link}")));
    }
    let is_page = target.extension().is_some_and(|end| end == "html");
    if fragment.is_empty() || !is_page {
        return Ok(None);
    }
    let text = fs::read_to_string(&target)?;
    let missing = !text.contains(&format!("id=\"{fragment}\""));
    Ok(missing.then(|| format!("there is no element {link}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The links of the site are checked without mdBook: those of the copies are links between
    /// Markdown files.
    #[test]
    fn copied_documents_have_no_dead_links() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let folder = std::env::temp_dir().join(format!("xtask-site-{}", std::process::id()));
        prepare(&root, &folder).unwrap();
        let source = folder.join("src");
        let mut dead = Vec::new();
        for copy in copies(&root)
            .unwrap()
            .values()
            .filter(|copy| copy.ends_with(".md"))
        {
            let text = fs::read_to_string(source.join(copy)).unwrap();
            assert!(
                !text.contains("](SUMMARY.md)"),
                "{copy} links to the table of contents"
            );
            let found = documents::dead_links(&source, copy, &text).unwrap();
            dead.extend(
                found
                    .into_iter()
                    .map(|(line, what)| format!("{copy}:{line}: {what}")),
            );
        }
        fs::remove_dir_all(&folder).unwrap();
        assert!(dead.is_empty(), "{dead:?}");
    }

    #[test]
    fn dead_links_of_pages_are_found() {
        let folder = std::env::temp_dir().join(format!("xtask-pages-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let page = |text: &str| {
            fs::write(folder.join("a.html"), text).unwrap();
            check(&folder)
        };
        let good = "<h1 id=\"x\"></h1><a href=\"a.html#x\"><a href=\"#x\"><a href=\"https://b.c\">";
        assert_eq!(page(good).unwrap(), 1);
        for bad in [
            "<a href=\"b.html\">",
            "<img src=\"c.svg\">",
            "<a href=\"a.html#y\">",
        ] {
            assert!(page(bad).is_err(), "{bad}");
        }
        fs::remove_dir_all(&folder).unwrap();
    }
}
