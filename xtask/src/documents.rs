//! The links of the documents, in the repository and where the documents are copied to.
//!
//! The Debian package and the site contain some of the repository's files, in other folders. A link
//! to a file that is copied, too, leads to the copy; all other links lead to the repository's site.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, Result};

use crate::files;

/// The files that are copied: the path in the repository, and the path of the copy.
pub type Copies = BTreeMap<String, String>;

/// Returns the links of a Markdown document, without those in code blocks: the places of their
/// targets. They are the targets of inline links and pictures, and the attributes `href`, `src` and
/// `srcset` of HTML.
#[must_use]
pub fn links(text: &str) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let (mut at, mut fenced) = (0, false);
    for line in text.split_inclusive('\n') {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            for (start, end) in [
                ("](", ')'),
                ("href=\"", '"'),
                ("src=\"", '"'),
                ("srcset=\"", '"'),
            ] {
                let starts = line
                    .match_indices(start)
                    .map(|(place, _)| place + start.len());
                found.extend(starts.filter_map(|from| {
                    let length = line[from..].find([end, ' '])?;
                    (length > 0).then_some(at + from..at + from + length)
                }));
            }
        }
        at += line.len();
    }
    found.sort_by_key(|range| range.start);
    found
}

/// Returns the path in the repository to which a link of `file` leads, and the part after `#`.
/// Returns `None` for links to other sites.
#[must_use]
pub fn target<'a>(file: &str, link: &'a str) -> Option<(String, &'a str)> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, fragment) = link.split_once('#').unwrap_or((link, ""));
    if path.is_empty() {
        return Some((file.to_owned(), fragment));
    }
    let mut parts: Vec<&str> = file.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => drop(parts.pop()),
            other => parts.push(other),
        }
    }
    Some((parts.join("/"), fragment))
}

/// Returns the text of a copied document with links that work there. `site` is the address at which
/// the repository's files can be read.
#[must_use]
pub fn relinked(file: &str, text: &str, copies: &Copies, site: &str) -> String {
    let own = copies.get(file).map_or(file, String::as_str);
    let mut out = String::new();
    let mut done = 0;
    for place in links(text) {
        let link = &text[place.clone()];
        let Some((path, fragment)) = target(file, link) else {
            continue;
        };
        if path == file {
            continue;
        }
        out += &text[done..place.start];
        match copies.get(&path) {
            Some(copy) => out += &relative(own, copy),
            None => out += &format!("{site}/{path}"),
        }
        if !fragment.is_empty() {
            out += &format!("#{fragment}");
        }
        done = place.end;
    }
    out + &text[done..]
}

/// Returns the path of `to` relative to the folder of `from`.
fn relative(from: &str, to: &str) -> String {
    let folder: Vec<&str> = from.split('/').collect();
    let folder = &folder[..folder.len() - 1];
    let parts: Vec<&str> = to.split('/').collect();
    let common = folder
        .iter()
        .zip(&parts)
        .take_while(|(a, b)| a == b)
        .count();
    let mut out = vec![".."; folder.len() - common];
    out.extend(&parts[common..]);
    out.join("/")
}

/// Returns the fragments by which links may refer to the headings of a document, as GitHub and
/// mdBook form them.
#[must_use]
pub fn fragments(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        if fenced || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let name = fragment(heading.trim());
        let same = |known: &&String| {
            let number = known
                .strip_prefix(&name)
                .map(|rest| rest.trim_start_matches('-'));
            number.is_some_and(|n| n.chars().all(|c| c.is_ascii_digit()))
        };
        let count = found.iter().filter(same).count();
        found.push(if count == 0 {
            name
        } else {
            format!("{name}-{count}")
        });
    }
    found
}

fn fragment(heading: &str) -> String {
    // The text of a link counts, and its target does not.
    let mut text = String::new();
    let mut rest = heading;
    while let Some((before, after)) = rest.split_once("](") {
        text += before;
        rest = after.split_once(')').map_or("", |(_, after)| after);
    }
    text += rest;
    let kept = text
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.flat_map(char::to_lowercase)
        .map(|c| if c == ' ' { '-' } else { c })
        .collect()
}

/// Returns the defects of a document's links: targets that do not exist, in `root`, the folder that
/// contains `file`.
///
/// # Errors
/// If a document cannot be read.
pub fn dead_links(root: &Path, file: &str, text: &str) -> Result<Vec<(usize, String)>> {
    let mut found = Vec::new();
    for place in links(text) {
        let link = &text[place.clone()];
        let line = text[..place.start].lines().count().max(1);
        let Some((path, fragment)) = target(file, link) else {
            continue;
        };
        if !root.join(&path).exists() {
            found.push((line, format!("there is no file {link}")));
        } else if !fragment.is_empty() && path.ends_with(".md") {
            let other = fs::read_to_string(root.join(&path)).context(path)?;
            if !fragments(&other).iter().any(|known| known == fragment) {
                found.push((line, format!("there is no heading {link}")));
            }
        }
    }
    Ok(found)
}

/// Returns the documents and pictures below `docs/`, relative to the root.
///
/// # Errors
/// If git cannot list the files.
pub fn published(root: &Path) -> Result<Vec<String>> {
    let mut all = files::listed(root)?;
    let known = [".md", ".svg"];
    all.retain(|file| file.starts_with("docs/") && known.iter().any(|end| file.ends_with(end)));
    Ok(all)
}

/// Documents outside of `docs/` that packages contain.
const OTHERS: [&str; 3] = ["README.md", "SECURITY.md", "ARCHITECTURE.md"];
/// The folder of the programs to which the documents refer.
const EXAMPLES: &str = "examples/";

/// Copies the documents and the examples of a package into a folder, with links that work there.
/// Returns their paths in the folder.
///
/// # Errors
/// If a file cannot be read or written.
pub fn install(root: &Path, folder: &Path) -> Result<Vec<String>> {
    let mut all = published(root)?;
    all.extend(OTHERS.map(str::to_owned));
    let examples = files::listed(root)?;
    all.extend(examples.into_iter().filter(|file| {
        // The Rust programs are members of the repository's workspace.
        file.starts_with(EXAMPLES) && !file.contains("/rust/") && !file.contains("/.")
    }));
    let copies: Copies = all.into_iter().map(|file| (file.clone(), file)).collect();
    let site = site(root)?;
    for file in copies.keys() {
        let path = folder.join(file);
        fs::create_dir_all(path.parent().unwrap_or(folder))?;
        let mut text = files::read(root, file)?;
        if file.ends_with(".md") {
            text = relinked(file, &text, &copies, &site);
        }
        fs::write(&path, text).with_context(|| path.display().to_string())?;
    }
    Ok(copies.into_keys().collect())
}

/// Returns the dead links of all documents below a folder that [`install`] has filled.
///
/// # Errors
/// If a document cannot be read.
pub fn dead_links_below(folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut pending = vec![folder.to_owned()];
    while let Some(next) = pending.pop() {
        for entry in fs::read_dir(&next)? {
            let path = entry?.path();
            let name = path
                .strip_prefix(folder)
                .unwrap_or(&path)
                .to_string_lossy()
                .into_owned();
            if path.is_dir() {
                pending.push(path);
            } else if name.ends_with(".md") {
                let text = fs::read_to_string(&path)?;
                let dead = dead_links(folder, &name, &text)?;
                found.extend(
                    dead.into_iter()
                        .map(|(line, what)| format!("{name}:{line}: {what}")),
                );
            }
        }
    }
    Ok(found)
}

/// Returns the address at which a file of the repository can be read, without its path.
///
/// # Errors
/// If the workspace's manifest names no repository.
pub fn site(root: &Path) -> Result<String> {
    let manifest = files::read(root, "Cargo.toml")?;
    let line = manifest
        .lines()
        .find_map(|line| line.strip_prefix("repository = \""));
    let address = line.and_then(|rest| rest.strip_suffix('"'));
    Ok(format!(
        "{}/blob/HEAD",
        address.context("Cargo.toml has no repository")?
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copies(pairs: &[(&str, &str)]) -> Copies {
        let owned = pairs
            .iter()
            .map(|(a, b)| ((*a).to_owned(), (*b).to_owned()));
        owned.collect()
    }

    #[test]
    fn links_and_pictures_are_found() {
        let text = "[a](x.md \"t\") ![b](y.svg)\n```\n[c](z)\n```\n<img src=\"p.svg\" alt=\"q\">\n";
        let found: Vec<&str> = links(text).into_iter().map(|place| &text[place]).collect();
        assert_eq!(found, ["x.md", "y.svg", "p.svg"]);
    }

    #[test]
    fn targets_are_resolved() {
        let path = |link| target("docs/learn/a.md", link).map(|(path, _)| path);
        assert_eq!(path("b.md#c").as_deref(), Some("docs/learn/b.md"));
        assert_eq!(path("../../README.md").as_deref(), Some("README.md"));
        assert_eq!(path("#here").as_deref(), Some("docs/learn/a.md"));
        assert_eq!(path("https://example.org/x"), None);
    }

    #[test]
    fn copied_documents_link_to_copies() {
        let text = "[a](../b.md#x) [c](../../crates/d.rs) [e](#f) [g](https://example.org)";
        let known = copies(&[("docs/learn/a.md", "learn/a.md"), ("docs/b.md", "b.md")]);
        assert_eq!(
            relinked("docs/learn/a.md", text, &known, "https://site"),
            "[a](../b.md#x) [c](https://site/crates/d.rs) [e](#f) [g](https://example.org)"
        );
        let moved = copies(&[("README.md", "README.md"), ("docs/b.md", "b.md")]);
        assert_eq!(
            relinked("README.md", "[b](docs/b.md)", &moved, ""),
            "[b](b.md)"
        );
    }

    #[test]
    fn headings_have_fragments() {
        let text = "# A `b`, c: d?\n```\n# no\n```\n## Same\n## Same\n#no\n## [x](y.md) z\n";
        assert_eq!(fragments(text), ["a-b-c-d", "same", "same-1", "x-z"]);
    }

    #[test]
    fn installed_documents_have_no_dead_links() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let folder = std::env::temp_dir().join(format!("xtask-documents-{}", std::process::id()));
        install(&root, &folder).unwrap();
        assert_eq!(dead_links_below(&folder).unwrap(), Vec::<String>::new());
        fs::remove_file(folder.join("docs/glossary.md")).unwrap();
        assert!(dead_links_below(&folder).unwrap().len() > 10);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn dead_links_are_named() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let check = |text| dead_links(&root, "docs/x.md", text).unwrap().len();
        assert_eq!(
            check("[a](glossary.md) [b](../README.md#install) [c](mailto:a@b.c)"),
            0
        );
        assert_eq!(check("[a](nowhere.md)"), 1);
        assert_eq!(check("<img src=\"nowhere.svg\">"), 1);
        assert_eq!(check("[a](../README.md#no-such-heading)"), 1);
    }
}
